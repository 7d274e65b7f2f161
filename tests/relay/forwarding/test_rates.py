"""What one peer may send: honest bursts pass, floods are named."""

from hypothesis import given
from hypothesis import strategies as st

from relay.forwarding.rates import ANSWER_BYTES, ANSWER_FACTOR, CONTROL_BYTES, MAX_CALLS, MESSAGES, Allowance
from relay.wire.frames import PAYLOAD_LIMITS, FrameType
from relay.wire.session import NODE_TABLE, State, Way

CALLS = {FrameType.PARTIAL, FrameType.FAILURE, FrameType.ECHO}


def test_every_frame_a_node_may_send_has_a_rate_or_answers_a_call() -> None:
    said = {kind for way, kind in NODE_TABLE[State.READY] if way is Way.SEND}
    assert said - {FrameType.BYE} <= set(MESSAGES) | CALLS


def test_node_that_loads_slices_or_hides_its_tab_is_never_refused() -> None:
    node = Allowance(is_backbone=False, now=0.0)
    for second in range(600):
        for _ in range(15):
            assert node.message(FrameType.SLICE_READY, float(second)) is None
        assert node.message(FrameType.PAUSE, float(second)) is None


def test_backbone_that_greets_all_its_nodes_at_once_is_not_refused() -> None:
    backbone, node = Allowance(is_backbone=True, now=0.0), Allowance(is_backbone=False, now=0.0)
    for _ in range(1000):
        for kind in (FrameType.SEAL_ANSWER, FrameType.SIGNAL, FrameType.SIGNAL):
            assert backbone.message(kind, 0.0) is None
    assert any(node.message(FrameType.SIGNAL, 0.0) for _ in range(1000))


def test_flood_of_one_kind_is_refused_by_name_and_costs_no_other_kind() -> None:
    node = Allowance(is_backbone=False, now=0.0)
    refusals = [node.message(FrameType.PAUSE, 0.0) for _ in range(40)]
    assert refusals[29] is None and refusals[30] == "too many PAUSE frames: 2 a second are taken, 30 at once"
    assert node.message(FrameType.OFFER, 0.0) is None
    assert node.message(FrameType.PAUSE, 1.0) is None


def test_each_call_is_answered_once_late_or_not() -> None:
    node = Allowance(is_backbone=False, now=0.0)
    assert not node.answer(100)
    node.called(1000)
    node.called(1000)
    assert node.answer(8000) and node.answer(100) and not node.answer(100)


def test_answer_is_as_long_as_its_call_gives_reason_for() -> None:
    node = Allowance(is_backbone=False, now=0.0)
    node.called(1000)
    assert not node.answer(1000 * ANSWER_FACTOR + ANSWER_BYTES + 1)
    assert node.answer(1000 * ANSWER_FACTOR + ANSWER_BYTES)
    node.called(50, answer_bytes=256 << 10)
    assert node.answer(256 << 10)


def test_what_nobody_asked_for_is_forgiven_a_little() -> None:
    node = Allowance(is_backbone=False, now=0.0)
    assert all(node.unasked(100, 0.0) is None for _ in range(60))
    assert Allowance(is_backbone=False, now=0.0).unasked(15 << 20, 0.0) is not None, (
        "a long one counts for many"
    )
    assert [node.unasked(100, 0.0) for _ in range(8)][-1] is not None
    assert node.unasked(100, 10.0) is None


def test_longest_message_follows_from_what_was_asked() -> None:
    node = Allowance(is_backbone=False, now=0.0)
    assert node.message_bytes == CONTROL_BYTES == PAYLOAD_LIMITS[FrameType.OFFER]
    node.called(1 << 20)
    assert node.message_bytes == PAYLOAD_LIMITS[FrameType.PARTIAL]
    assert node.answer(10)
    assert node.message_bytes == CONTROL_BYTES
    assert Allowance(is_backbone=True, now=0.0).message_bytes == PAYLOAD_LIMITS[FrameType.REGISTER]


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 1 << 24)), max_size=300))
def test_there_are_never_more_answers_than_calls(steps: list[tuple[bool, int]]) -> None:
    node = Allowance(is_backbone=False, now=0.0)
    owed = 0
    for is_call, size in steps:
        if is_call:
            node.called(size)
            owed += 1
        elif node.answer(size):
            owed -= 1
        assert 0 <= owed <= MAX_CALLS
