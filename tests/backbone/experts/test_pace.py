"""How long this machine takes is measured, not assumed."""

import pytest

from backbone.experts.pace import GUESS_S_PER_BYTE, Pace


def test_a_guess_until_the_first_measurement() -> None:
    pace = Pace()
    assert pace.row_s(8, 1000) == pytest.approx(1000 * GUESS_S_PER_BYTE)
    pace.computed(8, 1000, 8e-3)
    assert pace.row_s(8, 1000) == pytest.approx(1e-3)
    assert pace.row_s(8, 2000) == pytest.approx(2e-3)
    assert pace.row_s(500, 1000) == pytest.approx(1e-3)  # the nearest that is known


def test_few_rows_and_many_have_rates_of_their_own() -> None:
    pace = Pace()
    pace.computed(8, 1000, 8e-3)
    pace.computed(1000, 1000, 0.1)
    assert pace.row_s(900, 1000) == pytest.approx(1e-4)
    assert pace.row_s(6, 1000) == pytest.approx(1e-3)


def test_one_hiccup_changes_nothing() -> None:
    pace = Pace()
    for _ in range(5):
        pace.computed(8, 1000, 8e-3)
        pace.loaded(1000, 1e-3)
    pace.computed(8, 1000, 9.0)
    pace.loaded(1000, 9.0)
    assert pace.row_s(8, 1000) == pytest.approx(1e-3)
    assert pace.load_s(2000) == pytest.approx(2e-3)


def test_what_is_under_way_comes_first() -> None:
    pace = Pace()
    assert pace.began(0.5, 10.0)
    assert not pace.began(0.25, 10.1)
    assert pace.queue_s(10.2) == pytest.approx(0.55)
    pace.ended()
    pace.ended()
    assert pace.queue_s(10.2) == 0.0
