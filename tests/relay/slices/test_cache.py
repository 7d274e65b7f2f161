"""The slice cache: only what hashes to its name, bounded, and sound after a crash."""

import hashlib
from pathlib import Path

import pytest

from relay.errors import SliceCorrupt, SliceTooLarge
from relay.slices.cache import SliceCache


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
