"""
Which nodes are asked, and on what terms: what all of them have shown, and the operator's will. Pure.

`Offload` says how eager this backbone is to give work away:

| | a node is asked while its answer is expected | nothing is known of a node |
|---|---|---|
| soonest | before this machine's own | it is measured first, beside the work |
| auto | at most 5 ms after this machine's own | the same |
| always | at most `floor_s` (0.25 s) after this machine's own | it is asked at once |

*Measured beside the work* is a probe: a row or a few of a real call, computed elsewhere as well, so that
nobody waits for it. Probes grow with each answer, and so does the largest call a node is trusted with. They
take a twentieth of our time at most, and few are under way at once, however many strangers come.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice

from backbone.experts.deadlines import GROWTH, PROBE_AGAIN_S, STRANGER, DeadlinePolicy, NodeRecord, Size
from backbone.experts.planner import Candidate

RECORDS_KEPT = 4096  # nodes whose past is remembered, so that a flapping one is still known
PROBES_AT_ONCE = 4
JUDGED_AFTER = 3  # answers; the first one pays for cold caches
PROBE_SHARE = 20  # a probe that took us 0.2 ms is followed by the next 4 ms later
AUTO_SLACK_S = 0.005  # a node in this house is used though this machine would be a little quicker
SOONEST_FLOOR_S = 0.001  # below this a timer of the event loop would count as a late answer
MOST_DISTRUST = 8


class Offload(StrEnum):
    """How eager this backbone is to give work away."""

    SOONEST = "soonest"
    AUTO = "auto"
    ALWAYS = "always"


@dataclass(frozen=True, slots=True)
class DispatchPolicy:
    """
    How the dispatcher behaves.

    local_only: use no node at all. hedge: count an answer as late as soon as it takes longer than usual.
    allow_inexact: also ask nodes that compute within a tolerance only (graphics devices).
    """

    deadlines: DeadlinePolicy = DeadlinePolicy()
    hedge: bool = False
    local_only: bool = False
    allow_inexact: bool = False
    offload: Offload = Offload.AUTO

    @property
    def slack_s(self) -> float:
        """How much later than this machine a node may be."""
        slack = {Offload.SOONEST: 0.0, Offload.AUTO: AUTO_SLACK_S, Offload.ALWAYS: self.deadlines.floor_s}
        return slack[self.offload]

    @property
    def eager(self) -> bool:
        """Nodes are asked before they were measured."""
        return self.offload is Offload.ALWAYS


class Standing:
    """All nodes' records, by id: bounded, the oldest that are not here go first."""

    def __init__(self, policy: DispatchPolicy) -> None:
        self.policy = policy
        self.records: dict[str, NodeRecord] = {}
        self._distrust = 0  # strangers in a row whose first answer was late
        self._probes = 0
        self._next_probe = 0.0

    def met(self, nodes: Iterable[tuple[str, int]], here: Collection[str]) -> list[str]:
        """Take the nodes that are here, ids and handles; give the ids that were forgotten."""
        for node_id, session in nodes:
            self.records.setdefault(node_id, NodeRecord(self.policy.deadlines)).met(session)
        # A copy only of what may go: this runs whenever a node comes or goes.
        over = len(self.records) - RECORDS_KEPT
        gone = list(islice((each for each in self.records if each not in here), max(0, over)))
        for node_id in gone:
            del self.records[node_id]
        return gone

    def usable(self, node_id: str, now: float) -> bool:
        """Tell whether a node would be asked now, or rests after failures."""
        record = self.records.get(node_id)
        return record is not None and record.usable(now)

    def candidates(self, node_ids: Iterable[str], size: Size, now: float) -> list[Candidate]:
        """Give the nodes that may be asked, for calls of about this size."""
        found = []
        for node_id in node_ids:
            record = self.records[node_id]
            if not record.usable(now):
                continue
            line = record.line(size.num_bytes)
            if self.policy.eager:
                line = STRANGER if line is None else record.faded(line, now)
                found.append(Candidate(node_id, line))
            elif line is not None and (most := record.most_bytes()):
                found.append(Candidate(node_id, line, most))
        return found

    def patience_s(self, node_id: str, size: Size) -> float:
        """Give the time after which an answer is late."""
        record, policy = self.records[node_id], self.policy
        if not record.answers:
            return policy.slack_s * 2.0**-self._distrust if policy.eager else policy.slack_s
        if policy.hedge and (p95_s := record.p95_s(size)) is not None:
            return p95_s
        return record.patience_s(size, max(policy.slack_s, SOONEST_FLOOR_S))

    def answered(
        self, node_id: str, size: Size, took_s: float, compute_s: float, now: float, late: bool
    ) -> None:
        """Note a good answer."""
        record = self.records[node_id]
        if not record.answers and not late:
            self._distrust = max(0, self._distrust - 1)
        record.answered(size, took_s, compute_s, now, late)

    def missed(self, node_id: str) -> None:
        """Note that an answer is late."""
        record = self.records[node_id]
        if not record.answers:
            self._distrust = min(self._distrust + 1, MOST_DISTRUST)
        record.missed()

    # -- probes

    def probe_due(self, now: float) -> bool:
        """Tell whether any probe may leave now."""
        return now >= self._next_probe and self._probes < PROBES_AT_ONCE

    def to_probe(
        self, node_ids: Iterable[str], call_bytes: int, row_bytes: int, now: float, until: float
    ) -> str | None:
        """Name a node to measure now, if one of these is due: the one that was due first."""
        due = [
            (record.probe_at, node_id)
            for node_id in node_ids
            if (record := self.records[node_id]).usable(now)
            and not record.asked_rows
            and record.probe_at <= now
            and (
                record.answers < JUDGED_AFTER
                or now - record.answered_at > PROBE_AGAIN_S
                or not record.proved
                or self.grows(record, call_bytes, row_bytes, now, until)
            )
            and (record.known or not self.policy.eager)
        ]
        return min(due)[1] if due else None

    def grows(self, record: NodeRecord, call_bytes: int, row_bytes: int, now: float, until: float) -> bool:
        """Tell whether a node earned to be measured with more than it ever answered: it was quick enough."""
        if self.policy.eager or not record.answers or not record.proved:
            return False
        line = record.line(record.largest_bytes)
        quick = line is not None and now + line.at(Size(record.largest_bytes, 0)) <= until
        return quick and GROWTH * record.largest_bytes < call_bytes

    def probe_sent(self, node_id: str, size: Size, began: float, now: float) -> None:
        """A probe left, and took us that long."""
        record = self.records[node_id]
        self._probes += 1
        self._next_probe = now + PROBE_SHARE * (now - began)
        young = record.answers < JUDGED_AFTER
        record.probed(now, young or size.num_bytes >= GROWTH * record.largest_bytes)

    def probe_over(self) -> None:
        """A probe was answered or given up."""
        self._probes = max(0, self._probes - 1)
