"""
What no expert can answer, whatever its weights. Pure; CONTRACT.md "Plausible sums" derives the bound.

It refuses saturated sums and answers to rows that weigh nothing. It never refuses what a kernel of the exact
class gives. A lie within it is found only by computing again.
"""

import numpy as np
import numpy.typing as npt

from backbone.experts.combine import GRID_BITS
from relay.wire.errors import RemoteProtocolError
from relay.wire.tensors import Grid

F32_EXPONENT = 128  # |p| < 2**128: an output is a finite float32
MOST_BITS = 51  # |n| < 2**51, else the kernel answers grid_overflow
NARROW_BYTES = 4
PLAIN_WEIGHT = (
    2.0**-20
)  # with such weights and steps up to 2**60 a pick may have 2**47 steps: any narrow row may
PLAIN_STEP = 60


def check_sums(
    sums: npt.NDArray[np.int64],
    widths: bytes,
    row_exponents: npt.NDArray[np.int16],
    counts: npt.NDArray[np.uint16],
    weights: npt.NDArray[np.float32] | None,
    layer_exponents: int | npt.NDArray[np.int32],
    grid: Grid,
) -> None:
    """
    Refuse sums that no expert can give.

    Args:
        widths: of the rows, in bytes; most answers need no closer look.
        counts: picks of each row, at least one. weights: the router's, one per pick, or None where they do
            not multiply the output.

    Raises:
        RemoteProtocolError: "implausible", with row, sum and bound.
    """
    # The smallest step of a row allows the most.
    steps = row_exponents.astype(np.int32) + (int(np.min(layer_exponents)) - GRID_BITS[grid])
    if max(widths) <= NARROW_BYTES and int(steps.max()) <= PLAIN_STEP:
        if weights is None or float(np.abs(weights).min()) >= PLAIN_WEIGHT:
            return
    bounds = row_bounds(steps, counts, weights)
    high, low = sums.max(axis=1), sums.min(axis=1)
    wrong = np.flatnonzero((high > bounds) | (low < -bounds))
    if len(wrong):
        row = int(wrong[0])
        worst = int(high[row] if high[row] > bounds[row] else low[row])
        raise RemoteProtocolError(
            f"implausible: a sum of {worst} in row {row}, its picks allow {bounds[row]}"
        )


def row_bounds(
    steps: npt.NDArray[np.int32], counts: npt.NDArray[np.uint16], weights: npt.NDArray[np.float32] | None
) -> npt.NDArray[np.int64]:
    """Give the largest |sum| each row can have: steps [rows] are the exponents of its smallest step."""
    if weights is None:
        of_pick = np.zeros(int(counts.sum(dtype=np.int64)), np.int32)
    else:
        of_pick = np.minimum(np.frexp(weights)[1], 0).astype(
            np.int32
        )  # |weight| < 2**of_pick; more overflows
    power = of_pick + F32_EXPONENT - np.repeat(steps, counts)
    most = np.left_shift(np.int64(1), np.clip(power, 0, MOST_BITS).astype(np.int64))
    most = np.where(power >= MOST_BITS, (1 << MOST_BITS) - 1, np.where(power < 0, 0, most))
    if weights is not None:
        most[weights == 0] = 0
    starts = np.concatenate([[0], np.cumsum(counts[:-1], dtype=np.int64)])
    sums: npt.NDArray[np.int64] = np.add.reduceat(most, starts)
    return sums
