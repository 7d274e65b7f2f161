"""Measuring the grid: exponents that hold what was seen, with the stated margins."""

import numpy as np

from backbone.experts.combine import step_exponents
from backbone.model.calibrate import CHANNEL_SPREAD, MARGIN_X16, MARGIN_X32, GridMeter
from relay.wire.tensors import Grid


def measured(outputs: np.ndarray, exponents: list[int]):  # type: ignore[no-untyped-def, type-arg]
    meter = GridMeter()
    meter.note(5, np.array(exponents, np.int16), outputs.astype(np.float32))
    return meter.exponents()[5]


def test_exponents_are_relative_to_the_row() -> None:
    outputs = np.array([[0.75, 3.0, 0.0], [6.0, 24.0, 0.0]])
    grid = measured(outputs, [0, 3])  # the second row is the first times 8
    assert grid.x32 == 2 + MARGIN_X32
    assert grid.x16 == (0 + MARGIN_X16, 2 + MARGIN_X16, 2 - CHANNEL_SPREAD + MARGIN_X16)


def test_the_largest_row_of_several_notes_counts() -> None:
    meter = GridMeter()
    for value in (1.5, 100.0, 0.1):
        meter.note(0, np.array([0], np.int16), np.full((1, 2), value, np.float32))
    assert meter.exponents()[0].x32 == 7 + MARGIN_X32


def test_what_was_measured_fits_the_narrow_width() -> None:
    """CONTRACT.md "Grid": a measured row is answered in int32 or int16, whatever its scale."""
    random = np.random.default_rng(0)
    outputs = (random.standard_normal((20, 64)) * 2.0 ** random.integers(-20, 20, (20, 1))).astype(np.float32)
    exponents = np.frexp(np.abs(outputs).max(axis=1))[1].astype(np.int16)
    grid = measured(outputs, exponents.tolist())
    for kind, layer, limit in ((Grid.X32, grid.x32, 31), (Grid.X16, np.array(grid.x16, np.int32), 15)):
        steps = step_exponents(exponents, layer, kind)
        assert np.abs(np.rint(np.ldexp(outputs.astype(np.float64), -steps))).max() < 2**limit


def test_a_silent_layer_has_a_grid_too() -> None:
    assert measured(np.zeros((2, 4)), [0, 0]).x32 == MARGIN_X32
