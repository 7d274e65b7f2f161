"""
Keep slices on disk between runs, by their SHA-256: bounded, least recently used first to go.

Layout: `<folder>/<first two digits>/<hash>`, and `<hash>.part` for the first bytes of a download that broke
off. Files appear by rename, so that several nodes may share a folder; what was read is hashed before it is
used, for disks rot and anybody may write there. Nothing here is ever needed: a folder that is full, gone or
read-only costs downloads, and is named once. Blocks; call it from a thread.
"""

import hashlib
import logging
import os
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import NamedTemporaryFile
from time import monotonic

log = logging.getLogger(__name__)

_NAME = re.compile(r"[0-9a-f]{64}")
PART = ".part"
REST_S = 60.0  # after a write that failed
FILL = 0.9  # eviction goes on to so much of the limit


def default_cache_dir(environment: Mapping[str, str]) -> Path:
    """Give the place in this user's XDG cache folder."""
    home = Path(environment.get("HOME", "."))
    return Path(environment.get("XDG_CACHE_HOME") or home / ".cache") / "expertswarm" / "node-slices"


class SliceDisk:
    """The folder. `trouble` says why nothing is written at the moment."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self.folder = folder
        self.max_bytes = max_bytes
        self.trouble = ""
        self._rests_until = 0.0
        self._lock = threading.Lock()  # guards the two above and the two below
        found = sorted(self._files())
        self._size_bytes = sum(size for _, _, size in found)
        self._kept = {path.name: None for _, path, _ in found if _NAME.fullmatch(path.name)}  # newest last

    def inventory(self, most: int) -> tuple[str, ...]:
        """Name whole slices that are here as far as we know, the most recently used first. Does not block."""
        with self._lock:
            return tuple(reversed(self._kept))[:most]

    def read(self, slice_id: str) -> bytes | None:
        """Return the bytes of a slice, hashed just now; what is not that slice is removed."""
        path = self._path(slice_id)
        try:
            data = path.read_bytes()
            if hashlib.sha256(data).hexdigest() != slice_id:
                log.warning("%s is not what its name says; it is fetched again", path)
                self._forget(slice_id)
                path.unlink(missing_ok=True)
                return None
            os.utime(path)
        except OSError:
            self._forget(slice_id)
            return None
        return data

    def _forget(self, slice_id: str) -> None:
        with self._lock:
            self._kept.pop(slice_id, None)

    def read_part(self, slice_id: str) -> bytes:
        """Return what there is of a download that broke off, and forget it here."""
        path = self._path(slice_id + PART)
        try:
            data = path.read_bytes()
            path.unlink()
        except OSError:
            return b""
        return data

    def write(self, slice_id: str, data: bytes | bytearray) -> None:
        """Keep a slice; its bytes were checked by the caller."""
        if self._write(slice_id, data):
            with self._lock:
                self._kept[slice_id] = None

    def write_part(self, slice_id: str, data: bytes | bytearray) -> None:
        """Keep the first bytes of a slice."""
        self._write(slice_id + PART, data)

    def _write(self, name: str, data: bytes | bytearray) -> bool:
        if len(data) > self.max_bytes or monotonic() < self._rests_until:
            return False
        path = self._path(name)
        temporary = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with NamedTemporaryFile(dir=path.parent, prefix="new-", delete=False) as file:
                temporary = Path(file.name)
                file.write(data)
            temporary.replace(path)
        except OSError as exc:
            if temporary is not None:
                with suppress(OSError):
                    temporary.unlink(missing_ok=True)
            with self._lock:
                if not self.trouble:
                    log.warning("slices are not kept on disk: %s", exc)
                self.trouble, self._rests_until = str(exc), monotonic() + REST_S
            return False
        with self._lock:
            self.trouble = ""
            self._size_bytes += len(data)
            full = self._size_bytes > self.max_bytes
        if full:
            self._evict()
        return True

    def _evict(self) -> None:
        """Remove what was used least recently; what others wrote and removed is counted anew."""
        with self._lock:
            files = sorted(self._files())
            size_bytes = sum(size for _, _, size in files)
            for _, path, size in files:
                if size_bytes <= FILL * self.max_bytes:
                    break
                with suppress(OSError):
                    path.unlink(missing_ok=True)
                    size_bytes -= size
                    self._kept.pop(path.name, None)
            self._size_bytes = size_bytes

    def _path(self, name: str) -> Path:
        return self.folder / name[:2] / name

    def _files(self) -> Iterator[tuple[float, Path, int]]:
        """Give when each file was used last, where it is, and its size."""
        with suppress(OSError):
            for path in self.folder.glob("??/*"):
                with suppress(OSError):
                    status = path.stat()
                    yield status.st_mtime, path, status.st_size
