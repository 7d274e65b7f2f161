"""Say how much memory this process may still take, as far as the machine tells: Linux and control groups."""

from pathlib import Path

SPARE_BYTES = 64 << 20  # what everything else needs meanwhile


def memory_left(root: Path = Path("/")) -> int | None:
    """Return bytes that can be taken before the system swaps or kills; None: nobody knows."""
    known = [left for left in (_machine_left(root), _group_left(root)) if left is not None]
    return max(0, min(known) - SPARE_BYTES) if known else None


def _machine_left(root: Path) -> int | None:
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):
        return None


def _group_left(root: Path) -> int | None:
    """What the control group (v2) of this process leaves; its page cache can be given back."""
    try:
        group = (root / "proc/self/cgroup").read_text().partition("0::/")[2].strip()
        folder = root / "sys/fs/cgroup" / group
        limit = int((folder / "memory.max").read_text())  # "max": no limit, a ValueError
        used = int((folder / "memory.current").read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return limit - used + int(stat.get("inactive_file", 0))
    except (OSError, ValueError):
        return None
