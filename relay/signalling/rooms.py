"""
Decide which Signal frames pass: only between the two ends of one pairing, of now, and not too many. Pure.

A Signal is small and has priority over calls, so what it may cost others is bounded per sender: a bucket of
BURST that fills by PER_S a second. What does not pass is dropped without a word; links are tried again later.
"""

from dataclasses import dataclass

BURST = 64  # a link needs some ten: two descriptions, a handful of candidates
PER_S = 4.0


@dataclass(slots=True)
class _Bucket:
    left: float
    at: float


class Rooms:
    """The pairings whose ends may signal each other, and what each sender has left to say."""

    __slots__ = ("_buckets",)

    def __init__(self) -> None:
        self._buckets: dict[int, _Bucket] = {}

    def passes(self, sender: int, epoch: int, pairing_epoch: int | None, now: float) -> bool:
        """
        Tell whether a Signal may pass; if so it is counted.

        pairing_epoch: of the pairing of sender and receiver, None when they are not paired.
        """
        if pairing_epoch is None or epoch != pairing_epoch:
            return False
        bucket = self._buckets.setdefault(sender, _Bucket(BURST, now))
        bucket.left = min(BURST, bucket.left + (now - bucket.at) * PER_S)
        bucket.at = now
        if bucket.left < 1:
            return False
        bucket.left -= 1
        return True

    def left(self, peer: int) -> None:
        """Forget a peer."""
        self._buckets.pop(peer, None)
