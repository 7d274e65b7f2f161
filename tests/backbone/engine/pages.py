"""
Offer weights to the device from different kinds of memory and say what became of them.

A program of its own (`python -m tests.backbone.engine.pages SOCKET FOLDER`), because it loads the library.
Prints JSON: for each kind, whether the memory still holds what it held, how much of it the device handed
back, and how much of it is resident.
"""

import json
import mmap
import sys
from pathlib import Path
from typing import Any

import numpy as np

from backbone.engine.device import Device
from backbone.engine.supervisor import device_library
from backbone.gate.llama_api import library_path
from tests.backbone.engine.graphs import F32, SIZE, WEIGHTS, Ggml, P, _place

BYTES = 1 << 20
SHARED_READ = {"flags": mmap.MAP_SHARED, "prot": mmap.PROT_READ}
BOTH = mmap.PROT_READ | mmap.PROT_WRITE


def main() -> None:
    socket, folder = sys.argv[1], Path(sys.argv[2])
    device = Device(device_library(), library_path(), socket, 5.0)
    g = Ggml()
    tensor = g.new(F32, 64, 64, BYTES // 4 // 64 // 64, name="blk.0.ffn_up_exps.weight")
    swarm = P(g.call("ggml_backend_dev_init", P(g.call("ggml_backend_dev_by_name", b"Swarm")), None))
    _place(g, swarm, [tensor], WEIGHTS)
    report = {}
    for kind, memory in _kinds(folder).items():
        held = np.frombuffer(memory, np.uint8)
        before = held.copy()  # reads every page: all are resident now
        released = device.stats()["released_bytes"]
        address = P(held.ctypes.data)
        g.call("ggml_backend_tensor_set", tensor, address, SIZE(0), SIZE(BYTES), result=None)
        report[kind] = {
            "resident": _resident(held.ctypes.data),
            "released": device.stats()["released_bytes"] - released,
            "unchanged": bool(np.array_equal(held, before)),
        }
    print(json.dumps(report))


def _kinds(folder: Path) -> dict[str, Any]:
    """Each BYTES long, full of one byte that no file has where the page is private."""
    paths = {name: folder / name for name in ("read", "written", "copied")}
    for path in paths.values():
        path.write_bytes(b"f" * BYTES)
    files = {name: path.open("r+b") for name, path in paths.items()}
    kinds = {
        "a file, shared": mmap.mmap(files["read"].fileno(), BYTES, **SHARED_READ),
        "a file, shared and written to": mmap.mmap(files["written"].fileno(), BYTES, mmap.MAP_SHARED, BOTH),
        "a file, private and written to": mmap.mmap(files["copied"].fileno(), BYTES, mmap.MAP_PRIVATE, BOTH),
        "anonymous": mmap.mmap(-1, BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, BOTH),
    }
    for kind, memory in kinds.items():
        if kind != "a file, shared":
            memory.write(b"m" * BYTES)
    return kinds


def _resident(address: int) -> int:
    """How much of this memory is mapped to pages, from /proc/self/pagemap: one word per page, its top bit."""
    with Path("/proc/self/pagemap").open("rb") as file:
        file.seek(8 * (address // mmap.PAGESIZE))
        words = np.frombuffer(file.read(8 * (BYTES // mmap.PAGESIZE)), np.uint64)
    return mmap.PAGESIZE * int((words >> np.uint64(63)).sum())


if __name__ == "__main__":
    main()
