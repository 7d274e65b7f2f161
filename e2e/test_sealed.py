"""A relay that listens and meddles: it reads nothing, and no token changes whatever it does."""

import asyncio
from pathlib import Path

import httpx

from backbone.model.random_model import Shape, make_random_moe
from backbone.server import Backbone
from e2e.swarm import Swarm, swarm
from relay.wire.frames import FrameType, decode_header
from tests.fakes.nosy_relay import Meddling, NosyRelay

TOKENS = 12
SEEN = (FrameType.DISPATCH, FrameType.PARTIAL, FrameType.CANCEL, FrameType.SIGNAL)


async def complete(backbone: Backbone) -> str:
    body = {"prompt": "abc", "max_tokens": TOKENS, "temperature": 0}
    async with httpx.AsyncClient(timeout=60, trust_env=False) as client:
        answer = await client.post(f"{backbone.url}/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["text"])


def answered(made: Swarm) -> int:
    """How many calls nodes answered well."""
    return sum(work.calls for name, work in made.backbone.dispatcher.tally.work.items() if name != "local")


async def test_a_relay_reads_nothing_and_changes_no_token(tmp_path: Path) -> None:
    model = make_random_moe(tmp_path / "model.gguf", Shape())
    with NosyRelay().installed() as nosy:
        async with swarm(model, tmp_path / "cache", nodes=2, links=False, require_sealed=True) as made:
            backbone = made.backbone
            honest = await complete(backbone)
            assert answered(made) > 0
            heads = [decode_header(data) for data in nosy.seen]
            assert {head.sealed for head in heads if head.type in SEEN} == {True}
            assert all(node["seal"]["sealed"] for node in backbone.status()["nodes"])
            nosy.every = 5
            for meddling in Meddling:
                nosy.meddling, nosy.meddled = meddling, 0
                assert await complete(backbone) == honest, meddling.value
                assert meddling is Meddling.NONE or nosy.meddled > 0, "there was something to meddle with"
            assert backbone.lane is not None and set(backbone.lane.seal_faults) >= {
                "altered",
                "repeated",
                "unsealed",
            }
            nosy.meddling = Meddling.NONE
            before = answered(made)
            while answered(made) == before:  # they rest after so many failures, and are asked again
                assert await complete(backbone) == honest
                await asyncio.sleep(0.1)
        nosy.seen.clear()
        async with swarm(model, tmp_path / "cache") as alone:
            assert await complete(alone.backbone) == honest
            assert nosy.seen == []
