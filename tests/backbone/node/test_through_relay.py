"""Headless nodes through the real relay: given slices, called, paused, gone, and the relay restarted."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from backbone.experts.native import NativeKernel
from backbone.node.client import ClientConfig, NodeClient
from backbone.node.machine import State
from relay.config import Config
from relay.server import RelayServer
from relay.wire.messages import Assign
from tests.fakes.backbone import FakeBackbone
from tests.fakes.model import RandomModel
from tests.fakes.peers import Node

MODEL = RandomModel.make(layers=4, experts=4)
KERNEL = NativeKernel()
ENOUGH = 1 << 20
HALF = 2 * 4 * KERNEL.packed_bytes(MODEL.formula)


@asynccontextmanager
async def node(url: str, memory_bytes: int = ENOUGH, name: str = "node") -> AsyncIterator[NodeClient]:
    client = NodeClient(ClientConfig(url, memory_bytes, name), KERNEL)
    task = asyncio.create_task(client.run())
    try:
        yield client
    finally:
        client.leave("test over")
        async with asyncio.timeout(10):
            await task


@pytest.fixture
async def relay(tmp_path: Path) -> AsyncIterator[RelayServer]:
    async with RelayServer(Config(host="127.0.0.1", port=0, cache_dir=tmp_path, drain_s=0.2)) as server:
        yield server


@pytest.fixture
async def backbone(relay: RelayServer) -> AsyncIterator[FakeBackbone]:
    async with FakeBackbone(relay.url, relay.backbone_token, MODEL, KERNEL) as fake:
        yield fake


async def test_one_node_gets_every_slice_once_and_answers_right(
    relay: RelayServer, backbone: FakeBackbone
) -> None:
    async with node(relay.url, name="box"):
        (found,) = await backbone.until_covered(1)
        assert (found.name, found.kernel, found.path) == ("box", KERNEL.build, "relayed")
        await asyncio.gather(*(backbone.check(found, seed) for seed in range(40)))
        assert sorted(backbone.delivered) == sorted(MODEL.by_id)


async def test_two_nodes_share_the_model_and_both_answer_right(
    relay: RelayServer, backbone: FakeBackbone
) -> None:
    async with node(relay.url, HALF, "one"), node(relay.url, HALF, "two"):
        nodes = await backbone.until_covered(2)
        assert [sum(map(len, found.experts.values())) for found in nodes] == [8, 8]
        for seed in range(10):
            await asyncio.gather(*(backbone.check(found, seed) for found in nodes))


async def test_paused_node_leaves_the_list_and_comes_back(relay: RelayServer, backbone: FakeBackbone) -> None:
    async with node(relay.url) as client:
        (found,) = await backbone.until_covered(1)
        client.pause(True)
        await backbone.until(lambda nodes: not nodes, "no nodes")
        client.pause(False)
        (found,) = await backbone.until_covered(1)
        await backbone.check(found, 1)


async def test_leaving_node_leaves_the_list_at_once(relay: RelayServer, backbone: FakeBackbone) -> None:
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(node(relay.url))
        await backbone.until_covered(1)
        await stack.aclose()
        await backbone.until(lambda nodes: not nodes, "no nodes")


async def test_call_for_another_pairing_or_an_expert_not_held_is_refused(
    relay: RelayServer, backbone: FakeBackbone
) -> None:
    async with node(relay.url, HALF):
        (found,) = await backbone.until(
            lambda nodes: bool(nodes) and len(nodes[0].experts) == 2, "half the model"
        )
        missing = next(layer for layer in range(4) if layer not in found.experts)
        failure = await backbone.refused(found, MODEL.dispatch(missing, [[0]]))
        assert (failure.code, failure.phase, failure.layer) == ("not_held", "queue", missing)


async def test_node_rejoins_a_restarted_relay_with_its_slices(tmp_path: Path) -> None:
    config = Config(host="127.0.0.1", port=0, cache_dir=tmp_path / "a", backbone_token="t" * 16, drain_s=0.1)
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(RelayServer(config))
        backbone = await stack.enter_async_context(FakeBackbone(first.url, "t" * 16, MODEL, KERNEL))
        client = await stack.enter_async_context(node(first.url))
        await backbone.until_covered(1)
        received = client.status().bytes_in
        await first.kill()
        await backbone.until(lambda nodes: not nodes, "no nodes")
        again = Config(host="127.0.0.1", port=first.port, cache_dir=tmp_path / "b", backbone_token="t" * 16)
        await stack.enter_async_context(RelayServer(again))
        (found,) = await backbone.until_covered(1)
        await backbone.check(found, 3)
        assert len(backbone.delivered) == len(MODEL.by_id)  # nothing was fetched a second time
        assert client.status().bytes_in - received < 16 * MODEL.formula.slice_bytes


async def test_node_learns_that_its_backbone_left_and_serves_the_next_with_what_it_holds(
    relay: RelayServer,
) -> None:
    async with node(relay.url) as client:
        async with FakeBackbone(relay.url, relay.backbone_token, MODEL, KERNEL) as first:
            await first.until_covered(1)
            assert client.status().state is State.SERVING
        async with asyncio.timeout(2):
            while client.status().state is not State.OFFERED:
                await asyncio.sleep(0.01)
        assert len(client.machine.held) == len(MODEL.by_id)
        async with FakeBackbone(relay.url, relay.backbone_token, MODEL, KERNEL) as second:
            (found,) = await second.until_covered(1)
            await second.check(found, 1)
            assert not second.delivered, "nothing is loaded again"


async def test_a_node_that_pledges_and_never_loads_leaves_no_hole(
    relay: RelayServer, backbone: FakeBackbone, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("relay.pool.loading.DOUBT_S", 0.5)
    monkeypatch.setattr("relay.pool.loading.DEADLINE_S", 1.0)
    async with Node(relay, 77) as liar:
        await liar.offer(memory=1 << 40)
        assign = await liar.expect(Assign)
        assert sum(len(layer.experts) for layer in assign.layers) == 16
        async with node(relay.url, HALF, "one"), node(relay.url, HALF, "two"):
            nodes = await backbone.until_covered(2)
            await asyncio.gather(*(backbone.check(found, 1) for found in nodes))
            little = await liar.expect(Assign, lambda assign: bool(assign.layers), forget_earlier=True)
            assert sum(len(layer.experts) for layer in little.layers) == 1
            await liar.expect(Assign, lambda assign: not assign.layers)
