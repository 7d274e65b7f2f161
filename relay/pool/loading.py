"""
Judge how a node loads what it was assigned. Pure: one clock per node, and time as an argument.

Assigned is not held. There are three answers to a node that does not load, from mild to hard; a slice that it
does load takes all of them back:

    doubted   nothing came for `doubt_s`, or the rest would take longer than HORIZON_S: what it does not hold
              yet counts for nothing, so that others with room hold it too. It goes on loading
    cut       nothing came for `deadline_s`: it keeps what it holds, and one slice to try
    resting   nothing came of that either: only what it holds, for REST_S, then twice as long each time

Trust grows as it was earned: twice what it holds, and one slice. The clock stands still while slices are on
their way from the backbone, for that is no node's fault.
"""

from dataclasses import dataclass

DOUBT_S = 4.0
EXPECTED_BYTES_PER_S = 1e6  # of a line that nobody measured yet, before we doubt
DEADLINE_S = 15.0
SLOW_BYTES_PER_S = 125e3  # 1 Mbit/s, before we take away
SLOWEST_BYTES_PER_S = 25e3  # who is slower has no more patience from us
IN_FLIGHT = 4  # slices that a node fetches side by side: the first one arrives with the others
HORIZON_S = 60.0
REST_S = 60.0
REST_CAP_S = 3600.0


def doubt_s(slice_bytes: int, bytes_per_s: float | None) -> float:
    """Say how long a node may hold nothing new before others hold the same."""
    return DOUBT_S + 2 * slice_bytes / max(bytes_per_s or EXPECTED_BYTES_PER_S, SLOWEST_BYTES_PER_S)


def deadline_s(slice_bytes: int, bytes_per_s: float | None) -> float:
    """Say how long a node may hold nothing new before its assignment is taken away."""
    rate = max(bytes_per_s or SLOW_BYTES_PER_S, SLOWEST_BYTES_PER_S)
    return DEADLINE_S + IN_FLIGHT * slice_bytes / rate


@dataclass(slots=True)
class Loading:
    """One node's record. `trusted_bytes`: the most it is given; None: all that it pledges."""

    doubted: bool = False
    trusted_bytes: int | None = None
    bytes_per_s: float | None = None
    held_bytes: int = 0  # of what it was assigned
    _since: float = 0.0  # when it was given something to load, or said that it holds more
    _missing_bytes: int = 0
    _rest_s: float = 0.0
    _rests_until: float | None = None

    def assigned(self, held_bytes: int, missing_bytes: int, now: float) -> None:
        """It was told what to hold: so much of it is there already."""
        if self._missing_bytes == 0:
            self._since = now
        self.held_bytes, self._missing_bytes = held_bytes, missing_bytes

    def resumed(self, paused_s: float) -> None:
        """It was paused for so long, and loaded nothing meanwhile."""
        self._since += paused_s

    def progressed(self, held_bytes: int, missing_bytes: int, slice_bytes: int, now: float) -> bool:
        """It said what it holds. Returns whether that changes what may be given to it."""
        before = self.doubted, self.trusted_bytes
        gained = held_bytes - self.held_bytes
        self.held_bytes, self._missing_bytes = held_bytes, missing_bytes
        if gained > 0:
            rate = gained / max(now - self._since, 0.05)
            self.bytes_per_s = rate if self.bytes_per_s is None else (self.bytes_per_s + rate) / 2
            horizon_s = HORIZON_S / 2 if self.doubted else HORIZON_S
            self.doubted = missing_bytes / self.bytes_per_s > horizon_s
            self._rest_s, self._rests_until = 0.0, None
            if self.trusted_bytes is not None:
                self.trusted_bytes = max(self.trusted_bytes, 2 * held_bytes + slice_bytes)
        if gained:
            self._since = now  # what a lost device held takes its time again
        return (self.doubted, self.trusted_bytes) != before

    def due(self, slice_bytes: int, now: float) -> bool:
        """Whether `judge` may have something to say."""
        if self._rests_until is not None:
            return now >= self._rests_until
        if self._missing_bytes == 0:
            return False
        patience_s = deadline_s if self.doubted else doubt_s
        return now - self._since >= patience_s(slice_bytes, self.bytes_per_s)

    def judge(self, slice_bytes: int, starved: bool, now: float) -> bool:
        """Say whether something changes, once it is due; `starved`: what it waits for is not here either."""
        if self._rests_until is not None:
            self._rests_until = None
            self.trusted_bytes = self.held_bytes + slice_bytes
        elif starved:
            self._since = now
            return False
        elif not self.doubted:
            self.doubted = True
            return True
        elif self.trusted_bytes is None or self.trusted_bytes > self.held_bytes + slice_bytes:
            self.trusted_bytes = self.held_bytes + slice_bytes
        else:
            self.trusted_bytes = self.held_bytes
            self._rest_s = min(REST_CAP_S, max(REST_S, 2 * self._rest_s))
            self._rests_until = now + self._rest_s
        self._since = now
        return True
