import os
import re
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader, GGUFWriter
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from backbone.errors import EngineRefused, FormulaUnsupported, ModelError
from backbone.model.expert_tensors import PARTS, PATTERN, layer_with_experts, tensor_name
from backbone.model.formula import Formula
from backbone.model.gguf import open_model
from backbone.model.graph import SeenLayer
from backbone.model.quantise import dequantise
from backbone.model.random_model import Shape, make_random_moe
from tests.models.rewrite import rewrite

SMALL = Shape(num_layers=2, num_experts=2, top_k=1, hidden_dim=64, expert_dim=32, shared_dim=32, num_heads=2)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random_moe(tmp_path_factory.mktemp("model") / "m.gguf", Shape(gate_up_type=12, down_type=14))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random_moe(tmp_path_factory.mktemp("small") / "small.gguf", SMALL)


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


def test_experts_in_tensors_of_their_own_are_refused_with_what_to_do(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "old.gguf", "llama")
    writer.add_expert_count(2)
    for expert in range(2):
        writer.add_tensor(f"blk.0.ffn_down.{expert}.weight", _floats(32, 64))
    _close(writer)
    with pytest.raises(ModelError, match="old.gguf has each expert in a tensor of its own.*convert it again"):
        open_model(tmp_path / "old.gguf")


def test_expert_too_large_for_the_wire_is_refused_by_name(tmp_path: Path) -> None:
    """A sparse file: only its head is there."""
    path = _experts(tmp_path / "huge.gguf", "qwen2moe", SEPARATE)
    data = bytearray(path.read_bytes())
    for part, (columns, rows) in {"gate": (32, 64), "up": (32, 64), "down": (64, 32)}.items():
        at = data.index(f"blk.0.ffn_{part}_exps.weight".encode()) + len(f"blk.0.ffn_{part}_exps.weight") + 4
        assert struct.unpack_from("<3Q", data, at) == (columns, rows, 2)
        struct.pack_into("<3Q", data, at, *(n * (1 << 9 if n == 32 else 1 << 8) for n in (columns, rows)), 2)
    path.write_bytes(data)
    os.truncate(path, 3 << 31)
    with pytest.raises(
        FormulaUnsupported, match=r"an expert of \d+ bytes, blk.0.ffn_down_exps.weight of huge.gguf"
    ):
        open_model(path)


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


