from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFWriter

from backbone.errors import FormulaUnsupported, ModelError
from backbone.model.gguf import open_model
from backbone.model.quantise import dequantise
from backbone.model.random_model import Shape, make_random_moe


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random_moe(tmp_path_factory.mktemp("model") / "m.gguf", Shape(gate_up_type=12, down_type=14))


def test_model_says_what_its_experts_are(path: Path) -> None:
    model = open_model(path)
    assert (model.num_experts, model.top_k) == (8, 3)
    assert list(model.layers) == [0, 1, 2]
    formula = model.layers[0].formula
    assert (formula.gate_type, formula.up_type, formula.down_type) == (12, 12, 14)
    assert formula.activation == "silu"
    assert model.expert_bytes == 3 * 8 * formula.slice_bytes < path.stat().st_size


def test_slice_is_gate_up_down_as_they_stand_in_the_file(path: Path) -> None:
    model = open_model(path)
    formula = model.layers[2].formula
    data = model.slice_bytes(2, 7)
    assert len(data) == formula.slice_bytes
    gate_bytes, up_bytes, _ = formula.part_bytes()
    assert data == b"".join(bytes(part) for part in model.slice_parts(2, 7))
    whole_file = path.read_bytes()
    for part in (data[:gate_bytes], data[gate_bytes : gate_bytes + up_bytes], data[gate_bytes + up_bytes :]):
        assert whole_file.count(part) == 1
    gate = dequantise(np.frombuffer(data[:gate_bytes], np.uint8).reshape(256, -1), 12)
    assert gate.shape == (256, 256)


def test_expert_that_does_not_exist_is_an_error(path: Path) -> None:
    with pytest.raises(IndexError):
        open_model(path).slice_bytes(0, 8)
    with pytest.raises(KeyError):
        open_model(path).slice_bytes(9, 0)


