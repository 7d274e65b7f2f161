"""
Which nodes serve us and what they hold. Pure.

The relay sends the complete list whenever it changes; this table turns it into the question the planner asks:
for this layer, who holds which expert?
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from relay.wire.messages import Peers

type Holders = Mapping[int, frozenset[str]]
"""expert -> ids of the nodes that hold its slice, for one layer"""

NOBODY: Holders = {}


@dataclass(frozen=True, slots=True)
class Node:
    """
    One node that is ready to serve.

    peer: its handle at the relay; epoch: of its pairing with us, in every frame to and from it.
    experts: layer -> experts whose slices it holds, verified and packed.
    """

    node_id: str
    peer: int
    epoch: int
    name: str
    kernel: str
    gb_per_s: float
    path: str
    experts: Mapping[int, frozenset[int]]


def nodes_of(peers: Peers) -> list[Node]:
    """Read the relay's list."""
    return [
        Node(
            node_id=peer.node_id,
            peer=peer.peer,
            epoch=peer.epoch,
            name=peer.name,
            kernel=peer.kernel,
            gb_per_s=peer.gb_per_s,
            path=peer.path,
            experts={layer: frozenset(experts) for layer, experts in peer.experts.items()},
        )
        for peer in peers.nodes
    ]


INEXACT_KERNELS = frozenset({"webgpu"})  # a class of their own: wasm/CONTRACT.md, "WebGPU"


def eligible(nodes: list[Node], allow_inexact: bool) -> list[Node]:
    """Leave out nodes whose kernel promises a tolerance, not the exact bits, unless they are allowed."""
    return [node for node in nodes if allow_inexact or node.kernel not in INEXACT_KERNELS]


class NodeTable:
    """The nodes of now, by id and by handle, and who holds what."""

    __slots__ = ("_holders", "by_id", "by_peer")

    def __init__(self) -> None:
        self.by_id: dict[str, Node] = {}
        self.by_peer: dict[int, Node] = {}
        self._holders: dict[int, dict[int, frozenset[str]]] = {}

    def replace(self, nodes: Iterable[Node]) -> set[str]:
        """Take the new complete list; give the ids of nodes that are gone or were paired anew."""
        former = self.by_id
        self.by_id = {node.node_id: node for node in nodes}
        self.by_peer = {node.peer: node for node in self.by_id.values()}
        holders: dict[int, dict[int, set[str]]] = {}
        for node in self.by_id.values():
            for layer, experts in node.experts.items():
                of_layer = holders.setdefault(layer, {})
                for expert in experts:
                    of_layer.setdefault(expert, set()).add(node.node_id)
        self._holders = {
            layer: {expert: frozenset(ids) for expert, ids in of_layer.items()}
            for layer, of_layer in holders.items()
        }
        return {
            node_id
            for node_id, node in former.items()
            if (now := self.by_id.get(node_id)) is None or (now.peer, now.epoch) != (node.peer, node.epoch)
        }

    def set_path(self, node_id: str, path: str) -> None:
        """Note which lane carries a node's calls."""
        node = self.by_id.get(node_id)
        if node is not None:
            self.by_id[node_id] = self.by_peer[node.peer] = replace(node, path=path)

    def holders(self, layer: int) -> Holders:
        """Give expert -> nodes for one layer; experts that nobody holds are absent."""
        return self._holders.get(layer, NOBODY)

    def coverage(self, layer: int, num_experts: int) -> float:
        """Give the share of a layer's experts that some node holds."""
        return len(self.holders(layer)) / num_experts
