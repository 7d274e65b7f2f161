"""Whole dispatches for tests: made from a few numbers, computed by any build and by the NumPy reference."""

import importlib.util
import sys
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from types import ModuleType

import numpy as np
import numpy.typing as npt

from backbone.experts import reference
from backbone.experts.native import NATIVE_BUILDS, NativeKernel, PackedExpert
from backbone.model.formula import FORMATS, Formula, row_bytes
from relay.wire.tensors import Grid, XEncoding, decode_x, encode_x, row_exponents

ROOT = Path(__file__).resolve().parents[2]
# Where the f16 scales of a block stand, and by how many powers of two they are smaller than in Q8_0.
SCALES: dict[int, tuple[int, tuple[int, ...]]] = {
    2: (0, (0,)), 3: (0, (0, 2)), 6: (0, (0,)), 7: (0, (0, 2)), 8: (0, (0,)), 12: (0, (0, 2)),
    14: (4, (208,)), 20: (0, (0,)), 10: (0, (80, 82)), 11: (0, (108,)), 13: (0, (0, 2)), 23: (4, (0,)),
    16: (2, (0,)), 17: (2, (0,)), 22: (2, (0,)), 18: (2, (0,)), 21: (2, (0,)), 19: (0, (0,)),
    34: (-4, (52,)), 35: (-4, (64,)),
}  # fmt: skip


