"""Links past a real relay on loopback: opened both ways, lost in mid-call, refused to strangers."""

import asyncio
import subprocess
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from backbone.experts.native import NativeKernel
from backbone.lanes.direct import (
    Bounds,
    LinkListener,
    ListenAt,
    dial,
    fingerprint_of,
    link_url,
    refusal,
)
from backbone.lanes.link import Link, accepting_session, opening_session
from backbone.lanes.openers import DIRECT, DirectOpener
from backbone.node.client import ClientConfig, NodeClient
from backbone.node.keys import fresh_identity
from backbone.node.socket import ClientSocket
from relay.config import Config
from relay.nat.evidence import RELAYED
from relay.server import RelayServer
from relay.wire.frames import CALL_TYPES, HEADER_BYTES, decode_header
from relay.wire.link import LinkKey
from relay.wire.sealing import SealPolicy
from tests.fakes.linked import LinkedBackbone, running_node
from tests.fakes.model import RandomModel

MODEL = RandomModel.make()
KERNEL = NativeKernel()
LOOPBACK = ListenAt("127.0.0.1", 0)


@asynccontextmanager
async def swarm(
    tmp_path: Path,
    node_listens: ListenAt | None,
    backbone_listens: ListenAt | None = None,
    seal: bool = False,
) -> AsyncIterator[tuple[RelayServer, LinkedBackbone, NodeClient]]:
    """A relay, a backbone that chooses lanes, a node; ready."""
    async with AsyncExitStack() as stack:
        config = Config(host="127.0.0.1", port=0, cache_dir=tmp_path / "slices", drain_s=0.1)
        relay = await stack.enter_async_context(RelayServer(config))
        ours, theirs = (SealPolicy(fresh_identity() if seal else None) for _ in range(2))
        backbone = LinkedBackbone(relay.url, relay.backbone_token, MODEL, KERNEL, ours)
        listener = None
        if backbone_listens is not None:
            chooser = backbone.chooser
            listener = LinkListener(
                backbone_listens,
                lambda: Link(
                    accepting_session("backbone", chooser.expected),
                    chooser.link_ready,
                    chooser.link_event,
                    chooser.link_closed,
                ),
            )
            await listener.open()
            stack.callback(listener.close)
        backbone.openers[DIRECT] = DirectOpener(relay.url, listener, seal)
        await stack.enter_async_context(backbone.running())
        node = await stack.enter_async_context(
            running_node(ClientConfig(relay.url, 1 << 24, "box", listen=node_listens, seal=theirs), KERNEL)
        )
        await backbone.until_ready()
        yield relay, backbone, node


def lanes_used(backbone: LinkedBackbone) -> dict[str, int]:
    calls: dict[str, int] = backbone.chooser.describe(backbone.peers.nodes[0].peer)["calls"]
    return calls


@pytest.mark.parametrize(
    ("node_listens", "backbone_listens"), [(LOOPBACK, None), (None, LOOPBACK)], ids=["node", "backbone"]
)
async def test_calls_can_take_the_relay_at_once_and_take_the_link_later(
    tmp_path: Path, node_listens: ListenAt | None, backbone_listens: ListenAt | None
) -> None:
    async with swarm(tmp_path, node_listens, backbone_listens) as (relay, backbone, _):
        assert backbone.first_lane == RELAYED
        await backbone.until_lane(DIRECT)
        for seed in range(10):
            await backbone.ask(seed)
        assert lanes_used(backbone) == {DIRECT: 10}
        assert backbone.lanes == [DIRECT]

        def reported() -> dict[str, Any]:
            return dict(relay.hub.status()["nodes"][0]["path"])

        await backbone.until(lambda: reported()["lane"] == DIRECT, "a report: they are paced")
        passed = reported()
        assert "ms against" in passed["why"] and passed["age_s"] < 5


