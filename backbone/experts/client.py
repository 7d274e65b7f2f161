"""
The dispatcher: answer the engine's layer calls with the swarm. The driver around `round.Round`.

One call: encode x once, plan, send one frame per node, compute locally what is quicker here or what nobody
holds, add up the partials as integers, give back floats. Everything runs on the event loop but the local
kernel, which has threads of its own.

A call that somebody else answered first is not cancelled at once: what its answer took is worth knowing, and
the node is not asked again until then. It is given up after a while. Calls whose engine hung up are cancelled
at once, and nobody is blamed.
"""

import asyncio
import itertools
import logging
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping
from time import monotonic
from typing import Any

import numpy as np
import numpy.typing as npt

from backbone.engine.link import LayerCall
from backbone.errors import LayerFailed, SwarmError
from backbone.experts.asked import Asked, PlannerOfCall
from backbone.experts.combine import step_exponents, to_float
from backbone.experts.deadlines import Size
from backbone.experts.dispatch import Picks, row_chunks
from backbone.experts.local import LocalExperts, LocalRows
from backbone.experts.native import KernelError
from backbone.experts.nodes import NOBODY, Node, NodeTable, eligible
from backbone.experts.planner import FEW_ROWS
from backbone.experts.plans import LayerPlan
from backbone.experts.record import Recorder
from backbone.experts.round import Action, Compute, Fault, Late, Round, Send, Spare
from backbone.experts.standing import DispatchPolicy, Standing
from backbone.experts.tally import Tally, Work
from backbone.experts.trial import Trial
from backbone.lanes.lane import Lane, LaneClosed
from relay.wire.errors import LocalProtocolError, RemoteProtocolError
from relay.wire.messages import Dispatch
from relay.wire.session import CorruptReceived, FailureReceived, PartialReceived
from relay.wire.tensors import Grid, encode_x, row_exponents

__all__ = ["Answer", "DispatchPolicy", "Dispatcher"]

log = logging.getLogger(__name__)

type Answer = PartialReceived | FailureReceived | CorruptReceived

# A node that says so is at fault only if others can compute it: see `_blame`.
NUMERIC = ("non_finite", "grid_overflow")


class _Call:
    """A round in flight and what its frames need."""

    __slots__ = (
        "closed",
        "done",
        "noted",
        "num_tokens",
        "numeric",
        "picks",
        "plan",
        "round",
        "rows",
        "shared",
        "timer",
    )

    def __init__(
        self, plan: LayerPlan, rows: LocalRows, picks: Picks, done: "asyncio.Future[None]", round_: Round
    ) -> None:
        self.plan = plan
        self.rows = rows
        self.picks = picks
        self.num_tokens = len(rows.row_exponents)
        self.done = done
        self.round = round_
        self.noted = 0  # attempts already written to the records
        self.numeric: list[str] = []  # nodes that refused the numbers
        self.timer: asyncio.TimerHandle | None = None
        self.closed = False  # nothing may be sent for it any more
        self.shared = False  # nodes have a part in it


