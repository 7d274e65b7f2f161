"""Signals pass between the ends of one pairing only, and no peer can flood another with them."""

from relay.signalling.rooms import BURST, PER_S, Rooms

NODE, EPOCH = 5, 7


def test_ends_of_a_pairing_may_signal_each_other() -> None:
    assert Rooms().passes(NODE, EPOCH, EPOCH, now=0.0)


def test_strangers_may_not_signal() -> None:
    assert not Rooms().passes(NODE, EPOCH, None, now=0.0)


def test_signal_of_a_former_pairing_is_dropped() -> None:
    assert not Rooms().passes(NODE, EPOCH, EPOCH + 1, now=0.0)


def test_flood_is_cut_off_and_forgiven_with_time() -> None:
    rooms = Rooms()
    assert sum(rooms.passes(NODE, EPOCH, EPOCH, now=0.0) for _ in range(3 * BURST)) == BURST
    assert rooms.passes(NODE + 1, EPOCH, EPOCH, now=0.0)  # others are not cut off
    assert rooms.passes(NODE, EPOCH, EPOCH, now=1.0 / PER_S)
    assert not rooms.passes(NODE, EPOCH, EPOCH, now=1.0 / PER_S)


def test_what_was_not_paired_costs_nothing() -> None:
    rooms = Rooms()
    for _ in range(2 * BURST):
        rooms.passes(NODE, EPOCH, None, now=0.0)
    assert rooms.passes(NODE, EPOCH, EPOCH, now=0.0)


def test_peer_that_left_is_forgotten() -> None:
    rooms = Rooms()
    for _ in range(BURST):
        rooms.passes(NODE, EPOCH, EPOCH, now=0.0)
    rooms.left(NODE)
    assert rooms.passes(NODE, EPOCH, EPOCH, now=0.0)
