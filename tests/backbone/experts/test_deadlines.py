"""What a node's answers, late answers and silences teach."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backbone.experts.deadlines import (
    FORGIVEN_AFTER,
    WINDOW,
    DeadlinePolicy,
    NodeRecord,
    Size,
)

TOKEN = Size(6_000, 8)
PROMPT = Size(1_500_000, 4_000)


def record(**bounds: float) -> NodeRecord:
    return NodeRecord(DeadlinePolicy(**bounds))


def test_nothing_is_known_of_a_stranger() -> None:
    node = record(first_s=3.0)
    assert node.line(1000) is None and not node.known and node.most_bytes() == 0
    assert node.patience_s(TOKEN, 0.0) == float("inf")
    assert node.give_up_s(TOKEN) == 3.0


def test_delay_line_and_kernel_are_told_apart() -> None:
    """20 ms away, 8 Mbit/s (1 us a byte), 50 us a row."""
    node = record()
    for size in (TOKEN, Size(100_000, 300), PROMPT):
        for _ in range(3):
            compute_s = size.num_rows * 50e-6
            node.answered(size, 0.02 + size.num_bytes * 1e-6 + compute_s, compute_s, 10.0)
    line = node.line(PROMPT.num_bytes)
    assert line is not None
    assert line.s_per_byte == pytest.approx(1e-6, rel=0.05) and line.s_per_row == pytest.approx(50e-6)
    assert line.at(PROMPT) == pytest.approx(0.02 + 1.5 + 0.2, rel=0.05)
    near = node.line(TOKEN.num_bytes)
    assert near is not None and near.at(TOKEN) == pytest.approx(0.0264, rel=0.05)


def test_what_is_not_answered_yet_comes_first() -> None:
    node = record()
    for size in (TOKEN, PROMPT):
        node.answered(size, 0.02 + size.num_bytes * 1e-6, 0.0, 10.0)
    idle = node.line(PROMPT.num_bytes)
    node.asked(PROMPT)
    busy = node.line(PROMPT.num_bytes)
    assert idle is not None and busy is not None
    assert busy.at(PROMPT) - idle.at(PROMPT) == pytest.approx(1.5, rel=0.05)
    node.closed(PROMPT, late=False)
    assert node.line(PROMPT.num_bytes) == idle


def test_a_mean_counts_tails() -> None:
    """One in eight takes 300 ms: that is what a token pays, though the median is 20 ms."""
    node = record()
    for i in range(WINDOW):
        node.answered(TOKEN, 0.3 if i == 0 else 0.02, 0.0, 10.0)
    line = node.line(TOKEN.num_bytes)
    assert line is not None and line.at(TOKEN) == pytest.approx(0.055)


def test_each_late_answer_halves_the_next_patience() -> None:
    node = record()
    for i in range(WINDOW):
        node.answered(TOKEN, 0.8 if i == 0 else 0.1, 0.0, 10.0)
    waits = [node.patience_s(TOKEN, 0.0)]
    for _ in range(3):
        node.missed()
        waits.append(node.patience_s(TOKEN, 0.0))
    assert waits == pytest.approx([1.2, 0.6, 0.3, 0.1875])  # its mean: with less, do not ask at all
    assert not node.usable(10.0)  # it owes three answers
    for _ in range(3):
        node.closed(TOKEN, late=True)
    assert node.usable(10.0) and node.failures == 0
    node.answered(TOKEN, 0.1, 0.0, 11.0)
    assert node.misses == 0 and node.patience_s(TOKEN, 0.0) == pytest.approx(0.15)  # and that one is past


def test_late_answers_that_come_do_not_drive_the_patience_to_nothing() -> None:
    node = record()
    node.answered(TOKEN, 0.1, 0.0, 10.0)
    for _ in range(20):
        node.missed()
        node.closed(TOKEN, late=True)
        node.answered(TOKEN, 0.3, 0.0, 10.0, late=True)
    assert node.misses <= 1 and node.patience_s(TOKEN, 0.0) >= 0.3


def test_an_answer_that_never_came_is_remembered_as_that_long_and_an_answer_clears_it() -> None:
    node = record()
    node.answered(TOKEN, 0.02, 0.0, 10.0)
    node.gave_up(4.0, 20.0)
    line = node.line(TOKEN.num_bytes)
    assert line is not None and line.at(TOKEN) >= 4.0
    assert node.most_bytes() == 0  # it has to prove itself with a probe first
    node.answered(TOKEN, 0.02, 0.0, 30.0)
    line = node.line(TOKEN.num_bytes)
    assert line is not None and line.at(TOKEN) == pytest.approx(0.02)
    assert node.most_bytes() > 0


def test_a_failing_node_rests_longer_each_time_and_is_forgiven_slowly() -> None:
    node = record(suspend_first_s=0.5, suspend_max_s=4.0)
    rests = []
    for _ in range(6):
        node.failed(now=100.0)
        rests.append(node.suspended_until - 100.0)
    assert rests == [0.5, 1.0, 2.0, 4.0, 4.0, 4.0]
    assert not node.usable(103.9) and node.usable(104.0)
    node.answered(TOKEN, 0.1, 0.0, now=10.0)
    assert node.usable(100.0) and node.failures == 6
    for _ in range(FORGIVEN_AFTER):
        node.answered(TOKEN, 0.1, 0.0, now=10.0)
    assert node.failures == 5


def test_answering_every_second_time_does_not_pay() -> None:
    node = record()
    now = 0.0
    for _ in range(12):
        node.answered(TOKEN, 0.1, 0.0, now)
        node.failed(now)
        now = node.suspended_until
    assert now > 100.0


def test_a_node_that_comes_back_in_a_new_session_is_asked_at_once_and_trusted_no_more_than_before() -> None:
    node = record(suspend_first_s=1.0)
    node.met(5)
    for _ in range(3):
        node.failed(10.0)
    node.met(5)
    assert not node.usable(13.9) and node.usable(14.0)
    node.missed()
    node.met(6)
    assert node.usable(10.0) and node.misses == 1 and node.owed == 0
    node.failed(10.0)
    assert not node.usable(17.9) and node.usable(18.0)


def test_trust_grows_with_what_was_answered() -> None:
    node = record()
    node.answered(TOKEN, 0.1, 0.0, 10.0)
    assert node.most_bytes() == 2 * TOKEN.num_bytes
    node.answered(PROMPT, 1.0, 0.0, 10.0)
    assert node.most_bytes() == 2 * PROMPT.num_bytes


def test_a_node_that_became_quick_is_looked_at_again_at_once() -> None:
    node = record()
    for _ in range(WINDOW):
        node.answered(TOKEN, 2.0, 0.0, 10.0)
    node.probed(10.0, grows=False)
    node.probed(12.0, grows=False)
    assert node.probe_at == 16.0
    node.answered(TOKEN, 0.02, 0.0, 12.1)
    assert node.probe_at == 12.1


@given(
    st.lists(
        st.tuples(st.integers(0, 1 << 24), st.integers(0, 4096), st.floats(0, 60), st.floats(0, 1e9)),
        min_size=1,
        max_size=40,
    ),
    st.integers(0, 1 << 24),
)
def test_whatever_a_node_claims_estimates_are_finite_and_not_negative(
    answers: list[tuple[int, int, float, float]], num_bytes: int
) -> None:
    node = record()
    for size, rows, took_s, compute_s in answers:
        node.answered(Size(size, rows), took_s, compute_s, 10.0)
    line = node.line(num_bytes)
    assert line is not None
    assert 0 <= line.at(Size(num_bytes, 10)) < float("inf")
    assert 0 <= node.patience_s(Size(num_bytes, 10), 0.001) < float("inf")
    assert 0 < node.give_up_s(Size(num_bytes, 10)) <= node.policy.ceiling_s
