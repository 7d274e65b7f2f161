"""Placement: never over a pledge, everything placed when it fits, the same answer every time, few moves."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay.pool.place import Need, Placement, Room, moved_bytes, place


def need(layers: int, experts: int, size: int = 10) -> Need:
    return Need(
        np.full(layers * experts, size, np.int64), np.repeat(np.arange(layers), experts).astype(np.int64)
    )


def sets(placement: Placement) -> dict[str, set[int]]:
    return {node: set(units.tolist()) for node, units in placement.items()}


@st.composite
def cases(draw: st.DrawFn, mixed: bool = False) -> tuple[Need, list[Room]]:
    layers, experts = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    sizes = [draw(st.integers(1, 9)) if mixed else 10 for _ in range(layers)]
    wanted = Need(
        np.repeat(sizes, experts).astype(np.int64), np.repeat(np.arange(layers), experts).astype(np.int64)
    )
    count = draw(st.integers(0, 5))
    rooms = [
        Room(
            f"n{i}",
            draw(st.integers(0, 500)),
            frozenset(draw(st.sets(st.integers(0, layers * experts + 2), max_size=20))),
        )
        for i in range(count)
    ]
    return wanted, rooms


@given(st.one_of(cases(), cases(mixed=True)))
def test_no_node_gets_more_than_it_pledged_and_nothing_twice(case: tuple[Need, list[Room]]) -> None:
    wanted, rooms = case
    placement = place(wanted, rooms)
    assert placement.keys() == {room.node for room in rooms}
    for room in rooms:
        units = placement[room.node]
        assert len(set(units.tolist())) == len(units)
        assert wanted.unit_bytes[units].sum() <= room.memory_bytes


@given(cases())
def test_everything_is_placed_when_memory_suffices(case: tuple[Need, list[Room]]) -> None:
    wanted, rooms = case
    slots = sum(room.memory_bytes // 10 for room in rooms)
    placed = set().union(*sets(place(wanted, rooms)).values())
    assert len(placed) == min(slots, wanted.num_units) or placed == set(range(wanted.num_units))


@given(cases())
def test_the_order_of_nodes_does_not_matter(case: tuple[Need, list[Room]]) -> None:
    wanted, rooms = case
    shuffled = sorted(rooms, key=lambda room: (-room.memory_bytes, room.node))
    assert sets(place(wanted, rooms)) == sets(place(wanted, shuffled))


@given(cases())
def test_a_settled_placement_stays_as_it_is(case: tuple[Need, list[Room]]) -> None:
    wanted, rooms = case
    first = place(wanted, rooms)
    settled = [Room(room.node, room.memory_bytes, frozenset(first[room.node].tolist())) for room in rooms]
    assert sets(place(wanted, settled)) == sets(first)
    assert moved_bytes(wanted, settled, place(wanted, settled)) == 0


@given(cases())
def test_a_newcomer_moves_nothing_between_the_others(case: tuple[Need, list[Room]]) -> None:
    wanted, rooms = case
    first = place(wanted, rooms)
    settled = [Room(room.node, room.memory_bytes, frozenset(first[room.node].tolist())) for room in rooms]
    second = sets(place(wanted, [*settled, Room("z", 200)]))
    covered = set().union(*(room.held for room in settled)) if settled else set()
    if len(covered) == wanted.num_units:
        for room in settled:
            assert second[room.node] == set(room.held)


@given(cases())
def test_when_a_node_leaves_its_slices_are_placed_again(case: tuple[Need, list[Room]]) -> None:
    wanted, rooms = case
    if not rooms:
        return
    first = place(wanted, rooms)
    rest = [Room(room.node, room.memory_bytes, frozenset(first[room.node].tolist())) for room in rooms[1:]]
    placed = set().union(*sets(place(wanted, rest)).values()) if rest else set()
    slots = sum(room.memory_bytes // 10 for room in rest)
    assert len(placed) >= min(slots, wanted.num_units)


def test_two_nodes_share_the_layers_in_runs() -> None:
    first, second = sets(place(need(6, 4), [Room("a", 120), Room("b", 120)])).values()
    assert first == set(range(12)) and second == set(range(12, 24))


def test_shares_follow_the_pledges_and_keep_layers_whole() -> None:
    placed = sets(place(need(9, 2), [Room("a", 60), Room("b", 120)]))
    assert placed == {"a": set(range(6)), "b": set(range(6, 18))}


def test_nodes_with_memory_left_hold_further_copies_of_what_is_rare() -> None:
    placed = sets(place(need(4, 2), [Room("a", 60), Room("b", 60)]))
    assert placed["a"] >= {0, 1, 2, 3} and placed["b"] >= {4, 5, 6, 7}
    assert len(placed["a"]) == len(placed["b"]) == 6


def test_each_of_many_large_nodes_holds_everything() -> None:
    everything = set(range(8))
    assert set(map(frozenset, sets(place(need(4, 2), [Room(n, 999) for n in "abc"])).values())) == {
        frozenset(everything)
    }


def test_what_does_not_fit_stays_unplaced() -> None:
    placed = sets(place(need(4, 2), [Room("a", 35)]))
    assert placed == {"a": {0, 1, 2}}


def test_copies_give_way_to_what_nobody_holds() -> None:
    settled = [Room("a", 40, frozenset({0, 1, 2, 3})), Room("b", 40, frozenset({0, 1, 2, 3}))]
    placed = sets(place(need(4, 2), settled))
    assert placed["a"] | placed["b"] == set(range(8))
    assert moved_bytes(need(4, 2), settled, place(need(4, 2), settled)) == 40


@pytest.mark.parametrize("layers", [0, 1])
def test_nothing_to_place_is_no_error(layers: int) -> None:
    assert sets(place(need(layers, 0), [Room("a", 10)])) == {"a": set()}
    assert place(need(1, 1), []) == {}


def test_layers_stay_whole_where_several_hold_them_and_have_to_give_way() -> None:
    everything = frozenset(range(16))
    placed = sets(place(need(4, 4), [Room("a", 80, everything), Room("b", 80, everything)]))
    assert placed["a"] | placed["b"] == set(everything)
    layers = [{unit // 4 for unit in units} for units in placed.values()]
    assert not layers[0] & layers[1]
