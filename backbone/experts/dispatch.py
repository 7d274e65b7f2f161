"""Which experts compute which rows of one layer call, whole or in parts. Pure."""

from collections.abc import Collection, Mapping
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

    def first_rows(self, count: int, experts: Collection[int]) -> "Picks":
        """Keep what the first `count` rows that want any of these experts want of them."""
        row_of_pick = np.repeat(np.arange(len(self.counts)), self.counts)
        chosen = np.isin(self.experts, list(experts))
        chosen &= np.isin(row_of_pick, np.unique(row_of_pick[chosen])[:count])
        counts = np.bincount(row_of_pick[chosen], minlength=len(self.counts)).astype(np.uint16)
        return Picks(counts, self.experts[chosen], self.weights[chosen])

    def distinct(self) -> tuple[list[int], npt.NDArray[np.uint16]]:
        """Give the experts without repetition, and for each pick its place among them."""
        place: dict[int, int] = {}
        index = [place.setdefault(expert, len(place)) for expert in self.experts.tolist()]
        return list(place), np.array(index, np.uint16)

    def split(self, part_of_expert: npt.NDArray[np.intp], num_parts: int) -> list["Picks"]:
        """Divide by expert; `part_of_expert[e]` names the part. Keeps the order of picks inside each part."""
        return self.divide(part_of_expert[self.experts], num_parts)

    def divide(self, part_of_pick: npt.NDArray[np.intp], num_parts: int) -> list["Picks"]:
        """Divide pick by pick; keeps their order inside each part."""
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


def covers(node: str, picks: Picks, holders: Mapping[int, Collection[str]]) -> bool:
    """Tell whether one node holds every expert of these picks."""
    return all(node in holders.get(expert, ()) for expert in set(picks.experts.tolist()))


def row_chunks(num_tokens: int, hidden_dim: int, max_bytes: int = 8 << 20) -> list[slice]:
    """Cut a large batch into row ranges whose widest answer (8 bytes per channel) stays within one frame."""
    rows = max(1, max_bytes // (8 * hidden_dim))
    return [slice(start, min(start + rows, num_tokens)) for start in range(0, num_tokens, rows)]
