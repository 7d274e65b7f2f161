"""What a node was asked, how its answer is read, and who is asked next. Pure: the clock is an argument."""

from collections.abc import Callable, Collection

import numpy as np
import numpy.typing as npt

from backbone.experts.bounds import check_sums
from backbone.experts.deadlines import Size
from backbone.experts.dispatch import LOCAL, Part, Picks, covers
from backbone.experts.nodes import Holders
from backbone.experts.planner import LocalCost, Terms, plan
from backbone.experts.plans import LayerPlan
from backbone.experts.standing import Standing
from relay.wire.errors import RemoteProtocolError
from relay.wire.messages import Dispatch
from relay.wire.session import PartialReceived
from relay.wire.tensors import Grid


class Asked:
    """One call to a node: when, how large, and what its answer must be like. Holds no rows."""

    __slots__ = (
        "_counts", "_exponents", "_rows", "_weights",
        "at", "give_up_at", "late", "node_id", "plan", "probe", "size",
    )  # fmt: skip

    def __init__(
        self,
        node_id: str,
        at: float,
        give_up_at: float,
        size: Size,
        plan: LayerPlan,
        dispatch: Dispatch,
        rows: npt.NDArray[np.intp] | None,
        probe: bool,
    ) -> None:
        self.node_id = node_id
        self.at = at
        self.give_up_at = give_up_at
        self.size = size
        self.plan = plan
        self.probe = probe
        self.late = False
        self._rows = rows
        self._exponents = dispatch.row_exponents
        self._counts = dispatch.counts
        self._weights = dispatch.weights

    def read(self, answer: PartialReceived, epoch: int, grid: Grid) -> npt.NDArray[np.int64]:
        """
        Check an answer against what was asked and give its sums, a row for each that was sent.

        Raises:
            RemoteProtocolError: it is not the answer to this call, or one that no expert can give.
        """
        partial, plan_ = answer.partial, self.plan
        if answer.epoch != epoch:
            raise RemoteProtocolError(f"answer of epoch {answer.epoch}, the pairing has epoch {epoch}")
        found = (partial.layer, partial.num_tokens, partial.hidden_dim, partial.grid)
        wanted = (plan_.layer, len(self._exponents), plan_.formula.hidden_dim, grid)
        if found != wanted:
            raise RemoteProtocolError(f"answers layer, rows, columns, grid {found}; asked was {wanted}")
        sums = partial.sums()
        before = plan_.formula.weight_position == "before"
        check_sums(
            sums, partial.widths, self._exponents, self._counts, None if before else self._weights,
            plan_.layer_exponents, grid,
        )  # fmt: skip
        return sums

    def scatter(self, sums: npt.NDArray[np.int64], num_tokens: int) -> npt.NDArray[np.int64]:
        """Give the sums for all rows of the call."""
        if self._rows is None:
            return sums
        scattered = np.zeros((num_tokens, sums.shape[1]), np.int64)
        scattered[self._rows] = sums
        return scattered


class PlannerOfCall:
    """Answer the round's questions from what all nodes have shown: see `round.Planner`."""

    def __init__(
        self,
        standing: Standing,
        holders: Holders,
        local: LocalCost,
        row_bytes: int,
        num_tokens: int,
        clock: Callable[[], float],
        share: bool = True,
    ) -> None:
        """share: whether nodes get any of it; they may be measured all the same."""
        self._standing = standing
        self._share = share
        self._holders = holders
        self._local = local
        self._row_bytes = row_bytes
        self._whole = Size(row_bytes * num_tokens, 0)
        self._clock = clock

    def parts(self, picks: Picks, tried: Collection[str], left_s: float) -> list[Part]:
        policy = self._standing.policy
        names = (
            self._holding(picks) - set(tried) if self._share and self._holders and left_s > 0 else set[str]()
        )
        found = self._standing.candidates(sorted(names), self._whole, self._clock())
        if tried:  # a second try: only who is back in time
            found = [each for each in found if each.line.at(self._size(picks)) <= left_s]
        terms = Terms(self._row_bytes, policy.slack_s, worth=not policy.eager)
        return plan(picks, self._holders, found, self._local, terms)

    def backup(self, picks: Picks, tried: Collection[str], left_s: float) -> str | None:
        if left_s <= 0 or not self._holders:
            return LOCAL
        size = self._size(picks)
        names = sorted(
            name for name in self._holding(picks) - set(tried) if covers(name, picks, self._holders)
        )
        found = self._standing.candidates(names, size, self._clock())
        expected = [(each.line.at(size), each.name) for each in found if size.num_bytes <= each.most_bytes]
        soonest_s, name = min(expected, default=(float("inf"), ""))
        here_s = self._local.whole(picks) + self._standing.policy.slack_s
        return name if name and soonest_s <= min(left_s, here_s) else LOCAL

    def patience_s(self, node: str, picks: Picks) -> float:
        return self._standing.patience_s(node, self._size(picks))

    def probe(self, picks: Picks, now: float, until: float) -> tuple[str, Picks] | None:
        """Choose a node to measure beside the work, and with what; None when none is due."""
        standing = self._standing
        if not standing.probe_due(now):
            return None
        name = standing.to_probe(
            sorted(self._holding(picks)), self._whole.num_bytes, self._row_bytes, now, until
        )
        if name is None:
            return None
        record = standing.records[name]
        mine = {expert for expert in set(picks.experts.tolist()) if name in self._holders.get(expert, ())}
        grows = standing.grows(record, self._whole.num_bytes, self._row_bytes, now, until)
        rows = record.probe_bytes(self._row_bytes) // self._row_bytes if grows else 1
        return name, picks.first_rows(max(1, rows), mine)

    def _holding(self, picks: Picks) -> set[str]:
        names: set[str] = set()
        for expert in set(picks.experts.tolist()):
            names |= self._holders.get(expert, frozenset())
        return names

    def _size(self, picks: Picks) -> Size:
        return Size(int(np.count_nonzero(picks.counts)) * self._row_bytes, len(picks.experts))
