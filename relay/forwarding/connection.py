"""
Drive one WebSocket: write what its session and its outbox hold, tell senders when it has room, close it.

A frame is written in the turn of the event loop in which it arrived, by an eagerly started task; only a
socket that takes no more bytes suspends that task, and then frames wait in the outbox.
"""

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from time import monotonic
from typing import Any

from relay.forwarding.queue import Outbox, Waiting
from relay.wire.close import CloseCode, clip_reason
from relay.wire.session import RelaySession, State

CLOSE_TIMEOUT_S = 1.0  # a receiver that takes nothing does not learn why it is closed

type Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class Connection:
    """One socket with its session and its outbox. `handle` is what peers call it."""

    __slots__ = (
        "_drained",
        "_flusher",
        "_open",
        "_send",
        "closing",
        "connected_at",
        "handle",
        "outbox",
        "session",
        "session_token",
        "slow",
        "writing_since",
    )

    def __init__(self, handle: int, session: RelaySession, outbox: Outbox, send: Send) -> None:
        self.handle = handle
        self.session = session
        self.outbox = outbox
        self.session_token = ""
        self.closing: asyncio.Task[None] | None = None
        self.connected_at = monotonic()
        self.slow = False  # somebody had to wait for room; until half of it is free, no shared sender waits
        self.writing_since: float | None = None  # the socket has not taken a message since then
        self._send = send
        self._open = True
        self._flusher: asyncio.Task[None] | None = None
        self._drained = asyncio.Event()

    @property
    def ready(self) -> bool:
        """Whether calls and what belongs to them may be sent to this peer."""
        return self.session.state in (State.READY, State.DRAINING)

    def queue(self, message: Waiting) -> bool:
        """Queue bulk and write it if the socket is free; False when the outbox is full."""
        if not self.outbox.put(message):
            return False
        self.flush()
        return True

    async def wait_for_room(self, size_bytes: int, timeout_s: float, shared: bool) -> bool:
        """
        Wait until the outbox takes this many bytes; False when it did not in time.

        A `shared` sender has other receivers, whose frames wait behind this one: it waits once, and not again
        before this receiver has caught up. Any other sender harms only itself by waiting.
        """
        if self.slow and shared:
            return False
        self.slow = True
        try:
            async with asyncio.timeout(timeout_s):
                while not self.outbox.room_for(size_bytes):
                    self._drained.clear()
                    await self._drained.wait()
        except TimeoutError:
            return False
        return self._open

    def flush(self) -> None:
        """Write what the session and the outbox hold, now or as soon as the socket takes it."""
        for data in self.session.data_to_send():
            if not self.outbox.put_control(data):
                self.session.close(CloseCode.OVERLOADED, "too much waits for this peer, it does not read")
        if self._open and len(self.outbox) and (self._flusher is None or self._flusher.done()):
            self._flusher = asyncio.Task(self._write_all(), loop=asyncio.get_running_loop(), eager_start=True)

    async def finish(self, code: int, reason: str) -> None:
        """Write what is left, bounded, then close the socket. Idempotent."""
        if not self._open:
            return
        if self._flusher is not None and not self._flusher.done():
            await asyncio.wait({self._flusher}, timeout=CLOSE_TIMEOUT_S)
        if not self._open:
            return
        self.lost()
        message = {"type": "websocket.close", "code": _sendable(code), "reason": clip_reason(reason)}
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self._send(message)
        except (OSError, RuntimeError):  # gone already (TimeoutError is an OSError)
            pass

    def lost(self) -> None:
        """The socket is gone: write no more, and let nobody wait for room."""
        self._open = False
        self.writing_since = None
        if self._flusher is not None and self._flusher is not asyncio.current_task():
            self._flusher.cancel()
        self._drained.set()

    async def _write_all(self) -> None:
        try:
            while self._open and (data := self.outbox.pop(monotonic())) is not None:
                self.writing_since = monotonic()
                await self._send({"type": "websocket.send", "bytes": data})
                self.writing_since = None
                self.slow = self.slow and not self.outbox.half_empty
                self._drained.set()
        except (OSError, RuntimeError):  # the peer is gone; the reader learns it from the transport
            self.lost()


def _sendable(code: int) -> int:
    """Return the code, or 1000 for one that must not stand in a close frame (RFC 6455 section 7.4)."""
    return code if code in (CloseCode.NORMAL, CloseCode.GOING_AWAY) or 3000 <= code <= 4999 else 1000
