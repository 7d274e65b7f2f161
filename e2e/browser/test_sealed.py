"""Tabs that seal: what the relay sees of them, their key over visits, a pinned backbone, and plain http."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
from playwright.async_api import Browser

from backbone.experts.native import NativeKernel
from backbone.node.keys import fresh_identity
from e2e.browser.tab import Tab, chromium, own_address, phone
from relay.config import Config
from relay.server import RelayServer
from relay.wire.frames import FrameType, decode_header
from relay.wire.messages import PeerNode
from relay.wire.sealing import SealPolicy
from relay.wire.session import PartialReceived
from tests.fakes.backbone import FakeBackbone
from tests.fakes.model import RandomModel
from tests.fakes.nosy_relay import Meddling, NosyRelay

MODEL = RandomModel.make(layers=2, experts=4, hidden_dim=96, expert_dim=64)
KERNEL = NativeKernel()
SEALS = SealPolicy(fresh_identity())
KEY = SEALS.identity.fingerprint


@asynccontextmanager
async def swarm(
    tmp_path: Path, host: str = "127.0.0.1", seal: SealPolicy = SEALS
) -> AsyncIterator[tuple[NosyRelay, RelayServer, FakeBackbone, Browser]]:
    async with AsyncExitStack() as stack:
        nosy = stack.enter_context(NosyRelay().installed())
        config = Config(host=host, port=0, cache_dir=tmp_path, drain_s=0.2)
        relay = await stack.enter_async_context(RelayServer(config))
        backbone = FakeBackbone(relay.url, relay.backbone_token, MODEL, KERNEL, seal)
        backbone.stray = []
        await stack.enter_async_context(backbone)
        yield nosy, relay, backbone, await stack.enter_async_context(chromium())


async def right(backbone: FakeBackbone, node: PeerNode, seed: int) -> bytes:
    """Ask; give what must not be readable of it."""
    dispatch = MODEL.dispatch(seed % 2, [[0, 1], [2, 3]], seed=seed)
    answer = await backbone.call(node, dispatch)
    assert isinstance(answer, PartialReceived), answer
    assert np.array_equal(answer.partial.sums(), MODEL.answer(KERNEL, dispatch))
    return bytes(dispatch.x)[24:64]


async def test_the_relay_reads_nothing_of_a_tabs_calls_and_the_tab_says_so(tmp_path: Path) -> None:
    async with swarm(tmp_path) as (nosy, relay, backbone, browser):
        tab = await Tab.open(await phone(browser), relay.url)
        (node,) = await backbone.until_covered(1)
        secrets = [await right(backbone, node, seed) for seed in range(20)]
        burst = await asyncio.gather(*(right(backbone, node, seed) for seed in range(20, 60)))
        calls = [head for head in map(decode_header, nosy.seen) if head.type is FrameType.PARTIAL]
        assert len(calls) == 60 and all(head.sealed for head in calls)
        assert not [secret for secret in secrets + burst if secret in nosy.payloads()]
        assert backbone.lane.describe_seal(node.peer)["gaps"] == 0
        await tab.wait_for(seal="sealed", backbone=KEY)
        await tab.until_text(
            "#facts", f"the relay cannot read what passes. The model’s computer has the key {KEY}"
        )
        for meddling in (Meddling.FLIP, Meddling.REPLAY, Meddling.STRIP):
            nosy.only, nosy.meddling = FrameType.DISPATCH, meddling
            answer = await backbone.call(node, MODEL.dispatch(0, [[0]]))
            nosy.meddling = Meddling.NONE
            assert meddling is Meddling.REPLAY or answer.failure.code == "bad_seal"
            await right(backbone, node, 7)
        assert tab.complaints == []


async def test_a_tab_keeps_its_key_over_a_reload_and_warns_of_another_backbone(tmp_path: Path) -> None:
    async with swarm(tmp_path / "a") as (_, relay, backbone, browser):
        context = await phone(browser)
        tab = await Tab.open(context, relay.url)
        (node,) = await backbone.until_covered(1)
        await tab.wait_for(seal="sealed")
        await tab.page.reload()
        await backbone.until(lambda nodes: bool(nodes) and nodes[0].peer != node.peer, "the tab again")
        assert backbone.nodes[0].seal == node.seal and node.seal is not None
        await tab.wait_for(seal="sealed")
        assert await tab.page.is_hidden("#notice")
        port = relay.port
        await relay.kill()
        other = SealPolicy(fresh_identity())
        config = Config(host="127.0.0.1", port=port, cache_dir=tmp_path / "b", drain_s=0.2)
        async with (
            RelayServer(config) as again,
            FakeBackbone(again.url, again.backbone_token, MODEL, KERNEL, other) as stranger,
        ):
            await stranger.until_covered(1)
            await tab.until_text("#notice", f"another key ({other.identity.fingerprint}) than before ({KEY})")


async def test_a_tab_whose_address_names_a_key_works_for_that_backbone_only(tmp_path: Path) -> None:
    async with swarm(tmp_path) as (_, relay, backbone, browser):
        wrong = await Tab.open(browser, relay.url, fragment="key=0000-1111-2222-3333-4444")
        await wrong.until_text("#detail", f"the backbone’s key is {KEY}, not the pinned 0000-1111")
        assert not backbone.nodes and not backbone.delivered
        await Tab.open(browser, relay.url, fragment=f"key={KEY}")
        (node,) = await backbone.until_covered(1)
        await right(backbone, node, 1)


@pytest.mark.parametrize("required", [False, True], ids=["allowed", "refused"])
async def test_a_tab_on_plain_http_is_unsealed_says_so_and_may_be_refused(
    tmp_path: Path, required: bool
) -> None:
    policy = SealPolicy(SEALS.identity, required)
    async with swarm(tmp_path, own_address(), policy) as (_, relay, backbone, browser):
        tab = await Tab.open(await phone(browser), relay.url)
        await tab.wait_for(seal="unsealed")
        await tab.until_text("#facts", "Not sealed: this page is on plain http")
        if required:
            async with asyncio.timeout(5):
                while backbone.lane.unsealed_nodes != ("Chrome, Android",):
                    await asyncio.sleep(0.02)
            assert not backbone.nodes
        else:
            (node,) = await backbone.until_covered(1)
            await right(backbone, node, 1)
            assert backbone.lane.describe_seal(node.peer)["sealed"] is False
