"""
What each node has shown, and what follows: how long its answer will take, how long to wait, whether to ask
it at all. Pure: time is an argument.

An answer takes `fixed + bytes * s_per_byte + rows * s_per_row`: the path's delay, the line, the kernel. The
node says how long it computed, so that the two rates are told apart; a lie about that moves time from one to
the other and spoils only the liar's own estimate. Estimates are means of the newest answers of about that
size, tails included, since a mean is what a token pays.

Three things are kept apart. A node is **late** when its answer is not back within our patience: somebody else
computes too, the first answer counts, and the next patience is half as long. It **owes** an answer from then
on and is not asked again until that came, whatever it took (then it is one more measurement), or until it is
given up. That, a refusal and garbage are **failures**: the node rests, longer each time, and is forgiven
slowly. One lost packet costs a node nothing but the time it took.
"""

from collections import deque
from dataclasses import dataclass, field
from math import exp2

WINDOW = 8  # answers remembered per size; a changed path shows after a few
FADE_S = 3.0  # half-life of a bad memory, where nodes are tried for their own sake
GIVE_UP_FACTOR = 4.0  # times the longest answer of this size
CENSORED = 1.5  # an answer that never came takes at least as long as was waited; say so with some margin
FORGIVEN_AFTER = 8  # answers in time for one failure, so that failing now and then does not pay
MOST_FAILURES = 16
MOST_MISSES = 6
GROWTH = 2  # a node is trusted with calls so many times larger than any it answered
PROBE_GROWTH = 8  # and measured with calls so many times larger
PROBE_AGAIN_S = 2.0  # a node that was too slow is looked at again after so long, then twice, four times ...
PROBE_AGAIN_MOST_S = 60.0


@dataclass(frozen=True, slots=True)
class DeadlinePolicy:
    """
    Bounds of waiting, in seconds.

    floor_s: where nodes shall carry what they can, no answer counts as late before. first_s, ceiling_s: how
    long a late answer is owed before the node counts as silent, while nothing is known of it and at most.
    """

    floor_s: float = 0.25
    ceiling_s: float = 10.0
    first_s: float = 5.0
    factor: float = 1.5
    suspend_first_s: float = 0.5
    suspend_max_s: float = 30.0


@dataclass(frozen=True, slots=True)
class Size:
    """How much a call asks for: bytes both ways, and expert rows."""

    num_bytes: int
    num_rows: int


@dataclass(frozen=True, slots=True)
class Line:
    """Seconds an answer takes: `fixed_s + num_bytes * s_per_byte + num_rows * s_per_row`."""

    fixed_s: float
    s_per_byte: float
    s_per_row: float

    def at(self, size: Size) -> float:
        """Give the seconds for a call of this size."""
        return self.fixed_s + size.num_bytes * self.s_per_byte + size.num_rows * self.s_per_row


# Of a node that shall be used before anything is known of it: a good line, a slow core.
STRANGER = Line(0.0, 1e-7, 1e-5)


@dataclass(frozen=True, slots=True)
class _Mean:
    """The newest answers of about one size: means, and the longest."""

    num_bytes: float
    num_rows: float
    network_s: float
    compute_s: float
    longest_s: float


