"""
One expert in a page of NumPy: the meaning of every kernel (wasm/CONTRACT.md), written a second time.

It shares no line with the C kernel and gives the same bits. Nothing here is fast; read it to know what is
computed. Each float32 operation below rounds once, in the order written; dot products inside a block are
integers, so exact.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from gguf import quants

from backbone.model.formula import FORMATS, Formula

type Float32 = npt.NDArray[np.float32]
type Int64 = npt.NDArray[np.int64]
type Bytes = npt.NDArray[np.uint8]

f32 = np.float32
NVFP4 = 40
IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)  # levels of IQ4_NL, IQ4_XS
FP4 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # of MXFP4 and NVFP4: e2m1 floats doubled


class NonFinite(ArithmeticError):
    """An infinity or NaN where none may be."""


class GridOverflow(ArithmeticError):
    """An output does not fit the integer grid."""


def quantise(x: Float32, block: int) -> tuple[Int64, Float32]:
    """Round each block to int8 and one scale: ints [T, blocks, block], scales [T, blocks]."""
    blocks = x.reshape(len(x), -1, block)
    amax = np.abs(blocks).max(axis=2)
    if not np.isfinite(amax).all():
        raise NonFinite("activations")
    zero = amax < f32(2.0**-100)
    scale = np.where(zero, f32(0), amax / f32(127))
    inverse = np.divide(f32(1), scale, out=np.zeros_like(scale), where=~zero)
    return np.rint(blocks * inverse[..., None]).astype(np.int64), scale


def exp_parts(x: Float32) -> tuple[Float32, Float32]:
    """q and 2^n with e^x = (1 + q) * 2^n, for |x| <= 87."""
    n: Float32 = np.rint(x * f32(float.fromhex("0x1.715476p+0")))
    r: Float32 = x - n * f32(float.fromhex("0x1.63p-1"))
    r = r - n * f32(float.fromhex("-0x1.bd0106p-13"))
    p: Float32 = np.full_like(x, float.fromhex("0x1.a0d2cep-13"))
    for c in ("0x1.6e879cp-10", "0x1.11121p-7", "0x1.555382p-5", "0x1.555554p-3", "0x1p-1"):
        p = p * r + f32(float.fromhex(c))
    power: Float32 = np.ldexp(np.ones_like(x), n.astype(np.int32))
    return p * (r * r) + r, power


def exp(x: Float32) -> Float32:
    """e^x for |x| <= 87."""
    q, power = exp_parts(x)
    return (q + f32(1)) * power


def gated(a: Float32, z: Float32) -> Float32:
    """a * sigmoid(z), and 0 below z = -87."""
    return np.where(z < f32(-87), f32(0), a / (f32(1) + exp(-np.clip(z, f32(-87), f32(87)))))


def silu(g: Float32) -> Float32:
    return gated(g, g)


def gelu(g: Float32) -> Float32:
    """The tanh form, as a sigmoid."""
    k1, k2 = f32(float.fromhex("0x1.988454p+0")), f32(float.fromhex("0x1.2444f2p-4"))
    return gated(g, g * (k1 + k2 * (g * g)))


def relu(g: Float32) -> Float32:
    return np.where(g > 0, g, f32(0))


def tanh(x: Float32) -> Float32:
    y = np.clip(x, f32(-10), f32(10))
    q, power = exp_parts(y + y)
    e_less_1: Float32 = q * power + (power - f32(1))
    return e_less_1 / (e_less_1 + f32(2))


def activate(formula: Formula, g: Float32, u: Float32 | None) -> Float32:
    """h from the finished products; u is None without a gate, then g is the product of up."""
    alpha, limit = f32(formula.alpha), f32(formula.limit)
    match formula.activation, u:
        case "silu", None:
            return silu(g)
        case "gelu", None:
            return gelu(g)
        case "relu", None:
            return relu(g)
        case "relu2", None:
            return relu(g) * relu(g)
        case _, None:
            raise NotImplementedError(f"{formula.activation} without a gate")
        case "silu", _ if limit == 0:
            return silu(g) * u
        case "silu", _:
            return np.minimum(silu(g), limit) * np.clip(u, -limit, limit)
        case "gelu", _:
            return gelu(g) * u
        case "relu", _:
            return relu(g) * u
        case "relu2", _:
            return relu(g) * relu(g) * u
        case "swiglu_oai", _:
            a = np.minimum(g, limit)
            return gated(a, alpha * a) * (np.clip(u, -limit, limit) + f32(1))
        case "swiglu_clamp", _:
            return silu(np.minimum(g, limit)) * np.clip(u, -limit, limit)
        case "situ", _:
            a = gated(alpha * tanh(g * (f32(1) / alpha)), g)
            return a * (u if limit == 0 else limit * tanh(u * (f32(1) / limit)))
    raise NotImplementedError(formula.activation)


def f16(data: Bytes) -> Float32:
    """Read pairs of bytes as half floats."""
    return np.ascontiguousarray(data).view("<f2").astype(f32)


class Blocks(NamedTuple):
    """
    One block of every row, taken apart: weight = d * scale * q - dmin * minimum.

    Shapes: d, dmin [rows]; scale, minimum [rows, sub-blocks]; q [rows, sub-blocks, columns].
    """

    d: Float32
    scale: Int64
    q: Int64
    dmin: Float32 | None = None
    minimum: Int64 | None = None


def dot(blocks: Bytes, ggml_type: int, x: Float32) -> Float32:
    """
    Multiply a weight matrix with rows of x.

    Shapes:
        blocks   uint8 [rows, bytes of a row]
        x        [num_tokens, cols]
        returns  [num_tokens, rows]
    """
    if ggml_type in FLOATS:
        w = FLOATS[ggml_type](blocks)
        if not (np.isfinite(w).all() and np.isfinite(x).all()):
            raise NonFinite("weights or activations")
        lane: list[Float32] = [np.zeros((len(x), len(w)), f32) for _ in range(8)]  # one sum per column mod 8
        for c in range(w.shape[1]):
            lane[c % 8] += w[None, :, c] * x[:, None, c]
        return ((lane[0] + lane[4]) + (lane[2] + lane[6])) + ((lane[1] + lane[5]) + (lane[3] + lane[7]))
    if ggml_type == NVFP4:
        return nvfp4(blocks, x)
    layout = FORMATS[ggml_type]
    ints, scales = quantise(x, layout.block)
    total = np.zeros((len(x), len(blocks)), f32)
    for b, raw in enumerate(np.split(blocks, blocks.shape[1] // layout.block_bytes, axis=1)):
        block = UNPACK[ggml_type](raw)
        q, dx = ints[:, b].reshape(len(x), *block.q.shape[1:]), scales[:, b, None]
        if not np.isfinite(block.d).all() or not (block.dmin is None or np.isfinite(block.dmin).all()):
            raise NonFinite("scales")
        add = (block.d * dx) * np.einsum("tjc,rjc,rj->tr", q, block.q, block.scale).astype(f32)
        if block.dmin is not None and block.minimum is not None:
            add = add - (block.dmin * dx) * np.einsum("tjc,rj->tr", q, block.minimum).astype(f32)
        total += add
    return total


def nibbles(raw: Bytes) -> Int64:
    """All low nibbles of a run of bytes, then all high ones, along the last axis."""
    return np.concatenate([raw & 15, raw >> 4], axis=-1).astype(np.int64)


def bits(raw: Bytes, width: int = 1) -> Int64:
    """Numbers of `width` bits, from the low bits of the first byte on."""
    shifts = np.arange(0, 8, width, dtype=np.uint8)
    return (raw[:, :, None] >> shifts & (1 << width) - 1).reshape(len(raw), -1).astype(np.int64)


def one(raw: Bytes) -> Int64:
    """The only scale or minimum of a block without sub-blocks."""
    return np.ones((len(raw), 1), np.int64)


def q8_0(raw: Bytes) -> Blocks:
    return Blocks(f16(raw[:, :2])[:, 0], one(raw), raw[:, None, 2:].view(np.int8).astype(np.int64))


def q4_0(raw: Bytes) -> Blocks:
    return Blocks(f16(raw[:, :2])[:, 0], one(raw), nibbles(raw[:, None, 2:]) - 8)


def q4_1(raw: Bytes) -> Blocks:
    d, m = f16(raw[:, :4]).T
    return Blocks(d, one(raw), nibbles(raw[:, None, 4:]), -m, one(raw))


def q5_0(raw: Bytes) -> Blocks:
    q = nibbles(raw[:, 6:]) | bits(raw[:, 2:6]) << 4
    return Blocks(f16(raw[:, :2])[:, 0], one(raw), q[:, None] - 16)


def q5_1(raw: Bytes) -> Blocks:
    d, m = f16(raw[:, :4]).T
    q = nibbles(raw[:, 8:]) | bits(raw[:, 4:8]) << 4
    return Blocks(d, one(raw), q[:, None], -m, one(raw))


def iq4_nl(raw: Bytes) -> Blocks:
    return Blocks(f16(raw[:, :2])[:, 0], one(raw), np.array(IQ4)[nibbles(raw[:, None, 2:])])


def mxfp4(raw: Bytes) -> Blocks:
    d: Float32 = np.ldexp(f32(1), raw[:, 0].astype(np.int32) - 128).astype(f32)
    return Blocks(d, one(raw), np.array(FP4)[nibbles(raw[:, None, 1:])])


def q4_k(raw: Bytes) -> Blocks:
    d, dmin = f16(raw[:, :4]).T
    s = raw[:, 4:16].astype(np.int64)
    low, mid, high = s[:, 0:4], s[:, 4:8], s[:, 8:12]
    scale = np.hstack([low & 63, (high & 15) | (low >> 6) << 4])
    minimum = np.hstack([mid & 63, (high >> 4) | (mid >> 6) << 4])
    return Blocks(d, scale, nibbles(raw[:, 16:].reshape(-1, 4, 32)).reshape(-1, 8, 32), dmin, minimum)


def q6_k(raw: Bytes) -> Blocks:
    ql, qh = (raw[:, a:b].astype(np.int64) for a, b in ((0, 128), (128, 192)))
    ql, qh = ql.reshape(-1, 2, 2, 32), qh.reshape(-1, 2, 32)  # [rows, half, which 32, column]
    low = np.stack([ql[:, :, 0] & 15, ql[:, :, 1] & 15, ql[:, :, 0] >> 4, ql[:, :, 1] >> 4], axis=2)
    high = np.stack([qh >> shift & 3 for shift in (0, 2, 4, 6)], axis=2)
    scale = raw[:, 192:208].view(np.int8).astype(np.int64)
    return Blocks(f16(raw[:, 208:])[:, 0], scale, (low + 16 * high - 32).reshape(-1, 16, 16))


def q5_k(raw: Bytes) -> Blocks:
    plain = q4_k(np.delete(raw, np.s_[16:48], axis=1))
    top = np.stack([raw[:, 16:48] >> s & 1 for s in range(8)], axis=1).astype(np.int64)
    return plain._replace(q=plain.q | top << 4)


def two_bits(raw: Bytes) -> Int64:
    """64 bytes to [rows, 256]: the four pairs of bits of 32 bytes are 32 columns each."""
    pairs = np.stack([raw.reshape(-1, 2, 32) >> s & 3 for s in (0, 2, 4, 6)], axis=2)
    return pairs.reshape(-1, 256).astype(np.int64)


def q2_k(raw: Bytes) -> Blocks:
    d, dmin = f16(raw[:, 80:]).T
    s = raw[:, :16].astype(np.int64)
    return Blocks(d, s & 15, two_bits(raw[:, 16:80]).reshape(-1, 16, 16), dmin, s >> 4)


def q3_k(raw: Bytes) -> Blocks:
    top = np.stack([raw[:, :32] >> s & 1 for s in range(8)], axis=1).reshape(-1, 256).astype(np.int64)
    q = (two_bits(raw[:, 32:96]) | top << 2) - 4
    high = np.concatenate([raw[:, 104:108] >> s & 3 for s in (0, 2, 4, 6)], axis=1).astype(np.int64)
    scale = (nibbles(raw[:, 96:104]) | high << 4) - 32
    return Blocks(f16(raw[:, 108:])[:, 0], scale, q.reshape(-1, 16, 16))


def iq4_xs(raw: Bytes) -> Blocks:
    scale = (bits(raw[:, 4:8], 4) | bits(raw[:, 2:4], 2) << 4) - 32
    q = np.array(IQ4)[nibbles(raw[:, 8:].reshape(-1, 8, 16))]
    return Blocks(f16(raw[:, :2])[:, 0], scale, q)


def tq1_0(raw: Bytes) -> Blocks:
    digits = []
    for part, count in ((raw[:, :32], 5), (raw[:, 32:48], 5), (raw[:, 48:52], 4)):
        powers = (part[:, None].astype(np.int64) * 3 ** np.arange(count)[:, None]) % 256
        digits.append((powers * 3 >> 8).reshape(len(raw), -1))
    return Blocks(f16(raw[:, 52:])[:, 0], one(raw), np.hstack(digits)[:, None] - 1)


def tq2_0(raw: Bytes) -> Blocks:
    return Blocks(f16(raw[:, 64:])[:, 0], one(raw), two_bits(raw[:, :64])[:, None] - 1)


def grid(source: Any) -> Int64:
    """The points of an IQ format's grid, which is a part of the format: levels by point and column."""
    source.init_grid()
    return np.asarray(source.grid).reshape(source.grid_shape).astype(np.int64)


