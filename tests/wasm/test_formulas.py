"""Every formula in every build against the NumPy reference, and the reference against float64."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backbone.experts import native, reference
from backbone.model.formula import Formula
from relay.wire.tensors import XEncoding
from tests.wasm.calls import Sample, kernels, random_slice, sample
from tests.wasm.known_answers import FORMULAS
from tests.wasm.test_kernel import assert_same_bits, small_dims

type F64 = npt.NDArray[np.float64]


def with_formula(case: Sample, **what: Any) -> Sample:
    """Give the same dispatch with another formula, and slices that fit it."""
    formula = replace(case.formula, **what)
    rng = np.random.default_rng(len(case.picks))
    return replace(case, formula=formula, slices=[random_slice(rng, formula) for _ in case.slices])


@pytest.mark.parametrize("what", FORMULAS, ids=str)
@pytest.mark.parametrize("types", [(0, 1, 8), (8, 8, 8), (12, 14, 12)])
def test_every_build_gives_the_references_bits(what: dict[str, Any], types: tuple[int, int, int]) -> None:
    case = sample(21, types, small_dims(types, (1, 1)), rows=5)
    assert_same_bits(with_formula(replace(case, x=case.x * np.float32(40)), **what))


@given(
    seed=st.integers(0, 2**32),
    activation=st.sampled_from(["silu", "gelu", "relu", "relu2", "swiglu_oai", "swiglu_clamp", "situ"]),
    has_gate=st.booleans(),
    limit=st.sampled_from([0.0, 0.01, 7.0, 2.0**20]),
    extras=st.tuples(st.booleans(), st.booleans()),
    position=st.sampled_from(["before", "after"]),
    magnitude=st.sampled_from([2.0**-60, 1.0, 1e3, 1e9]),
    encoding=st.sampled_from([XEncoding.F32, XEncoding.Q8A32]),
)
@settings(max_examples=60, deadline=None)
def test_any_formula_that_is_supported_gives_the_references_bits(
    seed: int,
    activation: str,
    has_gate: bool,
    limit: float,
    extras: tuple[bool, bool],
    position: str,
    magnitude: float,
    encoding: XEncoding,
) -> None:
    case = sample(seed, (8, 8, 8), (32, 32), rows=3)
    what: dict[str, Any] = {
        "activation": activation, "alpha": 1.7, "limit": limit, "biased": extras[0], "scaled": extras[1],
        "gate_type": 8 if has_gate else None, "weight_position": position,
    }  # fmt: skip
    formula = replace(case.formula, **what)
    if formula.unsupported():
        with pytest.raises(native.NotSupported):
            kernels()[0].pack(formula, b"")
        return
    case = with_formula(replace(case, x=case.x * np.float32(magnitude), encoding=encoding, layer=100), **what)
    try:
        outputs, sums = case.reference()
    except reference.NonFinite:  # the square of a relu, or its product, left float32
        for kernel in kernels():
            with pytest.raises(native.NonFinite):
                case.answer(kernel)
        return
    for kernel in kernels():
        assert np.array_equal(case.answer(kernel), sums), kernel.build
        assert np.array_equal(case.outputs(kernel).view(np.uint32), outputs.view(np.uint32)), kernel.build


def _sigmoid(z: F64) -> F64:
    return 1 / (1 + np.exp(-np.clip(z, -700, 700)))


def _gelu(g: F64) -> F64:
    return g * _sigmoid(2 * math.sqrt(2 / math.pi) * g * (1 + 0.044715 * g * g))


def test_gelu_is_the_tanh_form() -> None:
    g = np.linspace(-4, 4, 1001)
    as_ggml_writes_it = 0.5 * g * (1 + np.tanh(math.sqrt(2 / math.pi) * g * (1 + 0.044715 * g * g)))
    assert np.allclose(_gelu(g), as_ggml_writes_it, rtol=1e-9, atol=1e-14)


MEANINGS: list[tuple[dict[str, Any], Callable[[F64, F64], F64]]] = [
    ({"activation": "silu"}, lambda g, u: g * _sigmoid(g) * u),
    ({"activation": "gelu"}, lambda g, u: _gelu(g) * u),
    ({"activation": "relu"}, lambda g, u: np.maximum(g, 0) * u),
    ({"activation": "relu2"}, lambda g, u: np.maximum(g, 0) ** 2 * u),
    (
        {"activation": "swiglu_oai", "alpha": 1.702, "limit": 7.0},
        lambda g, u: np.minimum(g, 7) * _sigmoid(1.702 * np.minimum(g, 7)) * (np.clip(u, -7, 7) + 1),
    ),
    (
        {"activation": "swiglu_clamp", "limit": 7.0},
        lambda g, u: np.minimum(g, 7) * _sigmoid(np.minimum(g, 7)) * np.clip(u, -7, 7),
    ),
    (
        {"activation": "silu", "limit": 7.0},
        lambda g, u: np.minimum(g * _sigmoid(g), 7) * np.clip(u, -7, 7),
    ),
    (
        {"activation": "situ", "alpha": 4.0, "limit": 25.0},
        lambda g, u: 4 * np.tanh(g / 4) * _sigmoid(g) * 25 * np.tanh(u / 25),
    ),
    ({"activation": "situ", "alpha": 4.0}, lambda g, u: 4 * np.tanh(g / 4) * _sigmoid(g) * u),
]


@pytest.mark.parametrize(("what", "meaning"), MEANINGS, ids=[str(what) for what, _ in MEANINGS])
def test_activations_are_those_of_float64(what: dict[str, Any], meaning: Callable[[F64, F64], F64]) -> None:
    """Within a few f32 roundings (the exponent of a far tail has one too), to where every clamp binds."""
    small = np.logspace(-30, 1.7, 500)
    g = np.concatenate([np.linspace(-60, 60, 24_001), small, -small]).astype(np.float32)
    u = np.roll(g, 777)
    found = reference.activate(Formula(32, 32, 8, 8, 8, **what), g, u)
    assert np.allclose(found, meaning(g.astype(np.float64), u.astype(np.float64)), rtol=1e-5, atol=1e-30)


def test_the_ends_of_the_number_line_give_limits_not_errors() -> None:
    far = np.array([-3e38, -1e20, -88, 88, 1e20, 3e38], np.float32)
    one = np.ones(6, np.float32)
    with np.errstate(over="ignore"):
        for what, _ in MEANINGS:
            h = reference.activate(Formula(32, 32, 8, 8, 8, **what), far, one)
            assert np.isfinite(h).all() or what["activation"] == "relu2", what
            assert (np.abs(h[:3]) <= 1e-30).all(), what
    assert np.array_equal(reference.tanh(far), [-1, -1, -1, 1, 1, 1])


@pytest.mark.parametrize("what", [{"biased": True}, {"scaled": True}])
def test_biases_and_scales_that_are_not_finite_are_refused_when_packed(what: dict[str, Any]) -> None:
    case = with_formula(sample(3, (8, 8, 8), (32, 32), rows=1), **what)
    data = case.slices[0].copy()
    data[-4:] = np.array([np.inf], "<f4").view(np.uint8)
    for kernel in kernels():
        with pytest.raises(native.NonFinite):
            kernel.pack(case.formula, data.tobytes())


def test_a_clamp_hides_no_product_that_is_not_finite() -> None:
    case = sample(4, (0, 0, 0), (8, 8), rows=1)
    case = with_formula(case, activation="swiglu_clamp", limit=7.0)
    for data in case.slices:
        data[: 8 * 8 * 4] = np.full(64, 3e38, "<f4").view(np.uint8)
    case.x[:] = 3
    for kernel in kernels():
        with pytest.raises(native.NonFinite):
            case.answer(kernel)
    with pytest.raises(reference.NonFinite):
        case.reference()


def test_weight_before_is_the_expert_of_the_weighted_row() -> None:
    """Where nothing is rounded to int8, weighting x or the products differs by float rounding only."""
    case = with_formula(sample(5, (0, 0, 0), (64, 48), rows=6, top_k=1), weight_position="before")
    weighted = replace(
        case, x=case.x * case.weights[:, None], weights=np.ones_like(case.weights),
        formula=replace(case.formula, weight_position="after"),
    )  # fmt: skip
    assert np.allclose(case.reference()[0], weighted.reference()[0], rtol=1e-4, atol=1e-6)
