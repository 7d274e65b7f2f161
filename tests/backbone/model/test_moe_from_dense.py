"""The MoE is the dense network, cut: shown in NumPy on one layer, and on a whole small GGUF."""

from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader, GGUFWriter

from backbone.errors import ModelError
from backbone.model.gguf import open_model
from backbone.model.moe_from_dense import KINDS, convert, split_ffn
from backbone.model.quantise import Floats
from tests.fakes.local_experts import LocalExperts

HIDDEN, INNER, LAYERS = 64, 1536, 2


def silu(x: Floats) -> Floats:
    return x / (1 + np.exp(-x))


def dense_ffn(x: Floats, gate: Floats, up: Floats, down: Floats) -> Floats:
    return (silu(x @ gate.T) * (x @ up.T)) @ down.T


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("dense") / "dense.gguf"
    rng = np.random.default_rng(3)
    writer = GGUFWriter(path, "llama")
    writer.add_name("dense")
    writer.add_block_count(LAYERS)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_token_list(["a", "b"])
    writer.add_bool("llama.some_flag", True)
    writer.add_tensor("token_embd.weight", rng.standard_normal((2, HIDDEN)).astype(np.float32))
    for layer in range(LAYERS):
        for part, dims in (("gate", (INNER, HIDDEN)), ("up", (INNER, HIDDEN)), ("down", (HIDDEN, INNER))):
            weights = rng.standard_normal(dims).astype(np.float32) * np.float32(dims[1] ** -0.5)
            writer.add_tensor(f"blk.{layer}.ffn_{part}.weight", weights)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("num_experts", [1, 2, 3, 8, 16, 48])
def test_experts_add_up_to_the_dense_network(num_experts: int) -> None:
    rng = np.random.default_rng(0)
    x, gate, up = (rng.standard_normal(shape).astype(np.float32) for shape in ((5, 16), (48, 16), (48, 16)))
    down = rng.standard_normal((16, 48)).astype(np.float32)
    experts = zip(*split_ffn(gate, up, down, num_experts), strict=True)
    total = sum(dense_ffn(x, *expert) / num_experts for expert in experts)
    np.testing.assert_allclose(total, dense_ffn(x, gate, up, down), rtol=1e-4, atol=1e-4)


# kind -> relative error that its weight formats may cost
@pytest.mark.parametrize(
    ("kind", "num_experts", "error"),
    [("f32", 8, 1e-6), ("f16", 16, 1e-3), ("q8_0", 8, 0.02), ("q4_k_down", 6, 0.12), ("q6_k_down", 3, 0.03)],
)
def test_converted_model_computes_the_dense_function(
    dense: Path, tmp_path: Path, kind: str, num_experts: int, error: float
) -> None:
    path = tmp_path / "moe.gguf"
    convert(dense, path, num_experts, kind, "cut")
    model = open_model(path)
    assert (model.name, model.num_experts, model.top_k) == ("cut", num_experts, num_experts)
    assert model.layers[0].formula.down_type == KINDS[kind].down
    tensors = {t.name: t.data for t in GGUFReader(dense).tensors}
    x = np.random.default_rng(1).standard_normal((7, HIDDEN)).astype(np.float32)
    for layer in range(LAYERS):
        expected = dense_ffn(
            x, *(tensors[f"blk.{layer}.ffn_{part}.weight"] for part in ("gate", "up", "down"))
        )
        experts = zip(*LocalExperts(model).weights(layer), strict=True)
        found = sum(dense_ffn(x, *expert) / num_experts for expert in experts)
        assert np.linalg.norm(found - expected) <= error * np.linalg.norm(expected)
    router = {t.name: t.data for t in GGUFReader(path).tensors}["blk.0.ffn_gate_inp.weight"]
    assert not router.any() and router.shape == (num_experts, HIDDEN)


def test_everything_else_is_copied(dense: Path, tmp_path: Path) -> None:
    path = tmp_path / "moe.gguf"
    convert(dense, path, 8, "q8_0", "cut")
    before, after = GGUFReader(dense), GGUFReader(path)
    assert after.get_field("llama.some_flag").contents() is True
    assert after.get_field("tokenizer.ggml.tokens").contents() == ["a", "b"]
    assert after.get_field("llama.feed_forward_length").contents() == INNER // 8
    embedding = {t.name: t.data for t in after.tensors}["token_embd.weight"]
    assert np.array_equal(embedding, before.tensors[0].data)


def test_conversion_that_cannot_be_leaves_nothing_behind(dense: Path, tmp_path: Path) -> None:
    target = tmp_path / "out" / "moe.gguf"
    for num_experts, kind, why in (
        (7, "q8_0", "do not divide"),
        (8, "q4_k_down", "256"),
        (8, "q9", "unknown kind"),
    ):
        with pytest.raises(ModelError, match=why):
            convert(dense, target, num_experts, kind, "cut")
    assert not list(tmp_path.rglob("*.gguf*"))
