"""The choice of a lane, with time and round trips by hand."""

from collections.abc import Callable
from random import Random

import pytest

from relay.nat.evidence import RELAYED, Evidence, PathPolicy, better_path, clear_race
from relay.nat.paths import Open, PathBook, Race

POLICY = PathPolicy(recheck_s=60.0)


def evidence(lost: int = 0, **ms: float | list[float]) -> Evidence:
    """`evidence(kb12=80.0)`: eight round trips of 80 ms with 12 KB; a list is taken as it is."""
    made = Evidence(lost=lost)
    for name, value in ms.items():
        for one in value if isinstance(value, list) else [value] * 8:
            made.add(int(name.removeprefix("kb")), one)
    return made


def test_faster_lane_beats_a_slower_one() -> None:
    verdict = better_path(evidence(kb12=85.0), evidence(kb12=40.0), POLICY)
    assert verdict.better and "12 KB: 40.0/40.0 ms against 85.0/85.0 ms" in verdict.why


@pytest.mark.parametrize("ms", [85.0, 84.0, 81.0, 90.0])
def test_lane_that_is_faster_by_less_than_the_hysteresis_does_not(ms: float) -> None:
    assert not better_path(evidence(kb12=85.0), evidence(kb12=ms), POLICY).better


def test_a_share_alone_is_not_enough_where_all_is_quick() -> None:
    assert not better_path(evidence(kb6=0.30), evidence(kb6=0.15), POLICY).better
    assert better_path(evidence(kb6=0.30), evidence(kb6=0.15), PathPolicy(hysteresis_ms=0.1)).better


def test_lower_ping_that_needs_ten_round_trips_for_100_kb_is_not_taken() -> None:
    """The trap: an untuned data channel with the better ping (evidence: 995 ms against 90 ms)."""
    verdict = better_path(evidence(kb6=84.0, kb100=90.0), evidence(kb6=60.0, kb100=995.0), POLICY)
    assert not verdict.better and verdict.why.startswith("slower at 100 KB")


def test_tail_counts_as_much_as_the_median() -> None:
    jumpy = evidence(kb12=[60.0] * 7 + [300.0])
    assert not better_path(evidence(kb12=85.0), jumpy, POLICY).better


def test_lossy_lane_is_not_taken_however_fast() -> None:
    verdict = better_path(evidence(kb12=85.0), evidence(kb12=20.0, lost=1), POLICY)
    assert not verdict.better and verdict.why == "1 probes were lost"


def test_sizes_that_only_one_was_measured_with_are_not_compared() -> None:
    assert better_path(evidence(kb6=80.0), evidence(kb12=10.0), POLICY).why == "nothing to compare"


@pytest.mark.parametrize(
    ("current", "other", "clear"),
    [
        ([62.0, 63.0, 64.0, 62.0], [2.0, 9.0, 3.0, 2.0], True),
        ([2.0, 9.0, 3.0, 2.0], [62.0, 63.0, 64.0, 62.0], True),  # slower, as clearly
        ([62.0, 63.0, 64.0, 62.0], [2.0, 63.0, 3.0, 2.0], False),  # one late message: measure on
        ([62.0, 63.0, 64.0, 62.0], [59.0] * 4, False),  # within twice the hysteresis
        ([62.0, 63.0, 64.0], [2.0, 9.0, 3.0], False),  # too few
        ([0.5] * 4, [0.2] * 4, False),  # where all is quick a share says little
    ],
)
def test_race_is_over_early_only_when_no_round_trips_overlap(
    current: list[float], other: list[float], clear: bool
) -> None:
    assert clear_race(evidence(kb12=current), evidence(kb12=other), POLICY) is clear


def test_race_is_not_over_early_while_a_size_is_open_or_a_message_was_lost() -> None:
    slow = evidence(kb6=80.0, kb12=85.0)
    assert clear_race(slow, evidence(kb6=40.0, kb12=40.0), POLICY)
    assert not clear_race(slow, evidence(kb6=40.0, kb12=90.0), POLICY)
    assert not clear_race(slow, evidence(kb6=40.0, kb12=40.0, lost=1), POLICY)
    assert not clear_race(slow, evidence(), POLICY)


def book(*lanes: str) -> PathBook:
    return PathBook(lanes, POLICY, now=0.0)


def open_and_race(b: PathBook, name: str, now: float, ours: Evidence, relay: Evidence) -> None:
    b.opened(name, now)
    [race] = b.handle_timer(now)
    assert race == Race(b.current, name)
    b.raced(race, relay, ours, now)


def test_first_call_goes_over_the_relay_while_others_are_opened() -> None:
    b = book("direct", "webrtc")
    assert b.handle_timer(0.0) == [Open("direct"), Open("webrtc")]
    assert b.current == RELAYED and b.next_timer() is None


