"""
Decide which lane carries the calls to one node. Pure: time is an argument, nothing is measured here.

The relayed lane is always there and carries the first call. Others are opened in the background and raced
against the one in use: the same messages of real sizes go over both, turn by turn, and their round trips are
compared. What a ping takes says little: a hole-punched data channel with the lower ping may need ten round
trips for 100 KB where the relay needs one. A lane is taken when it is faster by more than the hysteresis, and
left when it is lost, when calls go missing on it, when the calls themselves are slower on it than they are on
the relay, or when a later race says so.

    closed ──Open──> opening ──opened──> open ──Race──> raced: taken or not ──later──> Race …
       ^                │ failed           │ lost
       └──later─────────┴──────────────────┘
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean

RELAYED = "relayed"
SIZES_KB = (6, 12, 24, 100)  # one token of a small model … a prompt piece


@dataclass(frozen=True, slots=True)
class PathPolicy:
    """
    hysteresis, hysteresis_ms: a lane is taken when it is faster by more than both (negative: also when it
    is slower by less, for tests). probes: for each size and lane in a race; clear_probes: of them, when no
    two round trips of the lanes overlap. max_lost: of them; a lane that loses more is not taken. recheck_s:
    how often the lane in use is raced against the relay again. retry_s, retry_max_s: pause before a failed
    or slower lane is tried again, doubled each time. missed: calls that had to be asked again over the
    relay within missed_window_s before a lane is left. traffic: calls of one size that are judged together.
    traffic_fresh_s: how old the relay's calls may be to be compared with; older ones only lead to a race,
    at most one in race_again_s. near_s, near_tries: pause before a lane that was faster at the median and
    lost by one late message is raced again, and how often.
    """

    hysteresis: float = 0.05
    hysteresis_ms: float = 0.2
    probes: int = 8
    clear_probes: int = 4
    max_lost: int = 0
    recheck_s: float = 300.0  # a race costs up to 1 MB, and phones pay for it
    retry_s: float = 15.0
    retry_max_s: float = 600.0
    missed: int = 2
    missed_window_s: float = 10.0
    traffic: int = 16
    traffic_fresh_s: float = 60.0
    race_again_s: float = 15.0
    near_s: float = 3.0
    near_tries: int = 3


@dataclass(slots=True)
class Evidence:
    """Round trips in ms by size class (KB) of the messages, and how many never came back."""

    round_trips_ms: dict[int, list[float]] = field(default_factory=dict)
    lost: int = 0

    def add(self, size_kb: int, round_trip_ms: float | None) -> None:
        """Note one probe; None: it did not come back in time."""
        if round_trip_ms is None:
            self.lost += 1
        else:
            self.round_trips_ms.setdefault(size_kb, []).append(round_trip_ms)

    def percentile_ms(self, size_kb: int, share: float) -> float:
        """Give a percentile of one size class, which must have been measured."""
        ordered = sorted(self.round_trips_ms[size_kb])
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a lane beats another, and in words why. near: at the median it does, only its tail does not."""

    better: bool
    why: str
    near: bool = False


def better_path(current: Evidence, other: Evidence, policy: PathPolicy) -> Verdict:
    """
    Tell whether `other` is faster than `current` by more than the hysteresis.

    Both the mean and the 95th percentile count, since a layer waits for its slowest node and a median sees no
    stall; and no size may be slower on the mean, since a lane that wins at 12 KB may lose at 100 KB by far.
    """
    if other.lost > policy.max_lost:
        return Verdict(False, f"{other.lost} probes were lost")
    sizes = sorted(current.round_trips_ms.keys() & other.round_trips_ms.keys())
    if not sizes:
        return Verdict(False, "nothing to compare")
    gains, words, near = [], [], True
    for size in sizes:
        old, new = [[lane.percentile_ms(size, share) for share in (0.5, 0.95)] for lane in (current, other)]
        words.append(f"{size} KB: {new[0]:.1f}/{new[1]:.1f} ms against {old[0]:.1f}/{old[1]:.1f} ms")
        slack, slack_ms = abs(policy.hysteresis), abs(policy.hysteresis_ms)
        was, would = fmean(current.round_trips_ms[size]), fmean(other.round_trips_ms[size])
        if would > was * (1 + slack) and would - was > slack_ms:
            return Verdict(False, f"slower at {words[-1]}", near and old[0] - new[0] > slack_ms)
        near = near and old[0] - new[0] > max(slack_ms, slack * old[0])
        gain = fmean([was, old[1]]) - fmean([would, new[1]])
        gains.append((gain, gain / max(fmean([was, old[1]]), 1e-9)))
    better = (
        fmean(ms for ms, _ in gains) > policy.hysteresis_ms
        and fmean(share for _, share in gains) > policy.hysteresis
    )
    return Verdict(better, ("" if better else "not faster enough at ") + ", ".join(words), near)


