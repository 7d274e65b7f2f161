"""A relay that listens and meddles: it reads nothing, and no token changes whatever it does."""

from pathlib import Path

import httpx

from backbone.experts.deadlines import DeadlinePolicy
from backbone.model.random_model import Shape, make_random_moe
from backbone.server import Backbone
from e2e.swarm import Swarm, swarm
from relay.wire.frames import FrameType, decode_header
from tests.fakes.nosy_relay import Meddling, NosyRelay

TOKENS = 12
FORGIVING = DeadlinePolicy(
    suspend_first_s=0.02, suspend_max_s=0.1
)  # they are asked again at once, to fail again
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
        settings = {"links": False, "require_sealed": True, "deadlines": FORGIVING}
        async with swarm(model, tmp_path / "cache", nodes=2, **settings) as made:
            backbone = made.backbone
            honest = await complete(backbone)
            assert answered(made) > 0
            heads = [decode_header(data) for data in nosy.seen]
            assert {head.sealed for head in heads if head.type in SEEN} == {True}
            assert all(node["seal"]["sealed"] for node in backbone.status()["nodes"])
            nosy.every = 3
            for meddling in Meddling:
                nosy.meddling, nosy.meddled = meddling, 0
                while True:
                    assert await complete(backbone) == honest, meddling.value
                    if meddling is Meddling.NONE or nosy.meddled > 0:
                        break  # there was something to meddle with
            assert backbone.lane is not None
            at_nodes = [why for work in backbone.dispatcher.tally.work.values() for why in work.failures]
            assert backbone.lane.seal_faults or any("bad_seal" in why for why in at_nodes), "named"
            nosy.meddling = Meddling.NONE
            before = answered(made)
            while answered(made) == before:
                assert await complete(backbone) == honest
        nosy.seen.clear()
        async with swarm(model, tmp_path / "cache") as alone:
            assert await complete(alone.backbone) == honest
            assert nosy.seen == []
