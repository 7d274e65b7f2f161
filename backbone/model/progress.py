"""A progress bar on a terminal; anywhere else a line at the start, one now and then, and one at the end."""

import asyncio
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic
from types import TracebackType
from typing import Self, TextIO

log = logging.getLogger(__name__)

AGAIN_S = 10.0  # between two lines while something lasts
WIDTH = 30  # characters of bar: fits a phone-sized terminal with the label


class Progress:
    """Count up to `total`; use as a context manager, call `advance`."""

    def __init__(self, label: str, total: int, stream: TextIO | None = None) -> None:
        self.label = label
        self.total = max(total, 1)
        self.done = 0
        self._stream = sys.stderr if stream is None else stream
        self._live = self._stream.isatty()
        self._shown = -1
        self._said_at = monotonic()

    def advance(self, amount: int = 1) -> None:
        self.done += amount
        percent = min(100, 100 * self.done // self.total)
        if self._live and percent != self._shown:
            self._shown = percent
            bar = "█" * (percent * WIDTH // 100)
            self._stream.write(f"\r{self.label} {bar:░<{WIDTH}} {percent:3d}%")
            self._stream.flush()
        elif not self._live and monotonic() - self._said_at >= AGAIN_S:
            self._said_at = monotonic()
            self._stream.write(f"{self.label}: {percent} %\n")
            self._stream.flush()

    def __enter__(self) -> Self:
        if not self._live:
            self._stream.write(f"{self.label} …\n")
            self._stream.flush()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        outcome = "done" if exc is None else f"stopped: {exc}"
        self._stream.write(f"\n{self.label}: {outcome}\n" if self._live and exc else "")
        self._stream.write("\n" if self._live and exc is None else "")
        if not self._live:
            self._stream.write(f"{self.label}: {outcome}\n")
        self._stream.flush()


@contextmanager
def said_while_it_lasts(what: str) -> Iterator[None]:
    """Log that something of unknown length began, still lasts, and how long it took; on an event loop."""
    loop, started = asyncio.get_running_loop(), monotonic()
    timer: asyncio.TimerHandle

    def again() -> None:
        nonlocal timer
        log.info("still %s, %.0f s so far", what, monotonic() - started)
        timer = loop.call_later(AGAIN_S, again)

    log.info("%s", what)
    timer = loop.call_later(AGAIN_S, again)
    try:
        yield
        log.info("%s took %.1f s", what, monotonic() - started)
    finally:
        timer.cancel()
