"""
How long this machine takes for experts: measured while it computes. Thread-safe; time is an argument.

Two rates, since they differ a hundredfold: bringing an expert from the file into the kernel's layout, by
byte; and computing a row of an expert that is there, by byte of its weights, for few rows and for many (many
share one reading of the weights, and the cores). Medians of the newest measurements.
"""

from bisect import bisect_left
from collections import deque
from threading import Lock

MEASURED = 9
ROW_CLASSES = (4, 15, 128, 1024)
GUESS_S_PER_BYTE = 1e-9  # 1 GB/s, until the first measurement, which the engine's start brings


class Pace:
    """What was measured, and how much is under way."""

    def __init__(self) -> None:
        self._lock = Lock()
        # All under _lock.
        self._load: deque[float] = deque(maxlen=MEASURED)
        self._rows: dict[int, deque[float]] = {}
        self._load_s_per_byte = GUESS_S_PER_BYTE
        self._row_s_per_byte: dict[int, float] = {}
        self._running = 0
        self._busy_until = 0.0

    def loaded(self, num_bytes: int, took_s: float) -> None:
        """An expert was brought into memory."""
        with self._lock:
            self._load.append(took_s / max(num_bytes, 1))
            self._load_s_per_byte = _median(self._load)

    def computed(self, num_rows: int, slice_bytes: int, took_s: float) -> None:
        """Rows of experts that were in memory were computed, and nothing else was under way."""
        if not num_rows:
            return
        of_size = bisect_left(ROW_CLASSES, num_rows)
        with self._lock:
            seen = self._rows.setdefault(of_size, deque(maxlen=MEASURED))
            seen.append(took_s / (num_rows * slice_bytes))
            self._row_s_per_byte[of_size] = _median(seen)

    def began(self, expected_s: float, now: float) -> bool:
        """Work starts that is expected to take so long; say whether it has the machine for itself."""
        with self._lock:
            self._running += 1
            self._busy_until = max(self._busy_until, now) + expected_s
            return self._running == 1

    def ended(self) -> None:
        """Work is over."""
        with self._lock:
            self._running -= 1
            if not self._running:
                self._busy_until = 0.0

    def queue_s(self, now: float) -> float:
        """Give the seconds until what is under way is done."""
        return max(0.0, self._busy_until - now)

    def load_s(self, num_bytes: int) -> float:
        """Give the seconds to bring an expert into memory."""
        return num_bytes * self._load_s_per_byte

    def row_s(self, num_rows: int, slice_bytes: int) -> float:
        """Give the seconds for each of so many rows."""
        rates = self._row_s_per_byte
        wanted = bisect_left(ROW_CLASSES, num_rows)
        rate = rates.get(wanted)
        if rate is None:
            nearest = min(rates, key=lambda each: abs(each - wanted), default=None)
            rate = GUESS_S_PER_BYTE if nearest is None else rates[nearest]
        return rate * slice_bytes


def _median(values: deque[float]) -> float:
    return sorted(values)[len(values) // 2]
