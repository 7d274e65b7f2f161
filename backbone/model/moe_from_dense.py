"""
Turn a dense GGUF of architecture `llama` into a MoE that computes the same function.

A feed-forward network is a sum over its inner columns: down · (silu(gate·x) * up·x). Cut the inner
dimension into E pieces and each is an expert; let a router of zeros choose all of them (softmax over E equal
logits gives weight 1/E each) and multiply `down` by E. With E a power of two no bit of the arithmetic changes
but the order of the sum; what remains is the rounding of the weights into their new format (none for F32).

So a real model, with its tokenizer and its legible text, sends every feed-forward layer through the swarm.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, ReaderTensor
from gguf.quants import dequantize

from backbone.errors import ModelError
from backbone.model.files import written_atomically
from backbone.model.progress import Progress
from backbone.model.quantise import Floats, quantise

F32, F16, Q8_0, Q4_K, Q6_K = 0, 1, 8, 12, 14


@dataclass(frozen=True, slots=True)
class Kind:
    """Weight formats of the experts."""

    gate_up: int
    down: int


# K-quants only for `down`: a row of gate or up is hidden_dim long, 576 in the demo model, no multiple of 256.
KINDS = {
    "f32": Kind(F32, F32),
    "f16": Kind(F16, F16),
    "q8_0": Kind(Q8_0, Q8_0),
    "q4_k_down": Kind(Q8_0, Q4_K),
    "q6_k_down": Kind(Q8_0, Q6_K),
}


def split_ffn(gate: Floats, up: Floats, down: Floats, num_experts: int) -> tuple[Floats, Floats, Floats]:
    """
    Cut one dense FFN into experts; weights of 1/num_experts give the dense result back.

    Shapes:
        gate, up  [ffn_dim, hidden_dim];  down [hidden_dim, ffn_dim]
        returns   gate, up [num_experts, expert_dim, hidden_dim], down [num_experts, hidden_dim, expert_dim]
    """
    ffn_dim, hidden_dim = gate.shape
    if ffn_dim % num_experts:
        raise ModelError(f"{ffn_dim} inner columns do not divide into {num_experts} experts")
    expert_dim = ffn_dim // num_experts
    pieces = down.reshape(hidden_dim, num_experts, expert_dim).transpose(1, 0, 2) * np.float32(num_experts)
    shape = (num_experts, expert_dim, hidden_dim)
    return gate.reshape(shape), up.reshape(shape), np.ascontiguousarray(pieces)


def convert(source: Path, target: Path, num_experts: int, kind: str, name: str) -> None:
    """
    Write the MoE to `target`, whole or not at all.

    Raises:
        ModelError: unknown kind, not a dense llama model, or shapes that the experts or formats cannot have.
    """
    if kind not in KINDS:
        raise ModelError(f"unknown kind {kind!r}: choose one of {', '.join(KINDS)}")
    reader = GGUFReader(source)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    num_layers = _uint(reader, "llama.block_count")
    ffn_dim = _uint(reader, "llama.feed_forward_length")
    if ffn_dim % num_experts:
        raise ModelError(f"{ffn_dim} inner columns do not divide into {num_experts} experts")
    with written_atomically(target) as scratch:
        writer = GGUFWriter(scratch, "llama")
        try:
            _copy_metadata(reader, writer, num_experts, ffn_dim // num_experts, name)
            with Progress(f"converting {name}", num_layers) as progress:
                for tensor in reader.tensors:
                    if ".ffn_gate." in tensor.name or ".ffn_up." in tensor.name:
                        continue
                    if ".ffn_down." in tensor.name:
                        layer = int(tensor.name.split(".")[1])
                        _add_experts(writer, tensors, layer, num_experts, KINDS[kind])
                        progress.advance()
                    else:
                        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
        finally:
            writer.close()


def _copy_metadata(
    reader: GGUFReader, writer: GGUFWriter, num_experts: int, expert_dim: int, name: str
) -> None:
    replaced = {"llama.feed_forward_length", "general.name", "general.architecture"}
    for key, entry in reader.fields.items():
        if key.startswith("GGUF.") or key in replaced:
            continue
        if entry.types[0] == GGUFValueType.ARRAY:
            writer.add_array(key, entry.contents())
        else:
            writer.add_key_value(key, entry.contents(), entry.types[0])
    writer.add_name(name)
    # llama.cpp's `llama` graph takes the width of one expert from the dense key.
    writer.add_uint32("llama.feed_forward_length", expert_dim)
    writer.add_uint32("llama.expert_count", num_experts)
    writer.add_uint32("llama.expert_used_count", num_experts)


def _add_experts(
    writer: GGUFWriter, tensors: dict[str, ReaderTensor], layer: int, num_experts: int, kind: Kind
) -> None:
    prefix = f"blk.{layer}.ffn_"
    dense: dict[str, Any] = {}
    for part in ("gate", "up", "down"):
        tensor = tensors.get(f"{prefix}{part}.weight")
        if tensor is None:
            raise ModelError(f"{prefix}{part}.weight is missing: not a dense llama model")
        dense[part] = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
    gate, up, down = split_ffn(dense["gate"], dense["up"], dense["down"], num_experts)
    for part, weights, type_id in (
        ("gate", gate, kind.gate_up),
        ("up", up, kind.gate_up),
        ("down", down, kind.down),
    ):
        writer.add_tensor(
            f"{prefix}{part}_exps.weight", quantise(weights, type_id), raw_dtype=GGMLQuantizationType(type_id)
        )
    router = np.zeros((num_experts, gate.shape[-1]), np.float32)
    writer.add_tensor(f"{prefix}gate_inp.weight", router)


def _uint(reader: GGUFReader, key: str) -> int:
    entry = reader.get_field(key)
    if entry is None:
        raise ModelError(f"the GGUF lacks {key}: not a dense llama model")
    return int(entry.contents())
