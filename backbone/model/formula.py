"""
Say how one expert of a layer computes: y = down · act(gate · x, up · x).

The JSON form travels with slices to nodes and to the page, so it changes only with the protocol version.
Formats are ggml type ids. `unsupported()` names what this version cannot compute yet; the kernel and the
engine refuse exactly that.
"""

from dataclasses import asdict, dataclass, fields
from typing import Any, NamedTuple, Self

from backbone.errors import FormulaUnsupported, ModelError


class Format(NamedTuple):
    """How a row is cut: `block` weights stand in `block_bytes` bytes."""

    name: str
    block: int
    block_bytes: int

    @property
    def x_block(self) -> int:
        """How many columns of x are rounded to int8 together, CONTRACT.md "Rounding"; 1: they are not."""
        return 32 if self.name == "NVFP4" else self.block


# ggml type id -> layout. A test holds this against the gguf package.
FORMATS = {
    0: Format("F32", 1, 4),
    1: Format("F16", 1, 2),
    2: Format("Q4_0", 32, 18),
    3: Format("Q4_1", 32, 20),
    6: Format("Q5_0", 32, 22),
    7: Format("Q5_1", 32, 24),
    8: Format("Q8_0", 32, 34),
    10: Format("Q2_K", 256, 84),
    11: Format("Q3_K", 256, 110),
    12: Format("Q4_K", 256, 144),
    13: Format("Q5_K", 256, 176),
    14: Format("Q6_K", 256, 210),
    16: Format("IQ2_XXS", 256, 66),
    17: Format("IQ2_XS", 256, 74),
    18: Format("IQ3_XXS", 256, 98),
    19: Format("IQ1_S", 256, 50),
    20: Format("IQ4_NL", 32, 18),
    21: Format("IQ3_S", 256, 110),
    22: Format("IQ2_S", 256, 82),
    23: Format("IQ4_XS", 256, 136),
    29: Format("IQ1_M", 256, 56),
    30: Format("BF16", 1, 2),
    34: Format("TQ1_0", 256, 54),
    35: Format("TQ2_0", 256, 66),
    39: Format("MXFP4", 32, 17),
    40: Format("NVFP4", 64, 36),
}

ACTIVATIONS = ("silu", "gelu", "relu", "relu2", "swiglu_oai", "swiglu_clamp", "situ")
GATED_ONLY = ("swiglu_oai", "swiglu_clamp", "situ")
BOUND_MIN, BOUND_MAX = 2.0**-20, 2.0**20  # of alpha and limit, where they are used
WEIGHT_POSITIONS = ("before", "after")


