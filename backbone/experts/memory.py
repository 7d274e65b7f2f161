"""
Memory for packed experts: large stretches of address space on huge pages, handed out in pieces.

An expert of a few MB is read through a thousand pages of 4 KB, and finding these costs more than the
arithmetic, above all in a virtual machine: with pages of 2 MB experts are read twice as fast. A page can only
be huge when 2 MB of it belong together, so experts share arenas instead of having allocations of their own.
Where the system has no huge pages, nothing is lost.
"""

import ctypes
import mmap
import weakref
from collections import deque
from contextlib import suppress
from threading import Lock

HUGE_PAGE = 2 << 20
ARENA_BYTES = 64 << 20  # address space; a page of it takes memory when it is first written
ALIGN = 64


class _Arena:
    """One mapping, and what of it is free: stretches by offset, never two that touch."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        # Shared, as Python maps by default, is another kind of memory, and seldom huge.
        private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
        self._memory = mmap.mmap(-1, size_bytes + HUGE_PAGE, **private)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # a system without them
                self._memory.madvise(mmap.MADV_HUGEPAGE)
        self._view = (ctypes.c_char * 1).from_buffer(self._memory)
        self.address = -(-ctypes.addressof(self._view) // HUGE_PAGE) * HUGE_PAGE
        self._free: dict[int, int] = {0: size_bytes}

    @property
    def is_empty(self) -> bool:
        """Is nothing of it in use?"""
        return self._free.get(0) == self.size_bytes

    def take(self, size_bytes: int) -> int | None:
        """Give the offset of the first free stretch that is large enough."""
        for at in sorted(self._free):
            left = self._free[at] - size_bytes
            if left >= 0:
                del self._free[at]
                if left:
                    self._free[at + size_bytes] = left
                return at
        return None

    def give(self, at: int, size_bytes: int) -> None:
        self._forget(at, at + size_bytes)
        for start, size in list(self._free.items()):
            if start + size == at:
                at, size_bytes = start, size + size_bytes
                del self._free[start]
            elif at + size_bytes == start:
                size_bytes += size
                del self._free[start]
        self._free[at] = size_bytes

    def _forget(self, at: int, end: int) -> None:
        """Return the pages that lie wholly in a stretch to the system; it stays ours as address space."""
        if not hasattr(mmap, "MADV_DONTNEED"):
            return
        first = self.address - ctypes.addressof(self._view)
        at, end = -(-(first + at) // HUGE_PAGE) * HUGE_PAGE, (first + end) // HUGE_PAGE * HUGE_PAGE
        if at < end:
            self._memory.madvise(mmap.MADV_DONTNEED, at, end - at)

    def close(self) -> None:
        """Return everything to the system."""
        del self._view
        self._memory.close()


class Arenas:
    """Hand out memory to any thread; an arena in which nothing is used goes back to the system."""

    def __init__(self, arena_bytes: int = ARENA_BYTES) -> None:
        self._arena_bytes = arena_bytes
        self._lock = Lock()
        self._arenas: list[_Arena] = []  # under _lock
        # What owners left behind. They may be collected at any moment, also while this thread has the lock.
        self._returned: deque[tuple[_Arena, int, int]] = deque()

    @property
    def mapped_bytes(self) -> int:
        """Address space in use; how much of it is memory depends on what was written."""
        with self._lock:
            return sum(arena.size_bytes for arena in self._arenas)

    def take(self, owner: object, size_bytes: int) -> int:
        """
        Give the address of `size_bytes` bytes, at a multiple of 64, theirs until `owner` is collected.

        Raises:
            MemoryError: the system has no such stretch.
        """
        size_bytes = -(-max(size_bytes, 1) // ALIGN) * ALIGN
        with self._lock:
            self._take_back()
            arena, at = self._find(size_bytes)
        weakref.finalize(owner, self._give, arena, at, size_bytes).atexit = False
        return arena.address + at

    def _find(self, size_bytes: int) -> tuple[_Arena, int]:
        for arena in self._arenas:
            if (at := arena.take(size_bytes)) is not None:
                return arena, at
        try:
            arena = _Arena(max(self._arena_bytes, -(-size_bytes // HUGE_PAGE) * HUGE_PAGE))
        except OSError as exc:
            raise MemoryError(f"no {size_bytes} bytes for an expert") from exc
        self._arenas.append(arena)
        at = arena.take(size_bytes)
        assert at is not None
        return arena, at

    def _give(self, arena: _Arena, at: int, size_bytes: int) -> None:
        self._returned.append((arena, at, size_bytes))
        if self._lock.acquire(blocking=False):  # else whoever takes next sees to it
            try:
                self._take_back()
            finally:
                self._lock.release()

    def _take_back(self) -> None:
        while self._returned:
            arena, at, size_bytes = self._returned.popleft()
            arena.give(at, size_bytes)
            if arena.is_empty:
                self._arenas.remove(arena)
                arena.close()
