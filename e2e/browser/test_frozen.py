"""
A tab that the browser hides, freezes and lets go again.

Chromium stops a frozen page and its workers without closing the socket: the relay sees an open connection and
hears nothing. On waking the tab must not trust that connection, nor wait for its time-outs.
"""

import asyncio
from pathlib import Path
from time import monotonic

import numpy as np
import pytest

from backbone.experts.native import NativeKernel
from backbone.node.client import ClientConfig
from backbone.node.keys import fresh_identity
from e2e.browser.cdp import RawBrowser, RawTab, raw_chromium
from relay.config import Config
from relay.server import RelayServer
from relay.wire import messages
from relay.wire.sealing import SealPolicy
from tests.fakes.backbone import FakeBackbone
from tests.fakes.linked import running_node
from tests.fakes.model import RandomModel
from tests.fakes.relay import FakeRelay, partial_of

MODEL = RandomModel.make(layers=1, experts=2)
KERNEL = NativeKernel()
REJOIN_S = 3.0
DEAF = "document.addEventListener('freeze', (event) => event.stopImmediatePropagation(), true)"
SERVING = "document.body.dataset.state === 'serving'"


async def press_start(tab: RawTab) -> None:
    await tab.until("document.body?.dataset.ready === 'true'")
    await tab.evaluate("document.getElementById('start').click()")


async def serving_tab(
    browser: RawBrowser, relay: FakeRelay, script: str = ""
) -> tuple[RawTab, messages.Hello]:
    tab = await browser.open("about:blank")
    await tab.send("Page.enable")
    await tab.send("Page.addScriptToEvaluateOnNewDocument", source=script)
    await tab.send("Page.navigate", url=relay.url)
    await press_start(tab)
    hello = await relay.hear(messages.Hello)
    await relay.hear(messages.Offer)
    await relay.say(lambda session: session.send_assign(MODEL.assign({0: [0, 1]})))
    await tab.until(SERVING)
    return tab, hello


async def check_call(relay: FakeRelay, call_id: int, epoch: int) -> None:
    dispatch = MODEL.dispatch(0, [[0, 1]], seed=call_id)
    await relay.dispatch(call_id, dispatch, epoch)
    sums = partial_of(await relay.hear_call()).sums()
    assert np.array_equal(sums, MODEL.answer(KERNEL, dispatch))


async def test_hidden_tab_goes_on_answering() -> None:
    async with FakeRelay(MODEL.by_id) as relay, raw_chromium() as browser:
        tab, _ = await serving_tab(browser, relay)
        await (await browser.open("about:blank")).to_front()
        await tab.until("document.visibilityState === 'hidden'")
        for call_id in range(1, 20):
            await check_call(relay, call_id, 1)
        assert await tab.evaluate("document.body.dataset.state") == "serving"


@pytest.mark.parametrize("told", [True, False], ids=["told by the browser", "frozen without a word"])
async def test_frozen_tab_rejoins_within_seconds_of_waking_as_the_same_node_with_its_slices(
    told: bool,
) -> None:
    async with FakeRelay(MODEL.by_id) as relay, raw_chromium() as browser:
        tab, hello = await serving_tab(browser, relay, "" if told else DEAF)
        await (await browser.open("about:blank")).to_front()
        await tab.until("document.visibilityState === 'hidden'")
        await tab.lifecycle("frozen")
        # A Bye may or may not get out before the worker stops. Without the event only the clock can tell: it
        # has to stand still for longer than the worker tolerates a late tick.
        await asyncio.sleep(1.0 if told else 7.0)
        await tab.lifecycle("active")
        await tab.to_front()
        woke = monotonic()
        again = await relay.hear(messages.Hello)
        assert (again.id, again.resume) == (hello.id, True)
        offer = await relay.hear(messages.Offer)
        assert monotonic() - woke < REJOIN_S
        assert set(offer.inventory) == set(MODEL.by_id)
        await relay.say(lambda session: session.send_assign(MODEL.assign({0: [0, 1]}, epoch=2)))
        await tab.until(SERVING)
        await check_call(relay, 1, 2)
        assert max(relay.served.values()) == 1


async def test_frozen_tab_is_missed_within_two_beats_and_comes_back_to_its_place(tmp_path: Path) -> None:
    """The real relay, a backbone, a tab whose socket stays open, and a node that answers in its stead."""
    beat_s, slack_s = 1.0, 0.75
    config = Config(host="127.0.0.1", port=0, cache_dir=tmp_path, drain_s=0.2, ping_interval_s=beat_s)
    seals = SealPolicy(fresh_identity())
    async with (
        RelayServer(config) as relay,
        FakeBackbone(relay.url, relay.backbone_token, MODEL, KERNEL, seals) as backbone,
        running_node(ClientConfig(relay.url, 1 << 24, "box"), KERNEL),
        raw_chromium() as browser,
    ):
        tab = await browser.open("about:blank")
        await tab.send("Page.enable")
        await tab.send("Page.addScriptToEvaluateOnNewDocument", source=DEAF)
        await tab.send("Page.navigate", url=relay.url)
        await press_start(tab)
        nodes = await backbone.until(lambda nodes: len(nodes) == 2, "a tab and a box")
        (before,) = (node for node in nodes if node.name != "box")
        await tab.until("document.body.dataset.seal === 'sealed'")
        await backbone.check(before, 1)
        delivered = len(backbone.delivered)
        await (await browser.open("about:blank")).to_front()
        await tab.until("document.visibilityState === 'hidden'")
        await tab.lifecycle("frozen")
        frozen = monotonic()
        (box,) = await backbone.until(lambda nodes: len(nodes) == 1, "the box alone")
        assert monotonic() - frozen < 2 * beat_s + slack_s
        assert box.name == "box" and relay.hub.status()["away"] == [before.node_id[:8]]
        await backbone.check(box, 2)
        await asyncio.sleep(max(0.0, 7.0 - (monotonic() - frozen)))
        await tab.lifecycle("active")
        await tab.to_front()
        woke = monotonic()
        nodes = await backbone.until(lambda nodes: len(nodes) == 2, "the tab again")
        assert monotonic() - woke < REJOIN_S
        (after,) = (node for node in nodes if node.name != "box")
        assert (after.node_id, after.seal) == (before.node_id, before.seal) and after.epoch != before.epoch
        assert after.experts == before.experts and len(backbone.delivered) == delivered
        assert backbone.lane.describe_seal(after.peer)["sealed"]
        await backbone.check(after, 3)
