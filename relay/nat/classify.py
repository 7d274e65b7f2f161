"""
Find out how the NAT in front of this machine behaves, by asking a relay's STUN server (RFC 5780 §4.3, §4.4).

    kind = await classify("203.0.113.1", 3478, 3479)

All is asked at once. A friendly NAT lets the answers through within two round trips; with a strict one the
proof is an answer that does not come, which takes about a second. Who only wants to know whether a punch is
hopeless need not wait for that: `on_seen` hears what is known so far.
"""

import asyncio
import os
import socket
from collections.abc import Callable
from dataclasses import replace
from time import monotonic
from typing import Any

from relay.nat.candidates import NatClass, Observation, nat_class
from relay.nat.stun import CHANGE_IP, CHANGE_PORT, MAX_DATAGRAM_BYTES, Address, Kind, Message, Transaction

ALL = frozenset(
    (
        "mapped",
        "mapped_other_port",
        "mapped_other_address",
        "answered_from_other_address",
        "answered_from_other_port",
    )
)

type OnSeen = Callable[[Observation], None]


async def classify(
    host: str, port: int, alternate_port: int | None = None, on_seen: OnSeen = lambda seen: None
) -> NatClass:
    """
    Classify the way from here to that server.

    The server's second address, if it has one, is learnt from its answer; with one address its second port is
    taken to be the next, as it is by default. Does not raise for networks that
    are down or names that do not resolve: that is "no UDP".
    """
    return nat_class(await observe(host, port, alternate_port, on_seen))


async def observe(
    host: str, port: int, alternate_port: int | None = None, on_seen: OnSeen = lambda seen: None
) -> Observation:
    """
    Ask all questions; the two filtering ones from a socket that has sent nothing to other addresses.

    on_seen: called after each answer, and each one that did not come, with all that is known by then.
    """
    try:
        resolved = await asyncio.get_running_loop().getaddrinfo(
            host, port, type=socket.SOCK_DGRAM, family=socket.AF_UNSPEC
        )
        server: Address = str(resolved[0][4][0]), port
        family = resolved[0][0]
        with _Asker(family) as mapping, _Asker(family) as filtering:
            seen = Observation((_local_address(family, server), mapping.port), None, waiting=ALL)

            def note(name: str, value: Address | bool | None) -> None:
                nonlocal seen
                found: dict[str, Any] = {name: value, "waiting": seen.waiting - {name}}
                seen = replace(seen, **found)
                on_seen(seen)

            async def ask_mapping() -> None:
                asked_at = monotonic()
                first = await mapping.ask(server)
                if first is None or first.mapped is None:
                    return
                filtering.round_trip(monotonic() - asked_at)
                mapping.round_trip(monotonic() - asked_at)
                note("mapped", first.mapped)
                other = first.other
                second_port = (server[0], other[1] if other else alternate_port or port + 1)
                await asyncio.gather(
                    ask_mapped("mapped_other_port", second_port),
                    ask_mapped("mapped_other_address", (other[0], port) if other else None),
                )

            async def ask_mapped(name: str, address: Address | None) -> None:
                answer = None if address is None else await mapping.ask(address)
                note(name, None if answer is None else answer.mapped)

            async def ask_filtering(name: str, change: int) -> None:
                note(name, _came(await filtering.ask(server, change)))

            await asyncio.gather(
                ask_mapping(),
                ask_filtering("answered_from_other_address", CHANGE_IP | CHANGE_PORT),
                ask_filtering("answered_from_other_port", CHANGE_PORT),
            )
    except OSError:
        return Observation(("", 0), None)
    return Observation(("", 0), None) if seen.mapped is None else seen


def _came(answer: Message | None) -> bool | None:
    """An answer came through, none came, or the server refused: it cannot answer from there."""
    return False if answer is None else True if answer.kind is Kind.SUCCESS else None


def _local_address(family: int, server: Address) -> str:
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(server)
        return str(probe.getsockname()[0])


class _Asker:
    """One UDP socket and the transactions on it."""

    def __init__(self, family: int) -> None:
        self._socket = socket.socket(family, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._socket.bind(("", 0))
        self._round_trip_s: float | None = None
        self._open: dict[bytes, tuple[Transaction, asyncio.Event]] = {}

    @property
    def port(self) -> int:
        return int(self._socket.getsockname()[1])

    def __enter__(self) -> "_Asker":
        asyncio.get_running_loop().add_reader(self._socket.fileno(), self._readable)
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.get_running_loop().remove_reader(self._socket.fileno())
        self._socket.close()

    async def ask(self, server: Address, change: int = 0) -> Message | None:
        """Return the answer, or None when none came."""
        transaction = Transaction(os.urandom(12), monotonic(), change)
        if self._round_trip_s is not None:
            transaction.round_trip(self._round_trip_s)
        stirred = asyncio.Event()
        self._open[transaction.transaction_id] = transaction, stirred
        while (due := transaction.next_timer()) is not None:
            now = monotonic()
            try:
                await asyncio.wait_for(stirred.wait(), max(0.0, due - now))
                now = monotonic()
            except TimeoutError:
                now = max(due, monotonic())  # a loop's clock may wake a little early
            stirred.clear()
            request = transaction.handle_timer(now)
            if request is not None:
                self._send(request, server)
        del self._open[transaction.transaction_id]
        return transaction.answer

    def round_trip(self, took_s: float) -> None:
        """The server was heard after so long: repeat at that pace what is open and what comes."""
        self._round_trip_s = took_s
        for transaction, stirred in self._open.values():
            transaction.round_trip(took_s)
            stirred.set()

    def _send(self, request: bytes, server: Address) -> None:
        try:
            self._socket.sendto(request, server)
        except OSError:
            return  # no route, or an ICMP error for an earlier one: the same as no answer

    def _readable(self) -> None:
        while True:
            try:
                data = self._socket.recv(MAX_DATAGRAM_BYTES)
            except BlockingIOError:
                return
            except OSError:
                continue
            for transaction, stirred in self._open.values():
                if transaction.receive_datagram(data):
                    stirred.set()
