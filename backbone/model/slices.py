"""
Name every slice of a model by its SHA-256, and put the manifest together that the relay and the nodes get.

A slice is one expert of one layer: gate ‖ up ‖ down as they stand in the GGUF. Hashing reads every expert
once; the hashes are kept in the cache directory, keyed by path, size and modification time of its files.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from backbone.errors import ModelError
from backbone.model.files import kept_if_possible
from backbone.model.formula import Formula
from backbone.model.gguf import Model
from backbone.model.progress import Progress

type SliceHashes = dict[int, tuple[str, ...]]  # layer -> one hash per expert


@dataclass(frozen=True, slots=True)
class LayerGrid:
    """The layer's constants of the order-free combine (wasm/CONTRACT.md "Grid"), measured at onboarding."""

    x32: int
    x16: tuple[int, ...] | None = None  # one exponent per channel; None until calibrated


@dataclass(frozen=True, slots=True)
class ManifestLayer:
    layer: int
    formula: Formula
    grid: LayerGrid
    slices: tuple[str, ...] = field(repr=False)  # [num_experts] hex SHA-256
    slice_bytes: int

    def to_json(self) -> dict[str, Any]:
        x16 = None if self.grid.x16 is None else list(self.grid.x16)
        return {
            "layer": self.layer,
            "formula": self.formula.to_json(),
            "grid": {"x32": self.grid.x32, "x16": x16},
            "slices": list(self.slices),
            "slice_bytes": self.slice_bytes,
        }


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a swarm must know of a model to hold and compute its experts."""

    name: str
    num_experts: int
    top_k: int
    layers: tuple[ManifestLayer, ...]

    @property
    def model(self) -> str:
        """SHA-256 over the canonical JSON (sorted keys, no spaces, ASCII) without this key."""
        text = json.dumps(self._body(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def to_json(self) -> dict[str, Any]:
        return {"model": self.model, **self._body()}

    @classmethod
    def from_json(cls, data: object) -> Self:
        """
        Read what `to_json` wrote.

        Raises:
            ModelError: keys are missing or of a wrong type, or `model` is not the hash of the rest.
        """
        try:
            manifest = cls(
                name=str(data["name"]),  # type: ignore[index]
                num_experts=int(data["num_experts"]),  # type: ignore[index]
                top_k=int(data["top_k"]),  # type: ignore[index]
                layers=tuple(_layer_from_json(entry) for entry in data["layers"]),  # type: ignore[index]
            )
            stated = data["model"]  # type: ignore[index]
        except (KeyError, TypeError, ValueError) as exc:
            raise ModelError(f"not a manifest: {exc!r}") from exc
        if stated != manifest.model:
            raise ModelError(f"the manifest says it is {stated}, its contents are {manifest.model}")
        return manifest

    def _body(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "num_experts": self.num_experts,
            "top_k": self.top_k,
            "layers": [layer.to_json() for layer in self.layers],
        }


def build_manifest(model: Model, hashes: SliceHashes, grids: Mapping[int, LayerGrid]) -> Manifest:
    """Put formulas, hashes and grids of all MoE layers together."""
    return Manifest(
        name=model.name,
        num_experts=model.num_experts,
        top_k=model.top_k,
        layers=tuple(
            ManifestLayer(layer, moe.formula, grids[layer], hashes[layer], moe.formula.slice_bytes)
            for layer, moe in model.layers.items()
        ),
    )


def slice_hashes(model: Model, cache_dir: Path) -> SliceHashes:
    """Hash every slice, or read the hashes made earlier for this very file."""
    path = cache_dir / "hashes" / f"{_key(model)}.json"
    cached = _read_hashes(path, model)
    if cached is not None:
        return cached
    hashes = {}
    with Progress(f"hashing the experts of {model.name}", len(model.layers)) as progress:
        for layer in model.layers:
            hashes[layer] = tuple(_hash(model, layer, expert) for expert in range(model.num_experts))
            progress.advance()
    kept_if_possible(path, json.dumps(hashes), "the hashes of the experts")
    return hashes


def _key(model: Model) -> str:
    """Names these very files, all of a split model, and what slices are made of."""
    digest = hashlib.sha256()
    for path in model.files:
        status = path.stat()
        digest.update(os.fsencode(path) + f"\0{status.st_size}\0{status.st_mtime_ns}\0".encode())
    for layer, formula in model.formulas.items():
        digest.update(f"{layer}:{formula.slice_bytes};".encode())
    return digest.hexdigest()[:32]


def _hash(model: Model, layer: int, expert: int) -> str:
    digest = hashlib.sha256()
    for part in model.slice_parts(layer, expert):
        digest.update(part)
    return digest.hexdigest()


def _read_hashes(path: Path, model: Model) -> SliceHashes | None:
    """None when there is no such file, or it is damaged: then the hashes are made anew."""
    try:
        hashes = {int(layer): tuple(row) for layer, row in json.loads(path.read_text()).items()}
    except (OSError, ValueError, AttributeError, TypeError):
        return None
    whole = all(len(row) == model.num_experts for row in hashes.values())
    return hashes if whole and list(hashes) == list(model.layers) else None


def _layer_from_json(data: Any) -> ManifestLayer:
    grid = data["grid"]
    x16 = None if grid["x16"] is None else tuple(int(n) for n in grid["x16"])
    return ManifestLayer(
        layer=int(data["layer"]),
        formula=Formula.from_json(data["formula"]),
        grid=LayerGrid(int(grid["x32"]), x16),
        slices=tuple(str(item) for item in data["slices"]),
        slice_bytes=int(data["slice_bytes"]),
    )
