"""
Quantise weights for the models this project makes itself: the demo model and the small ones of the tests.

Most formats come from the `gguf` package. Q4_K and Q6_K are here, plainly: scales by the range of each
sub-block, no search. Element-wise float32 only, so the bytes are the same on every machine. For the others,
which nobody quantises in Python, `random_blocks` makes weights of a given spread without any to start from.

See wasm/formats for a picture of the blocks.
"""

from typing import Any

import numpy as np
from gguf import GGMLQuantizationType
from gguf import quants as gguf_quants

from backbone.errors import ModelError
from backbone.model.formula import FORMATS

Q4_K = int(GGMLQuantizationType.Q4_K)
Q6_K = int(GGMLQuantizationType.Q6_K)

# Where a block has its f16 scales, and how they relate so that random codes give weights around zero.
SCALES: dict[int, tuple[tuple[int, float], ...]] = {
    2: ((0, 1.0),), 3: ((0, 1.0), (2, -7.5)), 6: ((0, 1.0),), 7: ((0, 1.0), (2, -15.5)), 8: ((0, 1.0),),
    10: ((80, 1.0), (82, 1.5)), 11: ((108, 1.0),), 12: ((0, 1.0), (2, 7.5)), 13: ((0, 1.0), (2, 15.5)),
    14: ((208, 1.0),), 16: ((0, 1.0),), 17: ((0, 1.0),), 18: ((0, 1.0),), 19: ((0, 1.0),), 20: ((0, 1.0),),
    21: ((0, 1.0),), 22: ((0, 1.0),), 23: ((0, 1.0),), 34: ((52, 1.0),), 35: ((64, 1.0),),
}  # fmt: skip
IQ1_M, MXFP4, NVFP4 = 29, 39, 40  # their scales are no plain f16

