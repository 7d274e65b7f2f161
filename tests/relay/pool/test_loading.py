"""How a node is judged that loads slowly, or never: doubted, cut, resting; and trusted again."""

from relay.pool.loading import (
    DEADLINE_S,
    DOUBT_S,
    HORIZON_S,
    REST_CAP_S,
    REST_S,
    Loading,
    deadline_s,
    doubt_s,
)

SLICE = 10


def test_patience_grows_with_the_slice_and_falls_with_the_rate() -> None:
    assert doubt_s(SLICE, None) < DOUBT_S + 0.1 and deadline_s(SLICE, None) < DEADLINE_S + 0.1
    assert doubt_s(3_300_000, None) < 11.0 < doubt_s(3_300_000, 125e3) < 60.0
    assert deadline_s(3_300_000, 1e3) == deadline_s(3_300_000, 25e3), "there is an end to it"
    assert all(doubt_s(n, r) < deadline_s(n, r) for n in (1, 10**6, 10**9) for r in (None, 1e3, 1e6, 1e9))


def judged(loading: Loading, at: float, starved: bool = False) -> bool:
    return loading.due(SLICE, at) and loading.judge(SLICE, starved, at)


def test_node_that_never_loads_is_doubted_then_cut_then_left_alone_longer_each_time() -> None:
    loading = Loading()
    loading.assigned(0, 100, 0.0)
    assert not judged(loading, DOUBT_S - 0.1) and not loading.doubted
    assert judged(loading, 5.0) and loading.doubted and loading.trusted_bytes is None
    assert not judged(loading, 14.0)
    assert judged(loading, 16.0) and loading.trusted_bytes == SLICE
    loading.assigned(0, 10, 16.0)
    rests = []
    now = 16.0
    for _ in range(9):
        now += 16.0
        assert judged(loading, now) and loading.trusted_bytes == 0
        loading.assigned(0, 0, now)
        began = now
        while not judged(loading, now):
            now += 1.0
        assert loading.trusted_bytes == SLICE, "asked again, with little"
        rests.append(now - began)
        loading.assigned(0, 10, now)
    assert rests == [min(REST_CAP_S, REST_S * 2**n) for n in range(9)]


def test_node_that_loads_after_all_earns_its_trust_back() -> None:
    loading = Loading()
    loading.assigned(0, 100, 0.0)
    judged(loading, 5.0)
    judged(loading, 16.0)
    assert loading.progressed(10, 0, SLICE, 17.0) and not loading.doubted and loading.trusted_bytes == 30
    loading.assigned(10, 20, 17.0)
    assert loading.progressed(30, 0, SLICE, 18.0) and loading.trusted_bytes == 70


def test_nobody_is_judged_for_what_the_backbone_has_not_delivered() -> None:
    loading = Loading()
    loading.assigned(0, 100, 0.0)
    assert loading.due(SLICE, 5.0) and not loading.judge(SLICE, True, 5.0) and not loading.doubted
    assert not loading.due(SLICE, 8.0) and loading.due(SLICE, 9.1)


def test_node_that_holds_all_of_it_is_never_due() -> None:
    loading = Loading()
    loading.assigned(0, 100, 0.0)
    loading.progressed(100, 0, SLICE, 1.0)
    assert not loading.due(SLICE, 1e6)
    loading.assigned(100, 10, 1e6)
    assert not loading.due(SLICE, 1e6 + 1) and loading.due(SLICE, 1e6 + 5), "the clock begins with the work"


def test_slow_node_is_doubted_while_the_rest_takes_too_long_and_not_back_and_forth() -> None:
    loading = Loading()
    loading.assigned(0, 10_000, 0.0)
    assert loading.progressed(100, 9900, SLICE, 1.0) and loading.doubted and loading.trusted_bytes is None
    assert 9900 / 100 > HORIZON_S
    loading.progressed(5000, 5000, SLICE, 50.0)
    assert loading.doubted and HORIZON_S / 2 < 5000 / 100 < HORIZON_S
    assert loading.progressed(8000, 2000, SLICE, 80.0) and not loading.doubted


def test_what_a_lost_device_held_takes_its_time_again() -> None:
    loading = Loading()
    loading.assigned(0, 100, 0.0)
    loading.progressed(100, 0, SLICE, 1.0)
    loading.progressed(0, 100, SLICE, 1000.0)
    assert not loading.due(SLICE, 1001.0)
