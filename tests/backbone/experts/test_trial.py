"""Prompts are shared with nodes while that is quicker, by the clock."""

from backbone.experts.trial import CONTROL_EVERY, Trial


def play(trial: Trial, calls: int, shared_s: float, alone_s: float) -> float:
    """Give the mean of so many calls."""
    spent = 0.0
    for _ in range(calls):
        shares = trial.share()
        cost = shared_s if shares else alone_s
        trial.noted(shares, cost)
        spent += cost
    return spent / calls


def test_sharing_that_helps_goes_on_with_few_controls() -> None:
    assert play(Trial(), 1000, shared_s=0.5, alone_s=1.0) < 0.5 + 0.5 * 1.2 / CONTROL_EVERY


def test_sharing_that_hurts_is_left_and_tried_ever_more_rarely() -> None:
    trial = Trial()
    play(trial, 200, shared_s=1.4, alone_s=1.0)
    assert play(trial, 1000, shared_s=1.4, alone_s=1.0) < 1.01


def test_what_changes_is_noticed() -> None:
    trial = Trial()
    play(trial, 300, shared_s=1.4, alone_s=1.0)
    play(trial, 2000, shared_s=0.5, alone_s=1.0)
    assert play(trial, 200, shared_s=0.5, alone_s=1.0) < 0.56
    play(trial, 100, shared_s=1.4, alone_s=1.0)
    assert play(trial, 300, shared_s=1.4, alone_s=1.0) < 1.05
