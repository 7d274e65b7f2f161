"""
What llama.cpp's graph computes of a model, beside what its file holds. Pure.

The graph is the truth: a file may hold layers that it does not use (those for predicting several tokens), and
does not say which activation or clamp its experts have; the graph shows it, whatever the architecture. What
both know must agree.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

from backbone.errors import EngineRefused
from backbone.model.expert_tensors import tensor_name
from backbone.model.formula import Formula

# Read from tensors. The rest of a formula is arithmetic, and only the graph has it.
STRUCTURE = ("hidden_dim", "expert_dim", "gate_type", "up_type", "down_type")
OF_THE_FILE = ("biased", "scaled")  # the file may have more than the graph uses, never less


@dataclass(frozen=True, slots=True)
class SeenLayer:
    """The routed experts of one layer as llama.cpp's graph computes them."""

    layer: int
    num_experts: int
    top_k: int
    formula: Formula

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        formula = Formula.from_json(data["formula"])
        return cls(int(data["layer"]), int(data["num_experts"]), int(data["top_k"]), formula)


def require_agreement(in_file: Mapping[int, Formula], in_graph: Iterable[SeenLayer]) -> None:
    """
    Check that the experts of each layer of the graph are those that the file has for it.

    Raises:
        EngineRefused: names layer, tensor and difference; also when the graph uses no experts at all.
    """
    seen = list(in_graph)
    if not seen:
        layer = min(in_file, default=0)
        raise _refused(layer, "the graph uses none of the file's experts")
    for entry in seen:
        if entry.layer not in in_file:
            raise _refused(entry.layer, "the graph uses experts that could not be read from the file")
        if what := difference(in_file[entry.layer], entry.formula):
            raise _refused(entry.layer, f"graph and GGUF differ: {what}")


def require_same(before: Iterable[SeenLayer], now: Iterable[SeenLayer]) -> None:
    """
    Check that an engine that was started again computes what it computed before.

    Raises:
        EngineRefused: it does not: the file was changed meanwhile.
    """
    former, found = ({entry.layer: entry for entry in entries} for entries in (before, now))
    for layer in sorted(former.keys() | found.keys()):
        if former.get(layer) != found.get(layer):
            raise _refused(layer, "it is not what it was when the engine was first started: another file")


def difference(in_file: Formula, in_graph: Formula) -> str:
    """Name the fields that contradict each other: `up_type 8, in the graph 12`; empty when none does."""
    a, b = in_file.to_json(), in_graph.to_json()
    contrary = [name for name in STRUCTURE if a[name] != b[name]]
    contrary += [name for name in OF_THE_FILE if b[name] and not a[name]]
    return "; ".join(f"{name} {a[name]}, in the graph {b[name]}" for name in contrary)


def _refused(layer: int, why: str) -> EngineRefused:
    return EngineRefused("MUL_MAT_ID", layer, tensor_name(layer, "down"), why)
