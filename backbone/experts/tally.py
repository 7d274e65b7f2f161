"""Count what each node did for us: rows per layer, bytes, round trips, failures. Pure."""

from collections import Counter, deque
from dataclasses import dataclass, field

MOST_REASONS = 16  # reasons are a peer's own text: that many different ones of each, then they are "other"
MOST_REASON_CHARS = 120
MOST_HOLDERS = 4096
OTHER_REASONS = "other reasons"
ROUND_TRIPS_KEPT = 512  # per holder; enough for a median and a 95th percentile of the last minutes


@dataclass(slots=True)
class Work:
    """
    What one holder did.

    rows: layer -> expert rows computed and used (one row = one token through one expert).
    calls: answers used. round_trips_s: of those, the newest. failures: reason -> count.
    """

    name: str
    kernel: str
    path: str
    rows: dict[int, int] = field(default_factory=dict)
    calls: int = 0
    bytes_out: int = 0
    bytes_in: int = 0
    compute_s: float = 0.0
    round_trips_s: deque[float] = field(default_factory=lambda: deque(maxlen=ROUND_TRIPS_KEPT))
    failures: dict[str, int] = field(default_factory=dict)

    def used(self, layer: int, rows: int, round_trip_s: float, compute_s: float) -> None:
        """Note an answer that went into a sum."""
        self.rows[layer] = self.rows.get(layer, 0) + rows
        self.calls += 1
        self.compute_s += compute_s
        self.round_trips_s.append(round_trip_s)

    def failed(self, reason: str) -> None:
        """Note a call that had to be computed elsewhere; keep few reasons, and short ones."""
        reason = reason[:MOST_REASON_CHARS]
        if reason not in self.failures and len(self.failures) >= MOST_REASONS:
            reason = OTHER_REASONS
        self.failures[reason] = self.failures.get(reason, 0) + 1

    def round_trip_ms(self, share: float) -> float:
        """Give a percentile of the round trips, in milliseconds; 0 when there are none."""
        ordered = sorted(self.round_trips_s)
        return 1e3 * ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0

    def layers(self) -> str:
        """Write the layers compactly: `0-14, 20`."""
        spans: list[list[int]] = []
        for layer in sorted(self.rows):
            if spans and spans[-1][1] == layer - 1:
                spans[-1][1] = layer
            else:
                spans.append([layer, layer])
        return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)


class Tally:
    """All holders' work, by node id; the local kernel is `LOCAL_NAME`."""

    LOCAL_NAME = "this machine"

    __slots__ = (
        "calls_of_rows",
        "failed_calls",
        "hedges",
        "layer_calls",
        "longest_call_s",
        "retries",
        "tokens",
        "work",
    )

    def __init__(self) -> None:
        self.work: dict[str, Work] = {}
        self.calls_of_rows: Counter[int] = Counter()  # rows in a call -> calls; one entry per batch size
        self.layer_calls = 0
        self.tokens = 0
        self.retries = 0
        self.hedges = 0
        self.failed_calls = 0
        self.longest_call_s = 0.0

    def called(self, rows: int, seconds: float) -> None:
        """Note a layer call of the engine that was answered, and how long that took."""
        self.longest_call_s = max(self.longest_call_s, seconds)
        self.layer_calls += 1
        self.tokens += rows
        self.calls_of_rows[rows] += 1

    def of(self, node_id: str, name: str, kernel: str, path: str) -> Work:
        """Give a holder's record, made on first use."""
        work = self.work.get(node_id)
        if work is None:
            while len(self.work) >= MOST_HOLDERS:  # ids are the peers' own choice; the oldest goes
                del self.work[next(name for name in self.work if name != self.LOCAL_NAME)]
            work = self.work[node_id] = Work(name, kernel, path)
        return work

    def clear(self) -> None:
        """Start counting anew."""
        self.work.clear()
        self.calls_of_rows.clear()
        self.layer_calls = self.tokens = self.retries = self.hedges = self.failed_calls = 0
        self.longest_call_s = 0.0
