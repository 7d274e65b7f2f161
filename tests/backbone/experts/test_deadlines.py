"""How long a node is waited for, and when it is left alone."""

import pytest

from backbone.experts.deadlines import JUDGED_AFTER, MEMORY_HALF_LIFE_S, DeadlinePolicy, NodeRecord


def record(**bounds: float) -> NodeRecord:
    return NodeRecord(DeadlinePolicy(**bounds))


def test_an_unknown_node_gets_the_first_deadline_and_no_hedge() -> None:
    node = record(first_s=3.0)
    assert node.deadline_s(1) == 3.0
    assert node.hedge_after_s(1) is None
    assert node.expected_s(1, now=10.0) == 0.0


def test_the_deadline_follows_the_95th_percentile_of_this_size() -> None:
    node = record(floor_s=0.01)
    for i in range(100):
        node.answered(1, 0.100 if i % 50 else 0.5, now=10.0)
    assert node.deadline_s(1) == pytest.approx(0.15)
    assert node.hedge_after_s(1) == pytest.approx(0.1)
    assert node.deadline_s(500) == node.policy.first_s  # another size is another matter


def test_the_deadline_keeps_within_its_bounds() -> None:
    node = record(floor_s=0.25, ceiling_s=2.0)
    node.answered(1, 0.001, now=10.0)
    assert node.deadline_s(1) == 0.25
    for _ in range(64):
        node.answered(1, 30.0, now=10.0)
    assert node.deadline_s(1) == 2.0


def test_a_failing_node_rests_longer_each_time_and_recovers_at_once() -> None:
    node = record(suspend_first_s=0.5, suspend_max_s=4.0)
    rests = []
    for _ in range(6):
        node.failed(now=100.0)
        rests.append(node.suspended_until - 100.0)
    assert rests == [0.5, 1.0, 2.0, 4.0, 4.0, 4.0]
    assert not node.usable(103.9)
    assert node.usable(104.0)
    node.answered(1, 0.1, now=10.0)
    assert node.usable(100.0)


def test_a_node_that_comes_back_in_a_new_session_is_asked_at_once_and_trusted_no_more_than_before() -> None:
    record = NodeRecord(DeadlinePolicy(suspend_first_s=1.0))
    record.met(5)
    for _ in range(3):
        record.failed(10.0)
    record.met(5)
    assert not record.usable(13.9) and record.usable(14.0)
    record.met(6)
    assert record.usable(10.0)
    record.failed(10.0)
    assert not record.usable(17.9) and record.usable(18.0)


def test_a_slow_answer_fades_while_the_node_is_not_asked() -> None:
    """Else one slow spell would keep a node idle for good."""
    node = record()
    for _ in range(JUDGED_AFTER):
        node.answered(1, 0.8, now=10.0)
    assert node.expected_s(1, now=10.0) == 0.8
    assert node.expected_s(1, now=10.0 + 3 * MEMORY_HALF_LIFE_S) == pytest.approx(0.1)
    node.answered(1, 0.8, now=20.0)
    assert node.expected_s(1, now=20.0) == 0.8


def test_a_node_is_judged_by_more_than_its_first_answer() -> None:
    node = record()
    for round_trip_s in (0.9, 0.01, 0.01):
        assert node.expected_s(1, now=10.0) == 0.0
        node.answered(1, round_trip_s, now=10.0)
    assert node.expected_s(1, now=10.0) == 0.01