@pytest.mark.parametrize(
    ("node_listens", "backbone_listens"), [(LOOPBACK, None), (None, LOOPBACK)], ids=["node", "backbone"]
)
async def test_link_without_tls_is_sealed_between_ends_that_seal_and_left_when_altered(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    node_listens: ListenAt | None,
    backbone_listens: ListenAt | None,
) -> None:
    send, seen, change = ClientSocket.send, [], []

    def tapped(socket: ClientSocket, data: bytes) -> None:
        if decode_header(data).type in CALL_TYPES:
            seen.append(data)
            if change:
                data = (
                    data[: HEADER_BYTES + 12]
                    + bytes([data[HEADER_BYTES + 12] ^ 1])
                    + data[HEADER_BYTES + 13 :]
                )
        send(socket, data)

    monkeypatch.setattr(ClientSocket, "send", tapped)
    async with swarm(tmp_path, node_listens, backbone_listens, seal=True) as (_, backbone, node):
        await backbone.until_lane(DIRECT)
        seen.clear()
        for seed in range(5):
            await backbone.ask(seed)
        assert lanes_used(backbone)[DIRECT] == 5
        assert len(seen) >= 10 and all(decode_header(data).sealed for data in seen)
        links = list(node._links._links)
        assert links and all(link.sealed for link in links)
        change.append(True)
        with pytest.raises(AssertionError):  # altered on both lanes: refused by name, never wrong
            await backbone.ask(6)
        change.clear()
        await backbone.until_lane(RELAYED)
        await backbone.ask(7)


async def test_node_that_nobody_can_reach_stays_on_the_relay(tmp_path: Path) -> None:
    async with swarm(tmp_path, None) as (relay, backbone, _):
        await backbone.ask(1)
        described = backbone.chooser.describe(backbone.peers.nodes[0].peer)
        assert (described["lane"], described["why"]) == (RELAYED, "this node offers no other lane")
        assert relay.hub.status()["nodes"][0]["path"]["lane"] == RELAYED


async def test_calls_in_flight_on_a_link_that_dies_are_answered_once_through_the_relay(
    tmp_path: Path,
) -> None:
    async with swarm(tmp_path, LOOPBACK) as (_, backbone, node):
        await backbone.until_lane(DIRECT)
        asked = [asyncio.create_task(backbone.ask(seed)) for seed in range(20)]
        await asyncio.sleep(0)  # all are sent, none is answered
        for link in list(node._links._links):
            link.transport.abort()  # type: ignore[union-attr]
        await asyncio.gather(*asked)
        used = lanes_used(backbone)
        assert used.get(RELAYED, 0) > 0
        assert len(backbone.peers.nodes) == 1  # the node was not lost with its link
        await asyncio.sleep(0.1)
        assert sorted(set(backbone.answers)) == list(range(1, 21))
        assert len(backbone.answers) == sum(used.values())


async def test_link_comes_back_after_it_was_lost(tmp_path: Path) -> None:
    async with swarm(tmp_path, LOOPBACK) as (_, backbone, node):
        await backbone.until_lane(DIRECT)
        for link in list(node._links._links):
            link.transport.abort()  # type: ignore[union-attr]
        await backbone.until_lane(RELAYED)
        await backbone.ask(1)
        await backbone.until_lane(DIRECT)
        await backbone.ask(2)
        assert backbone.lanes == [DIRECT, RELAYED, DIRECT]


async def test_call_that_a_frozen_link_swallows_is_asked_again_through_the_relay(tmp_path: Path) -> None:
    """The socket still looks open, nothing comes back: no call may wait for the beats to tell."""
    async with swarm(tmp_path, LOOPBACK) as (_, backbone, node):
        await backbone.until_lane(DIRECT)
        for link in list(node._links._links):
            link.transport._transport.pause_reading()  # type: ignore[union-attr]
        started = asyncio.get_running_loop().time()
        await backbone.ask(1, deadline_ms=500)
        await backbone.ask(2, deadline_ms=500)
        assert asyncio.get_running_loop().time() - started < 1.0
        assert backbone.chooser.lane_of(backbone.peers.nodes[0].peer) == RELAYED
        assert "went missing" in backbone.chooser.describe(backbone.peers.nodes[0].peer)["why"]


async def test_calls_run_through_without_a_gap_while_lanes_change(tmp_path: Path) -> None:
    async with swarm(tmp_path, LOOPBACK) as (_, backbone, node):
        for seed in range(60):
            await asyncio.gather(backbone.ask(seed), backbone.ask(1000 + seed))
            if seed % 20 == 15:
                for link in list(node._links._links):
                    link.transport.abort()  # type: ignore[union-attr]
        assert set(lanes_used(backbone)) == {RELAYED, DIRECT}
        assert sorted(set(backbone.answers)) == list(range(1, 121))


