"""What is constant of each layer: its formula, how x travels, on which grid partials are added. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from backbone.errors import ModelError
from backbone.model.formula import FORMATS, Formula
from backbone.model.gguf import Model
from backbone.model.slices import LayerGrid
from relay.wire.tensors import WIDTHS, Grid, XEncoding, partial_row_bytes, x_bytes

ROW_HEAD_BYTES = 96  # about: two headers, and the picks of a row
ENCODING_OF_BLOCK = {1: XEncoding.F32, 32: XEncoding.Q8A32, 256: XEncoding.Q8A256}


@dataclass(frozen=True, slots=True, eq=False)
class LayerPlan:
    """One layer; `layer_exponents` is one number on x32 and [hidden_dim] int32 on x16."""

    layer: int
    formula: Formula
    x_encoding: XEncoding
    layer_exponents: int | npt.NDArray[np.int32]

    def row_bytes(self, grid: Grid) -> int:
        """Give the bytes that one row takes, there and back."""
        columns = self.formula.hidden_dim
        return (
            x_bytes(1, columns, self.x_encoding)
            + partial_row_bytes(columns, WIDTHS[grid][0])
            + ROW_HEAD_BYTES
        )


def x_encoding(formula: Formula) -> XEncoding:
    """Choose how x travels: as the ints the kernel would make of it, or as it is when gate and up differ."""
    blocks = {FORMATS[t].x_block for t in (formula.gate_type, formula.up_type) if t is not None}
    return ENCODING_OF_BLOCK[blocks.pop()] if len(blocks) == 1 else XEncoding.F32


def layer_plans(model: Model, grids: Mapping[int, LayerGrid], grid: Grid) -> dict[int, LayerPlan]:
    """
    Fix what the dispatcher needs of each layer.

    Raises:
        ModelError: partials shall travel on x16 and a layer's channels were never measured.
    """
    plans = {}
    for layer, moe in model.layers.items():
        measured = grids[layer]
        if grid is Grid.X16 and measured.x16 is None:
            raise ModelError(f"layer {layer} has no x16 grid: it was never measured")
        exponents = measured.x32 if grid is Grid.X32 else np.array(measured.x16, np.int32)
        plans[layer] = LayerPlan(layer, moe.formula, x_encoding(moe.formula), exponents)
    return plans
