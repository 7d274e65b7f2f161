"""
Measure the grid: how large the experts' outputs of each layer are beside their input. Pure.

CONTRACT.md "Grid": a step is 2^(row exponent + layer exponent - 31 or 15). The row exponent is taken from
each input row; the layer exponent is a constant of the model that this module measures over a few texts. Too
small a constant costs bytes (rows that do not fit travel wide), too large a one costs resolution; neither
breaks a sum.
"""

import numpy as np
import numpy.typing as npt

from backbone.model.slices import LayerGrid

MARGIN_X32 = 3  # bits above what was seen: 28 bits remain for the value, float32 has 24
MARGIN_X16 = 1  # one bit: unseen texts exceed it rarely, and each bit costs resolution
CHANNEL_SPREAD = 12  # a channel that stayed silent is given this many bits less than the loudest

TEXTS = (
    "Water boils at one hundred degrees. In 1969 two men walked on the moon, and everyone watched it on"
    " television. The river Seine flows through Paris; its bridges are older than the city's squares.",
    "def fibonacci(n: int) -> int:\n    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)\n\n"
    "SELECT name, age FROM users WHERE age > 30 ORDER BY name LIMIT 10;\n",
    "Es war einmal ein König, der hatte drei Töchter. «Bonjour», dit le renard. 1 + 2 = 3; 7 × 8 = 56;"
    " π ≈ 3.14159.",
)


class GridMeter:
    """Note outputs layer by layer, then give the exponents."""

    __slots__ = ("_largest",)

    def __init__(self) -> None:
        self._largest: dict[int, npt.NDArray[np.float64]] = {}

    def note(
        self, layer: int, row_exponents: npt.NDArray[np.int16], outputs: npt.NDArray[np.float32]
    ) -> None:
        """
        Take some rows of a layer.

        Shapes:
            row_exponents  [num_tokens]
            outputs        [num_tokens, hidden_dim]  weighted sums over the row's experts
        """
        scaled = np.ldexp(np.abs(outputs.astype(np.float64)), -row_exponents.astype(np.int32)[:, None]).max(
            axis=0
        )
        former = self._largest.get(layer)
        self._largest[layer] = scaled if former is None else np.maximum(former, scaled)

    def exponents(self) -> dict[int, LayerGrid]:
        """Give the measured exponents of all layers noted."""
        return {layer: _exponents(largest) for layer, largest in self._largest.items()}


def _exponents(largest: npt.NDArray[np.float64]) -> LayerGrid:
    _, bits = np.frexp(largest)  # largest in [2^(bits-1), 2^bits)
    loudest = int(bits[largest > 0].max(initial=0))
    channels = np.maximum(np.where(largest > 0, bits, loudest - CHANNEL_SPREAD), loudest - CHANNEL_SPREAD)
    return LayerGrid(loudest + MARGIN_X32, tuple((channels + MARGIN_X16).tolist()))
