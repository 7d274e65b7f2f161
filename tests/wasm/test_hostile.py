"""Operands that break kernels, for every format and every build: what is not finite, too small, too large."""

from dataclasses import replace

import numpy as np
import pytest

from backbone.experts import reference
from backbone.experts.native import BadCall, NonFinite
from backbone.model.formula import FORMATS
from relay.wire.tensors import XEncoding, encode_x
from tests.wasm.calls import SCALES, kernels, sample
from tests.wasm.test_kernel import BLOCK, TYPES, assert_same_bits, small_dims

# Where a block holds a float that may be wild: the offset, and how wide the float is.
FLOATS: dict[int, tuple[tuple[int, ...], str]] = {
    0: ((0,), "<f4"), 1: ((0,), "<f2"), 30: ((0,), "bf16"),
    **{t: (at, "<f2") for t, (_, at) in SCALES.items()},
}  # fmt: skip
ALWAYS_FINITE = {39, 40}  # their scales are bytes, and every byte is a number
IN_PIECES = {29}  # IQ1_M: a half float in the upper bits of four words


def bytes_of(value: float, kind: str) -> bytes:
    if kind == "bf16":
        return np.float32(value).tobytes()[2:]
    return np.array([value], kind).tobytes()


def test_every_format_is_one_of_these() -> None:
    assert {*FLOATS, *ALWAYS_FINITE, *IN_PIECES} == set(FORMATS)


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("ggml_type", [t for t in TYPES if t not in ALWAYS_FINITE])
def test_a_weight_or_scale_that_is_not_finite_is_refused(ggml_type: int, value: float) -> None:
    """In any of the three matrices, in the first block and in the last."""
    case = sample(1, (ggml_type,) * 3, small_dims((ggml_type,) * 3), rows=1, num_experts=1, top_k=1)
    layout = FORMATS[ggml_type]
    f, d = case.formula.expert_dim, case.formula.hidden_dim
    matrix = f * d // layout.block * layout.block_bytes
    for block in (0, 2 * matrix - layout.block_bytes, 3 * matrix - layout.block_bytes):
        data = case.slices[0].copy()
        if ggml_type in IN_PIECES:
            for word in range(4):  # a half float of all ones but its sign
                data[block + 49 + 2 * word] |= 0xF0 if word < 3 else 0x70
            places: list[tuple[int, bytes]] = []
        else:
            offsets, kind = FLOATS[ggml_type]
            places = [(block + at, bytes_of(value, kind)) for at in offsets]
        for at, raw in places or [(0, b"")]:
            poisoned = data.copy()
            poisoned[at : at + len(raw)] = np.frombuffer(raw, np.uint8)
            for kernel in kernels():
                with pytest.raises(NonFinite):
                    kernel.pack(case.formula, poisoned.tobytes())


@pytest.mark.parametrize("ggml_type", TYPES)
@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_an_activation_that_is_not_finite_is_refused(ggml_type: int, value: float) -> None:
    case = sample(2, (ggml_type,) * 3, small_dims((ggml_type,) * 3), rows=3)
    exponents = case.exponents
    x = case.x.copy()
    x[2, -1] = value
    with pytest.raises(reference.NonFinite):
        reference.expert(case.formula, case.slices[0], x, case.weights[:3])
    for kernel in kernels():
        with pytest.raises(NonFinite):
            kernel.answer(
                case.formula, x.tobytes(), XEncoding.F32, 3, exponents, case.grid, case.layer, case.counts,
                case.pack(kernel), case.picks, case.weights,
            )  # fmt: skip


@pytest.mark.parametrize("ggml_type", [t for t in TYPES if BLOCK[t] > 1])
def test_an_int_of_minus_128_and_a_scale_that_is_not_finite_are_refused(ggml_type: int) -> None:
    """Where x travels as ints, they and their scales come from the internet."""
    case = sample(3, (ggml_type,) * 3, small_dims((ggml_type,) * 3), rows=2)
    encoding = XEncoding.Q8A256 if BLOCK[ggml_type] == 256 else XEncoding.Q8A32
    for at, raw, error in ((-5, b"\x80", BadCall), (0, np.array([np.nan], "<f4").tobytes(), NonFinite)):
        rows = bytearray(encode_x(case.x, encoding))
        at %= len(rows)
        rows[at : at + len(raw)] = raw
        for kernel in kernels():
            with pytest.raises(error):
                kernel.answer(
                    case.formula, bytes(rows), encoding, 2, case.exponents, case.grid, case.layer,
                    case.counts, case.pack(kernel), case.picks, case.weights,
                )  # fmt: skip


@pytest.mark.parametrize("ggml_type", TYPES)
@pytest.mark.parametrize("what", ["subnormal scales", "subnormal x", "outlier channel", "zero blocks"])
def test_extremes_of_every_format_give_the_references_bits(ggml_type: int, what: str) -> None:
    types = (ggml_type,) * 3
    case = sample(
        4, types, small_dims(types), rows=5, scale=2.0**-7 if what != "subnormal scales" else 2.0**-16
    )
    x = case.x.copy()
    if what == "subnormal x":
        x *= np.float32(2.0**-130)
        x[::2, ::3] = 0
    if what == "outlier channel":
        x[:, 3] *= np.float32(3e4)
    if what == "zero blocks":
        x[:, : x.shape[1] // 2] = 0
        for data in case.slices:
            data[: len(data) // 2] = 0
    assert_same_bits(replace(case, x=x, layer=40))
