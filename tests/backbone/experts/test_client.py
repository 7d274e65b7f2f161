"""The dispatcher with real kernels behind a lane in memory: whatever nodes do, the same bits come out."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from time import monotonic

import numpy as np
import pytest

from backbone.engine.link import LayerCall
from backbone.errors import LayerFailed, SwarmError
from backbone.experts.client import Answer, Dispatcher, DispatchPolicy
from backbone.experts.deadlines import DeadlinePolicy
from backbone.experts.dispatch import Picks
from backbone.experts.local import LocalExperts, LocalRows
from backbone.experts.native import NativeKernel
from backbone.experts.nodes import Node
from backbone.experts.planner import LocalCost
from backbone.experts.plans import layer_plans
from backbone.experts.record import Recorder
from backbone.experts.standing import Offload
from backbone.experts.tally import Tally
from backbone.lanes.lane import LaneClosed
from backbone.model.gguf import Model, open_model
from backbone.model.random_model import Shape, make_random_moe
from backbone.model.slices import LayerGrid
from relay.wire.errors import RemoteProtocolError
from relay.wire.frames import FrameType
from relay.wire.messages import Dispatch, Failure, Partial
from relay.wire.session import CorruptReceived, FailureReceived, PartialReceived
from relay.wire.tensors import Grid

SHAPE = Shape(num_layers=2, num_experts=8, top_k=3)
QUICK = DeadlinePolicy(floor_s=0.1, first_s=0.2, ceiling_s=0.3)
PATIENT = DeadlinePolicy(floor_s=30.0)  # where a machine busy with tests must not count as a late node


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    path: Path = tmp_path_factory.mktemp("model") / "random.gguf"
    return open_model(make_random_moe(path, SHAPE))


class MemoryLane:
    """Nodes in this process: `behave` says what peer does with a call, given its honest answer."""

    name = "memory"

    def __init__(self, local: LocalExperts, plans: dict) -> None:  # type: ignore[type-arg]
        self.local = local
        self.plans = plans
        self.calls: list[tuple[int, Dispatch]] = []
        self.cancelled: list[int] = []
        self.open = True
        self.behave: dict[int, Callable[[PartialReceived], list[Answer]]] = {}
        self.deliver: Callable[[Answer], None]
        self._running: set[asyncio.Task[None]] = set()

    def send_dispatch(self, peer: int, call_id: int, epoch: int, deadline_ms: int, dispatch: Dispatch) -> int:
        if not self.open:
            raise LaneClosed("closed for this test")
        payload = dispatch.to_payload()
        received = Dispatch.from_payload(payload)
        self.calls.append((peer, received))
        task = asyncio.create_task(self._answer(peer, call_id, epoch, received))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return len(payload)

    def send_cancel(self, peer: int, call_id: int, epoch: int) -> None:
        self.cancelled.append(call_id)

    async def _answer(self, peer: int, call_id: int, epoch: int, dispatch: Dispatch) -> None:
        exponents = self.plans[dispatch.layer].layer_exponents
        rows = LocalRows(
            bytes(dispatch.x), dispatch.x_encoding, dispatch.row_exponents, dispatch.grid, exponents
        )
        picks = Picks(dispatch.counts, dispatch.experts, dispatch.weights)
        sums = await self.local.compute(dispatch.layer, rows, picks)
        payload = Partial.from_sums(dispatch.layer, sums, dispatch.grid, 7).to_payload()
        honest = PartialReceived(peer, call_id, epoch, Partial.from_payload(payload))
        for answer in self.behave.get(peer, lambda answer: [answer])(honest):
            self.deliver(answer)


class Bench:
    """A dispatcher, its lane, and the calls to try."""

    def __init__(self, model: Model, kernel: NativeKernel, policy: DispatchPolicy, grid: Grid) -> None:
        grids = {layer: LayerGrid(8, (6,) * SHAPE.hidden_dim) for layer in model.layers}
        plans = layer_plans(model, grids, grid)
        self.local = LocalExperts(model, kernel, cache_bytes=1 << 24, threads=2)
        self.dispatcher = Dispatcher(plans, grid, self.local, policy, model_tag=42)
        self.lane = MemoryLane(self.local, plans)
        self.lane.deliver = self.dispatcher.answer_received
        self.dispatcher.lane = self.lane

    def nodes(self, *held: list[int], epoch: int = 1) -> None:
        """Let node i (peer i + 1) hold these experts of both layers."""
        self.dispatcher.nodes_changed(
            [
                Node(
                    f"n{i}",
                    i + 1,
                    epoch,
                    f"node {i}",
                    "native",
                    1.0,
                    "memory",
                    dict.fromkeys((0, 1), frozenset(e)),
                )
                for i, e in enumerate(held)
            ]
        )

    async def local_answer(self, call: LayerCall) -> np.ndarray:  # type: ignore[type-arg]
        lane, self.dispatcher.lane = self.dispatcher.lane, None
        try:
            return await self.dispatcher.call(call)
        finally:
            self.dispatcher.lane = lane


@asynccontextmanager
async def bench(
    model: Model,
    *,
    hedge: bool = False,
    grid: Grid = Grid.X32,
    deadlines: DeadlinePolicy = QUICK,
    offload: Offload = Offload.ALWAYS,
) -> AsyncIterator[Bench]:
    made = Bench(model, NativeKernel(), DispatchPolicy(deadlines, hedge, offload=offload), grid)
    try:
        yield made
    finally:
        made.local.close()


def calls(num_tokens: int = 1, layer: int = 1, seed: int = 0) -> Iterator[LayerCall]:
    random = np.random.default_rng(seed)
    while True:
        x = random.standard_normal((num_tokens, SHAPE.hidden_dim)).astype(np.float32)
        ids = np.stack([random.permutation(SHAPE.num_experts)[: SHAPE.top_k] for _ in range(num_tokens)])
        weights = random.random(ids.shape).astype(np.float32)
        yield LayerCall(0, layer, x, ids.astype(np.int32), weights)


@pytest.mark.parametrize("grid", [Grid.X32, Grid.X16])
@pytest.mark.parametrize("num_tokens", [1, 5])
async def test_any_split_over_nodes_gives_the_same_bits(model: Model, grid: Grid, num_tokens: int) -> None:
    splits: list[list[list[int]]] = [
        [[0, 1, 2, 3, 4, 5, 6, 7]],
        [[0, 2, 4, 6], [1, 3, 5, 7]],
        [[0], [1], [2, 3], [4, 5], [6]],  # nobody holds 7
        [[0, 1, 2], [2, 1, 0]],
    ]
    async with bench(model, grid=grid, deadlines=PATIENT) as b:
        for call, split in zip(calls(num_tokens), splits, strict=False):
            expected = await b.local_answer(call)
            b.nodes(*split)
            assert (await b.dispatcher.call(call)).tobytes() == expected.tobytes()
        assert b.lane.calls


async def test_what_a_node_answered_is_recorded_where_that_is_asked_for(model: Model, tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, "ab" * 32, "random", model.slice_bytes)
    async with bench(model, deadlines=PATIENT) as b:
        b.dispatcher._recorder = recorder
        b.nodes([0, 1, 2, 3], [4, 5, 6, 7])
        for call, _ in zip(calls(num_tokens=4), range(3), strict=False):
            await b.dispatcher.call(call)
        recorder.close()
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["n0.escall", "n1.escall"]
    assert b'"kernel": "native"' in (tmp_path / "n0.escall").read_bytes()


async def test_rows_without_picks_are_not_sent(model: Model) -> None:
    async with bench(model, deadlines=PATIENT) as b:
        call = next(calls(num_tokens=6))
        expert = int(call.ids[2, 0])
        b.nodes([expert])
        expected = await b.local_answer(call)
        assert (await b.dispatcher.call(call)).tobytes() == expected.tobytes()
        [(_, sent)] = b.lane.calls
        assert sent.num_tokens == int((call.ids == expert).any(axis=1).sum()) < 6


async def test_a_prompt_too_large_for_a_frame_travels_in_pieces(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    from backbone.experts import client

    monkeypatch.setattr(client, "row_chunks", lambda rows, dim: [slice(0, 3), slice(3, rows)])
    async with bench(model, deadlines=PATIENT) as b:
        call = next(calls(num_tokens=7))
        b.nodes(list(range(8)))
        expected = await b.local_answer(call)
        assert (await b.dispatcher.call(call)).tobytes() == expected.tobytes()
        assert [sent.num_tokens for _, sent in b.lane.calls] == [3, 4]


def lie_wrong_size(honest: PartialReceived) -> list[Answer]:
    sums = np.vstack([honest.partial.sums()] * 2)
    return [
        PartialReceived(honest.peer, honest.call_id, honest.epoch, Partial.from_sums(1, sums, Grid.X32, 0))
    ]


def lie_wrong_layer(honest: PartialReceived) -> list[Answer]:
    partial = Partial.from_sums(0, honest.partial.sums(), Grid.X32, 0)
    return [PartialReceived(honest.peer, honest.call_id, honest.epoch, partial)]


def lie_stale_epoch(honest: PartialReceived) -> list[Answer]:
    return [PartialReceived(honest.peer, honest.call_id, honest.epoch + 1, honest.partial)]


def lie_garbage(honest: PartialReceived) -> list[Answer]:
    error = RemoteProtocolError("partial: cut off")
    return [CorruptReceived(FrameType.PARTIAL, honest.peer, honest.call_id, honest.epoch, error)]


def lie_failure(honest: PartialReceived) -> list[Answer]:
    failure = Failure("kernel_fault", "out of memory", "compute")
    return [FailureReceived(honest.peer, honest.call_id, honest.epoch, failure)]


def lie_never(honest: PartialReceived) -> list[Answer]:
    return []


def lie_twice(honest: PartialReceived) -> list[Answer]:
    return [honest, honest]


@pytest.mark.parametrize(
    ("lie", "reason"),
    [
        (lie_wrong_size, "return: answers layer, rows, columns, grid (1, 2, 256, <Grid.X32: 0>)"),
        (lie_wrong_layer, "return: answers layer, rows, columns, grid (0, 1, 256, <Grid.X32: 0>)"),
        (lie_stale_epoch, "return: answer of epoch 2, the pairing has epoch 1"),
        (lie_garbage, "return: partial: cut off"),
        (lie_failure, "compute: kernel_fault: out of memory"),
    ],
)
async def test_a_bad_answer_costs_that_call_one_retry_and_no_bit(
    model: Model, lie: Callable[[PartialReceived], list[Answer]], reason: str
) -> None:
    async with bench(model) as b:
        call = next(calls())
        b.nodes(list(range(8)), list(range(8)))
        b.lane.behave[1] = lie
        expected = await b.local_answer(call)
        assert (await b.dispatcher.call(call)).tobytes() == expected.tobytes()
        assert [peer for peer, _ in b.lane.calls] == [1, 2]
        [found] = b.dispatcher.tally.work["n0"].failures
        assert found.startswith(reason)
        assert (await b.dispatcher.call(call)).tobytes() == expected.tobytes()
        assert [peer for peer, _ in b.lane.calls] == [1, 2, 2]  # the liar rests


async def test_a_silent_node_delays_one_call_by_one_patience_and_is_left_alone(model: Model) -> None:
    async with bench(model, deadlines=DeadlinePolicy(floor_s=0.4, first_s=0.6)) as b:
        call = next(calls())
        b.nodes(list(range(8)))
        b.lane.behave[1] = lie_never
        expected = await b.local_answer(call)
        b.dispatcher.tally.clear()
        assert (await b.dispatcher.call(call)).tobytes() == expected.tobytes()
        assert 0.4 <= b.dispatcher.tally.longest_call_s < 2.0  # the patience, and a busy machine
        assert b.lane.cancelled == []  # it owes an answer: what that takes is worth knowing
        b.dispatcher.tally.clear()
        for _ in range(20):
            assert (await b.dispatcher.call(call)).tobytes() == expected.tobytes()
        assert len(b.lane.calls) == 1 and b.dispatcher.tally.longest_call_s < 0.4
        while not b.dispatcher.standing.records["n0"].failures:
            await asyncio.sleep(0.02)
        assert len(b.lane.cancelled) == 1  # given up: now it rests
        assert b.dispatcher.tally.work["n0"].failures["compute: no answer"] == 1
        assert b.dispatcher._asked == {}


async def test_an_answer_given_twice_is_added_once(model: Model) -> None:
    async with bench(model, deadlines=PATIENT) as b:
        call = next(calls())
        b.nodes(list(range(8)))
        b.lane.behave[1] = lie_twice
        expected = await b.local_answer(call)
        for _ in range(3):
            assert (await b.dispatcher.call(call)).tobytes() == expected.tobytes()
        assert b.dispatcher.tally.retries == 0


async def test_an_answer_in_another_nodes_name_is_ignored(model: Model) -> None:
    async with bench(model) as b:
        call = next(calls())
        b.nodes(list(range(8)), [])
        b.lane.behave[1] = lambda honest: [
            PartialReceived(
                2, honest.call_id, 1, Partial.from_sums(1, honest.partial.sums() + 1, Grid.X32, 0)
            ),
            honest,
        ]
        expected = await b.local_answer(call)
        assert (await b.dispatcher.call(call)).tobytes() == expected.tobytes()


async def test_the_only_node_leaving_in_mid_call_is_replaced_by_this_machine_at_once(model: Model) -> None:
    async with bench(model, deadlines=DeadlinePolicy(floor_s=60.0)) as b:
        call = next(calls())
        b.nodes(list(range(8)))
        b.lane.behave[1] = lie_never
        expected = await b.local_answer(call)
        asked = asyncio.create_task(b.dispatcher.call(call))
        await asyncio.sleep(0.05)
        assert not asked.done()
        b.dispatcher.lane_lost()
        assert (await asyncio.wait_for(asked, 5)).tobytes() == expected.tobytes()


async def test_a_node_paired_anew_in_mid_call_is_not_waited_for(model: Model) -> None:
    async with bench(model, deadlines=DeadlinePolicy(floor_s=60.0)) as b:
        call = next(calls())
        b.nodes(list(range(8)))
        b.lane.behave[1] = lie_never
        asked = asyncio.create_task(b.dispatcher.call(call))
        await asyncio.sleep(0.05)
        b.nodes(list(range(8)), epoch=2)
        assert (await asyncio.wait_for(asked, 5)).tobytes() == (await b.local_answer(call)).tobytes()


async def test_a_full_socket_of_our_own_costs_local_work_and_blames_nobody(model: Model) -> None:
    async with bench(model) as b:
        call = next(calls())
        b.nodes(list(range(8)))
        b.lane.open = False
        expected = await b.local_answer(call)
        assert (await b.dispatcher.call(call)).tobytes() == expected.tobytes()
        assert "n0" not in b.dispatcher.tally.work and b.dispatcher.usable("n0", 0.0)
        b.lane.open = True  # our socket was full, not the node: it is asked again at once
        assert (await b.dispatcher.call(call)).tobytes() == expected.tobytes()
        assert len(b.lane.calls) == 1


async def test_a_late_node_is_hedged_once_it_is_known_to_be_quick(model: Model) -> None:
    async with bench(model, hedge=True, deadlines=DeadlinePolicy(floor_s=30.0, first_s=30.0)) as b:
        stream = calls()
        b.nodes(list(range(8)))
        for _ in range(3):
            await b.dispatcher.call(next(stream))
        while b.dispatcher._asked:  # a busy machine may have hedged one of these
            await asyncio.sleep(0.01)
        b.dispatcher.tally.clear()
        b.lane.cancelled.clear()
        b.lane.behave[1] = lie_never
        call = next(stream)
        found = await asyncio.wait_for(b.dispatcher.call(call), 10)
        assert found.tobytes() == (await b.local_answer(call)).tobytes()
        assert b.dispatcher.tally.hedges == 1


def answer_after(seconds: float, b: Bench) -> Callable[[PartialReceived], list[Answer]]:
    def later(honest: PartialReceived) -> list[Answer]:
        asyncio.get_running_loop().call_later(seconds, b.dispatcher.answer_received, honest)
        return []

    return later


async def test_a_late_answer_is_no_failure_and_its_time_is_learned(model: Model) -> None:
    """One lost packet costs a quarter of a second: that is a measurement, not a reason to rest."""
    async with bench(model, deadlines=DeadlinePolicy(floor_s=30.0)) as b:
        stream = calls()
        b.nodes(list(range(8)))
        for _ in range(3):
            await b.dispatcher.call(next(stream))
        b.dispatcher.policy = replace(b.dispatcher.policy, deadlines=DeadlinePolicy(floor_s=0.05))
        record = b.dispatcher.standing.records["n0"]
        b.lane.behave[1] = answer_after(0.6, b)
        call, before = next(stream), record.answers
        assert (await b.dispatcher.call(call)).tobytes() == (await b.local_answer(call)).tobytes()
        assert record.owed == 1 and not b.dispatcher.usable("n0", monotonic())
        while record.answers == before:
            await asyncio.sleep(0.01)
        assert record.owed == 0 and record.failures == 0 and b.dispatcher.usable("n0", monotonic())
        assert b.lane.cancelled == []
        assert b.dispatcher._asked == {} and record.asked_bytes == record.asked_rows == 0


async def test_a_call_whose_engine_hung_up_is_cancelled_everywhere_and_blames_nobody(model: Model) -> None:
    async with bench(model, deadlines=DeadlinePolicy(floor_s=0.1, first_s=0.1)) as b:
        b.nodes([0, 1, 2, 3], [4, 5, 6, 7])
        b.lane.behave[1] = b.lane.behave[2] = lie_never
        asked = asyncio.create_task(b.dispatcher.call(next(calls(num_tokens=3))))
        while len(b.lane.calls) < 2:
            await asyncio.sleep(0.005)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        assert len(b.lane.cancelled) == 2
        await asyncio.sleep(0.3)  # longer than every patience
        assert len(b.lane.calls) == 2  # nothing was sent again
        assert [r.failures for r in b.dispatcher.standing.records.values()] == [0, 0]
        assert b.dispatcher.tally.retries == b.dispatcher.tally.failed_calls == 0
        assert b.dispatcher._asked == b.dispatcher._awaited == {}
        assert b.dispatcher.usable("n0", monotonic()) and b.dispatcher.usable("n1", monotonic())


async def test_a_part_that_fails_ends_the_other_parts_of_its_call(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    from backbone.experts import client

    monkeypatch.setattr(client, "row_chunks", lambda rows, dim: [slice(0, 3), slice(3, rows)])
    async with bench(model, deadlines=DeadlinePolicy(floor_s=30.0)) as b:
        good = next(calls(num_tokens=7))
        b.nodes(list(range(8)))
        b.lane.behave[1] = lie_never
        x = good.x.copy()
        x[0, 0] = np.nan
        with pytest.raises(LayerFailed, match="x is not finite"):
            await asyncio.wait_for(b.dispatcher.call(LayerCall(0, 1, x, good.ids, good.weights)), 5)
        assert b.dispatcher._awaited == {} and b.dispatcher._asked == {}


@pytest.mark.parametrize("offload", [Offload.AUTO, Offload.SOONEST])
async def test_strangers_that_never_answer_cost_next_to_nothing(model: Model, offload: Offload) -> None:
    """They are measured beside the work, a few at once, with a row each; nobody waits for one."""
    async with bench(model, offload=offload, deadlines=DeadlinePolicy(first_s=0.2)) as b:
        stream = calls(num_tokens=4)
        b.nodes(*[list(range(8))] * 30)
        b.lane.behave = dict.fromkeys(range(1, 31), lie_never)
        call = next(stream)
        expected = await b.local_answer(call)
        b.dispatcher.tally.clear()
        for _ in range(200):
            assert (await b.dispatcher.call(call)).tobytes() == expected.tobytes()
            assert len(b.dispatcher._asked) <= 4
            await asyncio.sleep(0)
        assert set(b.dispatcher.tally.work) >= {Tally.LOCAL_NAME}
        assert b.dispatcher.tally.work[Tally.LOCAL_NAME].calls == 200  # this machine answered all
        assert b.dispatcher.tally.retries == b.dispatcher.tally.hedges == 0
        assert b.lane.calls and all(sent.num_tokens == 1 for _, sent in b.lane.calls)


async def test_a_measured_node_gets_work_and_a_slow_one_does_not(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with bench(model, offload=Offload.AUTO, deadlines=DeadlinePolicy()) as b:
        b.nodes(list(range(8)), list(range(8)))
        b.lane.behave[2] = answer_after(1.5, b)
        slow_here = LocalCost(0.0, 0.1, lambda expert: 0.0)  # 0.3 s for a token: one node is quicker
        monkeypatch.setattr(b.local, "cost", lambda layer, rows, now: slow_here)
        call = next(calls())
        expected = await b.local_answer(call)
        give_up = monotonic() + 20
        while b.dispatcher.tally.work.get("n0") is None or not b.dispatcher.tally.work["n0"].calls:
            assert (await b.dispatcher.call(call)).tobytes() == expected.tobytes()
            await asyncio.sleep(0.005)
            assert monotonic() < give_up
        while b.dispatcher.standing.records["n1"].answers == 0:
            assert (await b.dispatcher.call(call)).tobytes() == expected.tobytes()
            await asyncio.sleep(0.005)
        assert b.dispatcher.tally.work["n1"].calls == 0
        assert b.dispatcher.standing.records["n1"].failures == 0


async def test_a_sum_no_expert_can_give_is_refused_by_name(model: Model) -> None:
    def saturated(honest: PartialReceived) -> list[Answer]:
        sums = np.full_like(honest.partial.sums(), 1 << 62)
        partial = Partial.from_sums(1, sums, Grid.X32, 0)
        return [PartialReceived(honest.peer, honest.call_id, honest.epoch, partial)]

    async with bench(model) as b:
        b.nodes(list(range(8)))
        b.lane.behave[1] = saturated
        call = next(calls())
        assert (await b.dispatcher.call(call)).tobytes() == (await b.local_answer(call)).tobytes()
        [reason] = b.dispatcher.tally.work["n0"].failures
        assert reason.startswith("return: implausible: a sum of 4611686018427387904 in row 0")
        assert b.dispatcher.standing.records["n0"].failures == 1


async def test_numbers_the_model_cannot_mean_fail_by_name(model: Model) -> None:
    async with bench(model) as b:
        good = next(calls())
        x = good.x.copy()
        x[0, 3] = np.nan
        with pytest.raises(LayerFailed, match="layer 1: x is not finite"):
            await b.dispatcher.call(LayerCall(0, 1, x, good.ids, good.weights))
        with pytest.raises(LayerFailed, match=r"layer 1: this machine|layer 1: local kernel \(compute\)"):
            await b.dispatcher.call(LayerCall(0, 1, good.x, good.ids, good.weights * np.float32(np.inf)))
        with pytest.raises(SwarmError, match="layer 9 has no routed experts"):
            await b.dispatcher.call(LayerCall(0, 9, good.x, good.ids, good.weights))
        assert b.dispatcher.tally.failed_calls == 2
        assert (await b.dispatcher.call(good)).shape == good.x.shape  # and the next call is served


async def test_work_is_counted_where_it_was_done(model: Model) -> None:
    async with bench(model, deadlines=DeadlinePolicy(floor_s=30.0)) as b:
        call = next(calls(num_tokens=4))
        b.nodes([0, 1, 2, 3], [4, 5, 6])
        await b.dispatcher.call(call)
        rows = {name: sum(work.rows.values()) for name, work in b.dispatcher.tally.work.items()}
        low, high = int((call.ids < 4).sum()), int(((call.ids >= 4) & (call.ids < 7)).sum())
        rest = 12 - low - high
        assert rows == {"n0": low, "n1": high} | ({Tally.LOCAL_NAME: rest} if rest else {})
        work = b.dispatcher.tally.work["n0"]
        assert work.bytes_out > 4 * 256 and work.bytes_in > 4 * 256 * 4
