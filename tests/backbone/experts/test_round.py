"""One layer call: whatever nodes do, each pick is summed exactly once or the round fails by name."""

import itertools
from collections.abc import Collection

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backbone.experts.deadlines import Line
from backbone.experts.dispatch import LOCAL, Part, Picks, covers
from backbone.experts.planner import Candidate, LocalCost, Terms, plan
from backbone.experts.round import Action, Attempt, Compute, Fault, Late, Round, Send, Spare, Sums

HOLDERS = {0: {"a", "c"}, 1: {"a", "c"}, 2: {"b"}, 3: {"b"}}


def asked(ids: list[list[int]]) -> Picks:
    return Picks.of(np.array(ids, np.int32), np.ones((len(ids), len(ids[0])), np.float32))


def truth(picks: Picks, rows: int) -> Sums:
    """Stand in for a kernel: pick (row, expert) adds 10**expert to its row."""
    sums = np.zeros((rows, 1), np.int64)
    row_of_pick = np.repeat(np.arange(rows), picks.counts)
    np.add.at(sums[:, 0], row_of_pick, 10 ** picks.experts.astype(np.int64))
    return sums


class Fixed:
    """A planner that knows everything: nodes in order of preference, each late after `patience_s`."""

    def __init__(self, preference: tuple[str, ...], patience_s: float) -> None:
        self.preference = preference
        self.patience = patience_s

    def parts(self, picks: Picks, tried: Collection[str], left_s: float) -> list[Part]:
        names = [name for name in self.preference if name not in tried and left_s > 0]
        found = [Candidate(name, Line(1e-3 * i, 0.0, 0.0)) for i, name in enumerate(names)]
        return plan(picks, HOLDERS, found, LocalCost(0.0, 1.0, lambda expert: 0.0), Terms(100, 0.0))

    def backup(self, picks: Picks, tried: Collection[str], left_s: float) -> str | None:
        able = [n for n in self.preference if n not in tried and covers(n, picks, HOLDERS)]
        return able[0] if able and left_s > 0 else LOCAL

    def patience_s(self, node: str, picks: Picks) -> float:
        return self.patience


def new_round(
    rows: int = 1,
    patience_s: float = 0.3,
    preference: tuple[str, ...] = ("a", "b", "c"),
    wait_s: float = 1.0,
) -> Round:
    return Round(
        shape=(rows, 1),
        planner=Fixed(preference, patience_s),
        wait_s=wait_s,
        call_ids=itertools.count(1),
    )


def sent(actions: list[Action]) -> dict[str, Send]:
    return {action.node: action for action in actions if isinstance(action, Send)}


def test_all_nodes_are_asked_before_any_answer_is_awaited() -> None:
    call = new_round()
    actions = call.start(asked([[0, 1, 2, 3]]), 0.0)
    assert list(sent(actions)) == ["a", "b"]
    for send in sent(actions).values():
        assert not call.finished
        call.partial(send.call_id, truth(send.picks, 1), 0.1)
    assert call.finished and not call.failed
    assert call.sums.tolist() == [[1111]]


def test_a_duplicate_answer_is_not_added_twice() -> None:
    call = new_round()
    send = sent(call.start(asked([[0, 1, 2]]), 0.0))["a"]
    for _ in range(3):
        call.partial(send.call_id, truth(send.picks, 1), 0.1)
    assert call.sums.tolist() == [[11]]


def test_a_refused_call_alone_goes_to_the_replica() -> None:
    call = new_round()
    first = sent(call.start(asked([[0, 1, 2]]), 0.0))
    retry = call.failure(first["a"].call_id, "compute", "kernel_fault", 0.1)
    assert list(sent(retry)) == ["c"]
    assert sent(retry)["c"].picks.experts.tolist() == [0, 1]


def test_the_local_kernel_is_the_last_resort() -> None:
    call = new_round()
    send = sent(call.start(asked([[2]]), 0.0))["b"]
    [compute] = call.failure(send.call_id, "return", "garbage", 0.1)
    assert isinstance(compute, Compute)
    call.partial(compute.call_id, truth(compute.picks, 1), 0.2)
    assert call.finished and call.sums.tolist() == [[100]]
    assert call.attempts == [Attempt("b", "return", "garbage")]


def test_a_failing_local_kernel_fails_the_round_by_name() -> None:
    call = new_round(preference=())
    [compute] = call.start(asked([[2]]), 0.0)
    assert isinstance(compute, Compute)
    assert call.failure(compute.call_id, "compute", "non_finite", 0.1) == []
    assert call.finished and call.failed
    assert call.attempts == [Attempt("local kernel", "compute", "non_finite")]


def test_a_late_answer_asks_the_replica_too_and_the_first_one_counts() -> None:
    call = new_round()
    slow = sent(call.start(asked([[0, 1]]), 0.0))["a"]
    assert call.next_timer() == 0.3
    late, hedge = call.handle_timer(0.3)
    assert late == Late(slow.call_id, "a")
    assert isinstance(hedge, Send) and hedge.node == "c"
    assert call.attempts == [Attempt("a", "compute", "not back in time", Fault.LATE)]
    assert call.partial(hedge.call_id, truth(hedge.picks, 1), 0.4) == [Spare(slow.call_id, "a")]
    assert call.partial(slow.call_id, truth(slow.picks, 1), 0.5) == []
    assert call.finished and call.sums.tolist() == [[11]]


