"""
Keep who is here and say what each must be told: pure, driven by the sessions' events.

Changes only mark the pool as unsettled; `settle()` works out pairing and placement once for all of them and
returns the messages that differ from what was told last. Everything is rebuilt from what peers say when they
connect, so a restarted relay needs no memory.

Settling is dear where there are many nodes, and calls must not wait for it. So a driver may settle a `copy()`
elsewhere and `adopt()` what that decided: records are shallow and their sets immutable, so a copy is cheap.
What was said meanwhile stays said, and is settled next time.

A node whose session broke may be back in a moment. Until then its place is kept: it is not called, and its
slices are not given to others, so that a phone that changes networks costs nobody a download.

Assigned is not held: `tick` doubts nodes that do not load (`loading.py`) or stay paused; others get a copy.
"""

from collections.abc import Callable, Iterable
from copy import copy
from dataclasses import dataclass, replace
from operator import attrgetter

from relay.pool.inventory import BackboneRecord, Catalogue, NodeRecord
from relay.pool.pairing import Candidate, pair
from relay.pool.place import Room, place
from relay.wire.messages import Assign, Offer, PeerNode, Peers, Register, SliceReady

PAUSE_S = 4.0  # a node that is paused for longer counts for nothing until it is not


UNPAIRED = Assign(epoch=0, peer=0, model=None, layers=())


@dataclass(frozen=True, slots=True)
class Told:
    """One message the pool wants a peer to get."""

    handle: int
    message: Assign | Peers


PIECE_EXPERTS = 50_000  # in one Peers, some 300 KB

# What settling decides of a node, all else is what it said: `adopt` takes these over. `inventory` is both.
DECIDED = ("backbone", "epoch", "desired", "ready", "told", "told_kernel", "listed")
_decided = attrgetter(*DECIDED)