async def test_session_with_the_relay_that_ends_takes_the_links_along(tmp_path: Path) -> None:
    async with swarm(tmp_path, LOOPBACK) as (relay, backbone, node):
        await backbone.until_lane(DIRECT)
        await relay.hub.drain("a test")
        await backbone.until(lambda: not backbone.peers.nodes, "no nodes")
        await backbone.until(lambda: node._links.ready == 0, "no links")


async def test_stranger_without_the_key_is_refused(tmp_path: Path) -> None:
    async with swarm(tmp_path, LOOPBACK) as (_, backbone, node):
        ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        known = LinkKey(1, 1, b"x" * 32)
        stranger = Link(
            opening_session("backbone", "ee" * 16, known),
            lambda link: ended.set_result("ready"),
            lambda link, event: None,
            lambda link, why: ended.set_result(why),
        )
        assert node._links.listen is not None
        await dial(node._links.listen, stranger, None, Bounds(backbone.relay_url))
        assert await ended == "no such link is expected here"


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("tls")
    made, key = folder / "cert.pem", folder / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes",
         "-keyout", key, "-out", made, "-days", "2", "-subj", "/CN=box"],
        check=True, capture_output=True,
    )  # fmt: skip
    return made, key


@pytest.mark.parametrize("who", ["node", "backbone"])
async def test_tls_link_with_a_self_made_certificate_is_trusted_by_its_fingerprint(
    tmp_path: Path, certificate: tuple[Path, Path], who: str
) -> None:
    where = ListenAt("127.0.0.1", 0, None, *certificate)
    ends = (where, None) if who == "node" else (None, where)
    async with swarm(tmp_path, *ends) as (_, backbone, _):
        await backbone.until_lane(DIRECT)
        await backbone.ask(1)
        assert lanes_used(backbone) == {DIRECT: 1}


async def test_certificate_of_another_is_refused(certificate: tuple[Path, Path]) -> None:
    made = Link(
        accepting_session("node", lambda link: None),
        lambda link: None,
        lambda link, event: None,
        lambda link, why: None,
    )
    listener = LinkListener(ListenAt("127.0.0.1", 0, None, *certificate), lambda: made)
    await listener.open()
    ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    link = Link(
        opening_session("backbone", "ee" * 16, LinkKey(1, 1, b"x" * 32)),
        lambda link: None,
        lambda link, event: None,
        lambda link, why: ended.set_result(why),
    )
    assert listener.fingerprint == fingerprint_of(certificate[0])
    await dial(listener.url, link, "00" * 32, None)
    assert await ended == "the certificate is not the one whose fingerprint was given"
    listener.close()


@pytest.mark.parametrize(
    ("address", "relay", "refused"),
    [
        ("127.0.0.1", "192.0.2.1", True),
        ("127.0.0.1", "127.0.0.1", False),
        ("10.1.2.3", "8.8.8.8", True),
        ("10.1.2.3", "192.168.1.9", False),
        ("169.254.169.254", "127.0.0.1", True),
        ("fe80::1", "::1", True),
        ("0.0.0.0", "127.0.0.1", True),
        ("224.0.0.1", "127.0.0.1", True),
        ("9.9.9.9", "8.8.8.8", False),
        ("2620:fe::9", "8.8.8.8", False),
        ("::ffff:127.0.0.1", "192.168.1.2", True),
        ("::ffff:192.168.1.9", "8.8.8.8", True),
        ("100.100.100.200", "8.8.8.8", True),
        ("100.100.100.200", "192.168.1.2", True),
        ("100.64.3.4", "100.64.9.9", False),
    ],
)
def test_address_a_stranger_announces_is_dialled_only_where_the_swarm_lives(
    address: str, relay: str, refused: bool
) -> None:
    assert (refusal(address, relay) is not None) == refused


