"""
Drive one link past the relay over any transport: feed its session, write what it says, keep its timer.

A transport takes whole frames: a WebSocket that we dialled or that somebody dialled to us, or a data channel.
Calls are sealed where the transport does not encrypt and both ends can.
"""

import secrets
from collections.abc import Callable
from time import monotonic
from typing import Literal, Protocol

from backbone.lanes.lane import LaneClosed
from backbone.lanes.wakeup import Wakeup
from relay.wire.calls import Dispatch, Partial, Probe
from relay.wire.close import in_words
from relay.wire.errors import SealFault
from relay.wire.frames import HEADER_BYTES, SEALABLE, readdress
from relay.wire.link import LinkEvent, LinkKey, LinkReady, LinkSession
from relay.wire.messages import Failure
from relay.wire.seal import SealBook, link_seal
from relay.wire.session import Closed, State

FULL_BYTES = 1 << 20  # what a link may hold back before calls take the relay; a prompt's rows are bulk


class Transport(Protocol):
    """Whole frames to the other end; `unsent_bytes` the network has not taken yet."""

    @property
    def unsent_bytes(self) -> int: ...

    @property
    def moved_bytes(self) -> int: ...

    def send(self, data: bytes) -> None: ...

    def close(self, code: int, reason: str) -> None: ...


class Link:
    """
    One end of a link. `on_ready(link)` once, `on_event(link, event)` for each call, `on_closed(link, why)`
    once, unless `close` was called.

    The owner of the transport calls `opened`, `received` and `ended`.
    """

    def __init__(
        self,
        session: LinkSession,
        on_ready: Callable[["Link"], None],
        on_event: Callable[["Link", LinkEvent], None],
        on_closed: Callable[["Link", str], None],
    ) -> None:
        self.session = session
        self.transport: Transport | None = None
        self._opens = session.known is not None
        self._on_ready = on_ready
        self._on_event = on_event
        self._on_closed: Callable[[Link, str], None] | None = on_closed
        self._wakeup = Wakeup(self._wake)
        self._book = SealBook()
        self._wakeup.set(self.session.next_timer())

    @property
    def ready(self) -> bool:
        """Whether calls may flow."""
        return self.session.ready

    # -- from the transport

    def opened(self) -> None:
        """The transport carries messages now."""
        if self._opens and self.session.state is State.START:
            self.session.start()
        self._pump()

    def received(self, data: bytes | str) -> None:
        known = self.session.known
        if (
            known is not None
            and isinstance(data, bytes)
            and len(data) >= HEADER_BYTES
            and data[3] in SEALABLE
        ):
            data = readdress(data, known.peer)  # nobody did on the way; the book goes by who speaks
        try:
            self.session.receive_data(self._book.incoming(data), monotonic())
        except SealFault as exc:  # nobody may alter a link's frames by mistake: it is left
            self.session.close(exc.close_code, str(exc))
        self._pump()

    @property
    def sealed(self) -> bool:
        """Whether calls are sealed on this link itself."""
        return self.session.known is not None and self.session.known.seal

    def ended(self, code: int, reason: str) -> None:
        self.session.receive_close(code, reason)
        self._pump()

    # -- calls; each hands its frame to the network at once

    def send_dispatch(self, call_id: int, deadline_ms: int, dispatch: Dispatch) -> int:
        """Ask the node; gives the bytes that travel. Raises LaneClosed."""
        self._require_room()
        self.session.send_dispatch(call_id, deadline_ms, dispatch)
        return self._write()

    def send_cancel(self, call_id: int) -> None:
        if self.ready:
            self.session.send_cancel(call_id)
            self._write()

    def send_probe(self, call_id: int, probe: Probe) -> None:
        """Time the link. Raises LaneClosed."""
        self._require_room()
        self.session.send_probe(call_id, probe)
        self._write()

    def send_partial(self, call_id: int, epoch: int, partial: Partial) -> None:
        self.session.send_partial(call_id, epoch, partial)
        self._write()

    def send_failure(self, call_id: int, epoch: int, failure: Failure) -> None:
        self.session.send_failure(call_id, epoch, failure)
        self._write()

    def send_echo(self, call_id: int, epoch: int, answer_bytes: int) -> None:
        self.session.send_echo(call_id, epoch, answer_bytes)
        self._write()

    def close(self, code: int, reason: str) -> None:
        """End it from this side; nobody is told here."""
        self._on_closed = None
        self.session.close(code, reason)
        self._pump()

    # -- inside

    def _require_room(self) -> None:
        if not self.ready or self.transport is None:
            raise LaneClosed("the link is not open")
        if self.transport.unsent_bytes > FULL_BYTES:
            raise LaneClosed("the link does not take more bytes at the moment")

    def _pump(self) -> None:
        for event in self.session.events():
            match event:
                case LinkReady(link, known):
                    self._write()
                    if known.seal:
                        seal = link_seal(self.session.role, link, known.key)
                        self._book.put(known.peer, known.epoch, seal)
                    self._on_ready(self)
                case Closed(code, reason):
                    self._write()
                    self._wakeup.cancel()
                    if self.transport is not None:
                        self.transport.close(code, reason)
                    on_closed, self._on_closed = self._on_closed, None
                    if on_closed is not None:
                        on_closed(self, in_words(code, reason))
                    return
                case _:
                    self._on_event(self, event)  # type: ignore[arg-type]
        self._write()
        if self.session.closed is None:
            self._wakeup.set(self.session.next_timer())

    def _write(self) -> int:
        size_bytes = 0
        for data in self.session.data_to_send():
            data = self._book.outgoing(data)
            size_bytes += len(data)
            if self.transport is not None:
                self.transport.send(data)
        return size_bytes

    def _wake(self) -> None:
        moved = 0 if self.transport is None else self.transport.moved_bytes
        self.session.handle_timer(monotonic(), moved)
        self._pump()


def opening_session(role: Literal["node", "backbone"], link: str, known: LinkKey) -> LinkSession:
    """Return the end that says hello."""
    return LinkSession(role, monotonic(), secrets.token_hex(16), link=link, known=known)


def accepting_session(
    role: Literal["node", "backbone"], find: Callable[[str], LinkKey | None]
) -> LinkSession:
    """Return the end that waits for a hello."""
    return LinkSession(role, monotonic(), secrets.token_hex(16), find=find)
