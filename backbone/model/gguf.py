"""
Open a GGUF and say what its routed experts are: layers, formula of each, and the bytes of any expert.

Metadata comes through the `gguf` package; expert bytes are views into the memory-mapped file, so opening a
large model reads no weights. Split files (`…-00001-of-00003.gguf`) are opened together.

A GGUF does not state the activation: llama.cpp's graph code does, per architecture. The table below repeats
it, and the engine compares it at load with the graph it is given (`backbone.engine.supervisor`).
"""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, ReaderTensor

from backbone.errors import ModelError
from backbone.model.formula import Formula

# Architectures whose experts do not use silu. Everything else: silu, checked against the graph at load.
ACTIVATION_OF_ARCHITECTURE = {
    "gpt-oss": "swiglu_oai",
    "grok": "gelu",
    "nemotron_h_moe": "relu2",
}
SWIGLU_OAI_ALPHA = 1.702  # fixed in llama.cpp's graph for gpt-oss
SWIGLU_OAI_LIMIT = 7.0
WEIGHT_BEFORE_ARCHITECTURES = ("llama4",)

SPLIT_NAME = re.compile(r"^(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf$")


@dataclass(frozen=True, slots=True)
class MoeLayer:
    """
    One layer with routed experts.

    Parts are [num_experts, bytes of one expert's part], uint8, views into the file; gate is None when there
    is none or when `up` holds gate and up merged (gate rows first).
    """

    layer: int
    formula: Formula
    gate: "np.ndarray[Any, np.dtype[np.uint8]] | None" = field(repr=False)
    up: "np.ndarray[Any, np.dtype[np.uint8]]" = field(repr=False)
    down: "np.ndarray[Any, np.dtype[np.uint8]]" = field(repr=False)


@dataclass(frozen=True, slots=True)
class Model:
    """A MoE model on disk."""

    path: Path
    name: str
    architecture: str
    hidden_dim: int
    num_layers: int  # all layers, dense ones included
    num_experts: int
    top_k: int
    layers: dict[int, MoeLayer]  # only those with routed experts, ascending

    def slice_parts(self, layer: int, expert: int) -> tuple[memoryview, ...]:
        """The pieces of one slice in order gate, up, down; views into the file, nothing is copied."""
        moe = self.layers[layer]
        if not 0 <= expert < self.num_experts:
            raise IndexError(f"expert {expert} of {self.num_experts}")
        parts = (moe.gate, moe.up, moe.down)
        return tuple(memoryview(part[expert]) for part in parts if part is not None)

    def slice_bytes(self, layer: int, expert: int) -> bytes:
        """One slice, gate ‖ up ‖ down, as it is sent and hashed."""
        return b"".join(self.slice_parts(layer, expert))

    @property
    def expert_bytes(self) -> int:
        """Size of all routed experts together: what the backbone does not have to hold."""
        return self.num_experts * sum(moe.formula.slice_bytes for moe in self.layers.values())


def open_model(path: Path | str, *, require_supported: bool = True) -> Model:
    """
    Read the metadata of a MoE GGUF.

    Raises:
        ModelError: not a GGUF, not a MoE, or its tensors contradict its metadata.
        FormulaUnsupported: a layer's experts need something this version cannot compute
            (not raised with `require_supported=False`).
    """
    path = Path(path).resolve()
    readers = [_read(part) for part in _split_parts(path)]
    head = readers[0]
    architecture = str(_value(head, "general.architecture"))
    num_experts = int(_value(head, f"{architecture}.expert_count", 0))
    if num_experts == 0:
        raise ModelError(f"{path.name} has no routed experts (architecture {architecture})")
    tensors = {tensor.name: tensor for reader in readers for tensor in reader.tensors}
    num_layers = int(_value(head, f"{architecture}.block_count"))
    layers = {}
    for layer in range(num_layers):
        if f"blk.{layer}.ffn_down_exps.weight" in tensors:
            layers[layer] = _moe_layer(architecture, layer, tensors, num_experts, require_supported)
    if not layers:
        raise ModelError(f"{path.name} says {num_experts} experts but holds no tensor of theirs")
    return Model(
        path=path,
        name=str(_value(head, "general.name", path.stem)),
        architecture=architecture,
        hidden_dim=int(_value(head, f"{architecture}.embedding_length")),
        num_layers=num_layers,
        num_experts=num_experts,
        top_k=int(_value(head, f"{architecture}.expert_used_count")),
        layers=layers,
    )


