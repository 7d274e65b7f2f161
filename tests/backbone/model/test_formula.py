import json
from dataclasses import replace
from typing import Any

import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from hypothesis import given
from hypothesis import strategies as st

from backbone.errors import FormulaUnsupported, ModelError
from backbone.model.formula import ACTIVATIONS, FORMATS, WEIGHT_POSITIONS, Formula, row_bytes

DEMO = Formula(hidden_dim=576, expert_dim=192, gate_type=8, up_type=8, down_type=8)

formulas = st.builds(
    Formula,
    hidden_dim=st.integers(1, 1 << 20),
    expert_dim=st.integers(1, 1 << 20),
    gate_type=st.none() | st.integers(0, 255),
    up_type=st.integers(0, 255),
    down_type=st.integers(0, 255),
    activation=st.sampled_from(ACTIVATIONS),
    alpha=st.floats(0, 10),
    limit=st.floats(0, 10),
    weight_position=st.sampled_from(WEIGHT_POSITIONS),
    biased=st.booleans(),
)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


def test_formats_are_those_of_ggml() -> None:
    for type_id, layout in FORMATS.items():
        assert GGMLQuantizationType(type_id).name == layout.name
        assert GGML_QUANT_SIZES[GGMLQuantizationType(type_id)] == (layout.block, layout.block_bytes)


def test_slice_of_the_demo_model_has_the_documented_size() -> None:
    assert DEMO.slice_bytes == 352_512
    assert replace(DEMO, gate_type=None).slice_bytes == 352_512 * 2 // 3


def test_json_is_the_contract() -> None:
    assert DEMO.to_json() == {
        "hidden_dim": 576, "expert_dim": 192, "gate_type": 8, "up_type": 8, "down_type": 8,
        "activation": "silu", "alpha": 0.0, "limit": 0.0, "weight_position": "after", "biased": False,
        "scaled": False,
    }  # fmt: skip


@given(formulas)
def test_formula_survives_json(formula: Formula) -> None:
    assert Formula.from_json(json.loads(json.dumps(formula.to_json()))) == formula


@given(st.dictionaries(st.sampled_from(sorted(DEMO.to_json())), json_values) | json_values)
def test_any_json_is_a_formula_or_a_model_error(data: Any) -> None:
    merged = DEMO.to_json() | data if isinstance(data, dict) else data
    try:
        assert isinstance(Formula.from_json(merged), Formula)
    except ModelError:
        pass


def test_missing_keys_are_named_and_unknown_ones_ignored() -> None:
    data = DEMO.to_json() | {"from_the_future": 1}
    assert Formula.from_json(data) == DEMO
    del data["up_type"]
    with pytest.raises(ModelError, match="up_type"):
        Formula.from_json(data)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"activation": "gelu", "limit": 7.0}, "gelu with limit 7.0"),
        ({"gate_type": None, "limit": 7.0}, "silu with limit 7.0"),
        ({"gate_type": None, "activation": "situ", "alpha": 4.0}, "situ without a gate"),
        ({"activation": "situ"}, "situ with alpha 0.0"),
        ({"activation": "swiglu_oai", "alpha": 1.702}, "swiglu_oai without a limit"),
        ({"limit": -7.0}, "silu with limit -7.0"),
        ({"down_type": 9}, "weight format 9"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(change: dict[str, Any], name: str) -> None:
    with pytest.raises(FormulaUnsupported, match=rf"{name}.* \(layer 3\)"):
        replace(DEMO, **change).require_supported(3)


def test_row_that_is_no_whole_number_of_blocks_is_refused() -> None:
    with pytest.raises(FormulaUnsupported, match="Q4_K rows of 576 columns"):
        row_bytes(12, 576)
