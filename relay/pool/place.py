"""
Decide which node holds which slice: pure, deterministic, and sticky.

The theory. A layer's partial sums save bytes only if few nodes hold the layer (one frame per node), so slices
are handed out layer by layer: consecutive layers to a node. Three passes:

    cover    every slice gets one holder, if memory suffices. Who holds it already keeps it; what nobody holds
             is cut into runs of layers, as long as each node's memory allows, in proportion to it. Who does
             not load what it was given (`loading.py`) keeps that and counts for nothing
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

MOST_TRIES = 20_000  # slices looked at to make room: a hole costs downloads elsewhere, and time here


@dataclass(frozen=True, slots=True)
class Room:
    """
    What one node can take: its pledge, and the units it holds already, or is about to.

    doubted: what it is given anew counts for nothing (`loading.py`); it keeps `doubtful` all the same, what
    it shall hold and does not. barred: units it will not hold. most_units: how many one message can name.
    """

    node: str
    memory_bytes: int
    held: frozenset[int] = frozenset()
    doubted: bool = False
    doubtful: frozenset[int] = frozenset()
    barred: frozenset[int] = frozenset()
    most_units: int = 1 << 62


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

    __slots__ = ("barred", "doubted", "doubtful", "free", "held", "most", "node", "units")

    def __init__(self, room: Room, num_units: int) -> None:
        self.node = room.node
        self.free = room.memory_bytes
        self.held = {unit for unit in room.held if 0 <= unit < num_units}
        self.doubted = room.doubted
        self.doubtful = sorted(unit for unit in room.doubtful if 0 <= unit < num_units)
        self.barred = room.barred
        self.most = room.most_units
        self.units: set[int] = set()

    def can_take(self, unit: int, size_bytes: int) -> bool:
        return (
            size_bytes <= self.free
            and unit not in self.units
            and unit not in self.barred
            and len(self.units) < self.most
        )

    def take(self, unit: int, size_bytes: int) -> bool:
        if not self.can_take(unit, size_bytes):
            return False
        self.units.add(unit)
        self.free -= size_bytes
        return True

    def drop(self, unit: int, size_bytes: int) -> None:
        self.units.discard(unit)
        self.free += size_bytes


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
        counted = hand.units & hand.held if hand.doubted else hand.units
        holders[list(counted)] += 1
    _keep(sizes, holders, hands)
    _fill(need, holders, [hand for hand in hands if not hand.doubted])
    _fill(need, holders, [hand for hand in hands if hand.doubted])
    return {hand.node: np.array(sorted(hand.units), np.int64) for hand in hands}


def _cover(need: Need, sizes: list[int], hands: list[_Hand]) -> None:
    """Give every unit one holder, as far as memory reaches: one that is not doubted, if there is room."""
    holders: dict[int, list[_Hand]] = {}
    for hand in hands:
        for unit in hand.held:
            holders.setdefault(unit, []).append(hand)
    missing: list[int] = []
    layers, layer = need.unit_layer.tolist(), -1
    owner: _Hand | None = None
    for unit in range(need.num_units):
        of_unit = holders.get(unit, ())
        whole = owner is not None and layer == layers[unit] and owner in of_unit
        if whole and owner is not None and owner.take(unit, sizes[unit]):
            continue  # layers stay whole where several hold them
        owner, layer = max(of_unit, key=lambda hand: hand.free, default=None), layers[unit]
        if owner is None or not owner.take(unit, sizes[unit]):
            missing.append(unit)
    trusted = [hand for hand in hands if not hand.doubted]
    doubted = [hand for hand in hands if hand.doubted]
    promised = np.zeros(need.num_units, np.int64)
    for hand in doubted:
        for unit in (*sorted(hand.held), *hand.doubtful):
            promised[unit] += hand.take(unit, sizes[unit])
    left_over: list[int] = []
    for times in sorted({int(promised[unit]) for unit in missing}):  # what nobody tries to load comes first
        units = [unit for unit in missing if promised[unit] == times]
        left_over += _deal_runs(_by_layer(units, need.unit_layer), sizes, trusted)
    left_over = _make_room_for(left_over, sizes, trusted)
    untried = [unit for unit in left_over if not promised[unit]]
    _deal_runs(_by_layer(untried, need.unit_layer), sizes, doubted)


def _by_layer(units: Iterable[int], unit_layer: Units) -> list[list[int]]:
    """Cut rising units into one list per layer."""
    runs: dict[int, list[int]] = {}
    for unit in units:
        runs.setdefault(int(unit_layer[unit]), []).append(unit)
    return list(runs.values())


def _deal_runs(layers: list[list[int]], sizes: list[int], hands: list[_Hand]) -> list[int]:
    """
    Deal consecutive layers to nodes, in proportion to what each could take; then whatever is left over.
    Returns what found no place.
    """
    total = sum(sizes[unit] for units in layers for unit in units)
    shares = [min(hand.free, total) for hand in hands]
    if not total or not sum(shares):
        return [unit for units in layers for unit in units]
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
    unplaced: list[int] = []
    for unit in left_over:
        if current.take(unit, sizes[unit]):
            continue
        takers = (hand for hand in hands if hand.can_take(unit, sizes[unit]))
        found = max(takers, key=lambda hand: hand.free, default=None)
        if found is None:
            unplaced.append(unit)
        else:
            current = found
            current.take(unit, sizes[unit])
    return unplaced


def _make_room_for(units: list[int], sizes: list[int], hands: list[_Hand]) -> list[int]:
    """
    Place what found no room by moving other slices out of its way; returns what is still left over.

    Memory may be there in pieces too small, or on nodes that will not hold just these slices.
    """
    if not units or not hands:
        return units
    smallest, tries = min(sizes), MOST_TRIES
    left_over: list[int] = []
    for unit in units:
        spare = [hand for hand in hands if hand.free >= smallest and len(hand.units) < hand.most]
        takers = [hand for hand in hands if unit not in hand.barred and unit not in hand.units]
        placed = False
        for hand in sorted(takers, key=lambda hand: -hand.free) if spare else ():
            if tries <= 0 or placed:
                break
            tries -= len(hand.units)
            placed = _move_out(hand, sizes[unit], sizes, spare) and hand.take(unit, sizes[unit])
        if not placed:
            left_over.append(unit)
    return left_over


def _move_out(hand: _Hand, wanted_bytes: int, sizes: list[int], spare: list[_Hand]) -> bool:
    """Move slices of a node to others until so much is free, those first that it does not hold yet."""
    moved: list[tuple[int, _Hand]] = []
    for unit in sorted(hand.units, key=lambda unit: (unit in hand.held, -sizes[unit], unit)):
        if hand.free >= wanted_bytes and len(hand.units) < hand.most:
            break
        takers = (other for other in spare if other is not hand and other.can_take(unit, sizes[unit]))
        other = next(takers, None)
        if other is not None:
            other.take(unit, sizes[unit])
            hand.drop(unit, sizes[unit])
            moved.append((unit, other))
    if hand.free >= wanted_bytes and len(hand.units) < hand.most:
        return True
    for unit, other in moved:
        other.drop(unit, sizes[unit])
        hand.take(unit, sizes[unit])
    return False


def _keep(sizes: list[int], holders: Units, hands: list[_Hand]) -> None:
    """Let nodes keep the copies they have, rarest first."""
    for hand in hands:
        if hand.doubted:
            continue  # it kept its own before
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
        absent[[unit for unit in hand.barred if 0 <= unit < need.num_units]] = False
        candidates = np.flatnonzero(absent)
        candidates = candidates[np.argsort(holders[candidates], kind="stable")]
        fits = candidates[np.cumsum(need.unit_bytes[candidates]) <= hand.free]
        fits = fits[: max(0, hand.most - len(hand.units))]
        hand.units.update(fits.tolist())
        hand.free -= int(need.unit_bytes[fits].sum())
        if not hand.doubted:
            holders[fits] += 1


def moved_bytes(need: Need, rooms: Sequence[Room], placement: Mapping[str, Units]) -> int:
    """Return how many bytes of slices nodes have to fetch to get to `placement`."""
    return sum(
        int(need.unit_bytes[unit])
        for room in rooms
        for unit in placement[room.node].tolist()
        if unit not in room.held
    )