def clear_race(current: Evidence, other: Evidence, policy: PathPolicy) -> bool:
    """
    Tell whether a race need not go on: at every size one lane's slowest beats the other's fastest, by twice
    the hysteresis. On a far relay the rest of the probes would take another second.
    """
    sizes = current.round_trips_ms.keys() & other.round_trips_ms.keys()
    if not sizes or current.lost or other.lost:
        return False
    for fast, slow in ((current, other), (other, current)):
        pairs = [(fast.round_trips_ms[size], slow.round_trips_ms[size]) for size in sizes]
        if all(
            min(len(a), len(b)) >= policy.clear_probes
            and min(b) > max(a) * (1 + 2 * abs(policy.hysteresis))
            and min(b) - max(a) > 2 * abs(policy.hysteresis_ms)
            for a, b in pairs
        ):
            return True
    return False


@dataclass(frozen=True, slots=True)
class Open:
    """Try to open this lane."""

    lane: str


@dataclass(frozen=True, slots=True)
class Race:
    """Measure these two lanes with the same messages; report with `raced`."""

    current: str
    other: str


type PathAction = Open | Race


@dataclass(slots=True)
class _Lane:
    state: str = "closed"  # closed, opening, open
    due_at: float | None = None  # next Open, or next Race when open
    tries: int = 0  # in a row without being taken
    racing: bool = False
    raced_at: float | None = None


@dataclass(slots=True)
class _Calls:
    """Round trips in ms of real calls of one size on one lane; they include computing."""

    first_ms: list[float] = field(default_factory=list)  # since the lane is used
    newest_ms: deque[float] = field(default_factory=deque)
    count: int = 0
    at: float = 0.0