@dataclass(slots=True)
class NodeRecord:
    """What one node has shown; it outlives the node's sessions."""

    policy: DeadlinePolicy
    failures: int = 0
    misses: int = 0  # late answers in a row
    owed: int = 0  # answers that are late now
    asked_bytes: int = 0  # of all calls it has not answered yet
    asked_rows: int = 0
    largest_bytes: int = 0  # the largest call it answered
    answers: int = 0
    answered_at: float = 0.0
    suspended_until: float = 0.0
    proved: bool = True  # answered since it last failed
    session: int = 0
    probe_at: float = 0.0
    silent_s: float = 0.0  # an answer takes at least so long: none came within that time
    _probe_again_s: float = PROBE_AGAIN_S
    _in_time: int = 0
    _seen: dict[int, deque[tuple[int, int, float, float]]] = field(default_factory=dict)
    _means: dict[int, _Mean] = field(default_factory=dict)

    def met(self, session: int) -> None:
        """
        Note under which handle the node is here; a new one is asked at once: a phone that changed networks is
        well again. Should it fail, it rests as long as before. What the last session owed will not come.
        """
        if session != self.session:
            self.session, self.suspended_until = session, 0.0
            self.owed = self.asked_bytes = self.asked_rows = 0

    # -- what happened

    def asked(self, size: Size) -> None:
        """A call leaves; until `closed` others queue behind it."""
        self.asked_bytes += size.num_bytes
        self.asked_rows += size.num_rows

    def closed(self, size: Size, late: bool) -> None:
        """A call is over, however it ended."""
        self.asked_bytes = max(0, self.asked_bytes - size.num_bytes)
        self.asked_rows = max(0, self.asked_rows - size.num_rows)
        self.owed = max(0, self.owed - late)

    def answered(self, size: Size, took_s: float, compute_s: float, now: float, late: bool = False) -> None:
        """Note a good answer, in time or late."""
        before = self.line(size.num_bytes)
        self._note(size, took_s, min(max(compute_s, 0.0), took_s))
        self.silent_s = 0.0
        if before is not None and took_s < before.at(size) / 2:  # it is better than we thought: look again
            self.probe_at, self._probe_again_s = now, PROBE_AGAIN_S
        self.largest_bytes = max(self.largest_bytes, size.num_bytes)
        self.answers += 1
        self.answered_at, self.suspended_until, self.proved = now, 0.0, True
        if late:  # it is not silent, and the next estimate knows how slow it is
            self.misses = max(0, self.misses - 1)
            return
        self.misses = 0
        self._in_time += 1
        if self._in_time >= FORGIVEN_AFTER:
            self._in_time, self.failures = 0, max(0, self.failures - 1)

    def missed(self) -> None:
        """Note that an answer is late; it is owed from now on."""
        self.misses = min(self.misses + 1, MOST_MISSES)
        self.owed += 1

    def gave_up(self, waited_s: float, now: float) -> None:
        """Note that an answer did not come at all."""
        self.silent_s = max(self.silent_s, waited_s * CENSORED)
        self.failed(now)

    def failed(self, now: float) -> None:
        """Note a silence or a wrong answer; the node rests, longer each time."""
        pause_s = min(self.policy.suspend_first_s * 2.0**self.failures, self.policy.suspend_max_s)
        self.failures = min(self.failures + 1, MOST_FAILURES)
        self.suspended_until = now + pause_s
        self.proved, self._in_time = False, 0

    # -- what follows

    @property
    def known(self) -> bool:
        """Is there any measurement?"""
        return bool(self._means) or self.silent_s > 0.0

    def usable(self, now: float) -> bool:
        """Tell whether the node may be asked now."""
        return not self.owed and now >= self.suspended_until

    def most_bytes(self) -> int:
        """Give the size of the largest call it is trusted with: little at first, more with each answer."""
        return GROWTH * self.largest_bytes if self.proved else 0

    def line(self, num_bytes: int) -> Line | None:
        """Give what a call of about this size costs, behind all that is not answered yet; None: not known."""
        mean = self._near(num_bytes)
        if mean is None:
            return None if not self.silent_s else Line(self.silent_s, 0.0, 0.0)
        fixed_s = max(self.silent_s, min(each.network_s for each in self._means.values()))
        s_per_byte = max(mean.network_s - fixed_s, 0.0) / max(mean.num_bytes, 1.0)
        s_per_row = mean.compute_s / max(mean.num_rows, 1.0)
        return Line(
            fixed_s + self.asked_bytes * s_per_byte + self.asked_rows * s_per_row, s_per_byte, s_per_row
        )

    def faded(self, line: Line, now: float) -> Line:
        """Let a bad memory fade while the node is not asked, or one slow spell would cost all later calls."""
        share = exp2((self.answered_at - now) / FADE_S)
        return Line(line.fixed_s * share, line.s_per_byte * share, line.s_per_row * share)

    def patience_s(self, size: Size, floor_s: float) -> float:
        """Give the time after which an answer of this size is late; infinite while nothing is known."""
        mean, line = self._near(size.num_bytes), self.line(size.num_bytes)
        if mean is None or line is None:
            return float("inf")
        usual_s = max(mean.network_s + mean.compute_s, 1e-6)
        expected_s = line.at(size)
        longest_s = expected_s * max(1.0, mean.longest_s / usual_s)
        patience_s = max(self.policy.factor * longest_s, floor_s) * exp2(-self.misses)
        return max(patience_s, expected_s)  # with less, it need not be asked at all

    def p95_s(self, size: Size) -> float | None:
        """Give the longest that an answer of this size usually takes: when to hedge."""
        patience_s = self.patience_s(size, 0.0)
        return patience_s / self.policy.factor if self._means else None

    def give_up_s(self, size: Size) -> float:
        """Give the time after which an answer that is owed will not come any more."""
        line = self.line(size.num_bytes)
        if line is None:
            return self.policy.first_s
        return min(
            max(GIVE_UP_FACTOR * self.patience_s(size, 0.0), self.policy.floor_s), self.policy.ceiling_s
        )

    def probe_bytes(self, smallest: int) -> int:
        """Give the size of the next measurement."""
        return max(smallest, PROBE_GROWTH * self.largest_bytes)

    def probed(self, now: float, grows: bool) -> None:
        """A probe leaves; one that only asks whether a slow node is still slow waits longer each time."""
        if grows:
            self._probe_again_s = PROBE_AGAIN_S
        self.probe_at = now + (0.0 if grows else self._probe_again_s)
        self._probe_again_s = min(2 * self._probe_again_s, PROBE_AGAIN_MOST_S)

    def was_useful(self) -> None:
        """The node was given work."""
        self._probe_again_s = PROBE_AGAIN_S

    def _near(self, num_bytes: int) -> _Mean | None:
        """Give the measurements of the size nearest to this one, the smaller of two."""
        if not self._means:
            return None
        wanted = _size_class(num_bytes)
        return self._means[min(self._means, key=lambda each: (abs(each - wanted), each))]

    def _note(self, size: Size, took_s: float, compute_s: float) -> None:
        of_size = _size_class(size.num_bytes)
        seen = self._seen.setdefault(of_size, deque(maxlen=WINDOW))
        seen.append((size.num_bytes, size.num_rows, took_s, compute_s))
        num_bytes, num_rows, took, compute = (sum(column) / len(seen) for column in zip(*seen, strict=True))
        longest_s = max(each[2] for each in seen)
        self._means[of_size] = _Mean(num_bytes, num_rows, took - compute, compute, longest_s)


def _size_class(num_bytes: int) -> int:
    """Four times as many bytes are another size."""
    return (num_bytes >> 10).bit_length() // 2