def test_the_late_one_may_still_be_first() -> None:
    call = new_round()
    slow = sent(call.start(asked([[0, 1]]), 0.0))["a"]
    _, hedge = call.handle_timer(0.3)
    assert isinstance(hedge, Send)
    assert call.partial(slow.call_id, truth(slow.picks, 1), 0.4) == [Spare(hedge.call_id, "c")]
    assert call.finished and call.sums.tolist() == [[11]]


def test_without_a_replica_this_machine_computes_and_nothing_is_timed_any_more() -> None:
    call = new_round()
    call.start(asked([[2]]), 0.0)
    late, compute = call.handle_timer(0.3)
    assert late == Late(1, "b") and isinstance(compute, Compute)
    assert call.next_timer() is None
    call.partial(compute.call_id, truth(compute.picks, 1), 1.1)
    assert call.finished and call.sums.tolist() == [[100]]


def test_however_many_nodes_are_silent_this_machine_starts_in_time() -> None:
    """26 holders, each with all the patience of the world: the wait is one, not one after another."""
    names = tuple(f"n{i}" for i in range(26))
    HOLDERS[7] = set(names)
    try:
        call = new_round(patience_s=60.0, preference=names, wait_s=0.2)
        [first] = call.start(asked([[7]]), 5.0)
        assert isinstance(first, Send) and call.next_timer() == pytest.approx(5.2)
        _, compute = call.handle_timer(5.2)
        assert isinstance(compute, Compute)
    finally:
        del HOLDERS[7]


def test_failures_one_after_another_end_at_this_machine_in_time() -> None:
    call = new_round(wait_s=0.2)
    first = sent(call.start(asked([[0, 1]]), 0.0))["a"]
    [second] = call.failure(first.call_id, "compute", "kernel_fault", 0.1)
    assert isinstance(second, Send)
    [compute] = call.failure(second.call_id, "compute", "kernel_fault", 0.25)
    assert isinstance(compute, Compute)


def test_what_this_machine_cannot_compute_a_node_that_is_late_still_may() -> None:
    call = new_round()
    slow = sent(call.start(asked([[2]]), 0.0))["b"]
    _, compute = call.handle_timer(0.3)
    assert isinstance(compute, Compute)
    assert call.failure(compute.call_id, "compute", "disk error", 0.4) == []
    assert not call.finished and call.next_timer() is not None
    call.partial(slow.call_id, truth(slow.picks, 1), 0.5)
    assert call.finished and not call.failed and call.sums.tolist() == [[100]]


def test_when_neither_this_machine_nor_a_late_node_answers_the_round_fails() -> None:
    call = new_round()
    call.start(asked([[2]]), 0.0)
    _, compute = call.handle_timer(0.3)
    assert isinstance(compute, Compute)
    call.failure(compute.call_id, "compute", "disk error", 0.4)
    at = call.next_timer()
    assert at is not None and at <= 3.0
    call.handle_timer(at)
    assert call.finished and call.failed


def test_a_node_that_leaves_is_replaced_at_once() -> None:
    call = new_round()
    call.start(asked([[0, 2]]), 0.0)
    assert list(sent(call.node_gone("a", 0.1))) == ["c"]
    [compute] = call.node_gone("b", 0.1)
    assert isinstance(compute, Compute)


@given(data=st.data())
def test_whatever_happens_each_pick_counts_once(data: st.DataObject) -> None:
    rows = data.draw(st.integers(1, 3))
    ids = data.draw(
        st.lists(
            st.lists(st.integers(0, 4), min_size=3, max_size=3, unique=True), min_size=rows, max_size=rows
        )
    )
    call = new_round(rows, patience_s=data.draw(st.sampled_from([0.4, 9.0])))
    now, outbox, history = 0.0, call.start(asked(ids), 0.0), []
    for _ in range(200):
        history += outbox
        outbox = []
        if call.finished:
            break
        step = data.draw(st.sampled_from(["answer", "duplicate", "fail", "gone", "time"]))
        open_calls = [action for action in history if isinstance(action, Send | Compute)]
        chosen = data.draw(st.sampled_from(open_calls))
        if step in ("answer", "duplicate"):
            for _ in range(1 + (step == "duplicate")):
                outbox += call.partial(chosen.call_id, truth(chosen.picks, rows), now)
        elif step == "fail" and isinstance(chosen, Send):
            outbox += call.failure(chosen.call_id, "compute", "broken", now)
        elif step == "gone":
            outbox += call.node_gone(data.draw(st.sampled_from("abc")), now)
        elif step == "time" and (timer := call.next_timer()) is not None:
            now = max(now, timer)
            outbox += call.handle_timer(now)
    else:
        for action in history:  # what is still open answers in the end
            if isinstance(action, Send | Compute):
                call.partial(action.call_id, truth(action.picks, rows), now)
    assert call.finished and not call.failed
    assert call.sums.tolist() == truth(asked(ids), rows).tolist()
