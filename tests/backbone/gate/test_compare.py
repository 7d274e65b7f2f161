import numpy as np
import pytest

from backbone.gate.compare import Comparison, common_prefix, compare_logits, cosine_per_position, worst_of


def logits(*rows: list[float]) -> np.ndarray:
    return np.array(rows, np.float32)


def test_equal_runs_are_identical() -> None:
    run = [logits([1, 2, 3], [3, 2, 1])]
    found = compare_logits(run, run)
    assert found.identical and found.positions == 2
    assert found.argmax_agreement == found.cosine_mean == 1.0
    assert found.argmax_error == 0.0


def test_positions_of_all_texts_count_alike() -> None:
    a = [logits([1, 0], [0, 1], [1, 0]), logits([0, 1])]
    b = [logits([1, 0], [0, 1], [1, 0]), logits([1, 0])]
    found = compare_logits(a, b)
    assert found.argmax_agreement == 0.75
    assert found.cosine_mean == 0.75
    assert found.cosine_worst == 0.0
    assert not found.identical


def test_zero_that_turned_negative_is_not_identical() -> None:
    assert not compare_logits([logits([0.0, 1])], [logits([-0.0, 1])]).identical


def test_runs_over_other_positions_are_not_compared() -> None:
    with pytest.raises(ValueError, match="same positions"):
        compare_logits([logits([1, 2])], [logits([1, 2], [3, 4])])
    with pytest.raises(ValueError):
        compare_logits([], [])


def test_cosine_of_zero_rows_is_one() -> None:
    assert cosine_per_position(logits([0, 0]), logits([0, 0])).tolist() == [1.0]


def comparison(argmax: float, cosine: float, error: float = 0.01, worst: float = 0.9) -> Comparison:
    return Comparison(300, argmax, error, cosine, error / 100, worst, False)


def test_no_worse_allows_what_another_choice_of_texts_would_change() -> None:
    floor = comparison(0.96, 0.9990)
    assert comparison(0.95, 0.9989).no_worse_than(floor)
    assert not comparison(0.90, 0.9990).no_worse_than(floor)
    assert not comparison(0.96, 0.9980).no_worse_than(floor)


def test_floor_is_the_weakest_figure_of_each_kind() -> None:
    floor = worst_of([comparison(0.9, 0.999, worst=0.95), comparison(0.99, 0.99, worst=0.8)])
    assert (floor.argmax_agreement, floor.cosine_mean, floor.cosine_worst) == (0.9, 0.99, 0.8)


def test_common_prefix_ends_at_the_first_difference() -> None:
    assert common_prefix([1, 2, 3], [1, 2, 4]) == 2
    assert common_prefix([1, 2], [1, 2, 3]) == 2
    assert common_prefix([], [1]) == 0