def test_node_without_lanes_stays_on_the_relay_for_ever() -> None:
    b = book()
    assert (b.next_timer(), b.handle_timer(1e9), b.current) == (None, [], RELAYED)


def test_lane_that_wins_its_race_is_taken() -> None:
    b = book("direct")
    b.handle_timer(0.0)
    open_and_race(b, "direct", 1.0, evidence(kb12=40.0), evidence(kb12=85.0))
    assert (b.current, b.since, b.evidence_at) == ("direct", 1.0, 1.0)


def test_lane_that_loses_is_raced_again_later_and_later() -> None:
    b = book("webrtc")
    b.handle_timer(0.0)
    open_and_race(b, "webrtc", 0.0, evidence(kb12=168.0), evidence(kb12=85.0))
    assert b.current == RELAYED and b.why.startswith("webrtc is slower at 12 KB")
    pauses, now = [], 0.0
    for _ in range(8):
        at = b.next_timer()
        assert at is not None
        pauses.append(at - now)
        now = at
        [race] = b.handle_timer(now)
        assert isinstance(race, Race)
        b.raced(race, evidence(kb12=85.0), evidence(kb12=168.0), now)
    assert pauses == [15.0, 30.0, 60.0, 120.0, 240.0, 480.0, 600.0, 600.0]


def test_lane_that_cannot_be_opened_is_tried_once_and_again_slowly() -> None:
    b = book("webrtc")
    b.handle_timer(0.0)
    b.lost("webrtc", "no way through both NATs", 10.0)
    assert b.handle_timer(24.9) == []
    assert b.handle_timer(25.0) == [Open("webrtc")]
    assert b.why == "webrtc lane: no way through both NATs"


def test_network_change_tries_at_once() -> None:
    b = book("webrtc")
    b.handle_timer(0.0)
    b.lost("webrtc", "no way", 10.0)
    b.network_changed(11.0)
    assert b.handle_timer(11.0) == [Open("webrtc")]


def test_lost_lane_falls_back_to_the_relay_at_once() -> None:
    b = book("direct")
    b.handle_timer(0.0)
    open_and_race(b, "direct", 1.0, evidence(kb12=40.0), evidence(kb12=85.0))
    b.lost("direct", "connection lost", 2.0)
    assert (b.current, b.why) == (RELAYED, "direct lane lost: connection lost")


def test_lost_lane_that_was_not_in_use_changes_nothing() -> None:
    b = book("direct", "webrtc")
    b.handle_timer(0.0)
    open_and_race(b, "direct", 1.0, evidence(kb12=40.0), evidence(kb12=85.0))
    b.lost("webrtc", "gone", 2.0)
    assert b.current == "direct" and b.why.startswith("12 KB")


def test_second_lane_must_beat_the_one_in_use() -> None:
    b = book("direct", "webrtc")
    b.handle_timer(0.0)
    open_and_race(b, "webrtc", 1.0, evidence(kb12=60.0), evidence(kb12=85.0))
    open_and_race(b, "direct", 2.0, evidence(kb12=40.0), evidence(kb12=60.0))
    assert b.current == "direct"


def test_lanes_are_raced_one_after_the_other() -> None:
    """Two races at once would measure each other."""
    b = book("direct", "webrtc")
    b.handle_timer(0.0)
    b.opened("direct", 1.0)
    b.opened("webrtc", 1.0)
    assert b.handle_timer(1.0) == [Race(RELAYED, "direct")]
    assert b.handle_timer(1.5) == []
    b.raced(Race(RELAYED, "direct"), evidence(kb12=85.0), evidence(kb12=40.0), 1.8)
    assert b.handle_timer(2.0) == [Race("direct", "webrtc")]


def test_race_whose_opponent_is_no_longer_in_use_is_run_again() -> None:
    b = book("direct", "webrtc")
    b.handle_timer(0.0)
    open_and_race(b, "direct", 1.0, evidence(kb12=40.0), evidence(kb12=85.0))
    b.opened("webrtc", 2.0)
    [race] = b.handle_timer(2.0)
    b.lost("direct", "gone", 2.5)
    b.raced(race, evidence(kb12=40.0), evidence(kb12=60.0), 3.0)
    assert b.current == RELAYED
    assert b.handle_timer(3.0) == [Race(RELAYED, "webrtc")]


def test_lane_in_use_is_raced_against_the_relay_now_and_then_and_left_when_it_became_slower() -> None:
    b = book("direct")
    b.handle_timer(0.0)
    open_and_race(b, "direct", 1.0, evidence(kb12=40.0), evidence(kb12=85.0))
    assert b.handle_timer(60.9) == []
    [race] = b.handle_timer(61.0)
    assert race == Race(RELAYED, "direct")
    b.raced(race, evidence(kb12=85.0), evidence(kb12=86.0), 62.0)
    assert b.current == "direct"  # within the hysteresis: no flapping
    [race] = b.handle_timer(122.0)
    b.raced(race, evidence(kb12=85.0), evidence(kb12=120.0), 123.0)
    assert b.current == RELAYED