def signs(byte: Int64) -> Int64:
    """1 or -1 for each bit, low first: [...] to [..., 8]."""
    return 1 - 2 * (byte[..., None] >> np.arange(8) & 1)


def parity(seven: Int64) -> Int64:
    """Seven sign bits and the eighth that makes their number even."""
    odd = (seven[..., None] >> np.arange(7) & 1).sum(axis=-1) & 1
    return seven | odd << 7


def first_f16(raw: Bytes, parts: int) -> Float32:
    """The scale d of a block that begins with it, divided."""
    return f16(raw[:, :2])[:, 0] / f32(parts)


def iq2_xxs(raw: Bytes) -> Blocks:
    words = np.ascontiguousarray(raw[:, 2:]).view("<u4").reshape(-1, 8, 2).astype(np.int64)
    points = words[:, :, :1] >> np.array([0, 8, 16, 24]) & 255
    sign = signs(parity(words[:, :, 1:] >> np.array([0, 7, 14, 21]) & 127))
    q = grid(quants.IQ2_XXS)[points] * sign
    return Blocks(first_f16(raw, 8), 2 * (words[:, :, 1] >> 28) + 1, q.reshape(-1, 8, 32))


def iq2_xs(raw: Bytes) -> Blocks:
    words = np.ascontiguousarray(raw[:, 2:66]).view("<u2").astype(np.int64)
    q = grid(quants.IQ2_XS)[words & 511] * signs(parity(words >> 9))
    return Blocks(first_f16(raw, 8), 2 * bits(raw[:, 66:], 4) + 1, q.reshape(-1, 16, 16))