def _experts(path: Path, architecture: str, tensors: dict[str, np.ndarray], **values: float) -> Path:
    """Write one layer of two experts, d = 32 and f = 64, with these tensors and metadata."""
    writer = GGUFWriter(path, architecture)
    writer.add_block_count(1)
    writer.add_embedding_length(32)
    writer.add_expert_count(2)
    writer.add_expert_used_count(1)
    for key, value in values.items():
        writer.add_array(f"{architecture}.{key}", [value])
    for name, tensor in tensors.items():
        writer.add_tensor(f"blk.0.ffn_{name}", tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _floats(*shape: int, dtype: type = np.float32) -> np.ndarray:
    return np.random.default_rng(len(shape)).standard_normal(shape).astype(dtype)


SEPARATE = {
    "gate_exps.weight": _floats(2, 64, 32),
    "up_exps.weight": _floats(2, 64, 32),
    "down_exps.weight": _floats(2, 32, 64),
}


def test_biases_and_scales_stand_behind_the_matrices_and_missing_ones_change_nothing(tmp_path: Path) -> None:
    tensors = {"up_exps.bias": _floats(2, 64), "down_exps.scale": _floats(2)}
    model = open_model(_experts(tmp_path / "m.gguf", "qwen2moe", SEPARATE | tensors))
    formula = model.layers[0].formula
    assert formula.biased and formula.scaled
    data = model.slice_bytes(0, 1)
    assert len(data) == formula.slice_bytes
    extras = np.frombuffer(data, "<f4")[-(64 + 64 + 32 + 3) :]
    zeros = np.zeros(64), np.zeros(32)
    expected = zeros[0], tensors["up_exps.bias"][1], zeros[1], [1], [1], [tensors["down_exps.scale"][1]]
    assert np.array_equal(extras, np.concatenate(expected).astype(np.float32))


def test_merged_gate_and_up_give_the_slice_of_separate_ones(tmp_path: Path) -> None:
    biases = {"gate_exps.bias": _floats(2, 64), "up_exps.bias": _floats(2, 64) + 1}
    merged = {
        "gate_up_exps.weight": np.concatenate([SEPARATE["gate_exps.weight"], SEPARATE["up_exps.weight"]], 1),
        "gate_up_exps.bias": np.concatenate(list(biases.values()), 1),
        "down_exps.weight": SEPARATE["down_exps.weight"],
        "up_exps.scale": _floats(2),
    }
    scales = {"gate_exps.scale": _floats(2), "up_exps.scale": _floats(2)}
    one = open_model(_experts(tmp_path / "a.gguf", "qwen2moe", merged))
    other = open_model(_experts(tmp_path / "b.gguf", "qwen2moe", SEPARATE | biases | scales))
    assert one.layers[0].formula == other.layers[0].formula
    assert one.slice_bytes(0, 1) == other.slice_bytes(0, 1)


def test_experts_without_a_gate_have_no_place_for_one(tmp_path: Path) -> None:
    tensors = {name: tensor for name, tensor in SEPARATE.items() if "gate" not in name}
    model = open_model(
        _experts(tmp_path / "m.gguf", "nemotron_h_moe", tensors | {"up_exps.bias": _floats(2, 64)})
    )
    formula = model.layers[0].formula
    assert formula.gate_type is None
    assert len(model.slice_bytes(0, 0)) == formula.slice_bytes == 4 * (2 * 32 * 64 + 64 + 32)


def test_bias_in_a_format_that_is_not_known_is_refused_by_name(tmp_path: Path) -> None:
    half = {"up_exps.bias": _floats(2, 64, dtype=np.float16)}
    with pytest.raises(
        FormulaUnsupported, match=r"blk\.0\.ffn_up_exps\.bias in format 1 of half\.gguf.*layer 0"
    ):
        open_model(_experts(tmp_path / "half.gguf", "qwen2moe", SEPARATE | half))


def _write(path: Path, experts: int, down: tuple[int, ...] | None = None) -> Path:
    writer = GGUFWriter(path, "qwen2moe")
    writer.add_block_count(1)
    writer.add_embedding_length(32)
    writer.add_expert_used_count(1)
    if experts:
        writer.add_expert_count(experts)
    if down:
        writer.add_tensor("blk.0.ffn_down_exps.weight", np.zeros(down, np.float32))
        writer.add_tensor("blk.0.ffn_gate_exps.weight", np.zeros((2, 32, 32), np.float32))
        writer.add_tensor("blk.0.ffn_up_exps.weight", np.zeros((2, 32, 32), np.float32))
    else:
        writer.add_tensor("token_embd.weight", np.zeros((4, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_dense_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no routed experts"):
        open_model(_write(tmp_path / "dense.gguf", experts=0))
    with pytest.raises(ModelError, match="no tensor of theirs"):
        open_model(_write(tmp_path / "empty.gguf", experts=2))


def test_tensors_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ModelError, match=r"ffn_gate_exps.weight has shape \(32, 32, 2\), expected \(32, 64, 2\)"
    ):
        open_model(_write(tmp_path / "odd.gguf", experts=2, down=(2, 32, 64)))


@pytest.mark.parametrize("content", [b"", b"not a model", b"GGUF", b"GGUF\x03\0\0\0" + b"\xff" * 64])
def test_any_other_file_is_a_model_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError):
        open_model(path)
    with pytest.raises(ModelError, match="no such model file"):
        open_model(tmp_path / "missing.gguf")


def test_split_model_is_opened_from_its_first_file(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "big.gguf", "qwen2moe", split_max_tensors=2)
    writer.add_block_count(2)
    writer.add_embedding_length(32)
    writer.add_expert_count(2)
    writer.add_expert_used_count(1)
    for layer in range(2):
        for number, part in enumerate(("gate", "up", "down")):
            weights = np.full((2, 32, 32), 10 * layer + number, np.float32)
            writer.add_tensor(f"blk.{layer}.ffn_{part}_exps.weight", weights)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    model = open_model(tmp_path / "big-00001-of-00003.gguf")
    assert list(model.layers) == [0, 1]
    values = np.frombuffer(model.slice_bytes(1, 0), np.float32).reshape(3, -1)
    assert values.min(axis=1).tolist() == values.max(axis=1).tolist() == [10.0, 11.0, 12.0]
    (tmp_path / "big-00003-of-00003.gguf").unlink()
    with pytest.raises(ModelError, match="big-00003-of-00003"):
        open_model(tmp_path / "big-00001-of-00003.gguf")
