"""Keep measured grids in the cache, by the hash of all slices: the same weights always get the same grid."""

import hashlib
import json
from pathlib import Path

from backbone.model.files import kept_if_possible
from backbone.model.slices import LayerGrid, SliceHashes


def _path(cache_dir: Path, hashes: SliceHashes) -> Path:
    digest = hashlib.sha256()
    for layer in sorted(hashes):
        digest.update(f"{layer}:{','.join(hashes[layer])};".encode())
    return cache_dir / "grids" / f"{digest.hexdigest()[:32]}.json"


def load_grids(cache_dir: Path, hashes: SliceHashes) -> dict[int, LayerGrid] | None:
    """Give the grids measured earlier, or None when there are none or the file is damaged."""
    try:
        data = json.loads(_path(cache_dir, hashes).read_text())
        grids = {int(layer): LayerGrid(int(g["x32"]), tuple(map(int, g["x16"]))) for layer, g in data.items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
    return grids if set(grids) == set(hashes) else None


def save_grids(cache_dir: Path, hashes: SliceHashes, grids: dict[int, LayerGrid]) -> None:
    """Write the grids in one step: a reader sees the whole file or none. Where that fails, only say so."""
    text = json.dumps({str(layer): {"x32": grid.x32, "x16": grid.x16} for layer, grid in grids.items()})
    kept_if_possible(_path(cache_dir, hashes), text, "the grid")