def iq2_s(raw: Bytes) -> Blocks:
    points = raw[:, 2:34].astype(np.int64) | bits(raw[:, 66:74], 2) << 8
    q = grid(quants.IQ2_S)[points] * signs(raw[:, 34:66].astype(np.int64))
    return Blocks(first_f16(raw, 8), 2 * bits(raw[:, 74:], 4) + 1, q.reshape(-1, 16, 16))


def iq3_xxs(raw: Bytes) -> Blocks:
    words = np.ascontiguousarray(raw[:, 66:]).view("<u4").astype(np.int64)
    sign = signs(parity(words[:, :, None] >> np.array([0, 7, 14, 21]) & 127))
    q = grid(quants.IQ3_XXS)[raw[:, 2:66]].reshape(-1, 8, 4, 8) * sign
    return Blocks(first_f16(raw, 4), 2 * (words >> 28) + 1, q.reshape(-1, 8, 32))


def iq3_s(raw: Bytes) -> Blocks:
    points = raw[:, 2:66].astype(np.int64) | bits(raw[:, 66:74]) << 8
    q = grid(quants.IQ3_S)[points].reshape(-1, 32, 8) * signs(raw[:, 74:106].astype(np.int64))
    return Blocks(first_f16(raw, 1), 2 * bits(raw[:, 106:], 4) + 1, q.reshape(-1, 8, 32))


