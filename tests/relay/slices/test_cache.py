"""The slice cache: only what hashes to its name, bounded, and sound after a crash."""

import errno
import hashlib
import os
import shutil
import tempfile
from pathlib import Path

import pytest

from relay.errors import SliceCorrupt, SliceTooLarge, StorageFull
from relay.slices.cache import TRUST_S, SliceCache


def put(cache: SliceCache, data: bytes) -> str:
    slice_id = hashlib.sha256(data).hexdigest()
    with cache.writer(slice_id, len(data)) as writer:
        writer.write(data[:3])
        writer.write(data[3:])
        writer.commit()
    return slice_id


def read(cache: SliceCache, slice_id: str) -> bytes | None:
    opened = cache.open(slice_id)
    if opened is None:
        return None
    file, size = opened
    with file:
        data = file.read()
    assert len(data) == size
    return data


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("??/*"))


def test_slice_comes_back_as_it_was_stored(tmp_path: Path) -> None:
    cache = SliceCache(tmp_path, 1000)
    slice_id = put(cache, b"weights")
    assert slice_id in cache and read(cache, slice_id) == b"weights"
    assert cache.open("f" * 64) is None


def test_bytes_that_are_not_what_their_name_says_are_not_stored(tmp_path: Path) -> None:
    cache = SliceCache(tmp_path, 1000)
    with pytest.raises(SliceCorrupt, match="nothing was stored"), cache.writer("a" * 64, 10) as writer:
        writer.write(b"other")
        writer.commit()
    assert "a" * 64 not in cache and files(tmp_path) == []


def test_upload_longer_than_the_manifest_says_is_cut_off(tmp_path: Path) -> None:
    cache = SliceCache(tmp_path, 1000)
    with pytest.raises(SliceTooLarge, match="more than the 10 bytes"), cache.writer("a" * 64, 10) as writer:
        writer.write(bytes(11))
    assert files(tmp_path) == []


def test_least_recently_used_slice_goes_first(tmp_path: Path) -> None:
    cache = SliceCache(tmp_path, 250)
    first, second = put(cache, b"1" * 100), put(cache, b"2" * 100)
    read(cache, first)
    third = put(cache, b"3" * 100)
    assert (first in cache, second in cache, third in cache) == (True, False, True)
    assert cache.size_bytes == 200 and len(files(tmp_path)) == 2


def test_slice_stays_readable_while_it_is_evicted(tmp_path: Path) -> None:
    cache = SliceCache(tmp_path, 150)
    opened = cache.open(put(cache, b"1" * 100))
    assert opened is not None
    put(cache, b"2" * 100)
    with opened[0] as file:
        assert file.read() == b"1" * 100


def test_slices_outlive_a_restart_and_half_uploads_do_not(tmp_path: Path) -> None:
    slice_id = put(SliceCache(tmp_path, 1000), b"weights")
    (tmp_path / slice_id[:2] / "cut.part").write_bytes(b"half")
    cache = SliceCache(tmp_path, 1000)
    assert read(cache, slice_id) == b"weights" and cache.size_bytes == 7
    assert files(tmp_path) == [slice_id]


def test_slice_that_rotted_on_disk_is_dropped(tmp_path: Path) -> None:
    slice_id = put(SliceCache(tmp_path, 1000), b"weights")
    (tmp_path / slice_id[:2] / slice_id).write_bytes(b"wEights")
    cache = SliceCache(tmp_path, 1000)
    assert read(cache, slice_id) is None and slice_id not in cache and cache.size_bytes == 0


def test_slice_deleted_by_somebody_else_is_absent(tmp_path: Path) -> None:
    cache = SliceCache(tmp_path, 1000)
    slice_id = put(cache, b"weights")
    (tmp_path / slice_id[:2] / slice_id).unlink()
    assert cache.open(slice_id) is None and cache.size_bytes == 0