def test_lane_that_became_lossy_is_left() -> None:
    b = book("direct")
    b.handle_timer(0.0)
    open_and_race(b, "direct", 1.0, evidence(kb12=40.0), evidence(kb12=85.0))
    [race] = b.handle_timer(61.0)
    b.raced(race, evidence(kb12=85.0), evidence(kb12=40.0, lost=1), 62.0)
    assert (b.current, b.why) == (RELAYED, "direct lost 1 probes")


def test_calls_that_go_missing_demote_the_lane_but_a_single_one_does_not() -> None:
    b = book("direct")
    b.handle_timer(0.0)
    open_and_race(b, "direct", 1.0, evidence(kb12=40.0), evidence(kb12=85.0))
    b.missed("direct", 5.0)
    b.missed("direct", 16.0)  # the first is forgotten by now
    assert b.current == "direct"
    b.missed("direct", 17.0)
    assert (b.current, b.why) == (RELAYED, "2 calls went missing on the direct lane")
    assert b.next_timer() is not None  # it is raced again, later


def taken() -> PathBook:
    """A book whose direct lane won its race at 1 s, 40 ms against 80."""
    book = PathBook(["direct"], PathPolicy(), 0.0)
    book.handle_timer(0.0)
    book.opened("direct", 0.5)
    (race,) = book.handle_timer(0.5)
    assert isinstance(race, Race)
    book.raced(race, Evidence({12: [80.0] * 8}), Evidence({12: [40.0] * 8}), 1.0)
    assert book.current == "direct"
    return book


def test_lane_is_left_when_its_calls_are_slower_than_those_on_the_relay_just_were() -> None:
    book = taken()
    for number in range(16):
        book.called("relayed", 12, 85.0, 1.0 + number / 10)
    changed = [book.called("direct", 12, 120.0, 3.0 + number / 10) for number in range(16)]
    assert changed == [False] * 15 + [True]
    assert book.current == "relayed" and "calls were slower on the direct lane" in book.why
    assert book.next_timer() is not None  # it will be tried again


def test_lane_stays_while_its_calls_are_not_slower_by_more_than_the_hysteresis() -> None:
    book = taken()
    for number in range(64):
        book.called("relayed", 12, 85.0, 1.0 + number / 100)
        assert not book.called("direct", 12, 86.0, 2.0 + number / 100)
    assert book.current == "direct"


def test_lane_whose_calls_got_slower_is_raced_again_but_not_all_the_time() -> None:
    book = taken()
    for number in range(16):
        assert not book.called("direct", 12, 42.0, 20.0 + number / 100)
    slower = [book.called("direct", 12, 60.0, 30.0 + number / 100) for number in range(16)]
    assert slower[-1]
    assert book.handle_timer(31.0) == [Race("relayed", "direct")]
    assert not any(book.called("direct", 12, 60.0, 32.0 + number / 100) for number in range(64))


def test_calls_on_the_relay_that_are_long_ago_lead_to_a_race_not_to_a_change() -> None:
    book = taken()
    for number in range(16):
        book.called("relayed", 12, 85.0, 1.0 + number / 100)
    for number in range(16):
        book.called("direct", 12, 120.0, 200.0 + number / 100)
    assert book.current == "direct"
    assert book.handle_timer(201.0) == [Race("relayed", "direct")]


def test_lane_that_lost_by_one_late_message_is_raced_again_soon_and_not_for_ever() -> None:
    policy = PathPolicy(near_s=3.0, near_tries=2, retry_s=100.0)
    book = PathBook(["direct"], policy, 0.0)
    book.handle_timer(0.0)
    book.opened("direct", 0.0)
    now, pauses = 0.0, []
    for _ in range(3):
        (race,) = book.handle_timer(now)
        assert isinstance(race, Race)
        book.raced(race, Evidence({12: [80.0] * 8}), Evidence({12: [40.0] * 7 + [400.0]}), now)
        assert book.current == RELAYED
        due = book.next_timer()
        assert due is not None
        pauses.append(due - now)
        now = due
    assert pauses == [3.0, 3.0, 400.0]


def test_lane_that_stalls_now_and_then_loses_to_a_relay_that_is_faster_on_the_mean() -> None:
    stalls = Evidence({12: [16.0] * 15 + [316.0]})
    relay = Evidence({12: [18.0] * 16})
    assert better_path(stalls, relay, PathPolicy()).better
    assert not better_path(relay, stalls, PathPolicy()).better


