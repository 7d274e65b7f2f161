"""Rows of x as the shaders read them, and outputs put on the integer grid. Pure; mirrors webgpu/rows.js."""

import numpy as np
import numpy.typing as npt

from backbone.experts.native import BadCall, Buffer, Float32Array, GridOverflow, Int64Array, NonFinite
from backbone.experts.reference import quantise
from relay.wire.tensors import XEncoding

type Words = npt.NDArray[np.uint32]


def arranged(x: Float32Array, block: int) -> Words:
    """Rows of f32 as the shaders read them: scales and ints, or floats, as words."""
    if block == 0:
        return np.ascontiguousarray(x).view(np.uint32)
    ints, scales = quantise(x, block)
    words = ints.astype(np.int8).reshape(len(x), -1).view(np.uint32)
    return np.hstack([np.ascontiguousarray(scales).view(np.uint32), words])


def decoded(rows: Buffer, encoding: int, num_tokens: int, dim: int, block: int) -> Words:
    """Rows of x as they travel, as the shaders read them."""
    data = np.frombuffer(rows, np.uint8).reshape(num_tokens, -1)
    if encoding in (XEncoding.F32, XEncoding.F16):
        x = np.ascontiguousarray(data).view("<f4" if encoding == XEncoding.F32 else "<f2").astype(np.float32)
        if x.shape[1] != dim:
            raise BadCall(-3, f"rows of {x.shape[1]} values")
        if not np.isfinite(x).all():
            raise NonFinite(-1, "x")
        return arranged(x, block)
    if block != (32 if encoding == XEncoding.Q8A32 else 256):
        raise BadCall(-7, "dispatch refused")
    size = dim // block * 4 + dim
    if data.shape[1] != -(-size // 4) * 4:
        raise BadCall(-3, f"rows of {data.shape[1]} bytes")
    words = np.ascontiguousarray(data[:, :size]).view(np.uint32)
    scales = words[:, : dim // block].view(np.float32)
    if not np.isfinite(scales).all():
        raise NonFinite(-1, "x")
    if (scales < 0).any():
        raise BadCall(-8, "dispatch refused")
    if (data[:, dim // block * 4 : size].view(np.int8) == -128).any():
        raise BadCall(-8, "dispatch refused")
    return words


def on_grid(
    p: Float32Array,
    row_of: npt.NDArray[np.int64],
    exponents: npt.NDArray[np.int16],
    layer: int | npt.NDArray[np.int32],
    bits: int,
    rows: int,
) -> Int64Array:
    """Put outputs of picks on the grid and add them up by row."""
    if not np.isfinite(p).all():
        raise NonFinite(-1, "outputs")
    shift = bits - exponents.astype(np.int32)[row_of][:, None] - np.asarray(layer, np.int32)
    n: npt.NDArray[np.float64] = np.rint(np.ldexp(p.astype(np.float64), shift))
    if (np.abs(n) >= 2.0**51).any():
        raise GridOverflow(-2, "outputs")
    sums = np.zeros((rows, p.shape[1]), np.int64)
    np.add.at(sums, row_of, n.astype(np.int64))
    return sums