@cache
def build_script() -> ModuleType:
    """Give wasm/build.py, which is no package."""
    spec = importlib.util.spec_from_file_location("wasm_build", ROOT / "wasm" / "build.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@cache
def kernels() -> tuple[NativeKernel, ...]:
    """Give every build this CPU runs, the scalar reference first."""
    build_script().build_default()
    best = NativeKernel().build.removeprefix("native-")
    return tuple(NativeKernel(name) for name in NATIVE_BUILDS[: NATIVE_BUILDS.index(best) + 1])


def random_matrix(
    rng: np.random.Generator, ggml_type: int, rows: int, cols: int, scale: float = 2.0**-7
) -> npt.NDArray[np.uint8]:
    """Give the bytes of a [rows, cols] matrix; every bit pattern a block may have, but for its scales."""
    if FORMATS[ggml_type].block == 1:
        values = rng.standard_normal((rows, cols), np.float32) * np.float32(scale * 16)
        if ggml_type == 30:
            return np.ascontiguousarray((values.view("<u4") >> 16).astype("<u2")).view(np.uint8).ravel()
        return values.astype("<f4" if ggml_type == 0 else "<f2").view(np.uint8).ravel()
    block_bytes = FORMATS[ggml_type].block_bytes
    size = rows * row_bytes(ggml_type, cols)
    blocks = rng.integers(0, 256, (size // block_bytes, block_bytes), np.uint8)
    if ggml_type == 39:  # powers of two
        blocks[:, 0] = np.clip(128 + np.log2(scale) + rng.integers(-3, 3, len(blocks)), 0, 255)
    if ggml_type == 29:  # a half float in four pieces, its exponent small
        blocks[:, 53], blocks[:, 55] = blocks[:, 53] & 0x3F | 0x40, blocks[:, 55] & 0x8F | 0x10
    if ggml_type == 40:
        blocks[:, :4] = blocks[:, :4] & 0x9F
    smaller, places = SCALES.get(ggml_type, (0, ()))
    for at in places:
        halves = (rng.standard_normal(len(blocks)) * scale / 2**smaller).astype("<f2")
        blocks[:, at : at + 2] = halves.view(np.uint8).reshape(-1, 2)
    return blocks.ravel()


def random_slice(rng: np.random.Generator, formula: Formula, scale: float = 2.0**-7) -> npt.NDArray[np.uint8]:
    d, f = formula.hidden_dim, formula.expert_dim
    shapes = ((formula.gate_type, f, d), (formula.up_type, f, d), (formula.down_type, d, f))
    matrices = [random_matrix(rng, t, rows, cols, scale) for t, rows, cols in shapes if t is not None]
    extras = rng.standard_normal(formula.num_biases + formula.num_scales, np.float32)
    return np.concatenate([*matrices, extras.astype("<f4").view(np.uint8)])


@dataclass(frozen=True, slots=True)
class Sample:
    """One dispatch."""

    formula: Formula
    slices: list[npt.NDArray[np.uint8]]
    x: npt.NDArray[np.float32]
    counts: npt.NDArray[np.uint16]
    picks: npt.NDArray[np.uint16]
    weights: npt.NDArray[np.float32]
    encoding: XEncoding = XEncoding.F32
    grid: Grid = Grid.X32
    layer: int | npt.NDArray[np.int32] = field(default=12)

    @property
    def exponents(self) -> npt.NDArray[np.int16]:
        return row_exponents(self.x)

    def pack(self, kernel: NativeKernel) -> list[PackedExpert]:
        return [kernel.pack(self.formula, s.tobytes()) for s in self.slices]

    def answer(self, kernel: NativeKernel) -> npt.NDArray[np.int64]:
        return kernel.answer(
            self.formula, encode_x(self.x, self.encoding), self.encoding, len(self.x), self.exponents,
            self.grid, self.layer, self.counts, self.pack(kernel), self.picks, self.weights,
        )  # fmt: skip

    def outputs(self, kernel: NativeKernel) -> npt.NDArray[np.float32]:
        return kernel.outputs(
            self.formula, encode_x(self.x, self.encoding), self.encoding, len(self.x), self.counts,
            self.pack(kernel), self.picks, self.weights,
        )  # fmt: skip

    def reference(self) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
        """Give (outputs, sums) of NumPy."""
        x = self.x
        if self.encoding in (
            XEncoding.F32,
            XEncoding.F16,
        ):  # int8 blocks: rounding them again changes nothing
            seen = decode_x(encode_x(x, self.encoding), *x.shape, self.encoding)
            assert isinstance(seen, np.ndarray)
            x = seen
        outputs = np.empty((len(self.picks), self.formula.hidden_dim), np.float32)
        sums = np.zeros((len(x), self.formula.hidden_dim), np.int64)
        row_of = np.repeat(np.arange(len(x)), self.counts)
        bits = 31 if self.grid is Grid.X32 else 15
        by_expert = [reference.expert(self.formula, s, x[row_of], self.weights) for s in self.slices]
        for i, (t, expert) in enumerate(zip(row_of, self.picks, strict=True)):
            outputs[i] = by_expert[expert][i]
            sums[t] += reference.on_grid(outputs[i], int(self.exponents[t]), self.layer, bits)
        return outputs, sums

    def rows(self, wanted: list[int]) -> "Sample":
        """Give some rows of this dispatch, in that order."""
        starts = np.concatenate([[0], np.cumsum(self.counts)]).astype(int)
        index = np.concatenate([np.arange(starts[t], starts[t + 1]) for t in wanted]).astype(int)
        return replace(
            self,
            x=self.x[wanted],
            counts=self.counts[wanted],
            picks=self.picks[index],
            weights=self.weights[index],
        )


def sample(
    seed: int,
    types: tuple[int, int, int],
    dims: tuple[int, int],
    rows: int,
    num_experts: int = 3,
    top_k: int = 2,
    scale: float = 2.0**-7,
) -> Sample:
    """Make a dispatch; each row picks `top_k` different experts."""
    rng = np.random.default_rng(seed)
    formula = Formula(*dims, *types)
    picks = np.concatenate([rng.permutation(num_experts)[:top_k] for _ in range(rows)]).astype(np.uint16)
    return Sample(
        formula,
        [random_slice(rng, formula, scale) for _ in range(num_experts)],
        rng.standard_normal((rows, dims[0]), np.float32),
        np.full(rows, top_k, np.uint16),
        picks,
        rng.random(len(picks), np.float32),
    )
