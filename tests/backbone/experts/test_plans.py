"""How x travels is known for every format and pair of formats, and loses nothing."""

from itertools import product

import numpy as np
import pytest

from backbone.experts.native import NativeKernel
from backbone.experts.plans import x_encoding
from backbone.model.formula import FORMATS, Formula
from backbone.model.quantise import can_quantise, quantise, random_blocks
from relay.wire.tensors import XEncoding, encode_x
from tests.wasm.calls import build_script

D, F, ROWS = 512, 256, 3  # whole blocks of every format


@pytest.fixture(scope="module")
def kernel() -> NativeKernel:
    build_script().build_default()
    return NativeKernel()


def _weights(rng: np.random.Generator, type_id: int, rows: int, columns: int) -> bytes:
    if can_quantise(type_id):
        values = (rng.standard_normal((rows, columns)) * columns**-0.5).astype(np.float32)
        return quantise(values, type_id).tobytes()
    return random_blocks(rng, type_id, (rows, columns), columns**-0.5).tobytes()


@pytest.mark.parametrize("type_id", FORMATS, ids=lambda type_id: FORMATS[type_id].name)
def test_kernel_makes_of_x_as_it_travels_what_it_makes_of_x(kernel: NativeKernel, type_id: int) -> None:
    formula = Formula(D, F, type_id, type_id, 8)
    rng = np.random.default_rng(type_id)
    slice_bytes = b"".join(
        (_weights(rng, type_id, F, D), _weights(rng, type_id, F, D), _weights(rng, 8, D, F))
    )
    packed = kernel.pack(formula, slice_bytes)
    x = rng.standard_normal((ROWS, D)).astype(np.float32)

    def outputs(encoding: XEncoding) -> bytes:
        return kernel.outputs(
            formula, encode_x(x, encoding), int(encoding), ROWS, np.ones(ROWS, np.uint16), [packed],
            np.zeros(ROWS, np.uint16), np.ones(ROWS, np.float32),
        ).tobytes()  # fmt: skip

    assert outputs(x_encoding(formula)) == outputs(XEncoding.F32)
    if FORMATS[type_id].block > 1:
        assert x_encoding(formula) is not XEncoding.F32  # a byte a number


def test_every_pair_of_formats_has_an_encoding() -> None:
    for gate, up in product((None, *FORMATS), FORMATS):
        assert x_encoding(Formula(D, F, gate, up, 8)) in XEncoding