def iq1_s(raw: Bytes) -> Blocks:
    words = np.ascontiguousarray(raw[:, 34:]).view("<u2").astype(np.int64)[:, :, None]
    points = raw[:, 2:34].reshape(-1, 8, 4).astype(np.int64) | (words >> np.array([0, 3, 6, 9]) & 7) << 8
    q = 8 * grid(quants.IQ1_S)[points] + (1 - 2 * (words >> 15))[..., None]
    return Blocks(first_f16(raw, 8), 2 * (words[:, :, 0] >> 12 & 7) + 1, q.reshape(-1, 8, 32))


def iq1_m(raw: Bytes) -> Blocks:
    words = np.ascontiguousarray(raw[:, 48:]).view("<u2").astype(np.int64)
    half = ((words >> 12) << np.array([0, 4, 8, 12])).sum(axis=1).astype("<u2")
    upper = bits(raw[:, 32:48], 4)
    q = 8 * grid(quants.IQ1_M)[raw[:, :32] | (upper & 7) << 8] + (1 - 2 * (upper >> 3))[..., None]
    scale = (words[:, :, None] >> np.array([0, 3, 6, 9]) & 7).reshape(-1, 16)
    d: Float32 = half.view("<f2").astype(f32) / f32(8)
    return Blocks(d, 2 * scale + 1, q.reshape(-1, 16, 16))


