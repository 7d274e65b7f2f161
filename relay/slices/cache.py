"""
Keep slices on disk by their SHA-256, bounded, least recently used first to go.

Layout: `<folder>/<first two digits>/<hash>`; files appear by rename, so what is there is complete. A file
found at start is hashed before it is served for the first time: disks rot, and a node would refuse it anyway.
Blocking; the endpoint calls it from threads where bytes are moved.
"""

import hashlib
import os
import tempfile
import threading
from collections import OrderedDict
from pathlib import Path
from typing import BinaryIO

from relay.errors import SliceCorrupt, SliceTooLarge

_READ_BYTES = 1 << 20


class SliceCache:
    """The folder and an index of it in memory. Safe to use from several threads."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self.folder = folder
        self.max_bytes = max_bytes
        self.size_bytes = 0
        self._lock = threading.Lock()  # guards the two below and size_bytes
        self._sizes: OrderedDict[str, int] = OrderedDict()  # least recently used first
        self._unverified: set[str] = set()
        folder.mkdir(parents=True, exist_ok=True)
        self._scan()

    def __contains__(self, slice_id: str) -> bool:
        with self._lock:
            return slice_id in self._sizes

    def __len__(self) -> int:
        with self._lock:
            return len(self._sizes)

    def open(self, slice_id: str) -> tuple[BinaryIO, int] | None:
        """Return an open file and its size, or None; the file stays readable even when it is evicted."""
        with self._lock:
            if slice_id not in self._sizes:
                return None
            self._sizes.move_to_end(slice_id)
            unverified = slice_id in self._unverified
        try:
            file = self._path(slice_id).open("rb")
        except OSError:
            self._forget(slice_id)
            return None
        if unverified:
            if hashlib.file_digest(file, "sha256").hexdigest() != slice_id:
                file.close()
                self._forget(slice_id)
                return None
            file.seek(0)
            with self._lock:
                self._unverified.discard(slice_id)
        return file, os.fstat(file.fileno()).st_size

    def writer(self, slice_id: str, max_bytes: int) -> "SliceWriter":
        """Begin to store a slice of at most `max_bytes`."""
        limit = min(max_bytes, self.max_bytes)
        folder = self._path(slice_id).parent
        folder.mkdir(exist_ok=True)
        return SliceWriter(self, slice_id, limit, folder)

    def _path(self, slice_id: str) -> Path:
        return self.folder / slice_id[:2] / slice_id

    def _scan(self) -> None:
        found = []
        for path in self.folder.glob("??/*"):
            if path.name.endswith(SliceWriter.SUFFIX):
                path.unlink(missing_ok=True)  # an upload that a crash cut off
            elif len(path.name) == 64:
                status = path.stat()
                found.append((status.st_mtime_ns, path.name, status.st_size))
        for _, name, size in sorted(found):
            self._sizes[name] = size
            self._unverified.add(name)
            self.size_bytes += size
        self._evict()

    def _stored(self, slice_id: str, temporary: Path, size_bytes: int) -> None:
        temporary.replace(self._path(slice_id))
        with self._lock:
            self.size_bytes += size_bytes - self._sizes.get(slice_id, 0)
            self._sizes[slice_id] = size_bytes
            self._sizes.move_to_end(slice_id)
            self._unverified.discard(slice_id)
        self._evict()

    def _evict(self) -> None:
        while True:
            with self._lock:
                if self.size_bytes <= self.max_bytes or len(self._sizes) <= 1:
                    return
                oldest = next(iter(self._sizes))
            self._forget(oldest)

    def _forget(self, slice_id: str) -> None:
        with self._lock:
            self.size_bytes -= self._sizes.pop(slice_id, 0)
            self._unverified.discard(slice_id)
        self._path(slice_id).unlink(missing_ok=True)


class SliceWriter:
    """One upload: hashed while it is written, stored only if the hash is the name. A context manager."""

    SUFFIX = ".part"

    def __init__(self, cache: SliceCache, slice_id: str, limit_bytes: int, folder: Path) -> None:
        self.size_bytes = 0
        self._cache = cache
        self._slice_id = slice_id
        self._limit_bytes = limit_bytes
        self._hash = hashlib.sha256()
        self._file = tempfile.NamedTemporaryFile(  # noqa: SIM115 - closed in commit or __exit__
            dir=folder, suffix=self.SUFFIX, delete=False
        )

    def __enter__(self) -> "SliceWriter":
        return self

    def __exit__(self, *exc: object) -> None:
        self._file.close()
        Path(self._file.name).unlink(missing_ok=True)

    def write(self, data: bytes) -> None:
        """Add bytes; raises SliceTooLarge beyond the limit, before they are written."""
        self.size_bytes += len(data)
        if self.size_bytes > self._limit_bytes:
            raise SliceTooLarge(self._slice_id, self._limit_bytes)
        self._hash.update(data)
        self._file.write(data)

    def commit(self) -> None:
        """Store the slice; raises SliceCorrupt when the bytes are not what the name says."""
        found = self._hash.hexdigest()
        if found != self._slice_id:
            raise SliceCorrupt(self._slice_id, found)
        self._file.close()
        self._cache._stored(self._slice_id, Path(self._file.name), self.size_bytes)
