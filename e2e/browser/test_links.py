"""A tab whose calls leave the relay: a data channel or a WebSocket straight to the backbone, same bytes."""

from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from backbone.experts.native import NativeKernel
from backbone.lanes.direct import LinkListener, ListenAt
from backbone.lanes.link import Link, accepting_session
from backbone.lanes.openers import DIRECT, DirectOpener
from backbone.lanes.webrtc import WEBRTC, WebRtcOpener, native
from e2e.browser.tab import Tab, chromium
from relay.config import Config
from relay.nat.evidence import RELAYED
from relay.server import RelayServer
from tests.fakes.linked import LinkedBackbone
from tests.fakes.model import RandomModel

MODEL = RandomModel.make(layers=4, experts=4, hidden_dim=96, expert_dim=64)
KERNEL = NativeKernel()


@pytest.mark.parametrize("lane", [WEBRTC, DIRECT])
async def test_tab_answers_on_a_lane_past_the_relay_and_survives_its_loss(tmp_path: Path, lane: str) -> None:
    if lane == WEBRTC and native() is None:
        pytest.skip("aiolibdatachannel is not installed")
    async with AsyncExitStack() as stack:
        config = Config(host="127.0.0.1", port=0, cache_dir=tmp_path, backbone_token="t" * 16, drain_s=0.2)
        relay = await stack.enter_async_context(RelayServer(config))
        backbone = LinkedBackbone(relay.url, "t" * 16, MODEL, KERNEL)
        chooser = backbone.chooser
        if lane == WEBRTC:
            backbone.openers[WEBRTC] = WebRtcOpener(lambda: None)
        else:
            listener = LinkListener(
                ListenAt("127.0.0.1", 0),
                lambda: Link(
                    accepting_session("backbone", chooser.expected),
                    chooser.link_ready,
                    chooser.link_event,
                    chooser.link_closed,
                ),
            )
            await listener.open()
            stack.callback(listener.close)
            backbone.openers[DIRECT] = DirectOpener(relay.url, listener)
        await stack.enter_async_context(backbone.running())
        browser = await stack.enter_async_context(chromium())
        tab = await Tab.open(browser, relay.url)
        await backbone.until_ready()
        await backbone.until_lane(lane)
        for seed in range(30):
            await backbone.ask(seed)
        peer = backbone.peers.nodes[0].peer
        assert chooser.describe(peer)["calls"] == {lane: 30}
        await tab.until_text("#details", lane)
        took_s = await chooser._probe(chooser._peers[peer], lane, 100)
        assert took_s is not None  # 100 KB there and back, in pieces from the browser
        link = chooser._peers[peer].in_use
        assert link is not None
        link.ended(1006, "pulled out")
        await backbone.ask(100)
        assert chooser.describe(peer)["calls"][RELAYED] >= 1
        assert tab.complaints == []