def sent(book: PathBook, size_kb: int, cost_ms: dict[str, float], now: float, count: int = 1) -> list[str]:
    """Send calls, each answered after what its lane costs for 100 KB."""
    lanes = []
    for _ in range(count):
        lanes.append(lane := book.lane_of(size_kb))
        book.called(lane, size_kb, cost_ms[lane] * size_kb / 100, now)
    return lanes


def test_long_calls_take_the_relay_where_it_carries_them_faster_and_short_ones_stay() -> None:
    """Wins every race with 100 KB, and takes 231 ms for a piece where the relay takes 70."""
    book = taken()
    cost = {"direct": 231.0, RELAYED: 70.0}
    first = sent(book, 300, cost, 1.0, 8)
    assert sorted(first) == ["direct"] * 4 + [RELAYED] * 4, "both are measured, no longer than it is clear"
    assert set(sent(book, 300, cost, 2.0, 50)) == {RELAYED} == {book.lane_of_long_calls}
    assert book.lane_of(100) == book.lane_of(6) == book.current == "direct"


def test_long_calls_of_other_sizes_are_compared_by_the_byte() -> None:
    book = taken()
    cost = {"direct": 40.0, RELAYED: 90.0}
    for size_kb in (120, 400, 150, 300) * 4:
        sent(book, size_kb, cost, 1.0)
    assert book.lane_of_long_calls == "direct"


def test_long_calls_are_measured_again_when_they_got_slower_or_after_a_while() -> None:
    book = taken()
    sent(book, 300, {"direct": 40.0, RELAYED: 90.0}, 1.0, 20)
    assert book.lane_of_long_calls == "direct"
    sent(book, 300, {"direct": 200.0, RELAYED: 90.0}, 5.0, 20)
    assert book.lane_of_long_calls == "direct", "not within race_again_s"
    sent(book, 300, {"direct": 200.0, RELAYED: 90.0}, 20.0, 30)
    assert book.lane_of_long_calls == RELAYED
    sent(book, 300, {"direct": 40.0, RELAYED: 90.0}, 21.0 + PathPolicy().recheck_s, 30)
    assert book.lane_of_long_calls == "direct"


def test_long_calls_take_the_relay_with_all_others_when_the_lane_is_lost() -> None:
    book = taken()
    sent(book, 300, {"direct": 40.0, RELAYED: 90.0}, 1.0, 20)
    book.lost("direct", "gone", 2.0)
    assert book.lane_of(300) == RELAYED


def line(random: Random) -> Callable[[], float]:
    """A lane whose behaviour does not change: a mean, jitter, perhaps stalls of 300 ms in 5 % of messages."""
    mean_ms, jitter, stalls = random.uniform(15, 90), random.uniform(0, 0.5), random.random() < 0.5

    def round_trip_ms() -> float:
        stall_ms = 300.0 if stalls and random.random() < 0.05 else 0.0
        return mean_ms * (1 + random.uniform(0, jitter)) + stall_ms

    return round_trip_ms


def switches_in_an_hour(seed: int) -> tuple[int, int]:
    """Count changes of the lane of short and of long calls, ten calls a second, nothing ever changing."""
    random = Random(seed)
    lanes = {RELAYED: line(random), "direct": line(random)}
    if seed % 3 == 0:
        lanes["direct"] = lanes[RELAYED]  # the same: luck decides
    book, short, long = PathBook(["direct"], PathPolicy(), 0.0), 0, 0
    was, was_long = book.current, RELAYED
    for tick in range(36_000):
        now = tick / 10
        for action in book.handle_timer(now):
            if isinstance(action, Open):
                book.opened(action.lane, now)
                continue
            race = action
            measured = {name: Evidence() for name in (race.current, race.other)}
            for _ in range(PathPolicy().probes):
                for name, found in measured.items():
                    found.add(12, lanes[name]())
                if clear_race(*measured.values(), PathPolicy()):
                    break
            book.raced(race, *measured.values(), now)
        size_kb = 300 if tick % 3 == 0 else 12
        lane = book.lane_of(size_kb)
        book.called(lane, size_kb, lanes[lane]() * (size_kb / 100 if size_kb > 100 else 1), now)
        if book.current != was:
            short, was = short + 1, book.current
        if book.lane_of_long_calls and book.lane_of_long_calls != was_long:
            long, was_long = long + 1, book.lane_of_long_calls
    return short, long


@pytest.mark.parametrize("seed", range(12))
def test_lines_that_do_not_change_are_not_changed_all_the_time(seed: int) -> None:
    short, long = switches_in_an_hour(seed)
    most = 2 * 3600 / PathPolicy().recheck_s  # there and back each time it is looked at
    assert short <= most and long <= most, (short, long)
