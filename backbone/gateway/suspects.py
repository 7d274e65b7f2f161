"""
Which requests ended the engine. Pure.

The one that ran alone did it: it is refused when it comes again. Of several each may have done it: they are
suspects, and run alone when they come again, so that the next time it is known. Bounded in number and time.
"""

import hashlib
import json
from collections import OrderedDict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

MAX_KEPT = 512
KEPT_S = 3600.0
SAME_ANYWAY = ("stream", "stream_options", "seed", "user", "metadata", "id_slot", "cache_prompt", "store")


@dataclass(frozen=True, slots=True)
class _Entry:
    at: float
    guilty: bool
    why: str


class Suspects:
    """What ended the engine lately, by fingerprint of the request."""

    __slots__ = ("_entries",)

    def __init__(self) -> None:
        self._entries: OrderedDict[str, _Entry] = OrderedDict()

    def engine_ended(self, running: Collection[str], why: str, now: float, by_itself: bool = True) -> None:
        """The engine ended while these ran. by_itself: it crashed; somebody else's kill proves nothing."""
        for fingerprint in running:
            self._entries.pop(fingerprint, None)
            self._entries[fingerprint] = _Entry(now, by_itself and len(running) == 1, why)
        while len(self._entries) > MAX_KEPT:
            self._entries.popitem(last=False)

    def why_refused(self, fingerprint: str, now: float) -> str | None:
        """Say why a request is refused: it ended the engine when it ran alone."""
        entry = self._entry(fingerprint, now)
        return None if entry is None or not entry.guilty else entry.why

    def runs_alone(self, fingerprint: str, now: float) -> bool:
        """Tell whether a request is one of several that may have ended the engine."""
        return self._entry(fingerprint, now) is not None

    def served(self, fingerprint: str) -> None:
        """It ran to its end, so it was another."""
        self._entries.pop(fingerprint, None)

    def _entry(self, fingerprint: str, now: float) -> _Entry | None:
        entry = self._entries.get(fingerprint)
        if entry is not None and now - entry.at > KEPT_S:
            del self._entries[fingerprint]
            return None
        return entry


def fingerprint_of(path: str, body: Mapping[str, Any]) -> str:
    """Name a request by what the engine makes of it; what changes nothing of that is left out."""
    told = {name: value for name, value in body.items() if name not in SAME_ANYWAY}
    text = json.dumps([path, told], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
