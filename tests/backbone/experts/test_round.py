"""One layer call: whatever nodes do, each pick is summed exactly once or the round fails by name."""

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from backbone.experts.dispatch import Picks
from backbone.experts.round import Action, Attempt, CancelCall, Compute, Round, Send, Sums, Timing

HOLDERS = {0: {"a", "c"}, 1: {"a", "c"}, 2: {"b"}, 3: {"b"}}


def asked(ids: list[list[int]]) -> Picks:
    return Picks.of(np.array(ids, np.int32), np.ones((len(ids), len(ids[0])), np.float32))


def truth(picks: Picks, rows: int) -> Sums:
    """Stand in for a kernel: pick (row, expert) adds 10**expert to its row."""
    sums = np.zeros((rows, 1), np.int64)
    row_of_pick = np.repeat(np.arange(rows), picks.counts)
    np.add.at(sums[:, 0], row_of_pick, 10 ** picks.experts.astype(np.int64))
    return sums


def new_round(
    rows: int = 1, hedge_after_s: float | None = None, preference: tuple[str, ...] = ("a", "b", "c")
) -> Round:
    return Round(
        shape=(rows, 1),
        holders=HOLDERS,
        preference=preference,
        timing=lambda node: Timing(1.0, hedge_after_s),
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


def test_a_passed_deadline_asks_elsewhere_and_drops_the_late_answer() -> None:
    call = new_round()
    late = sent(call.start(asked([[0, 1]]), 0.0))["a"]
    assert call.next_timer() == 1.0
    cancel, retry = call.handle_timer(1.0)
    assert cancel == CancelCall(late.call_id, "a")
    assert isinstance(retry, Send) and retry.node == "c"
    assert call.partial(late.call_id, truth(late.picks, 1), 1.1) == []
    call.partial(retry.call_id, truth(retry.picks, 1), 1.2)
    assert call.finished and call.sums.tolist() == [[11]]


def test_a_hedge_asks_the_replica_and_the_first_answer_wins() -> None:
    call = new_round(hedge_after_s=0.3)
    slow = sent(call.start(asked([[0, 1]]), 0.0))["a"]
    assert call.next_timer() == 0.3
    [hedge] = call.handle_timer(0.3)
    assert isinstance(hedge, Send) and hedge.node == "c"
    assert call.partial(hedge.call_id, truth(hedge.picks, 1), 0.4) == [CancelCall(slow.call_id, "a")]
    assert call.partial(slow.call_id, truth(slow.picks, 1), 0.5) == []
    assert call.finished and call.sums.tolist() == [[11]]


def test_a_hedge_without_a_replica_uses_the_local_kernel() -> None:
    call = new_round(hedge_after_s=0.3)
    call.start(asked([[2]]), 0.0)
    [hedge] = call.handle_timer(0.3)
    assert isinstance(hedge, Compute)
    assert call.handle_timer(1.0) == [CancelCall(1, "b")]  # the deadline: the hedge still runs
    call.partial(hedge.call_id, truth(hedge.picks, 1), 1.1)
    assert call.finished and call.sums.tolist() == [[100]]


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
    call = new_round(rows, hedge_after_s=data.draw(st.sampled_from([None, 0.4])))
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
