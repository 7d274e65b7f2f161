"""
Decide which backbone each node works for: pure, deterministic, and as steady as fairness allows.

Nodes are shared out in proportion to the size of the models. A node stays where it is unless its backbone
left, another one would be left with less than its share, or another one lacks memory that is spare here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

MOST_ROUNDS = 4


@dataclass(frozen=True, slots=True, eq=False)
class Candidate:
    """
    A node: whom it works for now, and for which backbones it still holds slices (number of them).

    room_bytes: what it can hold, as far as it is trusted.
    """

    node: str
    current: str | None
    holds: Mapping[str, int]
    room_bytes: int = 0


def pair(candidates: Sequence[Candidate], sizes: Mapping[str, int]) -> dict[str, str]:
    """
    Return node -> backbone; empty when there is no backbone.

    sizes: backbone -> bytes of its slices. The answer does not depend on the order of the arguments.
    """
    if not sizes:
        return {}
    backbones = sorted(sizes)
    nodes = sorted(candidates, key=lambda candidate: candidate.node)
    shares = _shares(len(nodes), backbones, sizes)
    members: dict[str, list[Candidate]] = {backbone: [] for backbone in backbones}
    homeless = []
    for node in nodes:
        if node.current in members:
            members[node.current].append(node)
        else:
            homeless.append(node)
    for node in homeless:
        members[max(backbones, key=lambda b: (node.holds.get(b, 0), shares[b] - len(members[b])))].append(
            node
        )
    for _ in range(MOST_ROUNDS):  # until nothing moves: what is settled stays as it is
        before = {backbone: set(members[backbone]) for backbone in backbones}
        _share_out(members, shares, sizes)
        _lend_memory(members, sizes)
        if before == {backbone: set(members[backbone]) for backbone in backbones}:
            break
    return {node.node: backbone for backbone in backbones for node in members[backbone]}


def _share_out(
    members: dict[str, list[Candidate]], shares: Mapping[str, int], sizes: Mapping[str, int]
) -> None:
    """Give each backbone its share of the nodes, as far as the others can spare their memory."""
    backbones = sorted(members)
    poor = {backbone: shares[backbone] - len(members[backbone]) for backbone in backbones}
    for backbone in backbones:
        while poor[backbone] > 0:
            rich = min(backbones, key=lambda b: (poor[b], b))
            spare = _room(members[rich]) - sizes[rich]
            # a backbone without any node comes first; else who has enough takes only what can be spared
            freely = not members[backbone] or (spare < 0 and _room(members[backbone]) < sizes[backbone])
            movable = [node for node in members[rich] if freely or node.room_bytes <= spare]
            if not movable:
                break
            # whoever holds most for the poor one and least for the rich one moves; later names first
            mover = max(
                movable,
                key=lambda node: (node.holds.get(backbone, 0) - node.holds.get(rich, 0), node.node),
            )
            members[rich].remove(mover)
            members[backbone].append(mover)
            poor[rich] += 1
            poor[backbone] -= 1


def _room(nodes: Sequence[Candidate]) -> int:
    return sum(node.room_bytes for node in nodes)


def _lend_memory(members: dict[str, list[Candidate]], sizes: Mapping[str, int]) -> None:
    """Move nodes to backbones whose nodes cannot hold the model, from those that can do without them."""
    for backbone in sorted(members):
        while (lacking := sizes[backbone] - _room(members[backbone])) > 0:
            spare = {other: _room(members[other]) - sizes[other] for other in members if other != backbone}
            lenders = [
                (node, other)
                for other in sorted(spare)
                for node in members[other]
                if 0 < node.room_bytes <= spare[other]
            ]
            if not lenders:
                break
            # the smallest that is enough, else the largest
            node, other = min(
                lenders,
                key=lambda lender: (
                    lender[0].room_bytes < lacking,
                    abs(lender[0].room_bytes - lacking),
                    lender[0].node,
                ),
            )
            members[other].remove(node)
            members[backbone].append(node)


def _shares(num_nodes: int, backbones: Sequence[str], sizes: Mapping[str, int]) -> dict[str, int]:
    """Give each backbone one node if there are enough, split the rest by size (largest remainder)."""
    first = 1 if num_nodes >= len(backbones) else 0
    rest = num_nodes - first * len(backbones)
    total = sum(sizes.values())
    exact = {b: rest * sizes[b] / total if total else rest / len(backbones) for b in backbones}
    shares = {b: int(exact[b]) for b in backbones}
    rest -= sum(shares.values())
    for b in sorted(backbones, key=lambda b: (shares[b] - exact[b], b))[:rest]:
        shares[b] += 1
    return {b: first + share for b, share in shares.items()}
