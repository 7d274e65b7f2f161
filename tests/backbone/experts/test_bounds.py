"""What no expert can answer is refused; what an expert answers never is, for any format and formula."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backbone.experts import reference
from backbone.experts.bounds import check_sums, row_bounds
from backbone.experts.combine import GRID_BITS
from backbone.model.formula import Formula
from relay.wire.errors import RemoteProtocolError
from relay.wire.tensors import Grid, encode_partial

GRIDS = st.sampled_from([Grid.X32, Grid.X16])
EXTREME = st.sampled_from([0.0, -0.0, 1e-45, 1e-38, 1e-6, 0.05, 0.999999, 1.0, 1.5, 1e20, 3.4028235e38])
WEIGHTS = st.one_of(EXTREME, st.floats(-1e6, 1e6, width=32), st.floats(0, 1, width=32))
OUTPUTS = st.one_of(EXTREME, st.floats(width=32, allow_nan=False, allow_infinity=False))


def check(
    sums: np.ndarray,  # type: ignore[type-arg]
    exponents: list[int],
    counts: list[int],
    weights: list[float] | None,
    layer: int | list[int],
    grid: Grid,
) -> None:
    widths, _ = encode_partial(sums, grid)
    check_sums(
        sums,
        widths,
        np.array(exponents, np.int16),
        np.array(counts, np.uint16),
        None if weights is None else np.array(weights, np.float32),
        layer if isinstance(layer, int) else np.array(layer, np.int32),
        grid,
    )


@settings(max_examples=300)
@given(data=st.data(), grid=GRIDS, before=st.booleans())
def test_what_is_put_on_a_grid_by_the_contract_is_never_refused(
    data: st.DataObject, grid: Grid, before: bool
) -> None:
    """Any finite output an expert could have, with any weight, on any grid that does not overflow."""
    rows, columns = data.draw(st.integers(1, 3)), 4
    exponents = data.draw(st.lists(st.integers(-100, 127), min_size=rows, max_size=rows))
    exponent = st.integers(-256, 256)
    layer: int | list[int] = data.draw(
        exponent if grid is Grid.X32 else st.lists(exponent, min_size=columns, max_size=columns)
    )
    counts, weights = data.draw(st.lists(st.integers(1, 4), min_size=rows, max_size=rows)), []
    sums = np.zeros((rows, columns), np.int64)
    for row, count in enumerate(counts):
        for _ in range(count):
            weight = np.float32(data.draw(WEIGHTS))
            o = np.array(data.draw(st.lists(OUTPUTS, min_size=columns, max_size=columns)), np.float32)
            with np.errstate(all="ignore"):
                p = o if before else weight * o
            try:
                sums[row] += reference.on_grid(p, exponents[row], np.array(layer), GRID_BITS[grid])
            except (reference.NonFinite, reference.GridOverflow):
                weight = np.float32(0)  # the kernel refuses the call; here the pick weighs nothing
                if before:
                    weight = np.float32(1)
            weights.append(float(weight))
    check(sums, exponents, counts, None if before else weights, layer, grid)


@pytest.mark.parametrize("ggml_type", sorted({*reference.UNPACK, *reference.FLOATS, 40}))
@pytest.mark.parametrize("activation", ["silu", "gelu", "relu2", "swiglu_oai"])
def test_what_the_reference_answers_is_never_refused(ggml_type: int, activation: str) -> None:
    """Random bytes for weights where they are finite: as wild as a slice can be."""
    alpha, limit = (1.702, 7.0) if activation == "swiglu_oai" else (0.0, 0.0)
    formula = Formula(
        hidden_dim=256, expert_dim=256, gate_type=ggml_type, up_type=ggml_type, down_type=ggml_type,
        activation=activation, alpha=alpha, limit=limit,
    )  # fmt: skip
    random = np.random.default_rng(ggml_type)
    checked = 0
    for attempt in range(40):
        raw = random.integers(0, 256 if attempt % 2 else 64, formula.slice_bytes, np.uint8)
        x = (random.standard_normal((2, 256)) * 10.0 ** random.integers(-6, 6)).astype(np.float32)
        weights = random.random(2).astype(np.float32)
        exponents = [int(np.clip(np.frexp(np.abs(row).max())[1], -100, 127)) for row in x]
        try:
            p = reference.expert(formula, raw, x, weights)
            for grid in (Grid.X32, Grid.X16):
                sums = np.stack([reference.on_grid(p[t], exponents[t], 8, GRID_BITS[grid]) for t in range(2)])
                check(sums, exponents, [1, 1], weights.tolist(), 8, grid)
                checked += 1
        except (reference.NonFinite, reference.GridOverflow, FloatingPointError):
            continue
    assert checked or ggml_type in (0, 1, 30, 40)  # random floats are mostly wild


@pytest.mark.parametrize("grid", [Grid.X32, Grid.X16])
@pytest.mark.parametrize("value", [1 << 62, -(1 << 62), -(1 << 63), (1 << 63) - 1, 1 << 54])
def test_saturated_sums_are_refused(grid: Grid, value: int) -> None:
    sums = np.full((2, 4), value, np.int64)
    with pytest.raises(RemoteProtocolError, match="^implausible: a sum of -?[0-9]+ in row 0"):
        check(sums, [0, 0], [4, 4], [0.25] * 8, 8, grid)


def test_a_row_that_weighs_nothing_has_no_sum() -> None:
    sums = np.array([[5, 0], [0, 0]], np.int64)
    check(sums, [0, 0], [1, 1], [0.5, 0.0], 8, Grid.X32)
    with pytest.raises(RemoteProtocolError, match="implausible: a sum of 7 in row 1, its picks allow 0"):
        check(np.array([[5, 0], [7, 0]], np.int64), [0, 0], [1, 1], [0.5, 0.0], 8, Grid.X32)


def test_on_a_coarse_grid_float32_ends_early() -> None:
    sums = np.array([[9]], np.int64)
    with pytest.raises(RemoteProtocolError, match="implausible"):
        check(sums, [127], [1], [1.0], 30, Grid.X32)  # a step of 2^126: nothing finite has 9 of them
    check(np.array([[4]], np.int64), [127], [1], [1.0], 30, Grid.X32)


def test_the_bound_of_many_picks_does_not_overflow() -> None:
    bounds = row_bounds(np.zeros(1, np.int32), np.array([4096], np.uint16), np.ones(4096, np.float32))
    assert 0 < bounds[0] == 4096 * ((1 << 51) - 1) < 1 << 63
