"""Pairing: every node works for somebody, shares follow the size of the models, few nodes change sides."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from relay.pool.pairing import Candidate, pair

BACKBONES = st.dictionaries(st.sampled_from("ABCD"), st.integers(1, 100), min_size=1)
NODES = st.lists(
    st.builds(
        Candidate,
        node=st.uuids().map(str),
        current=st.sampled_from(["A", "B", "gone", None]),
        holds=st.dictionaries(st.sampled_from("ABCD"), st.integers(0, 5)),
    ),
    max_size=12,
    unique_by=lambda candidate: candidate.node,
)


def settled(nodes: list[Candidate], pairs: dict[str, str]) -> list[Candidate]:
    return [Candidate(node.node, pairs[node.node], node.holds) for node in nodes]


@given(NODES, BACKBONES)
def test_every_node_works_for_one_backbone_in_proportion(
    nodes: list[Candidate], sizes: dict[str, int]
) -> None:
    pairs = pair(nodes, sizes)
    assert pairs.keys() == {node.node for node in nodes} and set(pairs.values()) <= set(sizes)
    counts = Counter(pairs.values())
    for backbone, size in sizes.items():
        assert counts[backbone] >= int(len(nodes) * size / sum(sizes.values())) - len(sizes)
        assert counts[backbone] > 0 or len(nodes) < len(sizes)


@given(NODES, BACKBONES)
def test_a_settled_pairing_stays_as_it_is(nodes: list[Candidate], sizes: dict[str, int]) -> None:
    pairs = pair(nodes, sizes)
    assert pair(settled(nodes, pairs), sizes) == pairs
    assert pair(nodes[::-1], sizes) == pairs


def test_without_a_backbone_nobody_is_paired() -> None:
    assert pair([Candidate("n", None, {})], {}) == {}


def test_node_goes_to_the_backbone_whose_slices_it_holds() -> None:
    nodes = [Candidate("n1", None, {"B": 3}), Candidate("n2", None, {"A": 1})]
    assert pair(nodes, {"A": 10, "B": 10}) == {"n1": "B", "n2": "A"}


def test_second_backbone_gets_its_share() -> None:
    nodes = [Candidate(f"n{i}", "A", {}) for i in range(4)]
    assert Counter(pair(nodes, {"A": 10, "B": 10}).values()) == {"A": 2, "B": 2}
    assert Counter(pair(nodes, {"A": 30, "B": 10}).values()) == {"A": 3, "B": 1}


def test_a_backbone_that_lacks_memory_is_lent_a_node_by_one_that_has_it_to_spare() -> None:
    nodes = [Candidate("n1", "a", {}, 200), Candidate("n2", "a", {}, 60), Candidate("n3", "b", {}, 50)]
    assert pair(nodes, {"a": 100, "b": 100}) == {"n1": "a", "n2": "b", "n3": "b"}


@settings(max_examples=400, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from([None, "a", "b", "c"]), st.integers(0, 300)), max_size=12),
    st.dictionaries(st.sampled_from("abc"), st.integers(1, 400)),
)
def test_pairs_that_were_made_are_left_as_they_are(
    nodes: list[tuple[str | None, int]], sizes: dict[str, int]
) -> None:
    made = [Candidate(f"n{number}", at, {}, room) for number, (at, room) in enumerate(nodes)]
    first = pair(made, sizes)
    settled = [Candidate(node.node, first.get(node.node), {}, node.room_bytes) for node in made]
    assert pair(settled, sizes) == first
