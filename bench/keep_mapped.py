"""
Keep the memory of some processes mapped by the host, for measurements in virtual machines.

Some hosts take their guests' memory out of the second-level page table every few hundred milliseconds, to see
what is used. Whoever touches it next waits: here 34 µs for each region of 2 MB, so that work of 18 µs
takes 2 ms after a pause of 40 ms and 13 ms after half a second, in user time, on an idle machine. No lane can
help that. So a process at idle priority reads one byte of each region that the measured processes use, again
and again, wherever their pages lie (/proc/PID/pagemap; root). `after_pause_us` says what is at stake.

    keep_mapped.py PREFIX       all processes in network namespaces whose name begins so, until ended
"""

import contextlib
import ctypes
import mmap
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

PAGE = mmap.PAGESIZE
REGION_PAGES = (2 << 20) // PAGE
LOOK_S, PAUSE_S = 1.0, 0.002
MAX_IOV = 128  # of one process_vm_readv, which nothing interrupts: a tenth of a millisecond


class _Iovec(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("size", ctypes.c_size_t)]


_libc = ctypes.CDLL(None, use_errno=True)
_byte = ctypes.create_string_buffer(1)


class Sweep:
    """One byte of each region: iovecs by process."""

    def __init__(self, pids: list[int]) -> None:
        self.seen: set[int] = set()
        self.calls: list[tuple[int, object, object, int]] = []
        for pid in pids:
            with contextlib.suppress(OSError):
                self._add(pid)

    def _add(self, pid: int) -> None:
        addresses: list[int] = []
        with open(f"/proc/{pid}/pagemap", "rb", buffering=0) as pagemap:
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                start, end = (int(part, 16) for part in line.split(" ", 1)[0].split("-"))
                if "[v" in line or line.split(" ", 2)[1][0] != "r" or end - start > 1 << 30:
                    continue  # vvar and the like, guard pages, space that is only reserved
                raw = os.pread(pagemap.fileno(), (end - start) // PAGE * 8, start // PAGE * 8)
                entries = np.frombuffer(raw, "<u8")
                present = np.flatnonzero(entries >> 63)
                regions = (entries[present] & ((1 << 55) - 1)) // REGION_PAGES
                numbers, places = np.unique(regions, return_index=True)
                for region, at in zip(numbers.tolist(), places.tolist(), strict=True):
                    if region not in self.seen:
                        self.seen.add(region)
                        addresses.append(start + int(present[at]) * PAGE)
        for first in range(0, len(addresses), MAX_IOV):
            chosen = addresses[first : first + MAX_IOV]
            remote = (_Iovec * len(chosen))(*((address, 1) for address in chosen))
            local = (_Iovec * len(chosen))(*((ctypes.addressof(_byte), 1) for _ in chosen))
            self.calls.append((pid, local, remote, len(chosen)))

    def run(self) -> None:
        for pid, local, remote, count in self.calls:
            _libc.process_vm_readv(pid, local, count, remote, count, 0)


def in_namespaces(prefix: str) -> list[int]:
    """Processes in the boxes of one laboratory."""
    found = []
    for path in Path("/run/netns").glob(prefix + "*"):
        done = subprocess.run(["ip", "netns", "pids", path.name], capture_output=True, text=True, check=False)
        found += [int(pid) for pid in done.stdout.split()]
    return found


def keep(prefix: str) -> None:
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    while True:
        sweep = Sweep(in_namespaces(prefix))
        give_up = time.monotonic() + LOOK_S
        while time.monotonic() < give_up:
            sweep.run()
            time.sleep(PAUSE_S)


@contextlib.contextmanager
def kept(prefix: str) -> Iterator[None]:
    """Keep the processes of one laboratory mapped."""
    process = subprocess.Popen([sys.executable, __file__, prefix])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def after_pause_us(pause_s: float, pages: int = 256) -> float:
    """What touching so many pages takes after a pause, at the median of a few."""
    memory = mmap.mmap(-1, pages * PAGE)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    memory[:] = bytes(len(memory))
    took = []
    for _ in range(7):
        time.sleep(pause_s)
        started = time.perf_counter()
        sum(memory[at] for at in range(0, len(memory), PAGE))
        took.append(time.perf_counter() - started)
    return 1e6 * sorted(took)[len(took) // 2]


if __name__ == "__main__":
    keep(sys.argv[1])
