"""
Decide which backbone is asked for a slice, and when another one is. Pure.

A slice is asked of one backbone, once, however many wait for it and however often they come back. Another one
that has it is asked when the first is stuck (it delivered nothing of anything for STUCK_S) or takes AGAIN_S.
Once all were asked the round begins again, later each time: a backbone remembers what it was asked, so a
repetition only mends what was lost on the way.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

STUCK_S = 3.0
AGAIN_S = 20.0
AGAIN_CAP_S = 300.0
WANTED_S = 30.0  # who waited for a slice comes back within this time


@dataclass(slots=True)
class _Open:
    """One slice that was asked for and is not here."""

    asked: dict[int, float] = field(default_factory=dict)  # backbone -> when, in this round
    rounds: int = 0
    failures: int = 0
    wanted_at: float = 0.0


class Asking:
    """What was asked of whom. Backbones are known by their handles."""

    __slots__ = ("_open", "_pending", "_signs")

    def __init__(self) -> None:
        self._open: dict[str, _Open] = {}
        self._pending: dict[int, set[str]] = {}  # backbone -> slices asked of it that are not here
        self._signs: dict[int, float] = {}  # backbone -> when bytes of a slice came from it last

    def __len__(self) -> int:
        return len(self._open)

    def awaited(self, slice_id: str, now: float) -> bool:
        """Whether somebody waits for a slice that a backbone has yet to deliver."""
        found = self._open.get(slice_id)
        return found is not None and now - found.wanted_at < WANTED_S

    def asked(self, slice_id: str) -> list[int]:
        """Return the backbones that were asked for a slice and did not deliver it."""
        found = self._open.get(slice_id)
        return [] if found is None else list(found.asked)

    def ask(self, slice_id: str, holders: Sequence[int], now: float) -> int | None:
        """Somebody waits for a slice: say which of its backbones to ask now, None: none, wait."""
        found = self._open.setdefault(slice_id, _Open())
        found.wanted_at = now
        for handle, asked_at in found.asked.items():
            if handle in holders and now - asked_at < AGAIN_S and not self._stuck(handle, now):
                return None
        fresh = [handle for handle in holders if handle not in found.asked]
        if not fresh:
            again_s = min(AGAIN_CAP_S, AGAIN_S * 2.0 ** min(found.rounds, 10))
            if now - max(found.asked.values(), default=now) < again_s:
                return None
            found.asked.clear()
            found.rounds += 1
            fresh = list(holders)
        if not fresh:
            return None
        chosen = min(fresh, key=lambda handle: (self._stuck(handle, now), len(self._pending.get(handle, ()))))
        found.asked[chosen] = now
        pending = self._pending.setdefault(chosen, set())
        if not pending:
            self._signs[chosen] = now  # it has its time to begin
        pending.add(slice_id)
        return chosen

    def came(self, backbone: int, now: float) -> None:
        """Bytes of a slice came from a backbone."""
        self._signs[backbone] = now

    def arrived(self, slice_id: str) -> None:
        """The slice is here."""
        self._close(slice_id)

    def failed(self, slice_id: str, backbone: int) -> None:
        """An upload broke off: once, it is asked of this backbone again as if it never had been."""
        if (found := self._open.get(slice_id)) is not None:
            found.failures += 1
            if found.failures == 1:
                found.asked.pop(backbone, None)

    def left(self, known: Sequence[int]) -> None:
        """Backbones came or went: forget those that are not among these, and what only they were asked."""
        for handle in self._pending.keys() - set(known):
            for slice_id in self._pending.pop(handle):
                if (found := self._open.get(slice_id)) is not None:
                    found.asked.pop(handle, None)
        self._signs = {handle: at for handle, at in self._signs.items() if handle in known}
        for slice_id in [slice_id for slice_id, found in self._open.items() if not found.asked]:
            del self._open[slice_id]

    def _stuck(self, handle: int, now: float) -> bool:
        """Whether a backbone that was asked for something delivers nothing."""
        return bool(self._pending.get(handle)) and now - self._signs.get(handle, now) >= STUCK_S

    def _close(self, slice_id: str) -> None:
        if self._open.pop(slice_id, None) is not None:
            for pending in self._pending.values():
                pending.discard(slice_id)
