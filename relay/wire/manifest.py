"""
Read what a backbone serves: per layer the formula, the grid and the slices (one expert of one layer each).

The relay places slices and nodes compute them; both read this shape and neither sees the model file.
A formula or grid is checked and then carried on word for word, keys of later versions included.
"""

from dataclasses import dataclass
from typing import Any

from relay.wire.fields import Fields

HASH_CHARS = 64  # SHA-256, lower-case hex
MAX_LAYERS = 1024
MAX_EXPERTS = 4096
MAX_HIDDEN_DIM = 0xFFFF  # u16 in Dispatch
MAX_SLICE_BYTES = 1 << 30
GGML_TYPE_MAX = 255
EXPONENT_MIN, EXPONENT_MAX = -1024, 1023  # anything a float64 step could have

type JsonObject = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ManifestLayer:
    """One MoE layer: `slices[e]` is the SHA-256 of expert e's bytes, all of `slice_bytes` length."""

    layer: int
    formula: JsonObject
    grid: JsonObject
    slice_bytes: int
    slices: tuple[str, ...]

    def to_json(self) -> JsonObject:
        return {
            "layer": self.layer,
            "formula": self.formula,
            "grid": self.grid,
            "slices": list(self.slices),
            "slice_bytes": self.slice_bytes,
        }


@dataclass(frozen=True, slots=True)
class Manifest:
    """A model as the swarm sees it. `model` is the hash the backbone names it by."""

    model: str
    name: str
    num_experts: int
    top_k: int
    layers: tuple[ManifestLayer, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of all slices together."""
        return sum(layer.slice_bytes * len(layer.slices) for layer in self.layers)

    def to_json(self) -> JsonObject:
        return {
            "model": self.model,
            "name": self.name,
            "num_experts": self.num_experts,
            "top_k": self.top_k,
            "layers": [layer.to_json() for layer in self.layers],
        }

    @classmethod
    def from_fields(cls, fields: Fields) -> "Manifest":
        num_experts = fields.integer("num_experts", 1, MAX_EXPERTS)
        layers = tuple(_layer(entry, num_experts) for entry in fields.objects("layers", MAX_LAYERS))
        numbers = [layer.layer for layer in layers]
        if not layers or numbers != sorted(set(numbers)):
            fields.fail("layers", "a non-empty array of layers in rising order")
        return cls(
            model=fields.hex("model", HASH_CHARS),
            name=fields.text("name", 200),
            num_experts=num_experts,
            top_k=fields.integer("top_k", 1, num_experts),
            layers=layers,
        )


def _layer(fields: Fields, num_experts: int) -> ManifestLayer:
    slices = fields.hexes("slices", HASH_CHARS, num_experts)
    if len(slices) != num_experts:
        fields.fail("slices", f"one slice for each of {num_experts} experts")
    formula = read_formula(fields.object("formula"))
    return ManifestLayer(
        layer=fields.integer("layer", 0, 0xFFFF),
        formula=formula,
        grid=read_grid(fields.object("grid"), formula["hidden_dim"]),
        slice_bytes=fields.integer("slice_bytes", 1, MAX_SLICE_BYTES),
        slices=slices,
    )


def read_formula(fields: Fields) -> JsonObject:
    """Check the keys every formula has. Which of them a kernel can compute, the kernel says."""
    fields.integer("hidden_dim", 1, MAX_HIDDEN_DIM)
    fields.integer("expert_dim", 1, 1 << 20)
    if fields.raw("gate_type") is not None:
        fields.integer("gate_type", 0, GGML_TYPE_MAX)
    fields.integer("up_type", 0, GGML_TYPE_MAX)
    fields.integer("down_type", 0, GGML_TYPE_MAX)
    fields.text("activation", 40)
    fields.number("alpha", -1e30, 1e30)
    fields.number("limit", -1e30, 1e30)
    fields.one_of("weight_position", frozenset({"before", "after"}))
    fields.boolean("biased")
    return fields.json


def read_grid(fields: Fields, hidden_dim: int) -> JsonObject:
    """Check the layer exponents: `x32` one for all channels, `x16` one per channel or null."""
    fields.integer("x32", EXPONENT_MIN, EXPONENT_MAX)
    if fields.raw("x16") is not None:
        exponents = fields.integers("x16", EXPONENT_MIN, EXPONENT_MAX, hidden_dim)
        if len(exponents) != hidden_dim:
            fields.fail("x16", f"one exponent for each of {hidden_dim} channels")
    return fields.json
