"""
Make a small model of a family: random weights, the family's routing, the engine's own list of tensors.

Weights keep signals near one: matrices are N(0, 1/columns), norms near one, experts large enough to matter.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter

from backbone.engine.supervisor import PACKAGE_ROOT
from backbone.model.quantise import can_quantise, quantise, random_blocks
from backbone.model.random_model import NUM_CONTROLS, Floats, _write_tokenizer
from tests.models.families import COMMON, FAMILIES, NVFP4, Family

F32, Q8_0 = 0, 8
EXPERT = re.compile(r"blk\.\d+\.ffn_(gate|up|down)_exps\.weight$")
SCALE = re.compile(r"_exps\.(input_)?scale$")
QUANTISED = re.compile(r"(token_embd|output|attn_(q|k|v|output|qkv)|ffn_(gate|up|down)(_shexp)?)\.weight$")
SELDOM = re.compile(  # tensors that the engine would take and few files have
    r"attn_(q|k|v|qkv|output)\.bias|ffn_(gate|up|down)(_exps)?\.bias|\.(input_)?scale$|rope_(freqs|factors)"
    r"|ffn_gate_inp\.bias|(?<!indexer\.k)_norm\.bias|^output\.bias"
)


def make(name: str, path: Path, seed: int = 0) -> Path:
    """Write the family's model to `path`; the same seed gives the same bytes."""
    family = FAMILIES[name]
    writer = _writer(path, family, name)
    rng = np.random.default_rng(seed)
    for tensor, ne in _tensors(family).items():
        _write(writer, family, tensor, tuple(reversed(ne)), rng)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _writer(path: Path, family: Family, name: str) -> GGUFWriter:
    writer = GGUFWriter(path, family.architecture)
    writer.add_name(f"tiny {name}")
    keys = COMMON | family.keys | {"block_count": family.layers + family.nextn}
    if family.nextn:
        keys["nextn_predict_layers"] = family.nextn
    for key, value in keys.items():
        _put(writer, f"{family.architecture}.{key}", value)
    _write_tokenizer(writer)
    return writer


def _put(writer: GGUFWriter, key: str, value: Any) -> None:
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case _:
            writer.add_array(key, value)


def _tensors(family: Family) -> dict[str, list[int]]:
    """Names and shapes that the engine looks for, without those that the family's files lack."""
    with tempfile.TemporaryDirectory() as scratch:
        keys = Path(scratch) / "keys.gguf"
        writer = _writer(keys, family, "keys")
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        writer.close()
        command = [sys.executable, "-m", "tests.models.wanted", str(keys)]
        run = subprocess.run(
            command, cwd=PACKAGE_ROOT, capture_output=True, text=True, timeout=60, check=False
        )
    assert run.returncode == 0, f"the engine wants other keys: {run.stderr[-1500:]}"
    tensors: dict[str, list[int]] = {}
    for name, ne in json.loads(run.stdout.splitlines()[-1]).items():
        scales = family.expert_type == NVFP4 and SCALE.search(name)
        if any(re.search(pattern, name) for pattern in family.leave_out) or (
            SELDOM.search(name) and not scales
        ):
            continue
        if "gate_up_exps" in name:  # the engine takes both ways; files have two tensors
            for part in ("gate", "up"):
                tensors[name.replace("gate_up", part)] = [ne[0], ne[1] // 2, ne[2]]
        else:
            tensors[name] = ne
    return tensors


def _write(writer: GGUFWriter, family: Family, name: str, dims: tuple[int, ...], rng: Any) -> None:
    gain, type_id = 1.0, F32
    if EXPERT.match(name):
        gain, type_id = 1.5, family.expert_type
    elif QUANTISED.search(name) and dims[-1] % 32 == 0 and len(dims) == 2:
        type_id = Q8_0
    if type_id != F32 and not can_quantise(type_id):
        data = random_blocks(rng, type_id, dims, gain * dims[-1] ** -0.5)
    else:
        values = _values(name, dims, rng) * np.float32(gain)
        data = values if type_id == F32 else quantise(values, type_id)
    writer.add_tensor(name, data, raw_dtype=GGMLQuantizationType(type_id))


def _values(name: str, dims: tuple[int, ...], rng: Any) -> Floats:
    noise: Floats = rng.standard_normal(dims).astype(np.float32)
    last = name.removesuffix(".weight").removesuffix(".bias").rsplit(".", 1)[-1]
    small = np.float32(dims[-1] ** -0.5)
    if name.endswith("scale"):
        return rng.uniform(0.5, 2.0, dims).astype(np.float32)
    if last == "token_embd":
        return noise
    if last == "output":
        noise[:NUM_CONTROLS] = 0  # never said: generations run to their length
    if ("norm" in last and name.endswith(".weight")) or last == "ssm_d":
        return 1 + np.float32(0.1) * noise
    if last == "ssm_a":
        return -np.exp(rng.uniform(-1, 1, dims)).astype(np.float32)
    if last == "ssm_dt" and name.endswith(".bias"):
        return noise - 2
    if last.startswith("ssm_conv1d"):
        return noise * np.float32(0.5)
    if last == "ffn_gate_inp" and len(dims) == 2:
        return 2 * noise * small
    return noise * (np.float32(0.1) if name.endswith(".bias") or last == "exp_probs_b" else small)
