"""
Compile the ggml device with zig's clang into `backbone/_built/`; nothing happens when it is up to date.

Standard library only: packaging runs this file by its path, before any dependency is there but ziglang.
"""

import hashlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
BUILT = HERE.parent / "_built"
SOURCES = ("abi.c", "link.c", "pages.c", "routed.c", "swarm_device.c")
HEADERS = ("abi.h", "link.h", "pages.h", "routed.h", "swarm_device.h")
LIBRARY = "libswarm_device.so"  # the same name on macOS: it is opened by path
FLAGS = (
    "-std=gnu11",
    "-O2",
    "-shared",
    "-fPIC",
    "-fvisibility=hidden",
    "-Wall",
    "-Wextra",
    "-Werror",
)
# The C library of the oldest Linux that xllamacpp's wheels run on; without it zig builds for the newest.
LINUX_TARGET = "{machine}-linux-gnu.2.28"


class BuildError(Exception):
    """The compiler is missing or did not like the source."""


def build(out_dir: Path) -> Path:
    """
    Return the path of the library in `out_dir`, compiled if sources or flags changed.

    Raises:
        BuildError: with the compiler's words.
    """
    library = out_dir / LIBRARY
    stamp = out_dir / f"{LIBRARY}.stamp"
    command = [*_compiler(), *FLAGS, *(str(HERE / name) for name in SOURCES)]
    wanted = _fingerprint()
    if library.exists() and stamp.exists() and stamp.read_text() == wanted:
        return library
    out_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out_dir) as scratch:
        fresh = Path(scratch) / LIBRARY
        done = subprocess.run([*command, "-o", str(fresh)], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise BuildError(f"the ggml device does not compile:\n{done.stderr.strip()}")
        os.replace(fresh, library)
    stamp.write_text(wanted)
    return library


def build_default() -> Path:
    """Build where the package looks for it."""
    return build(BUILT)


def _compiler() -> list[str]:
    command = [sys.executable, "-m", "ziglang", "cc"]
    if sys.platform == "linux":
        command += ["-target", LINUX_TARGET.format(machine=os.uname().machine)]
    return command


def _fingerprint() -> str:
    digest = hashlib.sha256(repr((FLAGS, LINUX_TARGET)).encode())
    for name in SOURCES + HEADERS:
        digest.update((HERE / name).read_bytes())
    return digest.hexdigest()


if __name__ == "__main__":
    print(build_default())
