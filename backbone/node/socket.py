"""
One client WebSocket whose messages are handled, and answered, in the loop turn that brought them.

`websockets` has a coroutine interface too; every message there passes a queue and a task switch on its way in
and out. A node answers a call per layer and token, so this driver stands directly on the library's sans-I/O
protocol (https://websockets.readthedocs.io/en/stable/howto/sansio.html): no compression, no queue, Nagle off.
"""

import asyncio
import contextlib
import hashlib
import socket as sockets
import ssl
from collections.abc import Callable
from time import monotonic
from typing import cast

from websockets.client import ClientProtocol
from websockets.frames import Frame, Opcode
from websockets.http11 import Response
from websockets.protocol import State
from websockets.uri import parse_uri

from relay.wire.close import clip_reason
from relay.wire.errors import RemoteProtocolError
from relay.wire.frames import MAX_MESSAGE_BYTES
from relay.wire.pieces import Assembler, SendQueue

OPEN_TIMEOUT_S = 10.0
CLOSE_TIMEOUT_S = 2.0
# What the kernel may hold unsent: what is queued there, nothing can overtake any more.
UNSENT_BYTES = 32 << 10
MAX_UNSENT_BYTES = 64 << 20  # replies a relay has not read; beyond this it is not reading at all
ABNORMAL = 1006  # RFC 6455 §7.1.5


def tune(sock: sockets.socket) -> None:
    """
    No Nagle, and a congestion control that does not pace: with BBR 12 KB take 1.5 round trips.

    Before the socket connects or listens: a connection that began with BBR is paced for ever, whatever it is
    switched to (Linux never takes sk_pacing_status back); 12 KB took 1.25 round trips so.
    """
    sock.setsockopt(sockets.IPPROTO_TCP, sockets.TCP_NODELAY, 1)
    if hasattr(sockets, "TCP_CONGESTION"):
        with contextlib.suppress(OSError):  # the kernel has none of that name
            sock.setsockopt(sockets.IPPROTO_TCP, sockets.TCP_CONGESTION, b"cubic")


def keep_short(transport: asyncio.Transport) -> None:
    """Let a connection queue little below us: order is made here, and beats must not wait behind bulk."""
    transport.set_write_buffer_limits(high=1, low=0)  # TLS transports do not take 0
    sock = transport.get_extra_info("socket")
    if sock is not None and hasattr(sockets, "TCP_NOTSENT_LOWAT"):
        with contextlib.suppress(OSError):
            sock.setsockopt(sockets.IPPROTO_TCP, sockets.TCP_NOTSENT_LOWAT, UNSENT_BYTES)


async def connected(host: str, port: int) -> sockets.socket:
    """
    Connect a tuned socket to the first address that answers.

    Raises:
        OSError: none did.
    """
    loop = asyncio.get_running_loop()
    failure = OSError(f"{host} has no address")
    for family, kind, protocol, _, address in await loop.getaddrinfo(host, port, type=sockets.SOCK_STREAM):
        sock = sockets.socket(family, kind, protocol)
        try:
            sock.setblocking(False)
            tune(sock)
            await loop.sock_connect(sock, address)
            return sock
        except OSError as exc:
            sock.close()
            failure = exc
        except BaseException:
            sock.close()
            raise
    raise failure


def certificate_hash(transport: asyncio.BaseTransport) -> str:
    """Give the SHA-256 of the other end's certificate; empty without TLS."""
    over = transport.get_extra_info("ssl_object")
    certificate = None if over is None else over.getpeercert(binary_form=True)
    return "" if certificate is None else hashlib.sha256(certificate).hexdigest()


