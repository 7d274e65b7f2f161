"""From integer sums back to floats, once, without a rounding in between."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backbone.experts.combine import step_exponents, to_float
from relay.wire.tensors import Grid


def test_steps_follow_row_and_layer() -> None:
    rows = np.array([3, -2], np.int16)
    assert step_exponents(rows, 5, Grid.X32).tolist() == [[-23], [-28]]
    channels = np.array([1, 4, 0], np.int32)
    assert step_exponents(rows, channels, Grid.X16).tolist() == [[-11, -8, -12], [-16, -13, -17]]


@given(st.integers(-(2**52), 2**52), st.integers(-60, 40))
def test_a_sum_is_rounded_once_to_float32(value: int, step: int) -> None:
    found = to_float(np.array([[value]], np.int64), np.array([[step]], np.int32))
    assert found[0, 0] == np.float32(float(value) * 2.0**step)


def test_a_sum_beyond_float32_is_an_error_not_infinity() -> None:
    with pytest.raises(OverflowError):
        to_float(np.array([[1 << 40]], np.int64), np.array([[100]], np.int32))
