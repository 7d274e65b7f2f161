import hashlib
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from backbone.errors import ModelError
from backbone.model.files import written_atomically
from backbone.model.gguf import Model, open_model
from backbone.model.grids import load_grids, save_grids
from backbone.model.random_model import Shape, make_random_moe
from backbone.model.slices import LayerGrid, Manifest, build_manifest, slice_hashes


@pytest.fixture
def model(tmp_path: Path) -> Model:
    return open_model(make_random_moe(tmp_path / "m.gguf", Shape(num_layers=2, num_experts=4, top_k=2)))


@pytest.fixture
def manifest(model: Model, tmp_path: Path) -> Manifest:
    grids = {layer: LayerGrid(12, tuple(range(256)) if layer else None) for layer in model.layers}
    return build_manifest(model, slice_hashes(model, tmp_path), grids)


def test_hash_is_that_of_the_slice_s_bytes(model: Model, tmp_path: Path) -> None:
    hashes = slice_hashes(model, tmp_path)
    assert [len(row) for row in hashes.values()] == [4, 4]
    assert hashes[1][3] == hashlib.sha256(model.slice_bytes(1, 3)).hexdigest()


def test_hashes_are_read_again_only_when_the_file_changed(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = slice_hashes(model, tmp_path)
    reads = []
    slots = type(model).slice_parts
    monkeypatch.setattr(Model, "slice_parts", lambda *args: reads.append(args) or slots(*args))
    assert slice_hashes(model, tmp_path) == first
    assert not reads
    os.utime(model.path, ns=(1, 1))
    assert slice_hashes(model, tmp_path) == first
    assert len(reads) == 8


@pytest.mark.parametrize("damage", ["", "[]", '{"0": ["a"]}', '{"0": 3}'])
def test_damaged_cache_is_made_anew(model: Model, tmp_path: Path, damage: str) -> None:
    first = slice_hashes(model, tmp_path)
    [cached] = (tmp_path / "hashes").iterdir()
    cached.write_text(damage)
    assert slice_hashes(model, tmp_path) == first


def test_manifest_survives_json(manifest: Manifest) -> None:
    data = json.loads(json.dumps(manifest.to_json()))
    assert Manifest.from_json(data) == manifest
    assert list(data) == ["model", "name", "num_experts", "top_k", "layers"]
    assert data["layers"][0]["grid"] == {"x32": 12, "x16": None}
    assert data["layers"][1]["slice_bytes"] == manifest.layers[1].formula.slice_bytes


def test_model_hash_covers_everything_but_itself(manifest: Manifest) -> None:
    assert replace(manifest, name="other").model != manifest.model
    body = {key: value for key, value in manifest.to_json().items() if key != "model"}
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    assert manifest.model == hashlib.sha256(text.encode()).hexdigest()


@pytest.mark.parametrize(
    "change", [{"name": "x"}, {"model": "0" * 64}, {"layers": 3}, {"layers": [{}]}, {"top_k": "k"}]
)
def test_manifest_that_does_not_add_up_is_refused(manifest: Manifest, change: dict[str, Any]) -> None:
    with pytest.raises(ModelError):
        Manifest.from_json(manifest.to_json() | change)


def test_manifest_without_a_key_is_refused(manifest: Manifest) -> None:
    data = manifest.to_json()
    del data["layers"]
    with pytest.raises(ModelError, match="layers"):
        Manifest.from_json(data)
    with pytest.raises(ModelError):
        Manifest.from_json([])


def test_a_cache_that_takes_nothing_costs_the_work_again_and_says_so(
    model: Model, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "hashes").write_text("no folder")
    (tmp_path / "grids").write_text("no folder")
    hashes = slice_hashes(model, tmp_path)
    save_grids(tmp_path, hashes, {layer: LayerGrid(3) for layer in hashes})
    assert load_grids(tmp_path, hashes) is None and slice_hashes(model, tmp_path) == hashes
    assert "the hashes of the experts cannot be kept in" in caplog.text
    assert "the grid cannot be kept in" in caplog.text


def test_what_a_killed_process_left_half_written_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "m[1].gguf"
    dead = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True
    )
    (tmp_path / f"m[1].gguf.{int(dead.stdout)}.part").write_text("half")
    (tmp_path / "m[1].gguf.1.part").write_text("of a process that runs")
    with written_atomically(path) as scratch:
        scratch.write_text("whole")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m[1].gguf", "m[1].gguf.1.part"]
