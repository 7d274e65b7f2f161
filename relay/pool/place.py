"""
Decide which node holds which slice: pure, deterministic, and sticky.

The theory. A layer's partial sums save bytes only if few nodes hold the layer (one frame per node), so slices
are handed out layer by layer: consecutive layers to a node. Three passes:

    cover    every slice gets one holder, if memory suffices. Who holds it already keeps it; what nobody holds
             is cut into runs of layers, as long as each node's memory allows, in proportion to it
    keep     what nodes hold beyond that stays, rarest first, while there is room
    fill     what memory is left takes further copies, rarest first: a node that leaves then costs nothing

A slice here is a unit: an index into the model's slices in layer order.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

type Units = npt.NDArray[np.int64]
type Placement = dict[str, Units]  # node -> rising units


@dataclass(frozen=True, slots=True)
class Room:
    """What one node can take: its pledge, and the units it holds already."""

    node: str
    memory_bytes: int
    held: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Need:
    """What is to be held: for each unit its size and its layer, units of a layer side by side."""

    unit_bytes: Units
    unit_layer: Units

    @property
    def num_units(self) -> int:
        return len(self.unit_bytes)


class _Hand:
    """A node while slices are dealt out."""

    __slots__ = ("free", "held", "node", "units")

    def __init__(self, room: Room, num_units: int) -> None:
        self.node = room.node
        self.free = room.memory_bytes
        self.held = {unit for unit in room.held if 0 <= unit < num_units}
        self.units: set[int] = set()

    def take(self, unit: int, size_bytes: int) -> bool:
        if unit in self.units or size_bytes > self.free:
            return False
        self.units.add(unit)
        self.free -= size_bytes
        return True


def place(need: Need, rooms: Sequence[Room]) -> Placement:
    """
    Return what each node shall hold, never more than its pledge, never a unit twice on one node.

    With units of one size, all are placed whenever the nodes together have a slot for each. Neither the order
    of `rooms` nor of a set changes the answer.
    """
    hands = [_Hand(room, need.num_units) for room in sorted(rooms, key=lambda room: room.node)]
    sizes = need.unit_bytes.tolist()
    _cover(need, sizes, hands)
    holders = np.zeros(need.num_units, np.int64)
    for hand in hands:
        holders[list(hand.units)] += 1
    _keep(sizes, holders, hands)
    _fill(need, holders, hands)
    return {hand.node: np.array(sorted(hand.units), np.int64) for hand in hands}


def _cover(need: Need, sizes: list[int], hands: list[_Hand]) -> None:
    """Give every unit one holder, as far as memory reaches."""
    holders: dict[int, list[_Hand]] = {}
    for hand in hands:
        for unit in hand.held:
            holders.setdefault(unit, []).append(hand)
    missing: list[int] = []
    for unit in range(need.num_units):
        owner = max(holders.get(unit, ()), key=lambda hand: hand.free, default=None)
        if owner is None or not owner.take(unit, sizes[unit]):
            missing.append(unit)
    _deal_runs(_by_layer(missing, need.unit_layer), sizes, hands)


def _by_layer(units: Iterable[int], unit_layer: Units) -> list[list[int]]:
    """Cut rising units into one list per layer."""
    runs: dict[int, list[int]] = {}
    for unit in units:
        runs.setdefault(int(unit_layer[unit]), []).append(unit)
    return list(runs.values())


def _deal_runs(layers: list[list[int]], sizes: list[int], hands: list[_Hand]) -> None:
    """Deal consecutive layers to nodes, in proportion to what each could take; then whatever is left over."""
    total = sum(sizes[unit] for units in layers for unit in units)
    shares = [min(hand.free, total) for hand in hands]
    if not total or not sum(shares):
        return
    ends = [total * end / sum(shares) for end in np.cumsum(shares).tolist()]
    left_over: list[int] = []
    position = turn = 0
    for units in layers:
        size = sum(sizes[unit] for unit in units)
        while turn < len(hands) - 1 and position + size / 2 > ends[turn]:
            turn += 1  # the middle of the layer says whose share it is: layers stay whole
        left_over.extend(unit for unit in units if not hands[turn].take(unit, sizes[unit]))
        position += size
    current = hands[0]
    for unit in left_over:
        if not current.take(unit, sizes[unit]):
            current = max(hands, key=lambda hand: hand.free)
            current.take(unit, sizes[unit])


def _keep(sizes: list[int], holders: Units, hands: list[_Hand]) -> None:
    """Let nodes keep the copies they have, rarest first."""
    for hand in hands:
        for unit in sorted(hand.held - hand.units, key=lambda unit: (int(holders[unit]), unit)):
            if hand.take(unit, sizes[unit]):
                holders[unit] += 1


def _fill(need: Need, holders: Units, hands: list[_Hand]) -> None:
    """Use what memory is left for further copies, rarest first, in layer order."""
    smallest = int(need.unit_bytes.min()) if need.num_units else 0
    for hand in hands:
        if hand.free < smallest or len(hand.units) == need.num_units:
            continue
        absent = np.ones(need.num_units, bool)
        absent[list(hand.units)] = False
        candidates = np.flatnonzero(absent)
        candidates = candidates[np.argsort(holders[candidates], kind="stable")]
        fits = candidates[np.cumsum(need.unit_bytes[candidates]) <= hand.free]
        hand.units.update(fits.tolist())
        hand.free -= int(need.unit_bytes[fits].sum())
        holders[fits] += 1


def moved_bytes(need: Need, rooms: Sequence[Room], placement: Mapping[str, Units]) -> int:
    """Return how many bytes of slices nodes have to fetch to get to `placement`."""
    return sum(
        int(need.unit_bytes[unit])
        for room in rooms
        for unit in placement[room.node].tolist()
        if unit not in room.held
    )
