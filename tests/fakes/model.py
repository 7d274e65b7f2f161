"""A small random model of Q8_0 experts: its manifest, its slices, and the right answer to each dispatch."""

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from backbone.experts.native import NativeKernel
from backbone.model.formula import Formula
from relay.wire.calls import Dispatch, model_tag
from relay.wire.fields import to_json
from relay.wire.manifest import Manifest, ManifestLayer
from relay.wire.messages import Assign, AssignLayer
from relay.wire.tensors import Grid, XEncoding, encode_x, row_exponents

X32 = 4  # far above what random outputs reach, far below overflow


@dataclass(frozen=True, slots=True)
class RandomModel:
    """`slices[layer][expert]` are the bytes; `ids` their names."""

    formula: Formula
    slices: tuple[tuple[bytes, ...], ...]
    ids: tuple[tuple[str, ...], ...]
    manifest: Manifest

    @classmethod
    def make(
        cls, seed: int = 1, layers: int = 2, experts: int = 4, hidden_dim: int = 64, expert_dim: int = 32
    ) -> "RandomModel":
        rng = np.random.default_rng(seed)
        formula = Formula(hidden_dim, expert_dim, 8, 8, 8)
        slices = tuple(tuple(_slice(rng, formula) for _ in range(experts)) for _ in range(layers))
        ids = tuple(tuple(hashlib.sha256(data).hexdigest() for data in layer) for layer in slices)
        grid: dict[str, Any] = {"x32": X32, "x16": None}
        entries = tuple(
            ManifestLayer(number, formula.to_json(), grid, formula.slice_bytes, ids[number])
            for number in range(layers)
        )
        body = Manifest("0" * 64, "random", experts, min(2, experts), entries)
        name = hashlib.sha256(to_json(body.to_json())).hexdigest()
        return cls(formula, slices, ids, Manifest(name, "random", experts, body.top_k, entries))

    @property
    def by_id(self) -> dict[str, bytes | int]:
        return {
            i: s
            for ids, slices in zip(self.ids, self.slices, strict=True)
            for i, s in zip(ids, slices, strict=True)
        }

    def assign(self, layers: dict[int, list[int]], epoch: int = 1, peer: int = 9) -> Assign:
        """The Assign of these experts of these layers."""
        entries = []
        for number, experts in layers.items():
            entry = self.manifest.layers[number]
            held = {expert: entry.slices[expert] for expert in experts}
            entries.append(AssignLayer(number, entry.formula, entry.grid, entry.slice_bytes, held))
        return Assign(epoch, peer, self.manifest.model, tuple(entries))

    def dispatch(self, layer: int, picks: list[list[int]], seed: int = 2) -> Dispatch:
        """A dispatch of random rows, one per list of experts."""
        rng = np.random.default_rng(seed)
        x = rng.standard_normal((len(picks), self.formula.hidden_dim), dtype=np.float32)
        experts = [expert for row in picks for expert in row]
        return Dispatch(
            model_tag=model_tag(self.manifest.model),
            layer=layer,
            hidden_dim=self.formula.hidden_dim,
            x_encoding=XEncoding.Q8A32,
            grid=Grid.X32,
            row_exponents=row_exponents(x),
            counts=np.array([len(row) for row in picks], np.uint16),
            experts=np.array(experts, np.uint16),
            weights=rng.random(len(experts), dtype=np.float32),
            x=encode_x(x, XEncoding.Q8A32),
        )

    def answer(self, kernel: NativeKernel, dispatch: Dispatch) -> npt.NDArray[np.int64]:
        """What the exact class of kernels gives for it."""
        packed = [kernel.pack(self.formula, data) for data in self.slices[dispatch.layer]]
        return kernel.answer(
            self.formula,
            dispatch.x,
            dispatch.x_encoding,
            dispatch.num_tokens,
            dispatch.row_exponents,
            dispatch.grid,
            X32,
            dispatch.counts,
            packed,
            dispatch.experts,
            dispatch.weights,
        )


def _slice(rng: np.random.Generator, formula: Formula) -> bytes:
    """Random Q8_0 blocks: an f16 scale of about 1/600, then 32 ints."""
    blocks = rng.integers(-127, 128, (formula.slice_bytes // 34, 34), dtype=np.int8).view(np.uint8)
    scales = rng.uniform(0.001, 0.002, len(blocks)).astype(np.float16)
    blocks[:, :2] = scales.view(np.uint8).reshape(-1, 2)
    return blocks.tobytes()