type Floats = np.ndarray[Any, np.dtype[np.float32]]
type Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def quantise(weights: Floats, type_id: int) -> "np.ndarray[Any, np.dtype[Any]]":
    """
    Quantise along the last axis.

    Shapes: weights [..., columns] float32; returns [..., bytes of a row] uint8, or floats for F32 and F16.

    Raises:
        ModelError: format unknown here, or the columns are not a whole number of its blocks.
    """
    if type_id not in FORMATS:
        raise ModelError(f"no quantiser for format {type_id}")
    layout = FORMATS[type_id]
    columns = weights.shape[-1]
    if columns % layout.block:
        raise ModelError(f"{layout.name} needs rows of a multiple of {layout.block} columns, not {columns}")
    own = {Q4_K: _q4_k_blocks, Q6_K: _q6_k_blocks}.get(type_id)
    if own is None:
        quantised: np.ndarray[Any, np.dtype[Any]] = gguf_quants.quantize(
            np.ascontiguousarray(weights, np.float32), GGMLQuantizationType(type_id)
        )
        return quantised
    blocks = own(np.ascontiguousarray(weights, np.float32).reshape(-1, layout.block))
    return blocks.reshape(*weights.shape[:-1], columns // layout.block * layout.block_bytes)


def dequantise(data: "np.ndarray[Any, np.dtype[Any]]", type_id: int) -> Floats:
    """Undo `quantise`: [..., bytes of a row] to [..., columns] float32."""
    floats: Floats = gguf_quants.dequantize(data, GGMLQuantizationType(type_id)).astype(
        np.float32, copy=False
    )
    return floats


def can_quantise(type_id: int) -> bool:
    """Tell whether `quantise` knows the format; `random_blocks` knows all but the plain floats."""
    probe = np.zeros((1, FORMATS[type_id].block), np.float32)
    try:
        quantise(probe, type_id)
    except NotImplementedError:
        return False
    return True


def random_blocks(rng: np.random.Generator, type_id: int, dims: tuple[int, ...], spread: float) -> Bytes:
    """
    Make valid weights of any block format: random codes, all scales alike, standard deviation about `spread`.

    Shapes: dims [..., columns]; returns [..., bytes of a row].
    """
    layout = FORMATS[type_id]
    count = int(np.prod(dims)) // layout.block
    blocks = rng.integers(0, 256, (count, layout.block_bytes), np.uint8)
    _set_scale(blocks, type_id, 1.0)
    sample = dequantise(blocks[:64], type_id).astype(np.float64)
    _set_scale(blocks, type_id, spread / float(np.sqrt((sample**2).mean())))
    return blocks.reshape(*dims[:-1], dims[-1] // layout.block * layout.block_bytes)


def _set_scale(blocks: Bytes, type_id: int, d: float) -> None:
    """Give every block the same scale."""
    half = int(np.float16(d).view(np.uint16))
    if type_id == MXFP4:
        blocks[:, 0] = np.clip(128 + np.rint(np.log2(d)), 0, 254)
    elif type_id == NVFP4:
        scales = np.arange(1, 127)  # e4m3, doubled levels: 2^-10 is 1, the value grows with the byte
        exponent, mantissa = scales >> 3, scales & 7
        values = np.where(exponent == 0, mantissa, (8.0 + mantissa) * 2.0 ** (exponent - 1.0)) / 1024
        blocks[:, :4] = scales[np.abs(values - d).argmin()]
    elif type_id == IQ1_M:  # a nibble in each of four words
        for i in range(4):
            blocks[:, 49 + 2 * i] = blocks[:, 49 + 2 * i] & 15 | (half >> 4 * i & 15) << 4
    else:
        for at, factor in SCALES[type_id]:
            blocks[:, at : at + 2] = np.array([d * factor], "<f2").view(np.uint8)


def _q4_k_blocks(blocks: Floats) -> Bytes:
    """[n, 256] floats to [n, 144]: w = d·scale·q - dmin·min, eight sub-blocks of 32, q in 0…15."""
    sub = blocks.reshape(-1, 8, 32)
    low = np.minimum(sub.min(axis=2), 0)
    scale = (sub.max(axis=2) - low) / np.float32(15)
    d = (scale.max(axis=1) / np.float32(63)).astype(np.float16)
    dmin = (-low.min(axis=1) / np.float32(63)).astype(np.float16)
    d32, dmin32 = d.astype(np.float32)[:, None], dmin.astype(np.float32)[:, None]
    scales = np.clip(np.rint(_ratio(scale, d32)), 0, 63).astype(np.uint8)
    mins = np.clip(np.rint(_ratio(-low, dmin32)), 0, 63).astype(np.uint8)
    step = (d32 * scales.astype(np.float32))[..., None]
    q = np.clip(np.rint(_ratio(sub + (dmin32 * mins.astype(np.float32))[..., None], step)), 0, 15).astype(
        np.uint8
    )
    packed = np.concatenate(  # 6-bit scales and mins in 12 bytes: the upper four lend their top bits
        [
            scales[:, :4] | (scales[:, 4:] >> 4) << 6,
            mins[:, :4] | (mins[:, 4:] >> 4) << 6,
            (scales[:, 4:] & 15) | (mins[:, 4:] & 15) << 4,
        ],
        axis=1,
    )
    nibbles = (q[:, 0::2] | q[:, 1::2] << 4).reshape(-1, 128)
    return np.concatenate([d[:, None].view(np.uint8), dmin[:, None].view(np.uint8), packed, nibbles], axis=1)


def _q6_k_blocks(blocks: Floats) -> Bytes:
    """[n, 256] floats to [n, 210]: w = d·scale·(q - 32), sixteen sub-blocks of 16, q in 0…63."""
    sub = blocks.reshape(-1, 16, 16)
    scale = (np.abs(sub).max(axis=2) / np.float32(31)).astype(np.float32)
    d = (scale.max(axis=1) / np.float32(127)).astype(np.float16)
    d32 = d.astype(np.float32)[:, None]
    scales = np.clip(np.rint(_ratio(scale, d32)), 0, 127).astype(np.int8)
    step = (d32 * scales.astype(np.float32))[..., None]
    q = (np.clip(np.rint(_ratio(sub, step)), -32, 31) + 32).astype(np.uint8)
    groups = q.reshape(-1, 2, 4, 32)  # two halves of four groups
    low = groups & 15
    low_bytes = (low[:, :, :2] | low[:, :, 2:] << 4).reshape(-1, 128)
    high = groups >> 4
    high_bytes = (high[:, :, 0] | high[:, :, 1] << 2 | high[:, :, 2] << 4 | high[:, :, 3] << 6).reshape(
        -1, 64
    )
    return np.concatenate([low_bytes, high_bytes, scales.view(np.uint8), d[:, None].view(np.uint8)], axis=1)


def _ratio(numerator: Floats, denominator: Floats) -> Floats:
    """Divide; a zero denominator gives 0 (its block is all zeros)."""
    out: Floats = np.zeros(np.broadcast_shapes(numerator.shape, denominator.shape), np.float32)
    np.divide(numerator, denominator, out=out, where=denominator != 0)
    return out
