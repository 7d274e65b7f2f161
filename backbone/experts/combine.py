"""
Turn integer sums back into a layer's output. Pure; CONTRACT.md "Grid".

Every holder answers multiples of the same power of two per row (and channel), so partials are added as
integers: neither their order nor their grouping can change a bit, and only here, once per row, they become
floats again.
"""

import numpy as np
import numpy.typing as npt

from relay.wire.tensors import Grid

GRID_BITS = {Grid.X32: 31, Grid.X16: 15}


def step_exponents(
    row_exponents: npt.NDArray[np.int16], layer_exponents: int | npt.NDArray[np.int32], grid: Grid
) -> npt.NDArray[np.int32]:
    """
    Give the exponent of one grid step: value = sum * 2**exponent.

    Shapes:
        row_exponents    [num_tokens]
        layer_exponents  a number, or [hidden_dim]
        returns          [num_tokens, 1] or [num_tokens, hidden_dim]
    """
    layer = np.atleast_1d(np.asarray(layer_exponents, np.int32))
    return row_exponents.astype(np.int32)[:, None] + layer[None, :] - GRID_BITS[grid]


def to_float(sums: npt.NDArray[np.int64], steps: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
    """
    Give the layer's output, [num_tokens, hidden_dim] float32, rounded once.

    Raises:
        OverflowError: a sum is no finite float32; the caller names the layer.
    """
    with np.errstate(over="ignore"):
        values = np.ldexp(sums.astype(np.float64), steps).astype(np.float32)
    if not np.isfinite(values).all():
        raise OverflowError("the sum of the experts' outputs leaves the range of float32")
    return values
