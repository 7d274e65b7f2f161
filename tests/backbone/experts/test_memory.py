"""Arenas: what is taken is never shared, and what is given back is one piece again."""

import ctypes
import gc
import random
from pathlib import Path

import pytest

from backbone.experts.memory import HUGE_PAGE, Arenas


class Owner:
    pass


def fill(address: int, size_bytes: int, byte: int) -> None:
    ctypes.memset(address, byte, size_bytes)


def test_stretches_never_overlap_and_come_back() -> None:
    arenas, rng = Arenas(1 << 20), random.Random(1)
    held: dict[Owner, tuple[int, int, int]] = {}
    for step in range(2000):
        if held and rng.random() < 0.48:
            owner = rng.choice(list(held))
            address, size, byte = held.pop(owner)
            assert ctypes.string_at(address, size) == bytes([byte]) * size
            del owner
        else:
            owner, size, byte = Owner(), rng.choice([1, 64, 1000, 70_000, 300_000]), step % 251
            address = arenas.take(owner, size)
            assert address % 64 == 0
            fill(address, size, byte)
            held[owner] = (address, size, byte)
    for address, size, byte in held.values():
        assert ctypes.string_at(address, size) == bytes([byte]) * size
    held.clear()
    owner = None
    gc.collect()
    assert arenas.mapped_bytes == 0


def test_what_is_larger_than_an_arena_gets_its_own() -> None:
    arenas = Arenas(1 << 20)
    owner = Owner()
    fill(arenas.take(owner, 5 << 20), 5 << 20, 1)
    assert arenas.mapped_bytes == 6 << 20
    del owner
    assert arenas.mapped_bytes == 0


def test_owners_collected_while_memory_is_taken_do_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    """A finalizer may run in this very thread while the lock is held."""
    arenas = Arenas(1 << 20)
    late = [Owner()]
    arenas.take(late[0], 64)
    find = arenas._find

    def collecting(size_bytes: int) -> object:
        late.clear()
        return find(size_bytes)

    monkeypatch.setattr(arenas, "_find", collecting)
    first, second = Owner(), Owner()
    arenas.take(first, 64)
    arenas.take(second, 64)
    assert len(arenas._arenas[0]._free) == 1, "the first stretch was reused or joined the rest"


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="only where the system tells")
def test_pages_of_what_is_given_back_leave_the_process() -> None:
    arenas = Arenas(64 << 20)
    kept, dropped = Owner(), Owner()
    fill(arenas.take(kept, 1 << 20), 1 << 20, 1)
    fill(arenas.take(dropped, 48 << 20), 48 << 20, 1)
    before = resident_bytes()
    del dropped
    assert before - resident_bytes() > 40 << 20
    assert arenas.mapped_bytes == 64 << 20 and HUGE_PAGE == 2 << 20
    del kept
