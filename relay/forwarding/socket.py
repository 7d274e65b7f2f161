"""
One WebSocket of the relay, whose messages are handled in the turn of the event loop that brings them.

Stands on the sans-I/O protocol of `websockets`
(https://websockets.readthedocs.io/en/stable/howto/sansio.html). Uvicorn hands over a connection whose HTTP
request asks for an upgrade. Its own WebSocket would put a queue and a task switch between the socket and us,
and neither limits what a stranger may send nor lets go of a peer that reads nothing.
"""

import asyncio
import logging
import socket
from contextlib import suppress
from time import monotonic
from typing import Any, Protocol, cast

from websockets.frames import Frame, Opcode
from websockets.http11 import Request
from websockets.protocol import State
from websockets.server import ServerProtocol

from relay.admission import address_of
from relay.bucket import Bucket
from relay.door import Places
from relay.forwarding.turns import Inlet, Turns
from relay.wire.close import CloseCode, clip_reason
from relay.wire.frames import MAX_MESSAGE_BYTES

SESSION_PATH = "/v1/session"
CLOSE_TIMEOUT_S = 2.0  # a peer that takes nothing does not learn why it is closed
STRANGER_BYTES = 64 << 10  # what may come before the session is greeted: one Hello and its HTTP request
SPARE_BYTES = 1024  # a frame a little too long is refused by name, not by the library
READ_BYTES = MAX_MESSAGE_BYTES + SPARE_BYTES
PINGS = (5.0, 50.0)  # of the WebSocket layer, a second and at once: each is answered, read or not
LATE_BYTES = 64 << 10  # read of who was told to go, to find its goodbye
_log = logging.getLogger(__name__)
_log.setLevel(logging.WARNING)  # two lines a connection, strangers' too, are not for people
# What the kernel may hold unsent: what is queued there, nothing can overtake any more.
UNSENT_BYTES = 32 << 10
ABNORMAL = 1006  # RFC 6455 section 7.1.5


class Owner(Protocol):
    """Who hears of the socket (Connection). No call may block or raise."""

    greeted: bool

    def received(self, data: bytes | str) -> None: ...
    def writable(self) -> None: ...
    def lost(self, code: int, reason: str) -> None: ...


class Host(Protocol):
    """Who takes new sockets (Hub)."""

    turns: Turns
    places: Places

    def opened(self, socket: "ServerSocket") -> Owner: ...


