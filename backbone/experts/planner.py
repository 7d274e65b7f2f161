"""
Who computes which picks of one layer call: whoever is back with them soonest, this machine included. Pure.

A few rows (a token, a drafted step) are a matter of delay: one node that holds everything if there is one,
else few; of the nodes that would answer before this machine could, as many of the quickest as it takes. Many
rows (a piece of a prompt) are a matter of rates: block of rows by block, expert by expert, each share goes to
whom it would then finish first, so a slow core gets little and a thin line few rows or none. Rows of one
expert may be computed in several places: sums are integers, so bits do not depend on it.

`slack_s` is how much later than this machine a node may be and still be preferred.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from backbone.experts.deadlines import Line, Size
from backbone.experts.dispatch import LOCAL, Part, Picks

FEW_ROWS = 8  # up to so many, whole experts are given away; more are shared by rate
BLOCK_ROWS = 32
MOST_BLOCKS = 16
EVEN_FROM = 0.75  # of the blocks; until then a block may go to one node whole
WORTH = 0.05  # nodes that carry less of a prompt than that, all together, are not bothered with it


@dataclass(frozen=True, slots=True)
class Candidate:
    """A node that may be asked: what its answers cost, and the largest call it is trusted with."""

    name: str
    line: Line
    most_bytes: float = float("inf")


@dataclass(frozen=True, slots=True)
class LocalCost:
    """
    What this machine needs: `queue_s` until it is free, `s_per_row` for a row of an expert, `load_s(expert)`
    to bring one that is not in memory.
    """

    queue_s: float
    s_per_row: float
    load_s: Callable[[int], float]

    def of(self, experts: Collection[int], num_rows: int) -> float:
        """Give the seconds until this machine has computed so many rows of these experts."""
        if not num_rows:
            return 0.0
        return self.queue_s + num_rows * self.s_per_row + sum(map(self.load_s, experts))

    def loads(self, picks: Picks) -> bool:
        """Tell whether some of these experts are not in memory."""
        return any(map(self.load_s, set(picks.experts.tolist())))

    def whole(self, picks: Picks) -> float:
        """Give the seconds for all of these picks."""
        return self.of(set(picks.experts.tolist()), len(picks.experts))


@dataclass(frozen=True, slots=True)
class Terms:
    """
    On which terms nodes are asked.

    row_bytes: both ways, for a row. slack_s: see above. worth: leave out nodes that hardly help.
    """

    row_bytes: int
    slack_s: float
    worth: bool = True


def plan(
    picks: Picks,
    holders: Mapping[int, Collection[str]],
    candidates: Sequence[Candidate],
    local: LocalCost,
    terms: Terms,
) -> list[Part]:
    """
    Assign every pick to exactly one holder.

    Args:
        picks: what the router chose.
        holders: expert -> nodes that hold its slice of this layer.
        candidates: the nodes that may be asked.
        local: what this machine needs.

    Returns: one part per holder, quickest node first, the local one last.
    """
    if not len(picks.experts):
        return []
    needed = set(picks.experts.tolist())
    alone_s = local.of(needed, len(picks.experts))
    limit_s = alone_s + terms.slack_s
    smallest = Size(terms.row_bytes, 1)
    useful = [each for each in candidates if each.line.at(smallest) <= limit_s]
    holding = {name for expert in needed for name in holders.get(expert, ())}
    useful = [each for each in useful if each.name in holding and each.most_bytes >= terms.row_bytes]
    if not useful:
        return [Part(LOCAL, picks)]
    rows = int(np.count_nonzero(picks.counts))
    if rows <= FEW_ROWS:
        return _cover(picks, holders, useful, local, terms, needed, rows)
    return _share(picks, holders, useful, local, terms)


def _cover(
    picks: Picks,
    holders: Mapping[int, Collection[str]],
    useful: Sequence[Candidate],
    local: LocalCost,
    terms: Terms,
    needed: set[int],
    rows: int,
) -> list[Part]:
    """Give whole experts to few nodes, such that the last answer comes first."""
    per_expert = len(picks.experts) / len(needed)
    held: dict[str, set[int]] = {}
    expected: dict[str, float] = {}
    for each in useful:
        mine = {expert for expert in needed if each.name in holders.get(expert, ())}
        if each.most_bytes >= rows * terms.row_bytes:
            held[each.name] = mine
            expected[each.name] = each.line.at(Size(rows * terms.row_bytes, int(len(mine) * per_expert)))

    def here_s(experts: set[int]) -> float:
        return local.of(experts, int(len(experts) * per_expert)) + terms.slack_s if experts else 0.0

    best_s, best = here_s(needed), dict[int, str]()
    quickest = sorted(held, key=lambda name: (expected[name], name))
    for count in range(1, len(quickest) + 1):
        if expected[quickest[count - 1]] >= best_s:
            break
        chosen, missing = _greedy(quickest[:count], held, needed)
        worst_s = max((expected[name] for name in chosen.values()), default=0.0)
        finish_s = max(worst_s, here_s(missing))
        if finish_s < best_s or (finish_s == best_s and len(chosen) > len(best)):
            best_s, best = finish_s, chosen
    used = [name for name in quickest if name in set(best.values())]
    if not used:
        return [Part(LOCAL, picks)]
    if len(used) == 1 and len(best) == len(needed):
        return [Part(used[0], picks)]
    part_of_expert = np.full(max(needed) + 1, len(used), np.intp)
    for expert, name in best.items():
        part_of_expert[expert] = used.index(name)
    parts = picks.split(part_of_expert, len(used) + (len(best) < len(needed)))
    names: list[str | None] = [*used, LOCAL]
    return [Part(name, part) for name, part in zip(names, parts, strict=False)]


def _greedy(
    names: Sequence[str], held: Mapping[str, set[int]], needed: set[int]
) -> tuple[dict[int, str], set[int]]:
    """Cover the experts with few of these nodes; give who has which, and what nobody has."""
    missing, left, chosen = set(needed), list(names), dict[int, str]()
    while missing and left:
        # max() keeps the first: the quickest among equals
        name = max(left, key=lambda each: len(held[each] & missing))
        gain = held[name] & missing
        if not gain:
            break
        left.remove(name)
        chosen.update(dict.fromkeys(gain, name))
        missing -= gain
    return chosen, missing


class _Load:
    """What one node has been given so far, and when it would be done."""

    __slots__ = ("block", "block_rows", "finish_s", "index", "line", "most_bytes", "num_bytes", "num_rows")

    def __init__(self, index: int, candidate: Candidate) -> None:
        self.index = index
        self.line = candidate.line
        self.most_bytes = candidate.most_bytes
        self.num_bytes = 0
        self.num_rows = 0
        self.finish_s = candidate.line.fixed_s
        self.block, self.block_rows = -1, 0  # rows of that block travel already

    def more_bytes(self, block: int, size: int, rows: int, row_bytes: int) -> int:
        """Give the bytes of so many more rows of a block of this size: no row travels twice."""
        carried = self.block_rows if block == self.block else 0
        return (min(size, carried + rows) - carried) * row_bytes

    def after(self, more_bytes: int, rows: int) -> float:
        """Give when it would be done with that, too."""
        if self.num_bytes + more_bytes > self.most_bytes:
            return float("inf")
        return self.finish_s + more_bytes * self.line.s_per_byte + rows * self.line.s_per_row

    def give(self, block: int, more_bytes: int, rows: int, row_bytes: int) -> None:
        """Note that it is given."""
        self.finish_s = self.after(more_bytes, rows)
        if block != self.block:
            self.block, self.block_rows = block, 0
        self.block_rows += more_bytes // row_bytes
        self.num_bytes += more_bytes
        self.num_rows += rows


class _Sharing:
    """The state of sharing one prompt's rows; `owner` [blocks, experts] says who has what."""

    def __init__(
        self,
        counts: list[list[int]],
        experts: list[int],
        holders: Mapping[int, Collection[str]],
        useful: Sequence[Candidate],
        local: LocalCost,
        terms: Terms,
        block_rows: int,
    ) -> None:
        self.loads = {each.name: _Load(i, each) for i, each in enumerate(useful)}
        self.here = len(useful)  # this machine's number
        self.owner = np.full((len(counts), len(experts)), self.here, np.intp)
        self._counts = counts
        self._experts = experts
        self._local, self._terms = local, terms
        self._size = block_rows
        self._able = [
            [self.loads[name] for name in sorted(holders.get(expert, ())) if name in self.loads]
            for expert in experts
        ]
        self._here_s = local.queue_s
        self._loaded: set[int] = set()

    def whole(self, block: int) -> bool:
        """Give a block to the one node that is done with it first, if its line is what costs; else do not."""
        wanted = [e for e, rows in enumerate(self._counts[block]) if rows]
        able = set.intersection(*(set(self._able[e]) for e in wanted))
        if not able:
            return False
        rows = sum(self._counts[block])
        moved = min(self._size, rows) * self._terms.row_bytes
        load = min(able, key=lambda each: (each.after(moved, rows), each.index))
        here_s = self._here_s + rows * self._local.s_per_row
        here_s += sum(self._local.load_s(self._experts[e]) for e in wanted if e not in self._loaded)
        if load.after(moved, rows) >= here_s + self._terms.slack_s:
            return False
        if moved * load.line.s_per_byte < rows * load.line.s_per_row:
            return False
        load.give(block, moved, rows, self._terms.row_bytes)
        self.owner[block, wanted] = load.index
        return True

    def each(self, block: int, order: Sequence[int]) -> None:
        """Give each expert's rows of a block to whom they would be done first with."""
        row_bytes, local = self._terms.row_bytes, self._local
        for e in order:
            rows = self._counts[block][e]
            if not rows:
                continue
            load_s = 0.0 if e in self._loaded else local.load_s(self._experts[e])
            here_s = self._here_s + load_s + rows * local.s_per_row
            best, best_s, best_bytes = None, here_s + self._terms.slack_s, 0
            for load in self._able[e]:
                more = load.more_bytes(block, self._size, rows, row_bytes)
                then_s = load.after(more, rows)
                if then_s < best_s:
                    best, best_s, best_bytes = load, then_s, more
            if best is None:
                self._here_s = here_s
                self._loaded.add(e)
            else:
                best.give(block, best_bytes, rows, row_bytes)
                self.owner[block, e] = best.index

    def drop_unworthy(self, num_rows: int) -> None:
        """Take back what saves next to nothing: each node asked is one more that may be late."""
        dropped = 0
        for load in sorted(self.loads.values(), key=lambda each: each.num_rows):
            dropped += load.num_rows
            if dropped > WORTH * num_rows:
                return
            self.owner[self.owner == load.index] = self.here


