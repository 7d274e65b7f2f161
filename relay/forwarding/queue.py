"""
Hold what waits for one receiver: bounded, in the order in which it leaves, dead letters dropped. Pure.

Bulk (dispatches and partials) is bounded in bytes and frames; when it is full the sender waits or is refused,
it is never buffered further. Control frames are few and go first, so that a full queue cannot keep a ping, an
assignment or a failure from arriving; they have a bound of their own, beyond which the receiver is given up.
What travels in pieces gives way: once as much as a piece has passed it, one piece goes.
"""

from collections import deque
from typing import NamedTuple

from relay.wire.frames import PIECE_BYTES, FrameType

# A receiver that owes more reads nothing: it is the longest assignments, or a failure for each of its calls.
CONTROL_BYTES = 64 << 20
CONTROL_FRAMES = 8192


_PING, _PONG, _PIECE = (bytes([kind]) for kind in (FrameType.PING, FrameType.PONG, FrameType.PIECE))


class Waiting(NamedTuple):
    """One bulk message; `expires_at` is None for a call without a deadline."""

    data: bytes
    sender: int
    call_id: int
    expires_at: float | None
    piece: bool = False


class Outbox:
    """The queue of one receiver."""

    __slots__ = (
        "_beats",
        "_bulk",
        "_control",
        "_passed",
        "_pieces",
        "bulk_bytes",
        "control_bytes",
        "dropped",
        "max_bytes",
        "max_frames",
    )

    def __init__(self, max_bytes: int, max_frames: int) -> None:
        self.max_bytes = max_bytes
        self.max_frames = max_frames
        self.bulk_bytes = 0
        self.control_bytes = 0
        self.dropped = 0  # expired, not yet counted by the driver
        self._beats: deque[bytes] = deque()
        self._control: deque[bytes] = deque()
        self._bulk: deque[Waiting] = deque()
        self._pieces: deque[Waiting] = deque()
        self._passed = 0  # bytes since the last piece

    def __len__(self) -> int:
        return len(self._beats) + len(self._control) + len(self._bulk) + len(self._pieces)

    @property
    def size_bytes(self) -> int:
        return self.bulk_bytes + self.control_bytes

    @property
    def half_empty(self) -> bool:
        """Whether half of the room for bulk is free again."""
        frames = len(self._bulk) + len(self._pieces)
        return self.bulk_bytes * 2 <= self.max_bytes and frames * 2 <= self.max_frames

    def room_for(self, size_bytes: int) -> bool:
        """Whether one more bulk message fits; an empty queue takes any."""
        frames = len(self._bulk) + len(self._pieces)
        if not frames:
            return True
        return frames < self.max_frames and self.bulk_bytes + size_bytes <= self.max_bytes

    def put(self, message: Waiting) -> bool:
        """Queue a bulk message; False when it does not fit."""
        if not self.room_for(len(message.data)):
            return False
        (self._pieces if message.piece else self._bulk).append(message)
        self.bulk_bytes += len(message.data)
        return True

    def put_control(self, data: bytes) -> bool:
        """Queue a control message, or a piece of one, ahead of calls; False when too much waits."""
        if len(self._control) + len(self._beats) >= CONTROL_FRAMES:
            return False
        if self._control and self.control_bytes + len(data) > CONTROL_BYTES:
            return False
        beat = data[3:4] in (_PING, _PONG)
        (self._beats if beat else self._control).append(data)
        self.control_bytes += len(data)
        return True

    def pop(self, now: float) -> bytes | None:
        """Take the next message to write, or None; expired bulk is dropped on the way."""
        if self._beats:
            return self._pop_control(self._beats)
        long_control = bool(self._control) and self._control[0][3:4] == _PIECE
        if self._passed < PIECE_BYTES or not (long_control or self._pieces):
            data = self._pop_control(self._control) if self._control and not long_control else None
            if data is None:
                data = self._pop_bulk(self._bulk, now)
            if data is not None:
                self._passed += len(data)
                return data
        self._passed = 0
        if long_control:
            return self._pop_control(self._control)
        data = self._pop_bulk(self._pieces, now)
        if data is None and len(self):  # they had all expired
            return self.pop(now)
        return data

    def _pop_control(self, queue: deque[bytes]) -> bytes:
        data = queue.popleft()
        self.control_bytes -= len(data)
        return data

    def _pop_bulk(self, queue: deque[Waiting], now: float) -> bytes | None:
        while queue:
            message = queue.popleft()
            self.bulk_bytes -= len(message.data)
            if message.expires_at is None or now < message.expires_at:
                return message.data
            self.dropped += 1
        return None

    def cancel(self, sender: int, call_id: int) -> bool:
        """Take out of a call what has not left yet; False unless that is all of it."""
        for message in self._bulk:
            if message.call_id == call_id and message.sender == sender:
                self._bulk.remove(message)
                self.bulk_bytes -= len(message.data)
                return True
        kept = [m for m in self._pieces if m.call_id != call_id or m.sender != sender]
        if len(kept) < len(self._pieces):
            self.bulk_bytes -= sum(len(m.data) for m in self._pieces) - sum(len(m.data) for m in kept)
            self._pieces = deque(kept)
        return False
