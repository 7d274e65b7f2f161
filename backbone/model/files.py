"""Put a file in place whole or not at all."""

import glob
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

log = logging.getLogger(__name__)


def kept_if_possible(path: Path, text: str, what: str) -> None:
    """Keep what was worked out in a cache; a disk that does not take it costs the work again, no more."""
    try:
        with written_atomically(path) as scratch:
            scratch.write_text(text)
    except OSError as exc:
        log.warning("%s cannot be kept in %s: %s; the next start works it out again",
                    what, path.parent, exc.strerror or exc)  # fmt: skip


@contextmanager
def written_atomically(path: Path) -> Iterator[Path]:
    """
    Give a name to write to; when the block ends well the file takes its place, else it is removed.

    Two processes may do so at once: the last one wins, and both files were whole. What a process left that
    was killed meanwhile is removed by the next.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    for left in path.parent.glob(f"{glob.escape(path.name)}.*.part"):
        pid = left.name.removesuffix(".part").rpartition(".")[2]
        if pid.isdigit() and not _runs(int(pid)):
            left.unlink(missing_ok=True)
    scratch = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        yield scratch
        os.replace(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass  # somebody else's
    return True
