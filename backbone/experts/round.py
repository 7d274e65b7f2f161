"""
One layer call from plan to sum: a state machine without sockets, clocks or floats.

    picks ─plan→ tasks ─┬─ Send to a node ── partial ─────────────────┐
                        │     ├─ late: a replica is asked too, or this │
                        │     │     machine computes                   ├─→ integer sum → finished
                        │     └─ failure, node gone: planned again     │
                        └─ Compute on this machine ────────────────────┘

How long nodes are waited for is one number, `wait_s`: what this machine would take for the whole call. Then
it starts with all that is still open, so a call takes at most twice as long as without any node, however many
fail and in whatever way. Before that a node is late when its own patience ends.

Every task asks each node at most once and this machine at most once, so a round always ends. Whichever
attempt of a task answers first counts; the answers of its siblings are dropped by call id, so nothing is
added twice. An answer is never partly used.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

import numpy as np
import numpy.typing as npt

from backbone.experts.dispatch import LOCAL, Part, Picks

type Sums = npt.NDArray[np.int64]

LAST_WAIT_S = 1.0  # for nodes that are late, once this machine failed to compute


@dataclass(frozen=True, slots=True, eq=False)
class Send:
    """Ask a node; its answer carries `call_id`."""

    call_id: int
    node: str
    picks: Picks


@dataclass(frozen=True, slots=True, eq=False)
class Compute:
    """Use the local kernel; report back with `partial` or `failure`."""

    call_id: int
    picks: Picks


@dataclass(frozen=True, slots=True)
class Late:
    """A node's answer is late. It still counts if it is the first."""

    call_id: int
    node: str


@dataclass(frozen=True, slots=True)
class Spare:
    """Somebody else was first; what this call brings is not needed any more."""

    call_id: int
    node: str


class Fault(StrEnum):
    """What kind of failed try an attempt was, and whose."""

    FAILED = "failed"  # the node's: it refused, or answered garbage
    LATE = "late"  # not back in time; perhaps nobody's
    GONE = "gone"  # it left, or the path to it did
    OURS = "ours"  # nothing left this machine


@dataclass(frozen=True, slots=True)
class Attempt:
    """One failed try, for the log and for the error a client sees."""

    node: str
    phase: str
    reason: str
    fault: Fault = Fault.FAILED


type Action = Send | Compute | Late | Spare


class Planner(Protocol):
    """Who computes what, given what each holder has shown."""

    def parts(self, picks: Picks, tried: Collection[str], left_s: float) -> list[Part]:
        """Divide picks among holders that were not tried and answer within `left_s`, and this machine."""
        ...

    def backup(self, picks: Picks, tried: Collection[str], left_s: float) -> str | None:
        """Name one node that holds all of these picks and answers within `left_s`; else LOCAL."""
        ...

    def patience_s(self, node: str, picks: Picks) -> float:
        """Give the time after which this node's answer is late."""
        ...


@dataclass(slots=True, eq=False)
class _Task:
    picks: Picks
    tried: set[str]
    live: dict[int, str | None] = field(default_factory=dict)  # call id -> node, or LOCAL
    late: set[int] = field(default_factory=set)
    look_at: float | None = None  # when the newest attempt is late
    here: bool = False  # this machine was asked
    done: bool = False


