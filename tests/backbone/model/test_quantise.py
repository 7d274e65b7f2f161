import numpy as np
import pytest

from backbone.errors import ModelError
from backbone.model.formula import FORMATS
from backbone.model.quantise import dequantise, quantise

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
