"""Files of families as people have them: what the graph uses is served, and a node changes no bit of it."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from backbone.engine.link import Floats, LayerCall
from backbone.gate.compare import compare_logits
from backbone.gate.logits import greedy, teacher_forced_logits, tokenise
from backbone.model.gguf import open_model
from e2e.swarm import swarm
from tests.models.families import FAMILIES
from tests.models.make import make

PROMPTS = ("Why is the sky blue?", "def f(n):")
NUM_TOKENS = 12


async def _zeros(call: LayerCall) -> Floats:
    return np.zeros_like(call.x)


@pytest.mark.parametrize("name", FAMILIES)
async def test_family_is_served_by_a_node_as_by_this_machine(name: str, tmp_path: Path) -> None:
    family = FAMILIES[name]
    path = make(name, tmp_path / "model.gguf")
    in_file = set(open_model(path).layers)
    assert len(in_file) == len(family.moe) + family.nextn  # experts that predict further tokens are there
    prompts = await tokenise(path, PROMPTS)
    async with swarm(path, tmp_path, nodes=1, share=1.3) as s:
        manifest, dispatcher = s.backbone.manifest, s.backbone.dispatcher
        assert tuple(layer.layer for layer in manifest.layers) == family.moe
        anywhere = dispatcher.policy
        dispatcher.policy = replace(anywhere, local_only=True)
        here = await greedy(path, prompts, NUM_TOKENS, swarm=dispatcher.call)
        dispatcher.policy = anywhere
        dispatcher.tally.work.clear()
        by_node = await greedy(path, prompts, NUM_TOKENS, swarm=dispatcher.call)
        assert {work.name for work in dispatcher.tally.work.values()} == {"node-0"}
        ours = await teacher_forced_logits(path, prompts, swarm=dispatcher.call)
    for a, b in zip(here, by_node, strict=True):
        assert a.tokens == b.tokens
        assert a.logits.tobytes() == b.logits.tobytes()
    plain = await teacher_forced_logits(path, prompts)
    without = compare_logits(plain, await teacher_forced_logits(path, prompts, swarm=_zeros))
    found = compare_logits(plain, ours)
    # far nearer to llama.cpp's own experts than a model whose experts say nothing
    assert 1 - found.cosine_mean < 0.1 * (1 - without.cosine_mean), (found, without)
