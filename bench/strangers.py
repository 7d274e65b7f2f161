"""
What a stranger can do to a relay, each as a function that runs in a process of its own until it is killed.

Plain blocking sockets and frames made beforehand, so that one process sends as fast as the relay reads. Who
is closed comes back at once, as somebody who means harm would.
"""

import os
import socket
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import count

from relay.wire.frames import HEADER, MAGIC, VERSION, Frame, FrameType
from relay.wire.messages import Failure, Hello, Offer, Pause
from relay.wire.pieces import pieces

UPGRADE = (
    b"GET /v1/session HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)
NUMBERS = count(1)


def message(data: bytes) -> bytes:
    """One binary WebSocket message; the mask is 0, so that the payload stands as it is."""
    length = len(data)
    if length < 126:
        head = struct.pack("!BB", 0x82, 0x80 | length)
    elif length < 1 << 16:
        head = struct.pack("!BBH", 0x82, 0xFE, length)
    else:
        head = struct.pack("!BBQ", 0x82, 0xFF, length)
    return head + bytes(4) + data


def raw(kind: FrameType, payload: bytes, *fields: int) -> bytes:
    """A frame that our own encoder might refuse, in the messages it travels in."""
    peer, call_id, epoch = fields or (0, 0, 0)
    frame = HEADER.pack(MAGIC, VERSION, kind, 0, 0, len(payload), peer, call_id, epoch, 0) + payload
    return b"".join(map(message, pieces(frame)))


def said(what: Hello | Offer | Pause) -> bytes:
    return message(Frame(what.TYPE, what.to_payload()).encode())


def dial(port: int) -> socket.socket:
    made = socket.create_connection(("127.0.0.1", port), 5)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return made


def upgraded(port: int) -> socket.socket:
    made = dial(port)
    made.sendall(UPGRADE)
    made.recv(4096)
    return made


def name() -> str:
    return f"{os.getpid():016x}{next(NUMBERS):016x}"


def node(port: int, memory_bytes: int = 0) -> socket.socket:
    """A stranger that offered itself."""
    made = upgraded(port)
    made.sendall(said(Hello("node", name(), "2" * 32)))
    made.recv(4096)
    made.sendall(said(Offer("bench", memory_bytes, 1.0, None, False, "stranger")))
    return made


def again(attack: Callable[[], None]) -> None:
    """Do it for ever, whatever the relay says."""
    while True:
        with suppress(OSError):
            attack()
        time.sleep(0.001)


def sends(port: int, data: bytes, every_s: float = 0.0) -> None:
    """As a node: send this for ever, as fast as it is taken or each so often."""

    def attack() -> None:
        with node(port) as made:
            while True:
                made.sendall(data)
                time.sleep(every_s)

    again(attack)


def small_failures(port: int) -> None:
    sends(port, raw(FrameType.FAILURE, b"", 1, 1, 1) * 2000)


def long_failures(port: int) -> None:
    sends(
        port, raw(FrameType.FAILURE, Failure("gone", "x" * 400, "queue").to_payload().ljust(16_000), 1, 1, 1)
    )


def echoes(port: int) -> None:
    sends(port, raw(FrameType.ECHO, bytes(200_000), 1, 1, 1))


def partials(port: int) -> None:
    sends(port, raw(FrameType.PARTIAL, bytes(15_000_000), 1, 1, 1))


def large_offers(port: int) -> None:
    offer = Offer("bench", 0, 1.0, None, False, "stranger", tuple(f"{n:064x}" for n in range(190_000)))
    sends(port, raw(FrameType.OFFER, offer.to_payload()), 1.0)


def longest_offers(port: int) -> None:
    """The longest that are taken."""
    offer = Offer("bench", 0, 1.0, None, False, "stranger", tuple(f"{n:064x}" for n in range(16_000)))
    sends(port, raw(FrameType.OFFER, offer.to_payload()))


def brackets(port: int) -> None:
    sends(port, raw(FrameType.OFFER, b'{"x":[' + b"[]," * 400_000 + b"[]]}"))


def pauses(port: int) -> None:
    sends(port, said(Pause(True)) + said(Pause(False)), 0.02)


def web_socket_pings(port: int) -> None:
    sends(port, (b"\x89\x80" + bytes(4)) * 10_000)


def handshakes(port: int) -> None:
    again(lambda: upgraded(port).close())


def hellos(port: int) -> None:
    def attack() -> None:
        with upgraded(port) as made:
            made.sendall(said(Hello("node", name(), "2" * 32)))
            made.recv(4096)

    again(attack)


def tokens(port: int) -> None:
    def attack() -> None:
        with upgraded(port) as made:
            made.sendall(said(Hello("backbone", name(), "2" * 32, "a guess")))
            made.recv(4096)

    again(attack)


def joins(port: int) -> None:
    """Come and go as a node with memory: each time, who holds what is worked out anew."""

    def attack() -> None:
        with node(port, 240 << 10):
            time.sleep(0.04)

    again(attack)


def _hold(port: int, how_many: int, first: bytes) -> None:
    held: list[socket.socket] = []
    while True:
        with suppress(OSError):
            made = dial(port)
            made.sendall(first)
            held.append(made)
        if len(held) >= how_many:
            held.pop(0).close()
            time.sleep(0.005)


def idle_connections(port: int) -> None:
    _hold(port, 1500, b"")


def half_sent_requests(port: int) -> None:
    _hold(port, 1500, UPGRADE[:-2])


def unfinished_messages(port: int) -> None:
    held = []
    for _ in range(300):
        with suppress(OSError):
            made = node(port)
            made.settimeout(0.5)
            held.append(made)
            made.sendall(raw(FrameType.OFFER, b" " * 1_200_000)[:-10])
    time.sleep(3600)


def unread_answers(port: int) -> None:
    """Ask for pages and read none of them."""
    request = b"GET /status.json HTTP/1.1\r\nHost: x\r\n\r\n"
    _hold(port, 500, request * 50)


ATTACKS: dict[str, Callable[[int], None]] = {
    "32-byte Failures": small_failures,
    "16 KB Failures": long_failures,
    "200 KB Echoes": echoes,
    "15 MB Partials": partials,
    "13 MB Offers, one a second": large_offers,
    "the longest Offers taken": longest_offers,
    "1.2 MB of []": brackets,
    "Pause 100 times a second": pauses,
    "WebSocket pings": web_socket_pings,
    "handshakes in a loop": handshakes,
    "Hellos in a loop": hellos,
    "wrong tokens in a loop": tokens,
    "joining and leaving": joins,
    "1,500 idle connections": idle_connections,
    "1,500 half-sent requests": half_sent_requests,
    "300 unfinished messages": unfinished_messages,
    "500 that read no answer": unread_answers,
}
