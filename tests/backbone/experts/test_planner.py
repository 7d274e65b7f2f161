"""Who computes which rows: every pick exactly once, by whom it comes back from soonest."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from backbone.experts.deadlines import Line
from backbone.experts.dispatch import LOCAL, Part, Picks
from backbone.experts.planner import FEW_ROWS, Candidate, LocalCost, Terms, plan

ROW_BYTES = 4000
EAGER = Terms(ROW_BYTES, 10.0, worth=False)
STRICT = Terms(ROW_BYTES, 0.0)


def picks(ids: list[list[int]]) -> Picks:
    array = np.array(ids, np.int32)
    return Picks.of(array, (array + 0.5).astype(np.float32))


def prompt(tokens: int, num_experts: int = 8, top_k: int = 2) -> Picks:
    random = np.random.default_rng(0)
    return picks([random.permutation(num_experts)[:top_k].tolist() for _ in range(tokens)])


def here(s_per_row: float = 1e-4, load_s: float = 0.0, queue_s: float = 0.0) -> LocalCost:
    return LocalCost(queue_s, s_per_row, lambda expert: load_s)


def node(name: str, delay_s: float = 1e-3, mbit: float = 1000.0, s_per_row: float = 1e-5) -> Candidate:
    return Candidate(name, Line(delay_s, 8 / mbit / 1e6, s_per_row))


def finish_s(parts: list[Part], nodes: list[Candidate], local: LocalCost) -> float:
    """When the last one would be done."""
    lines = {each.name: each.line for each in nodes}
    times = []
    for part in parts:
        rows = len(part.picks.experts)
        if part.holder is LOCAL:
            times.append(local.whole(part.picks))
        else:
            line = lines[part.holder]
            moved = int(np.count_nonzero(part.picks.counts)) * ROW_BYTES
            times.append(line.fixed_s + moved * line.s_per_byte + rows * line.s_per_row)
    return max(times)


def rows_of(parts: list[Part]) -> dict[str | None, int]:
    return {part.holder: len(part.picks.experts) for part in parts}


# -- a few rows


def test_one_node_that_holds_everything_is_asked_alone() -> None:
    holders = {expert: {"a", "b"} for expert in range(4)} | {9: {"b"}}
    parts = plan(picks([[0, 1], [2, 9]]), holders, [node("a"), node("b")], here(), EAGER)
    assert [part.holder for part in parts] == ["b"]


def test_the_quicker_of_two_is_asked() -> None:
    holders = {0: {"slow", "fast"}, 1: {"slow", "fast"}}
    found = plan(picks([[0, 1]]), holders, [node("slow", 0.05), node("fast", 0.02)], here(), EAGER)
    assert [part.holder for part in found] == ["fast"]


def test_a_node_slower_than_this_machine_is_not_asked() -> None:
    holders = {0: {"a"}, 1: {"a"}}
    assert rows_of(plan(picks([[0, 1]]), holders, [node("a", 0.02)], here(1e-3), STRICT)) == {LOCAL: 2}
    # ... but when the experts are on disk here, and it takes 30 ms to read one, it is
    assert rows_of(plan(picks([[0, 1]]), holders, [node("a", 0.02)], here(1e-3, 0.03), STRICT)) == {"a": 2}


def test_slack_prefers_a_node_that_is_a_little_slower() -> None:
    holders = {0: {"a"}}
    near, far = node("a", 0.004), node("a", 0.009)
    slack = Terms(ROW_BYTES, 0.005)
    assert rows_of(plan(picks([[0]]), holders, [near], here(1e-4), slack)) == {"a": 1}
    assert rows_of(plan(picks([[0]]), holders, [far], here(1e-4), slack)) == {LOCAL: 1}


def test_a_quick_node_and_this_machine_beat_a_slow_node_that_holds_all() -> None:
    holders = {0: {"slow", "quick"}, 1: {"slow", "quick"}, 2: {"slow"}}
    nodes = [node("slow", 0.06), node("quick", 0.02)]
    parts = plan(picks([[0, 1, 2]]), holders, nodes, here(0.0, load_s=0.025), STRICT)
    assert rows_of(parts) == {"quick": 2, LOCAL: 1}


def test_what_nobody_holds_is_computed_here() -> None:
    parts = plan(picks([[0, 1], [1, 2]]), {0: {"a"}}, [node("a")], here(), EAGER)
    assert [part.holder for part in parts] == ["a", LOCAL]
    assert parts[0].picks.counts.tolist() == [1, 0]
    assert parts[1].picks.experts.tolist() == [1, 1, 2]


def test_nothing_asked_is_nothing_planned() -> None:
    nothing = Picks.of(np.zeros((1, 0), np.int32), np.zeros((1, 0), np.float32))
    assert plan(nothing, {}, [node("a")], here(), EAGER) == []


def test_a_node_is_trusted_with_no_more_than_it_earned() -> None:
    holders = {e: {"a"} for e in range(8)}
    young = Candidate("a", Line(1e-4, 0.0, 0.0), most_bytes=2 * ROW_BYTES)
    assert rows_of(plan(picks([[0], [1], [2]]), holders, [young], here(1.0), STRICT)) == {LOCAL: 3}
    assert rows_of(plan(picks([[0], [1]]), holders, [young], here(1.0), STRICT)) == {"a": 2}
    many = plan(prompt(64), holders, [young], here(1.0), Terms(ROW_BYTES, 0.0, worth=False))
    assert sum(np.count_nonzero(p.picks.counts) for p in many if p.holder == "a") <= 2


# -- a prompt


def test_a_thin_line_gets_nothing_of_a_prompt() -> None:
    """1 Mbit/s: 32 ms a row, and 530 rows take this machine 106 ms."""
    holders = {e: {"thin"} for e in range(8)}
    parts = plan(prompt(530), holders, [node("thin", 0.01, mbit=1.0)], here(1e-4), STRICT)
    assert rows_of(parts) == {LOCAL: 1060}


def test_a_thin_line_gets_little_of_a_prompt_where_nodes_are_preferred_and_the_bound_holds() -> None:
    holders = {e: {"thin"} for e in range(8)}
    local, thin = here(1e-4), node("thin", 0.01, mbit=1.0)
    parts = plan(prompt(530), holders, [thin], local, Terms(ROW_BYTES, 0.25, worth=False))
    assert finish_s(parts, [thin], local) <= 0.106 + 0.25 + 0.04
    assert rows_of(parts)[LOCAL] > 900


def test_an_equal_node_halves_a_prompt() -> None:
    holders = {e: {"a"} for e in range(8)}
    local, equal = here(1e-4), node("a", 1e-3, s_per_row=1e-4)
    parts = plan(prompt(530), holders, [equal], local, STRICT)
    assert 0.4 <= rows_of(parts)["a"] / 1060 <= 0.6
    assert finish_s(parts, [equal], local) <= 0.65 * local.whole(prompt(530))


def test_a_node_with_everything_gets_whole_rows_not_every_row_a_little() -> None:
    """Bytes follow rows: x and answer of a row travel once, however many of its experts are asked for."""
    holders = {e: {"a", "b"} for e in range(8)}
    nodes = [node("a", mbit=50.0), node("b", mbit=50.0)]
    parts = plan(prompt(512), holders, nodes, here(1.0), STRICT)
    moved = sum(int(np.count_nonzero(p.picks.counts)) for p in parts if p.holder is not LOCAL)
    assert moved < 1.25 * 512


@given(
    tokens=st.integers(1, 70),
    nodes=st.lists(st.tuples(st.floats(0, 0.2), st.floats(0.1, 1000), st.floats(0, 1e-2)), max_size=6),
    held=st.lists(st.sets(st.integers(0, 5)), min_size=8, max_size=8),
    s_per_row=st.floats(1e-6, 1e-2),
    load_s=st.floats(0, 0.05),
)
def test_every_pick_is_given_once_to_a_holder_and_no_later_than_alone(
    tokens: int,
    nodes: list[tuple[float, float, float]],
    held: list[set[int]],
    s_per_row: float,
    load_s: float,
) -> None:
    asked = prompt(tokens)
    holders = {expert: {f"n{i}" for i in who} for expert, who in enumerate(held)}
    made = [node(f"n{i}", *each) for i, each in enumerate(nodes)]
    local = here(s_per_row, load_s)
    parts = plan(asked, holders, made, local, STRICT)
    assert len({part.holder for part in parts}) == len(parts)
    seen = []
    for part in parts:
        row_of_pick = np.repeat(np.arange(tokens), part.picks.counts)
        for row, expert, weight in zip(row_of_pick, part.picks.experts, part.picks.weights, strict=True):
            seen.append((int(row), int(expert)))
            assert weight == expert + 0.5
            assert part.holder is LOCAL or part.holder in holders[int(expert)]
    rows = np.repeat(np.arange(tokens), asked.counts)
    assert sorted(seen) == sorted(zip(rows.tolist(), asked.experts.tolist(), strict=True))
    if tokens <= FEW_ROWS:
        assert finish_s(parts, made, local) <= local.whole(asked) * 1.01
    else:  # rows of a block are counted as if they were as many as they can be
        assert finish_s(parts, made, local) <= local.whole(asked) * 1.06
