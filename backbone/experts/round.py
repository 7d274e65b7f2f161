"""
One layer call from plan to sum: a state machine without sockets, clocks or floats.

    picks ─plan→ tasks ─┬─ Send to a node ── partial ──────────────┐
                        │     ├─ hedge time: Send to a replica too │
                        │     ├─ deadline, failure, node gone:     ├─→ integer sum → Finished
                        │     │     plan again without that node   │
                        └─ Compute on this machine ────────────────┘

Every task tries each holder at most once and the local kernel last, so a round always ends. Whichever attempt
of a task answers first counts; its siblings are cancelled and their answers are dropped by call id, so
nothing is added twice. An answer is never partly used.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from backbone.experts.dispatch import LOCAL, Picks, covers, plan

type Sums = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Send:
    """Ask a node; its answer carries `call_id`."""

    call_id: int
    node: str
    picks: Picks
    deadline_s: float


@dataclass(frozen=True, slots=True, eq=False)
class Compute:
    """Use the local kernel; report back with `computed` or `compute_failed`."""

    call_id: int
    picks: Picks


@dataclass(frozen=True, slots=True)
class CancelCall:
    """Nobody waits for this call any more."""

    call_id: int
    node: str


@dataclass(frozen=True, slots=True)
class Attempt:
    """One failed try, for the log and for the error a client sees."""

    node: str
    phase: str
    reason: str


type Action = Send | Compute | CancelCall


@dataclass(frozen=True, slots=True)
class Timing:
    """How long to wait for a node: seconds until its deadline, seconds until a hedge or None."""

    deadline_s: float
    hedge_after_s: float | None


@dataclass(slots=True, eq=False)
class _Task:
    picks: Picks
    tried: set[str]
    live: dict[int, str | None] = field(default_factory=dict)  # call id -> node, or LOCAL
    deadlines: dict[int, float] = field(default_factory=dict)  # call id -> time
    hedge_at: float | None = None
    done: bool = False


class Round:
    """
    Drive the picks of one layer call until their sum is known.

    `sums` is [num_tokens, hidden_dim] int64 on the call's grid, complete once `finished` and not `failed`.
    `attempts` lists what went wrong on the way, also when it ended well.
    """

    __slots__ = (
        "_call_ids",
        "_holders",
        "_preference",
        "_task_of_call",
        "_tasks",
        "_timing",
        "attempts",
        "failed",
        "hedges",
        "sums",
    )

    def __init__(
        self,
        *,
        shape: tuple[int, int],
        holders: Mapping[int, Collection[str]],
        preference: Sequence[str],
        timing: Callable[[str], Timing],
        call_ids: Iterator[int],
    ) -> None:
        self._holders = holders
        self._preference = preference
        self._timing = timing
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
        return self._assign(picks, set(), now)

    def partial(self, call_id: int, sums: Sums, now: float) -> list[Action]:
        """A node or the local kernel answered; a call that is no longer awaited is ignored."""
        task = self._task_of_call.get(call_id)
        if task is None or call_id not in task.live:
            return []
        self.sums += sums
        return self._close(task, winner=call_id)

    def failure(self, call_id: int, phase: str, reason: str, now: float) -> list[Action]:
        """An attempt failed: ask the next holder, unless a hedge is still under way."""
        task = self._task_of_call.get(call_id)
        if task is None or call_id not in task.live:
            return []
        node = task.live.pop(call_id)
        task.deadlines.pop(call_id, None)
        self.attempts.append(Attempt(node or "local kernel", phase, reason))
        if node is LOCAL and not task.live:
            self.failed = True
            return [action for open_task in self._tasks for action in self._close(open_task, winner=None)]
        if task.live:
            return []
        task.done = True  # its picks live on in the tasks that replace it
        return self._assign(task.picks, task.tried, now)

    def node_gone(self, node: str, now: float) -> list[Action]:
        """A node left; what it owed is asked elsewhere at once."""
        calls = [call for task in self._tasks for call, name in task.live.items() if name == node]
        return [action for call in calls for action in self.failure(call, "send", "left the swarm", now)]

    def awaits(self, call_id: int) -> str | None:
        """Name the node whose answer to this call still counts."""
        task = self._task_of_call.get(call_id)
        return None if task is None else task.live.get(call_id)

    def next_timer(self) -> float | None:
        """Give the time of the next hedge or deadline."""
        times = [at for task in self._tasks if not task.done for at in task.deadlines.values()]
        times += [task.hedge_at for task in self._tasks if not task.done and task.hedge_at is not None]
        return min(times, default=None)

    def handle_timer(self, now: float) -> list[Action]:
        """Hedge what is late, give up what is overdue."""
        actions: list[Action] = []
        for task in list(self._tasks):
            overdue = [call for call, at in task.deadlines.items() if at <= now]
            for call in overdue:
                node = task.live[call]
                assert node is not None
                actions.append(CancelCall(call, node))
                actions += self.failure(call, "compute", "deadline passed", now)
            if not task.done and task.hedge_at is not None and task.hedge_at <= now:
                actions += self._hedge(task, now)
        return actions

    def _assign(self, picks: Picks, tried: set[str], now: float) -> list[Action]:
        actions: list[Action] = []
        for part in plan(picks, self._holders, self._preference, tried):
            task = _Task(part.picks, set(tried))
            self._tasks.append(task)
            actions.append(self._ask(task, part.holder, now))
        return actions

    def _ask(self, task: _Task, node: str | None, now: float) -> Action:
        call_id = next(self._call_ids)
        task.live[call_id] = node
        self._task_of_call[call_id] = task
        if node is LOCAL:
            return Compute(call_id, task.picks)
        task.tried.add(node)
        timing = self._timing(node)
        task.deadlines[call_id] = now + timing.deadline_s
        if len(task.live) == 1 and timing.hedge_after_s is not None:
            task.hedge_at = now + timing.hedge_after_s
        return Send(call_id, node, task.picks, timing.deadline_s)

    def _hedge(self, task: _Task, now: float) -> list[Action]:
        task.hedge_at = None  # one hedge per task
        self.hedges += 1
        replicas = (
            node
            for node in self._preference
            if node not in task.tried and covers(node, task.picks, self._holders)
        )
        return [self._ask(task, next(replicas, LOCAL), now)]

    def _close(self, task: _Task, winner: int | None) -> list[Action]:
        losers = [(call, node) for call, node in task.live.items() if call != winner and node is not LOCAL]
        task.live.clear()
        task.deadlines.clear()
        task.hedge_at = None
        task.done = True
        return [CancelCall(call, node) for call, node in losers if node is not None]
