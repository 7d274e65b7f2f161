"""
Keep who is here and say what each must be told: pure, driven by the sessions' events.

Changes only mark the pool as unsettled; `settle()` works out pairing and placement once for all of them and
returns the messages that differ from what was told last. Everything is rebuilt from what peers say when they
connect, so a restarted relay needs no memory.

A node whose session broke may be back in a moment. Until then its place is kept: it is not called, and its
slices are not given to others, so that a phone that changes networks costs nobody a download.

Assigned is not held: `tick` doubts nodes that do not load (`loading.py`) or stay paused; others get a copy.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from relay.pool.inventory import BackboneRecord, Catalogue, NodeRecord
from relay.pool.pairing import Candidate, pair
from relay.pool.place import Room, place
from relay.wire.messages import Assign, Offer, PeerNode, Peers, Register, SliceReady

PAUSE_S = 4.0  # a node that is paused for longer counts for nothing until it is not


@dataclass(frozen=True, slots=True)
class Told:
    """One message the pool wants a peer to get."""

    handle: int
    message: Assign | Peers


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

    # -- what happened

    def offer(self, handle: int, node_id: str, offer: Offer) -> None:
        """A node said what it gives, for the first time or again."""
        node = self.nodes.get(handle)
        if node is None:
            made = self.nodes[handle] = NodeRecord(handle, node_id, offer, frozenset(offer.inventory))
            if (back := self.away.pop(node_id, None)) is not None:
                made.former, made.desired, made.loading = back.former, back.desired, back.loading
        else:
            if offer.kernel != node.offer.kernel:  # which may take what the former one refused
                node.refused, node.told = frozenset(), None
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
            if not node.loading.due(catalogue.largest_bytes, now):
                continue
            missing = node.desired - node.ready - node.refused
            starved = any(awaited(catalogue.slices[unit]) for unit in missing)
            if node.loading.judge(catalogue.largest_bytes, starved, now):
                self._placement_changed = True

    def register(self, handle: int, backbone_id: str, register: Register) -> None:
        """A backbone said what it serves, for the first time or again."""
        old = self.backbones.get(handle)
        catalogue = Catalogue(register.manifest)
        self.backbones[handle] = BackboneRecord(handle, backbone_id, register.name, catalogue, register.seal)
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
        for backbone in self.backbones.values():
            peers = self._peers(backbone)
            if peers != backbone.told:
                backbone.told = peers
                told.append(Told(backbone.handle, peers))
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
                {bid: len(node.inventory & b.catalogue.units.keys()) for bid, b in by_id.items()},
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
            if node.told is not None and node.told.epoch == node.epoch and desired == node.desired:
                continue
            node.desired = desired
            node.inventory &= catalogue.slices_of(desired)  # it drops the rest
            node.told = catalogue.assign(placement[node.node_id], node.epoch, backbone.handle, backbone.seal)
            node.loading.assigned(*self._amounts(node, catalogue), now)
            yield Told(node.handle, node.told)

    def _amounts(self, node: NodeRecord, catalogue: Catalogue) -> tuple[int, int]:
        """Say how many bytes a node holds of what it shall hold, and how many it does not."""
        ready = node.desired & node.ready
        return catalogue.bytes_of(ready), catalogue.bytes_of(node.desired - ready - node.refused)

    def _peers(self, backbone: BackboneRecord) -> Peers:
        """List the nodes that are ready for this backbone."""
        nodes = []
        for handle in sorted(backbone.nodes):
            node = self.nodes[handle]
            usable = node.ready & node.desired
            if usable and not node.paused:
                nodes.append(
                    PeerNode(
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
                    )
                )
        return Peers(tuple(nodes))

    def _unpair(self, handles: Iterable[int]) -> None:
        """Forget the pairing of nodes. They are told nothing: they keep their slices for the next one."""
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