def nvfp4(blocks: Bytes, x: Float32) -> Float32:
    """Dot products of NVFP4: a float scale for each 16 columns, activations in blocks of 32."""
    raw = blocks.reshape(len(blocks), -1, 36)
    e, m = raw[:, :, :4].astype(np.int32) >> 3 & 15, (raw[:, :, :4] & 7).astype(f32)
    d = np.where(e == 0, np.ldexp(m, -10), np.ldexp(f32(8) + m, e - 11)).astype(f32)
    d = np.where(raw[:, :, :4] == 0x7F, f32(0), d).reshape(len(blocks), -1)
    levels = np.array(FP4)[nibbles(raw[:, :, 4:].reshape(len(blocks), -1, 8))]  # [rows, sub-blocks, 16]
    ints, scales = quantise(x, 32)
    ints = ints.reshape(len(x), -1, 16)
    total = np.zeros((len(x), len(blocks)), f32)
    for j in range(levels.shape[1]):
        total += (d[:, j] * scales[:, j // 2, None]) * (ints[:, j] @ levels[:, j].T).astype(f32)
    return total


FLOATS: dict[int, Callable[[Bytes], Float32]] = {
    0: lambda raw: np.ascontiguousarray(raw).view("<f4"),
    1: f16,
    30: lambda raw: (np.ascontiguousarray(raw).view("<u2").astype("<u4") << 16).view("<f4"),
}
UNPACK: dict[int, Callable[[Bytes], Blocks]] = {
    2: q4_0, 3: q4_1, 6: q5_0, 7: q5_1, 8: q8_0, 10: q2_k, 11: q3_k, 12: q4_k, 13: q5_k, 14: q6_k,
    16: iq2_xxs, 17: iq2_xs, 18: iq3_xxs, 19: iq1_s, 20: iq4_nl, 21: iq3_s, 22: iq2_s, 23: iq4_xs,
    29: iq1_m, 34: tq1_0, 35: tq2_0, 39: mxfp4,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Matrix:
    """One of gate, up and down of a slice: [rows, bytes of a row], with its bias and scale if it has them."""

    blocks: Bytes
    ggml_type: int
    scale: Float32 | None
    bias: Float32 | None

    def times(self, x: Float32, weight: Float32 | None = None) -> Float32:
        """The finished product, [num_tokens, rows]; `weight` [num_tokens]: the router's, if it goes first."""
        y = dot(self.blocks, self.ggml_type, x)
        if weight is not None:
            y = weight[:, None] * y
        if self.scale is not None:
            y = self.scale * y
        if self.bias is not None:
            y = y + self.bias
        if not np.isfinite(y).all():
            raise NonFinite("products")
        return y


def take_apart(formula: Formula, slice_bytes: Bytes) -> list[Matrix]:
    """Give gate (unless there is none), up and down of a slice: matrices, then biases, then scales."""
    f, d = formula.expert_dim, formula.hidden_dim
    shapes = [(formula.gate_type, f), (formula.up_type, f), (formula.down_type, d)]
    types, rows = zip(*[(t, r) for t, r in shapes if t is not None], strict=True)
    sizes = [size for size in formula.part_bytes() if size]
    at, blocks = 0, []
    for size, count in zip(sizes, rows, strict=True):
        blocks.append(slice_bytes[at : at + size].reshape(count, -1))
        at += size
    extras = np.ascontiguousarray(slice_bytes[at:]).view("<f4").astype(f32)
    biases: list[Float32 | None] = [None] * len(rows)
    scales: list[Float32 | None] = [None] * len(rows)
    if formula.biased:
        biases = list(np.split(extras[: sum(rows)], np.cumsum(rows)[:-1]))
        extras = extras[sum(rows) :]
    if formula.scaled:
        scales = list(extras)
    return [Matrix(*parts) for parts in zip(blocks, types, scales, biases, strict=True)]


def expert(formula: Formula, slice_bytes: Bytes, x: Float32, weight: Float32) -> Float32:
    """
    Compute p, one expert's weighted output, for rows of x and their router weights.

    Shapes: x [num_tokens, hidden_dim], weight [num_tokens]; returns [num_tokens, hidden_dim].
    """
    *gate, up, down = take_apart(formula, slice_bytes)
    before = formula.weight_position == "before"
    with np.errstate(all="ignore"):
        first = weight if before else None
        products = [matrix.times(x, first) for matrix in (*gate, up)]
        h = activate(formula, products[0], products[1] if gate else None)
        if not np.isfinite(h).all():
            raise NonFinite("hidden activations")
        o = down.times(h)
        return o if before else weight[:, None] * o


def on_grid(p: Float32, row_exponent: int, layer_exponents: int | npt.NDArray[np.int32], bits: int) -> Int64:
    """Put weighted outputs of one row on the grid; bits is 31 for x32, 15 for x16."""
    if not np.isfinite(p).all():
        raise NonFinite("outputs")
    n: npt.NDArray[np.float64] = np.rint(
        np.ldexp(p.astype(np.float64), bits - row_exponent - np.asarray(layer_exponents))
    )
    if (np.abs(n) >= 2.0**51).any():
        raise GridOverflow("outputs")
    return n.astype(np.int64)
