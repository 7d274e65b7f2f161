"""Sealed calls through a real relay that listens and meddles; ends that do not seal, and ends that insist."""

import asyncio
import stat
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from backbone.errors import ConfigError
from backbone.experts.native import NativeKernel
from backbone.node.client import ClientConfig, NodeClient
from backbone.node.keys import fresh_identity, kept_identity
from relay.config import Config
from relay.server import RelayServer
from relay.wire.errors import SealFault
from relay.wire.frames import FrameType, decode_header
from relay.wire.messages import Dispatch
from relay.wire.sealing import SealPolicy
from relay.wire.session import CorruptReceived, FailureReceived, PartialReceived
from tests.fakes.backbone import FakeBackbone
from tests.fakes.linked import running_node
from tests.fakes.model import RandomModel
from tests.fakes.nosy_relay import Meddling, NosyRelay

MODEL = RandomModel.make()
KERNEL = NativeKernel()
SEALS = SealPolicy(fresh_identity())
OPEN = SealPolicy()
UNANSWERED_S = 0.3


@asynccontextmanager
async def swarm(
    tmp_path: Path, ours: SealPolicy = SEALS, *nodes: SealPolicy
) -> AsyncIterator[tuple[NosyRelay, RelayServer, FakeBackbone, list[NodeClient]]]:
    """A nosy relay, a backbone, one node for each policy; nodes may or may not come to serve."""
    async with AsyncExitStack() as stack:
        nosy = stack.enter_context(NosyRelay().installed())
        config = Config(host="127.0.0.1", port=0, cache_dir=tmp_path / "slices", drain_s=0.1)
        relay = await stack.enter_async_context(RelayServer(config))
        backbone = FakeBackbone(relay.url, relay.backbone_token, MODEL, KERNEL, ours)
        backbone.stray = []
        await stack.enter_async_context(backbone)
        clients = [
            await stack.enter_async_context(
                running_node(ClientConfig(relay.url, 1 << 24, f"node-{i}", seal=policy), KERNEL)
            )
            for i, policy in enumerate(nodes)
        ]
        yield nosy, relay, backbone, clients


def new() -> SealPolicy:
    return SealPolicy(fresh_identity())


async def test_relay_sees_no_row_and_no_partial(tmp_path: Path) -> None:
    async with swarm(tmp_path, SEALS, new()) as (nosy, relay, backbone, (client,)):
        (node,) = await backbone.until_covered(1)
        secrets = []
        for seed in range(8):
            dispatch = MODEL.dispatch(0, [[0, 1], [2, 3]], seed=seed)
            answer = await backbone.call(node, dispatch)
            assert isinstance(answer, PartialReceived)
            sums = MODEL.answer(KERNEL, dispatch)
            assert np.array_equal(answer.partial.sums(), sums), "not a bit is changed by the seal"
            secrets += [bytes(dispatch.x)[16:48], dispatch.weights.tobytes(), bytes(answer.partial.data)[:32]]
        kinds = [decode_header(data) for data in nosy.seen]
        calls = [head for head in kinds if head.type in (FrameType.DISPATCH, FrameType.PARTIAL)]
        assert len(calls) == 16 and all(head.sealed for head in calls)
        assert not [secret for secret in secrets if secret in nosy.payloads()]
        (said,) = relay.hub.status()["nodes"]
        assert said["seal"]["sealed"] is True
        assert said["seal"]["identity"] == backbone.lane.describe_seal(node.peer)["identity"]
        assert client.status().seal == "sealed" and client.status().backbone == SEALS.identity.fingerprint


async def test_an_unsealed_swarm_shows_the_relay_everything(tmp_path: Path) -> None:
    """The test above can fail."""
    async with swarm(tmp_path, OPEN, new()) as (nosy, relay, backbone, (client,)):
        (node,) = await backbone.until_covered(1)
        dispatch = MODEL.dispatch(0, [[0, 1], [2, 3]])
        await backbone.call(node, dispatch)
        assert bytes(dispatch.x) in nosy.payloads()
        assert relay.hub.status()["nodes"][0]["seal"]["sealed"] is False
        assert (client.status().seal, client.status().seal_why) == ("unsealed", "the backbone does not seal")


