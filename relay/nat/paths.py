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

from relay.nat.evidence import (
    LONGEST_PROBE_KB,
    RELAYED,
    Evidence,
    PathPolicy,
    better_path,
)
from relay.nat.long_calls import LongCalls


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
        "_calls", "_lanes", "_long", "_missed", "_policy",
        "current", "evidence", "evidence_at", "since", "why",
    )  # fmt: skip

    def __init__(self, lanes: Sequence[str], policy: PathPolicy, now: float) -> None:
        self._policy = policy
        self._lanes = {lane: _Lane(due_at=now) for lane in lanes}
        self._missed: list[float] = []
        self._calls: dict[tuple[str, int], _Calls] = {}  # by lane and size class
        self._long: LongCalls | None = None  # while another lane than the relay is used
        self.current = RELAYED
        self.why = "the first call goes over the relay" if lanes else "this node offers no other lane"
        self.since = now
        self.evidence: Evidence | None = None  # of the lane in use
        self.evidence_at: float | None = None

    def lane_of(self, size_kb: int) -> str:
        """Name the lane of a call that is sent now."""
        if size_kb <= LONGEST_PROBE_KB or self._long is None:
            return self.current
        return self._long.take()

    @property
    def lane_of_long_calls(self) -> str:
        """For people; empty while both are measured."""
        return self.current if self._long is None else self._long.choice or ""

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
            if self.current == RELAYED:
                lane.tries = min(lane.tries + 1, 16)
            else:
                lane.tries = max(0, lane.tries - 1)  # it held: only that, not being taken, takes doubts away
            lane.due_at = now + self._policy.recheck_s
        elif race.current == self.current:
            verdict = better_path(current, other, self._policy)
            if verdict.better:
                self._use(race.other, verdict.why, now)
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
        if size_kb > LONGEST_PROBE_KB:
            if self._long is not None:
                self._long.called(name, size_kb, took_ms, now)
            return False
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
        self._long = None if self.current == RELAYED else LongCalls(self.current, self._policy)
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
        self._long = None if name == RELAYED else LongCalls(name, self._policy)
        for lane, size_kb in list(self._calls):
            if lane == name != RELAYED:
                del self._calls[lane, size_kb]  # what it was when it was used before says nothing
