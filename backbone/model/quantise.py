"""
Quantise weights for the models this project makes itself: the demo model and the small ones of the tests.

Q8_0, F16 and F32 come from the `gguf` package. Q4_K and Q6_K are here, plainly: scales by the range of each
sub-block, no search. Element-wise float32 only, so the bytes are the same on every machine.

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
