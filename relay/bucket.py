"""A token bucket: it fills by so much a second up to a bound, and may be overdrawn. Pure."""


class Bucket:
    """Starts full."""

    __slots__ = ("_at", "_left", "burst", "per_s")

    def __init__(self, per_s: float, burst: float, now: float) -> None:
        self.per_s = per_s
        self.burst = burst
        self._left = burst
        self._at = now

    def left(self, now: float) -> float:
        """What may be spent now; negative while a debt is being paid."""
        self._left = min(self.burst, self._left + max(0.0, now - self._at) * self.per_s)
        self._at = max(now, self._at)
        return self._left

    def take(self, now: float, amount: float = 1.0) -> bool:
        """Spend `amount` if it is there; False, and nothing is spent, when it is not."""
        if self.left(now) < amount:
            return False
        self._left -= amount
        return True

    def spend(self, now: float, amount: float) -> None:
        """Spend it in any case; at most one `burst` of debt is kept, so that nobody pays for ever."""
        self._left = max(-self.burst, self.left(now) - amount)
