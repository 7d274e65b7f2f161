"""
Say how much one peer may ask of the relay: messages of each kind, answers, unfinished messages. Pure.

Three rules, each for a kind of flood:

    control     each kind of message a peer may send by itself has a rate and a burst (MESSAGES)
    answers     whoever was sent a call may answer it: once, with bytes in proportion to the call's. An
                answer beyond that is unasked (it may be late): a few pass
    unfinished  what has come of a message that is not whole is memory. Without a call to answer, a message
                is no longer than the longest control message; all peers together have memory_bytes

Who goes beyond a rule is closed with 4429 and told which one. Rates are many times what an honest peer needs,
and the bursts what a swarm needs that comes back at once.
"""

from relay.bucket import Bucket
from relay.wire.frames import CALL_TYPES, PAYLOAD_LIMITS, SIGNAL_TYPES, FrameType

_T = FrameType

# What one peer may send by itself: a second, and at once. What is not here follows from a call.
MESSAGES: dict[FrameType, tuple[float, float]] = {
    _T.OFFER: (0.5, 8),  # memory, kernel or battery changed
    _T.REGISTER: (0.2, 10),
    _T.SLICE_READY: (20, 200),  # while slices arrive
    _T.PAUSE: (2, 30),  # a tab hidden and shown
    _T.PATH_REPORT: (2, 30),
    _T.PING: (20, 200),
    _T.PONG: (20, 200),
    _T.SIGNAL: (8, 200),  # Rooms lets fewer through, without a word
    _T.SEAL_HELLO: (2, 30),
    _T.SEAL_ANSWER: (100, 10_000),  # a backbone greets all its nodes
}
# What a backbone may: it talks to all its nodes, and to all at once when a relay is back.
OF_BACKBONES: dict[FrameType, tuple[float, float]] = MESSAGES | {_T.SIGNAL: (100, 10_000)}
UNASKED = (2.0, 64.0)  # answers nobody asked for; a long one counts for several
UNASKED_UNIT_BYTES = 64 << 10
ANSWER_FACTOR = 16  # an answer is at most so many times as long as its call: eight bytes where that has one
ANSWER_BYTES = 64 << 10  # and this much anyway
MAX_CALLS = 8192  # calls one node may owe an answer to; who sends more is a backbone that waits for none
CONTROL_BYTES = max(
    limit
    for kind, limit in PAYLOAD_LIMITS.items()
    if kind in MESSAGES and kind not in (_T.REGISTER, _T.PATH_REPORT)
)


class Allowance:
    """What one peer may still send."""

    __slots__ = ("_bytes", "_calls", "_messages", "_unasked", "is_backbone")

    def __init__(self, is_backbone: bool, now: float) -> None:
        self.is_backbone = is_backbone
        self._messages: dict[FrameType, Bucket] = {}
        self._unasked = Bucket(*UNASKED, now)
        self._calls = 0
        self._bytes = 0

    def message(self, kind: FrameType, now: float) -> str | None:
        """Count a message it sends by itself; give what is wrong, in words, or None."""
        rate = (OF_BACKBONES if self.is_backbone else MESSAGES).get(kind)
        if rate is None:
            return None
        bucket = self._messages.get(kind)
        if bucket is None:
            bucket = self._messages[kind] = Bucket(*rate, now)
        if bucket.take(now):
            return None
        return f"too many {kind.name} frames: {rate[0]:g} a second are taken, {rate[1]:g} at once"

    def called(self, size_bytes: int, answer_bytes: int = 0, first: bool = True) -> None:
        """A call, or a piece of one, was passed to this peer: it may answer."""
        if self._calls < MAX_CALLS:
            self._calls += first
            self._bytes += answer_bytes or size_bytes * ANSWER_FACTOR + ANSWER_BYTES

    def answer(self, size_bytes: int, last: bool = True) -> bool:
        """Count an answer, or a piece of one; False when nothing was asked that it could belong to."""
        if not self._calls or size_bytes > self._bytes:
            return False
        self._calls -= last
        self._bytes -= size_bytes
        if not self._calls:
            self._bytes = 0
        return True

    def unasked(self, size_bytes: int, now: float) -> str | None:
        """Count an answer that nobody asked for; give what is wrong, in words, once it is too much."""
        if self._unasked.take(now, 1.0 + size_bytes / UNASKED_UNIT_BYTES):
            return None
        return f"too many answers to calls that nobody made: {UNASKED[0]:g} a second are forgiven"

    @property
    def message_bytes(self) -> int:
        """The longest message this peer has a reason to send now."""
        if self.is_backbone:
            return max(PAYLOAD_LIMITS.values())
        return max(CONTROL_BYTES, min(self._bytes, PAYLOAD_LIMITS[_T.PARTIAL]))


def is_control(kind: FrameType) -> bool:
    """Whether a peer sends this by itself, and not because of a call."""
    return kind not in CALL_TYPES or kind in SIGNAL_TYPES
