"""Slices on disk: found again, checked when read, bounded, shared, and never in the way."""

import hashlib
import os
from pathlib import Path

import pytest

from backbone.node import disk
from backbone.node.disk import SliceDisk, default_cache_dir


def slice_of(number: int, size: int = 100) -> tuple[str, bytes]:
    data = bytes([number]) * size
    return hashlib.sha256(data).hexdigest(), data


A, B, C = slice_of(1), slice_of(2), slice_of(3)


def test_what_one_run_kept_the_next_one_finds(tmp_path: Path) -> None:
    SliceDisk(tmp_path, 1000).write(*A)
    again = SliceDisk(tmp_path, 1000)
    assert again.inventory(9) == (A[0],) and again.read(A[0]) == A[1] and again.read(B[0]) is None


def test_bytes_are_checked_when_they_are_read(tmp_path: Path) -> None:
    kept = SliceDisk(tmp_path, 1000)
    kept.write(*A)
    (path,) = tmp_path.glob("??/*")
    path.write_bytes(A[1][:-1] + b"x")
    assert kept.read(A[0]) is None and kept.inventory(9) == () and not path.exists()


def test_least_recently_used_goes_first(tmp_path: Path) -> None:
    kept = SliceDisk(tmp_path, 250)
    for age, (name, data) in enumerate((A, B)):
        kept.write(name, data)
        os.utime(tmp_path / name[:2] / name, (age, age))
    kept.read(A[0])
    kept.write(*C)
    assert kept.read(B[0]) is None and kept.read(A[0]) and kept.read(C[0])
    assert set(kept.inventory(9)) == {A[0], C[0]} and len(kept.inventory(1)) == 1


def test_two_nodes_share_a_folder(tmp_path: Path) -> None:
    one, two = SliceDisk(tmp_path, 250), SliceDisk(tmp_path, 250)
    for name, data in (A, B, C):
        one.write(name, data)
        two.write(name, data)
    assert sum(path.stat().st_size for path in tmp_path.glob("??/*")) <= 250
    for kept in (one, two):
        for name, data in (A, B, C):
            assert kept.read(name) in (None, data)


def test_a_full_or_unwritable_disk_is_named_once_and_left_alone_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "file"
    folder.write_text("no folder")
    kept = SliceDisk(folder, 1000)
    for _ in range(5):
        kept.write(*A)
    assert len(caplog.records) == 1 and kept.trouble and kept.read(A[0]) is None
    folder.unlink()
    kept.write(*A)
    assert kept.read(A[0]) is None, "it rests"
    monkeypatch.setattr(disk, "monotonic", lambda: 1e12)
    kept.write(*A)
    assert kept.read(A[0]) == A[1] and kept.trouble == ""


def test_part_of_a_download_is_handed_out_once(tmp_path: Path) -> None:
    kept = SliceDisk(tmp_path, 1000)
    kept.write_part(A[0], A[1][:40])
    again = SliceDisk(tmp_path, 1000)
    assert again.inventory(9) == () and again.read(A[0]) is None
    assert again.read_part(A[0]) == A[1][:40] and again.read_part(A[0]) == b""


def test_the_default_folder_is_the_users_cache() -> None:
    assert default_cache_dir({"XDG_CACHE_HOME": "/c"}) == Path("/c/expertswarm/node-slices")
    assert default_cache_dir({"HOME": "/h"}) == Path("/h/.cache/expertswarm/node-slices")
