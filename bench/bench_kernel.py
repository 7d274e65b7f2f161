"""
How fast experts are computed: GB of weights per second, by format and build, beside plain reading of the
same memory and beside ggml's own vec_dot.

A pool of experts is walked, eight experts a call as a node would be asked. With several rows the weights
are streamed once for all of them: the figure counts them once. `of_read` is the share of the speed at which
the same memory can be read at all; `vs_ggml` compares with `ggml_vec_dot_*` over as many bytes of the same
format, each row of weights times every row of x, where `make oracles` has fetched its libraries
(or `--ggml FOLDER`; the best one for this CPU is taken); `vs_llamacpp_wasm` with llama.cpp's own wasm
kernels, where its sources are (`--llama-cpp FOLDER`, see wasm_rows.py). `wasm-relaxed` is the better of the
two relaxed builds, `chromium` the build that a page chooses for the format. One native thread is timed by its
CPU time, one worker by itself; two share the pool, each with its half, and are timed by the clock on the
wall. Then comes how soon a kernel could serve, and a call of the demo model, where overhead is all.

`vs_native` compares with the native build named first: by default the best for this CPU; with `--builds
sse41,...` the one whose registers are as wide as those of wasm. All pools are equally large (`--pool-mb`).
With `--cached` one small expert is computed again and again, less what a smaller one takes, so that neither
memory nor what a call costs is in the figure: arithmetic alone. `--small-pages` denies the native kernel the
pages of 2 MB, which the memory of wasm does not have either (Linux).
"""

import argparse
import ctypes
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import perf_counter, thread_time
from typing import Any

import numpy as np
from table import Row, arguments, report
from wasm_rows import LeftOut, call_rows, in_chromium, kernel_files, llama_cpp_wasm, start_up_rows
from wasm_rows import in_node as node

from backbone.experts.native import NATIVE_BUILDS, KernelFault, NativeKernel, PackedExpert
from backbone.model.formula import FORMATS, Formula
from backbone.model.quantise import random_blocks
from relay.wire.tensors import Grid, XEncoding, encode_x, row_exponents

ORACLES = Path(__file__).parents[1] / "tests/oracles/node_modules/@node-llama-cpp/linux-x64/bins/linux-x64"
HIDDEN_DIM, EXPERT_DIM, EXPERTS_A_CALL = 2048, 768, 8
CACHED_DIMS = ((512, 256), (256, 256))  # the second is taken off the first
PR_SET_THP_DISABLE = 41  # linux/prctl.h
DEMO = Formula(hidden_dim=576, expert_dim=192, gate_type=8, up_type=8, down_type=8)
ENCODINGS = {1: XEncoding.F32, 32: XEncoding.Q8A32, 64: XEncoding.Q8A32, 256: XEncoding.Q8A256}
WASM_BUILDS = ("wasm-plain", "wasm-relaxed", "chromium", "llamacpp-wasm")
START_UP_NOTE = (
    "from scripts loaded, nothing of the kernel fetched: load_ms until the first build came, is compiled and "
    "tested; prove_ms until every worker has tested it, was timed and tested it again, and an offer could be "
    "made; ms = both, of the aim of 100 ms; floor_ms: as many empty workers until each has said a word; "
    "first_format_ms: what the first slice (Q4_K with Q6_K) then waits for while its build is chosen"
)
# ggml's own variants, best first.
GGML_VARIANTS = ("sapphirerapids", "zen4", "cooperlake", "cascadelake", "icelake", "cannonlake", "alderlake",
                 "skylakex", "haswell", "sandybridge", "x64")  # fmt: skip


def random_matrix(ggml_type: int, rows: int, cols: int, seed: int) -> bytes:
    """Give random weights around zero."""
    rng = np.random.default_rng(seed)
    if FORMATS[ggml_type].block > 1:
        return random_blocks(rng, ggml_type, (rows, cols), 1 / 32).tobytes()
    weights = rng.standard_normal((rows, cols), np.float32) / np.float32(32)
    if ggml_type == 30:
        return np.ascontiguousarray((weights.view("<u4") >> 16).astype("<u2")).tobytes()
    return weights.astype("<f4" if ggml_type == 0 else "<f2").tobytes()


def random_slice(formula: Formula, seed: int) -> bytes:
    """Give the bytes of one expert."""
    d, f = formula.hidden_dim, formula.expert_dim
    return b"".join(random_matrix(formula.up_type, *dims, seed) for dims in ((f, d), (f, d), (d, f)))


