"""The lane through a real relay: it comes up, carries calls, says why it is down, and comes back."""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import monotonic

import httpx
import numpy as np
import pytest

from backbone.lanes.lane import LaneClosed
from backbone.lanes.relayed import Answer, LaneHandlers, RelayedLane, session_url
from relay.config import Config
from relay.server import RelayServer
from relay.wire.fields import Fields
from relay.wire.manifest import Manifest
from relay.wire.messages import Dispatch, Hello, Peers, Register
from relay.wire.session import FailureReceived
from relay.wire.tensors import Grid, XEncoding

SLICE = b"one expert's weights" * 50
SLICE_ID = hashlib.sha256(SLICE).hexdigest()
FORMULA = {
    "hidden_dim": 32, "expert_dim": 32, "gate_type": 8, "up_type": 8, "down_type": 8, "activation": "silu",
    "alpha": 0.0, "limit": 0.0, "weight_position": "after", "biased": False,
}  # fmt: skip
MANIFEST = {
    "model": "ab" * 32, "name": "tiny", "num_experts": 1, "top_k": 1,
    "layers": [
        {"layer": 0, "formula": FORMULA, "grid": {"x32": 5, "x16": None}, "slices": [SLICE_ID],
         "slice_bytes": len(SLICE)}
    ],
}  # fmt: skip


@dataclass
class Heard:
    """What the lane told its owner."""

    peers: list[Peers] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)

    def handlers(self) -> LaneHandlers:
        known = {SLICE_ID: SLICE}
        return LaneHandlers(self.peers.append, self.answers.append, self.lost.append, known.get)


async def until(condition: Callable[[], bool], what: str) -> None:
    give_up = monotonic() + 10
    while not condition():
        assert monotonic() < give_up, f"waited too long for {what}"
        await asyncio.sleep(0.01)


def relay_config(tmp_path: Path) -> Config:
    return Config(
        host="127.0.0.1", port=0, cache_dir=tmp_path / "slices", drain_s=0.1, backbone_token="the right token"
    )


@asynccontextmanager
async def lane(url: str, heard: Heard, token: str = "the right token") -> AsyncIterator[RelayedLane]:
    manifest = Manifest.from_fields(Fields("Manifest", MANIFEST))
    made = RelayedLane(
        url, Hello("backbone", "1" * 32, "2" * 32, token), Register("b", manifest), heard.handlers()
    )
    running = asyncio.create_task(made.run())
    try:
        yield made
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def dispatch() -> Dispatch:
    return Dispatch(
        0, 0, 32, XEncoding.F32, Grid.X32, np.zeros(1, np.int16), np.ones(1, np.uint16),
        np.zeros(1, np.uint16), np.ones(1, np.float32), bytes(128),
    )  # fmt: skip


def test_the_session_is_beside_the_page() -> None:
    assert session_url("http://edge:8765") == "ws://edge:8765/v1/session"
    assert session_url("https://edge/swarm/") == "wss://edge/swarm/v1/session"
    for wrong in ("edge:8765", "ws://edge", "http://"):
        with pytest.raises(ValueError, match="must be http"):
            session_url(wrong)


async def test_a_lane_registers_and_carries_calls(tmp_path: Path) -> None:
    heard = Heard()
    async with RelayServer(relay_config(tmp_path)) as relay, lane(relay.url, heard) as made:
        await until(lambda: made.connected and bool(heard.peers), "the first list of peers")
        assert heard.peers[0].nodes == ()
        assert made.send_dispatch(77, 5, 1, 1000, dispatch()) > 128
        await until(lambda: bool(heard.answers), "an answer for the unknown node")
        [failure] = heard.answers
        assert isinstance(failure, FailureReceived) and failure.call_id == 5
        assert failure.failure.code == "gone"


async def test_a_slice_is_uploaded_when_somebody_wants_it(tmp_path: Path) -> None:
    heard = Heard()
    async with RelayServer(relay_config(tmp_path)) as relay, lane(relay.url, heard) as made:
        await until(lambda: made.connected and bool(heard.peers), "the registration")
        async with httpx.AsyncClient(base_url=relay.url, trust_env=False) as client:
            assert (await client.get(f"/slices/{SLICE_ID}")).content == SLICE


async def test_a_wrong_token_is_said_and_not_hammered(tmp_path: Path) -> None:
    heard = Heard()
    async with (
        RelayServer(relay_config(tmp_path)) as relay,
        lane(relay.url, heard, token="the wrong token") as made,
    ):
        await until(lambda: bool(heard.lost), "the refusal")
        assert "token" in made.why_down and not made.connected
        with pytest.raises(LaneClosed, match="token"):
            made.send_dispatch(1, 1, 1, 0, dispatch())
    assert len(heard.lost) == 1


async def test_a_relay_that_knew_us_is_asked_again_whatever_it_says_later(tmp_path: Path) -> None:
    """Its operator may be changing its token; what this backbone computes without it goes on meanwhile."""
    heard = Heard()
    relay = RelayServer(relay_config(tmp_path))
    await relay.__aenter__()
    async with lane(relay.url, heard) as made:
        await until(lambda: made.connected, "the registration")
        await relay.kill()
        config = replace(relay_config(tmp_path), port=relay.port, backbone_token="another token")
        async with RelayServer(config):
            await until(lambda: "token" in made.why_down, "the refusal")
            assert not made.connected


async def test_an_unreachable_relay_is_tried_again(tmp_path: Path) -> None:
    heard = Heard()
    relay = RelayServer(relay_config(tmp_path))
    async with relay:
        port = relay.port
    async with lane(f"http://127.0.0.1:{port}", heard) as made:
        await until(lambda: bool(heard.lost), "the first failure")
        with pytest.raises(LaneClosed):
            made.send_cancel(1, 1, 1)
        async with RelayServer(replace(relay_config(tmp_path), port=port)):
            await until(lambda: made.connected, "the relay's return")


async def test_a_relay_that_crashes_is_noticed_at_once_and_found_again(tmp_path: Path) -> None:
    heard = Heard()
    relay = RelayServer(relay_config(tmp_path))
    await relay.__aenter__()
    async with lane(relay.url, heard) as made:
        await until(lambda: made.connected and bool(heard.peers), "the registration")
        await relay.kill()
        await until(lambda: bool(heard.lost), "the loss")
        assert not made.connected
        async with RelayServer(replace(relay_config(tmp_path), port=relay.port)):
            await until(lambda: len(heard.peers) == 2, "the second registration")
