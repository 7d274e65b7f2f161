"""The NumPy reference against a third opinion: gguf's own dequantisation and float64 arithmetic."""

import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from backbone.experts import reference
from backbone.model.formula import FORMATS, Formula
from tests.wasm.calls import random_matrix, random_slice

TYPES = tuple(FORMATS)


def weights_f64(blocks: npt.NDArray[np.uint8], ggml_type: int) -> npt.NDArray[np.float64]:
    if ggml_type == 0:  # gguf knows no block of it
        return blocks.view("<f4").astype(np.float64)
    return np.asarray(dequantize(blocks, GGMLQuantizationType(ggml_type)), np.float64)


def silu_f64(g: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    return g / (1 + np.exp(-g))


def relative_error(a: npt.NDArray[np.generic], b: npt.NDArray[np.float64]) -> float:
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


@pytest.mark.parametrize("ggml_type", TYPES)
def test_dot_products_are_those_of_gguf(ggml_type: int) -> None:
    """int8 activations cost about one percent; where they are int8 already, only the f32 sums differ."""
    rng = np.random.default_rng(ggml_type)
    blocks = random_matrix(rng, ggml_type, 24, 512).reshape(24, -1)
    exact = weights_f64(blocks, ggml_type)
    x = rng.standard_normal((5, 512), np.float32)
    assert relative_error(reference.dot(blocks, ggml_type, x), x @ exact.T) < 2e-2
    grain = rng.integers(-127, 128, (5, 512)).astype(np.float32)
    grain[:, ::32] = 127  # every block of 32 or 256 reaches the scale 1
    assert relative_error(reference.dot(blocks, ggml_type, grain), grain.astype(float) @ exact.T) < 2e-6


@pytest.mark.parametrize("types", [(0, 0, 0), (1, 1, 1), (8, 8, 8), (12, 12, 14), (14, 12, 8)])
def test_a_whole_expert_is_that_of_float64(types: tuple[int, int, int]) -> None:
    rng = np.random.default_rng(17)
    formula = Formula(512, 256, *types)
    data = random_slice(rng, formula)
    x = rng.standard_normal((4, 512), np.float32)
    sizes = np.cumsum(formula.part_bytes())[:-1]
    gate, up, down = (
        weights_f64(part.reshape(rows, -1), t)
        for part, rows, t in zip(np.split(data, sizes), (256, 256, 512), types, strict=True)
    )
    exact = (silu_f64(x @ gate.T) * (x @ up.T)) @ down.T
    bound = 1e-5 if max(types) < 2 else 3e-2
    assert relative_error(reference.expert(formula, data, x, np.ones(4, np.float32)), exact) < bound


def test_exp_is_good_to_one_part_in_five_million() -> None:
    x = np.linspace(-87, 87, 400_001).astype(np.float32)
    error = np.abs(reference.exp(x) / np.exp(x.astype(np.float64)) - 1)
    assert error.max() < 2e-7


def test_silu_is_continuous_where_it_is_clamped() -> None:
    g = np.array([-3e38, -1e10, -88, -87.0001, -87, -86.99, -1, 0, 1, 87, 87.01, 1e10, 3e38], np.float32)
    exact = silu_f64(np.maximum(g, -700).astype(np.float64))
    assert np.allclose(reference.silu(g), exact, rtol=3e-7, atol=2e-36)


def test_a_block_of_almost_nothing_is_zero() -> None:
    x = np.zeros((2, 32), np.float32)
    x[0, 3], x[1, 3] = 2.0**-101, 2.0**-100
    ints, scales = reference.quantise(x, 32)
    assert scales[0, 0] == 0 and not ints[0].any()
    assert scales[1, 0] > 0 and ints[1, 0, 3] == 127


def test_the_grid_rounds_to_even_and_refuses_what_does_not_fit() -> None:
    p = np.array([0.5, 1.5, 2.5, -0.5, -1.5], np.float32)
    assert reference.on_grid(p, 0, 31, 31).tolist() == [0, 2, 2, 0, -2]
    assert reference.on_grid(p, 0, np.array([14, 15, 15, 15, 16], np.int32), 15).tolist() == [1, 2, 2, 0, -1]
    with pytest.raises(reference.GridOverflow):
        reference.on_grid(np.array([2.0**51], np.float32), 0, 31, 31)
    with pytest.raises(reference.NonFinite):
        reference.on_grid(np.array([np.inf], np.float32), 0, 31, 31)
