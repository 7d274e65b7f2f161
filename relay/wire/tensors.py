"""
Encode how activations (x) and partials travel: f32, f16, q8a; x32, x16.

The theory. Kernels round activations to int8 blocks before the integer dot products, so sending exactly
those ints and scales (q8a) loses nothing. Partials are integers on a grid (wasm/CONTRACT.md, "Grid"); each
row travels in the narrowest width that holds it, and sums stay exact whatever the width.

All float arithmetic is float32, one rounding per operation, round half to even: two machines give the same
bytes. Pure; stdlib and numpy. Runs once per layer and token, so rows are handled all at once.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from relay.wire.errors import LocalProtocolError, RemoteProtocolError

type Float32Array = npt.NDArray[np.float32]
type Int8Array = npt.NDArray[np.int8]
type Int16Array = npt.NDArray[np.int16]
type Int64Array = npt.NDArray[np.int64]
type Buffer = bytes | bytearray | memoryview


class XEncoding(IntEnum):
    """How x travels."""

    F32 = 0
    F16 = 1
    Q8A32 = 2  # int8, one float32 scale per 32 columns (Q8_0 and its like)
    Q8A256 = 3  # int8, one float32 scale per 256 columns (K-quants)


class Grid(IntEnum):
    """On which grid partials are summed."""

    X32 = 0  # one exponent per row and layer
    X16 = 1  # one exponent per row, layer and channel


BLOCKS = {XEncoding.Q8A32: 32, XEncoding.Q8A256: 256}
WIDTHS = {Grid.X32: (4, 8), Grid.X16: (2, 4, 8)}  # bytes per channel a row may have, narrowest first
ROW_ALIGN_BYTES = 8
ROW_EXPONENT_MIN, ROW_EXPONENT_MAX = -100, 127

_TINY = np.float32(2.0**-100)  # CONTRACT.md: a block below this is all zeros
_127 = np.float32(127.0)
_ONE = np.float32(1.0)
_INT_LIMITS = {2: 1 << 15, 4: 1 << 31}
_DTYPES: dict[int, npt.DTypeLike] = {2: "<i2", 4: "<i4", 8: "<i8"}


@dataclass(frozen=True, slots=True)
class QuantisedRows:
    """Rows as int8 blocks: `ints` [num_tokens, hidden_dim], `scales` [num_tokens, hidden_dim / block]."""

    ints: Int8Array
    scales: Float32Array
    block: int

    def dequantise(self) -> Float32Array:
        """Return what the ints stand for, float32 [num_tokens, hidden_dim]; infinite beyond its range."""
        num_tokens, hidden_dim = self.ints.shape
        blocks = self.ints.reshape(num_tokens, -1, self.block).astype(np.float32)
        with np.errstate(over="ignore"):
            return (blocks * self.scales[:, :, None]).reshape(num_tokens, hidden_dim)


def quantise_rows(x: Float32Array, block: int) -> tuple[Int8Array, Float32Array]:
    """
    Round rows to int8 blocks exactly as every kernel does.

    Shapes:
        x        [num_tokens, hidden_dim]  float32, finite; hidden_dim is a multiple of block
        returns  int8 [num_tokens, hidden_dim], float32 [num_tokens, hidden_dim / block]

    Raises:
        LocalProtocolError: the shape does not fit, or x is not finite.

    See wasm/CONTRACT.md, "Activations".
    """
    num_tokens, hidden_dim = x.shape
    if x.dtype != np.float32:
        raise LocalProtocolError(f"x must be float32, not {x.dtype}: roundings would differ")
    if hidden_dim % block:
        raise LocalProtocolError(f"hidden_dim {hidden_dim} is no multiple of the block {block}")
    blocks = x.reshape(-1, block)
    amax = np.maximum(blocks.max(axis=1), -blocks.min(axis=1))
    if not np.isfinite(amax).all():  # max and min carry NaN along
        raise LocalProtocolError("x is not finite")
    small = amax < _TINY
    if small.any():
        divisor = np.where(small, _127, amax)
        scales = np.where(small, np.float32(0), divisor / _127)
        inverse = np.where(small, np.float32(0), _ONE / (divisor / _127))
    else:
        scales = amax / _127
        inverse = _ONE / scales
    scaled = blocks * inverse[:, None]
    ints = np.rint(scaled, out=scaled).astype(np.int8)
    return ints.reshape(num_tokens, hidden_dim), scales.reshape(num_tokens, -1)


def row_exponents(x: Float32Array) -> Int16Array:
    """
    Return R per row, with max|x| in [2^(R-1), 2^R); 0 for a row of zeros; clamped to [-100, 127].

    Shapes:
        x        [num_tokens, hidden_dim]  float32, finite
        returns  int16 [num_tokens]
    """
    _, exponents = np.frexp(np.maximum(x.max(axis=1), -x.min(axis=1)))
    # minimum/maximum, not clip: clip costs five times as much on one row
    return np.minimum(np.maximum(exponents, ROW_EXPONENT_MIN), ROW_EXPONENT_MAX).astype(np.int16)


def x_bytes(num_tokens: int, hidden_dim: int, encoding: XEncoding) -> int:
    """Return how long encoded x is; raises ValueError when hidden_dim does not suit the encoding."""
    if encoding is XEncoding.F32:
        return num_tokens * hidden_dim * 4
    if encoding is XEncoding.F16:
        return num_tokens * hidden_dim * 2
    block = BLOCKS[encoding]
    if hidden_dim % block:
        raise ValueError(f"hidden_dim {hidden_dim} is no multiple of {block}, as {encoding.name} needs")
    return num_tokens * (hidden_dim // block * 4 + hidden_dim)


def encode_x(x: Float32Array, encoding: XEncoding) -> bytes:
    """
    Return rows as they travel; layouts are drawn in PROTOCOL.md, "x encodings".

    Raises:
        LocalProtocolError: x is not finite (or not in f16), or its shape does not suit the encoding.
    """
    if encoding in (XEncoding.Q8A32, XEncoding.Q8A256):
        ints, scales = quantise_rows(x, BLOCKS[encoding])
        num_tokens, hidden_dim = ints.shape
        if num_tokens == 1:
            return scales.tobytes() + ints.tobytes()
        rows = np.empty((num_tokens, scales.shape[1] * 4 + hidden_dim), np.uint8)
        rows[:, : -hidden_dim or None] = scales.view(np.uint8)
        rows[:, scales.shape[1] * 4 :] = ints.view(np.uint8)
        return rows.tobytes()
    if encoding is XEncoding.F32:
        out: npt.NDArray[Any] = np.ascontiguousarray(x, "<f4")
    else:
        with np.errstate(over="ignore"):
            out = x.astype("<f2")
    if not np.isfinite(out).all():
        raise LocalProtocolError(f"x is not finite as {encoding.name}")
    return out.tobytes()


def decode_x(
    data: Buffer, num_tokens: int, hidden_dim: int, encoding: XEncoding
) -> QuantisedRows | Float32Array:
    """
    Read rows back: QuantisedRows for q8a, float32 [num_tokens, hidden_dim] otherwise.

    Raises:
        RemoteProtocolError: wrong length, a value that is not finite, a negative scale, or the int -128.
    """
    try:
        expected = x_bytes(num_tokens, hidden_dim, encoding)
    except ValueError as exc:
        raise RemoteProtocolError(str(exc)) from None
    if len(data) != expected:
        raise RemoteProtocolError(f"x: {len(data)} bytes, {expected} are needed")
    if encoding in (XEncoding.F32, XEncoding.F16):
        dtype = "<f4" if encoding is XEncoding.F32 else "<f2"
        x = np.frombuffer(data, dtype).reshape(num_tokens, hidden_dim).astype(np.float32)
        if not np.isfinite(x).all():
            raise RemoteProtocolError("x is not finite")
        return x
    block = BLOCKS[encoding]
    rows = np.frombuffer(data, np.uint8).reshape(num_tokens, -1)
    split = hidden_dim // block * 4
    scales = np.ascontiguousarray(rows[:, :split]).view("<f4")
    ints = np.ascontiguousarray(rows[:, split:]).view(np.int8)
    if not np.isfinite(scales).all() or (scales < 0).any():
        raise RemoteProtocolError("x: scales must be finite and not negative")
    if (ints == -128).any():
        raise RemoteProtocolError("x: -128 is no activation, kernels round to [-127, 127]")
    return QuantisedRows(ints, scales, block)


def partial_row_bytes(hidden_dim: int, width: int) -> int:
    """Return how long one partial row of this width is, padding included."""
    return -(-hidden_dim * width // ROW_ALIGN_BYTES) * ROW_ALIGN_BYTES


def encode_partial(sums: Int64Array, grid: Grid) -> tuple[bytes, bytes]:
    """
    Return (widths, data): each row in the narrowest width of the grid that holds all its channels.

    Shapes:
        sums     [num_tokens, hidden_dim]  int64; multiples of the grid's step
        returns  one byte per row (2, 4 or 8), and the rows one after another, each padded to 8 bytes
    """
    num_tokens, hidden_dim = sums.shape
    # A value fits in w bytes when -2^(8w-1) <= v < 2^(8w-1); ~v folds the negative half onto the other.
    if num_tokens == 1:
        width = _narrowest(max(int(sums.max()), ~int(sums.min())), grid)
        return bytes((width,)), _pack_rows(sums, width)
    extent = np.maximum(sums.max(axis=1), ~sums.min(axis=1))
    widest = _narrowest(int(extent.max()), grid)
    if widest == WIDTHS[grid][0] or _narrowest(int(extent.min()), grid) == widest:
        return bytes((widest,)) * num_tokens, _pack_rows(sums, widest)
    widths = bytes(_narrowest(value, grid) for value in extent.tolist())
    return widths, b"".join(
        _pack_rows(sums[row : row + 1], width) for row, width in enumerate(widths)
    )  # mixed widths are rare: a row that overflowed


def decode_partial(widths: Buffer, data: Buffer, hidden_dim: int, grid: Grid) -> Int64Array:
    """
    Read partial rows back as int64 [len(widths), hidden_dim].

    Raises:
        RemoteProtocolError: a width the grid does not have, a wrong length, or padding that is not zero.
    """
    widths = bytes(widths)
    num_tokens = len(widths)
    check_partial(widths, len(data), hidden_dim, grid)
    first = widths[0]
    if widths.count(first) == num_tokens:
        return _unpack_rows(data, num_tokens, hidden_dim, first)
    sums = np.empty((num_tokens, hidden_dim), np.int64)
    view, offset = memoryview(data), 0
    for row, width in enumerate(widths):
        size = partial_row_bytes(hidden_dim, width)
        sums[row] = _unpack_rows(view[offset : offset + size], 1, hidden_dim, width)[0]
        offset += size
    return sums


def check_partial(widths: bytes, data_bytes: int, hidden_dim: int, grid: Grid) -> None:
    """Refuse widths the grid does not have and data that is not exactly as long as they say."""
    if not widths or not hidden_dim:
        raise RemoteProtocolError("partial: no rows or no channels")
    allowed = WIDTHS[grid]
    counts = [widths.count(width) for width in allowed]
    if sum(counts) != len(widths):
        raise RemoteProtocolError(f"partial: {grid.name} rows are {allowed} bytes wide, not otherwise")
    expected = sum(
        count * partial_row_bytes(hidden_dim, width) for count, width in zip(counts, allowed, strict=True)
    )
    if data_bytes != expected:
        raise RemoteProtocolError(f"partial: {data_bytes} bytes of rows, {expected} are needed")


def _narrowest(extent: int, grid: Grid) -> int:
    for width in WIDTHS[grid][:-1]:
        if extent < _INT_LIMITS[width]:
            return width
    return 8


def _pack_rows(sums: Int64Array, width: int) -> bytes:
    num_tokens, hidden_dim = sums.shape
    values = sums.astype(_DTYPES[width])
    padding = partial_row_bytes(hidden_dim, width) - hidden_dim * width
    if not padding:
        return values.tobytes()
    if num_tokens == 1:
        return values.tobytes() + bytes(padding)
    rows = np.zeros((num_tokens, hidden_dim * width + padding), np.uint8)
    rows[:, : hidden_dim * width] = values.view(np.uint8)
    return rows.tobytes()


def _unpack_rows(data: Buffer, num_tokens: int, hidden_dim: int, width: int) -> Int64Array:
    size = hidden_dim * width
    rows = np.frombuffer(data, np.uint8).reshape(num_tokens, -1)
    if rows.shape[1] != size:
        if rows[:, size:].any():
            raise RemoteProtocolError("partial: padding is not zero")
        rows = np.ascontiguousarray(rows[:, :size])
    return rows.view(_DTYPES[width]).astype(np.int64)
