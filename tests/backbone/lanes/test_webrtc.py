"""Data channels between a backbone and a headless node, signalled through a real relay on loopback."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from backbone.experts.native import NativeKernel
from backbone.lanes.nat import NatWatch
from backbone.lanes.webrtc import (
    MAX_BUFFERED_BYTES,
    WEBRTC,
    RtcEnd,
    WebRtcOpener,
    native,
)
from backbone.node.client import ClientConfig, NodeClient
from relay.config import Config
from relay.nat.evidence import RELAYED
from relay.server import RelayServer
from relay.wire.calls import Probe
from tests.fakes.linked import LinkedBackbone, running_node
from tests.fakes.model import RandomModel

MODEL = RandomModel.make()
KERNEL = NativeKernel()

pytestmark = pytest.mark.skipif(native() is None, reason="aiolibdatachannel is not installed")


@asynccontextmanager
async def swarm(tmp_path: Path) -> AsyncIterator[tuple[LinkedBackbone, NodeClient]]:
    async with AsyncExitStack() as stack:
        config = Config(host="127.0.0.1", port=0, cache_dir=tmp_path / "slices", drain_s=0.1)
        relay = await stack.enter_async_context(RelayServer(config))
        backbone = LinkedBackbone(relay.url, relay.backbone_token, MODEL, KERNEL)
        backbone.openers[WEBRTC] = WebRtcOpener(lambda: None)
        await stack.enter_async_context(backbone.running())
        node = await stack.enter_async_context(running_node(ClientConfig(relay.url, 1 << 24, "box"), KERNEL))
        await backbone.until_ready()
        yield backbone, node


async def test_calls_take_the_data_channel_and_come_back_right(tmp_path: Path) -> None:
    async with swarm(tmp_path) as (backbone, _):
        await backbone.until_lane(WEBRTC)
        for seed in range(20):
            await backbone.ask(seed)
        assert backbone.chooser.describe(backbone.peers.nodes[0].peer)["calls"] == {WEBRTC: 20}


async def test_many_messages_at_once_are_all_delivered(tmp_path: Path) -> None:
    """More than the 1024 that the library's own queue would keep, larger together than SCTP may hold."""
    async with swarm(tmp_path) as (backbone, _):
        await backbone.until_lane(WEBRTC)
        peer = backbone.peers.nodes[0].peer
        link = backbone.chooser._peers[peer].in_use
        assert link is not None and isinstance(link.transport, RtcEnd)
        back: list[asyncio.Future[None]] = []
        for number, size in enumerate([4000] * 1500 + [200_000] * 60):
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            backbone.chooser._probes[(1 << 62) + number] = future
            back.append(future)
            link.session.send_probe((1 << 62) + number, Probe(size, 4000))
            link._write()
        assert link.transport._queue.size_bytes > 0  # bounded: the rest waits here, not in SCTP
        assert link.transport._channel.buffered_amount() < 2 * MAX_BUFFERED_BYTES
        async with asyncio.timeout(20):
            await asyncio.gather(*back)


async def test_channel_that_is_gone_costs_no_call(tmp_path: Path) -> None:
    async with swarm(tmp_path) as (backbone, node):
        await backbone.until_lane(WEBRTC)
        asked = [asyncio.create_task(backbone.ask(seed)) for seed in range(20)]
        await asyncio.sleep(0)
        for channel in list(node._links._channels.values()):
            channel._channel.close()
        await asyncio.gather(*asked)
        await backbone.until_lane(RELAYED)
        await backbone.ask(99)
        await asyncio.sleep(0.1)
        assert sorted(set(backbone.answers)) == list(range(1, 22))


async def test_offer_that_is_none_is_refused_without_harm(tmp_path: Path) -> None:
    from relay.wire.messages import Signal

    async with swarm(tmp_path) as (backbone, node):
        target = backbone.peers.nodes[0]
        data = {"key": "ab" * 32, "sdp": "nonsense"}
        backbone.lane.send_signal(target.peer, target.epoch, Signal("offer", "ee" * 16, data))
        backbone.lane.send_signal(target.peer, target.epoch, Signal("candidate", "ee" * 16, {}))
        backbone.lane.send_signal(target.peer, target.epoch, Signal("what", "ee" * 16, {"key": "ab" * 32}))
        await backbone.ask(1)
        await backbone.until(lambda: "ee" * 16 not in node._links._channels, "the attempt to be dropped")


async def test_relay_is_kept_without_a_try_when_both_nats_are_hard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def why_hopeless(self: NatWatch, stun: str | None, theirs: str | None) -> str:
        return "no way through both NATs"

    monkeypatch.setattr(NatWatch, "why_hopeless", why_hopeless)
    async with swarm(tmp_path) as (backbone, node):
        described = backbone.chooser.describe
        peer = backbone.peers.nodes[0].peer
        await backbone.until(lambda: "no way through both NATs" in described(peer)["why"], "a refusal")
        assert described(peer)["lane"] == RELAYED and node._links._channels == {}
        await backbone.ask(1)
