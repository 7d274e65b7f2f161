"""Compare two runs of a model, position by position. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import hypot, sqrt

import numpy as np
import numpy.typing as npt

from backbone.engine.link import Floats


@dataclass(frozen=True, slots=True)
class Comparison:
    """
    How far the logits of one run are from those of another, over all positions of all texts.

    The errors are standard errors: what another choice of texts would change.
    """

    positions: int
    argmax_agreement: float  # share of positions whose most likely token is the same
    argmax_error: float
    cosine_mean: float
    cosine_error: float
    cosine_worst: float
    identical: bool  # every bit

    def no_worse_than(self, other: "Comparison") -> bool:
        """
        As close in argmax and in mean cosine, within two standard errors of the difference.

        The worst cosine is one position's luck: shown, not judged.
        """
        argmax_slack = 2 * hypot(self.argmax_error, other.argmax_error)
        cosine_slack = 2 * hypot(self.cosine_error, other.cosine_error)
        return (
            self.argmax_agreement >= other.argmax_agreement - argmax_slack
            and self.cosine_mean >= other.cosine_mean - cosine_slack
        )


def compare_logits(reference: Sequence[Floats], other: Sequence[Floats]) -> Comparison:
    """
    Compare logits of the same texts.

    Shapes: one [num_positions, n_vocab] per text on both sides.

    Raises:
        ValueError: texts or shapes differ, or there is nothing to compare.
    """
    if [a.shape for a in reference] != [b.shape for b in other] or not reference:
        raise ValueError("the two runs are not over the same positions")
    cosines = np.concatenate([cosine_per_position(a, b) for a, b in zip(reference, other, strict=True)])
    agree = np.concatenate([a.argmax(1) == b.argmax(1) for a, b in zip(reference, other, strict=True)])
    return Comparison(
        positions=len(cosines),
        argmax_agreement=float(agree.mean()),
        argmax_error=float(agree.std() / sqrt(len(agree))),
        cosine_mean=float(cosines.mean()),
        cosine_error=float(cosines.std() / sqrt(len(cosines))),
        cosine_worst=float(cosines.min()),
        identical=all(a.tobytes() == b.tobytes() for a, b in zip(reference, other, strict=True)),
    )


def cosine_per_position(a: Floats, b: Floats) -> npt.NDArray[np.float64]:
    """Cosine of the angle between corresponding rows; 1 between two zero rows."""
    p, q = a.astype(np.float64), b.astype(np.float64)
    norms = np.linalg.norm(p, axis=1) * np.linalg.norm(q, axis=1)
    cosines: npt.NDArray[np.float64] = np.ones(len(p))
    np.divide((p * q).sum(axis=1), norms, out=cosines, where=norms > 0)
    return cosines


def worst_of(comparisons: Sequence[Comparison]) -> Comparison:
    """The weakest figure of each kind: the floor that a set of runs shows among themselves."""
    by_argmax = min(comparisons, key=lambda c: c.argmax_agreement)
    by_cosine = min(comparisons, key=lambda c: c.cosine_mean)
    return Comparison(
        positions=min(c.positions for c in comparisons),
        argmax_agreement=by_argmax.argmax_agreement,
        argmax_error=by_argmax.argmax_error,
        cosine_mean=by_cosine.cosine_mean,
        cosine_error=by_cosine.cosine_error,
        cosine_worst=min(c.cosine_worst for c in comparisons),
        identical=all(c.identical for c in comparisons),
    )


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two generations share from the start."""
    for i, (left, right) in enumerate(zip(a, b, strict=False)):
        if left != right:
            return i
    return min(len(a), len(b))