def best_s(call: Callable[[], object], seconds: float, clock: Callable[[], float] = perf_counter) -> float:
    """Time a call over and over for a while; give its best time by `clock`."""
    call()
    best, end = float("inf"), perf_counter() + seconds
    while best == float("inf") or perf_counter() < end:
        started = clock()
        call()
        best = min(best, clock() - started)
    return best


def clock_for(threads: int) -> Callable[[], float]:
    """One thread is timed by its own CPU time, so that a busy machine disturbs less."""
    return thread_time if threads == 1 else perf_counter


def shared[T](halves: list[T], call: Callable[[T], object]) -> Callable[[], None]:
    """Give a call that does its work in as many threads as there are parts."""
    if len(halves) == 1:
        return lambda: (call(halves[0]), None)[1]
    pool = ThreadPoolExecutor(len(halves))
    return lambda: (list(pool.map(call, halves)), None)[1]


def walk(kernel: NativeKernel, formula: Formula, num_tokens: int) -> Callable[[list[PackedExpert]], None]:
    """Give a call that computes every expert of a pool once for the same rows."""
    x = np.random.default_rng(0).standard_normal((num_tokens, formula.hidden_dim), np.float32)
    encoding = ENCODINGS[FORMATS[formula.up_type].block]
    rows, exponents = encode_x(x, encoding), row_exponents(x)
    counts = np.full(num_tokens, EXPERTS_A_CALL, np.uint16)
    picks = np.tile(np.arange(EXPERTS_A_CALL, dtype=np.uint16), num_tokens)
    weights = np.full(len(picks), 1 / EXPERTS_A_CALL, np.float32)

    def call(pool: list[PackedExpert]) -> None:
        for first in range(0, len(pool), EXPERTS_A_CALL):
            experts = pool[first : first + EXPERTS_A_CALL]
            kernel.answer(
                formula, rows, encoding, num_tokens, exponents, Grid.X32, 20, counts, experts, picks, weights
            )

    return call


def cached_rows(kernel: NativeKernel, ggml_type: int, options: argparse.Namespace) -> list[Row]:
    """Time one expert that stays in the caches of the core."""
    found: list[Row] = []
    for num_tokens in options.rows:
        size_bytes, spent_s = 0, 0.0
        for (hidden_dim, expert_dim), sign in zip(CACHED_DIMS, (1, -1), strict=True):
            formula = Formula(hidden_dim, expert_dim, ggml_type, ggml_type, ggml_type)
            pool = [kernel.pack(formula, random_slice(formula, 0))] * EXPERTS_A_CALL
            timed = walk(kernel, formula, num_tokens)
            spent_s += sign * best_s(lambda timed=timed, pool=pool: timed(pool), options.seconds, thread_time)  # type: ignore[misc]
            size_bytes += sign * formula.slice_bytes * EXPERTS_A_CALL
        variant = kernel.build.removeprefix("native-")
        found.append(row("native", ggml_type, num_tokens, 1, size_bytes, spent_s, variant=variant))
    return found