def _moe_layer(
    architecture: str, layer: int, tensors: dict[str, ReaderTensor], num_experts: int, require_supported: bool
) -> MoeLayer:
    prefix = f"blk.{layer}."
    down = tensors[f"{prefix}ffn_down_exps.weight"]
    merged = tensors.get(f"{prefix}ffn_gate_up_exps.weight")
    gate = tensors.get(f"{prefix}ffn_gate_exps.weight")
    up = merged if merged is not None else tensors.get(f"{prefix}ffn_up_exps.weight")
    if up is None:
        raise ModelError(f"{prefix}ffn_up_exps.weight is missing")
    expert_dim, hidden_dim = (int(n) for n in down.shape[:2])  # ggml order: columns first
    up_rows = 2 * expert_dim if merged is not None else expert_dim
    for tensor, columns, rows in (
        (gate, hidden_dim, expert_dim),
        (up, hidden_dim, up_rows),
        (down, expert_dim, hidden_dim),
    ):
        if tensor is not None and [int(n) for n in tensor.shape] != [columns, rows, num_experts]:
            raise ModelError(
                f"{tensor.name} has shape {[int(n) for n in tensor.shape]}, "
                f"expected {[columns, rows, num_experts]}"
            )
    gate_tensor = merged if merged is not None else gate
    activation = ACTIVATION_OF_ARCHITECTURE.get(architecture, "silu")
    oai = activation == "swiglu_oai"
    formula = Formula(
        hidden_dim=hidden_dim,
        expert_dim=expert_dim,
        gate_type=None if gate_tensor is None else int(gate_tensor.tensor_type),
        up_type=int(up.tensor_type),
        down_type=int(down.tensor_type),
        activation=activation,
        alpha=SWIGLU_OAI_ALPHA if oai else 0.0,
        limit=SWIGLU_OAI_LIMIT if oai else 0.0,
        weight_position="before" if architecture in WEIGHT_BEFORE_ARCHITECTURES else "after",
        biased=any(f"{prefix}ffn_{part}_exps.bias" in tensors for part in ("gate", "up", "gate_up", "down")),
    )
    if require_supported:
        formula.require_supported(layer)
    return MoeLayer(
        layer,
        formula,
        None if gate is None else _per_expert(gate, num_experts),
        _per_expert(up, num_experts),
        _per_expert(down, num_experts),
    )


def _per_expert(tensor: ReaderTensor, num_experts: int) -> "np.ndarray[Any, np.dtype[np.uint8]]":
    """View a tensor as [num_experts, bytes]; the expert is the outermost dimension, so each is contiguous."""
    data: np.ndarray[Any, np.dtype[np.uint8]] = tensor.data.view(np.uint8).reshape(num_experts, -1)
    return data


def _split_parts(path: Path) -> list[Path]:
    match = SPLIT_NAME.match(path.name)
    if not match:
        return [path]
    count = int(match["count"])
    return [path.with_name(f"{match['stem']}-{n:05d}-of-{count:05d}.gguf") for n in range(1, count + 1)]


def _read(path: Path) -> GGUFReader:
    try:
        return GGUFReader(path)
    except FileNotFoundError as exc:
        raise ModelError(f"no such model file: {path}") from exc
    except (ValueError, OSError, KeyError, IndexError) as exc:
        raise ModelError(f"{path.name} is not a readable GGUF: {exc}") from exc


def _value(reader: GGUFReader, key: str, default: object = None) -> Any:
    field_ = reader.get_field(key)
    if field_ is not None:
        return field_.contents()
    if default is None:
        raise ModelError(f"the GGUF lacks {key}")
    return default
