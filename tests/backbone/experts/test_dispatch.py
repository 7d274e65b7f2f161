"""Which node computes which rows: every pick exactly once, few nodes, the local kernel for the rest."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from backbone.experts.dispatch import LOCAL, Picks, covers, plan, row_chunks


def picks(ids: list[list[int]]) -> Picks:
    array = np.array(ids, np.int32)
    return Picks.of(array, (array + 0.5).astype(np.float32))


def test_one_node_that_holds_everything_is_asked_alone() -> None:
    holders = {expert: {"a", "b"} for expert in range(4)} | {9: {"b"}}
    parts = plan(picks([[0, 1], [2, 9]]), holders, ["a", "b"])
    assert [part.holder for part in parts] == ["b"]


def test_preference_breaks_ties() -> None:
    holders = {0: {"slow", "fast"}, 1: {"slow", "fast"}}
    assert plan(picks([[0, 1]]), holders, ["fast", "slow"])[0].holder == "fast"


def test_what_nobody_holds_is_computed_here() -> None:
    parts = plan(picks([[0, 1], [1, 2]]), {0: {"a"}}, ["a"])
    assert [part.holder for part in parts] == ["a", LOCAL]
    assert parts[0].picks.counts.tolist() == [1, 0]
    assert parts[1].picks.counts.tolist() == [1, 2]
    assert parts[1].picks.experts.tolist() == [1, 1, 2]
    assert parts[1].picks.weights.tolist() == [1.5, 1.5, 2.5]


def test_excluded_and_unknown_nodes_are_not_used() -> None:
    holders = {0: {"a", "gone"}}
    assert plan(picks([[0]]), holders, ["a"], excluded={"a"})[0].holder is LOCAL
    assert plan(picks([[0]]), holders, [])[0].holder is LOCAL


def test_nothing_asked_is_nothing_planned() -> None:
    assert plan(Picks.of(np.zeros((1, 0), np.int32), np.zeros((1, 0), np.float32)), {}, ["a"]) == []


def test_covers_needs_every_expert() -> None:
    assert covers("a", picks([[0, 1]]), {0: {"a"}, 1: {"a", "b"}})
    assert not covers("b", picks([[0, 1]]), {0: {"a"}, 1: {"a", "b"}})


nodes = st.sampled_from(["a", "b", "c", "d"])


@given(
    ids=st.integers(1, 5).flatmap(
        lambda k: st.lists(
            st.lists(st.integers(0, 15), min_size=k, max_size=k, unique=True), min_size=1, max_size=6
        )
    ),
    holders=st.dictionaries(st.integers(0, 15), st.sets(nodes), max_size=16),
    preference=st.permutations(["a", "b", "c", "d"]),
)
def test_every_pick_is_assigned_once_to_a_holder(
    ids: list[list[int]], holders: dict[int, set[str]], preference: list[str]
) -> None:
    asked = picks(ids)
    parts = plan(asked, holders, preference)
    assert len({part.holder for part in parts}) == len(parts)
    seen = []
    for part in parts:
        row_of_pick = np.repeat(np.arange(len(ids)), part.picks.counts)
        for row, expert, weight in zip(row_of_pick, part.picks.experts, part.picks.weights, strict=True):
            seen.append((int(row), int(expert)))
            assert weight == expert + 0.5
            assert part.holder is LOCAL or part.holder in holders[int(expert)]
            if part.holder is LOCAL:
                assert not holders.get(int(expert))
    assert sorted(seen) == sorted((row, expert) for row, chosen in enumerate(ids) for expert in chosen)


def test_large_batches_are_cut_so_that_the_widest_answer_fits_a_frame() -> None:
    chunks = row_chunks(512, 7168)
    assert sum(chunk.stop - chunk.start for chunk in chunks) == 512
    assert all((chunk.stop - chunk.start) * 7168 * 8 <= 8 << 20 for chunk in chunks)
    assert row_chunks(3, 576) == [slice(0, 3)]
    assert row_chunks(2, 1 << 24) == [slice(0, 1), slice(1, 2)]
