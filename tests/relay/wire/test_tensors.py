"""Tensors: exact roundings, exact sums, and no bytes that decode to anything else."""

import math
import struct

import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay.wire.errors import LocalProtocolError, RemoteProtocolError
from relay.wire.tensors import (
    WIDTHS,
    Grid,
    QuantisedRows,
    XEncoding,
    decode_partial,
    decode_x,
    encode_partial,
    encode_x,
    quantise_rows,
    row_exponents,
    x_bytes,
)

ENCODINGS = st.sampled_from(list(XEncoding))
GRIDS = st.sampled_from(list(Grid))
FINITE = st.floats(-(2.0**127), 2.0**127, width=32)
ROWS = hnp.arrays(np.float32, st.tuples(st.integers(1, 3), st.sampled_from([32, 64])), elements=FINITE)


def f32(value: float) -> float:
    """Round to float32 and back: the one rounding the contract allows per operation."""
    return float(struct.unpack("<f", struct.pack("<f", value))[0])


def quantise_block(block: list[float]) -> tuple[list[int], float]:
    """The contract again, one number at a time, in Python floats rounded to float32 after each step."""
    amax = max(abs(value) for value in block)
    if amax < 2.0**-100:
        return [0] * len(block), 0.0
    scale = f32(amax / 127.0)  # double then single rounding of a quotient is the single rounding
    inverse = f32(1.0 / scale)
    return [round(f32(value * inverse)) for value in block], scale  # round(): half to even


