"""
Open a GGUF and say what its routed experts are: layers, formula of each, and the bytes of any expert.

Expert bytes are views into the mapped file (`gguf_file`), so opening a large model reads no weights. Split
files (`…-00001-of-00003.gguf`) are opened together.

A GGUF does not state the activation: llama.cpp's graph code does, per architecture. The table below repeats
it, and the engine compares it at load with the graph it is given (`backbone.engine.supervisor`).
"""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from backbone.errors import ModelError
from backbone.model.formula import Formula
from backbone.model.gguf_file import GgufFile, TensorInfo, read_gguf

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


type Located = dict[str, tuple[GgufFile, TensorInfo]]


@dataclass(frozen=True, slots=True)
class MoeLayer:
    """
    One layer with routed experts.

    Parts are [num_experts, bytes of one expert's part], uint8, views into the file; gate is None when there
    is none or when `up` holds gate and up merged (gate rows first).
    """

    layer: int
    formula: Formula
    gate: npt.NDArray[np.uint8] | None = field(repr=False)
    up: npt.NDArray[np.uint8] = field(repr=False)
    down: npt.NDArray[np.uint8] = field(repr=False)


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
    files = [read_gguf(part) for part in _split_parts(path)]
    head = files[0]
    architecture = str(_value(head, "general.architecture"))
    num_experts = int(_value(head, f"{architecture}.expert_count", 0))
    if num_experts == 0:
        raise ModelError(f"{path.name} has no routed experts (architecture {architecture})")
    tensors = {tensor.name: (file, tensor) for file in files for tensor in file.tensors.values()}
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
    architecture: str, layer: int, tensors: Located, num_experts: int, require_supported: bool
) -> MoeLayer:
    prefix = f"blk.{layer}."

    def part(name: str, columns: int, rows: int) -> TensorInfo | None:
        if (found := tensors.get(f"{prefix}ffn_{name}_exps.weight")) is None:
            return None
        expected = (columns, rows, num_experts)
        if found[1].shape != expected:
            raise ModelError(f"{found[1].name} has shape {found[1].shape}, expected {expected}")
        return found[1]

    down_shape = tensors[f"{prefix}ffn_down_exps.weight"][1].shape
    expert_dim, hidden_dim = (*down_shape, 1)[:2]  # ggml order: columns first
    down = part("down", expert_dim, hidden_dim)
    merged = part("gate_up", hidden_dim, 2 * expert_dim)
    gate = part("gate", hidden_dim, expert_dim)
    up = merged or part("up", hidden_dim, expert_dim)
    if up is None:
        raise ModelError(f"{prefix}ffn_up_exps.weight is missing")
    assert down is not None
    gate_tensor = merged or gate
    activation = ACTIVATION_OF_ARCHITECTURE.get(architecture, "silu")
    oai = activation == "swiglu_oai"
    formula = Formula(
        hidden_dim=hidden_dim,
        expert_dim=expert_dim,
        gate_type=None if gate_tensor is None else gate_tensor.type_id,
        up_type=up.type_id,
        down_type=down.type_id,
        activation=activation,
        alpha=SWIGLU_OAI_ALPHA if oai else 0.0,
        limit=SWIGLU_OAI_LIMIT if oai else 0.0,
        weight_position="before" if architecture in WEIGHT_BEFORE_ARCHITECTURES else "after",
        biased=any(f"{prefix}ffn_{name}_exps.bias" in tensors for name in ("gate", "up", "gate_up", "down")),
    )
    if require_supported:
        formula.require_supported(layer)

    def per_expert(tensor: TensorInfo) -> npt.NDArray[np.uint8]:
        """The expert is the outermost dimension, so each is contiguous."""
        file, _ = tensors[tensor.name]
        return file.bytes_of(tensor).reshape(num_experts, -1)

    return MoeLayer(
        layer, formula, None if gate is None else per_expert(gate), per_expert(up), per_expert(down)
    )


def _split_parts(path: Path) -> list[Path]:
    match = SPLIT_NAME.match(path.name)
    if not match:
        return [path]
    count = int(match["count"])
    return [path.with_name(f"{match['stem']}-{n:05d}-of-{count:05d}.gguf") for n in range(1, count + 1)]


def _value(file: GgufFile, key: str, default: object = None) -> Any:
    value = file.values.get(key, default)
    if value is None:
        raise ModelError(f"the GGUF lacks {key}")
    return value
