"""Say a trouble that repeats once a minute, with how often it came: a full disk is one trouble, not 1,800."""

import logging
from collections.abc import Callable
from time import monotonic

AGAIN_S = 60.0


class Complaints:
    """`say(kind, message)` logs the first of a kind at once, then one a minute."""

    def __init__(self, log: logging.Logger, clock: Callable[[], float] = monotonic) -> None:
        self._log = log
        self._clock = clock
        self._said: dict[str, tuple[float, int]] = {}  # kind -> when last said, how many since

    def say(self, kind: str, message: str, level: int = logging.ERROR) -> None:
        """`kind` is ours, never a peer's word."""
        now = self._clock()
        at, held_back = self._said.get(kind, (now - AGAIN_S, 0))
        if now - at < AGAIN_S:
            self._said[kind] = at, held_back + 1
            return
        more = f" ({held_back} more since {now - at:.0f} s ago)" if held_back else ""
        self._log.log(level, "%s%s", message, more)
        self._said[kind] = now, 0
