"""
The HTTP door of a program: uvicorn's, with places, deadlines and a word in the log about both.

Uvicorn waits for ever for the end of a request, and for a client that does not read. Here each connection has
a place. Until its request is complete (headers; a body must make progress) it has a deadline, and so has an
answer that is not read. When all places are taken, whoever waits longest without a complete request makes way
for the newcomer (see admission.py). Some descriptors are kept back for files.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from time import monotonic
from typing import Any, Protocol

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from relay.admission import Waiting, block_of

try:
    import resource
except ImportError:  # Windows has no such limit
    resource = None  # type: ignore[assignment]

log = logging.getLogger(__name__)

KEPT_BACK = 128  # descriptors for files, STUN, the engine, and what libraries open
SPARE = KEPT_BACK // 2  # places while those who make way take their leave
SWEEP_S = 0.5
NOTICE_S = 60.0
FULL = b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 5\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


def descriptors(wanted: int) -> int:
    """Ask for so many descriptors; give how many connections they are good for."""
    if resource is None:
        return wanted
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < wanted + KEPT_BACK:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(wanted + KEPT_BACK, hard), hard))
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    kept = min(KEPT_BACK, soft // 4)
    return max(1, min(wanted, soft - kept))


class Inlet(Protocol):
    """How bytes come in turns, see forwarding/turns.py."""

    def feed(self, data: bytes) -> None: ...
    def close(self) -> None: ...


class Places:
    """The connections of one server. Keys are their transports, whatever protocol has them."""

    def __init__(self, wanted: int, per_block: int, request_s: float, unread_s: float) -> None:
        self.most = descriptors(wanted)
        self.make_way: Callable[[], bool] = lambda: False  # end somebody else who only waits, if there is one
        self._per_block = per_block
        self._request_s = request_s
        self._unread_s = unread_s
        self._block: dict[asyncio.BaseTransport, str] = {}
        self._count: dict[str, int] = {}
        self._asking: Waiting[asyncio.BaseTransport] = Waiting()  # their requests are not complete
        self._unread: Waiting[asyncio.BaseTransport] = Waiting()  # do not read what they asked for
        self._timer: asyncio.TimerHandle | None = None
        self._notices: dict[str, tuple[float, int]] = {}

    def __len__(self) -> int:
        return len(self._block)

    def opened(self, transport: asyncio.Transport) -> bool:
        """Give a new connection a place; False: there is none, and it was told so."""
        peer = transport.get_extra_info("peername")
        block = block_of(str(peer[0])) if isinstance(peer, tuple) else ""
        why = None
        if block and self._count.get(block, 0) >= self._per_block:
            why = f"{block} has {self._per_block} connections, more are not taken from one address"
        elif len(self._block) >= self.most + SPARE or (
            len(self._block) >= self.most and not self._make_way()
        ):
            why = f"all {self.most} places for connections are taken"
        if why is not None:
            self._notice(why)
            transport.write(FULL)
            transport.close()
            return False
        self._block[transport] = block
        self._count[block] = self._count.get(block, 0) + 1
        self.asks(transport)
        return True

    def closed(self, transport: asyncio.BaseTransport) -> None:
        """Its place is free. Idempotent."""
        block = self._block.pop(transport, None)
        if block is None:
            return
        self._count[block] -= 1
        if not self._count[block]:
            del self._count[block]
        self._asking.remove(transport)
        self._unread.remove(transport)

    def asks(self, transport: asyncio.BaseTransport) -> None:
        """Its request shall be complete, or go on, within `request_s`."""
        if transport in self._block:
            self._asking.add(transport, self._block[transport], monotonic() + self._request_s)
            self._arm()

    def asking(self, transport: asyncio.BaseTransport) -> bool:
        return transport in self._asking

    def asked(self, transport: asyncio.BaseTransport) -> None:
        """Its request is complete."""
        self._asking.remove(transport)

    def reads(self, transport: asyncio.BaseTransport, reading: bool) -> None:
        """It takes what is written to it, or does not."""
        if reading:
            self._unread.remove(transport)
        elif transport in self._block:
            self._unread.add(transport, self._block[transport], monotonic() + self._unread_s)
            self._arm()

    def _make_way(self) -> bool:
        victim = self._asking.victim()
        if victim is None:
            return self.make_way()
        self._notice(f"all {self.most} places for connections are taken: who asks for nothing makes way")
        self._end(victim)
        return True

    def _end(self, transport: asyncio.BaseTransport) -> None:
        self.closed(transport)
        assert isinstance(transport, asyncio.Transport) or hasattr(transport, "abort")
        transport.abort()

    def _arm(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(SWEEP_S, self._sweep)

    def _sweep(self) -> None:
        self._timer = None
        now = monotonic()
        for transport in self._asking.overdue(now):
            self._notice(f"a request was not complete within {self._request_s:g} s")
            self._end(transport)
        for transport in self._unread.overdue(now):
            self._notice(f"an answer was not read for {self._unread_s:g} s")
            self._end(transport)
        if len(self._asking) or len(self._unread):
            self._arm()

    def _notice(self, why: str) -> None:
        """Log once a minute for each reason, with how often."""
        now = monotonic()
        last, count = self._notices.get(why, (-NOTICE_S, 0))
        if now - last >= NOTICE_S:
            log.warning("%s%s", why, f" ({count} more since the last such line)" if count else "")
            last, count = now, -1
        self._notices[why] = last, count + 1
        if len(self._notices) > 1000:
            self._notices.clear()


class Door(H11Protocol):
    """Subclass with `places` set, and `inlet` where bytes come in turns: uvicorn wants a class."""

    places: Places
    inlet: Callable[[Callable[[bytes], None], Callable[[bool], None]], Inlet] | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._admitted = self.places.opened(transport)
        make = type(self).inlet
        self._inlet = None if make is None else make(self._received, self._read)

    def connection_lost(self, exc: Exception | None) -> None:
        self.places.closed(self.transport)
        if self._inlet is not None:
            self._inlet.close()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if not self._admitted:
            return
        if self._inlet is not None:
            self._inlet.feed(data)
        else:
            self._received(data)

    def _received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        protocol = self.transport.get_protocol()
        if protocol is not self:  # it became a session while bytes waited for their turn
            assert isinstance(protocol, asyncio.Protocol)
            protocol.data_received(data)
            return
        super().data_received(data)
        if self.transport.get_protocol() is not self:
            self.places.asked(self.transport)
            return
        state = self.conn.their_state
        if state is h11.SEND_BODY:
            self.places.asks(self.transport)
        elif state is not h11.IDLE:
            self.places.asked(self.transport)
        elif not self.places.asking(self.transport):
            self.places.asks(self.transport)  # a further request began

    def _read(self, on: bool) -> None:
        if not self.transport.is_closing():
            (self.transport.resume_reading if on else self.transport.pause_reading)()

    def on_response_complete(self) -> None:
        if self.conn.trailing_data[0]:
            # A further request came before this answer was whole. No client does that any more, and all of
            # them would be answered in one turn of the loop.
            self.transport.close()
        super().on_response_complete()
        if self.transport.get_protocol() is self and self.conn.their_state is h11.IDLE:
            self.places.asked(self.transport)  # the keep-alive timer has it now

    def pause_writing(self) -> None:
        self.places.reads(self.transport, False)
        super().pause_writing()

    def resume_writing(self) -> None:
        self.places.reads(self.transport, True)
        super().resume_writing()


def door(places: Places, **more: Any) -> type[Door]:
    """Make the class that uvicorn is given."""
    return type("ProgramDoor", (Door,), {"places": places, **more})