class Pool:
    """All nodes and backbones of this relay."""

    __slots__ = ("_epoch", "_peers_changed", "_placement_changed", "away", "backbones", "nodes")

    def __init__(self, first_epoch: int = 1) -> None:
        self.nodes: dict[int, NodeRecord] = {}
        self.backbones: dict[int, BackboneRecord] = {}
        self.away: dict[str, NodeRecord] = {}  # by node id: their sessions broke, their places are kept
        self._epoch = first_epoch
        self._placement_changed = False
        self._peers_changed = False

    @property
    def unsettled(self) -> bool:
        """Whether `settle()` may have something to say."""
        return self._placement_changed or self._peers_changed

    # -- settling elsewhere

    def copy(self) -> "Pool":
        """Give a pool of its own to settle; this one counts as settled but for what is said from now on."""
        other = Pool(self._epoch)
        other.nodes = {handle: node.copy() for handle, node in self.nodes.items()}
        other.away = {node_id: node.copy() for node_id, node in self.away.items()}
        for handle, backbone in self.backbones.items():
            made = other.backbones[handle] = copy(backbone)
            made.nodes = set(backbone.nodes)
        other._placement_changed, other._peers_changed = self._placement_changed, self._peers_changed
        self._placement_changed = self._peers_changed = False
        return other

    def adopt(self, settled: "Pool", before: "Pool") -> None:
        """
        Take over what was decided on a copy; `before` is another copy of the same moment, not settled.

        A node that came, left or was unpaired meanwhile stays as it is now: the pool is unsettled then.
        """
        self._epoch = settled._epoch
        for handle, decided in settled.nodes.items():
            node, was = self.nodes.get(handle), before.nodes[handle]
            if node is None or (node.backbone, node.epoch) != (was.backbone, was.epoch):
                continue
            if decided.backbone is not None and not self._same_backbone(before, decided.backbone):
                continue
            ready, told = node.ready, node.told  # what it said meanwhile counts, unless it is paired anew
            for name, value, old in zip(DECIDED, _decided(decided), _decided(was), strict=True):
                if value is not old:
                    setattr(node, name, value)
            if told is not was.told:
                node.told = told  # forgotten, so that it is told again
            if node.epoch == was.epoch:
                node.ready = ready
            else:
                node.refused, node.why = decided.refused, decided.why
            if decided.told is not was.told:
                node.loading = decided.loading
            if node.inventory is was.inventory:
                node.inventory = decided.inventory
            else:
                node.inventory = decided.inventory | (node.inventory - was.inventory)
        for node_id, decided in settled.away.items():
            if (node := self.away.get(node_id)) is not None:
                node.former, node.desired = decided.former, decided.desired
        for handle, backbone in self.backbones.items():
            backbone.nodes = set()
            if self._same_backbone(before, handle):
                backbone.told = settled.backbones[handle].told
        for node in self.nodes.values():
            if node.backbone is not None:
                self.backbones[node.backbone].nodes.add(node.handle)

    def _same_backbone(self, before: "Pool", handle: int) -> bool:
        """Whether this backbone is still here with the manifest it had."""
        now, was = self.backbones.get(handle), before.backbones.get(handle)
        return now is not None and was is not None and now.catalogue is was.catalogue

    def unsettle(self) -> None:
        """Settle all of it next time."""
        self._placement_changed = self._peers_changed = True

    # -- what happened

    def offer(self, handle: int, node_id: str, offer: Offer, seen: str | None = None) -> None:
        """A node said what it gives, for the first time or again. seen: its address."""
        node = self.nodes.get(handle)
        if node is None:
            made = NodeRecord(handle, node_id, offer, frozenset(offer.inventory), seen=seen)
            self.nodes[handle] = made
            if (back := self.away.pop(node_id, None)) is not None:
                made.former, made.desired, made.loading = back.former, back.desired, back.loading
        else:
            if offer.kernel != node.offer.kernel:  # which may take what the former one refused
                node.refused = frozenset()
            node.offer, node.inventory = offer, frozenset(offer.inventory)
        self._placement_changed = True

    def slices_ready(self, handle: int, ready: SliceReady, now: float = 0.0) -> None:
        """A node said what it can compute now; what belongs to an earlier pairing is ignored."""
        node = self.nodes.get(handle)
        if node is None or node.backbone is None or ready.epoch != node.epoch:
            return
        catalogue = self.backbones[node.backbone].catalogue
        node.ready = catalogue.units_of(ready.experts)
        node.inventory |= catalogue.slices_of(node.ready)
        refused = catalogue.units_of(ready.refused)
        if refused != node.refused:
            node.refused, node.why = refused, ready.why
            node.inventory -= catalogue.slices_of(refused)
            self._placement_changed = True
        if node.loading.progressed(*self._amounts(node, catalogue), catalogue.largest_bytes, now):
            self._placement_changed = True
        self._peers_changed = True

    def pause(self, handle: int, paused: bool, now: float = 0.0) -> None:
        """A node stops taking calls, or starts again; it keeps what it holds."""
        node = self.nodes.get(handle)
        if node is None:
            return
        if paused and not node.paused:
            node.paused_at = now
        if not paused and node.set_aside:
            node.set_aside = False
            self._placement_changed = True
        if node.paused and not paused:
            node.loading.resumed(now - node.paused_at)
        node.paused = paused
        self._peers_changed = True

    def tick(self, now: float, awaited: Callable[[str], bool] = lambda slice_id: False) -> None:
        """
        Time passed: judge who does not load what it was assigned.

        awaited: whether a slice is asked of its backbone and not here yet; who waits for it is not to blame.
        """
        for node in self.nodes.values():
            if node.backbone is None:
                continue
            if node.paused and not node.set_aside and now - node.paused_at >= PAUSE_S:
                node.set_aside = self._placement_changed = True
            catalogue = self.backbones[node.backbone].catalogue
            if node.paused or not node.loading.due(catalogue.largest_bytes, now):
                continue
            missing = node.desired - node.ready - node.refused
            starved = any(awaited(catalogue.slices[unit]) for unit in missing)
            if node.loading.judge(catalogue.largest_bytes, starved, now):
                self._placement_changed = True

    def register(self, handle: int, backbone_id: str, register: Register) -> None:
        """A backbone said what it serves, for the first time or again."""
        old = self.backbones.get(handle)
        catalogue = Catalogue(register.manifest)
        self.backbones[handle] = BackboneRecord(
            handle,
            backbone_id,
            register.name,
            catalogue,
            register.seal,
            register.changes,
            inexact=register.inexact,
        )
        if old is not None:
            self._unpair(old.nodes)
        self._placement_changed = True

    def park(self, handle: int) -> bool:
        """
        A node's session broke: keep its place if it has one. The caller ends that with `expire`, and says how
        many are kept. Of what the node said it holds only what somebody serves is remembered.
        """
        node = self.nodes.get(handle)
        if node is None or node.backbone is None:
            return False
        del self.nodes[handle]
        backbone = self.backbones[node.backbone]
        backbone.nodes.discard(handle)
        node.former = backbone.backbone_id
        node.backbone, node.epoch, node.ready = None, 0, frozenset()
        node.offer = replace(node.offer, inventory=())
        served = [record.catalogue.units for record in self.backbones.values()]
        node.inventory = frozenset(s for s in node.inventory if any(s in units for units in served))
        self.away[node.node_id] = node
        self._peers_changed = True
        return True

    def expire(self, node_id: str) -> None:
        """A node that was away did not come back."""
        if self.away.pop(node_id, None) is not None:
            self._placement_changed = True

    def remove(self, handle: int) -> None:
        """A peer is gone."""
        node = self.nodes.pop(handle, None)
        if node is not None:
            if node.backbone is not None:
                self.backbones[node.backbone].nodes.discard(handle)
            self._placement_changed = True
        backbone = self.backbones.pop(handle, None)
        if backbone is not None:
            self._unpair(backbone.nodes)
            self._placement_changed = True

    # -- who may talk to whom, who has what

    def paired(self, sender: int, receiver: int) -> bool:
        """Whether calls may pass between these two."""
        node = self.nodes.get(sender) or self.nodes.get(receiver)
        return (
            node is not None
            and node.backbone is not None
            and {sender, receiver}
            == {
                node.handle,
                node.backbone,
            }
        )

    def epoch_of(self, sender: int, receiver: int) -> int | None:
        """Return the epoch of the pairing of these two, None when they are not paired."""
        if not self.paired(sender, receiver):
            return None
        return (self.nodes.get(sender) or self.nodes[receiver]).epoch

    def backbones_with(self, slice_id: str) -> list[BackboneRecord]:
        """Return the backbones whose model has this slice."""
        return [b for b in self.backbones.values() if slice_id in b.catalogue.slice_bytes]

    # -- what follows from it

    def settle(self, now: float = 0.0) -> list[Told]:
        """Work out pairing and placement, and return what peers must be told."""
        told: list[Told] = []
        if self._placement_changed:
            self._pair()
            for backbone in self.backbones.values():
                told.extend(self._place(backbone, now))
            told.extend(self._left_alone())
        for backbone in self.backbones.values():
            peers, told_last = self._peers(backbone), backbone.told
            if told_last is None or peers.nodes != told_last.nodes:
                backbone.told = peers
                said = _pieces(told_last, peers) if backbone.changes else [peers]
                told.extend(Told(backbone.handle, piece) for piece in said)
        self._placement_changed = self._peers_changed = False
        return told

    def _pair(self) -> None:
        """Pair nodes and backbones; identities, not handles, decide, so that a reconnect changes nothing."""
        by_id = {record.backbone_id: record for record in self.backbones.values()}
        nodes = self.away | {node.node_id: node for node in self.nodes.values()}
        candidates = [
            Candidate(
                node_id,
                self.backbones[node.backbone].backbone_id if node.backbone is not None else node.former,
                {bid: b.catalogue.count_held(node.inventory) for bid, b in by_id.items()},
                self._room_bytes(node),
            )
            for node_id, node in nodes.items()
        ]
        pairs = pair(candidates, {bid: record.catalogue.size_bytes for bid, record in by_id.items()})
        for node_id, backbone_id in pairs.items():
            node, backbone = nodes[node_id], by_id[backbone_id]
            if node_id in self.away:
                node.former = backbone_id
                continue
            if node.backbone == backbone.handle:
                continue
            if node.backbone is not None:
                self.backbones[node.backbone].nodes.discard(node.handle)
                self._unpair([node.handle])
            node.backbone, node.epoch = backbone.handle, self._epoch
            backbone.nodes.add(node.handle)
            self._epoch = self._epoch % 0xFFFF_FFFF + 1

    def _room_bytes(self, node: NodeRecord) -> int:
        """Say what a node can hold for whomever; of one that does not load, only what it does hold."""
        if node.set_aside:
            return 0
        trusted = node.loading.trusted_bytes
        room = node.offer.memory_bytes if trusted is None else min(node.offer.memory_bytes, trusted)
        return min(room, node.loading.held_bytes) if node.loading.doubted else room

    def _place(self, backbone: BackboneRecord, now: float) -> Iterable[Told]:
        """Place the model on the backbone's nodes; a node is told when its set changed."""
        catalogue = backbone.catalogue
        nodes = [self.nodes[handle] for handle in sorted(backbone.nodes)]
        nodes += [node for node in self.away.values() if node.former == backbone.backbone_id]
        placement = place(catalogue.need, [_room(node, catalogue) for node in nodes])
        for node in nodes:
            desired = frozenset(placement[node.node_id].tolist())
            if node.node_id in self.away:
                node.desired = desired
                continue
            same = node.told_kernel == node.offer.kernel and desired == node.desired
            if node.told is not None and node.told.epoch == node.epoch and same:
                continue
            node.told_kernel = node.offer.kernel
            node.desired = desired
            node.inventory &= catalogue.slices_of(desired)  # it drops the rest
            node.told = catalogue.assign(placement[node.node_id], node.epoch, backbone.handle, backbone.seal)
            node.loading.assigned(*self._amounts(node, catalogue), now)
            yield Told(node.handle, node.told)

    def _left_alone(self) -> Iterable[Told]:
        """Tell nodes that were paired that they are not any more; they keep their slices for the next one."""
        for node in self.nodes.values():
            if node.backbone is None and node.told is not None and node.told.peer:
                node.told = UNPAIRED
                yield Told(node.handle, UNPAIRED)

    def _amounts(self, node: NodeRecord, catalogue: Catalogue) -> tuple[int, int]:
        """Say how many bytes a node holds of what it shall hold, and how many it does not."""
        ready = node.desired & node.ready
        return catalogue.bytes_of(ready), catalogue.bytes_of(node.desired - ready - node.refused)

    def _peers(self, backbone: BackboneRecord) -> Peers:
        """List the nodes that are ready for this backbone; an entry is made anew only when it changed."""
        nodes = []
        for handle in sorted(backbone.nodes):
            node = self.nodes[handle]
            if node.paused or not node.ready:
                continue
            made_of = (node.epoch, node.ready, node.desired, node.offer)
            made = node.listed
            if made is None or any(a is not b for a, b in zip(made[0], made_of, strict=True)):
                made = node.listed = made_of, self._entry(backbone, node)
            if made[1] is not None:
                nodes.append(made[1])
        return Peers(tuple(nodes))

    def _entry(self, backbone: BackboneRecord, node: NodeRecord) -> PeerNode | None:
        """Describe a node for its backbone; None while it has nothing ready that it shall hold."""
        usable = node.ready & node.desired
        if not usable:
            return None
        return PeerNode(
            peer=node.handle,
            node_id=node.node_id,
            name=node.offer.name,
            kernel=node.offer.kernel,
            gb_per_s=node.offer.gb_per_s,
            epoch=node.epoch,
            experts=backbone.catalogue.experts(usable),
            lanes=node.offer.lanes,
            listen=node.offer.listen,
            seal=node.offer.seal,
            seen=None if node.offer.listen is None else node.seen,
        )

    def _unpair(self, handles: Iterable[int]) -> None:
        """Forget the pairing of nodes. `settle` tells those that find no other."""
        for handle in handles:
            node = self.nodes[handle]
            node.backbone, node.epoch, node.desired, node.ready = None, 0, frozenset(), frozenset()
            node.refused, node.why = frozenset(), ""