class Round:
    """
    Drive the picks of one layer call until their sum is known.

    `sums` is [num_tokens, hidden_dim] int64 on the call's grid, complete once `finished` and not `failed`.
    `attempts` lists what went wrong on the way, also when it ended well.
    """

    __slots__ = (
        "_call_ids",
        "_here_at",
        "_planner",
        "_task_of_call",
        "_tasks",
        "_wait_s",
        "attempts",
        "failed",
        "hedges",
        "sums",
    )

    def __init__(
        self, *, shape: tuple[int, int], planner: Planner, wait_s: float, call_ids: Iterator[int]
    ) -> None:
        self._planner = planner
        self._wait_s = wait_s
        self._here_at = 0.0
        self._call_ids = call_ids
        self._tasks: list[_Task] = []
        self._task_of_call: dict[int, _Task] = {}
        self.sums: Sums = np.zeros(shape, np.int64)
        self.attempts: list[Attempt] = []
        self.hedges = 0
        self.failed = False

    @property
    def finished(self) -> bool:
        """True when nothing is awaited any more, whether it ended well or not."""
        return self.failed or all(task.done for task in self._tasks)

    def start(self, picks: Picks, now: float) -> list[Action]:
        """Plan the picks; give the sends first, so that the network works while this machine computes."""
        self._here_at = now + self._wait_s
        return self._assign(picks, set(), now)

    def partial(self, call_id: int, sums: Sums, now: float) -> list[Action]:
        """A node or the local kernel answered; a call that is no longer awaited is ignored."""
        task = self._task_of_call.get(call_id)
        if task is None or call_id not in task.live:
            return []
        self.sums += sums
        return self._close(task, winner=call_id)

    def failure(
        self, call_id: int, phase: str, reason: str, now: float, fault: Fault = Fault.FAILED
    ) -> list[Action]:
        """An attempt failed: ask the next holder, unless another one is still under way."""
        task = self._task_of_call.get(call_id)
        if task is None or call_id not in task.live:
            return []
        node = task.live.pop(call_id)
        self.attempts.append(Attempt(node or "local kernel", phase, reason, fault))
        if node is LOCAL:
            return self._nobody_here(task, now)
        if task.here:
            return [] if task.live else self._fail()
        if task.live:
            return []
        task.done = True  # its picks live on in the tasks that replace it
        return self._assign(task.picks, task.tried, now)

    def node_gone(self, node: str, now: float) -> list[Action]:
        """A node left; what it owed is asked elsewhere at once."""
        calls = [call for task in self._tasks for call, name in task.live.items() if name == node]
        reason = "left the swarm"
        return [action for call in calls for action in self.failure(call, "send", reason, now, Fault.GONE)]

    def awaits(self, call_id: int) -> str | None:
        """Name the node whose answer to this call still counts."""
        task = self._task_of_call.get(call_id)
        return None if task is None else task.live.get(call_id)

    def computes(self, call_id: int) -> bool:
        """Tell whether what this machine computes for this call still counts."""
        task = self._task_of_call.get(call_id)
        return task is not None and call_id in task.live

    def next_timer(self) -> float | None:
        """Give the time at which the next answer is late."""
        times = [task.look_at for task in self._tasks if not task.done and task.look_at is not None]
        return min(times, default=None)

    def handle_timer(self, now: float) -> list[Action]:
        """Ask somebody else, too, for what is late."""
        actions: list[Action] = []
        for task in list(self._tasks):
            if task.done or task.look_at is None or task.look_at > now:
                continue
            task.look_at = None
            if task.here:
                return actions + self._fail()
            for call_id, node in task.live.items():
                if node is not None and call_id not in task.late:
                    task.late.add(call_id)
                    self.attempts.append(Attempt(node, "compute", "not back in time", Fault.LATE))
                    actions.append(Late(call_id, node))
            self.hedges += 1
            holder = self._planner.backup(task.picks, task.tried, self._here_at - now)
            actions.append(self._ask(task, holder, now))
        return actions

    def _assign(self, picks: Picks, tried: set[str], now: float) -> list[Action]:
        actions: list[Action] = []
        for part in self._planner.parts(picks, tried, self._here_at - now):
            task = _Task(part.picks, set(tried))
            self._tasks.append(task)
            actions.append(self._ask(task, part.holder, now))
        return actions

    def _ask(self, task: _Task, node: str | None, now: float) -> Action:
        call_id = next(self._call_ids)
        task.live[call_id] = node
        self._task_of_call[call_id] = task
        if node is LOCAL:
            task.here, task.look_at = True, None
            return Compute(call_id, task.picks)
        task.tried.add(node)
        task.look_at = min(now + self._planner.patience_s(node, task.picks), max(self._here_at, now))
        return Send(call_id, node, task.picks)

    def _nobody_here(self, task: _Task, now: float) -> list[Action]:
        """This machine cannot compute it; perhaps a node still does."""
        if not task.live:
            holder = self._planner.backup(task.picks, task.tried, float("inf"))
            if holder is LOCAL:
                return self._fail()
            action = self._ask(task, holder, now)
            task.look_at = now + LAST_WAIT_S + self._wait_s
            return [action]
        task.look_at = now + LAST_WAIT_S + self._wait_s
        return []

    def _fail(self) -> list[Action]:
        self.failed = True
        return [action for open_task in self._tasks for action in self._close(open_task, winner=None)]

    def _close(self, task: _Task, winner: int | None) -> list[Action]:
        losers = [(call, node) for call, node in task.live.items() if call != winner and node is not LOCAL]
        task.live.clear()
        task.look_at = None
        task.done = True
        return [Spare(call, node) for call, node in losers if node is not None]
