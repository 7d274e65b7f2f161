"""Wake the driver of a state machine when its next timer is due."""

import asyncio
from collections.abc import Callable
from time import monotonic

# uvloop counts whole milliseconds: less is no timer to it, and it may wake so much too early.
LEAST_S = 0.001


class Wakeup:
    """
    One timer on the event loop that is running; `wake` is called when it is due.

    When that is, it remembers itself: uvloop's `call_later` gives no TimerHandle when nothing is left.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._at = 0.0
        self._handle: asyncio.Handle | None = None

    def set(self, at: float | None) -> None:
        """
        Wake at `at` (of time.monotonic) at the latest; None: do not.

        An earlier wake stays: being woken for nothing is cheaper than another timer for every message.
        """
        if self._handle is not None and at is not None and self._at <= at + LEAST_S:
            return
        self.cancel()
        if at is not None:
            self._at = at
            delay = max(LEAST_S, at - monotonic())
            self._handle = asyncio.get_running_loop().call_later(delay, self._due)

    def cancel(self) -> None:
        """Do not wake any more."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _due(self) -> None:
        self._handle = None
        self._wake()
