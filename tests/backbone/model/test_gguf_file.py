"""The head of a GGUF, read as the gguf package reads it, and never beyond the file."""

import struct
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader, GGUFValueType, GGUFWriter
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from backbone.errors import ModelError
from backbone.model.gguf_file import read_gguf
from backbone.model.random_model import Shape, make_random_moe


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "m.gguf"
    shape = Shape(num_layers=1, num_experts=2, top_k=1, down_type=12, expert_dim=256, shared_dim=32)
    return make_random_moe(path, shape)


def test_everything_is_where_the_gguf_package_finds_it(model: Path) -> None:
    ours, theirs = read_gguf(model), GGUFReader(model)
    for key, entry in theirs.fields.items():
        if entry.types[0] != GGUFValueType.ARRAY and not key.startswith("GGUF."):
            assert ours.values[key] == entry.contents()
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        found = ours.tensors[tensor.name]
        assert found.shape == tuple(int(n) for n in tensor.shape)
        assert found.type_id == tensor.tensor_type
        assert np.array_equal(ours.bytes_of(found), tensor.data.view(np.uint8).reshape(-1))


def test_every_kind_of_value_is_read(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "v.gguf", "x")
    values = {
        "uint8": 200, "int8": -3, "uint16": 60000, "int16": -5, "uint32": 1 << 31, "int32": -7,
        "uint64": 1 << 63, "int64": -9, "float32": 0.5, "float64": 0.1, "bool": True, "string": "grün",
    }  # fmt: skip
    for kind, value in values.items():
        getattr(writer, f"add_{kind}")(kind, value)
    writer.add_array("words", ["a", "b", ""])
    writer.add_array("numbers", [1, 2, 3])
    writer.add_custom_alignment(64)
    writer.add_tensor("t", np.arange(5, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = read_gguf(tmp_path / "v.gguf")
    assert {key: file.values[key] for key in values} == values
    assert "words" not in file.values
    assert file.bytes_of(file.tensors["t"]).view(np.float32).tolist() == [0, 1, 2, 3, 4]


def test_file_that_is_cut_short_is_noticed_before_it_is_used(model: Path, tmp_path: Path) -> None:
    whole = model.read_bytes()
    for size in (len(whole) - 1, len(whole) // 2, 3000, 30, 23, 5):
        path = tmp_path / f"{size}.gguf"
        path.write_bytes(whole[:size])
        with pytest.raises(ModelError):
            read_gguf(path)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=200, deadline=None)
@given(data=st.data())
def test_any_damage_gives_a_file_or_a_model_error(data: st.DataObject, model: Path, tmp_path: Path) -> None:
    head = bytearray(model.read_bytes()[:9000])
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(head) - 8))
        head[at : at + 8] = data.draw(st.binary(min_size=8, max_size=8) | st.just(struct.pack("<q", -1)))
    path = tmp_path / "damaged.gguf"
    path.write_bytes(head)
    try:
        read_gguf(path)
    except ModelError:
        pass
