"""
Open a GGUF and say what its routed experts are: layers, formula of each, and the bytes of any expert.

Expert bytes are views into the mapped file (`gguf_file`), so opening a large model reads no weights. Split
files (`…-00001-of-00003.gguf`) are opened together.

A GGUF does not state the activation: llama.cpp's graph code does, per architecture. The table below repeats
it, and the engine compares it at load with the graph it is given (`backbone.engine.supervisor`).
"""

import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from backbone.errors import FormulaUnsupported, ModelError
from backbone.model.formula import Formula
from backbone.model.gguf_file import GgufFile, TensorInfo, read_gguf

# Architectures whose experts do not use silu. Everything else: silu, checked against the graph at load.
ACTIVATION_OF_ARCHITECTURE = {
    "gemma4": "gelu",
    "gpt-oss": "swiglu_oai",
    "grok": "gelu",
    "kimi-k3": "situ",
    "minimax-m3": "swiglu_oai",
    "nemotron_h_moe": "relu2",
    "smallthinker": "relu",
}
SWIGLU_OAI_ALPHA = 1.702  # fixed in llama.cpp's graph
SWIGLU_OAI_LIMIT = 7.0
WEIGHT_BEFORE_ARCHITECTURES = ("llama4",)
# Where `swiglu_clamp_exp` limits the gate before its silu; elsewhere it limits the silu.
CLAMP_WHEN_MISSING = {"maple": 7.0}
CLAMP_BEFORE_SILU_ARCHITECTURES = ("deepseek4", "dflash", "hy_v4", "maple")
LIMIT_MIN = 1e-6  # llama.cpp takes less for no clamp
DIGITS = 6  # constants are float32 in the file: 1.702 must compare equal to itself
F32 = 0

SPLIT_NAME = re.compile(r"^(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf$")


type Located = dict[str, tuple[GgufFile, TensorInfo]]


@dataclass(frozen=True, slots=True)
class MoeLayer:
    """
    One layer with routed experts.

    Parts are [num_experts, bytes of one expert's part], uint8, views into the file; gate is None when there
    is none or when `up` holds gate and up merged (gate rows first). `extras` are the parts behind the
    matrices, in their order: biases, then scales.
    """

    layer: int
    formula: Formula
    gate: npt.NDArray[np.uint8] | None = field(repr=False)
    up: npt.NDArray[np.uint8] = field(repr=False)
    down: npt.NDArray[np.uint8] = field(repr=False)
    extras: tuple[npt.NDArray[np.uint8], ...] = field(default=(), repr=False)


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
        """The pieces of one slice: gate, up, down, biases, scales; matrices are views into the file."""
        moe = self.layers[layer]
        if not 0 <= expert < self.num_experts:
            raise IndexError(f"expert {expert} of {self.num_experts}")
        parts = (moe.gate, moe.up, moe.down, *moe.extras)
        return tuple(memoryview(part[expert]) for part in parts if part is not None)

    def slice_bytes(self, layer: int, expert: int) -> bytes:
        """One slice, gate ‖ up ‖ down ‖ biases ‖ scales, as it is sent and hashed."""
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
            arithmetic = _arithmetic(head, architecture, layer, tensors)
            layers[layer] = _moe_layer(arithmetic, layer, tensors, num_experts, require_supported)
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


def _arithmetic(head: GgufFile, architecture: str, layer: int, tensors: Located) -> dict[str, Any]:
    """What llama.cpp's graph of this architecture does with the products; fields of Formula."""
    activation, alpha, limit = ACTIVATION_OF_ARCHITECTURE.get(architecture, "silu"), 0.0, 0.0
    match activation:
        case "swiglu_oai":
            alpha, limit = SWIGLU_OAI_ALPHA, SWIGLU_OAI_LIMIT
        case "situ":
            alpha = float(_value(head, f"{architecture}.activation.situ_beta"))
            limit = max(0.0, float(_value(head, f"{architecture}.activation.situ_linear_beta")))
        case "silu" if f"blk.{layer}.ffn_gate_exps.weight" in tensors:
            missing = CLAMP_WHEN_MISSING.get(architecture, 0.0)
            clamps = _value(head, f"{architecture}.swiglu_clamp_exp", missing)
            limit = float(clamps[layer] if isinstance(clamps, tuple) else clamps)
            if limit <= LIMIT_MIN:
                limit = 0.0
            elif architecture in CLAMP_BEFORE_SILU_ARCHITECTURES:
                activation = "swiglu_clamp"
    before = architecture in WEIGHT_BEFORE_ARCHITECTURES
    return {
        "activation": activation,
        "alpha": round(alpha, DIGITS),
        "limit": round(limit, DIGITS),
        "weight_position": "before" if before else "after",
    }


def _moe_layer(
    arithmetic: dict[str, Any], layer: int, tensors: Located, num_experts: int, require_supported: bool
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
    names = ("down", "gate_up") if merged else ("gate", "up", "down") if gate else ("up", "down")
    formula = Formula(
        hidden_dim=hidden_dim,
        expert_dim=expert_dim,
        gate_type=None if gate_tensor is None else gate_tensor.type_id,
        up_type=up.type_id,
        down_type=down.type_id,
        biased=any(f"{prefix}ffn_{name}_exps.bias" in tensors for name in names),
        scaled=any(f"{prefix}ffn_{name}_exps.scale" in tensors for name in ("gate", "up", "down")),
        **arithmetic,
    )
    if require_supported:
        formula.require_supported(layer)

    def per_expert(tensor: TensorInfo) -> npt.NDArray[np.uint8]:
        """The expert is the outermost dimension, so each is contiguous."""
        file, _ = tensors[tensor.name]
        return file.bytes_of(tensor).reshape(num_experts, -1)

    def extra(name: str, count: int, default: float) -> npt.NDArray[np.uint8]:
        """Floats of each expert, [num_experts, 4 * count]; the default where the file has none."""
        if (found := tensors.get(f"{prefix}{name}")) is None:
            return np.broadcast_to(np.full(count, default, "<f4").view(np.uint8), (num_experts, 4 * count))
        file, tensor = found
        if tensor.type_id != F32:
            raise FormulaUnsupported(f"{tensor.name} in format {tensor.type_id}", layer)
        if math.prod(tensor.shape) != count * num_experts:
            raise ModelError(f"{tensor.name} has shape {tensor.shape}, expected {num_experts} times {count}")
        return file.bytes_of(tensor).reshape(num_experts, -1)

    extras = []
    if formula.biased:
        counts = {"gate_up": 2 * expert_dim, "gate": expert_dim, "up": expert_dim, "down": hidden_dim}
        in_order = ("gate_up", "down") if merged else names
        extras += [extra(f"ffn_{name}_exps.bias", counts[name], 0) for name in in_order]
    if formula.scaled:
        # llama.cpp multiplies merged gate and up by the scale of up
        scales = ("up", "up", "down") if merged else names
        extras += [extra(f"ffn_{name}_exps.scale", 1, 1) for name in scales]
    return MoeLayer(
        layer,
        formula,
        None if gate is None else per_expert(gate),
        per_expert(up),
        per_expert(down),
        tuple(extras),
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
