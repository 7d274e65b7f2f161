"""
The known answers (wasm/CONTRACT.md, "Known answers"), computed by the NumPy reference.

`python -m tests.wasm.known_answers` writes wasm/hashes.txt, tests/vectors/kernel_digests.txt (every formula
in every format) and tests/vectors/kernel.json; a test fails when one is stale.
"""

import hashlib
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from backbone.experts import reference
from backbone.model.formula import FORMATS, Formula
from relay.wire.tensors import Grid, XEncoding, encode_partial, encode_x, row_exponents

ROOT = Path(__file__).resolve().parents[2]
HASHES = ROOT / "wasm" / "hashes.txt"
VECTORS = ROOT / "tests" / "vectors" / "kernel.json"
DIGESTS = ROOT / "tests" / "vectors" / "kernel_digests.txt"
ROWS = (1, 2, 7)
NUM_EXPERTS, TOP_K, LAYER_EXPONENT = 3, 2, 6
# By columns of a block: the shape, and the encoding in which a row of x loses nothing.
SHAPES = {1: (52, 28, XEncoding.F16), 32: (96, 64, XEncoding.Q8A32), 64: (128, 64, XEncoding.Q8A32),
          256: (512, 256, XEncoding.Q8A256)}  # fmt: skip
# The formulas besides silu, and the formats in which each has a known answer.
FORMULAS: tuple[dict[str, Any], ...] = (
    {"activation": "gelu"},
    {"activation": "relu", "weight_position": "before"},
    {"activation": "relu2", "gate_type": None},
    {"activation": "swiglu_oai", "alpha": 1.702, "limit": 0.5, "biased": True},
    {"activation": "swiglu_clamp", "limit": 0.5},
    {"activation": "silu", "limit": 0.5, "weight_position": "before", "biased": True, "scaled": True},
    {"activation": "situ", "alpha": 0.5, "limit": 0.25},
    {"activation": "gelu", "gate_type": None, "biased": True, "scaled": True},
)
FORMULA_TYPES = (0, 1, 8)
# Bytes of a block that decide the exponent of a scale: offset, bits kept, bits set.
TAMED: dict[int, list[tuple[int, int, int]]] = {
    0: [], 1: [(1, 0x8F, 0x20)], 30: [(1, 0x80, 0x3D)], 8: [(1, 0x83, 0x14)], 2: [(1, 0x83, 0x14)], 3:
    [(1, 0x83, 0x14), (3, 0x83, 0x14)], 6: [(1, 0x83, 0x14)], 7: [(1, 0x83, 0x14), (3, 0x83, 0x14)], 20:
    [(1, 0x83, 0x10)], 39: [(0, 0x07, 0x70)], 40: [(0, 0x8F, 0x00), (1, 0x8F, 0x00), (2, 0x8F, 0x00),
    (3, 0x8F, 0x00)], 10: [(81, 0x83, 0x0C), (83, 0x83, 0x0C)], 11: [(109, 0x83, 0x0C)], 12: [(1, 0x83,
    0x0C), (3, 0x83, 0x0C)], 13: [(1, 0x83, 0x08), (3, 0x83, 0x08)], 14: [(209, 0x83, 0x00)], 23: [(1,
    0x83, 0x04)], 16: [(1, 0x83, 0x0C)], 17: [(1, 0x83, 0x0C)], 22: [(1, 0x83, 0x0C)], 18: [(1, 0x83,
    0x08)], 21: [(1, 0x83, 0x08)], 19: [(1, 0x83, 0x18)], 29: [(53, 0x3F, 0x80), (55, 0x8F, 0x10)], 34:
    [(53, 0x83, 0x28)], 35: [(65, 0x83, 0x28)],
}  # fmt: skip
TYPES = tuple(TAMED)  # in the order of wasm/formats/table.c


def words(stream: int, count: int) -> npt.NDArray[np.uint32]:
    """The counter-based random words of the contract."""
    x = np.uint32(stream * 0x9E3779B9 & 0xFFFFFFFF) + np.arange(count, dtype=np.uint32)
    x = (x ^ x >> 16) * np.uint32(0x7FEB352D)
    x = (x ^ x >> 15) * np.uint32(0x846CA68B)
    return x ^ x >> 16


