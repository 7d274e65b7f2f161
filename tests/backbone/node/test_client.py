"""The headless node against a relay on loopback that says what the test wants."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from time import monotonic
from typing import Any

import numpy as np
import pytest

from backbone.experts.native import KernelFault, NativeKernel
from backbone.experts.webgpu import TOLERANCE, WebGpuKernel
from backbone.node.client import ClientConfig, NodeClient
from backbone.node.host import INLINE_BYTES
from backbone.node.machine import State
from relay.wire import messages
from relay.wire.close import CloseCode
from relay.wire.frames import Frame, FrameType
from relay.wire.session import Closed
from tests.fakes.model import RandomModel
from tests.fakes.relay import FakeRelay, failure_of, partial_of

MODEL = RandomModel.make()
KERNEL = NativeKernel()
EVERYTHING = {0: [0, 1, 2, 3], 1: [0, 1, 2, 3]}


@asynccontextmanager
async def node(
    relay: FakeRelay,
    kernel: NativeKernel | WebGpuKernel = KERNEL,
    threads: int = 1,
    memory_bytes: int = 1 << 20,
) -> AsyncIterator[NodeClient]:
    client = NodeClient(ClientConfig(relay.url, memory_bytes, "test", threads), kernel)
    client.machine._random = lambda: 0.0
    task = asyncio.create_task(client.run())
    try:
        yield client
    finally:
        client.leave("test over")
        async with asyncio.timeout(10):
            await task


async def serving(
    relay: FakeRelay, layers: dict[int, list[int]] = EVERYTHING, epoch: int = 1
) -> messages.Offer:
    """Wait until a node is ready with these layers; gives its offer."""
    offer = await relay.hear(messages.Offer)
    await relay.say(lambda session: session.send_assign(MODEL.assign(layers, epoch)))
    await ready(relay, layers, epoch)
    return offer


async def ready(relay: FakeRelay, layers: dict[int, list[int]], epoch: int = 1) -> None:
    wanted = messages.SliceReady(epoch, {layer: tuple(experts) for layer, experts in layers.items()})
    while await relay.hear(messages.SliceReady) != wanted:
        pass


async def test_node_joins_fetches_and_answers_with_the_bytes_of_the_kernel() -> None:
    async with FakeRelay(MODEL.by_id) as relay, node(relay) as client:
        offer = await serving(relay)
        assert offer.kernel == KERNEL.build and offer.gb_per_s > 0 and offer.memory_bytes == 1 << 20
        dispatch = MODEL.dispatch(1, [[0, 3], [2], [1, 2]])
        await relay.dispatch(5, dispatch)
        frame = await relay.hear_call()
        assert (frame.peer, frame.call_id, frame.epoch) == (9, 5, 1)
        assert np.array_equal(partial_of(frame).sums(), MODEL.answer(KERNEL, dispatch))
        status = client.status()
        assert (status.state, status.calls, status.rows, status.layers) == (State.SERVING, 1, 3, (0, 1))
        assert status.held_bytes == 8 * MODEL.formula.slice_bytes


async def test_node_answers_many_calls_at_once_each_with_its_own_bytes() -> None:
    async with FakeRelay(MODEL.by_id) as relay, node(relay, threads=2):
        await serving(relay)
        dispatches = {n: MODEL.dispatch(n % 2, [[n % 4, (n + 1) % 4]], seed=n) for n in range(1, 41)}
        for number, dispatch in dispatches.items():
            await relay.dispatch(number, dispatch)
        for _ in range(40):
            frame = await relay.hear_call()
            expected = MODEL.answer(KERNEL, dispatches.pop(frame.call_id))
            assert np.array_equal(partial_of(frame).sums(), expected)


async def test_node_refuses_a_slice_whose_bytes_do_not_hash_to_its_name_and_asks_again() -> None:
    async with FakeRelay(MODEL.by_id) as relay, node(relay):
        bad = MODEL.ids[0][1]
        relay.on_slice = lambda i: (
            bytes(MODEL.formula.slice_bytes) if i == bad and relay.served[i] == 1 else None
        )
        await serving(relay)
        assert relay.served[bad] == 2


@pytest.mark.parametrize("first", [404, 504, b"short", bytes(10**6)])
async def test_node_asks_again_after_a_failed_download(first: bytes | int) -> None:
    async with FakeRelay(MODEL.by_id) as relay, node(relay):
        bad = MODEL.ids[1][0]
        relay.on_slice = lambda i: first if i == bad and relay.served[i] == 1 else None
        await serving(relay)
        assert relay.served[bad] == 2


async def test_node_announces_layer_by_layer_and_serves_what_it_holds_meanwhile() -> None:
    async with FakeRelay(MODEL.by_id) as relay, node(relay):
        relay.on_slice = lambda i: 503 if i in MODEL.ids[1] else None
        await relay.hear(messages.Offer)
        await relay.say(lambda session: session.send_assign(MODEL.assign(EVERYTHING)))
        await ready(relay, {0: [0, 1, 2, 3]})
        await relay.dispatch(1, MODEL.dispatch(0, [[1]]))
        partial_of(await relay.hear_call())
        await relay.dispatch(2, MODEL.dispatch(1, [[1]]))
        failure = failure_of(await relay.hear_call())
        assert (failure.code, failure.phase, failure.layer, failure.expert) == ("not_held", "queue", 1, 1)


async def test_node_refuses_non_finite_weights_and_corrupt_dispatches_by_name_and_lives_on() -> None:
    async with FakeRelay(MODEL.by_id) as relay, node(relay):
        await serving(relay)
        good = MODEL.dispatch(0, [[1]])
        await relay.send(Frame(FrameType.DISPATCH, b"garbage", 9, 1, 1))
        assert failure_of(await relay.hear_call()).code == "bad_frame"
        ints = bytearray(good.x)
        ints[-1] = 0x80  # -128 is no activation
        payload = good.to_payload()[: -len(good.x)] + bytes(ints)
        await relay.send(Frame(FrameType.DISPATCH, payload, 9, 2, 1))
        failure = failure_of(await relay.hear_call())
        assert (failure.code, failure.phase) == ("bad_frame", "compute")
        for call_id, scale in ((3, -1.0), (4, -1e-45)):  # no rounding gives a negative scale
            x = np.float32(scale).tobytes() + bytes(good.x)[4:]
            payload = good.to_payload()[: -len(good.x)] + x
            await relay.send(Frame(FrameType.DISPATCH, payload, 9, call_id, 1))
            failure = failure_of(await relay.hear_call())
            assert (failure.code, failure.phase) == ("bad_frame", "compute")
        await relay.dispatch(5, good)
        partial_of(await relay.hear_call())


async def test_node_keeps_its_slices_when_the_relay_restarts_and_joins_as_the_same_node() -> None:
    async with FakeRelay(MODEL.by_id) as relay, node(relay):
        hello = await relay.hear(messages.Hello)
        await serving(relay)
        await relay.close()
        await relay.open()
        again = await relay.hear(messages.Hello)
        assert (again.id, again.secret, again.resume) == (hello.id, hello.secret, True)
        offer = await serving(relay, epoch=7)
        assert set(offer.inventory) == set(MODEL.by_id)
        assert max(relay.served.values()) == 1


async def test_node_pauses_and_resumes() -> None:
    async with FakeRelay(MODEL.by_id) as relay, node(relay) as client:
        await serving(relay)
        client.pause(True)
        assert (await relay.hear(messages.Pause)).paused
        await relay.dispatch(1, MODEL.dispatch(0, [[1]]))
        assert failure_of(await relay.hear_call()).code == "refused"
        client.pause(False)
        assert not (await relay.hear(messages.Pause)).paused
        await relay.dispatch(2, MODEL.dispatch(0, [[1]]))
        partial_of(await relay.hear_call())


async def test_leaving_node_says_bye() -> None:
    async with FakeRelay(MODEL.by_id) as relay:
        client = NodeClient(ClientConfig(relay.url, 1 << 20, "test"), KERNEL)
        task = asyncio.create_task(client.run())
        await serving(relay)
        client.leave("enough")
        assert await task == "left"
        closed = await relay.hear(Closed)
        assert (closed.code, closed.reason) == (1001, "enough")


async def test_node_refused_by_the_relay_stops_and_says_why() -> None:
    async with FakeRelay(MODEL.by_id) as relay:
        client = NodeClient(ClientConfig(relay.url, 1 << 20, "test"), KERNEL)
        task = asyncio.create_task(client.run())
        await relay.hear(messages.Offer)
        await relay.say(lambda session: session.close(4401, "wrong secret"))
        assert await task == "the relay refused this identity"


async def test_node_waits_for_a_relay_that_is_not_there_yet() -> None:
    relay = FakeRelay(MODEL.by_id)
    await relay.open()
    await relay.close()
    async with node(relay) as client:
        while client.machine._attempt < 2:
            await asyncio.sleep(0.02)
        assert "cannot connect" in client.status().reason
        await relay.open()
        await serving(relay)
    await relay.close()


class BrokenKernel(NativeKernel):
    def known_answer_test(self) -> None:
        raise KernelFault(-11, "broken")


async def test_node_that_waits_long_for_a_relay_tries_at_once_on_another_network(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    changed: asyncio.Future[Callable[[], None]] = asyncio.get_running_loop().create_future()

    async def watch(look: object, on_change: Callable[[], None]) -> None:
        changed.set_result(on_change)
        await asyncio.Event().wait()

    monkeypatch.setattr("backbone.node.client.watch", watch)
    async with FakeRelay(MODEL.by_id) as relay, node(relay) as client:
        await serving(relay)
        assert relay.connection is not None
        await relay.connection.close(CloseCode.OVERLOADED, "too many")
        while client.machine.next_timer() is None:
            await asyncio.sleep(0.01)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.6):
                await relay.hear(messages.Hello)
        (await changed)()
        async with asyncio.timeout(2.0):  # instead of 15 s
            await relay.hear(messages.Hello)


async def test_node_whose_kernel_fails_its_test_refuses_to_serve() -> None:
    async with FakeRelay(MODEL.by_id) as relay:
        client = NodeClient(ClientConfig(relay.url, 1 << 20, "test"), BrokenKernel())
        async with asyncio.timeout(10):
            reason = await client.run()
        assert "known-answer test" in reason
        while not relay.heard.empty():
            assert not isinstance(relay.heard.get_nowait(), messages.Offer)


async def test_node_holds_no_more_than_it_pledged() -> None:
    two = 2 * KERNEL.packed_bytes(MODEL.formula)
    async with FakeRelay(MODEL.by_id) as relay, node(relay, memory_bytes=two) as client:
        await relay.hear(messages.Offer)
        await relay.say(lambda session: session.send_assign(MODEL.assign(EVERYTHING)))
        await ready(relay, {0: [0, 1]})
        assert client.status().held_bytes == 2 * MODEL.formula.slice_bytes
        assert sum(relay.served.values()) <= 3 + 1, "what does not fit is not fetched"


@pytest.mark.parametrize(
    ("odd", "why"),
    [
        ({"activation": "unheard-of"}, "activation is 'unheard-of'"),
        ({"up_type": 99}, "weight format 99"),
        ({"hidden_dim": 33}, "33 columns"),
        ({"expert_dim": 1 << 20}, "size of its formula"),
        ({"activation": "situ", "alpha": -1.0}, "alpha -1.0"),
    ],
)
async def test_node_says_what_it_cannot_compute_and_serves_the_rest(odd: dict[str, Any], why: str) -> None:
    async with FakeRelay(MODEL.by_id) as relay, node(relay) as client:
        await relay.hear(messages.Offer)
        assign = MODEL.assign({0: [0], 1: [0]})
        layer = assign.layers[0]
        refused = messages.AssignLayer(
            0, layer.formula | odd, layer.grid, layer.slice_bytes, {0: MODEL.ids[0][0]}
        )
        layers = (refused, assign.layers[1])
        await relay.say(
            lambda session: session.send_assign(messages.Assign(1, 9, MODEL.manifest.model, layers))
        )
        while not (heard := await relay.hear(messages.SliceReady)).experts:
            pass
        assert (heard.experts, heard.refused) == ({1: (0,)}, {0: (0,)}) and why in heard.why
        assert client.machine.counters.sessions == 1 and MODEL.ids[0][0] not in relay.served


async def test_large_call_is_computed_in_a_thread_while_the_loop_goes_on() -> None:
    """Enough weights that the node must not hold up its loop: the Cancel behind the call is seen in time."""
    async with FakeRelay(MODEL.by_id) as relay, node(relay) as client:
        await serving(relay)
        rows = [[0, 1, 2, 3]] * 3000
        assert 4 * len(rows) * MODEL.formula.slice_bytes > INLINE_BYTES
        big = MODEL.dispatch(0, rows)
        await relay.dispatch(1, big)
        await relay.send(Frame(FrameType.CANCEL, b"", 9, 1, 1))
        await relay.dispatch(2, MODEL.dispatch(0, [[1]]))
        assert (await relay.hear_call()).call_id == 2
        assert client.machine.counters.cancelled == 1
        await relay.dispatch(3, big)
        frame = await relay.hear_call()
        assert np.array_equal(partial_of(frame).sums(), MODEL.answer(KERNEL, big))


async def test_node_whose_address_changed_asks_at_once_and_comes_back_when_nothing_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in (("TICK_S", 0.05), ("CHECK_S", 0.3)):
        monkeypatch.setattr(f"backbone.node.client.{name}", value)
    async with FakeRelay(MODEL.by_id) as relay, node(relay) as client:
        await serving(relay)
        relay.deaf = True
        monkeypatch.setattr("backbone.node.socket.ClientSocket.moved", True)
        started = asyncio.get_running_loop().time()
        hello = await relay.hear(messages.Hello)
        assert hello.resume and asyncio.get_running_loop().time() - started < 2
        assert client.machine.counters.sessions <= 2  # the second may be welcomed already


async def test_node_that_did_not_run_for_a_while_comes_back_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("backbone.node.client.TICK_S", 0.05)
    slept = 0.0
    monkeypatch.setattr("backbone.node.client._clock_that_never_sleeps", lambda: slept)
    async with FakeRelay(MODEL.by_id) as relay, node(relay):
        await serving(relay)
        await asyncio.sleep(0.1)
        slept = 3600.0
        assert (await relay.hear(messages.Hello)).resume
        offer = await serving(relay, epoch=2)
        assert set(offer.inventory) == set(MODEL.by_id)
        assert max(relay.served.values()) == 1, "nothing is fetched again"


async def test_socket_knows_that_its_address_is_no_longer_ours() -> None:
    async with FakeRelay(MODEL.by_id) as relay, node(relay) as client:
        await serving(relay)
        socket = client._socket
        assert socket is not None and not socket.moved
        real = socket._transport
        socket._transport = Elsewhere(real)  # type: ignore[assignment]
        assert socket.moved
        socket._transport = real


class Elsewhere:
    """A transport whose socket has an address that this machine does not have."""

    def __init__(self, real: asyncio.Transport | None) -> None:
        assert real is not None
        self._real = real

    def is_closing(self) -> bool:
        return False

    def get_extra_info(self, name: str) -> tuple[str, int]:
        return ("192.0.2.9", 1) if name == "sockname" else self._real.get_extra_info(name)


async def test_a_node_whose_graphics_device_dies_says_so_at_once_and_serves_on_another() -> None:
    try:
        kernel = WebGpuKernel()
    except KernelFault as exc:
        pytest.skip(str(exc))
    async with FakeRelay(MODEL.by_id) as relay, node(relay, kernel):
        offer = await serving(relay)
        assert offer.kernel == "webgpu"
        dispatch = MODEL.dispatch(1, [[0, 3], [2], [1, 2]])
        exact = MODEL.answer(KERNEL, dispatch)
        for number in (1, 3):
            await relay.dispatch(number, dispatch)
            sums = partial_of(await relay.hear_call()).sums()
            assert np.abs(sums - exact).max() <= TOLERANCE * np.abs(exact).max()
            kernel._gpu.device.destroy()
            lost = monotonic()
            await relay.dispatch(number + 1, dispatch)
            failure = failure_of(await relay.hear_call())
            assert failure.code == "kernel_fault" and "lost" in failure.message
            assert monotonic() - lost < 1.0
            await ready(relay, EVERYTHING)


async def test_a_node_left_without_a_graphics_device_goes_on_with_the_exact_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    try:
        kernel = WebGpuKernel()
    except KernelFault as exc:
        pytest.skip(str(exc))

    def gone() -> None:
        raise KernelFault(-11, "no graphics device")

    monkeypatch.setattr(kernel, "reopen", gone)
    async with FakeRelay(MODEL.by_id) as relay, node(relay, kernel) as client:
        await relay.hear(messages.Offer)
        kernel.lose("pulled out before anything was packed")
        await relay.say(lambda session: session.send_assign(MODEL.assign(EVERYTHING)))
        await ready(relay, EVERYTHING)
        assert client.status().kernel == KERNEL.build
        dispatch = MODEL.dispatch(0, [[1]])
        await relay.dispatch(1, dispatch)
        assert np.array_equal(partial_of(await relay.hear_call()).sums(), MODEL.answer(KERNEL, dispatch))
