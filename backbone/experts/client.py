"""
The dispatcher: answer the engine's layer calls with the swarm. The driver around `round.Round`.

One call: encode x once, plan, send one frame per node, compute locally what nobody holds, add up the partials
as integers, give back floats. Everything runs on the event loop but the local kernel, which has threads of
its own.
"""

import asyncio
import itertools
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import monotonic

import numpy as np
import numpy.typing as npt

from backbone.engine.link import LayerCall
from backbone.errors import LayerFailed, SwarmError
from backbone.experts.combine import step_exponents, to_float
from backbone.experts.deadlines import DeadlinePolicy, NodeRecord
from backbone.experts.dispatch import Picks, row_chunks
from backbone.experts.local import LocalExperts, LocalRows
from backbone.experts.native import KernelError
from backbone.experts.nodes import NOBODY, Node, NodeTable, eligible
from backbone.experts.plans import LayerPlan
from backbone.experts.record import Recorder
from backbone.experts.round import Action, CancelCall, Compute, Round, Send, Timing
from backbone.experts.tally import Tally, Work
from backbone.lanes.lane import Lane, LaneClosed
from relay.wire.errors import LocalProtocolError, RemoteProtocolError
from relay.wire.messages import Dispatch
from relay.wire.session import CorruptReceived, FailureReceived, PartialReceived
from relay.wire.tensors import Grid, encode_x, row_exponents

log = logging.getLogger(__name__)

type Answer = PartialReceived | FailureReceived | CorruptReceived

RECORDS_KEPT = 4096  # nodes whose past is remembered, so that a flapping one is still known


@dataclass(frozen=True, slots=True)
class DispatchPolicy:
    """
    How the dispatcher behaves.

    local_only: use no node at all. hedge: ask a replica (or this machine) when a node is late by its own
    measure. allow_inexact: also ask nodes that compute within a tolerance only (graphics devices).
    """

    deadlines: DeadlinePolicy = DeadlinePolicy()
    hedge: bool = False
    local_only: bool = False
    allow_inexact: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class _Sent:
    """One attempt under way: when it left, how many picks it asks for, which rows it carries (None: all)."""

    at: float
    num_picks: int
    rows: npt.NDArray[np.intp] | None