def _room(node: NodeRecord, catalogue: Catalogue) -> Room:
    """Say what a node can take, and what counts of what it was given before."""
    loading = node.loading
    pledge = node.offer.memory_bytes
    memory = pledge if loading.trusted_bytes is None else min(pledge, loading.trusted_bytes)
    # what a node is fetching counts as held: a newcomer must not turn its fetches around
    coming = catalogue.held(node.inventory) | node.desired
    held = coming - node.refused
    if node.set_aside:
        held = frozenset()
    elif loading.doubted:
        held = node.ready - node.refused
    doubted = node.set_aside or loading.doubted
    doubtful = coming - held if doubted else frozenset()
    return Room(node.node_id, memory, held, doubted, doubtful, node.refused, catalogue.most_units)


def _pieces(old: Peers | None, new: Peers) -> list[Peers]:
    """Say what differs from what was told last, in messages of bounded size; the first is whole."""
    before = {} if old is None else {node.peer: node for node in old.nodes}
    changed = [node for node in new.nodes if before.pop(node.peer, None) != node]
    pieces: list[Peers] = []
    piece: list[PeerNode] = []
    experts = 0
    for node in changed:
        piece.append(node)
        experts += sum(map(len, node.experts.values()))
        if experts >= PIECE_EXPERTS:
            pieces.append(Peers(tuple(piece), change=True))
            piece, experts = [], 0
    pieces.append(Peers(tuple(piece), change=True, gone=tuple(before)))
    if old is None:
        pieces[0] = replace(pieces[0], change=False)
    return pieces
