"""
What the graphics kernel can hold and compute; mirrors node-web/src/kernels/webgpu/formats.js. Pure.

Also the small experts with which one kernel is compared with another.
"""

import base64
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from gguf import quants

from backbone.model.formula import Formula


class GpuFormat(NamedTuple):
    """
    `file` is the WGSL under formats/; `block` columns share one scale of x (0: x is floats); `cols` columns
    of weights stand in `size` bytes. `tame` makes random bytes a block with small finite scales: (offset,
    bits kept, bits set).
    """

    file: str
    block: int
    cols: int
    size: int
    tame: tuple[tuple[int, int, int], ...]


FORMATS = {  # by ggml type id
    0: GpuFormat("f32", 0, 1, 4, ((3, 0x80, 0x3C),)),
    1: GpuFormat("f16", 0, 1, 2, ((1, 0x8F, 0x20),)),
    2: GpuFormat("q4_0", 32, 32, 18, ((1, 0x83, 0x14),)),
    3: GpuFormat("q4_1", 32, 32, 20, ((1, 0x83, 0x14), (3, 0x83, 0x14))),
    6: GpuFormat("q5_0", 32, 32, 22, ((1, 0x83, 0x14),)),
    7: GpuFormat("q5_1", 32, 32, 24, ((1, 0x83, 0x14), (3, 0x83, 0x14))),
    8: GpuFormat("q8_0", 32, 32, 34, ((1, 0x83, 0x14),)),
    10: GpuFormat("q2_k", 256, 256, 84, ((81, 0x83, 0x0C), (83, 0x83, 0x0C))),
    11: GpuFormat("q3_k", 256, 256, 110, ((109, 0x83, 0x0C),)),
    12: GpuFormat("q4_k", 256, 256, 144, ((1, 0x83, 0x0C), (3, 0x83, 0x0C))),
    13: GpuFormat("q5_k", 256, 256, 176, ((1, 0x83, 0x08), (3, 0x83, 0x08))),
    14: GpuFormat("q6_k", 256, 256, 210, ((209, 0x83, 0x00),)),
    16: GpuFormat("iq2_xxs", 256, 256, 66, ((1, 0x83, 0x0C),)),
    17: GpuFormat("iq2_xs", 256, 256, 74, ((1, 0x83, 0x0C),)),
    18: GpuFormat("iq3_xxs", 256, 256, 98, ((1, 0x83, 0x08),)),
    19: GpuFormat("iq1_s", 256, 256, 50, ((1, 0x83, 0x18),)),
    20: GpuFormat("iq4_nl", 32, 32, 18, ((1, 0x83, 0x10),)),
    21: GpuFormat("iq3_s", 256, 256, 110, ((1, 0x83, 0x08),)),
    22: GpuFormat("iq2_s", 256, 256, 82, ((1, 0x83, 0x0C),)),
    23: GpuFormat("iq4_xs", 256, 256, 136, ((1, 0x83, 0x04),)),
    29: GpuFormat("iq1_m", 256, 256, 56, ((53, 0x3F, 0x80), (55, 0x8F, 0x10))),
    30: GpuFormat("bf16", 0, 1, 2, ((1, 0x80, 0x3D),)),
    34: GpuFormat("tq1_0", 256, 256, 54, ((53, 0x83, 0x28),)),
    35: GpuFormat("tq2_0", 256, 256, 66, ((65, 0x83, 0x28),)),
    39: GpuFormat("mxfp4", 32, 32, 17, ((0, 0x07, 0x70),)),
    40: GpuFormat("nvfp4", 32, 64, 36, ((0, 0x8F, 0), (1, 0x8F, 0), (2, 0x8F, 0), (3, 0x8F, 0))),
}
ACTIVATIONS = (
    "silu",
    "gelu",
    "relu",
    "relu2",
    "swiglu_oai",
    "swiglu_clamp",
    "situ",
)  # enum expert_activation
BINDING_BYTES = 128 << 20  # what every device binds at once
READ_BEYOND = 8  # the shaders may read a word behind the last
TILE = 8  # as in head.wgsl


def uses_grid(ggml_type: int | None) -> bool:
    """Whether the weights of this format are points of a grid."""
    return ggml_type is not None and FORMATS[ggml_type].file.startswith(("iq1", "iq2", "iq3"))


