"""
Decide which backbone each node works for: pure, deterministic, and as steady as fairness allows.

Nodes are shared out in proportion to the size of the models. A node stays where it is unless its backbone
left or another one would be left with less than its share.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Candidate:
    """A node: whom it works for now, and for which backbones it still holds slices (number of them)."""

    node: str
    current: str | None
    holds: Mapping[str, int]


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
    poor = {backbone: shares[backbone] - len(members[backbone]) for backbone in backbones}
    for backbone in backbones:
        while poor[backbone] > 0:
            rich = min(backbones, key=lambda b: (poor[b], b))
            # whoever holds most for the poor one and least for the rich one moves; later names first
            mover = max(
                members[rich],
                key=lambda node: (node.holds.get(backbone, 0) - node.holds.get(rich, 0), node.node),
            )
            members[rich].remove(mover)
            members[backbone].append(mover)
            poor[rich] += 1
            poor[backbone] -= 1
    return {node.node: backbone for backbone in backbones for node in members[backbone]}


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
