"""
Make small MoE models of random weights, so that tests and checks need no download.

The shapes take every format (multiples of 256), the tokenizer is bytes and four control tokens, the text is
noise: what counts is that llama.cpp runs it, with and without the swarm, and that the same numbers come out.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gguf import ExpertGatingFuncType, GGMLQuantizationType, GGUFWriter, TokenType

from backbone.model.quantise import Floats, can_quantise, quantise, random_blocks

F32 = int(GGMLQuantizationType.F32)
Q8_0 = int(GGMLQuantizationType.Q8_0)
LATENT_DIM, ROPE_DIM = 64, 32  # of deepseek2's attention
SSM_HEADS, SSM_STATE = 4, 16  # of nemotron_h_moe's state-space layer; as many groups, as wide a convolution
CONTROLS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<pad>")
NUM_CONTROLS = len(CONTROLS)
NUM_TOKENS = NUM_CONTROLS + 256
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


CLAMPS = (0.5, 0.0, 1.5)  # by layer, where an architecture has them: low, so that they cut


@dataclass(frozen=True, slots=True)
class Traits:
    """What an architecture of llama.cpp has that others have not; the names are those of its tensors."""

    has_gate: bool = True
    has_merged_gate: bool = False
    norm_of_q_and_k: bool = False
    ffn_norm: str = "ffn_norm"
    other_norms: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()  # parts of the shared expert
    biased: bool = False
    scaled: bool = False
    attention_biases: tuple[str, ...] = ()
    layers_of_two: bool = False  # attention and experts are layers by themselves


GATED = ("gate", "up", "down")
ARCHITECTURES = {
    "llama": Traits(),
    "qwen2moe": Traits(shared=("gate_inp", *GATED), attention_biases=("q", "k", "v")),
    "qwen3moe": Traits(norm_of_q_and_k=True, scaled=True),
    "gpt-oss": Traits(
        ffn_norm="post_attention_norm", biased=True, attention_biases=("q", "k", "v", "output")
    ),
    "grok": Traits(other_norms=("attn_output_norm", "layer_output_norm")),
    "llama4": Traits(shared=GATED),
    "maple": Traits(norm_of_q_and_k=True),
    "step35": Traits(),
    "smallthinker": Traits(),
    "nemotron_h_moe": Traits(has_gate=False, shared=("up", "down"), layers_of_two=True),
    "deepseek2": Traits(has_merged_gate=True, shared=GATED),
}


@dataclass(frozen=True, slots=True)
class Shape:
    """What to make; the defaults give a file of about 4 MB."""

    architecture: str = "qwen2moe"  # one of ARCHITECTURES
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

    @property
    def traits(self) -> Traits:
        return ARCHITECTURES[self.architecture]

    @property
    def head_dim(self) -> int:
        return self.hidden_dim // self.num_heads


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
    two = shape.traits.layers_of_two  # and a state-space layer before them all
    writer.add_block_count(1 + 2 * shape.num_layers if two else shape.num_layers)
    writer.add_context_length(shape.context_length)
    writer.add_embedding_length(shape.hidden_dim)
    writer.add_feed_forward_length(
        [0] + [0, shape.expert_dim] * shape.num_layers if two else shape.expert_dim
    )
    writer.add_expert_feed_forward_length(shape.expert_dim)
    writer.add_expert_count(shape.num_experts)
    writer.add_expert_used_count(shape.top_k)
    writer.add_head_count(shape.num_heads)
    kv_heads = shape.num_heads if shape.architecture == "deepseek2" else shape.num_kv_heads
    writer.add_head_count_kv([0] + [kv_heads, 0] * shape.num_layers if two else kv_heads)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(ROPE_DIM if shape.architecture == "deepseek2" else shape.head_dim)
    if shape.traits.shared:
        writer.add_expert_shared_feed_forward_length(shape.shared_dim)
        writer.add_expert_shared_count(1)
    match shape.architecture:
        case "gpt-oss":
            writer.add_key_length(shape.head_dim)
            writer.add_value_length(shape.head_dim)
            writer.add_sliding_window(128)
        case "llama4":
            writer.add_interleave_moe_layer_step(1)
        case "maple" | "step35":
            writer.add_key_length(shape.head_dim)
            writer.add_value_length(shape.head_dim)
            writer.add_sliding_window(128)
            writer.add_sliding_window_pattern([True, False, True][: shape.num_layers])
            writer.add_swiglu_clamp_exp(CLAMPS[: shape.num_layers])
        case "smallthinker":
            writer.add_expert_gating_func(ExpertGatingFuncType.SIGMOID)
        case "grok":  # without these the embedding drowns all layers
            writer.add_embedding_scale(1.0)
            writer.add_logit_scale(1.0)
        case "nemotron_h_moe":
            writer.add_layer_norm_eps(1e-6)
            writer.add_expert_weights_norm(True)
            writer.add_expert_weights_scale(1.0)
            for add in (
                writer.add_ssm_conv_kernel,
                writer.add_ssm_group_count,
                writer.add_ssm_time_step_rank,
            ):
                add(SSM_HEADS)
            writer.add_ssm_inner_size(shape.hidden_dim)
            writer.add_ssm_state_size(SSM_STATE)
        case "deepseek2":
            writer.add_leading_dense_block_count(0)
            writer.add_expert_weights_scale(1.0)
            writer.add_expert_gating_func(ExpertGatingFuncType.SIGMOID)
            writer.add_q_lora_rank(LATENT_DIM)
            writer.add_kv_lora_rank(LATENT_DIM)
            writer.add_key_length(2 * ROPE_DIM)
            writer.add_value_length(2 * ROPE_DIM)


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
        if self.shape.traits.layers_of_two:
            self.state_space("blk.0.")
        for layer in range(self.shape.num_layers):
            if self.shape.traits.layers_of_two:
                first, second = f"blk.{1 + 2 * layer}.", f"blk.{2 + 2 * layer}."
                self.ones(f"{second}attn_norm.weight", d)
            else:
                first = second = f"blk.{layer}."
                self.ones(f"{first}{self.shape.traits.ffn_norm}.weight", d)
            self.ones(f"{first}attn_norm.weight", d)
            for name in self.shape.traits.other_norms:
                self.ones(f"{first}{name}.weight", d)
            if self.shape.architecture == "deepseek2":
                self.latent_attention(first)
            else:
                self.attention(first)
            self.experts(second)

    def attention(self, prefix: str) -> None:
        shape, d = self.shape, self.shape.hidden_dim
        kv_dim = shape.head_dim * shape.num_kv_heads
        for part, rows in (("q", d), ("k", kv_dim), ("v", kv_dim), ("output", d)):
            self.matrix(f"{prefix}attn_{part}.weight", (rows, d), Q8_0)
            if part in shape.traits.attention_biases:
                self.writer.add_tensor(f"{prefix}attn_{part}.bias", np.zeros(rows, np.float32))
        if shape.traits.norm_of_q_and_k:
            self.ones(f"{prefix}attn_q_norm.weight", shape.head_dim)
            self.ones(f"{prefix}attn_k_norm.weight", shape.head_dim)
        if shape.architecture == "gpt-oss":
            self.writer.add_tensor(f"{prefix}attn_sinks.weight", np.zeros(shape.num_heads, np.float32))

    def state_space(self, prefix: str) -> None:
        """One Mamba-2 layer: llama.cpp wants at least one in an architecture that has them."""
        d, writer = self.shape.hidden_dim, self.writer
        states = 2 * SSM_HEADS * SSM_STATE
        self.ones(f"{prefix}attn_norm.weight", d)
        self.matrix(f"{prefix}ssm_in.weight", (2 * d + states + SSM_HEADS, d), Q8_0)
        self.matrix(f"{prefix}ssm_conv1d.weight", (d + states, SSM_HEADS), F32)
        writer.add_tensor(f"{prefix}ssm_conv1d.bias", np.zeros(d + states, np.float32))
        writer.add_tensor(f"{prefix}ssm_dt.bias", np.zeros(SSM_HEADS, np.float32))
        writer.add_tensor(f"{prefix}ssm_a", np.full((SSM_HEADS, 1), -1, np.float32))
        writer.add_tensor(f"{prefix}ssm_d", np.ones((SSM_HEADS, 1), np.float32))
        writer.add_tensor(f"{prefix}ssm_norm.weight", np.ones((SSM_HEADS, d // SSM_HEADS), np.float32))
        self.matrix(f"{prefix}ssm_out.weight", (d, d), Q8_0)

    def latent_attention(self, prefix: str) -> None:
        """Queries, keys and values through narrow layers, as DeepSeek has them."""
        d, heads = self.shape.hidden_dim, self.shape.num_heads
        self.matrix(f"{prefix}attn_q_a.weight", (LATENT_DIM, d), Q8_0)
        self.ones(f"{prefix}attn_q_a_norm.weight", LATENT_DIM)
        self.matrix(f"{prefix}attn_q_b.weight", (heads * 2 * ROPE_DIM, LATENT_DIM), Q8_0)
        self.matrix(f"{prefix}attn_kv_a_mqa.weight", (LATENT_DIM + ROPE_DIM, d), Q8_0)
        self.ones(f"{prefix}attn_kv_a_norm.weight", LATENT_DIM)
        self.matrix(f"{prefix}attn_kv_b.weight", (heads * 3 * ROPE_DIM, LATENT_DIM), Q8_0)
        self.matrix(f"{prefix}attn_output.weight", (d, heads * 2 * ROPE_DIM), Q8_0)

    def experts(self, prefix: str) -> None:
        shape = self.shape
        num, d, f = shape.num_experts, shape.hidden_dim, shape.expert_dim
        self.matrix(f"{prefix}ffn_gate_inp.weight", (num, d), F32)
        traits, writer = shape.traits, self.writer
        if traits.has_merged_gate:
            self.matrix(f"{prefix}ffn_gate_up_exps.weight", (num, 2 * f, d), shape.gate_up_type)
        else:
            if traits.has_gate:
                self.matrix(f"{prefix}ffn_gate_exps.weight", (num, f, d), shape.gate_up_type)
            self.matrix(f"{prefix}ffn_up_exps.weight", (num, f, d), shape.gate_up_type)
        self.matrix(f"{prefix}ffn_down_exps.weight", (num, d, f), shape.down_type)
        if traits.biased:
            writer.add_tensor(f"{prefix}ffn_gate_inp.bias", np.zeros(num, np.float32))
            for part, rows in (("gate", f), ("up", f), ("down", d)):
                self.matrix(f"{prefix}ffn_{part}_exps.bias", (num, rows), F32, scale=0.5)
        if traits.scaled:
            for part in GATED:
                numbers = self.rng.uniform(0.5, 2, num).astype(np.float32)
                writer.add_tensor(f"{prefix}ffn_{part}_exps.scale", numbers)
        if shape.architecture == "nemotron_h_moe":
            writer.add_tensor(f"{prefix}exp_probs_b.bias", np.zeros(num, np.float32))
        shared = {
            "gate_inp": (d,), "gate": (shape.shared_dim, d), "up": (shape.shared_dim, d),
            "down": (d, shape.shared_dim),
        }  # fmt: skip
        for part in traits.shared:
            self.matrix(f"{prefix}ffn_{part}_shexp.weight", shared[part], F32 if part == "gate_inp" else Q8_0)

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
