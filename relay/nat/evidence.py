"""Round trips of lanes, and which lane they speak for. Pure."""

from dataclasses import dataclass, field
from statistics import fmean

RELAYED = "relayed"
SIZES_KB = (6, 12, 24, 100)  # one token of a small model … a prompt piece
LONGEST_PROBE_KB = SIZES_KB[-1]


@dataclass(frozen=True, slots=True)
class PathPolicy:
    """
    hysteresis, hysteresis_ms: a lane is taken when it is faster by more than both (negative: also when it
    is slower by less, for tests). probes: for each size and lane in a race; clear_probes: of them, when no
    two round trips of the lanes overlap. max_lost: of them; a lane that loses more is not taken. recheck_s:
    how often the lane in use is raced against the relay again. retry_s, retry_max_s: pause before a failed
    or slower lane is tried again, doubled each time. missed: calls that had to be asked again over the
    relay within missed_window_s before a lane is left. traffic: calls of one size that are judged together.
    traffic_fresh_s: how old the relay's calls may be to be compared with; older ones only lead to a race,
    at most one in race_again_s. near_s, near_tries: pause before a lane that was faster at the median and
    lost by one late message is raced again, and how often.
    """

    hysteresis: float = 0.05
    hysteresis_ms: float = 0.2
    probes: int = 8
    clear_probes: int = 4
    max_lost: int = 0
    recheck_s: float = 300.0  # a race costs up to 1 MB, and phones pay for it
    retry_s: float = 15.0
    retry_max_s: float = 600.0
    missed: int = 2
    missed_window_s: float = 10.0
    traffic: int = 16
    traffic_fresh_s: float = 60.0
    race_again_s: float = 15.0
    near_s: float = 3.0
    near_tries: int = 3


@dataclass(slots=True)
class Evidence:
    """Round trips in ms by size class (KB) of the messages, and how many never came back."""

    round_trips_ms: dict[int, list[float]] = field(default_factory=dict)
    lost: int = 0

    def add(self, size_kb: int, round_trip_ms: float | None) -> None:
        """Note one probe; None: it did not come back in time."""
        if round_trip_ms is None:
            self.lost += 1
        else:
            self.round_trips_ms.setdefault(size_kb, []).append(round_trip_ms)

    def percentile_ms(self, size_kb: int, share: float) -> float:
        """Give a percentile of one size class, which must have been measured."""
        ordered = sorted(self.round_trips_ms[size_kb])
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a lane beats another, and in words why. near: at the median it does, only its tail does not."""

    better: bool
    why: str
    near: bool = False


def better_path(current: Evidence, other: Evidence, policy: PathPolicy) -> Verdict:
    """
    Tell whether `other` is faster than `current` by more than the hysteresis.

    Both the mean and the 95th percentile count, since a layer waits for its slowest node and a median sees no
    stall; and no size may be slower on the mean, since a lane that wins at 12 KB may lose at 100 KB by far.
    """
    if other.lost > policy.max_lost:
        return Verdict(False, f"{other.lost} probes were lost")
    sizes = sorted(current.round_trips_ms.keys() & other.round_trips_ms.keys())
    if not sizes:
        return Verdict(False, "nothing to compare")
    gains, words, near = [], [], True
    for size in sizes:
        old, new = [[lane.percentile_ms(size, share) for share in (0.5, 0.95)] for lane in (current, other)]
        words.append(f"{size} KB: {new[0]:.1f}/{new[1]:.1f} ms against {old[0]:.1f}/{old[1]:.1f} ms")
        slack, slack_ms = abs(policy.hysteresis), abs(policy.hysteresis_ms)
        was, would = fmean(current.round_trips_ms[size]), fmean(other.round_trips_ms[size])
        if would > was * (1 + slack) and would - was > slack_ms:
            return Verdict(False, f"slower at {words[-1]}", near and old[0] - new[0] > slack_ms)
        near = near and old[0] - new[0] > max(slack_ms, slack * old[0])
        gain = fmean([was, old[1]]) - fmean([would, new[1]])
        gains.append((gain, gain / max(fmean([was, old[1]]), 1e-9)))
    better = (
        fmean(ms for ms, _ in gains) > policy.hysteresis_ms
        and fmean(share for _, share in gains) > policy.hysteresis
    )
    return Verdict(better, ("" if better else "not faster enough at ") + ", ".join(words), near)


def clear_race(current: Evidence, other: Evidence, policy: PathPolicy) -> bool:
    """
    Tell whether a race need not go on: at every size one lane's slowest beats the other's fastest, by twice
    the hysteresis. On a far relay the rest of the probes would take another second.
    """
    sizes = current.round_trips_ms.keys() & other.round_trips_ms.keys()
    if not sizes or current.lost or other.lost:
        return False
    for fast, slow in ((current, other), (other, current)):
        pairs = [(fast.round_trips_ms[size], slow.round_trips_ms[size]) for size in sizes]
        if all(
            min(len(a), len(b)) >= policy.clear_probes
            and min(b) > max(a) * (1 + 2 * abs(policy.hysteresis))
            and min(b) - max(a) > 2 * abs(policy.hysteresis_ms)
            for a, b in pairs
        ):
            return True
    return False
