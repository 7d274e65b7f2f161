"""
Decide which node computes which expert rows of one layer call. Pure.

The goal is few nodes, not even load: a layer's round lasts as long as its slowest node, x is sent once per
node, and one node answers one partial however many experts it computed (DESIGN section 2). So: one node that
holds everything if there is one, else a greedy cover, fastest first among equals, and the local kernel for
what nobody holds.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

LOCAL = None
"""The holder of what no node computes: this machine, from the GGUF on disk."""


@dataclass(frozen=True, slots=True, eq=False)
class Picks:
    """
    Which experts compute which rows, row by row, as a Dispatch frame carries them.

    Shapes:
        counts   [num_tokens]  uint16; how many picks each row has here
        experts  [num_picks]   uint16
        weights  [num_picks]   float32; the router's, one per pick
    """

    counts: npt.NDArray[np.uint16]
    experts: npt.NDArray[np.uint16]
    weights: npt.NDArray[np.float32]

    @staticmethod
    def of(ids: npt.NDArray[np.int32], weights: npt.NDArray[np.float32]) -> "Picks":
        """Take all picks of a router's choice: `ids` and `weights` are [num_tokens, top_k]."""
        num_tokens, top_k = ids.shape
        return Picks(
            np.full(num_tokens, top_k, np.uint16),
            ids.astype(np.uint16).ravel(),
            np.ascontiguousarray(weights).ravel(),
        )

    def distinct(self) -> tuple[list[int], npt.NDArray[np.uint16]]:
        """Give the experts without repetition, and for each pick its place among them."""
        place: dict[int, int] = {}
        index = [place.setdefault(expert, len(place)) for expert in self.experts.tolist()]
        return list(place), np.array(index, np.uint16)

    def split(self, part_of_expert: npt.NDArray[np.intp], num_parts: int) -> list["Picks"]:
        """Divide by expert; `part_of_expert[e]` names the part. Keeps the order of picks inside each part."""
        part_of_pick = part_of_expert[self.experts]
        row_of_pick = np.repeat(np.arange(len(self.counts)), self.counts)
        parts = []
        for part in range(num_parts):
            chosen = part_of_pick == part
            counts = np.bincount(row_of_pick[chosen], minlength=len(self.counts)).astype(np.uint16)
            parts.append(Picks(counts, self.experts[chosen], self.weights[chosen]))
        return parts


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """What one holder is asked: a node's id, or `LOCAL`."""

    holder: str | None
    picks: Picks


def plan(
    picks: Picks,
    holders: Mapping[int, Collection[str]],
    preference: Sequence[str],
    excluded: Collection[str] = (),
) -> list[Part]:
    """
    Assign every pick to exactly one holder.

    Args:
        picks: what the router chose.
        holders: expert -> nodes that hold its slice of this layer.
        preference: nodes, best first; a node that is not in it is not used.
        excluded: nodes that already failed these picks.

    Returns: one part per holder, remote ones first in the order of `preference`, the local one last.
    """
    needed = set(picks.experts.tolist())
    held = {
        node: {expert for expert in needed if node in holders.get(expert, ())}
        for node in preference
        if node not in excluded
    }
    holder_of: dict[int, str] = {}
    missing = set(needed)
    while missing and held:
        node = max(
            held, key=lambda name: len(held[name] & missing)
        )  # max() keeps the first: preference breaks ties
        gain = held.pop(node) & missing
        if not gain:
            break
        holder_of.update(dict.fromkeys(gain, node))
        missing -= gain
    used = [node for node in preference if node in set(holder_of.values())]
    if not used:
        return [Part(LOCAL, picks)] if needed else []
    if len(used) == 1 and not missing:
        return [Part(used[0], picks)]
    part_of_expert = np.full(max(needed) + 1, len(used), np.intp)
    for expert, node in holder_of.items():
        part_of_expert[expert] = used.index(node)
    parts = picks.split(part_of_expert, len(used) + bool(missing))
    names: list[str | None] = [*used, LOCAL]
    return [Part(name, part) for name, part in zip(names, parts, strict=False)]


def covers(node: str, picks: Picks, holders: Mapping[int, Collection[str]]) -> bool:
    """Tell whether one node holds every expert of these picks."""
    return all(node in holders.get(expert, ()) for expert in set(picks.experts.tolist()))


def row_chunks(num_tokens: int, hidden_dim: int, max_bytes: int = 8 << 20) -> list[slice]:
    """Cut a large batch into row ranges whose widest answer (8 bytes per channel) stays within one frame."""
    rows = max(1, max_bytes // (8 * hidden_dim))
    return [slice(start, min(start + rows, num_tokens)) for start in range(0, num_tokens, rows)]
