"""
How the tensors of routed experts are called: one grammar, for who reads the file and for who places them.

    blk.LAYER.ffn_PART_exps.KIND    PART gate, up, down, or gate_up (merged); KIND weight, bias, scale

Nothing else is an expert, whatever its name contains: Arctic has a norm `ffn_norm_exps`, NVFP4 files have an
`ffn_up_exps.input_scale` that the graph multiplies x with, GroveMoE small experts in `ffn_up_chexps`.
"""

import re

PARTS = ("gate", "up", "down", "gate_up")
KINDS = ("weight", "bias", "scale")

# Read by std::regex (ECMAScript) in llama.cpp as well as by re.
PATTERN = rf"^blk\.[0-9]+\.ffn_({'|'.join(PARTS)})_exps\.({'|'.join(KINDS)})$"
_DOWN = re.compile(r"^blk\.([0-9]{1,9})\.ffn_down_exps\.weight$", re.ASCII)


def tensor_name(layer: int, part: str, kind: str = "weight") -> str:
    return f"blk.{layer}.ffn_{part}_exps.{kind}"


def layer_with_experts(name: str) -> int | None:
    """The layer whose experts this tensor completes; every one has a `down`. None for any other tensor."""
    found = _DOWN.match(name)
    return None if found is None else int(found[1])