def test_split_model_is_opened_from_any_part_and_through_links_as_hubs_lay_them_out(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "rev"
    for folder in (blobs, snapshot):
        folder.mkdir(parents=True)
    whole = make_random_moe(tmp_path / "m.gguf", SMALL)
    (tmp_path / "s").mkdir()
    first = rewrite(whole, tmp_path / "s" / "M.gguf", per_shard=9, keys_only_first=True)
    parts = sorted(first.parent.iterdir())
    for number, part in enumerate(parts):
        blob = part.rename(blobs / f"{number:064x}")
        (snapshot / part.name).symlink_to(Path("../../blobs") / blob.name)
    expected = open_model(whole)
    for part in parts:
        model = open_model(snapshot / part.name)
        assert model.path == snapshot / first.name  # what the engine is to open, not the blob
        assert model.slice_bytes(1, 1) == expected.slice_bytes(1, 1)
    (snapshot / parts[1].name).unlink()
    (snapshot / parts[1].name).symlink_to(snapshot / parts[2].name)
    with pytest.raises(ModelError, match=r"M-00002-of-0000\d.gguf says that it is part 3"):
        open_model(snapshot / first.name)
    (tmp_path / "alone.gguf").symlink_to(blobs / f"{0:064x}")
    with pytest.raises(ModelError, match="is one of . parts, but is not called so"):
        open_model(tmp_path / "alone.gguf")


def test_only_the_tensors_of_routed_experts_are_called_so() -> None:
    experts = [
        tensor_name(layer, part, kind) for layer in (0, 61) for part in PARTS for kind in ("weight", "bias")
    ]
    others = (
        "blk.0.ffn_norm_exps.weight", "blk.0.ffn_up_exps.input_scale", "blk.0.ffn_up_chexps.weight",
        "blk.0.ffn_up_shexp.weight", "blk.0.ffn_up_exps.weight.lora_a", "v.blk.0.ffn_up_exps.weight",
        "blk.x.ffn_up_exps.weight", "blk.0.ffn_gate_inp.weight", "blk.0.ffn_gate_exps_b.bias",
    )  # fmt: skip
    assert all(re.search(PATTERN, name) for name in experts)
    assert not any(re.search(PATTERN, name) for name in others)
    assert [layer_with_experts(name) for name in ("blk.61.ffn_down_exps.weight", *others)] == [61] + [
        None
    ] * 9


def _seen(formula: Formula, layer: int = 0, **changes: int) -> SeenLayer:
    return SeenLayer(**({"layer": layer, "num_experts": 8, "top_k": 3, "formula": formula} | changes))  # type: ignore[arg-type]


def test_graph_says_which_layers_count_and_what_they_compute(path: Path) -> None:
    model = open_model(path)
    clamped = replace(model.layers[2].formula, activation="swiglu_clamp", limit=7.0)
    computed = model.as_computed([_seen(clamped, 2), _seen(model.layers[0].formula, 0, top_k=5)])
    assert list(computed.layers) == [0, 2]
    assert computed.layers[2].formula == clamped
    assert computed.top_k == 5
    assert computed.expert_bytes == 2 / 3 * model.expert_bytes


def test_graph_and_file_that_contradict_each_other_are_refused_by_layer(path: Path) -> None:
    model = open_model(path)
    formula = model.layers[1].formula
    for seen, why in (
        (_seen(replace(formula, down_type=8), 1), "down_type 14, in the graph 8.*layer 1"),
        (_seen(replace(formula, biased=True), 1), "biased False, in the graph True.*layer 1"),
        (_seen(formula, 7), "could not be read.*layer 7"),
        (_seen(formula, 1, num_experts=9), "9 experts where m.gguf has 8.*layer 1"),
    ):
        with pytest.raises((EngineRefused, FormulaUnsupported), match=why):
            model.as_computed([seen])
    with pytest.raises(EngineRefused, match="uses none"):
        model.as_computed([])


def test_scales_that_the_graph_does_not_use_are_no_part_of_a_slice(tmp_path: Path) -> None:
    model = open_model(_experts(tmp_path / "m.gguf", "qwen2moe", SEPARATE | {"down_exps.scale": _floats(2)}))
    formula = replace(model.layers[0].formula, scaled=False)
    computed = model.as_computed([_seen(formula, num_experts=2, top_k=1)])
    assert len(computed.slice_bytes(0, 1)) == formula.slice_bytes == len(model.slice_bytes(0, 1)) - 12


def test_unreadable_experts_matter_only_where_the_graph_wants_them(tmp_path: Path) -> None:
    """The last layer predicts further tokens; its experts are of a number of their own."""
    writer = GGUFWriter(tmp_path / "m.gguf", "qwen2moe")
    writer.add_block_count(2)
    writer.add_uint32("qwen2moe.nextn_predict_layers", 1)
    writer.add_expert_count(2)
    writer.add_array("qwen2moe.expert_used_count", [1, 1])
    for layer, experts in ((0, 2), (1, 3)):
        for part, dims in (("gate", (64, 32)), ("up", (64, 32)), ("down", (32, 64))):
            writer.add_tensor(f"blk.{layer}.ffn_{part}_exps.weight", _floats(experts, *dims))
    _close(writer)
    model = open_model(tmp_path / "m.gguf")
    assert list(model.layers) == [0]
    first = _seen(model.layers[0].formula, num_experts=2, top_k=1)
    assert list(model.as_computed([first]).layers) == [0]
    with pytest.raises(ModelError, match=r"m.gguf: blk.1.ffn_down_exps.weight has shape \(64, 32, 3\)"):
        model.as_computed([first, _seen(model.layers[0].formula, 1, num_experts=2, top_k=1)])


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        ("expert_used_count", "three", r"expert_used_count is 'three', not a count"),
        ("expert_used_count", 0.5, r"expert_used_count is 0.5, not a count"),
        ("expert_used_count", -1, r"expert_used_count is -1, not a count"),
        ("expert_used_count", 0, "0 experts are chosen of 8"),
        ("expert_used_count", [3], "expert_used_count has 1 values, none for layer 1"),
        ("expert_used_count", None, "lacks qwen2moe.expert_used_count"),
        ("block_count", [3], "block_count is (.*), not a count"),
        ("block_count", None, "lacks qwen2moe.block_count"),
    ],
)
def test_metadata_of_the_wrong_kind_is_one_line_with_file_and_key(
    path: Path, tmp_path: Path, key: str, value: object, why: str
) -> None:
    writer = GGUFWriter(tmp_path / "bad.gguf", "qwen2moe")
    reader = GGUFReader(path)
    for name, good in {"block_count": 3, "expert_count": 8, "expert_used_count": 3, key: value}.items():
        full = f"qwen2moe.{name}"
        match good:
            case int():
                writer.add_int32(full, good)
            case float():
                writer.add_float32(full, good)
            case str():
                writer.add_string(full, good)
            case list():
                writer.add_array(full, good)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, np.asarray(tensor.data), raw_dtype=tensor.tensor_type)
    _close(writer)
    with pytest.raises(ModelError, match=f"^bad.gguf:? .*{why}") as caught:
        open_model(tmp_path / "bad.gguf")
    assert len(str(caught.value).splitlines()) == 1


def _close(writer: GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


HOSTILE = st.sampled_from(
    [0, 1, 2, 3, 7, 8, 9, 255, 4096, 1 << 20, (1 << 31) - 1, (1 << 32) - 1, (1 << 63) - 1]
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=400, deadline=None)
@given(data=st.data())
def test_any_damage_of_the_head_gives_a_model_or_one_line(
    data: st.DataObject, small: Path, tmp_path: Path
) -> None:
    """Numbers anywhere in the head are replaced: counts, types, dimensions, lengths, offsets."""
    whole = bytearray(small.read_bytes())
    head = whole.index(b"blk.1.ffn_down_exps.weight") + 80  # the last experts; the data follows soon
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, head))
        if data.draw(st.booleans()):  # near the description of a tensor or a key
            names = [
                m.start()
                for m in re.finditer(rb"blk\.\d\.ffn_\w+_exps|qwen2moe\.\w+|general\.\w+", whole[:head])
            ]
            at = data.draw(st.sampled_from(names)) + data.draw(st.integers(-8, 60))
        number = data.draw(HOSTILE | st.integers(0, 255))
        size = data.draw(st.sampled_from([1, 4, 8]))
        whole[at : at + size] = (number & (1 << 8 * size) - 1).to_bytes(size, "little")
    path = tmp_path / "damaged.gguf"
    path.write_bytes(whole[: data.draw(st.sampled_from([len(whole), len(whole) - 1, head, head // 2]))])
    try:
        model = open_model(path)
    except ModelError as exc:
        assert len(str(exc).splitlines()) == 1 and str(exc).isprintable()
        assert "damaged.gguf" in str(exc)
    else:
        for layer, moe in model.layers.items():
            assert len(model.slice_bytes(layer, model.num_experts - 1)) == moe.formula.slice_bytes
