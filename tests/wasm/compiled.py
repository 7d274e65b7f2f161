"""Kernels compiled for tests by other compilers and for other machines, once for the same sources."""

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.wasm.calls import ROOT, build_script

CACHE = ROOT / ".pytest_cache" / "kernels"
STRICT = (
    "-std=c11 -O2 -ffp-contract=off -Wall -Wextra -Wshadow -Werror -shared -fPIC -fvisibility=hidden".split()
)
NATIVE_FLAGS = {  # as gcc and clang both spell them
    "scalar": ["-DEXPERT_SCALAR"],
    "sse41": ["-mssse3", "-msse4.1"],
    "avx2": ["-mavx2", "-mf16c", "-mfma"],
    "avx512vnni": "-mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512vnni -mf16c -mfma".split(),
}
ARM_MAIN = Path(__file__).with_name("selftest_main.c")


def compiled(command: list[str], name: str, extra: list[Path] | None = None) -> Path:
    """Give the file `name` that this compiler makes of the kernel's sources and `extra`."""
    script = build_script()
    sources = [*(extra or []), *script.sources()]
    headers = [*sorted((ROOT / "wasm").rglob("*.h")), ROOT / "wasm" / "hashes.txt"]
    digest = hashlib.sha256("\0".join(command).encode())
    for path in [*sources, *headers]:
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    folder = CACHE / digest.hexdigest()[:24]
    made = folder / name
    if not made.exists():
        folder.mkdir(parents=True, exist_ok=True)
        fresh = folder / f"{name}.{os.getpid()}"
        subprocess.run([*command, *map(str, sources), "-o", str(fresh)], check=True)
        fresh.replace(made)
        _forget_all_but_the_last(12)
    return made


def _forget_all_but_the_last(count: int) -> None:
    for old in sorted(CACHE.iterdir(), key=lambda path: path.stat().st_mtime)[:-count]:
        shutil.rmtree(old, ignore_errors=True)


def side_by_side[T](makers: Sequence[Callable[[], T]]) -> list[T]:
    """Run compilers two at a time: most machines have two cores, and each takes half a minute."""
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda make: make(), makers))


def compiled_by(compiler: str, name: str) -> Path:
    """Give the library of one build, by gcc or clang."""
    return compiled([compiler, *STRICT, *NATIVE_FLAGS[name]], f"libexpert-{name}.so")


def for_arm(cpu: str) -> Path:
    """Give a program for arm that prints every digest (selftest_main.c)."""
    zig = [sys.executable, "-m", "ziglang", "cc", "-target", "aarch64-linux-musl", f"-mcpu={cpu}", "-static"]
    return compiled([*zig, *build_script().COMMON], "digests", [ARM_MAIN])