def grid_bytes() -> npt.NDArray[np.uint8]:
    """
    The grids, a byte per column, in the order of grids.wgsl: levels without signs, or 8 * level + 129 (IQ1).

    The page's webgpu/grids.js holds the same; `python -m backbone.experts.webgpu_formats` writes it.
    """
    sources: tuple[Any, ...] = (
        quants.IQ1_S, quants.IQ2_XXS, quants.IQ2_XS, quants.IQ2_S, quants.IQ3_XXS, quants.IQ3_S,
    )  # fmt: skip
    parts = []
    for source in sources:
        source.init_grid()
        levels = np.asarray(source.grid).astype(np.int64).reshape(-1)
        parts.append((8 * levels + 129 if source is quants.IQ1_S else levels).astype(np.uint8))
    return np.concatenate(parts)


def grids_script() -> str:
    """The text of grids.js."""
    words = base64.b64encode(grid_bytes().tobytes()).decode()
    lines = [words[at : at + 120] for at in range(0, len(words), 120)]
    head = (
        "/** The grids of the IQ formats, base64: written by python -m backbone.experts.webgpu_formats. */\n"
    )
    return head + "export const GRIDS = [\n" + "".join(f"  '{line}',\n" for line in lines) + "].join('');\n"


class Side(NamedTuple):
    """One matrix of an expert."""

    ggml_type: int
    rows: int
    cols: int

    @property
    def row_bytes(self) -> int:
        layout = FORMATS[self.ggml_type]
        return self.cols // layout.cols * layout.size


def matrices(formula: Formula) -> list[Side]:
    """Gate (unless there is none), up and down."""
    d, f = formula.hidden_dim, formula.expert_dim
    sides = [Side(formula.up_type, f, d), Side(formula.down_type, d, f)]
    return sides if formula.gate_type is None else [Side(formula.gate_type, f, d), *sides]


def rows_per_part(sides: list[Side], binding_bytes: int) -> int:
    """How many rows of these matrices fit one binding each."""
    return (binding_bytes - READ_BEYOND - 4) // max(side.row_bytes for side in sides)


def refusal(formula: Formula, binding_bytes: int = BINDING_BYTES) -> str | None:
    """Name the first thing the graphics kernel cannot compute though others can, or None."""
    for ggml_type in (formula.gate_type, formula.up_type, formula.down_type):
        if ggml_type is not None and ggml_type not in FORMATS:
            return f"format {ggml_type}"
    if formula.activation not in ACTIVATIONS:
        return f"activation {formula.activation}"
    for side in matrices(formula):
        if rows_per_part([side], binding_bytes) < 1:
            return f"a row of {side.row_bytes} bytes; one binding holds {binding_bytes}"
    return None


def sample(
    like: Formula, num_tokens: int, seed: int = 1
) -> tuple[Formula, list[bytes], npt.NDArray[np.float32]]:
    """Give three slices of a small expert with the formats and arithmetic of `like`, and rows for them."""
    rng = np.random.default_rng([seed, like.up_type])
    widest = max(FORMATS[side.ggml_type].cols for side in matrices(like))
    d, f = {256: (512, 256), 64: (128, 64), 32: (96, 64), 1: (64, 36)}[widest]
    small = replace(like, hidden_dim=d, expert_dim=f)
    slices = []
    for _ in range(3):
        parts: list[npt.NDArray[np.uint8]] = []
        for side in matrices(small):
            layout = FORMATS[side.ggml_type]
            count = side.rows * side.row_bytes // layout.size
            blocks = rng.integers(0, 256, (count, layout.size), np.uint8)
            for offset, keep, set_ in layout.tame:
                blocks[:, offset] = blocks[:, offset] & keep | set_
            parts.append(blocks.reshape(-1))
        biases = rng.uniform(-0.25, 0.25, small.num_biases).astype("<f4")
        scales = rng.uniform(0.75, 1.25, small.num_scales).astype("<f4")
        slices.append(np.concatenate([*parts, biases.view(np.uint8), scales.view(np.uint8)]).tobytes())
    return small, slices, rng.uniform(-1, 1, (num_tokens, d)).astype(np.float32)


def worst_of(ours: npt.NDArray[np.int64], exact: npt.NDArray[np.int64]) -> float:
    """The largest difference of two answers, as a share of the row's largest."""
    scale = np.maximum(np.abs(exact).max(axis=1, keepdims=True), 1)
    return float((np.abs(ours - exact) / scale).max())


if __name__ == "__main__":
    page = Path(__file__).parents[2] / "node-web" / "src" / "kernels" / "webgpu"
    (page / "grids.js").write_text(grids_script())