def make_matrix(stream: int, ggml_type: int, num_blocks: int) -> npt.NDArray[np.uint8]:
    block_bytes = FORMATS[ggml_type].block_bytes
    if ggml_type == 0:
        return ((words(stream, num_blocks).view(np.int32) >> 8).astype("<f4") * np.float32(2.0**-25)).view(
            np.uint8
        )
    size = num_blocks * block_bytes
    blocks = words(stream, -(-size // 4)).astype("<u4").view(np.uint8)[:size].reshape(-1, block_bytes).copy()
    for at, keep, put in TAMED[ggml_type]:
        blocks[:, at] = blocks[:, at] & keep | put
    return blocks.ravel()


@dataclass(frozen=True, slots=True)
class KnownCase:
    """Everything that goes into the calls of one known answer, and what comes out."""

    formula: Formula
    slices: list[npt.NDArray[np.uint8]]
    x: npt.NDArray[np.float32]
    encoding: XEncoding
    picks: npt.NDArray[np.uint16]
    weights: npt.NDArray[np.float32]
    x16: npt.NDArray[np.int32]
    outputs: npt.NDArray[np.float32]
    sums: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]

    @property
    def digest(self) -> str:
        parts = (*self.sums, self.outputs)
        return hashlib.sha256(b"".join(hashlib.sha256(p.tobytes()).digest() for p in parts)).hexdigest()


def dispatch(
    formula: Formula,
    slices: list[npt.NDArray[np.uint8]],
    x: npt.NDArray[np.float32],
    x_seen: npt.NDArray[np.float32],
    picks: npt.NDArray[np.uint16],
    weights: npt.NDArray[np.float32],
    layer_exponents: int | npt.NDArray[np.int32],
    bits: int,
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
    """Give (p, sums) of a whole dispatch from the reference; x_seen is x as it arrives."""
    exponents = row_exponents(x)
    outputs = np.empty((len(picks), formula.hidden_dim), np.float32)
    sums = np.zeros((len(x), formula.hidden_dim), np.int64)
    row_of = np.arange(len(picks)) // TOP_K
    by_expert = [reference.expert(formula, s, x_seen[row_of], weights) for s in slices]
    for i, (t, pick) in enumerate(zip(row_of, picks, strict=True)):
        outputs[i] = by_expert[pick][i]
        sums[t] += reference.on_grid(outputs[i], int(exponents[t]), layer_exponents, bits)
    return outputs, sums


def known_formula(ggml_type: int, what: dict[str, Any]) -> Formula:
    """Give the formula of a case: gate, up and down in one format."""
    hidden_dim, expert_dim, _ = SHAPES[FORMATS[ggml_type].block]
    return replace(Formula(hidden_dim, expert_dim, ggml_type, ggml_type, ggml_type), **what)


def make_slice(formula: Formula, expert: int) -> npt.NDArray[np.uint8]:
    ggml_type = formula.up_type
    num_blocks = formula.hidden_dim * formula.expert_dim // FORMATS[ggml_type].block
    matrices = range(3) if formula.gate_type is not None else (1, 2)
    count = formula.num_biases + formula.num_scales
    extras = (words(200 + expert, count).view(np.int32) >> 8).astype("<f4") * np.float32(2.0**-23)
    parts = [make_matrix(1 + 3 * expert + m, ggml_type, num_blocks) for m in matrices]
    return np.concatenate([*parts, extras.view(np.uint8)])


def known_case(
    ggml_type: int,
    num_tokens: int,
    what: dict[str, Any] | None = None,
    dims: tuple[int, int] | None = None,
) -> KnownCase:
    hidden_dim, expert_dim, encoding = SHAPES[FORMATS[ggml_type].block]
    hidden_dim, expert_dim = dims or (hidden_dim, expert_dim)
    formula = replace(known_formula(ggml_type, what or {}), hidden_dim=hidden_dim, expert_dim=expert_dim)
    slices = [make_slice(formula, e) for e in range(NUM_EXPERTS)]
    x = (words(100, num_tokens * hidden_dim).view(np.int32) >> 8).astype(np.float32) * np.float32(2.0**-23)
    x = x.reshape(num_tokens, hidden_dim)
    i = np.arange(num_tokens * TOP_K)
    picks = ((i // TOP_K + i % TOP_K) % NUM_EXPERTS).astype(np.uint16)
    weights = (words(101, len(i)) >> 8).astype(np.float32) * np.float32(2.0**-24)
    x16 = (LAYER_EXPONENT - np.arange(hidden_dim) % 5).astype(np.int32)
    outputs, sums32 = dispatch(formula, slices, x, x, picks, weights, LAYER_EXPONENT, 31)
    seen = (
        x.astype("<f2").astype(np.float32) if encoding is XEncoding.F16 else x
    )  # int8 blocks change nothing
    _, sums16 = dispatch(formula, slices, x, seen, picks, weights, x16, 15)
    return KnownCase(formula, slices, x, encoding, picks, weights, x16, outputs, (sums32, sums16))


def hashes() -> str:
    """Give the text of hashes.txt."""
    lines = [
        "// The known answers of CONTRACT.md, from the NumPy reference: python -m tests.wasm.known_answers",
        "// ggml type, rows, SHA-256. C includes this file as it is.",
    ]
    for ggml_type in TYPES:
        for num_tokens in ROWS:
            lines.append(f'GOLDEN({ggml_type}, {num_tokens}, "{known_case(ggml_type, num_tokens).digest}")')
    lines.append("// number of the formula, ggml type, rows, SHA-256")
    for number, what in enumerate(FORMULAS):
        for ggml_type in FORMULA_TYPES:
            for num_tokens in ROWS:
                digest = known_case(ggml_type, num_tokens, what).digest
                lines.append(f'GOLDEN_FORMULA({number}, {ggml_type}, {num_tokens}, "{digest}")')
    return "\n".join(lines) + "\n"


def digest_line(number: int, ggml_type: int) -> str:
    """Number of the formula (-1: silu), ggml type, rows, SHA-256."""
    what = {} if number < 0 else FORMULAS[number]
    return f"{number} {ggml_type} 7 {known_case(ggml_type, 7, what).digest}"


def digests() -> str:
    """Give the text of kernel_digests.txt, a line for every formula in every format."""
    lines = [digest_line(number, ggml_type) for ggml_type in TYPES for number in range(-1, len(FORMULAS))]
    return "\n".join(lines) + "\n"


def vectors() -> str:
    """Give the text of tests/vectors/kernel.json: small calls with their answers."""
    cases = []
    examples = [(t, {}) for t in (0, 1, 8)] + [(8, what) for what in FORMULAS]
    for ggml_type, what in examples:
        case = known_case(ggml_type, 2, what, dims=(32, 32) if ggml_type == 8 else (20, 12))
        cases.append(
            {
                "formula": case.formula.to_json(),
                "slices": [s.tobytes().hex() for s in case.slices],
                "x": case.x.astype("<f4").tobytes().hex(),
                "encoding": int(case.encoding),
                "encoded_x": encode_x(case.x, case.encoding).hex(),
                "row_exponents": row_exponents(case.x).tolist(),
                "x32": LAYER_EXPONENT,
                "x16": case.x16.tolist(),
                "counts": [TOP_K] * len(case.x),
                "picks": case.picks.tolist(),
                "weights": case.weights.astype("<f4").tobytes().hex(),
                "sums_x32": [str(n) for n in case.sums[0].ravel()],
                "sums_x16": [str(n) for n in case.sums[1].ravel()],
            }
        )
    note = json.dumps("written by python -m tests.wasm.known_answers")
    dispatches, partials = ((",\n  ").join(map(json.dumps, part)) for part in (cases, partial_vectors()))
    return f'{{"note": {note},\n "dispatches": [\n  {dispatches}],\n "partials": [\n  {partials}]}}\n'


def partial_vectors() -> list[dict[str, object]]:
    rows = [
        [0, 1, -1, 32767, -32768],
        [0, 1, -1, 32768, 0],
        [2**31 - 1, -(2**31), 0, 0, 5],
        [2**31, 0, 0, 0, 0],
        [-(2**62), 2**62, 7, -7, 0],
    ]
    found = []
    for grid in (Grid.X32, Grid.X16):
        widths, data = encode_partial(np.array(rows, np.int64), grid)
        found.append(
            {
                "grid": int(grid),
                "sums": [[str(n) for n in row] for row in rows],
                "widths": list(widths),
                "data": data.hex(),
            }
        )
    return found


def main() -> None:
    HASHES.write_text(hashes())
    DIGESTS.write_text(digests())
    VECTORS.write_text(vectors())


if __name__ == "__main__":
    main()