@pytest.mark.parametrize(
    ("address", "seen", "relay", "dialled"),
    [
        ("203.0.113.7", "203.0.113.7", "8.8.8.8", False),  # for documentation: private
        ("9.9.9.9", "9.9.9.9", "8.8.8.8", True),
        ("9.9.9.9", "::ffff:9.9.9.9", "8.8.8.8", True),
        ("9.9.9.9", "9.9.9.8", "8.8.8.8", False),
        ("9.9.9.9", None, "8.8.8.8", False),
        ("192.168.1.5", "192.168.1.5", "192.168.1.2", True),
        ("192.168.1.6", "192.168.1.5", "192.168.1.2", False),
        ("127.0.0.1", "192.168.1.5", "192.168.1.2", False),
        ("127.0.0.1", "192.168.1.5", "127.0.0.1", False),
        ("192.168.1.2", "127.0.0.1", "192.168.1.2", True),  # the relay's own machine
        ("192.168.1.6", "127.0.0.1", "192.168.1.2", False),
        ("127.0.0.1", "127.0.0.1", "192.168.1.2", False),
        ("127.0.0.1", "127.0.0.1", "127.0.0.1", True),
        ("::1", "::1", "::1", True),
        ("192.168.1.6", "127.0.0.1", "127.0.0.1", True),  # all on one machine
        ("9.9.9.9", "127.0.0.1", "127.0.0.1", False),
        ("169.254.169.254", "169.254.169.254", "192.168.1.2", False),
    ],
)
def test_node_is_dialled_only_where_the_relay_saw_it(
    address: str, seen: str | None, relay: str, dialled: bool
) -> None:
    bounds = Bounds("ws://relay", seen, proved=True)
    assert (bounds.refusal(address, relay) is None) == dialled


def test_operator_may_vouch_for_any_node_but_not_for_what_is_none() -> None:
    bounds = Bounds("ws://relay", "9.9.9.9", proved=True, trusted=True)
    assert bounds.refusal("10.1.2.3", "8.8.8.8") is None
    assert bounds.refusal("169.254.169.254", "8.8.8.8") is not None


@pytest.mark.parametrize("where", ["open port", "closed port", "elsewhere"])
async def test_who_announces_another_machine_learns_nothing_of_it(tmp_path: Path, where: str) -> None:
    """Loopback is what a relay on loopback allows: what listens there still does not show in any report."""
    async with AsyncExitStack() as stack:
        asked = []
        server = await asyncio.start_server(lambda _, out: (asked.append(1), out.close()), "127.0.0.1", 0)
        stack.callback(server.close)
        port = server.sockets[0].getsockname()[1]
        url = {
            "open port": f"ws://127.0.0.1:{port}",
            "closed port": "ws://127.0.0.1:1",
            "elsewhere": "ws://9.9.9.9",
        }
        listens = ListenAt("127.0.0.1", 0, public_url=url[where])
        _, backbone, _ = await stack.enter_async_context(swarm(tmp_path, listens))
        peer = backbone.peers.nodes[0]
        assert peer.seen == "127.0.0.1"
        await backbone.until(
            lambda: "direct lane" in backbone.chooser.describe(peer.peer)["why"], "a try to end"
        )
        assert backbone.chooser.describe(peer.peer)["why"] == "direct lane: not reached"
        assert bool(asked) == (where == "open port")


@pytest.mark.parametrize(
    "url",
    [
        "ftp://a/",
        "ws://",
        "http://user@a/",
        "ws://a/?x=1",
        "ws://a/#x",
        "ws://a/admin",
        "ws://a/v1/link/x",
        "ws://:p@a/",
        "file:///etc/passwd",
        "",
    ],
)
def test_url_that_is_none_to_dial_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="no URL to dial"):
        link_url(url)


@pytest.mark.parametrize("code", [0, 1005, 1006, 2500, 4401])
async def test_link_that_ends_with_any_code_and_a_long_reason_harms_nobody(tmp_path: Path, code: int) -> None:
    async with swarm(tmp_path, LOOPBACK) as (_, backbone, _):
        await backbone.until_lane(DIRECT)
        link = backbone.chooser._peers[backbone.peers.nodes[0].peer].in_use
        assert link is not None
        link.ended(code, "é" * 400)
        await backbone.ask(1)