def _share(
    picks: Picks,
    holders: Mapping[int, Collection[str]],
    useful: Sequence[Candidate],
    local: LocalCost,
    terms: Terms,
) -> list[Part]:
    """Give each share of rows to whom it would then be done first with."""
    tokens = len(picks.counts)
    blocks = min(MOST_BLOCKS, -(-tokens // BLOCK_ROWS))
    experts, index = np.unique(picks.experts, return_inverse=True)
    block_of_pick = np.repeat(np.arange(tokens), picks.counts) * blocks // tokens
    flat = np.bincount(block_of_pick * len(experts) + index, minlength=blocks * len(experts))
    counts = flat.reshape(blocks, len(experts))
    sharing = _Sharing(counts.tolist(), experts.tolist(), holders, useful, local, terms, -(-tokens // blocks))
    order = np.argsort(-counts.sum(axis=0), kind="stable").tolist()
    for block in range(blocks):
        # The last blocks make up for the coarseness of the first.
        if not counts[block].any() or (block < EVEN_FROM * blocks and sharing.whole(block)):
            continue
        sharing.each(block, order)
    if terms.worth:
        sharing.drop_unworthy(len(picks.experts))
    return _parts(picks, sharing.owner[block_of_pick, index], list(sharing.loads))


def _parts(picks: Picks, part_of_pick: npt.NDArray[np.intp], names: list[str]) -> list[Part]:
    used = np.unique(part_of_pick).tolist()
    if len(used) == 1:
        return [Part(names[used[0]] if used[0] < len(names) else LOCAL, picks)]
    renumbered = np.searchsorted(used, part_of_pick)
    holders = [names[i] if i < len(names) else LOCAL for i in used]
    return [
        Part(holder, part) for holder, part in zip(holders, picks.divide(renumbered, len(used)), strict=True)
    ]
