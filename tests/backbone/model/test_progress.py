import io

import pytest

from backbone.model.progress import AGAIN_S, Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_bar_grows_on_a_terminal_and_is_drawn_once_per_percent() -> None:
    stream = Terminal()
    with Progress("hashing", 1000, stream) as progress:
        for _ in range(1000):
            progress.advance()
    frames = stream.getvalue().split("\r")
    assert len(frames) == 102
    assert frames[-1].endswith("100%\n")
    assert frames[50].count("█") == 14


def test_a_log_gets_a_line_at_the_start_now_and_then_and_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    stream, now = io.StringIO(), [0.0]
    monkeypatch.setattr("backbone.model.progress.monotonic", lambda: now[0])
    with Progress("hashing", 10, stream) as progress:
        for _ in range(10):
            now[0] += AGAIN_S / 2
            progress.advance()
    assert stream.getvalue().splitlines() == [
        "hashing …", *(f"hashing: {percent} %" for percent in (20, 40, 60, 80, 100)), "hashing: done",
    ]  # fmt: skip


def test_failure_is_told() -> None:
    for stream in (io.StringIO(), Terminal()):
        with pytest.raises(ValueError), Progress("hashing", 10, stream):
            raise ValueError("disk full")
        assert "hashing: stopped: disk full" in stream.getvalue()
