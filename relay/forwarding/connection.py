"""
Join one socket, its session and its outbox: write what they hold, tell senders when there is room.

Everything is written in the turn of the event loop in which it arose; only when the network takes no more do
frames wait in the outbox.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from time import monotonic

from relay.forwarding.queue import Outbox, Waiting
from relay.forwarding.rates import Allowance
from relay.forwarding.socket import ServerSocket
from relay.forwarding.turns import account
from relay.wire.close import CloseCode
from relay.wire.errors import FrameTooLarge, RemoteProtocolError
from relay.wire.frames import MAX_MESSAGE_BYTES, PASSED_ON
from relay.wire.pieces import Assembler, decode_piece, is_piece, pieces
from relay.wire.session import RelaySession, State


class Connection:
    """One peer. `handle` is what others call it; `on_message` and `on_lost` are the hub's."""

    __slots__ = (
        "_assembler",
        "_drained",
        "_open",
        "_socket",
        "allowance",
        "backlog",
        "block",
        "blocked",
        "full_since",
        "handle",
        "on_lost",
        "on_message",
        "outbox",
        "resume_token",
        "session",
        "session_token",
        "slow",
    )

    def __init__(
        self,
        handle: int,
        session: RelaySession,
        outbox: Outbox,
        socket: ServerSocket,
        on_message: Callable[["Connection", bytes | str], None],
        on_lost: Callable[["Connection", int, str], None],
    ) -> None:
        self.handle = handle
        self.session = session
        self.outbox = outbox
        self.allowance = Allowance(is_backbone=False, now=monotonic())
        self.block = ""  # whose limits it shares, see relay/admission.py
        self.session_token = ""
        self.resume_token = ""
        self.on_message = on_message
        self.on_lost = on_lost
        self.blocked: asyncio.Task[None] | None = (
            None  # waits for a receiver's room; nothing is read meanwhile
        )
        self.backlog: deque[bytes | str] = deque()  # what came with the frame that waits
        self.slow = False  # somebody had to wait for room; until half of it is free, no shared sender waits
        self.full_since: float | None = None  # the network has taken nothing since then
        self._assembler = Assembler()
        self._socket = socket
        self._open = True
        self._drained = asyncio.Event()

    @property
    def greeted(self) -> bool:
        """Whether this peer has been welcomed."""
        return self.session.state in (State.OPEN, State.READY, State.DRAINING)

    @property
    def message_bytes(self) -> int:
        """The longest frame this peer has a reason to say to the relay now."""
        return self.allowance.message_bytes

    @property
    def held_bytes(self) -> int:
        """The memory this peer takes: what waits for it, and what it has not finished saying."""
        said = self._socket.unfinished_bytes + self._assembler.size_bytes + sum(map(len, self.backlog))
        return self.outbox.size_bytes + said

    @property
    def ready(self) -> bool:
        """Whether calls and what belongs to them may be sent to this peer."""
        return self.session.state in (State.READY, State.DRAINING)

    @property
    def address(self) -> str:
        """Where this peer is; empty: unknown."""
        return self._socket.address

    def admit(self, role: str) -> None:
        """It said who it is: from now on it has what such peers have."""
        self.allowance = Allowance(role == "backbone", monotonic())
        self._socket.account_of(account(role))

    @property
    def reached_at(self) -> str:
        """The address of this relay that the peer's connection came to."""
        return self._socket.reached_at

    # -- from the socket

    def received(self, data: bytes | str) -> None:
        if self.blocked is not None:
            self.backlog.append(data)
            return
        try:
            whole = self._put_together(data) if isinstance(data, bytes) else data
        except RemoteProtocolError as exc:
            self.session.close(exc.close_code, str(exc))
            whole = b""  # the hub hears of the end
        if whole is not None:
            self.on_message(self, whole)

    def _put_together(self, data: bytes) -> bytes | None:
        """Put together what the relay itself reads; pieces of calls are passed on as they come."""
        if len(data) > MAX_MESSAGE_BYTES:
            raise FrameTooLarge("message", len(data), MAX_MESSAGE_BYTES)
        if not is_piece(data):
            return data
        whole = decode_piece(data).whole
        kind = whole.type
        if kind in PASSED_ON:
            return data
        if whole.length > self.message_bytes:
            raise FrameTooLarge(kind.name, whole.length, self.message_bytes)
        if not self.session.expects(kind):
            raise RemoteProtocolError(f"a piece of {kind.name} is not expected now")
        return self._assembler.feed(data, monotonic())

    def handle_timer(self, now: float) -> None:
        """Do what the session has to do now."""
        self.session.handle_timer(now, self._socket.moved_bytes)

    def writable(self) -> None:
        self.full_since = None
        self.flush()

    def lost(self, code: int, reason: str) -> None:
        self._open = False
        self.full_since = None
        self._drained.set()
        self.on_lost(self, code, reason)

    # -- to the socket

    def queue(self, message: Waiting) -> bool:
        """Queue bulk and write it if the network takes it; False when the outbox is full."""
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
                while self._open and not self.outbox.room_for(size_bytes):
                    self._drained.clear()
                    await self._drained.wait()
        except TimeoutError:
            return False
        return self._open

    def flush(self) -> None:
        """Write what the session and the outbox hold, as far as the network takes it."""
        for control in self.session.data_to_send():
            if not all([self.outbox.put_control(message) for message in pieces(control)]):
                self.session.close(CloseCode.OVERLOADED, "too much waits for this peer, it does not read")
        if not self._open or not self.outbox:
            return
        now = monotonic()
        while not self._socket.full and (data := self.outbox.pop(now)) is not None:
            self._socket.send(data)
        if self._socket.full and self.full_since is None:
            self.full_since = now
        if self.slow:
            self.slow = not self.outbox.half_empty
            self._drained.set()

    def pause_reading(self) -> None:
        self._socket.pause_reading()

    def resume_reading(self) -> None:
        self._socket.resume_reading()

    def close(self, code: int, reason: str) -> None:
        """Write what the network still takes, then end the socket within a bounded time."""
        self.flush()
        self._open = False
        self.full_since = None
        self._drained.set()
        if self.blocked is not None:
            self.blocked.cancel()
        self._socket.close(code, reason)
