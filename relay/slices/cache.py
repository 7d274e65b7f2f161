"""
Keep slices on disk by their SHA-256, bounded, least recently used first to go.

Layout: `<folder>/<first two digits>/<hash>`; files appear by rename, so what is there is complete. A file is
hashed before it is served, once a minute at most: disks rot, and a node would refuse it anyway. What the disk
does not take (full, read-only) is kept in memory, bounded too, and said once a minute.
Blocking; the endpoint calls it from threads where bytes are moved.
"""

import errno
import hashlib
import io
import logging
import os
import tempfile
import threading
from collections import OrderedDict
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import BinaryIO

from relay.errors import SliceCorrupt, SliceTooLarge, StorageFull
from relay.program.complaints import Complaints

log = logging.getLogger(__name__)

MEMORY_BYTES = 256 << 20  # for what the disk does not take: a few slices of the largest models
TRUST_S = 60.0  # a file that hashed to its name and has not been touched is served unread for so long
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)

type Signature = tuple[int, int, int, int]  # of a file: whoever writes to it changes one of them


class SliceCache:
    """The folder and an index of it in memory. Safe to use from several threads."""

    def __init__(self, folder: Path, max_bytes: int, memory_bytes: int = MEMORY_BYTES) -> None:
        self.folder = folder
        self.max_bytes = max_bytes
        self.size_bytes = 0  # on disk
        self.memory = Spare(memory_bytes)
        self.complaints = Complaints(log)
        self._lock = threading.Lock()  # guards the two below and size_bytes
        self._sizes: OrderedDict[str, int] = OrderedDict()  # least recently used first
        self._proven: dict[str, tuple[Signature, float]] = {}  # what hashed to its name, and when
        folder.mkdir(parents=True, exist_ok=True)
        self._scan()

    def __contains__(self, slice_id: str) -> bool:
        with self._lock:
            return slice_id in self._sizes or slice_id in self.memory

    def __len__(self) -> int:
        with self._lock:
            return len(self._sizes) + len(self.memory)

    def open(self, slice_id: str) -> tuple[BinaryIO, int] | None:
        """Return an open file and its size, or None; the file stays readable even when it is evicted."""
        data = self.memory.get(slice_id)
        if data is not None:
            return io.BytesIO(data), len(data)
        with self._lock:
            if slice_id not in self._sizes:
                return None
            self._sizes.move_to_end(slice_id)
            proven = self._proven.get(slice_id)
        try:
            file = self._path(slice_id).open("rb")
        except OSError as exc:
            self.complaints.say("read", f"slices cannot be read in {self.folder}: {exc.strerror}")
            self._forget(slice_id)
            return None
        try:
            return file, self._prove(slice_id, file, proven)
        except (OSError, SliceCorrupt) as exc:
            file.close()
            why = exc.strerror if isinstance(exc, OSError) else exc
            self.complaints.say("damaged", f"in {self.folder}: {why}; it is fetched again", logging.WARNING)
            self._forget(slice_id)
            return None

    def _prove(self, slice_id: str, file: io.BufferedReader, proven: tuple[Signature, float] | None) -> int:
        """Hash an open file unless that was just done; gives its size."""
        now, status = monotonic(), os.fstat(file.fileno())
        signature = (status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        if proven is None or proven[0] != signature or now - proven[1] > TRUST_S:
            found = hashlib.file_digest(file, "sha256").hexdigest()
            if found != slice_id:
                raise SliceCorrupt(slice_id, found)
            file.seek(0)
            with self._lock:
                if slice_id in self._sizes:
                    self._proven[slice_id] = signature, now
        return status.st_size

    def writer(self, slice_id: str, max_bytes: int) -> "SliceWriter":
        """Begin to store a slice of at most `max_bytes`."""
        return SliceWriter(self, slice_id, min(max_bytes, self.max_bytes))

    def make_room(self, needed_bytes: int) -> int:
        """The disk is full before we are: give up the slices used least; says how many bytes that were."""
        freed = 0
        while freed < needed_bytes:
            with self._lock:
                if not self._sizes:
                    break
                oldest, size = next(iter(self._sizes.items()))
            self._forget(oldest)
            freed += size
        return freed

    def path_for(self, slice_id: str) -> Path:
        """Where a slice is to stand; its folder is made."""
        path = self._path(slice_id)
        path.parent.mkdir(exist_ok=True)
        return path

    def stored(self, slice_id: str, size_bytes: int) -> None:
        """A whole slice stands at its place."""
        with self._lock:
            self.size_bytes += size_bytes - self._sizes.get(slice_id, 0)
            self._sizes[slice_id] = size_bytes
            self._sizes.move_to_end(slice_id)
            self._proven.pop(slice_id, None)
        self._evict()

    def _path(self, slice_id: str) -> Path:
        return self.folder / slice_id[:2] / slice_id

    def _scan(self) -> None:
        found = []
        for path in self.folder.glob("??/*"):
            with suppress(OSError):
                if path.name.endswith(SliceWriter.SUFFIX):
                    path.unlink(missing_ok=True)  # an upload that a crash cut off
                elif len(path.name) == 64:
                    status = path.stat()
                    found.append((status.st_mtime_ns, path.name, status.st_size))
        for _, name, size in sorted(found):
            self._sizes[name] = size
            self.size_bytes += size
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
            self._proven.pop(slice_id, None)
        with suppress(OSError):  # a disk that became read-only keeps it; we do not serve it
            self._path(slice_id).unlink(missing_ok=True)


class Spare:
    """Slices in memory, for a disk that takes none: bounded, those under way included."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._lock = threading.Lock()  # guards the three below
        self._held: OrderedDict[str, bytes] = OrderedDict()
        self._held_bytes = 0
        self._reserved_bytes = 0

    def __contains__(self, slice_id: str) -> bool:
        return slice_id in self._held

    def __len__(self) -> int:
        return len(self._held)

    @property
    def size_bytes(self) -> int:
        return self._held_bytes + self._reserved_bytes

    def get(self, slice_id: str) -> bytes | None:
        with self._lock:
            if slice_id in self._held:
                self._held.move_to_end(slice_id)
            return self._held.get(slice_id)

    def reserve(self, size_bytes: int) -> bool:
        """Make room for a slice that is coming, at the cost of those used least; False if it cannot be."""
        with self._lock:
            if self._reserved_bytes + size_bytes > self.max_bytes:
                return False
            while self._held and self.size_bytes + size_bytes > self.max_bytes:
                self._held_bytes -= len(self._held.popitem(last=False)[1])
            self._reserved_bytes += size_bytes
            return True

    def release(self, size_bytes: int) -> None:
        with self._lock:
            self._reserved_bytes -= size_bytes

    def put(self, slice_id: str, data: bytes) -> None:
        """Hold a slice, in room that was reserved for it and is released after this."""
        with self._lock:
            self._held_bytes += len(data) - len(self._held.pop(slice_id, b""))
            self._held[slice_id] = data


class SliceWriter:
    """
    One upload: hashed while it is written, stored only if the hash is the name. A context manager.

    It goes to disk as long as that takes it; then what came so far moves into memory, and the rest follows.
    """

    SUFFIX = ".part"

    def __init__(self, cache: SliceCache, slice_id: str, limit_bytes: int) -> None:
        self.size_bytes = 0
        self._cache = cache
        self._slice_id = slice_id
        self._limit_bytes = limit_bytes
        self._hash = hashlib.sha256()
        self._file: tempfile._TemporaryFileWrapper[bytes] | None = None
        self._memory: bytearray | None = None
        self._reserved_bytes = 0
        self._made_room = False
        try:
            folder = cache.path_for(slice_id).parent
            self._file = tempfile.NamedTemporaryFile(  # noqa: SIM115 - closed in commit or __exit__
                dir=folder, suffix=self.SUFFIX, delete=False, buffering=0
            )
        except OSError as exc:
            self._move_to_memory(exc)

    def __enter__(self) -> "SliceWriter":
        return self

    def __exit__(self, *exc: object) -> None:
        self._drop_file()
        self._cache.memory.release(self._reserved_bytes)
        self._reserved_bytes = 0

    def write(self, data: bytes) -> None:
        """
        Add bytes.

        Raises:
            SliceTooLarge: they are more than was promised; nothing of them was written.
            StorageFull: neither disk nor memory take them.
        """
        self.size_bytes += len(data)
        if self.size_bytes > self._limit_bytes:
            raise SliceTooLarge(self._slice_id, self._limit_bytes)
        self._hash.update(data)
        rest = memoryview(data)
        while rest and self._file is not None:
            try:
                rest = rest[self._file.write(rest) :]
            except OSError as exc:
                if exc.errno in _NO_ROOM and not self._made_room:
                    self._made_room = True  # once: what others fill the disk with is not worth a whole cache
                    if self._cache.make_room(self._limit_bytes):
                        continue
                self._move_to_memory(exc)
        if self._memory is not None:
            self._memory += rest

    def commit(self) -> None:
        """Store the slice; raises SliceCorrupt when the bytes are not what the name says."""
        found = self._hash.hexdigest()
        if found != self._slice_id:
            raise SliceCorrupt(self._slice_id, found)
        if self._file is not None:
            try:
                self._file.close()
                Path(self._file.name).replace(self._cache.path_for(self._slice_id))
            except OSError as exc:
                self._move_to_memory(exc)
            else:
                self._file = None
                self._cache.stored(self._slice_id, self.size_bytes)
        if self._memory is not None:
            self._cache.memory.put(self._slice_id, bytes(self._memory))

    def _move_to_memory(self, exc: OSError) -> None:
        """The disk does not take it: go on in memory with what came so far."""
        cache, why = self._cache, exc.strerror or str(exc)
        kept = cache.memory.reserve(self._limit_bytes)
        cache.complaints.say(
            "write",
            f"slices cannot be kept in {cache.folder}: {why}; "
            + (
                f"meanwhile {cache.memory.max_bytes >> 20} MB of them are kept in memory"
                if kept
                else f"one of {self._limit_bytes} bytes does not fit into memory either and is refused"
            ),
        )
        if not kept:
            self._drop_file()
            raise StorageFull(self._slice_id, why)
        self._reserved_bytes = self._limit_bytes
        try:
            self._memory = bytearray(b"" if self._file is None else Path(self._file.name).read_bytes())
        except OSError as unreadable:
            raise StorageFull(self._slice_id, unreadable.strerror or why) from exc
        finally:
            self._drop_file()

    def _drop_file(self) -> None:
        if self._file is not None:
            with suppress(OSError):
                self._file.close()
            with suppress(OSError):
                Path(self._file.name).unlink(missing_ok=True)
            self._file = None
