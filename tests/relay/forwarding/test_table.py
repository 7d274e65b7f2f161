"""Calls under way: whoever waits for a node that left is named; nobody else is."""

from relay.forwarding.table import MAX_CALLS_PER_NODE, Calls, OpenCall


def test_calls_of_a_node_that_leaves_are_returned_once() -> None:
    calls = Calls()
    calls.opened(7, OpenCall(1, 10, 3))
    calls.opened(7, OpenCall(2, 10, 4))
    calls.opened(8, OpenCall(1, 11, 3))
    calls.closed(7, 1, 99)
    assert calls.node_left(7) == [OpenCall(1, 10, 3), OpenCall(2, 10, 4)]
    assert calls.node_left(7) == [] and len(calls) == 1


def test_answered_call_is_not_failed_later() -> None:
    calls = Calls()
    calls.opened(7, OpenCall(1, 10, 3))
    calls.closed(7, 1, 10)
    calls.closed(9, 1, 10)
    assert calls.node_left(7) == []


def test_calls_of_a_backbone_that_left_are_forgotten() -> None:
    calls = Calls()
    calls.opened(7, OpenCall(1, 10, 3))
    calls.opened(7, OpenCall(2, 11, 3))
    calls.backbone_left(1)
    assert calls.node_left(7) == [OpenCall(2, 11, 3)]


def test_a_node_that_never_answers_does_not_fill_memory() -> None:
    calls = Calls()
    for call_id in range(MAX_CALLS_PER_NODE + 5):
        calls.opened(7, OpenCall(1, call_id, 3))
    assert len(calls) == MAX_CALLS_PER_NODE
    assert calls.node_left(7)[0].call_id == 5
