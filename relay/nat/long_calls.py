"""
Decide whether calls longer than any probe take the lane in use or the relay. Pure.

A lane that wins at 100 KB may carry a prompt's 400 KB at a third of the relay's rate, and probes of that size
would cost what the calls cost. So the calls themselves are the measure: turn by turn over both, until one is
clearly faster or enough were seen; then all take that one, until it is time to look again.
"""

from collections import deque

from relay.nat.evidence import LONGEST_PROBE_KB, RELAYED, Evidence, PathPolicy, better_path, clear_race


class LongCalls:
    """Long calls to one node while `lane` carries the others. `choice` is None while both are measured."""

    __slots__ = ("_lane", "_newest_ms", "_pause_s", "_policy", "_sent", "_settled_at", "_taken", "choice")

    def __init__(self, lane: str, policy: PathPolicy) -> None:
        self._lane = lane
        self._policy = policy
        self._settled_at = 0.0
        self._pause_s = (
            policy.race_again_s
        )  # doubled each time: a line that stalls now and then looks worse often
        self._measure(lane)

    def _measure(self, incumbent: str) -> None:
        """Look at both again; `incumbent` stays unless the other is better."""
        self.choice: str | None = None
        other = RELAYED if incumbent == self._lane else self._lane
        self._taken = {incumbent: Evidence(), other: Evidence()}
        self._sent = {incumbent: 0, other: 0}
        self._newest_ms: deque[float] = deque(maxlen=self._policy.probes)

    def take(self) -> str:
        """Name the lane of the next long call."""
        if self._policy.hysteresis < 0:
            return self._lane  # any lane that works is taken, however slow
        if self.choice is not None:
            return self.choice
        lane = min(self._sent, key=self._sent.__getitem__)
        self._sent[lane] += 1
        return lane

    def called(self, lane: str, size_kb: int, took_ms: float, now: float) -> None:
        """Note what a long call took; what counts is the time for each byte."""
        if lane not in self._taken:
            return
        took_ms *= LONGEST_PROBE_KB / size_kb
        if self.choice is None:
            self._taken[lane].add(LONGEST_PROBE_KB, took_ms)
            self._settle(now)
        elif lane == self.choice:
            self._newest_ms.append(took_ms)
            if self._is_over(now):
                self._pause_s = min(2 * self._pause_s, self._policy.recheck_s)
                self._measure(self.choice)

    def _settle(self, now: float) -> None:
        (incumbent, mine), (other, theirs) = self._taken.items()
        counts = [len(each.round_trips_ms.get(LONGEST_PROBE_KB, ())) for each in (mine, theirs)]
        if min(counts) < self._policy.probes and not clear_race(mine, theirs, self._policy):
            return
        self.choice = other if better_path(mine, theirs, self._policy).better else incumbent
        self._settled_at = now

    def _is_over(self, now: float) -> bool:
        """Whether the choice is old, or no longer what it was when it was made."""
        assert self.choice is not None
        age_s = now - self._settled_at
        if age_s < self._pause_s or len(self._newest_ms) < self._policy.probes:
            return False
        newest = Evidence({LONGEST_PROBE_KB: list(self._newest_ms)})
        return (
            age_s >= self._policy.recheck_s
            or better_path(newest, self._taken[self.choice], self._policy).better
        )
