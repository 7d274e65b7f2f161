"""
How fast experts are computed: GB of weights per second, by format and build, beside plain reading of the
same memory.

One thread. A pool of experts larger than the caches is walked, eight experts a call as a node would be
asked; `of_read` is the share of the speed at which the same memory can be read at all. With 4 rows the
weights are streamed once for all four: the figure counts them once. The last table is a call of the demo
model, where overhead is all.
"""

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

import numpy as np
from table import Row, arguments, report

from backbone.experts.native import NATIVE_BUILDS, KernelFault, NativeKernel, PackedExpert
from backbone.model.formula import FORMATS, Formula
from relay.wire.tensors import Grid, XEncoding, encode_x, row_exponents

ROOT = Path(__file__).resolve().parents[1]
HIDDEN_DIM, EXPERT_DIM, EXPERTS_A_CALL = 2048, 768, 8
POOL_BYTES = 192 << 20
DEMO = Formula(hidden_dim=576, expert_dim=192, gate_type=8, up_type=8, down_type=8)
ENCODINGS = {
    0: XEncoding.F32,
    1: XEncoding.F32,
    8: XEncoding.Q8A32,
    12: XEncoding.Q8A256,
    14: XEncoding.Q8A256,
}
# Where the f16 scales of a block stand; they are set to 2^-10.
SCALES = {8: (0,), 12: (0, 2), 14: (208,)}


def random_slice(formula: Formula, seed: int) -> bytes:
    """Give the bytes of one expert: random weights with scales that keep everything finite."""
    rng = np.random.default_rng(seed)
    count = formula.hidden_dim * formula.expert_dim * 3
    if formula.up_type in (0, 1):
        dtype = np.float32 if formula.up_type == 0 else np.float16
        return (rng.standard_normal(count, np.float32) / 32).astype(dtype).tobytes()
    block = FORMATS[formula.up_type]
    blocks = rng.integers(0, 256, (count // block.block, block.block_bytes), np.uint8)
    for at in SCALES[formula.up_type]:
        blocks[:, at : at + 2] = np.frombuffer(np.float16(2.0**-10).tobytes(), np.uint8)
    return blocks.tobytes()


def best_s(call: Callable[[], object], seconds: float = 0.4) -> float:
    """Time a call over and over for a while; give its best time."""
    call()
    best, end = float("inf"), perf_counter() + seconds
    while (started := perf_counter()) < end:
        call()
        best = min(best, perf_counter() - started)
    return best


def walk(
    kernel: NativeKernel, formula: Formula, pool: list[PackedExpert], num_tokens: int
) -> Callable[[], None]:
    """Give a call that computes every expert of the pool once for the same rows."""
    x = np.random.default_rng(0).standard_normal((num_tokens, formula.hidden_dim), np.float32)
    encoding = ENCODINGS[formula.up_type]
    rows, exponents = encode_x(x, encoding), row_exponents(x)
    counts = np.full(num_tokens, EXPERTS_A_CALL, np.uint16)
    picks = np.tile(np.arange(EXPERTS_A_CALL, dtype=np.uint16), num_tokens)
    weights = np.full(len(picks), 1 / EXPERTS_A_CALL, np.float32)

    def call() -> None:
        for first in range(0, len(pool), EXPERTS_A_CALL):
            experts = pool[first : first + EXPERTS_A_CALL]
            kernel.answer(
                formula, rows, encoding, num_tokens, exponents, Grid.X32, 20, counts, experts, picks, weights
            )

    return call


def native_rows(build: str, types: list[int]) -> list[Row]:
    kernel = NativeKernel(build)
    found: list[Row] = []
    for ggml_type in types:
        formula = Formula(HIDDEN_DIM, EXPERT_DIM, ggml_type, ggml_type, ggml_type)
        slices = [random_slice(formula, seed) for seed in range(4)]
        count = POOL_BYTES // formula.slice_bytes // EXPERTS_A_CALL * EXPERTS_A_CALL
        pool = [kernel.pack(formula, slices[i % 4]) for i in range(count)]
        read_s = best_s(lambda pool=pool: [kernel.read_expert(packed) for packed in pool])  # type: ignore[misc]
        for num_tokens in (1, 4):
            spent_s = best_s(walk(kernel, formula, pool, num_tokens))
            found.append(
                row(kernel.build, ggml_type, num_tokens, formula.slice_bytes * count, spent_s, read_s)
            )
    return found


def row(build: str, ggml_type: int, num_tokens: int, size_bytes: int, spent_s: float, read_s: float) -> Row:
    return dict(
        build=build, format=FORMATS[ggml_type].name, rows=num_tokens, gb_per_s=size_bytes / spent_s / 1e9,
        read_gb_per_s=size_bytes / read_s / 1e9, of_read=read_s / spent_s,
    )  # fmt: skip


def wasm_rows(types: list[int]) -> list[Row]:
    """Let node time the wasm kernel on the same shapes; nothing where there is no node."""
    node, script = shutil.which("node"), ROOT / "bench" / "bench_kernel.mjs"
    if node is None:
        return []
    shape = dict(
        hidden_dim=HIDDEN_DIM, expert_dim=EXPERT_DIM, experts_a_call=EXPERTS_A_CALL, pool_bytes=POOL_BYTES,
        types=[dict(type=t, scales=SCALES.get(t, ()), block=FORMATS[t].block,
                    block_bytes=FORMATS[t].block_bytes) for t in types],
    )  # fmt: skip
    done = subprocess.run([node, str(script), json.dumps(shape)], capture_output=True, text=True, check=True)
    return [row(**found) for found in json.loads(done.stdout)]


def demo_rows() -> list[Row]:
    """Time one call of the demo model, and the part of it spent in Python."""
    kernel = NativeKernel()
    pool = [kernel.pack(DEMO, random_slice(DEMO, seed)) for seed in range(EXPERTS_A_CALL)]
    found: list[Row] = []
    for num_tokens in (1, 4, 16):
        spent_s = best_s(walk(kernel, DEMO, pool, num_tokens))
        empty = Formula(hidden_dim=32, expert_dim=32, gate_type=8, up_type=8, down_type=8)
        tiny = [kernel.pack(empty, bytes(empty.slice_bytes))] * EXPERTS_A_CALL
        python_s = best_s(walk(kernel, empty, tiny, num_tokens))
        found.append(
            dict(call=f"{EXPERTS_A_CALL} experts of 576x192 Q8_0", rows=num_tokens, us=spent_s * 1e6,
                 overhead_us=python_s * 1e6)
        )  # fmt: skip
    return found


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--builds", default=",".join((*NATIVE_BUILDS, "wasm")), help="which, comma-separated")
    parser.add_argument("--formats", default=",".join(f.name for f in FORMATS.values()))
    options = parser.parse_args()
    names = options.formats.split(",")
    types = [ggml_type for ggml_type, f in FORMATS.items() if f.name in names]
    rows: list[Row] = []
    for build in options.builds.split(","):
        if build == "wasm":
            rows += wasm_rows(types)
            continue
        try:
            rows += native_rows(build, types)
        except KernelFault as exc:
            print(f"{build} left out: {exc}")
    title = f"Experts of {HIDDEN_DIM} x {EXPERT_DIM}, one thread, {POOL_BYTES >> 20} MiB of weights"
    report(title, rows, options.json)
    report("One call from Python", demo_rows(), notes=["overhead_us: the same call with experts of 32 x 32"])


if __name__ == "__main__":
    main()