class PathBook:
    """
    The lanes to one node: `current` carries its calls since `since`, for the reason `why`.

    `evidence_at` is when the last race ended that involved the lane in use, None before the first.
    """

    __slots__ = (
        "_calls", "_lanes", "_missed", "_policy", "current", "evidence", "evidence_at", "since", "why",
    )  # fmt: skip

    def __init__(self, lanes: Sequence[str], policy: PathPolicy, now: float) -> None:
        self._policy = policy
        self._lanes = {lane: _Lane(due_at=now) for lane in lanes}
        self._missed: list[float] = []
        self._calls: dict[tuple[str, int], _Calls] = {}  # by lane and size class
        self.current = RELAYED
        self.why = "the first call goes over the relay" if lanes else "this node offers no other lane"
        self.since = now
        self.evidence: Evidence | None = None  # of the lane in use
        self.evidence_at: float | None = None

    def next_timer(self) -> float | None:
        """Give the time of the next thing to do."""
        return min((lane.due_at for lane in self._lanes.values() if lane.due_at is not None), default=None)

    def handle_timer(self, now: float) -> list[PathAction]:
        """Open what is due, race what is open; at most one race at a time."""
        actions: list[PathAction] = []
        for name, lane in self._lanes.items():
            if lane.due_at is None or lane.due_at > now:
                continue
            if lane.state == "closed":
                lane.state, lane.due_at = "opening", None
                actions.append(Open(name))
            elif any(other.racing for other in self._lanes.values()):
                lane.due_at = now + 1.0
            else:
                lane.racing, lane.due_at, lane.raced_at = True, None, now
                in_use = RELAYED if name == self.current else self.current
                actions.append(Race(in_use, name))
        return actions

    def opened(self, name: str, now: float) -> None:
        """A lane can carry calls now: race it as soon as may be."""
        lane = self._lanes[name]
        lane.state, lane.due_at, lane.racing = "open", now, False

    def lost(self, name: str, why: str, now: float) -> None:
        """A lane could not be opened, or ended; if it carried the calls, the relay does now."""
        lane = self._lanes.get(name)
        if lane is None:
            return
        lane.state, lane.racing = "closed", False
        self._later(lane, now)
        if self.current == name:
            self._use(RELAYED, f"{name} lane lost: {why}", now)
        elif self.current == RELAYED:
            self.why = f"{name} lane: {why}"

    def raced(self, race: Race, current: Evidence, other: Evidence, now: float) -> None:
        """A race is over: take the faster lane. `race.other` may be the one in use, against the relay."""
        lane = self._lanes[race.other]
        if lane.state != "open":
            return
        lane.racing = False
        if race.other == self.current:
            self.evidence, self.evidence_at = other, now
            back = better_path(other, current, self._policy)
            if other.lost > self._policy.max_lost:
                self._use(RELAYED, f"{race.other} lost {other.lost} probes", now)
            elif back.better:
                self._use(RELAYED, back.why, now)
            lane.due_at = now + self._policy.recheck_s
        elif race.current == self.current:
            verdict = better_path(current, other, self._policy)
            if verdict.better:
                self._use(race.other, verdict.why, now)
                lane.tries = 0
                lane.due_at = now + self._policy.recheck_s
            else:
                if self.current == RELAYED:
                    self.why = f"{race.other} is {verdict.why}"
                self._later(lane, now)
                if verdict.near and lane.tries <= self._policy.near_tries:
                    lane.due_at = now + self._policy.near_s
            self.evidence, self.evidence_at = (other if verdict.better else current), now
        else:
            lane.due_at = now  # the lane in use changed meanwhile

    def missed(self, name: str, now: float) -> None:
        """A call on this lane had to be asked again over the relay."""
        if name != self.current or name == RELAYED:
            return
        self._missed = [at for at in self._missed if now - at < self._policy.missed_window_s] + [now]
        if len(self._missed) >= self._policy.missed:
            self._use(RELAYED, f"{len(self._missed)} calls went missing on the {name} lane", now)
            self._later(self._lanes[name], now)

    def called(self, name: str, size_kb: int, took_ms: float, now: float) -> bool:
        """Note what a call took on a lane; True if that changed a lane or a timer."""
        if self._policy.hysteresis < 0:
            return False  # any lane that works is taken, however slow
        calls = self._calls.setdefault((name, size_kb), _Calls())
        calls.newest_ms.append(took_ms)
        calls.count, calls.at = calls.count + 1, now
        if len(calls.first_ms) < self._policy.traffic:
            calls.first_ms.append(took_ms)
        if len(calls.newest_ms) > self._policy.traffic:
            calls.newest_ms.popleft()
        if name == RELAYED or name != self.current or calls.count % self._policy.traffic:
            return False
        mine = Evidence({size_kb: list(calls.newest_ms)})
        relayed = self._calls.get((RELAYED, size_kb), _Calls())
        if relayed.count >= self._policy.traffic:
            verdict = better_path(mine, Evidence({size_kb: list(relayed.newest_ms)}), self._policy)
            if verdict.better and now - relayed.at <= self._policy.traffic_fresh_s:
                self._use(RELAYED, f"calls were slower on the {name} lane: {verdict.why}", now)
                self._later(self._lanes[name], now)
                return True
            if verdict.better:
                return self._race_soon(name, now)
        slower = better_path(mine, Evidence({size_kb: calls.first_ms}), self._policy).better
        return slower and self._race_soon(name, now)

    def _race_soon(self, name: str, now: float) -> bool:
        """Calls on the lane in use are slower than they were: measure, unless that was done just now."""
        lane = self._lanes[name]
        just = lane.raced_at is not None and now - lane.raced_at < self._policy.race_again_s
        if lane.state != "open" or lane.racing or just:
            return False
        lane.due_at = now
        return True

    def network_changed(self, now: float) -> None:
        """What failed or was slower before may be different now."""
        for lane in self._lanes.values():
            lane.tries = 0
            if lane.state != "opening" and not lane.racing:
                lane.due_at = now

    def _later(self, lane: _Lane, now: float) -> None:
        pause_s = min(self._policy.retry_s * 2.0**lane.tries, self._policy.retry_max_s)
        lane.tries = min(lane.tries + 1, 16)
        lane.due_at = now + pause_s

    def _use(self, name: str, why: str, now: float) -> None:
        self.current, self.why, self.since = name, why, now
        self._missed = []
        for lane, size_kb in list(self._calls):
            if lane == name != RELAYED:
                del self._calls[lane, size_kb]  # what it was when it was used before says nothing
