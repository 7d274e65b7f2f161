"""
How long to wait for a node, and whether to ask it at all. Pure: time is an argument.

A deadline follows what this node has shown for calls of this size: 1.5 times its 95th percentile, within
bounds. A node that failed is left alone for a while that doubles with each failure, so that a wedged node
costs one deadline, not one per layer.
"""

from bisect import bisect_left
from collections import deque
from dataclasses import dataclass, field
from math import exp2

SIZE_CLASSES = (1, 8, 64)  # rows: one token, a speculated or batched step, a prompt piece, more
JUDGED_AFTER = 3  # answers of a size; the first one pays for cold caches, and a median of three forgives it
MEMORY_HALF_LIFE_S = 3.0  # a node 40 times slower than another is tried again after 16 s: 1 % of its time
WINDOW = 64  # calls remembered per size class: a few tokens' worth, so that a changed path shows soon


@dataclass(frozen=True, slots=True)
class DeadlinePolicy:
    """Bounds of waiting, in seconds."""

    floor_s: float = 0.25  # below this a scheduler hiccup on either end would count as a failure
    ceiling_s: float = 10.0
    first_s: float = 5.0  # nothing known yet of this node and size
    factor: float = 1.5
    suspend_first_s: float = 0.5
    suspend_max_s: float = 30.0


@dataclass(slots=True)
class NodeRecord:
    """What one node has shown: round-trip times per size class, failures in a row."""

    policy: DeadlinePolicy
    round_trips_s: dict[int, deque[float]] = field(default_factory=dict)
    failures: int = 0
    suspended_until: float = 0.0
    answered_at: float = 0.0
    session: int = 0

    def met(self, session: int) -> None:
        """
        Note under which handle the node is here; a new one is asked at once: a phone that changed networks is
        well again. Should it fail, it rests as long as before.
        """
        if session != self.session:
            self.session, self.suspended_until = session, 0.0

    def answered(self, rows: int, round_trip_s: float, now: float) -> None:
        """Note a good answer."""
        self.answered_at = now
        window = self.round_trips_s.setdefault(_size_class(rows), deque(maxlen=WINDOW))
        window.append(round_trip_s)
        self.failures = 0
        self.suspended_until = 0.0

    def failed(self, now: float) -> None:
        """Note a missed deadline or a wrong answer; the node rests, longer each time."""
        pause_s = min(self.policy.suspend_first_s * 2.0**self.failures, self.policy.suspend_max_s)
        self.failures = min(self.failures + 1, 16)
        self.suspended_until = now + pause_s

    def usable(self, now: float) -> bool:
        """Tell whether the node may be asked now."""
        return now >= self.suspended_until

    def percentile(self, rows: int, share: float) -> float | None:
        """Give a percentile of the round trip in seconds, or None when this size was never seen."""
        window = self.round_trips_s.get(_size_class(rows))
        if not window:
            return None
        ordered = sorted(window)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]

    def deadline_s(self, rows: int) -> float:
        """Give the time after which a call of this size is asked elsewhere."""
        p95 = self.percentile(rows, 0.95)
        if p95 is None:
            return self.policy.first_s
        return min(max(self.policy.factor * p95, self.policy.floor_s), self.policy.ceiling_s)

    def hedge_after_s(self, rows: int) -> float | None:
        """Give the time after which a replica is asked too, or None while there is no evidence."""
        p95 = self.percentile(rows, 0.95)
        return None if p95 is None else min(p95, self.deadline_s(rows))

    def expected_s(self, rows: int, now: float) -> float:
        """
        Rank nodes: what a call of this size is likely to take; little known nodes are worth a try.

        A bad memory fades while the node is not asked, or one slow first call would cost it all later ones.
        """
        p50 = self.percentile(rows, 0.5)
        if p50 is None or len(self.round_trips_s[_size_class(rows)]) < JUDGED_AFTER:
            return 0.0
        return p50 * exp2((self.answered_at - now) / MEMORY_HALF_LIFE_S)


def _size_class(rows: int) -> int:
    return bisect_left(SIZE_CLASSES, rows)
