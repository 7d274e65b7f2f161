"""What a node does with a backbone that says more about links than makes sense."""

import asyncio

import pytest

from backbone.lanes.webrtc import native
from backbone.node import links as module
from backbone.node.links import MAX_LINKS, NodeLinks
from relay.wire.messages import Signal
from relay.wire.session import SignalReceived

pytestmark = pytest.mark.skipif(native() is None, reason="aiolibdatachannel is not installed")


class Flood:
    """A node that still asks what NAT it is behind, and what it said."""

    def __init__(self, monkeypatch):
        self.known = asyncio.Event()
        self.said: list[tuple[str, str]] = []
        self.made: list[str] = []
        self.links = NodeLinks(lambda link, event: None, self.heard, "ws://127.0.0.1:1")
        monkeypatch.setattr(self.links._nat, "why_hopeless", self.look)
        monkeypatch.setattr(module, "accepting_session", self.session)

    def heard(self, peer, epoch, signal):
        self.said.append((signal.link, signal.kind))

    async def look(self, stun, theirs):
        await self.known.wait()

    def session(self, role, find):
        self.made.append(role)
        raise RuntimeError("no further in this test")

    def offer(self, link):
        self.links.signalled(SignalReceived(3, 1, Signal("offer", link, {"key": "ab" * 32, "sdp": ""})))


async def settled():
    for _ in range(5):
        await asyncio.sleep(0)


async def test_offers_that_come_while_one_is_looked_at_are_bounded(monkeypatch):
    flood = Flood(monkeypatch)
    for number in range(4 * MAX_LINKS):
        flood.offer(f"link-{number}")
    flood.offer("link-0")
    await settled()
    assert flood.said == [(f"link-{n}", "failed") for n in [*range(MAX_LINKS, 4 * MAX_LINKS), 0]]
    flood.links.close()


async def test_an_offer_of_a_pairing_that_ended_meanwhile_opens_nothing(monkeypatch):
    flood = Flood(monkeypatch)
    flood.offer("link-0")
    await settled()
    flood.links.close_all("paired anew")
    flood.known.set()
    await settled()
    assert flood.made == []
    assert flood.said == []
    flood.links.close()


@pytest.mark.parametrize(
    "url", ["ws://127.0.0.1:9", "ws://127.0.0.1:9/admin", "ws://169.254.169.254", "ws://10.9.9.9", "", "x"]
)
async def test_node_dials_no_address_of_its_own_network_for_a_backbone_elsewhere(monkeypatch, url):
    said: list[Signal] = []
    links = NodeLinks(
        lambda link, event: None, lambda peer, epoch, signal: said.append(signal), "ws://9.9.9.9:1"
    )

    def connect(*_, **__):
        raise AssertionError("dialled")

    monkeypatch.setattr("backbone.lanes.direct.ClientSocket", connect)
    links.signalled(SignalReceived(3, 1, Signal("dial", "link-0", {"key": "ab" * 32, "url": url})))
    async with asyncio.timeout(5):
        while not said:
            await asyncio.sleep(0.01)
    assert [(signal.kind, signal.data) for signal in said] == [("failed", {"reason": "not reached"})]
    links.close()