class _Call:
    """A round in flight and what its frames need."""

    __slots__ = ("done", "noted", "num_tokens", "plan", "round", "rows", "sent", "timer")

    def __init__(self, plan: LayerPlan, rows: LocalRows, done: "asyncio.Future[None]") -> None:
        self.plan = plan
        self.rows = rows
        self.num_tokens = len(rows.row_exponents)
        self.done = done
        self.round: Round
        self.sent: dict[int, _Sent] = {}  # call id -> attempt
        self.noted = 0  # attempts already written to the records
        self.timer: asyncio.TimerHandle | None = None


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
        self.policy = policy
        self.nodes = NodeTable()
        self.tally = Tally()
        self.lane: Lane | None = None
        self._local = local
        self._model_tag = model_tag
        self._clock = clock
        self._recorder = recorder
        self._records: dict[str, NodeRecord] = {}
        self._calls: dict[int, _Call] = {}  # call id -> call
        self._call_ids = itertools.count(1)

    async def call(self, call: LayerCall) -> npt.NDArray[np.float32]:
        """
        Compute one layer for some rows: [num_tokens, hidden_dim] float32.

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
            outputs = np.concatenate(await asyncio.gather(*parts))
        self.tally.called(len(call.x), self._clock() - began)
        return outputs

    def nodes_changed(self, nodes: list[Node]) -> None:
        """Take the complete list of nodes that are ready."""
        nodes = eligible(nodes, self.policy.allow_inexact)
        gone = self.nodes.replace(nodes)
        for node in nodes:
            self._records.setdefault(node.node_id, NodeRecord(self.policy.deadlines)).met(node.peer)
        for node_id in itertools.islice(list(self._records), max(0, len(self._records) - RECORDS_KEPT)):
            if node_id not in self.nodes.by_id:  # oldest first; ids are the nodes' own choice, so bound them
                del self._records[node_id]
                self.tally.work.pop(node_id, None)
        self._lose(gone)

    def path_changed(self, node_id: str, path: str) -> None:
        """Another lane carries a node's calls now; nothing else follows from it."""
        self.nodes.set_path(node_id, path)
        if (work := self.tally.work.get(node_id)) is not None:
            work.path = path

    def usable(self, node_id: str, now: float) -> bool:
        """Tell whether a node would be asked now, or rests after failures."""
        record = self._records.get(node_id)
        return record is not None and record.usable(now)

    def lane_lost(self) -> None:
        """The relay is unreachable: whatever its nodes owe is computed elsewhere, now."""
        self._lose(self.nodes.replace([]))

    def answer_received(self, answer: Answer) -> None:
        """Take a partial, a failure or garbage in place of one; what nobody awaits is dropped."""
        call = self._calls.get(answer.call_id)
        node = self.nodes.by_peer.get(answer.peer)
        if call is None or node is None or call.round.awaits(answer.call_id) != node.node_id:
            return
        now = self._clock()
        match answer:
            case FailureReceived(failure=failure):
                self._failed(call, answer.call_id, failure.phase, f"{failure.code}: {failure.message}", now)
            case CorruptReceived(error=error):
                self._failed(call, answer.call_id, "return", str(error), now)
            case PartialReceived(partial=partial):
                try:
                    sums = self._read_partial(call, node, answer)
                except RemoteProtocolError as exc:
                    self._failed(call, answer.call_id, "return", str(exc), now)
                    return
                sent = call.sent[answer.call_id]
                self._records[node.node_id].answered(call.num_tokens, now - sent.at, now)
                if self._recorder is not None:
                    self._recorder.answered(node, answer.call_id, partial)
                work = self._work(node)
                work.bytes_in += partial.frame_bytes
                work.used(call.plan.layer, sent.num_picks, now - sent.at, partial.compute_us * 1e-6)
                self._act(call, call.round.partial(answer.call_id, sums, now), now)

    def _read_partial(self, call: _Call, node: Node, answer: PartialReceived) -> npt.NDArray[np.int64]:
        """Check an answer against what was asked and give its sums for all rows of the call."""
        partial, rows = answer.partial, call.sent[answer.call_id].rows
        if answer.epoch != node.epoch:
            raise RemoteProtocolError(f"answer of epoch {answer.epoch}, the pairing has epoch {node.epoch}")
        num_tokens = call.num_tokens if rows is None else len(rows)
        found = (partial.layer, partial.num_tokens, partial.hidden_dim, partial.grid)
        wanted = (call.plan.layer, num_tokens, call.plan.formula.hidden_dim, self.grid)
        if found != wanted:
            raise RemoteProtocolError(f"answers layer, rows, columns, grid {found}; asked was {wanted}")
        sums = partial.sums()
        if rows is None:
            return sums
        scattered = np.zeros((call.num_tokens, partial.hidden_dim), np.int64)
        scattered[rows] = sums
        return scattered

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
        now = self._clock()
        call = _Call(plan, rows, asyncio.get_running_loop().create_future())
        num_tokens = len(x)
        call.round = Round(
            shape=x.shape,
            holders=NOBODY if self.policy.local_only or self.lane is None else self.nodes.holders(plan.layer),
            preference=self._preference(num_tokens, now),
            timing=lambda node_id: self._timing(node_id, num_tokens),
            call_ids=self._call_ids,
        )
        try:
            self._act(call, call.round.start(Picks.of(ids, weights), now), now)
            await call.done
        finally:
            self._forget(call)
        if call.round.failed:
            tries = "; ".join(f"{self._name(a.node)} ({a.phase}): {a.reason}" for a in call.round.attempts)
            raise self._gave_up(plan.layer, tries)
        try:
            return to_float(call.round.sums, step_exponents(exponents, plan.layer_exponents, self.grid))
        except OverflowError as exc:
            raise self._gave_up(plan.layer, str(exc)) from exc

    def _gave_up(self, layer: int, why: str) -> LayerFailed:
        self.tally.failed_calls += 1
        return LayerFailed(layer, why)

    def _name(self, node_id: str) -> str:
        node = self.nodes.by_id.get(node_id)
        return node_id if node is None else f"{node.name} [{node_id[:8]}]"

    def _preference(self, rows: int, now: float) -> list[str]:
        usable = [node_id for node_id in self.nodes.by_id if self._records[node_id].usable(now)]
        return sorted(usable, key=lambda node_id: (self._records[node_id].expected_s(rows, now), node_id))

    def _timing(self, node_id: str, rows: int) -> Timing:
        record = self._records[node_id]
        return Timing(record.deadline_s(rows), record.hedge_after_s(rows) if self.policy.hedge else None)

    def _act(self, call: _Call, actions: list[Action], now: float) -> None:
        """Carry out what the round wants, sends before local work, until nothing is left to do."""
        local: list[Compute] = []
        pending = list(actions)
        while pending:
            match pending.pop(0):
                case Send() as send:
                    pending += self._send(call, send, now)
                case Compute() as compute:
                    local.append(compute)
                case CancelCall(call_id, node_id):
                    self._cancel(call_id, node_id)
        for compute in local:
            self._compute(call, compute, now)
        self._settle(call, now)

    def _send(self, call: _Call, send: Send, now: float) -> list[Action]:
        node = self.nodes.by_id.get(send.node)
        if node is None or self.lane is None:
            return call.round.failure(send.call_id, "send", "left the swarm", now)
        picks, plan = send.picks, call.plan
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
        deadline_ms = int(send.deadline_s * 1e3)
        self._calls[send.call_id] = call
        call.sent[send.call_id] = _Sent(now, dispatch.num_picks, sent_rows)
        try:
            size_bytes = self.lane.send_dispatch(node.peer, send.call_id, node.epoch, deadline_ms, dispatch)
        except LaneClosed as exc:
            return call.round.failure(send.call_id, "send", str(exc), now)
        self._work(node).bytes_out += size_bytes
        if self._recorder is not None:
            self._recorder.sent(node, plan, dispatch, send.call_id, deadline_ms)
        return []

    def _cancel(self, call_id: int, node_id: str) -> None:
        node = self.nodes.by_id.get(node_id)
        if node is None or self.lane is None:
            return
        try:
            self.lane.send_cancel(node.peer, call_id, node.epoch)
        except LaneClosed:
            pass  # the node learns from the closed lane

    def _compute(self, call: _Call, compute: Compute, now: float) -> None:
        call.sent[compute.call_id] = _Sent(now, len(compute.picks.experts), None)
        try:
            sums = self._local.compute_at_once(call.plan.layer, call.rows, compute.picks)
        except KernelError as exc:
            self._failed(call, compute.call_id, "compute", str(exc), now)
            return
        if sums is not None:
            self._computed_well(call, compute, sums)
            return
        task = asyncio.ensure_future(self._local.compute(call.plan.layer, call.rows, compute.picks))
        task.add_done_callback(lambda done: self._computed(call, compute, done))

    def _computed(self, call: _Call, compute: Compute, done: "asyncio.Future[npt.NDArray[np.int64]]") -> None:
        if done.cancelled():
            self._failed(call, compute.call_id, "compute", "cancelled", self._clock())
        elif (exc := done.exception()) is not None:
            self._failed(call, compute.call_id, "compute", str(exc), self._clock())
        else:
            self._computed_well(call, compute, done.result())

    def _computed_well(self, call: _Call, compute: Compute, sums: npt.NDArray[np.int64]) -> None:
        now, sent = self._clock(), call.sent[compute.call_id]
        work = self.tally.of(Tally.LOCAL_NAME, Tally.LOCAL_NAME, self._local.build, "local")
        work.used(call.plan.layer, sent.num_picks, now - sent.at, now - sent.at)
        self._act(call, call.round.partial(compute.call_id, sums, now), now)

    def _failed(self, call: _Call, call_id: int, phase: str, reason: str, now: float) -> None:
        self._act(call, call.round.failure(call_id, phase, reason, now), now)

    def _settle(self, call: _Call, now: float) -> None:
        for attempt in call.round.attempts[call.noted :]:
            call.noted += 1
            self.tally.retries += 1
            log.info(
                "layer %d: %s (%s): %s",
                call.plan.layer,
                self._name(attempt.node),
                attempt.phase,
                attempt.reason,
            )
            if (record := self._records.get(attempt.node)) is not None and attempt.reason != "left the swarm":
                record.failed(now)
            if (node := self.nodes.by_id.get(attempt.node)) is not None:
                self._work(node).failed(f"{attempt.phase}: {attempt.reason}")
        if call.timer is not None:
            call.timer.cancel()
            call.timer = None
        if call.round.finished:
            if not call.done.done():
                call.done.set_result(None)
        elif (at := call.round.next_timer()) is not None:
            call.timer = asyncio.get_running_loop().call_later(max(0.0, at - now), self._timer, call)

    def _timer(self, call: _Call) -> None:
        now = self._clock()
        hedges = call.round.hedges
        self._act(call, call.round.handle_timer(now), now)
        self.tally.hedges += call.round.hedges - hedges

    def _lose(self, gone: set[str]) -> None:
        now = self._clock()
        for call in set(self._calls.values()):
            for node_id in gone:
                self._act(call, call.round.node_gone(node_id, now), now)

    def _forget(self, call: _Call) -> None:
        for call_id in call.sent:
            self._calls.pop(call_id, None)
        if call.timer is not None:
            call.timer.cancel()

    def _work(self, node: Node) -> Work:
        return self.tally.of(node.node_id, node.name, node.kernel, node.path)