@given(ROWS)
def test_quantised_rows_follow_the_contract_number_by_number(x: np.ndarray) -> None:
    ints, scales = quantise_rows(x, 32)
    for row, row_ints, row_scales in zip(x.tolist(), ints.tolist(), scales.tolist(), strict=True):
        for block in range(len(row) // 32):
            part = slice(block * 32, block * 32 + 32)
            assert quantise_block(row[part]) == (row_ints[part], row_scales[block])


def test_quantised_block_below_two_to_the_minus_100_is_zero() -> None:
    x = np.full((1, 64), 2.0**-101, np.float32)
    x[0, 32:] = 2.0**-100
    ints, scales = quantise_rows(x, 32)
    assert not ints[0, :32].any() and scales[0, 0] == 0
    assert (ints[0, 32:] == 127).all() and scales[0, 1] > 0


def test_quantised_ties_go_to_the_even_neighbour() -> None:
    x = np.zeros((1, 32), np.float32)
    x[0, :5] = [127.0, 0.5, 1.5, 2.5, -0.5]
    assert quantise_rows(x, 32)[0][0, :5].tolist() == [127, 0, 2, 2, 0]


@given(ROWS)
def test_a_row_alone_and_in_a_batch_is_rounded_alike(x: np.ndarray) -> None:
    batch = encode_x(x, XEncoding.Q8A32)
    assert batch == b"".join(encode_x(x[t : t + 1], XEncoding.Q8A32) for t in range(len(x)))


@given(ROWS)
def test_row_exponent_bounds_the_row(x: np.ndarray) -> None:
    for row, exponent in zip(x, row_exponents(x).tolist(), strict=True):
        largest = float(np.abs(row).max())
        if largest == 0.0:
            assert exponent == 0
        else:
            assert exponent == min(max(math.frexp(largest)[1], -100), 127)


@given(ROWS)
def test_x_comes_back_as_int8_blocks_exactly(x: np.ndarray) -> None:
    rows = decode_x(encode_x(x, XEncoding.Q8A32), *x.shape, XEncoding.Q8A32)
    assert isinstance(rows, QuantisedRows)
    ints, scales = quantise_rows(x, 32)
    assert np.array_equal(rows.ints, ints) and np.array_equal(rows.scales, scales)
    reach = np.repeat(scales, 32, axis=1)
    with np.errstate(over="ignore"):
        assert (np.abs(rows.dequantise().astype(np.float64) - x) <= reach * 0.5001 + 2.0**-100).all()


@given(ROWS)
def test_x_comes_back_as_f32_exactly(x: np.ndarray) -> None:
    assert np.array_equal(decode_x(encode_x(x, XEncoding.F32), *x.shape, XEncoding.F32), x)


def test_x_comes_back_as_f16_rounded_once() -> None:
    x = np.linspace(-65504, 65504, 64, dtype=np.float32).reshape(2, 32)
    back = decode_x(encode_x(x, XEncoding.F16), 2, 32, XEncoding.F16)
    assert np.array_equal(back, x.astype(np.float16).astype(np.float32))


@pytest.mark.parametrize("encoding", list(XEncoding))
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_sender_refuses_x_that_is_not_finite(encoding: XEncoding, bad: float) -> None:
    x = np.ones((2, 256), np.float32)
    x[1, 7] = bad
    with pytest.raises(LocalProtocolError, match="not finite"):
        encode_x(x, encoding)


def test_sender_refuses_x_beyond_f16() -> None:
    with pytest.raises(LocalProtocolError, match="not finite as F16"):
        encode_x(np.full((1, 32), 70000, np.float32), XEncoding.F16)


def test_sender_refuses_a_block_that_does_not_fit() -> None:
    with pytest.raises(LocalProtocolError, match="576 is no multiple of the block 256"):
        encode_x(np.ones((1, 576), np.float32), XEncoding.Q8A256)


def test_sender_refuses_float64() -> None:
    with pytest.raises(LocalProtocolError, match="must be float32"):
        quantise_rows(np.ones((1, 32)), 32)  # type: ignore[arg-type]


@given(st.binary(max_size=600), st.integers(1, 3), st.sampled_from([1, 32, 48, 256]), ENCODINGS)
def test_any_bytes_give_rows_or_a_remote_protocol_error(
    data: bytes, num_tokens: int, hidden_dim: int, encoding: XEncoding
) -> None:
    try:
        expected = x_bytes(num_tokens, hidden_dim, encoding)
    except ValueError:
        expected = 0
    for attempt in (data, (data * 20)[:expected]):
        try:
            rows = decode_x(attempt, num_tokens, hidden_dim, encoding)
        except RemoteProtocolError:
            continue
        values = rows.dequantise() if isinstance(rows, QuantisedRows) else rows
        assert values.shape == (num_tokens, hidden_dim)


@pytest.mark.parametrize("scale", [np.nan, np.inf, -1.0])
def test_receiver_refuses_a_scale_no_sender_computes(scale: float) -> None:
    data = np.float32(scale).tobytes() + bytes(32)
    with pytest.raises(RemoteProtocolError, match="scales"):
        decode_x(data, 1, 32, XEncoding.Q8A32)


def test_receiver_refuses_the_int_minus_128() -> None:
    data = np.float32(1).tobytes() + b"\x80" + bytes(31)
    with pytest.raises(RemoteProtocolError, match="-128"):
        decode_x(data, 1, 32, XEncoding.Q8A32)


SUMS = hnp.arrays(
    np.int64,
    st.tuples(st.integers(1, 4), st.integers(1, 9)),
    elements=st.one_of(
        st.integers(-(1 << 63), (1 << 63) - 1),
        st.integers(-(1 << 31), (1 << 31) - 1),
        st.integers(-(1 << 15), (1 << 15) - 1),
    ),
)


@given(SUMS, GRIDS)
def test_partial_comes_back_exactly(sums: np.ndarray, grid: Grid) -> None:
    widths, data = encode_partial(sums, grid)
    assert np.array_equal(decode_partial(widths, data, sums.shape[1], grid), sums)


@given(SUMS, GRIDS)
def test_each_partial_row_travels_in_the_narrowest_width_that_holds_it(sums: np.ndarray, grid: Grid) -> None:
    widths, _ = encode_partial(sums, grid)
    for row, width in zip(sums.tolist(), widths, strict=True):
        fits = [w for w in WIDTHS[grid] if all(-(1 << 8 * w - 1) <= v < 1 << 8 * w - 1 for v in row)]
        assert width == fits[0]


@given(SUMS, GRIDS)
def test_partial_row_alone_and_in_a_batch_is_written_alike(sums: np.ndarray, grid: Grid) -> None:
    alone = [encode_partial(sums[t : t + 1], grid) for t in range(len(sums))]
    assert encode_partial(sums, grid) == (
        b"".join(widths for widths, _ in alone),
        b"".join(data for _, data in alone),
    )


@given(st.binary(max_size=4), st.binary(max_size=100), st.integers(0, 20), GRIDS)
def test_any_bytes_give_a_partial_or_a_remote_protocol_error(
    widths: bytes, data: bytes, hidden_dim: int, grid: Grid
) -> None:
    try:
        sums = decode_partial(widths, data, hidden_dim, grid)
    except RemoteProtocolError:
        return
    assert sums.shape == (len(widths), hidden_dim)


def test_receiver_refuses_a_width_the_grid_does_not_have() -> None:
    with pytest.raises(RemoteProtocolError, match="X32 rows are"):
        decode_partial(b"\x02", bytes(8), 4, Grid.X32)


def test_receiver_refuses_padding_that_is_not_zero() -> None:
    with pytest.raises(RemoteProtocolError, match="padding"):
        decode_partial(b"\x04", bytes(4) + b"\0\0\0\1", 1, Grid.X32)
