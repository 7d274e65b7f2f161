"""What takes longer than beats does not end a session, and what is short does not wait for it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from time import monotonic

from backbone.experts.native import NativeKernel
from backbone.node.client import ClientConfig, NodeClient
from backbone.node.keys import fresh_identity
from relay.config import Config
from relay.nat.evidence import RELAYED
from relay.server import RelayServer
from relay.wire.sealing import SealPolicy
from tests.fakes.linked import LinkedBackbone, running_node
from tests.fakes.model import RandomModel
from tests.fakes.slow_line import SlowLine

MODEL = RandomModel.make()
KERNEL = NativeKernel()
BEAT_S = 0.3
RATE = 150e3
LONG_BYTES = 250_000  # 1.7 s of this line, five beats


@asynccontextmanager
async def swarm(
    tmp_path: Path, seal: bool = False
) -> AsyncIterator[tuple[LinkedBackbone, NodeClient, SlowLine]]:
    async with AsyncExitStack() as stack:
        config = Config(
            host="127.0.0.1", port=0, cache_dir=tmp_path / "slices", drain_s=0.1, ping_interval_s=BEAT_S
        )
        relay = await stack.enter_async_context(RelayServer(config))
        line = await stack.enter_async_context(SlowLine(2e6).to(relay.url))
        ours, theirs = (SealPolicy(fresh_identity() if seal else None) for _ in range(2))
        backbone = LinkedBackbone(relay.url, relay.backbone_token, MODEL, KERNEL, ours)
        await stack.enter_async_context(backbone.running())
        node = await stack.enter_async_context(
            running_node(ClientConfig(line.url, 1 << 24, "box", links=False, seal=theirs), KERNEL)
        )
        await backbone.until_ready()
        line.bytes_per_s = RATE
        yield backbone, node, line


async def timed(backbone: LinkedBackbone, size_bytes: int, answer_bytes: int) -> float:
    lanes = backbone.chooser._peers[backbone.peers.nodes[0].peer]
    took = await backbone.chooser._time_probe(lanes, RELAYED, size_bytes, answer_bytes, 20.0)
    assert took is not None
    return took


async def both_ways(tmp_path: Path, seal: bool) -> None:
    async with swarm(tmp_path, seal) as (backbone, _, _):
        peer = backbone.peers.nodes[0].peer
        for sizes in ((LONG_BYTES, 64), (64, LONG_BYTES)):
            long = asyncio.create_task(timed(backbone, *sizes))
            await asyncio.sleep(0.3)
            small = [await timed(backbone, 64, 64) for _ in range(2)]
            assert not long.done() and max(small) < 0.8
            assert await long > 4 * BEAT_S
            await asyncio.wait_for(backbone.ask(7), 5)
        assert backbone.peers.nodes[0].peer == peer, "it is the same session still"


async def test_long_calls_pass_a_slow_line_and_small_ones_pass_them(tmp_path: Path) -> None:
    await both_ways(tmp_path, seal=False)


async def test_sealed_calls_overtake_each_other_as_well(tmp_path: Path) -> None:
    await both_ways(tmp_path, seal=True)


async def test_line_that_falls_silent_in_mid_frame_is_noticed_within_two_beats(tmp_path: Path) -> None:
    async with swarm(tmp_path) as (backbone, _, line):
        lanes = backbone.chooser._peers[backbone.peers.nodes[0].peer]
        long = asyncio.create_task(backbone.chooser._time_probe(lanes, RELAYED, LONG_BYTES, 64, 9.0))
        await asyncio.sleep(0.5)
        line.silent, began = True, monotonic()
        await backbone.until(lambda: not backbone.peers.nodes, "the relay knows")
        assert monotonic() - began < 3 * BEAT_S + 0.5  # the relay looks four times a second at most
        long.cancel()


async def test_line_that_trickles_is_given_up(tmp_path: Path) -> None:
    async with swarm(tmp_path) as (backbone, node, line):
        lanes = backbone.chooser._peers[backbone.peers.nodes[0].peer]
        long = asyncio.create_task(backbone.chooser._time_probe(lanes, RELAYED, LONG_BYTES, LONG_BYTES, 9.0))
        await asyncio.sleep(0.3)
        line.bytes_per_s = 50.0
        await backbone.until(lambda: not backbone.peers.nodes, "the relay knows")
        long.cancel()
        line.bytes_per_s = 2e6