# what becomes of a call that the relay meddled with
FAILS, LOST, ANSWERED = "fails by name", "is lost", "is answered"
OUTCOMES = {
    Meddling.FLIP: FAILS,
    Meddling.FLIP_COUNTER: FAILS,
    Meddling.RECALL: LOST,  # it fails, under a number that nobody waits for
    Meddling.DEADLINE: FAILS,
    Meddling.REPLAY: ANSWERED,
    Meddling.DROP: LOST,
    Meddling.STRIP: FAILS,
    Meddling.GARBAGE: FAILS,
}


@pytest.mark.parametrize("meddling", OUTCOMES, ids=lambda m: m.name.lower())
@pytest.mark.parametrize("way", [FrameType.DISPATCH, FrameType.PARTIAL], ids=lambda t: t.name.lower())
async def test_meddled_call_fails_by_name_or_is_lost_and_is_never_wrong(
    tmp_path: Path, meddling: Meddling, way: FrameType
) -> None:
    async with swarm(tmp_path, SEALS, new()) as (nosy, _, backbone, _):
        (node,) = await backbone.until_covered(1)
        await backbone.check(node, 1)
        nosy.only, nosy.meddling = way, meddling
        outcome = await asked(backbone, node, MODEL.dispatch(0, [[0, 1]]))
        nosy.meddling = Meddling.NONE
        expected = OUTCOMES[meddling]
        if meddling is Meddling.REPLAY and way is FrameType.DISPATCH:
            expected = (ANSWERED, FAILS)  # the second may be refused before the first is answered
        assert outcome in expected if isinstance(expected, tuple) else outcome == expected
        await backbone.check(node, 2)
        if meddling not in (Meddling.DROP,):
            faults = backbone.lane.seal_faults if way is FrameType.PARTIAL else {}
            named = [a for a in backbone.stray or [] if isinstance(a, FailureReceived | CorruptReceived)]
            assert outcome == FAILS or faults or named, "noticed"


async def asked(backbone: FakeBackbone, node: object, dispatch: Dispatch) -> str:
    """Ask once; whatever is answered is right or names a seal."""
    try:
        async with asyncio.timeout(UNANSWERED_S):
            answer = await backbone.call(node, dispatch)  # type: ignore[arg-type]
    except TimeoutError:
        return LOST
    if isinstance(answer, PartialReceived):
        assert np.array_equal(answer.partial.sums(), MODEL.answer(KERNEL, dispatch))
        return ANSWERED
    if isinstance(answer, FailureReceived):
        assert answer.failure.code == "bad_seal"
    else:
        assert isinstance(answer.error, SealFault)
    return FAILS


async def test_frames_of_one_peer_in_the_name_of_another_do_not_open(tmp_path: Path) -> None:
    async with swarm(tmp_path, SEALS, new(), new()) as (nosy, _, backbone, _):
        nodes = await backbone.until(lambda nodes: len(nodes) == 2, "two nodes")
        for node in nodes:
            await backbone.check(node, 1)
        nosy.only, nosy.meddling = FrameType.PARTIAL, Meddling.SWAP
        for node in nodes:
            assert await asked(backbone, node, MODEL.dispatch(min(node.experts), [[0]])) == FAILS
        assert sum(backbone.lane.seal_faults.values()) == 2


async def test_reordered_frames_are_noticed_and_the_later_one_is_answered(tmp_path: Path) -> None:
    async with swarm(tmp_path, SEALS, new()) as (nosy, _, backbone, _):
        (node,) = await backbone.until_covered(1)
        nosy.only, nosy.meddling = FrameType.DISPATCH, Meddling.REORDER
        calls = [asked(backbone, node, MODEL.dispatch(0, [[0, 1]], seed)) for seed in range(2)]
        assert sorted(await asyncio.gather(*calls)) == sorted([FAILS, ANSWERED])


# -- who may do without


async def test_require_sealed_leaves_out_a_node_that_does_not_seal_and_names_it(tmp_path: Path) -> None:
    strict = SealPolicy(SEALS.identity, required=True)
    async with swarm(tmp_path, strict, OPEN, new()) as (_, relay, backbone, _):
        (node,) = await backbone.until(lambda nodes: len(nodes) == 1, "the node that seals")
        while not backbone.lane.unsealed_nodes:
            await asyncio.sleep(0.01)
        assert (node.name, backbone.lane.unsealed_nodes) == ("node-1", ("node-0",))


