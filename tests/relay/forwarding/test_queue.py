"""The outbox: bounded, control first, dead letters dropped, nothing lost or turned around otherwise."""

from hypothesis import given
from hypothesis import strategies as st

from relay.forwarding.queue import CONTROL_FRAMES, Outbox, Waiting


def bulk(data: bytes = b"x", call_id: int = 1, expires_at: float | None = None, sender: int = 1) -> Waiting:
    return Waiting(data, sender, call_id, expires_at)


def drain(outbox: Outbox, now: float = 0.0) -> list[bytes]:
    out = []
    while (data := outbox.pop(now)) is not None:
        out.append(data)
    return out


def test_control_goes_before_bulk_and_each_keeps_its_order() -> None:
    outbox = Outbox(100, 10)
    for data in (b"1", b"2"):
        assert outbox.put(bulk(data))
        assert outbox.put_control(b"c" + data)
    assert drain(outbox) == [b"c1", b"c2", b"1", b"2"]
    assert outbox.size_bytes == 0


def test_full_outbox_takes_no_more_bulk_but_still_takes_control() -> None:
    outbox = Outbox(10, 10)
    assert outbox.put(bulk(b"12345678"))
    assert not outbox.put(bulk(b"123"))
    assert outbox.put_control(b"ping")
    assert drain(outbox) == [b"ping", b"12345678"]


def test_frames_are_bounded_too() -> None:
    outbox = Outbox(1000, 2)
    assert [outbox.put(bulk()) for _ in range(3)] == [True, True, False]


def test_empty_outbox_takes_a_frame_larger_than_itself() -> None:
    assert Outbox(10, 10).put(bulk(bytes(100)))


def test_expired_calls_are_dropped_from_the_head_and_counted() -> None:
    outbox = Outbox(100, 10)
    outbox.put(bulk(b"late", expires_at=1.0))
    outbox.put(bulk(b"later", expires_at=1.5))
    outbox.put(bulk(b"good", expires_at=3.0))
    outbox.put(bulk(b"free"))
    assert drain(outbox, now=2.0) == [b"good", b"free"]
    assert outbox.dropped == 2 and outbox.bulk_bytes == 0


def test_cancelled_call_is_taken_out_if_it_has_not_left() -> None:
    outbox = Outbox(100, 10)
    outbox.put(bulk(b"a", call_id=1))
    outbox.put(bulk(b"b", call_id=2))
    assert not outbox.cancel(sender=9, call_id=2)
    assert outbox.cancel(sender=1, call_id=2)
    assert not outbox.cancel(sender=1, call_id=2)
    assert drain(outbox) == [b"a"]


def test_receiver_that_owes_too_many_control_frames_is_given_up() -> None:
    outbox = Outbox(100, 10)
    assert all(outbox.put_control(b"f") for _ in range(CONTROL_FRAMES))
    assert not outbox.put_control(b"f")


@given(st.lists(st.tuples(st.booleans(), st.binary(max_size=3)), max_size=30))
def test_what_was_taken_comes_out_once(puts: list[tuple[bool, bytes]]) -> None:
    outbox = Outbox(20, 5)
    control = [data for is_control, data in puts if is_control and outbox.put_control(data)]
    taken = [data for is_control, data in puts if not is_control and outbox.put(bulk(data))]
    assert outbox.bulk_bytes <= 20 + 8 and len(outbox) == len(control) + len(taken)
    assert drain(outbox) == control + taken
