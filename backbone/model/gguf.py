"""
Open a GGUF and say what its routed experts are: layers, shapes and formats, and the bytes of any expert.

Expert bytes are views into the mapped file (`gguf_file`), so opening a large model reads no weights. Split
files (`…-00001-of-00003.gguf`) are opened together, from whichever of them is named.

What is done with the experts a GGUF does not say: llama.cpp's graph code does, per architecture. So formulas
of an opened model have shapes and formats only; `Model.as_computed` completes them with what the engine saw
in its graph (`graph.py`), and leaves out layers that the graph does not use.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from backbone.errors import FormulaUnsupported, ModelError
from backbone.model.expert_tensors import layer_with_experts, tensor_name
from backbone.model.formula import FORMATS, Formula
from backbone.model.gguf_file import GgufFile, TensorInfo, shown
from backbone.model.gguf_keys import Keys
from backbone.model.gguf_split import open_parts
from backbone.model.graph import SeenLayer, require_agreement

F32 = 0
MAX_EXPERTS = 4096  # these four as in relay/wire/manifest.py
MAX_HIDDEN_DIM = 0xFFFF
MAX_EXPERT_DIM = 1 << 20
MAX_SLICE_BYTES = 1 << 30

type Bytes = npt.NDArray[np.uint8]
type Located = dict[str, tuple[GgufFile, TensorInfo]]


@dataclass(frozen=True, slots=True)
class MoeLayer:
    """
    One layer with routed experts.

    Parts are [num_experts, bytes of one expert's part], uint8, views into the file; gate is None when there
    is none or when `up` holds gate and up merged (gate rows first). `biases` and `scales` stand behind the
    matrices, in their order, where the formula has them.
    """

    layer: int
    formula: Formula
    gate: Bytes | None = field(repr=False)
    up: Bytes = field(repr=False)
    down: Bytes = field(repr=False)
    biases: tuple[Bytes, ...] = field(default=(), repr=False)
    scales: tuple[Bytes, ...] = field(default=(), repr=False)

    def parts(self) -> tuple[Bytes, ...]:
        """All parts of a slice, in their order."""
        gate = () if self.gate is None else (self.gate,)
        biases = self.biases if self.formula.biased else ()
        return (*gate, self.up, self.down, *biases, *(self.scales if self.formula.scaled else ()))


@dataclass(frozen=True, slots=True)
class Model:
    """A MoE model on disk."""

    path: Path  # of the first file; links are not followed, its siblings are called like it
    files: tuple[Path, ...]
    name: str
    architecture: str
    num_experts: int
    top_k: int  # the largest of all layers
    layers: dict[int, MoeLayer]  # only those with routed experts, ascending
    faults: dict[int, ModelError] = field(default_factory=dict, repr=False)
    """Layers whose experts cannot be read, though the graph may not want them."""

    @property
    def formulas(self) -> dict[int, Formula]:
        return {layer: moe.formula for layer, moe in self.layers.items()}

    def as_computed(self, seen: Iterable[SeenLayer]) -> "Model":
        """
        Give the model that the engine's graph computes: its layers, its arithmetic.

        Raises:
            EngineRefused: graph and file contradict each other.
            ModelError: the graph wants a layer that cannot be read.
        """
        entries = sorted(seen, key=lambda entry: entry.layer)
        for entry in entries:
            if entry.layer in self.faults:
                raise self.faults[entry.layer]
        require_agreement(self.formulas, entries)
        layers = {e.layer: replace(self.layers[e.layer], formula=e.formula) for e in entries}
        for entry in entries:
            if entry.num_experts != self.num_experts:
                what = f"{entry.num_experts} experts where {self.path.name} has {self.num_experts}"
                raise FormulaUnsupported(what, entry.layer)
        return replace(self, layers=layers, top_k=max(entry.top_k for entry in entries), faults={})

    def slice_parts(self, layer: int, expert: int) -> tuple[memoryview, ...]:
        """The pieces of one slice: gate, up, down, biases, scales; matrices are views into the file."""
        moe = self.layers[layer]
        if not 0 <= expert < self.num_experts:
            raise IndexError(f"expert {expert} of {self.num_experts}")
        return tuple(memoryview(part[expert]) for part in moe.parts())

    def slice_bytes(self, layer: int, expert: int) -> bytes:
        """One slice, gate ‖ up ‖ down ‖ biases ‖ scales, as it is sent and hashed."""
        return b"".join(self.slice_parts(layer, expert))

    @property
    def expert_bytes(self) -> int:
        """Size of all routed experts together: what the backbone does not have to hold."""
        return self.num_experts * sum(moe.formula.slice_bytes for moe in self.layers.values())


def open_model(path: Path | str) -> Model:
    """
    Read the metadata of a MoE GGUF.

    Raises:
        ModelError: not a GGUF, not a MoE, or its tensors contradict its metadata; names file and tensor.
        FormulaUnsupported: experts in a format this version cannot compute.
    """
    files = open_parts(Path(path).absolute())
    keys = Keys(files[0])
    architecture = shown(keys.text("general.architecture"))
    tensors = _located(files)
    with_experts = sorted({n for name in tensors if (n := layer_with_experts(name)) is not None})
    if not with_experts:
        raise ModelError(_why_no_experts(keys, architecture, tensors))
    layers, faults = {}, {}
    certain = keys.number(f"{architecture}.block_count") - keys.number(
        f"{architecture}.nextn_predict_layers", default=0
    )
    num_experts = 0
    for layer in with_experts:
        try:
            moe = _Reader(tensors, layer, num_experts).read()
        except ModelError as exc:
            if layer < certain:
                raise
            faults[layer] = exc  # of a layer that predicts further tokens: the graph seldom wants it
            continue
        layers[layer] = moe
        num_experts = len(moe.down)
    if not layers:
        raise next(iter(faults.values()))
    top_k = max(keys.number_of(f"{architecture}.expert_used_count", layer) for layer in layers)
    if not 1 <= top_k <= num_experts:
        raise ModelError(f"{files[0].path.name}: {top_k} experts are chosen of {num_experts}")
    return Model(
        path=files[0].path,
        files=tuple(file.path for file in files),
        name=shown(keys.text("general.name", files[0].path.stem)) or "unnamed",
        architecture=architecture,
        num_experts=num_experts,
        top_k=top_k,
        layers=layers,
        faults=faults,
    )


def _located(files: list[GgufFile]) -> Located:
    tensors: Located = {}
    for file in files:
        for tensor in file.tensors.values():
            if tensor.name in tensors:
                others = tensors[tensor.name][0].path.name
                raise ModelError(f"{file.path.name}: {shown(tensor.name)} is in {others} already")
            tensors[tensor.name] = file, tensor
    return tensors


def _why_no_experts(keys: Keys, architecture: str, tensors: Located) -> str:
    count = keys.largest(f"{architecture}.expert_count")
    if count == 0:
        return f"{keys.file_name} has no routed experts (architecture {architecture})"
    if any(name.startswith("blk.0.ffn_down.") and name != "blk.0.ffn_down.weight" for name in tensors):
        return f"{keys.file_name} has each expert in a tensor of its own, an old layout: convert it again"
    return f"{keys.file_name} says {count} experts but holds no tensor of theirs"


class _Reader:
    """Reads the experts of one layer, and names file and tensor when something is wrong with them."""

    __slots__ = ("_layer", "_num_experts", "_tensors")

    def __init__(self, tensors: Located, layer: int, num_experts: int) -> None:
        """`num_experts`: of the layers before; 0 for the first."""
        self._tensors = tensors
        self._layer = layer
        self._num_experts = num_experts

    def read(self) -> MoeLayer:
        expert_dim, hidden_dim = self._dims()
        down = self._matrix("down", expert_dim, hidden_dim)
        merged = self._matrix("gate_up", hidden_dim, 2 * expert_dim)
        gate = None if merged else self._matrix("gate", hidden_dim, expert_dim)
        up = merged or self._matrix("up", hidden_dim, expert_dim)
        if up is None or down is None:
            raise ModelError(f"{self._file_name('down')}: {tensor_name(self._layer, 'up')} is missing")
        gate_type = merged.type_id if merged else None if gate is None else gate.type_id
        separate = ("gate", "up", "down") if gate else ("up", "down")
        biased = {"gate_up": 2 * expert_dim, "down": hidden_dim} if merged else {}
        biased = biased or {part: hidden_dim if part == "down" else expert_dim for part in separate}
        # llama.cpp multiplies merged gate and up by the scale of up
        scaled = ("up", "up", "down") if merged else separate
        formula = Formula(
            hidden_dim=hidden_dim,
            expert_dim=expert_dim,
            gate_type=gate_type,
            up_type=up.type_id,
            down_type=down.type_id,
            biased=any(self._has(part, "bias") for part in biased),
            scaled=any(self._has(part, "scale") for part in scaled),
        )
        if formula.slice_bytes > MAX_SLICE_BYTES:
            what = f"an expert of {formula.slice_bytes} bytes, {tensor_name(self._layer, 'down')}"
            raise FormulaUnsupported(f"{what} of {self._file_name('down')}", self._layer)
        return MoeLayer(
            self._layer,
            formula,
            None if gate is None else self._per_expert(gate),
            self._per_expert(up),
            self._per_expert(down),
            tuple(self._floats(part, "bias", n, 0) for part, n in biased.items()) if formula.biased else (),
            tuple(self._floats(part, "scale", 1, 1) for part in scaled) if formula.scaled else (),
        )

    def _dims(self) -> tuple[int, int]:
        """expert_dim and hidden_dim, from the shape of `down` (ggml order: columns first)."""
        _, down = self._tensors[tensor_name(self._layer, "down")]
        if len(down.shape) > 3:
            raise self._wrong(down, f"has shape {down.shape}")
        expert_dim, hidden_dim, num_experts = (*down.shape, 1, 1)[:3]
        if not (
            1 <= expert_dim <= MAX_EXPERT_DIM
            and 1 <= hidden_dim <= MAX_HIDDEN_DIM
            and 1 <= num_experts <= MAX_EXPERTS
        ):
            raise self._wrong(down, f"has shape {down.shape}")
        self._num_experts = self._num_experts or num_experts
        return expert_dim, hidden_dim

    def _matrix(self, part: str, columns: int, rows: int) -> TensorInfo | None:
        if (found := self._tensors.get(tensor_name(self._layer, part))) is None:
            return None
        file, tensor = found
        expected = (columns, rows, self._num_experts)
        if (*tensor.shape, 1, 1)[: max(3, len(tensor.shape))] != expected:
            raise self._wrong(tensor, f"has shape {tensor.shape}, expected {expected}")
        layout = FORMATS.get(tensor.type_id)
        what = f"weight format {tensor.type_id}" if layout is None else None
        if layout is not None and columns % layout.block:
            what = f"{layout.name} rows of {columns} columns (blocks of {layout.block})"
        if what is not None:
            raise FormulaUnsupported(f"{what}, {tensor.name} of {file.path.name}", self._layer)
        return tensor

    def _per_expert(self, tensor: TensorInfo) -> Bytes:
        """The expert is the outermost dimension, so each is contiguous."""
        file, _ = self._tensors[tensor.name]
        return file.bytes_of(tensor).reshape(self._num_experts, -1)

    def _floats(self, part: str, kind: str, count: int, default: float) -> Bytes:
        """Floats of each expert, [num_experts, 4 * count]; the default where the file has none."""
        if (found := self._tensors.get(tensor_name(self._layer, part, kind))) is None:
            values = np.full(count, default, "<f4").view(np.uint8)
            return np.broadcast_to(values, (self._num_experts, 4 * count))
        file, tensor = found
        if tensor.type_id != F32:
            what = f"{tensor.name} in format {tensor.type_id} of {file.path.name}"
            raise FormulaUnsupported(what, self._layer)
        if math.prod(tensor.shape) != count * self._num_experts:
            raise self._wrong(tensor, f"has shape {tensor.shape}, expected {self._num_experts} times {count}")
        return self._per_expert(tensor)

    def _has(self, part: str, kind: str) -> bool:
        return tensor_name(self._layer, part, kind) in self._tensors

    def _file_name(self, part: str) -> str:
        return self._tensors[tensor_name(self._layer, part)][0].path.name

    def _wrong(self, tensor: TensorInfo, what: str) -> ModelError:
        return ModelError(f"{self._tensors[tensor.name][0].path.name}: {tensor.name} {what}")
