"""
Build the wheel of codec and kernel for Pyodide with pyodide-build, offline: `python wasm/pyodide/build.py`.

pyodide-build wants two things from the net: a cross-build environment and Emscripten. The first is made here
from the npm package `pyodide` alone (its lock file knows the versions, its standard library the sysconfig
data); the second is `emcc` beside this file. That suffices for a side module without libc, which the kernel
is. The wheel lies in relay/_built afterwards, where the relay looks for it.
"""

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from types import ModuleType

ROOM = Path(__file__).resolve().parent
ROOT = ROOM.parent.parent
NPM = ROOM / "node_modules" / "pyodide"
OUT = ROOT / "relay" / "_built"
WHEEL = "expertswarm_verify-*-pyemscripten_*_wasm32.whl"
STAMP = ".pyodide-stamp"  # hash of all that goes into the wheel
WIRE = ("close.py", "errors.py", "frames.py")  # of relay/wire, byte for byte: they need no numpy
SYSCONFIG = "_sysconfigdata__emscripten_wasm32-emscripten"


class BuildError(Exception):
    """The wheel was not built; the message says what to do."""


def cross_build_environment(npm: Path, out: Path) -> Path:
    """Lay out what pyodide-build takes for a cross-build environment; return the folder to name to it."""
    info = json.loads((npm / "pyodide-lock.json").read_text())["info"]
    version = json.loads((npm / "package.json").read_text())["version"]
    major, minor, micro = info["python"].split(".")
    env = out / version
    root = env / "xbuildenv" / "pyodide-root"
    install = root / "cpython" / "installs" / f"python-{info['python']}"
    include = install / "include" / f"python{major}.{minor}"
    for folder in (
        root / "dist",
        env / "xbuildenv" / "site-packages-extras",
        install / "sysconfigdata",
        include,
    ):
        folder.mkdir(parents=True)
    shutil.copy(npm / "pyodide-lock.json", root / "dist")
    (env / "xbuildenv" / "requirements.txt").touch()
    with zipfile.ZipFile(npm / "python_stdlib.zip") as stdlib:
        (install / "sysconfigdata" / f"{SYSCONFIG}.py").write_bytes(stdlib.read(f"{SYSCONFIG}.py"))
    variables = {
        "PYODIDE_VERSION": version,
        "PYODIDE_ABI_VERSION": info["abi_version"],
        "PYODIDE_EMSCRIPTEN_VERSION": info["platform"].removeprefix("emscripten_").replace("_", "."),
        "PYVERSION": info["python"],
        "PYMAJOR": major,
        "PYMINOR": minor,
        "PYMICRO": micro,
        "PLATFORM_TRIPLET": "wasm32-emscripten",
        "CPYTHONINSTALL": install,
        "TARGETINSTALLDIR": install,
        "PYTHONINCLUDE": include,
        "SYSCONFIG_NAME": SYSCONFIG,
        "SYSCONFIGDATA_DIR": install / "sysconfigdata",
        "CFLAGS_BASE": "",
        "CXXFLAGS_BASE": "",
        "LDFLAGS_BASE": "",
        "PIP_CONSTRAINT": "",
    }
    lines = [f"export {name}={value}\n" for name, value in variables.items()]
    lines.append("export PYODIDE_ROOT ?= .\n.output_vars:\n\tset\n")
    (root / "Makefile.envs").write_text("".join(lines))
    (env / ".installed").touch()
    (env / ".build-python-version").write_text(f"{sys.version_info.major}.{sys.version_info.minor}")
    (out / "xbuildenv").symlink_to(env)
    return out


def _kernel_build() -> ModuleType:
    """wasm/build.py, which has the name of this file."""
    spec = importlib.util.spec_from_file_location("expert_kernel_build", ROOM.parent / "build.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


def stage(project: Path) -> None:
    """Copy the project, the C sources and the flags of the plain WASM build, and the codec."""
    native = _kernel_build()  # the flags that keep the bits are its

    shutil.copytree(ROOM / "project", project, ignore=shutil.ignore_patterns("__pycache__"))
    kernel = project / "kernel"
    for source in [*ROOM.parent.glob("*.[ch]"), *ROOM.parent.glob("*/*.[ch]")]:
        target = kernel / source.relative_to(ROOM.parent)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, target)
    shutil.copy(ROOM.parent / "hashes.txt", kernel)
    (kernel / "flags.txt").write_text(" ".join([*native.COMMON, f"-mcpu={native.WASM_CPU}"]))
    wire = project / "expertswarm_verify" / "wire"
    wire.mkdir()
    (wire / "__init__.py").write_text('"""Modules of relay/wire, as they stand there."""\n')
    for name in WIRE:
        text = (ROOT / "relay" / "wire" / name).read_text()
        (wire / name).write_text(text.replace("from relay.wire.", "from expertswarm_verify.wire."))


def build(out: Path = OUT, npm: Path = NPM) -> Path:
    """
    Build the wheel into `out`, in place of an older one; return its path. Does nothing when it is up to date.

    Raises:
        BuildError: a tool is missing or refused.
    """
    if not (npm / "pyodide-lock.json").is_file():
        raise BuildError(f"no npm package pyodide in {npm.parent}: run `npm ci` in {npm.parent.parent}")
    bin_folder = Path(sys.executable).parent
    if not (bin_folder / "pyodide").is_file():
        raise BuildError("pyodide-build is missing: pip install 'expertswarm[dev]'")
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        stage(place / "project")
        stamp = _stamp(place / "project", npm)
        known = out / STAMP
        if known.is_file() and known.read_text() == stamp and (found := list(out.glob(WHEEL))):
            return found[0]
        environment = os.environ | {
            "PATH": os.pathsep.join([str(ROOM), str(bin_folder), os.environ["PATH"]]),
            "PYODIDE_XBUILDENV_PATH": str(cross_build_environment(npm, place / "xbuildenv")),
            "SKIP_EMSCRIPTEN_VERSION_CHECK": "1",
            "PYODIDE_SKIP_EMSCRIPTEN_INSTALL": "1",
            "EXPERTSWARM_PYTHON": sys.executable,
        }
        command = [
            "pyodide",
            "build",
            "project",
            "--no-isolation",
            "--exports",
            "whole_archive",
            "-o",
            "dist",
        ]
        done = subprocess.run(
            command, cwd=place, env=environment, capture_output=True, text=True, check=False
        )
        wheels = list((place / "dist").glob(WHEEL)) if done.returncode == 0 else []
        if not wheels:
            raise BuildError(f"pyodide build failed:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
        out.mkdir(parents=True, exist_ok=True)
        for old in out.glob(WHEEL):
            old.unlink()
        made = Path(shutil.copy(wheels[0], out))
        known.write_text(stamp)
        return made


def _stamp(project: Path, npm: Path) -> str:
    """Hash everything that decides the wheel."""
    digest = hashlib.sha256()
    for path in [npm / "package.json", ROOM / "emcc", Path(__file__), *sorted(project.rglob("*"))]:
        if path.is_file():
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


if __name__ == "__main__":
    try:
        made = build()
    except BuildError as exc:
        print(exc, file=sys.stderr)
        sys.exit(1)
    print(f"{made} {made.stat().st_size:,} bytes")
