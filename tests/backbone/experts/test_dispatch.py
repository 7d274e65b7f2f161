"""Picks, whole and in parts."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from backbone.experts.dispatch import Picks, covers, row_chunks


def picks(ids: list[list[int]]) -> Picks:
    array = np.array(ids, np.int32)
    return Picks.of(array, (array + 0.5).astype(np.float32))


def test_covers_needs_every_expert() -> None:
    assert covers("a", picks([[0, 1]]), {0: {"a"}, 1: {"a", "b"}})
    assert not covers("b", picks([[0, 1]]), {0: {"a"}, 1: {"a", "b"}})


@given(
    ids=st.lists(st.lists(st.integers(0, 15), min_size=3, max_size=3, unique=True), min_size=1, max_size=6),
    data=st.data(),
)
def test_parts_are_the_whole(ids: list[list[int]], data: st.DataObject) -> None:
    asked = picks(ids)
    part_of_pick = np.array([data.draw(st.integers(0, 2)) for _ in asked.experts], np.intp)
    parts = asked.divide(part_of_pick, 3)
    assert sum(part.counts.astype(int) for part in parts).tolist() == asked.counts.tolist()
    assert sorted(e for part in parts for e in part.experts.tolist()) == sorted(asked.experts.tolist())


def test_the_first_rows_that_want_some_experts() -> None:
    asked = picks([[0, 1], [2, 3], [1, 4], [0, 4]])
    few = asked.first_rows(2, {1, 4})
    assert few.counts.tolist() == [1, 0, 2, 0]
    assert few.experts.tolist() == [1, 1, 4]
    assert few.weights.tolist() == [1.5, 1.5, 4.5]


def test_large_batches_are_cut_so_that_the_widest_answer_fits_a_frame() -> None:
    chunks = row_chunks(512, 7168)
    assert sum(chunk.stop - chunk.start for chunk in chunks) == 512
    assert all((chunk.stop - chunk.start) * 7168 * 8 <= 8 << 20 for chunk in chunks)
    assert row_chunks(3, 576) == [slice(0, 3)]
    assert row_chunks(2, 1 << 24) == [slice(0, 1), slice(1, 2)]
