"""Who may import whom: the rooms stay apart, and what is pure stays pure."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
# What a backbone or node may use of the relay's package; assets: where the page's WGSL stands.
SHARED = ("relay.wire", "relay.nat", "relay.doctor", "relay.assets", "relay.program", "relay.door")
PURE = (  # no sockets, clocks, loops or threads in these
    "relay/wire",
    "relay/pool",
    "relay/bucket.py",
    "relay/admission.py",
    "relay/forwarding/rates.py",
    "relay/nat/paths.py",
    "relay/nat/candidates.py",
    "relay/nat/stun.py",
    "backbone/experts/round.py",
    "backbone/experts/dispatch.py",
    "backbone/experts/deadlines.py",
    "backbone/experts/planner.py",
    "backbone/experts/standing.py",
    "backbone/experts/asked.py",
    "backbone/experts/bounds.py",
    "backbone/experts/trial.py",
    "backbone/experts/combine.py",
    "backbone/experts/nodes.py",
    "backbone/experts/tally.py",
    "backbone/engine/link.py",
    "backbone/gate/compare.py",
    "backbone/node/machine.py",
)
DRIVERS = {"asyncio", "socket", "threading", "time", "random", "subprocess", "httpx", "websockets", "uvicorn"}


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            if node.module in ("relay", "backbone"):
                yield from (f"{node.module}.{alias.name}" for alias in node.names)
            else:
                yield node.module


def modules(place: str) -> list[Path]:
    path = ROOT / place
    found = [path] if path.suffix == ".py" else sorted(path.rglob("*.py"))
    assert found and all(module.exists() for module in found), f"{place} is not there any more"
    return found


def test_the_relay_never_imports_the_backbone() -> None:
    for module in modules("relay"):
        assert not [name for name in imports(module) if name.split(".")[0] == "backbone"], module


def test_the_backbone_takes_of_the_relay_only_what_is_shared() -> None:
    for module in modules("backbone"):
        taken = [name for name in imports(module) if name.split(".")[0] == "relay"]
        strange = [n for n in taken if n != "relay.__version__" and not n.startswith(SHARED)]
        assert not strange, f"{module}: {strange}"


def test_the_wire_needs_only_the_standard_library_and_numpy_and_the_seal_its_primitives() -> None:
    for module in modules("relay/wire"):
        roots = {name.split(".")[0] for name in imports(module)}
        primitives = {"cryptography"} if module.name == "seal.py" else set()
        assert roots <= set(sys.stdlib_module_names) | {"numpy", "relay"} | primitives, module


def test_the_relay_never_touches_a_seal() -> None:
    for module in modules("relay"):
        if module.parent.name != "wire":
            assert not {"relay.wire.seal", "relay.wire.sealing"} & set(imports(module)), module


def test_what_decides_touches_no_socket_clock_or_thread() -> None:
    for place in PURE:
        for module in modules(place):
            assert not {name.split(".")[0] for name in imports(module)} & DRIVERS, module


def test_only_tests_use_the_fakes() -> None:
    for place in ("relay", "backbone", "bench"):
        for module in modules(place):
            assert not [name for name in imports(module) if name.startswith("tests")], module