def test_storing_the_same_slice_again_does_not_count_twice(tmp_path: Path) -> None:
    cache = SliceCache(tmp_path, 1000)
    assert put(cache, b"weights") == put(cache, b"weights")
    assert cache.size_bytes == 7 and len(cache) == 1


def full_disk(cache: SliceCache, monkeypatch: pytest.MonkeyPatch, room_bytes: int) -> None:
    """Let the disk take so many bytes in all, as a small one does; what is removed gives its room back."""
    real = tempfile.NamedTemporaryFile

    def limited(*args: object, **kwargs: object) -> object:
        file = real(*args, **kwargs)  # type: ignore[call-overload]
        write = file.file.write

        def write_some(data: bytes) -> int:
            used = sum(path.stat().st_size for path in cache.folder.rglob("*") if path.is_file())
            if used >= room_bytes:
                raise OSError(errno.ENOSPC, "No space left on device")
            return write(data[: room_bytes - used])

        file.write = write_some
        return file

    monkeypatch.setattr("relay.slices.cache.tempfile.NamedTemporaryFile", limited)


def test_a_full_disk_gives_up_what_was_used_least(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = SliceCache(tmp_path, 1 << 20)
    full_disk(cache, monkeypatch, 250)
    first, second, third = (put(cache, digit * 100) for digit in (b"1", b"2", b"3"))
    assert read(cache, third) == b"3" * 100 and read(cache, second) == b"2" * 100
    assert first not in cache and files(tmp_path) == sorted([second, third])
    assert len(cache.memory) == 0


def test_what_the_disk_does_not_take_is_served_from_memory_and_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cache = SliceCache(tmp_path, 1 << 20, memory_bytes=250)
    full_disk(cache, monkeypatch, 30)  # a part of each slice gets there, and must not be lost
    slices = {put(cache, digit * 100): digit * 100 for digit in (b"1", b"2", b"3", b"4")}
    held = [slice_id for slice_id in slices if slice_id in cache]
    assert held == list(slices)[2:], "the memory is bounded"
    assert all(read(cache, slice_id) == slices[slice_id] for slice_id in held)
    assert cache.memory.size_bytes == 200 and files(tmp_path) == []
    assert len(caplog.records) == 1 and "No space left on device" in caplog.text
    with pytest.raises(StorageFull, match="No space left"), cache.writer("a" * 64, 251) as writer:
        writer.write(b"x" * 251)
    with pytest.raises(SliceCorrupt), cache.writer("a" * 64, 100) as writer:
        writer.write(b"x" * 100)
        writer.commit()
    assert cache.memory.size_bytes == 100, "what was reserved is given back"


def test_a_folder_that_takes_no_file_is_no_end(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache = SliceCache(tmp_path, 1 << 20)
    shutil.rmtree(tmp_path)
    tmp_path.write_text("somebody put a file where the folder was")
    slice_id = put(cache, b"weights")
    assert read(cache, slice_id) == b"weights"
    assert str(tmp_path) in caplog.text


def test_a_slice_damaged_after_it_was_served_is_not_served_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache = SliceCache(tmp_path, 1 << 20)
    slice_id = put(cache, b"weights")
    assert read(cache, slice_id) == b"weights"
    (tmp_path / slice_id[:2] / slice_id).write_bytes(b"weighty")
    assert read(cache, slice_id) is None and slice_id not in cache
    assert "hash to" in caplog.text and files(tmp_path) == []


def test_a_disk_that_rots_without_a_trace_is_found_within_a_minute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = SliceCache(tmp_path, 1 << 20)
    slice_id = put(cache, b"weights")
    now = [1000.0]
    monkeypatch.setattr("relay.slices.cache.monotonic", lambda: now[0])
    monkeypatch.setattr("relay.slices.cache.os.fstat", lambda _: os.stat_result([0] * 6 + [7] + [0] * 3))
    assert read(cache, slice_id) == b"weights"
    (tmp_path / slice_id[:2] / slice_id).write_bytes(b"weighty")
    now[0] += TRUST_S + 1
    assert read(cache, slice_id) is None
