"""
Whether sharing prompts with nodes is worth it: real calls with nodes against real calls without. Pure.

Estimates take each holder for itself. Where nodes and this machine slow each other down (the same cores, the
same line), each is as quick as measured alone and both together are not. So every now and then a call is
computed here alone, and when calls with nodes take longer on the mean, they are left out for a while that
doubles as long as that stays so.
"""

from collections import deque

KEPT = 6  # calls of each kind
ENOUGH = 3
CONTROL_EVERY = 12  # calls with nodes, then one without
PAUSE_CALLS = 12
PAUSE_MOST_CALLS = 1536


class Trial:
    """Costs are seconds by unit of work, so that calls of different sizes compare."""

    __slots__ = ("_alone", "_pause", "_paused", "_shared", "_since")

    def __init__(self) -> None:
        self._shared: deque[float] = deque(maxlen=KEPT)
        self._alone: deque[float] = deque(maxlen=KEPT)
        self._since = 0
        self._pause = PAUSE_CALLS
        self._paused = 0

    def share(self) -> bool:
        """Decide whether the next call may use nodes."""
        if self._paused:
            self._paused -= 1
            return False
        if len(self._shared) >= ENOUGH and len(self._alone) >= ENOUGH:
            if _mean(self._shared) > _mean(self._alone):
                self._paused, self._pause = self._pause, min(2 * self._pause, PAUSE_MOST_CALLS)
                self._shared.clear()
                return False
            self._pause = PAUSE_CALLS
        if self._since >= CONTROL_EVERY:
            self._since = 0
            return False
        return True

    def noted(self, shared: bool, cost: float) -> None:
        """A call took that long, with nodes or without."""
        (self._shared if shared else self._alone).append(cost)
        self._since = self._since + 1 if shared else 0


def _mean(costs: deque[float]) -> float:
    return sum(costs) / len(costs)
