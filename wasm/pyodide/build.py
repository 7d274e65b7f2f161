"""
Build the wheel of codec and kernel for Pyodide: `python wasm/pyodide/build.py`. hatch_build.py does it, too.

The kernel becomes a side module without libc: objects and link by clang and wasm-ld of the package `ziglang`,
which compiles all the rest as well. Neither Emscripten nor pyodide-build is needed for that, so the wheel is
part of every installation. It lies in relay/_built afterwards, where the relay looks for it.
"""

import base64
import hashlib
import importlib.util
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from types import ModuleType

ROOM = Path(__file__).resolve().parent
ROOT = ROOM.parent.parent
OUT = ROOT / "relay" / "_built"
VERSION = "0.1.0"
TAG = "py3-none-pyemscripten_2025_0_wasm32"  # PEP 783; reached through ctypes, so any Python of it will do
NAME = "expertswarm_verify"
WHEEL = f"{NAME}-*-pyemscripten_*_wasm32.whl"
STAMP = ".pyodide-stamp"  # hash of all that goes into the wheel
WIRE = ("close", "frames")  # of relay/wire, with what they import from there: as they stand, without numpy
ZIG = (sys.executable, "-m", "ziglang")
COMPILE = ("cc", "-target", "wasm32-emscripten", "-ffreestanding", "-fPIC", "-c")
LINK = ("wasm-ld", "-shared", "--experimental-pic", "--strip-debug", "--export-dynamic", "--whole-archive")
EPOCH = (1980, 1, 1, 0, 0, 0)  # the same sources give the same wheel
METADATA = f"""Metadata-Version: 2.1
Name: expertswarm-verify
Version: {VERSION}
Summary: The codec and the expert kernel of expertswarm, to recompute a recorded call
Requires-Python: >=3.12
License: Apache-2.0
"""


class BuildError(Exception):
    """The wheel was not built; the message says why."""


def _kernel_build() -> ModuleType:
    """wasm/build.py, which has the name of this file."""
    spec = importlib.util.spec_from_file_location("expert_kernel_build", ROOM.parent / "build.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


def package() -> dict[str, bytes]:
    """Give the Python files of the wheel by name: the package, and the codec as it stands in relay/wire."""
    here = sorted((ROOM / "project" / NAME).glob("*.py"))
    files = {f"{NAME}/{path.name}": path.read_bytes() for path in here}
    files[f"{NAME}/wire/__init__.py"] = b'"""Modules of relay/wire, as they stand there."""\n'
    names = list(WIRE)
    for name in names:  # grows
        text = (ROOT / "relay" / "wire" / f"{name}.py").read_text()
        names += [new for new in re.findall(r"^from relay\.wire\.(\w+) ", text, re.M) if new not in names]
        files[f"{NAME}/wire/{name}.py"] = text.replace("from relay.wire.", f"from {NAME}.wire.").encode()
    return files


def stage(folder: Path) -> None:
    """Lay the package out in a folder, for a Python that is not Pyodide."""
    for name, data in package().items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def build(out: Path = OUT) -> Path:
    """
    Build the wheel into `out`, in place of an older one; return its path. Does nothing when it is up to date.

    Raises:
        BuildError: the compiler refused.
    """
    native, files = _kernel_build(), package()  # the flags that keep the bits are the kernel's own
    flags = (*native.COMMON, f"-mcpu={native.WASM_CPU}")
    stamp = _stamp(flags, files, native.sources())
    known, path = out / STAMP, out / f"{NAME}-{VERSION}-{TAG}.whl"
    if known.is_file() and known.read_text() == stamp and path.is_file():
        return path
    files[f"{NAME}/libexpert.so"] = _side_module(flags, native.sources())
    out.mkdir(parents=True, exist_ok=True)
    for old in out.glob(WHEEL):
        old.unlink()
    _pack(path, files)
    known.write_text(stamp)
    return path


def _side_module(flags: tuple[str, ...], sources: list[Path]) -> bytes:
    with tempfile.TemporaryDirectory() as scratch:
        objects = []
        for number, source in enumerate(sources):
            objects.append(f"{scratch}/{number}.o")
            _run(*COMPILE, *flags, str(source), "-o", objects[-1])
        _run(*LINK, *objects, "-o", f"{scratch}/libexpert.so")
        return Path(scratch, "libexpert.so").read_bytes()


def _run(*command: str) -> None:
    done = subprocess.run([*ZIG, *command], capture_output=True, text=True, cwd=ROOM.parent, check=False)
    if done.returncode:
        raise BuildError(f"the kernel for Pyodide does not compile:\n{done.stderr.strip()[-3000:]}")


def _pack(path: Path, files: dict[str, bytes]) -> None:
    """Write a wheel (PEP 427), whole or not at all."""
    info = f"{NAME}-{VERSION}.dist-info"
    wheel = f"Wheel-Version: 1.0\nGenerator: expertswarm\nRoot-Is-Purelib: false\nTag: {TAG}\n"
    files = files | {f"{info}/METADATA": METADATA.encode(), f"{info}/WHEEL": wheel.encode()}
    record = [f"{name},sha256={_digest(data)},{len(data)}" for name, data in files.items()]
    files[f"{info}/RECORD"] = "\n".join([*record, f"{info}/RECORD,,", ""]).encode()
    scratch = path.with_suffix(".part")
    with zipfile.ZipFile(scratch, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(zipfile.ZipInfo(name, EPOCH), data, zipfile.ZIP_DEFLATED)
    scratch.replace(path)


def _digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def _stamp(flags: tuple[str, ...], files: dict[str, bytes], sources: list[Path]) -> str:
    """Hash everything that decides the wheel."""
    digest = hashlib.sha256("\0".join([*COMPILE, *LINK, *flags, TAG, METADATA]).encode())
    headers = sorted(ROOM.parent.rglob("*.h"))
    kernel = {str(path.relative_to(ROOM.parent)): path.read_bytes() for path in [*sources, *headers]}
    kernel["hashes.txt"] = (ROOM.parent / "hashes.txt").read_bytes()
    for name, data in sorted((files | kernel).items()):
        digest.update(name.encode() + b"\0" + data)
    return digest.hexdigest()


def build_default() -> None:
    """Build it where the relay looks for it."""
    build()


if __name__ == "__main__":
    try:
        made = build()
    except BuildError as exc:
        print(exc, file=sys.stderr)
        sys.exit(1)
    print(f"{made} {made.stat().st_size:,} bytes")
