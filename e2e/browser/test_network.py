"""
A tab whose device changes its network: the old socket looks open, and nobody hears what is sent on it.

The browser's signs are real ones where CDP can cause them (`offline` and `online`). A `change` of the kind of
connection it cannot cause: the test dispatches that one where the browser would.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from time import monotonic

import pytest

from backbone.experts.native import NativeKernel
from backbone.lanes.webrtc import WEBRTC, WebRtcOpener, native
from e2e.browser.cdp import RawTab, raw_chromium
from e2e.browser.test_frozen import MODEL, SERVING, check_call, press_start, serving_tab
from relay.config import Config
from relay.server import RelayServer
from relay.wire import messages
from relay.wire.session import Closed
from tests.fakes.linked import LinkedBackbone
from tests.fakes.relay import FakeRelay

KERNEL = NativeKernel()
BEATS_S = 20.0  # two of the relay's beats: what silence alone would take
NOTICED_S = 8.0  # the page gives the old connection 3 s


async def offline_and_online(tab: RawTab) -> None:
    for offline in (True, False):
        await tab.send(
            "Network.emulateNetworkConditions",
            offline=offline, latency=0, downloadThroughput=-1, uploadThroughput=-1,
        )  # fmt: skip
        await tab.until(f"navigator.onLine === {str(not offline).lower()}")


async def connection_changes(tab: RawTab) -> None:
    assert await tab.evaluate("navigator.connection.dispatchEvent(new Event('change'))")


def total(relay: RelayServer, name: str) -> float:
    """One of the relay's counters, all labels together."""
    found = relay.hub._metrics.registry.collect()
    samples = [sample for metric in found for sample in metric.samples]
    return sum(sample.value for sample in samples if sample.name == f"{name}_total")


@pytest.mark.parametrize("sign", [offline_and_online, connection_changes])
async def test_stale_socket_is_left_and_the_tab_is_back_with_its_slices(
    sign: Callable[[RawTab], Awaitable[None]],
) -> None:
    async with FakeRelay(MODEL.by_id) as relay, raw_chromium() as browser:
        tab, hello = await serving_tab(browser, relay)
        relay.deaf = True  # to this connection, as when its address is no longer ours
        changed = monotonic()
        await sign(tab)
        again = await relay.hear(messages.Hello)
        assert monotonic() - changed < NOTICED_S < BEATS_S
        assert (again.id, again.secret, again.resume) == (hello.id, hello.secret, True)
        offer = await relay.hear(messages.Offer)
        assert set(offer.inventory) == set(MODEL.by_id)
        await relay.say(lambda session: session.send_assign(MODEL.assign({0: [0, 1]}, epoch=2)))
        await tab.until(SERVING)
        await check_call(relay, 1, 2)
        assert max(relay.served.values()) == 1, "nothing is loaded again"


async def test_socket_that_lives_is_kept() -> None:
    async with FakeRelay(MODEL.by_id) as relay, raw_chromium() as browser:
        tab, _ = await serving_tab(browser, relay)
        await offline_and_online(tab)
        await connection_changes(tab)
        await asyncio.sleep(4.0)  # longer than the page waits for an answer
        await check_call(relay, 1, 1)
        came = [relay.heard.get_nowait() for _ in range(relay.heard.qsize())]
        assert not [heard for heard in came if isinstance(heard, messages.Hello | Closed)]


@pytest.mark.skipif(native() is None, reason="aiolibdatachannel is not installed")
async def test_session_is_resumed_by_token_and_its_link_is_opened_anew_at_once(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        config = Config(host="127.0.0.1", port=0, cache_dir=tmp_path, drain_s=0.2)
        relay = await stack.enter_async_context(RelayServer(config))
        backbone = LinkedBackbone(relay.url, relay.backbone_token, MODEL, KERNEL)
        backbone.openers[WEBRTC] = WebRtcOpener(lambda: None)
        await stack.enter_async_context(backbone.running())
        browser = await stack.enter_async_context(raw_chromium())
        tab = await browser.open(relay.url)
        await press_start(tab)
        await backbone.until_ready()
        await backbone.until_lane(WEBRTC)
        (before,) = backbone.peers.nodes
        served = total(relay, "relay_slices_served")
        relay.hub._by_id[before.node_id].pause_reading()  # what the tab says arrives no more
        changed = monotonic()
        await connection_changes(tab)
        await backbone.until(
            lambda: any(node.epoch != before.epoch for node in backbone.peers.nodes), "the tab at its place"
        )
        await backbone.until_ready()
        assert monotonic() - changed < NOTICED_S
        (after,) = backbone.peers.nodes
        assert (after.node_id, after.experts) == (before.node_id, before.experts)
        assert total(relay, "relay_sessions_resumed") == 1, "by token"
        assert total(relay, "relay_slices_served") == served > 0, "nothing is loaded again"
        await backbone.ask(1)
        await backbone.until_lane(WEBRTC)
        assert monotonic() - changed < NOTICED_S
        calls = backbone.chooser.describe(after.peer)["calls"].get(WEBRTC, 0)
        await backbone.ask(2)
        assert backbone.chooser.describe(after.peer)["calls"][WEBRTC] == calls + 1