async def test_without_that_both_are_asked_and_each_is_shown_as_it_is(tmp_path: Path) -> None:
    async with swarm(tmp_path, SEALS, OPEN, new()) as (_, _, backbone, clients):
        nodes = await backbone.until(lambda nodes: len(nodes) == 2, "two nodes")
        for node in nodes:
            await backbone.check(node, 3)
        shown = {node.name: backbone.lane.describe_seal(node.peer)["sealed"] for node in nodes}
        assert shown == {"node-0": False, "node-1": True}
        assert [client.status().seal for client in clients] == ["unsealed", "sealed"]


@pytest.mark.parametrize("ours", [SEALS, OPEN], ids=["of another key", "that does not seal"])
async def test_node_with_a_pinned_key_does_not_work_for_a_backbone(tmp_path: Path, ours: SealPolicy) -> None:
    pinned = SealPolicy(fresh_identity(), backbone="1234-5678-9abc-def0-1234")
    async with swarm(tmp_path, ours, pinned) as (_, relay, backbone, (client,)):
        while client.status().seal != "refused":
            await asyncio.sleep(0.01)
        assert "not the pinned 1234-5678" in client.status().seal_why
        assert client.status().experts == 0 and not backbone.nodes and not backbone.delivered
        async with running_node(ClientConfig(relay.url, 1 << 24, "other"), KERNEL):
            await backbone.until_covered(1)  # its share is another's


async def test_node_with_the_right_pin_serves(tmp_path: Path) -> None:
    pinned = SealPolicy(fresh_identity(), backbone=SEALS.identity.fingerprint.upper().replace("-", ""))
    async with swarm(tmp_path, SEALS, pinned) as (_, _, backbone, _):
        (node,) = await backbone.until_covered(1)
        await backbone.check(node, 1)


async def test_a_lost_hello_is_said_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relay.wire.sealing.RESEND_S", 0.05)
    dropped: list[int] = []

    async with swarm(tmp_path, SEALS) as (_, relay, backbone, _):
        passes = relay.hub.rooms.passes
        monkeypatch.setattr(
            type(relay.hub.rooms),
            "passes",
            lambda rooms, *args: passes(*args) if len(dropped) > 2 else bool(dropped.append(1)),
        )
        async with running_node(ClientConfig(relay.url, 1 << 24, "late", seal=new()), KERNEL):
            (node,) = await backbone.until_covered(1)
            assert len(dropped) == 3
            await backbone.check(node, 1)


# -- keys in files


def test_key_is_made_once_and_only_its_owner_may_read_it(tmp_path: Path) -> None:
    path = tmp_path / "state" / "key.pem"
    made = kept_identity(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert kept_identity(path).public == made.public
    together = tmp_path / "together.pem"
    with ThreadPoolExecutor(8) as pool:
        assert len({identity.public for identity in pool.map(kept_identity, [together] * 8)}) == 1
    assert {file.name for file in tmp_path.iterdir()} == {"state", "together.pem"}
    path.chmod(0o640)
    with pytest.raises(ConfigError, match="chmod 600"):
        kept_identity(path)
    path.chmod(0o600)
    path.write_text("no key")
    with pytest.raises(ConfigError, match="holds no key"):
        kept_identity(path)
    with pytest.raises(ConfigError, match="cannot be kept"):
        kept_identity(path / "below" / "a.pem")


async def test_node_that_comes_back_agrees_on_new_keys_and_is_asked_again(tmp_path: Path) -> None:
    async with swarm(tmp_path, SEALS, new()) as (nosy, relay, backbone, (client,)):
        (first,) = await backbone.until_covered(1)
        await backbone.check(first, 1)
        for session in range(2):
            before = backbone.nodes[0].peer
            socket = client._socket
            assert socket is not None and socket._transport is not None
            socket._transport.abort()
            await backbone.until(lambda nodes: bool(nodes) and nodes[0].peer != before, "the node again")  # noqa: B023
            (node,) = await backbone.until_covered(1)
            assert (node.node_id, node.seal) == (first.node_id, first.seal) and node.epoch != first.epoch
            await backbone.check(node, session)
        assert len(backbone.delivered) == len(MODEL.by_id), "nothing was loaded again"
        assert all(head.sealed for head in map(decode_header, nosy.seen) if head.type is FrameType.DISPATCH)
