"""
Hold what waits for one receiver: bounded, control before bulk, dead letters dropped from the head. Pure.

Bulk (dispatches and partials) is bounded in bytes and frames; when it is full the sender waits or is refused,
it is never buffered further. Control frames are few and go first, so that a full queue cannot keep a ping, an
assignment or a failure from arriving; they have a bound of their own, beyond which the receiver is given up.
"""

from collections import deque
from typing import NamedTuple

# A receiver that owes more reads nothing: it is the longest assignments, or a failure for each of its calls.
CONTROL_BYTES = 64 << 20
CONTROL_FRAMES = 8192


class Waiting(NamedTuple):
    """One bulk message; `expires_at` is None for a call without a deadline."""

    data: bytes
    sender: int
    call_id: int
    expires_at: float | None


class Outbox:
    """The queue of one receiver."""

    __slots__ = ("_bulk", "_control", "bulk_bytes", "control_bytes", "dropped", "max_bytes", "max_frames")

    def __init__(self, max_bytes: int, max_frames: int) -> None:
        self.max_bytes = max_bytes
        self.max_frames = max_frames
        self.bulk_bytes = 0
        self.control_bytes = 0
        self.dropped = 0  # expired, not yet counted by the driver
        self._control: deque[bytes] = deque()
        self._bulk: deque[Waiting] = deque()

    def __len__(self) -> int:
        return len(self._control) + len(self._bulk)

    @property
    def size_bytes(self) -> int:
        return self.bulk_bytes + self.control_bytes

    @property
    def half_empty(self) -> bool:
        """Whether half of the room for bulk is free again."""
        return self.bulk_bytes * 2 <= self.max_bytes and len(self._bulk) * 2 <= self.max_frames

    def room_for(self, size_bytes: int) -> bool:
        """Whether one more bulk message fits; an empty queue takes any."""
        if not self._bulk:
            return True
        return len(self._bulk) < self.max_frames and self.bulk_bytes + size_bytes <= self.max_bytes

    def put(self, message: Waiting) -> bool:
        """Queue a bulk message; False when it does not fit."""
        if not self.room_for(len(message.data)):
            return False
        self._bulk.append(message)
        self.bulk_bytes += len(message.data)
        return True

    def put_control(self, data: bytes) -> bool:
        """Queue a control message ahead of all bulk; False when the receiver owes too much."""
        if len(self._control) >= CONTROL_FRAMES:
            return False
        if self._control and self.control_bytes + len(data) > CONTROL_BYTES:
            return False
        self._control.append(data)
        self.control_bytes += len(data)
        return True

    def pop(self, now: float) -> bytes | None:
        """Take the next message to write, or None; expired bulk is dropped on the way."""
        if self._control:
            data = self._control.popleft()
            self.control_bytes -= len(data)
            return data
        while self._bulk:
            message = self._bulk.popleft()
            self.bulk_bytes -= len(message.data)
            if message.expires_at is None or now < message.expires_at:
                return message.data
            self.dropped += 1
        return None

    def cancel(self, sender: int, call_id: int) -> bool:
        """Take a call out that has not left yet; False when it is not here (any more)."""
        for message in self._bulk:
            if message.call_id == call_id and message.sender == sender:
                self._bulk.remove(message)
                self.bulk_bytes -= len(message.data)
                return True
        return False
