"""
Make small MoE models of random weights, so that tests and checks need no download.

The shapes take every format (multiples of 256), the tokenizer is bytes and four control tokens, the text is
noise: what counts is that llama.cpp runs it, with and without the swarm, and that the same numbers come out.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, TokenType

from backbone.model.quantise import Floats, can_quantise, quantise, random_blocks

F32 = int(GGMLQuantizationType.F32)
Q8_0 = int(GGMLQuantizationType.Q8_0)
CONTROLS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<pad>")
NUM_CONTROLS = len(CONTROLS)
NUM_TOKENS = NUM_CONTROLS + 256
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True, slots=True)
class Shape:
    """What to make; the defaults give a file of about 4 MB."""

    architecture: str = "qwen2moe"  # qwen2moe brings a shared expert; "llama" and "gpt-oss" have none
    num_layers: int = 3
    num_experts: int = 8
    top_k: int = 3
    hidden_dim: int = 256
    expert_dim: int = 256
    shared_dim: int = 256
    num_heads: int = 4
    num_kv_heads: int = 2
    gate_up_type: int = Q8_0
    down_type: int = Q8_0
    context_length: int = 2048


def make_random_moe(path: Path, shape: Shape = Shape(), seed: int = 0) -> Path:  # noqa: B008 (frozen)
    """Write the model to `path` and return it; the same seed gives the same bytes."""
    writer = GGUFWriter(path, shape.architecture)
    _write_metadata(writer, shape)
    _write_tokenizer(writer)
    _Weights(writer, shape, np.random.default_rng(seed)).write()
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _write_metadata(writer: GGUFWriter, shape: Shape) -> None:
    writer.add_name(f"random-{shape.architecture}-{shape.num_experts}x")
    writer.add_block_count(shape.num_layers)
    writer.add_context_length(shape.context_length)
    writer.add_embedding_length(shape.hidden_dim)
    writer.add_feed_forward_length(shape.expert_dim)
    writer.add_expert_feed_forward_length(shape.expert_dim)
    writer.add_expert_count(shape.num_experts)
    writer.add_expert_used_count(shape.top_k)
    writer.add_head_count(shape.num_heads)
    writer.add_head_count_kv(shape.num_kv_heads)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(shape.hidden_dim // shape.num_heads)
    if shape.architecture == "qwen2moe":
        writer.add_expert_shared_feed_forward_length(shape.shared_dim)
    if shape.architecture == "gpt-oss":
        writer.add_key_length(shape.hidden_dim // shape.num_heads)
        writer.add_value_length(shape.hidden_dim // shape.num_heads)
        writer.add_sliding_window(128)


def _write_tokenizer(writer: GGUFWriter) -> None:
    """GPT-2 byte alphabet without merges: every byte is a token."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in visible]
    letters = {byte: chr(byte) for byte in visible} | {byte: chr(256 + n) for n, byte in enumerate(hidden)}
    tokens = [*CONTROLS] + [letters[byte] for byte in range(256)]
    types = [int(TokenType.CONTROL)] * NUM_CONTROLS + [int(TokenType.NORMAL)] * 256
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([f"{letters[32]} {letters[32]}"])  # the loader wants at least one merge
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(3)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)


class _Weights:
    """Writes tensors in llama.cpp's names."""

    def __init__(self, writer: GGUFWriter, shape: Shape, rng: np.random.Generator) -> None:
        self.writer = writer
        self.shape = shape
        self.rng = rng

    def write(self) -> None:
        d = self.shape.hidden_dim
        self.matrix("token_embd.weight", (NUM_TOKENS, d), Q8_0, scale=1.0)
        self.ones("output_norm.weight", d)
        self.matrix("output.weight", (NUM_TOKENS, d), Q8_0, silent_rows=NUM_CONTROLS)
        for layer in range(self.shape.num_layers):
            self.attention(f"blk.{layer}.")
            self.experts(f"blk.{layer}.")

    def attention(self, prefix: str) -> None:
        shape, d = self.shape, self.shape.hidden_dim
        kv_dim = d // shape.num_heads * shape.num_kv_heads
        oai = shape.architecture == "gpt-oss"
        self.ones(f"{prefix}attn_norm.weight", d)
        self.ones(f"{prefix}{'post_attention_norm' if oai else 'ffn_norm'}.weight", d)
        for part, rows in (("q", d), ("k", kv_dim), ("v", kv_dim), ("output", d)):
            self.matrix(f"{prefix}attn_{part}.weight", (rows, d), Q8_0)
            if oai or (shape.architecture == "qwen2moe" and part != "output"):
                self.writer.add_tensor(f"{prefix}attn_{part}.bias", np.zeros(rows, np.float32))
        if oai:
            self.writer.add_tensor(f"{prefix}attn_sinks.weight", np.zeros(shape.num_heads, np.float32))

    def experts(self, prefix: str) -> None:
        shape = self.shape
        num, d, f = shape.num_experts, shape.hidden_dim, shape.expert_dim
        self.matrix(f"{prefix}ffn_gate_inp.weight", (num, d), F32)
        self.matrix(f"{prefix}ffn_gate_exps.weight", (num, f, d), shape.gate_up_type)
        self.matrix(f"{prefix}ffn_up_exps.weight", (num, f, d), shape.gate_up_type)
        self.matrix(f"{prefix}ffn_down_exps.weight", (num, d, f), shape.down_type)
        if shape.architecture == "gpt-oss":
            self.writer.add_tensor(f"{prefix}ffn_gate_inp.bias", np.zeros(num, np.float32))
            for part, rows in (("gate", f), ("up", f), ("down", d)):
                self.writer.add_tensor(f"{prefix}ffn_{part}_exps.bias", np.zeros((num, rows), np.float32))
        if shape.architecture == "qwen2moe":
            self.matrix(f"{prefix}ffn_gate_inp_shexp.weight", (d,), F32)
            self.matrix(f"{prefix}ffn_gate_shexp.weight", (shape.shared_dim, d), Q8_0)
            self.matrix(f"{prefix}ffn_up_shexp.weight", (shape.shared_dim, d), Q8_0)
            self.matrix(f"{prefix}ffn_down_shexp.weight", (d, shape.shared_dim), Q8_0)

    def matrix(
        self, name: str, dims: tuple[int, ...], type_id: int, scale: float | None = None, silent_rows: int = 0
    ) -> None:
        spread = dims[-1] ** -0.5 if scale is None else scale
        if not can_quantise(type_id):
            blocks = random_blocks(self.rng, type_id, dims, spread)
            self.writer.add_tensor(name, blocks, raw_dtype=GGMLQuantizationType(type_id))
            return
        weights: Floats = (self.rng.standard_normal(dims) * spread).astype(np.float32)
        weights[:silent_rows] = 0  # control tokens that the model never says: generations run to their length
        self.writer.add_tensor(name, quantise(weights, type_id), raw_dtype=GGMLQuantizationType(type_id))

    def ones(self, name: str, size: int) -> None:
        self.writer.add_tensor(name, np.ones(size, np.float32))