class ClientSocket(asyncio.Protocol):
    """
    A WebSocket to one URL. `on_open` once, `on_message` per frame, `on_closed(code, reason)` exactly once.

    Frames are whole here; on the wire long ones travel in pieces, and what is short passes between them.
    After `close` or `abort` the owner hears nothing more. `host` is an address to connect to in place of the
    URL's; `fingerprint` the SHA-256 of the only certificate to trust, instead of the authorities.
    """

    def __init__(
        self,
        url: str,
        on_open: Callable[[], None],
        on_message: Callable[[bytes | str], None],
        on_closed: Callable[[int, str], None],
        *,
        host: str | None = None,
        fingerprint: str | None = None,
    ) -> None:
        self._uri = parse_uri(url)
        self._host = host or self._uri.host
        self._fingerprint = fingerprint
        self._protocol = ClientProtocol(
            self._uri, max_size=MAX_MESSAGE_BYTES
        )  # no extensions: no compression
        self._on_open = on_open
        self._on_message = on_message
        self._on_closed: Callable[[int, str], None] | None = on_closed
        self._transport: asyncio.Transport | None = None
        self._parts: list[bytes] = []
        self._text = False
        self._queue = SendQueue()
        self._assembler = Assembler()
        self._full = False  # the network takes no more at the moment
        self._stuck_bytes = 0  # then: what it has not taken
        self._taken_bytes = 0  # of what it had not taken at first
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None
        self.bytes_received = 0
        self.bytes_sent = 0

    def open(self) -> None:
        """Start connecting; success or failure come by the callbacks."""
        self._timer = asyncio.get_running_loop().call_later(OPEN_TIMEOUT_S, self._open_timeout)
        self._task = asyncio.create_task(self._connect())

    @property
    def unsent_bytes(self) -> int:
        """What the network has not yet taken."""
        buffered = 0 if self._transport is None else self._transport.get_write_buffer_size()
        return buffered + self._queue.size_bytes

    @property
    def moved_bytes(self) -> int:
        """What came, and what left after it had to wait: see `Session.moved`."""
        return self.bytes_received + self._taken_bytes

    @property
    def moved(self) -> bool:
        """Whether this machine would reach the other end from another address now, or not at all."""
        if self._transport is None or self._transport.is_closing():
            return False
        here, there = (self._transport.get_extra_info(name) for name in ("sockname", "peername"))
        if not here or not there:
            return False
        with sockets.socket(
            sockets.AF_INET6 if ":" in there[0] else sockets.AF_INET, sockets.SOCK_DGRAM
        ) as s:
            try:
                s.connect(there)  # sends nothing, asks for the route
            except OSError:
                return True
            return bool(s.getsockname()[0] != here[0])

    def send(self, data: bytes) -> None:
        """Send one frame, in its turn; nothing is written once the socket closes."""
        if self._protocol.state is not State.OPEN:
            return
        self._queue.put(data)
        self._drain()
        if self._transport and self.unsent_bytes > MAX_UNSENT_BYTES:
            self._transport.abort()

    def _drain(self, all_of_it: bool = False) -> None:
        while (all_of_it or not self._full) and (message := self._queue.pop()) is not None:
            self._protocol.send_binary(message)
            self._flush()

    def close(self, code: int, reason: str) -> None:
        """Say goodbye; the connection ends by itself soon after."""
        self._on_closed = None
        if self._protocol.state is State.OPEN:
            self._drain(all_of_it=True)
            sayable = code in (1000, 1001) or 3000 <= code < 5000  # peers may have said any number
            self._protocol.send_close(code if sayable else 1000, clip_reason(reason))
            self._flush()
            self._arm(CLOSE_TIMEOUT_S)
        else:
            self.abort()

    def abort(self) -> None:
        """Drop the connection, whatever its state."""
        self._on_closed = None
        if self._task is not None:
            self._task.cancel()
        if self._transport is not None:
            self._transport.abort()
        self._disarm()

    # --- connecting

    async def _connect(self) -> None:
        loop = asyncio.get_running_loop()
        context = ssl.create_default_context() if self._uri.secure else None
        if context is not None and self._fingerprint is not None:
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # it is compared below
        try:
            await loop.create_connection(
                lambda: self,
                sock=await connected(self._host, self._uri.port),
                ssl=context,
                server_hostname=self._uri.host if context is not None else None,
            )
        except (OSError, ssl.SSLError) as exc:
            self._ended(0, f"cannot connect: {exc}")

    def _open_timeout(self) -> None:
        self._ended(0, f"no connection within {OPEN_TIMEOUT_S:g} s")
        self.abort()

    # --- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport = cast(asyncio.Transport, transport)  # uvloop's does not inherit from it
        if self._fingerprint is not None and certificate_hash(transport) != self._fingerprint:
            self._ended(0, "the certificate is not the one whose fingerprint was given")
            transport.abort()
            return
        keep_short(transport)
        self._protocol.send_request(self._protocol.connect())
        self._flush()

    def pause_writing(self) -> None:
        self._full = True
        self._stuck_bytes = 0 if self._transport is None else self._transport.get_write_buffer_size()

    def resume_writing(self) -> None:
        self._full = False
        self._taken_bytes += self._stuck_bytes
        if self._protocol.state is State.OPEN:
            self._drain()

    def data_received(self, data: bytes) -> None:
        self.bytes_received += len(data)
        self._protocol.receive_data(data)
        self._handle()

    def eof_received(self) -> None:
        self._protocol.receive_eof()
        self._handle()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._protocol.state is not State.CLOSED:
            self._protocol.receive_eof()
        self._disarm()
        code = self._protocol.close_code
        self._ended(
            ABNORMAL if code is None else code, self._protocol.close_reason or str(exc or "connection lost")
        )

    # --- both directions

    def _handle(self) -> None:
        for event in self._protocol.events_received():
            if isinstance(event, Response):
                self._opened()
            elif isinstance(event, Frame):
                self._frame(event)
            else:
                self._other_event(event)
        self._flush()
        if self._protocol.close_expected() and self._on_closed is not None:
            self._arm(CLOSE_TIMEOUT_S)

    def _other_event(self, event: object) -> None:
        """For ends that accept."""

    def _opened(self) -> None:
        if self._protocol.handshake_exc is not None:
            self._ended(0, f"no WebSocket here: {self._protocol.handshake_exc}")
            self.abort()
            return
        self._disarm()
        self._on_open()

    def _frame(self, frame: Frame) -> None:
        if frame.opcode in (Opcode.TEXT, Opcode.BINARY):
            self._parts = []
            self._text = frame.opcode is Opcode.TEXT
        elif frame.opcode is not Opcode.CONT:
            return  # ping, pong and close: the protocol answers them
        self._parts.append(bytes(frame.data))
        if frame.fin and self._on_closed is not None:
            data = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
            self._parts = []
            self._message(data.decode("utf-8", "replace") if self._text else data)

    def _message(self, data: bytes | str) -> None:
        try:
            whole = self._assembler.feed(data, monotonic()) if isinstance(data, bytes) else data
        except RemoteProtocolError as exc:
            self._ended(exc.close_code, str(exc))
            self.close(exc.close_code, str(exc))
            return
        if whole is not None:
            self._on_message(whole)

    def _flush(self) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        for data in self._protocol.data_to_send():
            if data:
                self.bytes_sent += len(data)
                self._transport.write(data)
            elif self._transport.can_write_eof():
                self._transport.write_eof()
            else:
                self._transport.close()

    def _ended(self, code: int, reason: str) -> None:
        on_closed, self._on_closed = self._on_closed, None
        if on_closed is not None:
            self._disarm()
            on_closed(code, reason)

    def _arm(self, seconds: float) -> None:
        self._disarm()
        if self._transport is not None:
            self._timer = asyncio.get_running_loop().call_later(seconds, self._transport.abort)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
