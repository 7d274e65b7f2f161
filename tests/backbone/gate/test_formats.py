"""Small random models in other weight formats: llama.cpp with its own dot products and with our kernel's."""

from pathlib import Path

import pytest

from backbone.gate.compare import compare_logits
from backbone.gate.logits import teacher_forced_logits, tokenise
from backbone.model.formula import FORMATS
from backbone.model.gguf import open_model
from backbone.model.random_model import Shape, make_random_moe
from tests.backbone.gate.test_formulas import NEAR, Swarm

TEXTS = ("The quick brown fox jumps over the lazy dog.",)
NUMBERS = {layout.name: type_id for type_id, layout in FORMATS.items()}
PAIRS = ["Q4_0 Q4_1", "Q5_0 Q5_1", "Q5_K Q6_K", "Q2_K Q3_K", "IQ4_XS IQ4_NL", "MXFP4 MXFP4", "IQ2_XXS IQ3_S",
         "IQ1_M TQ2_0", "BF16 F16"]  # fmt: skip


@pytest.mark.parametrize("pair", PAIRS)
async def test_our_kernel_is_as_close_to_llama_cpp_as_llama_cpp_to_itself(pair: str, tmp_path: Path) -> None:
    gate_up, down = (NUMBERS[name] for name in pair.split())
    shape = Shape(num_layers=2, gate_up_type=gate_up, down_type=down)
    model = open_model(make_random_moe(tmp_path / "formats.gguf", shape))
    sequences = await tokenise(model.path, TEXTS)
    plain = await teacher_forced_logits(model.path, sequences)
    swarm = Swarm(model)
    try:
        ours = compare_logits(plain, await teacher_forced_logits(model.path, sequences, swarm=swarm))
    finally:
        swarm.local.close()
    floor = [
        compare_logits(plain, await teacher_forced_logits(model.path, sequences, settings=settings))
        for settings in NEAR.values()
    ]
    assert swarm.calls == len(TEXTS) * len(model.layers)
    assert ours.cosine_mean > 0.995
    assert ours.no_worse_than(min(floor, key=lambda c: c.cosine_mean)), (ours, floor)
