"""
Build the wheel with pyodide-build, offline: the judge of what build.py makes without it.

pyodide-build wants two things from the net: a cross-build environment and Emscripten. The first is made here
from the npm package `pyodide` alone (its lock file knows the versions, its standard library the sysconfig
data); the second is `emcc` beside this file. That suffices for a side module without libc, which the kernel
is. What comes out must have the same name, and so the platform tag of that Pyodide, the same modules, and a
library that gives the same bytes.
"""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType

ROOM = Path(__file__).resolve().parent
NPM = ROOM / "node_modules" / "pyodide"
SYSCONFIG = "_sysconfigdata__emscripten_wasm32-emscripten"
COMMAND = ("pyodide", "build", "project", "--no-isolation", "--exports", "whole_archive", "-o", "dist")


class RefereeError(Exception):
    """pyodide-build made no wheel; the message says why."""


def build(scratch: Path, npm: Path = NPM) -> Path:
    """
    Build in an empty folder and return the wheel's path.

    Raises:
        RefereeError: a tool is missing or refused.
    """
    bin_folder = Path(sys.executable).parent
    if not (bin_folder / "pyodide").is_file():
        raise RefereeError("pyodide-build is missing: pip install 'expertswarm[dev]'")
    _stage(scratch / "project")
    environment = os.environ | {
        "PATH": os.pathsep.join([str(ROOM), str(bin_folder), os.environ["PATH"]]),
        "PYODIDE_XBUILDENV_PATH": str(_cross_build_environment(npm, scratch / "xbuildenv")),
        "SKIP_EMSCRIPTEN_VERSION_CHECK": "1",
        "PYODIDE_SKIP_EMSCRIPTEN_INSTALL": "1",
        "EXPERTSWARM_PYTHON": sys.executable,
    }
    done = subprocess.run(
        COMMAND, cwd=scratch, env=environment, capture_output=True, text=True, check=False, timeout=300
    )
    wheels = list((scratch / "dist").glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        raise RefereeError(f"pyodide build failed:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    return wheels[0]


def _stage(project: Path) -> None:
    """Lay out what setup.py wants: the package as build.py makes it, the C sources, and their flags."""
    ours = _load(ROOM / "build.py")
    native = ours._kernel_build()  # the flags that keep the bits are the kernel's own
    ours.stage(project)
    for name in ("pyproject.toml", "setup.py"):
        shutil.copy(ROOM / "project" / name, project)
    kernel = project / "kernel"
    for source in [*ROOM.parent.glob("*.[ch]"), *ROOM.parent.glob("*/*.[ch]")]:
        target = kernel / source.relative_to(ROOM.parent)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, target)
    shutil.copy(ROOM.parent / "hashes.txt", kernel)
    (kernel / "flags.txt").write_text(" ".join([*native.COMMON, f"-mcpu={native.WASM_CPU}"]))


def _cross_build_environment(npm: Path, out: Path) -> Path:
    """Lay out what pyodide-build takes for a cross-build environment; return the folder to name to it."""
    info = json.loads((npm / "pyodide-lock.json").read_text())["info"]
    version = json.loads((npm / "package.json").read_text())["version"]
    major, minor, micro = info["python"].split(".")
    env = out / version
    root = env / "xbuildenv" / "pyodide-root"
    install = root / "cpython" / "installs" / f"python-{info['python']}"
    include = install / "include" / f"python{major}.{minor}"
    extras = env / "xbuildenv" / "site-packages-extras"
    for folder in (root / "dist", extras, install / "sysconfigdata", include):
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


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("pyodide_wheel_build", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