class ServerSocket(asyncio.Protocol):
    """Subclass with `host` set: uvicorn wants a class, and makes one object per connection."""

    host: Host

    def __init__(self, config: Any, server_state: Any, app_state: Any, _loop: Any = None) -> None:
        self.full = False  # the network takes no more at the moment
        self._protocol = ServerProtocol(max_size=READ_BYTES, logger=_log)  # no extensions: no compression
        self._siblings: set[Any] = server_state.connections  # uvicorn waits for them when it stops
        self._transport: asyncio.Transport
        self._owner: Owner | None = None
        self._inlet = Inlet(self.host.turns, self._received, self._read)
        self._parts: list[bytes] = []
        self._text = False
        self._pings = Bucket(*PINGS, monotonic())
        self._late_bytes = 0
        self._address = ""
        self._received_bytes = 0
        self._moved_bytes = 0  # see `Session.moved`
        self._stuck_bytes = 0  # while full: what the network has not taken
        self._timer: asyncio.TimerHandle | None = None

    # -- for the owner

    @property
    def reached_at(self) -> str:
        """The IP address that the connection came to; empty where that is unknown."""
        name = self._transport.get_extra_info("sockname")
        return str(name[0]) if isinstance(name, tuple) else ""

    @property
    def moved_bytes(self) -> int:
        """What came, and what left after it had to wait: see `Session.moved`."""
        return self._moved_bytes

    def send(self, data: bytes) -> None:
        """Hand one binary message to the network; ask `full` first. Nothing is written once it closes."""
        if self._protocol.state is State.OPEN:
            self._protocol.send_binary(data)
            self._flush()

    def close(self, code: int, reason: str) -> None:
        """Say goodbye; the connection ends soon after, whatever the peer does."""
        if self._protocol.state is State.OPEN:
            # RFC 6455 section 7.4: not every code may stand in a close frame
            sendable = code in (CloseCode.NORMAL, CloseCode.GOING_AWAY) or 3000 <= code <= 4999
            self._protocol.send_close(code if sendable else CloseCode.NORMAL, clip_reason(reason))
            self._flush()
        self.resume_reading()  # for the peer's close frame
        self._arm()

    def pause_reading(self) -> None:
        """Take no more from the network; of what was taken already, only whole messages still come."""
        self._inlet.hold()

    def resume_reading(self) -> None:
        self._inlet.release()

    def account_of(self, account: Bucket) -> None:
        """From now on this is whose time is spent."""
        self._inlet.account = account

    @property
    def unfinished_bytes(self) -> int:
        """What came of a message that is not whole yet."""
        return len(self._protocol.reader.buffer) + sum(map(len, self._parts))

    @property
    def address(self) -> str:
        """Where the peer is, as the proxy on this machine says, if one stands between; empty: unknown."""
        return self._address

    # -- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's does not inherit from it
        self._transport.set_write_buffer_limits(high=1, low=0)  # TLS transports do not take 0
        sock = transport.get_extra_info("socket")
        if sock is not None and hasattr(socket, "TCP_NOTSENT_LOWAT"):
            with suppress(OSError):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
        self._siblings.add(self)

    def data_received(self, data: bytes) -> None:
        if self._protocol.state is State.CLOSING:
            self._late_bytes += len(data)
            if self._late_bytes > LATE_BYTES:
                self._transport.pause_reading()  # it has its goodbye, and goes when its time is up
                return
        self._moved_bytes += len(data)
        self._inlet.feed(data)

    def _read(self, on: bool) -> None:
        if self._transport.is_closing():
            return
        if on:
            self._transport.resume_reading()
        else:
            self._transport.pause_reading()

    def _received(self, data: bytes) -> None:
        if self._owner is None or not self._owner.greeted:
            self._received_bytes += len(data)
            if self._received_bytes > STRANGER_BYTES:
                self._protocol.fail(CloseCode.MESSAGE_TOO_BIG, "too much before the greeting")
                data = b""
        self._protocol.receive_data(data)
        self._handle()

    def eof_received(self) -> None:
        self._protocol.receive_eof()
        self._handle()

    def connection_lost(self, exc: Exception | None) -> None:
        self._siblings.discard(self)
        self.host.places.closed(self._transport)
        if self._protocol.state is not State.CLOSED:
            self._protocol.receive_eof()
        if self._timer is not None:
            self._timer.cancel()
        self._inlet.close()
        self._lose()

    def pause_writing(self) -> None:
        self.full = True
        self._stuck_bytes = self._transport.get_write_buffer_size()

    def resume_writing(self) -> None:
        self.full = False
        self._moved_bytes += self._stuck_bytes
        if self._owner is not None:
            self._owner.writable()

    def shutdown(self) -> None:
        """Uvicorn stops: whoever is still here has had his goodbye, or gets none."""
        self.close(CloseCode.GOING_AWAY, "")
        self._transport.close()

    # -- inside

    def _handle(self) -> None:
        for event in self._protocol.events_received():
            if isinstance(event, Request):
                self._answer(event)
            elif isinstance(event, Frame):
                self._frame(event)
        self._flush()
        if self._protocol.close_expected():
            self._arm()
        if self._protocol.state is not State.OPEN:
            self._lose()

    def _lose(self) -> None:
        """Tell the owner that this is the end, once; what still comes is nobody's."""
        owner, self._owner = self._owner, None
        if owner is not None:
            sent, received = self._protocol.close_sent, self._protocol.close_rcvd
            close = received or sent
            owner.lost(ABNORMAL if close is None else close.code, "" if close is None else close.reason)

    def _answer(self, request: Request) -> None:
        if request.path.partition("?")[0] != SESSION_PATH:
            self._protocol.send_response(self._protocol.reject(404, f"sessions are at {SESSION_PATH}\n"))
            return
        peer = self._transport.get_extra_info("peername")
        self._address = address_of(peer[0] if isinstance(peer, tuple) else "", request.headers)
        self._protocol.send_response(self._protocol.accept(request))
        if self._protocol.state is State.OPEN:
            self._flush()
            self._owner = self.host.opened(self)

    def _frame(self, frame: Frame) -> None:
        if frame.opcode in (Opcode.TEXT, Opcode.BINARY):
            self._parts = []
            self._text = frame.opcode is Opcode.TEXT
        elif frame.opcode is not Opcode.CONT:
            if frame.opcode is Opcode.PING and not self._pings.take(monotonic()):
                self.close(CloseCode.OVERLOADED, "too many WebSocket pings")
            return  # ping, pong and close: the protocol answers them
        self._parts.append(bytes(frame.data))
        if frame.fin and self._owner is not None:
            data = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
            self._parts = []
            self._owner.received(data.decode("utf-8", "replace") if self._text else data)

    def _flush(self) -> None:
        for data in self._protocol.data_to_send():
            if self._transport.is_closing():
                return
            if data:
                self._transport.write(data)
            elif self._transport.can_write_eof():
                self._transport.write_eof()
            else:
                self._transport.close()

    def _arm(self) -> None:
        """Give the peer a bounded time to take its leave."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(CLOSE_TIMEOUT_S, self._transport.abort)
