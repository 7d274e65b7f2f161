"""What strangers chose is shown, not obeyed; what repeats is said once a minute."""

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay.program.complaints import AGAIN_S, Complaints
from relay.program.text import CleanFormatter, clean


@given(st.text())
def test_nothing_but_what_can_be_shown_remains(text: str) -> None:
    shown = clean(text, 80)
    assert shown.isprintable() and len(shown) <= 80


def test_a_name_moves_no_cursor_and_forges_no_line() -> None:
    assert clean("box\x1b[2J\r\n12:00 all is well\u202e") == "box\ufffd[2J\ufffd\ufffd12:00 all is well\ufffd"
    assert clean("Bürorechner – 1") == "Bürorechner – 1"


def test_a_log_line_stays_one_line_and_a_traceback_keeps_its_own() -> None:
    formatter = CleanFormatter("%(message)s")
    record = logging.LogRecord("x", 20, "", 0, "node %s", ("a\nFORGED \x1b[31m",), None)
    assert formatter.format(record) == "node a\ufffdFORGED \ufffd[31m"
    try:
        raise ValueError("\x1b[31mred")
    except ValueError as exc:
        record = logging.LogRecord("x", 20, "", 0, "failed", (), (type(exc), exc, exc.__traceback__))
    text = formatter.format(record)
    assert text.count("\n") >= 3 and "\x1b" not in text


def test_a_trouble_is_said_once_a_minute_with_how_often_it_came(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    complaints = Complaints(logging.getLogger("t"), lambda: now[0])
    for _ in range(100):
        complaints.say("disk", "the disk is full")
        now[0] += 0.1
    complaints.say("other", "something else")
    assert caplog.messages == ["the disk is full", "something else"]
    now[0] = AGAIN_S + 1
    complaints.say("disk", "the disk is full")
    assert caplog.messages[-1] == "the disk is full (99 more since 61 s ago)"