class Dispatcher:
    """
    Answer layer calls; owns the table of nodes and what each has shown.

    Feed it from the lane: `nodes_changed` with each complete list, `answer_received` with each answer,
    `lane_lost` when the connection to the relay went away. All on one event loop.
    """

    def __init__(
        self,
        plans: Mapping[int, LayerPlan],
        grid: Grid,
        local: LocalExperts,
        policy: DispatchPolicy,
        model_tag: int,
        clock: Callable[[], float] = monotonic,
        recorder: Recorder | None = None,
    ) -> None:
        self.plans = plans
        self.grid = grid
        self.standing = Standing(policy)
        self.nodes = NodeTable()
        self.tally = Tally()
        self.lane: Lane | None = None
        self._local = local
        self._model_tag = model_tag
        self._clock = clock
        self._recorder = recorder
        self._asked: dict[int, Asked] = {}  # by call id: all that nodes have not answered
        self._awaited: dict[int, _Call] = {}  # by call id: those of them that a round waits for
        self._call_ids = itertools.count(1)
        self._trial = Trial()
        self._give_up: asyncio.TimerHandle | None = None

    @property
    def policy(self) -> DispatchPolicy:
        """How we behave; may be changed between calls."""
        return self.standing.policy

    @policy.setter
    def policy(self, policy: DispatchPolicy) -> None:
        self.standing.policy = policy

    async def call(self, call: LayerCall) -> npt.NDArray[np.float32]:
        """
        Compute one layer for some rows: [num_tokens, hidden_dim] float32.

        Cancelled, it cancels what nodes were asked.

        Raises:
            LayerFailed: not even the local kernel could compute it; names layer, holder, phase.
        """
        plan = self.plans.get(call.layer)
        if plan is None:
            raise SwarmError(f"layer {call.layer} has no routed experts in this model")
        began = self._clock()
        chunks = row_chunks(*call.x.shape)
        if len(chunks) == 1:
            outputs = await self._rows(plan, call.x, call.ids, call.weights)
        else:
            parts = [self._rows(plan, call.x[rows], call.ids[rows], call.weights[rows]) for rows in chunks]
            outputs = np.concatenate(await _all_or_none(parts))
        self.tally.called(len(call.x), self._clock() - began)
        return outputs

    def nodes_changed(self, nodes: list[Node]) -> None:
        """Take the complete list of nodes that are ready."""
        nodes = eligible(nodes, self.policy.allow_inexact)
        gone = self.nodes.replace(nodes)
        self._drop(gone)
        for node_id in self.standing.met(((node.node_id, node.peer) for node in nodes), self.nodes.by_id):
            self.tally.work.pop(node_id, None)
        self._lose(gone)

    def path_changed(self, node_id: str, path: str) -> None:
        """Another lane carries a node's calls now; nothing else follows from it."""
        self.nodes.set_path(node_id, path)
        if (work := self.tally.work.get(node_id)) is not None:
            work.path = path

    def usable(self, node_id: str, now: float) -> bool:
        """Tell whether a node would be asked now, or rests after failures."""
        return self.standing.usable(node_id, now)

    def lane_lost(self) -> None:
        """The relay is unreachable: whatever its nodes owe is computed elsewhere, now."""
        gone = self.nodes.replace([])
        self._drop(gone)
        self._lose(gone)

    # -- what comes in

    def answer_received(self, answer: Answer) -> None:
        """Take a partial, a failure or garbage in place of one; what nobody was asked is dropped."""
        asked = self._asked.get(answer.call_id)
        node = self.nodes.by_peer.get(answer.peer)
        if asked is None or node is None or asked.node_id != node.node_id:
            return
        now = self._clock()
        match answer:
            case FailureReceived(failure=failure):
                self._refused(answer.call_id, failure.phase, f"{failure.code}: {failure.message}", now)
            case CorruptReceived(error=error):
                self._refused(answer.call_id, "return", str(error), now)
            case PartialReceived():
                try:
                    sums = asked.read(answer, node.epoch, self.grid)
                except RemoteProtocolError as exc:
                    self._refused(answer.call_id, "return", str(exc), now)
                    return
                self._answered(node, asked, answer, sums, now)

    def _answered(
        self, node: Node, asked: Asked, answer: PartialReceived, sums: npt.NDArray[np.int64], now: float
    ) -> None:
        call_id, partial = answer.call_id, answer.partial
        call = self._awaited.get(call_id)
        took_s, compute_s = now - asked.at, partial.compute_us * 1e-6
        self._over(call_id)
        self.standing.answered(node.node_id, asked.size, took_s, compute_s, now, asked.late)
        if self._recorder is not None:
            self._recorder.answered(node, call_id, partial)
        work = self._work(node)
        work.bytes_in += partial.frame_bytes
        if call is None or call.round.awaits(call_id) != node.node_id:
            return
        work.used(call.plan.layer, asked.size.num_rows, took_s, compute_s)
        self._act(call, call.round.partial(call_id, asked.scatter(sums, call.num_tokens), now), now)

    def _refused(self, call_id: int, phase: str, reason: str, now: float) -> None:
        """A node answered that it cannot, or nothing sensible."""
        asked, call = self._asked[call_id], self._awaited.get(call_id)
        self._over(call_id)
        if call is not None and call.round.awaits(call_id) is not None:
            self._act(call, call.round.failure(call_id, phase, reason, now), now)
            return
        self.standing.records[asked.node_id].failed(now)
        if (node := self.nodes.by_id.get(asked.node_id)) is not None:
            self._work(node).failed(f"{phase}: {reason}")

    # -- one round

    async def _rows(
        self,
        plan: LayerPlan,
        x: npt.NDArray[np.float32],
        ids: npt.NDArray[np.int32],
        weights: npt.NDArray[np.float32],
    ) -> npt.NDArray[np.float32]:
        try:
            encoded = encode_x(x, plan.x_encoding)
        except LocalProtocolError as exc:  # the model itself produced NaN or infinity
            raise self._gave_up(plan.layer, str(exc)) from exc
        exponents = row_exponents(x)
        rows = LocalRows(encoded, plan.x_encoding, exponents, self.grid, plan.layer_exponents)
        picks, now = Picks.of(ids, weights), self._clock()
        local = self._local.cost(plan.layer, len(picks.experts), now)
        alone = self.policy.local_only or self.lane is None
        holders = NOBODY if alone else self.nodes.holders(plan.layer)
        bulk = len(x) > FEW_ROWS and bool(holders) and not self.policy.eager
        cold = bulk and local.loads(picks)
        planner = PlannerOfCall(
            self.standing, holders, local, plan.row_bytes(self.grid), len(x), self._clock,
            share=not bulk or self._trial.share(),
        )  # fmt: skip
        wait_s = max(local.whole(picks), self.policy.slack_s)
        round_ = Round(shape=x.shape, planner=planner, wait_s=wait_s, call_ids=self._call_ids)
        call = _Call(plan, rows, picks, asyncio.get_running_loop().create_future(), round_)
        try:
            self._act(call, round_.start(picks, now), now)
            if holders:
                self._probe(call, planner, now + wait_s)
            await call.done
        finally:
            self._forget(call)
        if bulk and (call.shared or not cold):
            work = len(picks.experts) * plan.formula.slice_bytes
            self._trial.noted(call.shared, (self._clock() - now) / work)
        if round_.failed:
            tries = "; ".join(f"{self._name(a.node)} ({a.phase}): {a.reason}" for a in round_.attempts)
            raise self._gave_up(plan.layer, tries)
        try:
            return to_float(round_.sums, step_exponents(exponents, plan.layer_exponents, self.grid))
        except OverflowError as exc:
            raise self._gave_up(plan.layer, str(exc)) from exc

    def _gave_up(self, layer: int, why: str) -> LayerFailed:
        self.tally.failed_calls += 1
        return LayerFailed(layer, why)

    def _name(self, node_id: str) -> str:
        node = self.nodes.by_id.get(node_id)
        return node_id if node is None else f"{node.name} [{node_id[:8]}]"

    def _act(self, call: _Call, actions: list[Action], now: float) -> None:
        """Carry out what the round wants, sends before local work, until nothing is left to do."""
        if call.closed:
            return
        local: list[Compute] = []
        pending = list(actions)
        while pending:
            match pending.pop(0):
                case Send() as send:
                    pending += self._send(call, send, now)
                case Compute() as compute:
                    local.append(compute)
                case Late(call_id, node_id):
                    self._late(call_id, node_id)
                case Spare(call_id, node_id):
                    self._spare(call_id, node_id)
        for compute in local:
            self._compute(call, compute, now)
        self._settle(call, now)

    def _send(self, call: _Call, send: Send, now: float) -> list[Action]:
        node = self.nodes.by_id.get(send.node)
        if node is None or self.lane is None:
            return call.round.failure(send.call_id, "send", "left the swarm", now, Fault.GONE)
        try:
            self._ask(call, node, send.call_id, send.picks, now, probe=False)
        except LaneClosed as exc:  # our own socket, or a lane's: nothing reached the node
            return call.round.failure(send.call_id, "send", str(exc), now, Fault.OURS)
        self._awaited[send.call_id] = call
        call.shared = True
        return []

    def _ask(self, call: _Call, node: Node, call_id: int, picks: Picks, now: float, probe: bool) -> Size:
        """Send some picks of a call to a node; raises LaneClosed."""
        plan, lane = call.plan, self.lane
        assert lane is not None
        sent_rows = None if picks.counts.all() else np.flatnonzero(picks.counts)
        rows = call.rows if sent_rows is None else call.rows.take(sent_rows)
        dispatch = Dispatch(
            model_tag=self._model_tag,
            layer=plan.layer,
            hidden_dim=plan.formula.hidden_dim,
            x_encoding=rows.encoding,
            grid=rows.grid,
            row_exponents=rows.row_exponents,
            counts=picks.counts if sent_rows is None else picks.counts[sent_rows],
            experts=picks.experts,
            weights=picks.weights,
            x=rows.x,
        )
        size = Size(len(rows.row_exponents) * plan.row_bytes(self.grid), dispatch.num_picks)
        record = self.standing.records[node.node_id]
        give_up_s = record.give_up_s(size)
        deadline_ms = int(give_up_s * 1e3)
        size_bytes = lane.send_dispatch(node.peer, call_id, node.epoch, deadline_ms, dispatch)
        record.asked(size)
        self._asked[call_id] = Asked(
            node.node_id, now, now + give_up_s, size, plan, dispatch, sent_rows, probe
        )
        self._watch(now)
        self._work(node).bytes_out += size_bytes
        if self._recorder is not None:
            self._recorder.sent(node, plan, dispatch, call_id, deadline_ms)
        return size

    def _probe(self, call: _Call, planner: PlannerOfCall, until: float) -> None:
        """Measure one node beside the work, if one is due; nobody waits for it."""
        began = self._clock()
        found = planner.probe(call.picks, began, until)
        if found is None:
            return
        node_id, picks = found
        node = self.nodes.by_id.get(node_id)
        if node is None or self.lane is None:
            return
        try:
            size = self._ask(call, node, next(self._call_ids), picks, began, probe=True)
        except LaneClosed:
            return
        self.standing.probe_sent(node_id, size, began, self._clock())

    def _compute(self, call: _Call, compute: Compute, now: float) -> None:
        try:
            sums = self._local.compute_at_once(call.plan.layer, call.rows, compute.picks)
        except KernelError as exc:
            self._act(call, call.round.failure(compute.call_id, "compute", str(exc), now), now)
            return
        if sums is not None:
            self._computed_well(call, compute, now, sums)
            return
        task = asyncio.ensure_future(self._local.compute(call.plan.layer, call.rows, compute.picks))
        task.add_done_callback(lambda done: self._computed(call, compute, now, done))

    def _computed(
        self, call: _Call, compute: Compute, began: float, done: "asyncio.Future[npt.NDArray[np.int64]]"
    ) -> None:
        if not done.cancelled() and done.exception() is None:
            self._computed_well(call, compute, began, done.result())
            return
        reason = "cancelled" if done.cancelled() else str(done.exception())
        now = self._clock()
        self._act(call, call.round.failure(compute.call_id, "compute", reason, now), now)

    def _computed_well(
        self, call: _Call, compute: Compute, began: float, sums: npt.NDArray[np.int64]
    ) -> None:
        if call.closed:
            return
        now = self._clock()
        if not call.round.computes(compute.call_id):
            return
        work = self.tally.of(Tally.LOCAL_NAME, Tally.LOCAL_NAME, self._local.build, "local")
        work.used(call.plan.layer, len(compute.picks.experts), now - began, now - began)
        self._act(call, call.round.partial(compute.call_id, sums, now), now)

    def _settle(self, call: _Call, now: float) -> None:
        for attempt in call.round.attempts[call.noted :]:
            call.noted += 1
            self.tally.retries += 1
            name = self._name(attempt.node)
            log.info("layer %d: %s (%s): %s", call.plan.layer, name, attempt.phase, attempt.reason)
            if attempt.fault is Fault.FAILED and attempt.node in self.standing.records:
                self._blame(call, attempt.node, attempt.reason, now)
            node = self.nodes.by_id.get(attempt.node)
            if node is not None and attempt.fault is not Fault.OURS:
                self._work(node).failed(f"{attempt.phase}: {attempt.reason}")
        if call.timer is not None:
            call.timer.cancel()
            call.timer = None
        if call.round.finished:
            call.closed = True
            if not call.round.failed:
                for node_id in call.numeric:
                    self.standing.records[node_id].failed(now)
            if not call.done.done():
                call.done.set_result(None)
        elif (at := call.round.next_timer()) is not None:
            call.timer = asyncio.get_running_loop().call_later(max(0.0, at - now), self._timer, call)

    def _blame(self, call: _Call, node_id: str, reason: str, now: float) -> None:
        """A failure is the node's, unless it says of the numbers what this machine will find too."""
        if reason.startswith(NUMERIC):
            call.numeric.append(node_id)
        else:
            self.standing.records[node_id].failed(now)

    def _timer(self, call: _Call) -> None:
        now = self._clock()
        hedges = call.round.hedges
        self._act(call, call.round.handle_timer(now), now)
        self.tally.hedges += call.round.hedges - hedges

    def _lose(self, gone: Collection[str]) -> None:
        now = self._clock()
        for call in set(self._awaited.values()):
            for node_id in gone:
                self._act(call, call.round.node_gone(node_id, now), now)

    def _forget(self, call: _Call) -> None:
        """A call is over, perhaps because its engine hung up: then cancel what is still under way."""
        call.closed = True
        if call.timer is not None:
            call.timer.cancel()
        for call_id in [each for each, of in self._awaited.items() if of is call]:
            self._cancel(call_id)

    # -- what nodes were asked

    def _late(self, call_id: int, node_id: str) -> None:
        asked = self._asked.get(call_id)
        if asked is not None and not asked.late:
            asked.late = True
            self.standing.missed(node_id)

    def _spare(self, call_id: int, node_id: str) -> None:
        """Nobody needs this answer any more, but to learn what it took: until then the node is left alone."""
        self._awaited.pop(call_id, None)
        self._late(call_id, node_id)

    def _over(self, call_id: int) -> Asked:
        asked = self._asked.pop(call_id)
        self._awaited.pop(call_id, None)
        if (record := self.standing.records.get(asked.node_id)) is not None:
            record.closed(asked.size, asked.late)
        if asked.probe:
            self.standing.probe_over()
        return asked

    def _drop(self, gone: Collection[str]) -> None:
        """What these nodes were only measured with, or owe, will not come any more."""
        for call_id, asked in list(self._asked.items()):
            if asked.node_id in gone:
                call = self._awaited.get(call_id)
                self._over(call_id)
                if call is not None:
                    self._awaited[call_id] = call  # its round is told by `_lose`

    def _cancel(self, call_id: int) -> None:
        """Nobody waits for this call any more, and a node should know."""
        asked = self._asked.get(call_id)
        if asked is None:
            self._awaited.pop(call_id, None)
            return
        self._over(call_id)
        node = self.nodes.by_id.get(asked.node_id)
        if node is None or self.lane is None:
            return
        try:
            self.lane.send_cancel(node.peer, call_id, node.epoch)
        except LaneClosed:
            pass  # the node learns from the closed lane

    def _watch(self, now: float) -> None:
        """See to it that what never comes is given up."""
        if self._give_up is None and self._asked:
            at = min(asked.give_up_at for asked in self._asked.values())
            self._give_up = asyncio.get_running_loop().call_later(max(0.01, at - now), self._look)

    def _look(self) -> None:
        """Give up what has been owed for too long."""
        self._give_up, now = None, self._clock()
        for call_id, asked in list(self._asked.items()):
            if asked.give_up_at > now:
                continue
            call = self._awaited.get(call_id)
            self._cancel(call_id)
            self.standing.records[asked.node_id].gave_up(now - asked.at, now)
            if (node := self.nodes.by_id.get(asked.node_id)) is not None:
                self._work(node).failed("compute: no answer")
            if call is not None:
                self._act(call, call.round.failure(call_id, "compute", "no answer", now, Fault.LATE), now)
        self._watch(now)

    def _work(self, node: Node) -> Work:
        return self.tally.of(node.node_id, node.name, node.kernel, node.path)


async def _all_or_none(
    parts: Iterable[Coroutine[Any, Any, npt.NDArray[np.float32]]],
) -> list[npt.NDArray[np.float32]]:
    """Await all; when one fails, or we are cancelled, the others are cancelled and awaited."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(part) for part in parts]
    except* Exception as failed:
        raise failed.exceptions[0] from None
    return [task.result() for task in tasks]
