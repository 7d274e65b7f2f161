"""Whom the relay asks for a slice: one backbone, once; another when that one is stuck; nobody for ever."""

from relay.slices.asking import AGAIN_S, STUCK_S, WANTED_S, Asking


def test_one_backbone_is_asked_once_however_many_wait_and_however_often_they_come_back() -> None:
    asking = Asking()
    asks = [asking.ask("a", [1], now / 4) for now in range(int(4 * AGAIN_S))]
    assert [who for who in asks if who is not None] == [1]


def test_repetitions_grow_rare() -> None:
    asking = Asking()
    asked = [now for now in range(4000) if asking.ask("a", [1], float(now)) is not None]
    gaps = [b - a for a, b in zip(asked, asked[1:], strict=False)]
    assert gaps[0] == AGAIN_S and gaps == sorted(gaps) and gaps[-1] >= 300 and len(asked) < 20


def test_another_backbone_is_asked_when_the_first_delivers_nothing() -> None:
    asking = Asking()
    assert asking.ask("a", [1, 2], 0.0) == 1
    assert asking.ask("a", [1, 2], STUCK_S - 0.1) is None
    assert asking.ask("a", [1, 2], STUCK_S) == 2
    assert asking.ask("a", [1, 2], STUCK_S + 0.1) is None
    assert asking.ask("b", [1, 2], STUCK_S + 0.2) == 2, "the stuck one hides the healthy one from nobody"


def test_backbone_that_delivers_other_slices_is_not_stuck() -> None:
    asking = Asking()
    for number in range(50):
        assert asking.ask(f"{number}", [1], 0.0) == 1
    for second in range(1, 19):
        asking.came(1, float(second))
        asking.arrived(f"{second}")
        assert asking.ask("49", [1, 2], float(second)) is None
    assert asking.ask("49", [1, 2], AGAIN_S) == 2, "but nobody waits for its turn for ever"


def test_the_backbone_with_less_to_do_is_asked() -> None:
    asking = Asking()
    asked = [asking.ask(f"{number}", [1, 2], 0.0) for number in range(6)]
    assert sorted(asked) == [1, 1, 1, 2, 2, 2]


def test_upload_that_broke_off_is_asked_for_again_at_once_but_not_over_and_over() -> None:
    asking = Asking()
    assert asking.ask("a", [1], 0.0) == 1
    asking.failed("a", 1)
    assert asking.ask("a", [1], 0.1) == 1
    asking.failed("a", 1)
    assert asking.ask("a", [1], 0.2) is None
    assert asking.ask("a", [1, 2], STUCK_S + 0.2) == 2


def test_what_a_backbone_was_asked_that_left_is_asked_of_others() -> None:
    asking = Asking()
    asking.ask("a", [1, 2], 0.0)
    asking.left([2])
    assert asking.ask("a", [2], 0.1) == 2
    asking.left([])
    assert len(asking) == 0 and asking.ask("a", [], 0.2) is None


def test_a_slice_is_awaited_from_the_asking_to_its_arrival_while_somebody_wants_it() -> None:
    asking = Asking()
    assert not asking.awaited("a", 0.0)
    asking.ask("a", [1], 0.0)
    assert asking.awaited("a", WANTED_S - 1) and not asking.awaited("a", WANTED_S + 1)
    asking.arrived("a")
    assert not asking.awaited("a", 1.0) and len(asking) == 0
