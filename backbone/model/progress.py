"""A progress bar on a terminal; one line at the end anywhere else."""

import sys
from types import TracebackType
from typing import Self, TextIO

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

    def advance(self, amount: int = 1) -> None:
        self.done += amount
        percent = min(100, 100 * self.done // self.total)
        if self._live and percent != self._shown:
            self._shown = percent
            bar = "█" * (percent * WIDTH // 100)
            self._stream.write(f"\r{self.label} {bar:░<{WIDTH}} {percent:3d}%")
            self._stream.flush()

    def __enter__(self) -> Self:
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
