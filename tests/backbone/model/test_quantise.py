import numpy as np
import pytest

from backbone.errors import ModelError
from backbone.model.formula import FORMATS
from backbone.model.quantise import can_quantise, dequantise, quantise, random_blocks

# relative root mean square error of normal weights that a format may cost
ERROR = {
    0: 0.0, 1: 4e-4, 2: 0.11, 3: 0.1, 6: 0.055, 7: 0.05, 8: 0.01, 12: 0.11, 14: 0.025, 30: 4e-3, 39: 0.15,
}  # fmt: skip


@pytest.mark.parametrize("type_id", ERROR)
@pytest.mark.parametrize("shift", [0.0, 3.0], ids=["centred", "one-sided"])
def test_weights_come_back_within_the_format_s_error(type_id: int, shift: float) -> None:
    weights = (np.random.default_rng(1).standard_normal((3, 5, 512)) + shift).astype(np.float32)
    data = quantise(weights, type_id)
    assert data.nbytes == weights.size // FORMATS[type_id].block * FORMATS[type_id].block_bytes
    error = dequantise(data, type_id) - weights
    assert np.sqrt((error**2).mean() / (weights**2).mean()) <= ERROR[type_id]


@pytest.mark.parametrize("type_id", ERROR)
def test_zeros_stay_zeros(type_id: int) -> None:
    zeros = np.zeros((2, 256), np.float32)
    assert np.array_equal(dequantise(quantise(zeros, type_id), type_id), zeros)


def test_part_of_a_block_is_refused() -> None:
    with pytest.raises(ModelError, match="Q6_K needs rows of a multiple of 256"):
        quantise(np.zeros((1, 128), np.float32), 14)
    with pytest.raises(ModelError, match="no quantiser"):
        quantise(np.zeros((1, 256), np.float32), 99)


@pytest.mark.parametrize("type_id", [t for t in FORMATS if FORMATS[t].block > 1])
def test_random_blocks_have_the_spread_that_was_asked_for(type_id: int) -> None:
    blocks = random_blocks(np.random.default_rng(2), type_id, (3, 8, 512), 0.05)
    assert blocks.shape == (3, 8, 512 // FORMATS[type_id].block * FORMATS[type_id].block_bytes)
    weights = dequantise(blocks, type_id)
    assert np.isfinite(weights).all()
    assert 0.6 < np.sqrt((weights.astype(float) ** 2).mean()) / 0.05 < 1.6


def test_what_can_be_quantised_is_known() -> None:
    assert {t for t in FORMATS if can_quantise(t)} == {*ERROR, 34, 35}
