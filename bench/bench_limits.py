"""
What limits the native kernel: arithmetic or memory.

Each format is computed twice: one small expert again and again, which stays in the nearest caches
(`cache_gb_s`: how fast the arithmetic is), and a pool that no cache of a core holds, as a node computes it
(`memory_gb_s`). Where memory_gb_s is near read_gb_s, plain reading of that pool, memory is the limit; where
it is near cache_gb_s, arithmetic. In between the two do not overlap fully. One thread, by its CPU time.
"""

import argparse
from pathlib import Path

from bench_kernel import (
    EXPERT_DIM,
    EXPERTS_A_CALL,
    HIDDEN_DIM,
    best_s,
    clock_for,
    numbers,
    random_slice,
    walk,
)
from table import Row, arguments, report

from backbone.experts.native import NativeKernel
from backbone.model.formula import FORMATS, Formula

SMALL = 256  # rows and columns of the expert that stays in the cache


def rows_of(kernel: NativeKernel, ggml_type: int, num_tokens: int, options: argparse.Namespace) -> Row:
    clock = clock_for(1)
    small = Formula(SMALL * 2, SMALL, ggml_type, ggml_type, ggml_type)
    near = [kernel.pack(small, random_slice(small, 0))] * EXPERTS_A_CALL
    near_call = walk(kernel, small, num_tokens)
    tiny = Formula(256, 256, ggml_type, ggml_type, ggml_type)  # the same call with a quarter of the weights
    tiny_pool = [kernel.pack(tiny, random_slice(tiny, 0))] * EXPERTS_A_CALL
    tiny_call = walk(kernel, tiny, num_tokens)
    near_s = best_s(lambda: near_call(near), options.seconds, clock)
    tiny_s = best_s(lambda: tiny_call(tiny_pool), options.seconds, clock)
    near_bytes = (small.slice_bytes - tiny.slice_bytes) * EXPERTS_A_CALL  # less what a call costs

    large = Formula(HIDDEN_DIM, EXPERT_DIM, ggml_type, ggml_type, ggml_type)
    data = random_slice(large, 0)
    count = max(options.pool_mb * (1 << 20) // large.slice_bytes // EXPERTS_A_CALL, 1) * EXPERTS_A_CALL
    pool = [kernel.pack(large, data) for _ in range(count)]
    call = walk(kernel, large, num_tokens)
    size_bytes = large.slice_bytes * count
    memory_s = best_s(lambda: call(pool), options.seconds, clock)
    read_s = best_s(lambda: [kernel.read_expert(packed) for packed in pool], options.seconds, clock)
    return dict(
        format=FORMATS[ggml_type].name, build=kernel.build, rows=num_tokens,
        cache_gb_s=near_bytes / max(near_s - tiny_s, 1e-9) / 1e9, memory_gb_s=size_bytes / memory_s / 1e9,
        read_gb_s=size_bytes / read_s / 1e9,
    )  # fmt: skip


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--formats", default=",".join(f.name for f in FORMATS.values()))
    parser.add_argument("--build", help="such as avx2; default: the best for this CPU")
    parser.add_argument("--rows", type=numbers, default=[1, 4])
    parser.add_argument("--pool-mb", type=int, default=128)
    parser.add_argument("--seconds", type=float, default=0.2, help="how long each figure is measured")
    options = parser.parse_args()
    kernel = NativeKernel(options.build)
    names = options.formats.split(",")
    types = [ggml_type for ggml_type, layout in FORMATS.items() if layout.name in names]
    rows = [rows_of(kernel, t, num_tokens, options) for t in types for num_tokens in options.rows]
    json_path: Path | None = options.json
    report(f"{kernel.build}: arithmetic and memory, one thread", rows, json_path)


if __name__ == "__main__":
    main()