def native_rows(build: str, ggml_type: int, options: argparse.Namespace) -> list[Row]:
    kernel = NativeKernel(build)
    if options.cached:
        return cached_rows(kernel, ggml_type, options)
    formula = Formula(HIDDEN_DIM, EXPERT_DIM, ggml_type, ggml_type, ggml_type)
    slices = [random_slice(formula, seed) for seed in range(2)]
    count = max(options.pool_bytes // formula.slice_bytes // (2 * EXPERTS_A_CALL), 1) * 2 * EXPERTS_A_CALL
    kernel.pack(formula, slices[0])  # runs the known answers of the format
    started = thread_time()
    pool = [kernel.pack(formula, slices[i % 2]) for i in range(count)]
    repack_gb_s = formula.slice_bytes * count / (thread_time() - started) / 1e9
    found: list[Row] = []
    for threads in options.threads:
        parts = [pool[i * count // threads : (i + 1) * count // threads] for i in range(threads)]
        read = shared(parts, lambda part: [kernel.read_expert(packed) for packed in part])
        read_s = best_s(read, options.seconds, clock_for(threads))
        for num_tokens in options.rows:
            timed = shared(parts, walk(kernel, formula, num_tokens))
            spent_s = best_s(timed, options.seconds, clock_for(threads))
            size = formula.slice_bytes * count
            variant = kernel.build.removeprefix("native-")
            found.append(
                row("native", ggml_type, num_tokens, threads, size, spent_s, read_s, repack_gb_s, variant)
            )
    return found


def row(
    build: str, ggml_type: int, rows: int, threads: int, size_bytes: int, spent_s: float, read_s: float = 0.0,
    repack_gb_s: float = 0.0, variant: str = "",
) -> Row:  # fmt: skip
    return dict(
        format=FORMATS[ggml_type].name, build=build, variant=variant, rows=rows, threads=threads,
        gb_s=size_bytes / spent_s / 1e9, of_read=read_s / spent_s, repack_gb_s=repack_gb_s,
    )  # fmt: skip


class Ggml:
    """The dot products of ggml, from its own libraries, in a loop of C so that Python costs nothing."""

    LOOP = """
    #include <stddef.h>
    typedef void (*vec_dot_t)(int, float *, size_t, const void *, size_t, const void *, size_t, int);
    void loop(vec_dot_t vec_dot, int n, size_t rows, const char *w, size_t row_bytes, size_t tokens,
              const char *x, size_t x_bytes, float *y) {
        for (size_t r = 0; r < rows; r++)
            for (size_t t = 0; t < tokens; t++)
                vec_dot(n, y + t, 0, w + r * row_bytes, 0, x + t * x_bytes, 0, 1);
    }
    """

    def __init__(self, folder: Path) -> None:
        self.base = ctypes.CDLL(str(folder / "libggml-base.so"), mode=ctypes.RTLD_GLOBAL)
        self.cpu, self.variant = self._best(folder)
        self.cpu.ggml_cpu_init()
        self.cpu.ggml_get_type_traits_cpu.restype = ctypes.POINTER(ctypes.c_void_p)
        self.base.ggml_row_size.restype = ctypes.c_size_t
        self.base.ggml_row_size.argtypes = [ctypes.c_int, ctypes.c_int64]
        self._folder = tempfile.TemporaryDirectory()
        source = Path(self._folder.name) / "loop.c"
        source.write_text(self.LOOP)
        library = source.with_suffix(".so")
        zig = [sys.executable, "-m", "ziglang", "cc", "-O2", "-shared", "-fPIC"]
        subprocess.run([*zig, str(source), "-o", str(library)], check=True)
        self.loop = ctypes.CDLL(str(library)).loop

    @staticmethod
    def _best(folder: Path) -> tuple[ctypes.CDLL, str]:
        scores = []
        for name in GGML_VARIANTS:
            path = folder / f"libggml-cpu-{name}.so"
            if path.exists():
                lib = ctypes.CDLL(str(path))
                scores.append((lib.ggml_backend_score(), -len(scores), name, lib))
        score, _, name, lib = max(scores, key=lambda s: s[:2])
        assert score > 0
        return lib, name

    def rows(self, ggml_type: int, options: argparse.Namespace) -> list[Row]:
        from_float, vec_dot, vec_dot_type = self.cpu.ggml_get_type_traits_cpu(ggml_type)[0:3]
        if not vec_dot:
            return []
        n = HIDDEN_DIM
        row_bytes = self.base.ggml_row_size(ggml_type, n)
        count = options.pool_bytes // row_bytes
        some = np.frombuffer(random_matrix(ggml_type, 2048, n, 0), np.uint8).reshape(2048, -1)
        weights = np.ascontiguousarray(np.resize(some, (count, row_bytes)))
        x_type = int(vec_dot_type or 0) & 0xFFFFFFFF
        x_bytes = self.base.ggml_row_size(x_type, n)
        x = np.random.default_rng(0).standard_normal((max(options.rows), n), np.float32)
        as_wanted = np.zeros((len(x), x_bytes), np.uint8)
        if x_type == 0:
            as_wanted = x.view(np.uint8).reshape(len(x), -1)
        else:
            convert = self.cpu.ggml_get_type_traits_cpu(x_type)[0]
            kind = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)
            for t in range(len(x)):
                kind(convert)(x[t].ctypes.data, as_wanted[t].ctypes.data, n)

        def call(part: tuple[int, int], tokens: int) -> None:
            y = np.zeros(tokens, np.float32)
            self.loop(
                ctypes.c_void_p(vec_dot), n, ctypes.c_size_t(part[1] - part[0]),
                ctypes.c_void_p(weights[part[0] :].ctypes.data), ctypes.c_size_t(row_bytes),
                ctypes.c_size_t(tokens), ctypes.c_void_p(as_wanted.ctypes.data), ctypes.c_size_t(x_bytes),
                ctypes.c_void_p(y.ctypes.data),
            )  # fmt: skip

        found = []
        for threads in options.threads:
            parts = [(i * count // threads, (i + 1) * count // threads) for i in range(threads)]
            for tokens in options.rows:
                timed = shared(parts, lambda part, tokens=tokens: call(part, tokens))  # type: ignore[misc]
                spent_s = best_s(timed, options.seconds, clock_for(threads))
                found.append(
                    row("ggml", ggml_type, tokens, threads, count * row_bytes, spent_s, variant=self.variant)
                )
        return found


def wasm_rows(types: list[int], wanted: list[str], options: argparse.Namespace) -> list[Row]:
    """Time the wasm kernels on the same shapes, wherever they can run; say what is left out."""
    shape: Row = dict(
        experts_a_call=EXPERTS_A_CALL, types=types, pool_bytes=options.pool_bytes, same=options.cached,
        seconds=options.seconds, rows=options.rows, threads=options.threads,
    )  # fmt: skip
    found: list[Row] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)

        def timed(run: Callable[[Row], list[Row]], more: Row) -> list[Row]:
            runs = []
            for hidden_dim, expert_dim in CACHED_DIMS if options.cached else [(HIDDEN_DIM, EXPERT_DIM)]:
                write_slices(folder, (hidden_dim, expert_dim), types)
                dims = dict(hidden_dim=hidden_dim, expert_dim=expert_dim, folder=name)
                runs.append(run(shape | more | dims))
            return less_smaller(*runs) if options.cached else runs[0]

        ours = {"kernels": kernel_files()}
        runs: dict[str, Callable[[], list[Row]]] = {
            "wasm-plain": lambda: timed(node, ours | {"builds": ["plain"]}),
            "wasm-relaxed": lambda: better(timed(node, ours | {"builds": ["relaxed16", "relaxed32"]})),
            "chromium": lambda: timed(lambda all: in_chromium("measure", all, folder), {"builds": None}),
            "llamacpp-wasm": lambda: timed(
                node,
                {"builds": ["foreign"], "foreign": True}
                | {"kernels": {"foreign": str(llama_cpp_wasm(options.llama_cpp))}},
            ),
        }
        for build, run in runs.items():
            if build not in wanted:
                continue
            try:
                found += [row(build=build, **one) for one in run()]
            except LeftOut as exc:
                print(f"{build} left out: {exc}")
    return found


def write_slices(folder: Path, dims: tuple[int, int], types: list[int]) -> None:
    for t in types:
        (folder / str(t)).write_bytes(random_slice(Formula(*dims, t, t, t), 0))


def less_smaller(large: list[Row], small: list[Row]) -> list[Row]:
    """Give what the larger expert takes longer, and how many bytes it has more."""

    def cell(one: Row) -> tuple[int, int]:
        return one["ggml_type"], one["rows"]

    found = []
    for one in large:
        same = [other for other in small if cell(other) == cell(one)]
        other = next((other for other in same if other["variant"] == one["variant"]), same[0])
        sizes = [Formula(*dims, *[one["ggml_type"]] * 3).slice_bytes for dims in CACHED_DIMS]
        spent = [a["spent_s"] / a["size_bytes"] * size for a, size in zip((one, other), sizes, strict=True)]
        found.append(
            one | dict(size_bytes=sizes[0] - sizes[1], spent_s=max(spent[0] - spent[1], 1e-9), read_s=0)
        )
    return found


def better(rows: list[Row]) -> list[Row]:
    """Of two variants of one build keep, for each format, the one that is faster for one row."""
    best: dict[int, tuple[float, str]] = {}
    for one in rows:
        speed = one["size_bytes"] / one["spent_s"], one["variant"]
        if (one["rows"], one["threads"]) == (rows[0]["rows"], rows[0]["threads"]):
            best[one["ggml_type"]] = max(best.get(one["ggml_type"], (0.0, "")), speed)
    return [one for one in rows if one["variant"] == best[one["ggml_type"]][1]]


def with_ratios(rows: list[Row]) -> list[Row]:
    """Add how each row compares with ggml's, our native and llama.cpp's wasm row of the same shape."""
    speed: dict[tuple[Any, ...], float] = {}
    for r in rows:
        speed.setdefault((r["format"], r["build"], r["rows"], r["threads"]), r["gb_s"])
    for r in rows:
        for name, other in (
            ("vs_ggml", "ggml"), ("vs_native", "native"), ("vs_llamacpp_wasm", "llamacpp-wasm")
        ):  # fmt: skip
            base = speed.get((r["format"], other, r["rows"], r["threads"]))
            r[name] = r["gb_s"] / base if base else 0.0
    return rows


def demo_rows() -> list[Row]:
    """Time one call of the demo model, and the part of it spent in Python."""
    kernel = NativeKernel()
    pool = [kernel.pack(DEMO, random_slice(DEMO, seed)) for seed in range(EXPERTS_A_CALL)]
    found: list[Row] = []
    for num_tokens in (1, 4, 16):
        call = walk(kernel, DEMO, num_tokens)
        spent_s = best_s(lambda call=call: call(pool), 0.4)  # type: ignore[misc]
        empty = Formula(hidden_dim=32, expert_dim=32, gate_type=8, up_type=8, down_type=8)
        tiny = [kernel.pack(empty, bytes(empty.slice_bytes))] * EXPERTS_A_CALL
        call = walk(kernel, empty, num_tokens)
        python_s = best_s(lambda call=call, tiny=tiny: call(tiny), 0.4)  # type: ignore[misc]
        found.append(
            dict(call=f"{EXPERTS_A_CALL} experts of 576x192 Q8_0", rows=num_tokens, us=spent_s * 1e6,
                 overhead_us=python_s * 1e6)
        )  # fmt: skip
    return found


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument(
        "--builds", default="native,ggml,wasm",
        help="native, ggml, wasm (all of them), wasm-plain, wasm-relaxed, chromium, llamacpp-wasm, start-up, "
        "calls, or names of native builds",
    )  # fmt: skip
    parser.add_argument("--formats", default=",".join(f.name for f in FORMATS.values()))
    parser.add_argument("--rows", type=numbers, default=[1, 2, 4, 8, 32])
    parser.add_argument("--threads", type=numbers, default=[1, 2])
    parser.add_argument("--seconds", type=float, default=0.3, help="how long each figure is measured")
    parser.add_argument(
        "--ggml", type=Path, default=ORACLES,
        help="folder of libggml-*.so (default: what `make oracles` fetched)",
    )  # fmt: skip
    parser.add_argument(
        "--llama-cpp", type=Path, default=Path(os.environ.get("LLAMA_CPP_SOURCES", "/nonexistent")),
        help="folder of llama.cpp's sources, for its own wasm kernels",
    )  # fmt: skip
    parser.add_argument("--pool-mb", type=int, default=192, help="MiB of weights that are walked")
    parser.add_argument(
        "--cached", action="store_true", help="one expert that stays in the cache; one thread"
    )
    parser.add_argument("--small-pages", action="store_true", help="native: pages of 4 KB")
    options = parser.parse_args()
    options.pool_bytes = options.pool_mb << 20
    if options.cached:
        options.threads, options.pool_bytes = [1], 16 << 20  # so often is the one expert computed
    if options.small_pages and ctypes.CDLL(None).prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0):
        parser.error("this system has no prctl to deny large pages")
    names = options.formats.split(",")
    types = [ggml_type for ggml_type, f in FORMATS.items() if f.name in names]
    wanted = options.builds.split(",")
    if "wasm" in wanted:
        wanted += [*WASM_BUILDS, "start-up", "calls"]
    if options.cached:  # the foreign dot products have no experts
        wanted = [build for build in wanted if build not in ("ggml", "llamacpp-wasm")]
    ggml = Ggml(options.ggml) if "ggml" in wanted and options.ggml.is_dir() else None
    notes = [
        f"ggml: {ggml.variant}" if ggml else "no ggml column: not asked for, or its libraries were not found"
    ]
    rows: list[Row] = []
    natives = [b for b in wanted if b in NATIVE_BUILDS]
    if "native" in wanted:
        natives.insert(0, NativeKernel().build.removeprefix("native-"))
    for ggml_type in types:
        for build in natives:
            try:
                rows += native_rows(build, ggml_type, options)
            except KernelFault as exc:
                print(f"{build} left out: {exc}")
        rows += ggml.rows(ggml_type, options) if ggml else []
    rows += wasm_rows(types, wanted, options)
    title = f"Experts of {HIDDEN_DIM} x {EXPERT_DIM}, {options.pool_mb} MiB of weights"
    if options.cached:
        title = "An expert of 512 x 256 that stays in the cache, less one of 256 x 256"
    if rows:
        report(title, with_ratios(rows), options.json, notes)
    if "start-up" in wanted and (starts := start_up_rows(5)):
        report("Start-up of the kernel in a fresh thread", starts, notes=[START_UP_NOTE])
    if "calls" in wanted and (calls := call_rows()):
        title = "One row through experts of 2048 x 768, Q4_K and Q6_K: this thread, two workers"
        report(title, calls)
    report("One call from Python", demo_rows(), notes=["overhead_us: the same call with experts of 32 x 32"])


if __name__ == "__main__":
    main()