@dataclass(frozen=True, slots=True)
class Formula:
    """
    The shape and arithmetic shared by all experts of one layer.

    Shapes: gate, up [expert_dim, hidden_dim]; down [hidden_dim, expert_dim]; x and y [hidden_dim].

    alpha: the slope of swiglu_oai; the bound of situ's gate. limit: where silu, swiglu_oai and swiglu_clamp
    cut (silu: 0 = nowhere), the bound of situ's up (0 = none). See wasm/CONTRACT.md, "Activation functions".
    """

    hidden_dim: int
    expert_dim: int
    gate_type: int | None  # None: no gate, y = down · act(up · x)
    up_type: int
    down_type: int
    activation: str = "silu"
    alpha: float = 0.0
    limit: float = 0.0
    weight_position: str = "after"  # where the router weight multiplies: on x ("before") or on y ("after")
    biased: bool = False  # a bias vector for each matrix
    scaled: bool = False  # a number for each matrix that its product is multiplied with

    @property
    def slice_bytes(self) -> int:
        """Size of one expert: gate ‖ up ‖ down ‖ biases ‖ scales."""
        return sum(self.part_bytes()) + 4 * (self.num_biases + self.num_scales)

    @property
    def num_biases(self) -> int:
        """Floats of the biases of gate, up and down."""
        gate_rows = 0 if self.gate_type is None else self.expert_dim
        return gate_rows + self.expert_dim + self.hidden_dim if self.biased else 0

    @property
    def num_scales(self) -> int:
        """One float for each matrix."""
        return 0 if not self.scaled else 2 if self.gate_type is None else 3

    def part_bytes(self) -> tuple[int, int, int]:
        """Sizes of gate, up and down; gate is 0 when there is none."""
        gate = 0 if self.gate_type is None else self.expert_dim * row_bytes(self.gate_type, self.hidden_dim)
        up = self.expert_dim * row_bytes(self.up_type, self.hidden_dim)
        return gate, up, self.hidden_dim * row_bytes(self.down_type, self.expert_dim)

    def unsupported(self) -> str | None:
        """Name the first thing this version cannot compute, or None."""
        types = [t for t in (self.gate_type, self.up_type, self.down_type) if t is not None]
        for type_id in types:
            if type_id not in FORMATS:
                return f"weight format {type_id}"
        if self.gate_type is None and self.activation in GATED_ONLY:
            return f"{self.activation} without a gate"
        if not self.limit and self.activation in ("swiglu_oai", "swiglu_clamp"):
            return f"{self.activation} without a limit"
        clampable = self.gate_type is not None and self.activation not in ("gelu", "relu", "relu2")
        if self.limit and not (clampable and BOUND_MIN <= self.limit <= BOUND_MAX):
            return f"{self.activation} with limit {self.limit}"
        if self.activation in ("swiglu_oai", "situ") and not BOUND_MIN <= self.alpha <= BOUND_MAX:
            return f"{self.activation} with alpha {self.alpha}"
        return None

    def require_supported(self, layer: int | None = None) -> None:
        """
        Raises:
            FormulaUnsupported: `unsupported()` names something.
        """
        if what := self.unsupported():
            raise FormulaUnsupported(what, layer)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: object) -> Self:
        """
        Read what `to_json` wrote; unknown keys are ignored, so that later versions may add some.

        Raises:
            ModelError: a key is missing or has the wrong type or value.
        """
        if not isinstance(data, dict):
            raise ModelError(f"a formula is a JSON object, not {type(data).__name__}")
        values = {f.name: _checked(f.name, data[f.name]) for f in fields(cls) if f.name in data}
        try:
            formula = cls(**values)
        except TypeError as exc:
            missing = [
                n
                for n in ("hidden_dim", "expert_dim", "gate_type", "up_type", "down_type")
                if n not in values
            ]
            raise ModelError(f"formula lacks {', '.join(missing)}") from exc
        return formula


def row_bytes(type_id: int, num_columns: int) -> int:
    """
    Size of one row of weights.

    Raises:
        FormulaUnsupported: unknown format, or the row is not a whole number of its blocks.
    """
    layout = FORMATS.get(type_id)
    if layout is None:
        raise FormulaUnsupported(f"weight format {type_id}")
    if num_columns % layout.block:
        raise FormulaUnsupported(f"{layout.name} rows of {num_columns} columns (blocks of {layout.block})")
    return num_columns // layout.block * layout.block_bytes


def _checked(name: str, value: object) -> Any:
    match name:
        case "hidden_dim" | "expert_dim":
            good = _is_int(value) and 0 < value <= 1 << 20  # type: ignore[operator]
        case "gate_type":
            good = value is None or (_is_int(value) and 0 <= value < 256)  # type: ignore[operator]
        case "up_type" | "down_type":
            good = _is_int(value) and 0 <= value < 256  # type: ignore[operator]
        case "activation":
            good = value in ACTIVATIONS
        case "weight_position":
            good = value in WEIGHT_POSITIONS
        case "biased" | "scaled":
            good = isinstance(value, bool)
        case _:
            good = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e30
            value = float(value) if good else value  # type: ignore[arg-type]
    if not good:
        raise ModelError(f"formula: {name} is {value!r}")
    return value


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
