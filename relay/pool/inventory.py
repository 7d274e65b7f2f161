"""Keep what nodes offer and what backbones need, in the terms of placement: units of a model. Pure."""

import json
from dataclasses import dataclass, field, fields
from operator import attrgetter

import numpy as np

from relay.pool.loading import Loading
from relay.pool.place import Need, Units
from relay.wire.frames import PAYLOAD_LIMITS, FrameType
from relay.wire.manifest import Manifest
from relay.wire.messages import Assign, AssignLayer, Experts, Offer, PeerNode, Peers

UNIT_CHARS = 80  # of a slice in an Assign: its number and its name
ASSIGN_CHARS = PAYLOAD_LIMITS[FrameType.ASSIGN] - 1000
MOST_UNITS = (PAYLOAD_LIMITS[FrameType.SLICE_READY] - 20_000) // 5  # that a node can say it has ready


class Catalogue:
    """A manifest, indexed: unit u is slice `slices[u]` of layer `need.unit_layer[u]`."""

    __slots__ = ("_first", "manifest", "most_units", "need", "slice_bytes", "slices", "units")

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self.slices = tuple(slice_id for layer in manifest.layers for slice_id in layer.slices)
        counts = [len(layer.slices) for layer in manifest.layers]
        layers = range(len(manifest.layers))
        self.need = Need(
            unit_bytes=np.repeat([layer.slice_bytes for layer in manifest.layers], counts).astype(np.int64),
            unit_layer=np.repeat(layers, counts).astype(np.int64),
        )
        self._first = np.cumsum([0, *counts]).tolist()
        self.units: dict[str, list[int]] = {}  # a slice may occur twice, when two experts are equal
        self.slice_bytes: dict[str, int] = {}
        for unit, slice_id in enumerate(self.slices):
            self.units.setdefault(slice_id, []).append(unit)
            self.slice_bytes[slice_id] = int(self.need.unit_bytes[unit])
        layers_chars = sum(len(json.dumps([layer.formula, layer.grid])) + 100 for layer in manifest.layers)
        self.most_units = min(MOST_UNITS, max(0, (ASSIGN_CHARS - layers_chars) // UNIT_CHARS))

    @property
    def size_bytes(self) -> int:
        return int(self.need.unit_bytes.sum())

    def held(self, inventory: frozenset[str]) -> frozenset[int]:
        """Return which units a node with this inventory holds."""
        return frozenset(unit for slice_id in inventory for unit in self.units.get(slice_id, ()))

    def count_held(self, inventory: frozenset[str]) -> int:
        """Return how many of these slices the model has."""
        return sum(map(self.units.__contains__, inventory))

    def units_of(self, experts: Experts) -> frozenset[int]:
        """Return the units a node names as ready; what the model does not have is left out."""
        units: set[int] = set()
        for position, layer in enumerate(self.manifest.layers):
            first = self._first[position]
            units.update(first + e for e in experts.get(layer.layer, ()) if e < len(layer.slices))
        return frozenset(units)

    def bytes_of(self, units: frozenset[int]) -> int:
        return int(self.need.unit_bytes[list(units)].sum())

    @property
    def largest_bytes(self) -> int:
        return int(self.need.unit_bytes.max(initial=0))

    def slices_of(self, units: frozenset[int]) -> frozenset[str]:
        return frozenset(self.slices[unit] for unit in units)

    def experts(self, units: frozenset[int]) -> Experts:
        """Return units as a message writes them: layer -> experts, both rising."""
        found: dict[int, list[int]] = {}
        layers = self.manifest.layers
        for unit in sorted(units):
            position = int(self.need.unit_layer[unit])
            found.setdefault(layers[position].layer, []).append(unit - self._first[position])
        return {layer: tuple(experts) for layer, experts in found.items()}

    def assign(self, units: Units, epoch: int, peer: int, seal: str | None = None) -> Assign:
        """Return the Assign that makes a node hold exactly these units."""
        layers = []
        numbers = self.need.unit_layer[units]
        for position in np.unique(numbers).tolist():
            layer, first = self.manifest.layers[position], self._first[position]
            experts = {unit - first: self.slices[unit] for unit in units[numbers == position].tolist()}
            layers.append(AssignLayer(layer.layer, layer.formula, layer.grid, layer.slice_bytes, experts))
        return Assign(epoch, peer, self.manifest.model, tuple(layers), seal)


@dataclass(slots=True)
class NodeRecord:
    """A connected node that has offered itself."""

    handle: int
    node_id: str
    offer: Offer
    inventory: frozenset[str]  # slices it holds, of whatever model
    paused: bool = False
    told: Assign | None = None  # the last Assign it got
    told_kernel: str = ""  # which kernel it had then
    former: str | None = None  # id of the backbone it worked for when its last session broke
    # The pairing: all change together when the node is paired anew.
    backbone: int | None = None  # handle
    epoch: int = 0
    desired: frozenset[int] = frozenset()  # units it shall hold
    ready: frozenset[int] = frozenset()  # units it said it can compute
    refused: frozenset[int] = frozenset()  # units it said it will not load, and why
    why: str = ""
    loading: Loading = field(default_factory=Loading)
    seen: str | None = None  # its IP address, as the relay saw it
    paused_at: float = 0.0  # when, if it is
    set_aside: bool = False  # it was paused for so long that what it holds counts for nothing
    # Its entry in Peers, and what that was made of.
    listed: tuple[tuple[object, ...], PeerNode | None] | None = None

    def copy(self) -> "NodeRecord":
        """Give one of its own; thousands are copied at a time, and `copy.copy` takes five times as long."""
        made = NodeRecord(*_record(self))
        made.loading = Loading(*_loading(self.loading))
        return made


_record = attrgetter(*(field.name for field in fields(NodeRecord)))
_loading = attrgetter(*(field.name for field in fields(Loading)))


@dataclass(slots=True)
class BackboneRecord:
    """A connected backbone, once it has registered."""

    handle: int
    backbone_id: str
    name: str
    catalogue: Catalogue
    seal: str | None = None  # its identity, if it seals
    changes: bool = False  # it takes lists of what changed
    told: Peers | None = None  # what it was told last
    inexact: bool = False  # it also asks nodes whose kernel is not exact
    nodes: set[int] = field(default_factory=set)
