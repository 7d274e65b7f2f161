"""
MoE families as their files come: keys of the real ones at small widths; a row is all that a family needs.

Keys stand without the architecture's prefix. `nextn` layers follow the others, as converters write them for
predicting further tokens. Tensors are not listed: the engine says which it wants (`wanted.py`).
"""

from dataclasses import dataclass
from typing import Any

D, F = 256, 64  # hidden_dim, expert_dim
NUM_EXPERTS, TOP_K = 16, 4
SIGMOID = 2
Q8_0, NVFP4 = 8, 40

COMMON: dict[str, Any] = {
    "context_length": 2048, "embedding_length": D, "feed_forward_length": 256, "attention.head_count": 4,
    "attention.head_count_kv": 2, "attention.layer_norm_rms_epsilon": 1e-6,
    "attention.layer_norm_epsilon": 1e-5, "rope.freq_base": 10000.0,
    "expert_feed_forward_length": F, "expert_count": NUM_EXPERTS,
    "expert_used_count": TOP_K,
}  # fmt: skip
ROUTED = {"expert_gating_func": SIGMOID, "expert_weights_norm": True, "expert_weights_scale": 2.5}
LED = ROUTED | {"expert_shared_count": 1, "leading_dense_block_count": 1}
HEADS = {"attention.key_length": 64, "attention.value_length": 64}
LATENT = {  # attention of DeepSeek-V3
    "attention.head_count": 2, "attention.head_count_kv": 1, "attention.q_lora_rank": 96,
    "attention.kv_lora_rank": 64, "attention.key_length": 96, "attention.value_length": 64,
    "attention.key_length_mla": 64, "attention.value_length_mla": 32, "rope.dimension_count": 32,
}  # fmt: skip
INDEXER = {
    "attention.indexer.head_count": 64,
    "attention.indexer.key_length": 128,
    "attention.indexer.top_k": 2048,
}


@dataclass(frozen=True, slots=True)
class Family:
    """`moe`: the layers whose experts the graph uses. `leave_out`: tensors that the real files lack."""

    architecture: str
    layers: int
    moe: tuple[int, ...]
    keys: dict[str, Any]
    nextn: int = 0
    leave_out: tuple[str, ...] = ()
    expert_type: int = Q8_0


FAMILIES = {
    "step-3.7": Family(
        "step35", 4, (1, 2, 3),
        ROUTED | HEADS | {"expert_shared_feed_forward_length": F, "attention.sliding_window": 64,
        "attention.sliding_window_pattern": [False, True, True, False, True],
        "swiglu_clamp_exp": [0.0, 0.0, 7.0, 7.0, 0.0], "swiglu_clamp_shexp": [0.0] * 5,
        "rope.dimension_count": 64},
        nextn=1, leave_out=(r"blk\.0\.(ffn_.*(exps|shexp|gate_inp)|exp_probs_b)",
                            r"blk\.[1-9]\.ffn_(gate|up|down)\.weight"),
    ),
    "qwen-3.5": Family(
        "qwen35moe", 4, (0, 1, 2, 3),
        HEADS | {"expert_shared_feed_forward_length": F, "full_attention_interval": 4, "ssm.conv_kernel": 4,
        "ssm.inner_size": 256, "ssm.state_size": 64, "ssm.time_step_rank": 4, "ssm.group_count": 2,
        "rope.dimension_count": 16, "rope.dimension_sections": [3, 3, 2, 0]}, nextn=1,
    ),
    "glm-4.6": Family("glm4moe", 3, (1, 2), LED | HEADS | {"rope.dimension_count": 32}, nextn=1),
    "glm-5.2": Family("glm-dsa", 3, (1, 2), LED | LATENT | INDEXER, nextn=1),
    "deepseek-v3": Family(
        "deepseek2", 3, (1, 2),
        LED | LATENT | {"expert_group_count": 4, "expert_group_used_count": 2}, nextn=1,
    ),
    "glm-5-next": Family(  # its clamp comes before the activation, which no list of ours says
        "glm5-next", 3, (1, 2),
        LED | LATENT | INDEXER | {"swiglu_clamp_exp": 7.0, "ssm.conv_kernel": 4, "kda.head_dim": 64,
        "kda.gate_lower_bound": -5.0, "hyper_connection.count": 4, "hyper_connection.sinkhorn_iterations": 2,
        "hyper_connection.epsilon": 1e-6, "hyper_connection.low_rank": 8,
        "attention.compress_ratios": [4, 4, 4],
        "attention.indexer.kpool": 4, "attention.indexer.kpool_select_tail": True, "attention.head_count": 4,
        "attention.head_count_kv": [0, 1, 0], "attention.key_length": 64, "rope.dimension_count": 0},
    ),
    "arctic": Family("arctic", 2, (0, 1), {}),  # a norm of its is called ffn_norm_exps
    "qwen-3 in nvfp4": Family("qwen3moe", 2, (0, 1), HEADS, expert_type=NVFP4),
    "puzzle": Family(  # layers differ in how many experts are chosen, and in their width
        "nemotron_h_moe", 5, (2, 4),
        ROUTED | {"expert_shared_feed_forward_length": 128, "expert_shared_count": 1, "ssm.conv_kernel": 4,
        "ssm.inner_size": 512, "ssm.state_size": 16, "ssm.time_step_rank": 8, "ssm.group_count": 2,
        "attention.head_count_kv": [0, 2, 0, 0, 0], "feed_forward_length": [0, 0, F, 0, F],
        "expert_used_count": [0, 0, 6, 0, 4], "expert_feed_forward_length": [0, 0, 64, 0, 96]},
    ),
}  # fmt: skip
