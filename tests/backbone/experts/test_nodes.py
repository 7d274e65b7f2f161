"""The table of nodes: complete lists in, holders per layer out."""

from dataclasses import replace

from backbone.experts.nodes import Node, NodeTable, eligible


def node(node_id: str, peer: int, epoch: int = 1, **experts: list[int]) -> Node:
    held = {int(layer[1:]): frozenset(ids) for layer, ids in experts.items()}
    return Node(node_id, peer, epoch, node_id, "native", 5.0, "relayed", held)


def test_holders_are_those_of_the_newest_list() -> None:
    table = NodeTable()
    assert table.replace([node("a", 1, l0=[0, 1]), node("b", 2, l0=[1], l3=[7])]) == set()
    assert table.holders(0) == {0: {"a"}, 1: {"a", "b"}}
    assert table.holders(3) == {7: {"b"}}
    assert table.holders(9) == {}
    assert table.coverage(0, 4) == 0.5
    assert table.replace([node("b", 2, l3=[7])]) == {"a"}
    assert table.holders(0) == {}


def test_a_node_that_was_paired_anew_counts_as_gone() -> None:
    """Calls under the former epoch or handle will never be answered."""
    table = NodeTable()
    table.replace([node("a", 1, epoch=1), node("b", 2, epoch=1), node("c", 3, epoch=1)])
    assert table.replace([node("a", 1, epoch=2), node("b", 9, epoch=1), node("c", 3, epoch=1)]) == {"a", "b"}
    assert table.by_peer[9].node_id == "b"


def test_a_node_that_is_not_exact_is_eligible_only_where_that_is_allowed() -> None:
    names = ("native-avx2", "wasm-plain", "wasm-relaxed16", "webgpu", "native-neon")
    nodes = [replace(node(name, number), kernel=name) for number, name in enumerate(names)]
    assert [n.kernel for n in eligible(nodes, allow_inexact=False)] == [n for n in names if n != "webgpu"]
    assert eligible(nodes, allow_inexact=True) == nodes
