"""Every build of the kernel against the NumPy reference: the same bits, on any operands."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backbone.experts.native import NativeKernel
from backbone.experts.reference import NonFinite as ReferenceNonFinite
from backbone.model.formula import FORMATS
from relay.wire.tensors import Grid, XEncoding
from tests.wasm.calls import Sample, kernels, sample
from tests.wasm.known_answers import TAMED

TYPES = tuple(FORMATS)
BLOCK = {ggml_type: layout.block for ggml_type, layout in FORMATS.items()}
NATIVE_ENCODING = {1: XEncoding.F16, 32: XEncoding.Q8A32, 64: XEncoding.Q8A32, 256: XEncoding.Q8A256}


def small_dims(types: tuple[int, int, int], units: tuple[int, int] = (3, 2)) -> tuple[int, int]:
    """Give the smallest odd-looking shape that these formats allow."""
    gate, up, down = (BLOCK[t] for t in types)
    hidden = max(gate, up)
    return hidden * units[0] + (2 if hidden == 1 else 0), down * units[1] + (1 if down == 1 else 0)


def assert_same_bits(case: Sample) -> None:
    outputs, sums = case.reference()
    for kernel in kernels():
        assert np.array_equal(case.outputs(kernel).view(np.uint32), outputs.view(np.uint32)), kernel.build
        assert np.array_equal(case.answer(kernel), sums), kernel.build


@pytest.mark.parametrize("gate", TYPES)
@pytest.mark.parametrize("step", [0, 1, 2, 5, 11])
def test_any_mixture_of_formats_gives_the_references_bits(gate: int, step: int) -> None:
    """Each format beside itself and four others; step 0 has an odd number of groups of rows."""
    at = TYPES.index(gate)
    types = (gate, TYPES[(at + step) % len(TYPES)], TYPES[(at + 2 * step) % len(TYPES)])
    assert_same_bits(sample(gate * 100 + step, types, small_dims(types, (1, 1)), rows=5 + 2 * (step == 0)))


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 7, 8, 70])
def test_any_number_of_rows_gives_the_references_bits(rows: int) -> None:
    """70 rows are more than one chunk of the kernel."""
    assert_same_bits(sample(rows, (8, 8, 8), (64, 32), rows, num_experts=2))


@pytest.mark.parametrize("ggml_type", TYPES)
@pytest.mark.parametrize("grid", [Grid.X32, Grid.X16])
def test_rows_that_travel_encoded_give_the_references_bits(ggml_type: int, grid: Grid) -> None:
    types = (ggml_type,) * 3
    case = sample(7, types, small_dims(types), rows=3)
    layer = 12 if grid is Grid.X32 else (np.arange(case.formula.hidden_dim) % 9 + 6).astype(np.int32)
    encoding = NATIVE_ENCODING[BLOCK[ggml_type]]
    assert_same_bits(replace(case, grid=grid, layer=layer, encoding=encoding))
    assert_same_bits(replace(case, grid=grid, layer=layer, encoding=XEncoding.F16))


@pytest.mark.parametrize("dims", [(1, 1), (3, 5), (4, 4), (5, 9), (17, 8), (52, 31)])
@pytest.mark.parametrize("ggml_type", [0, 1, 30])
def test_shapes_that_fit_no_vector_give_the_references_bits(ggml_type: int, dims: tuple[int, int]) -> None:
    for rows in (1, 2, 5):
        assert_same_bits(sample(11, (ggml_type,) * 3, dims, rows))


@given(
    seed=st.integers(0, 2**32),
    types=st.tuples(*[st.sampled_from([t for t in TYPES if BLOCK[t] <= 64])] * 3),
    rows=st.integers(1, 9),
    num_experts=st.integers(1, 5),
    magnitude=st.sampled_from([2.0**-140, 2.0**-60, 1.0, 2.0**40]),
    poison=st.sampled_from(["none", "zero rows", "one outlier", "saturated", "zero weights"]),
)
@settings(max_examples=60, deadline=None)
def test_hostile_operands_give_the_references_bits(
    seed: int,
    types: tuple[int, int, int],
    rows: int,
    num_experts: int,
    magnitude: float,
    poison: str,
) -> None:
    case = sample(seed, types, small_dims(types), rows, num_experts, top_k=min(2, num_experts))
    x = case.x * np.float32(magnitude)
    match poison:
        case "zero rows":
            x[::2] = 0
        case "one outlier":
            x[:, 0] *= np.float32(1e4)
        case "saturated":
            x = np.where(x < 0, -np.float32(magnitude), np.float32(magnitude)).astype(np.float32)
        case "zero weights":
            case = replace(case, slices=[np.zeros_like(s) for s in case.slices])
    case = replace(case, x=x, layer=60)
    try:
        outputs, sums = case.reference()
    except ReferenceNonFinite:
        return
    for kernel in kernels():
        assert np.array_equal(case.answer(kernel), sums), kernel.build
        assert np.array_equal(case.outputs(kernel).view(np.uint32), outputs.view(np.uint32)), kernel.build


@pytest.mark.parametrize("ggml_type", [t for t in TYPES if BLOCK[t] > 1])
@pytest.mark.parametrize("byte", [0x00, 0x7F, 0x80, 0xFF])
def test_extreme_blocks_and_saturated_activations_stay_exact(ggml_type: int, byte: int) -> None:
    """Weights of -128 and 127, all nibbles set, scales of -128: the integer parts may not wrap."""
    types = (ggml_type,) * 3
    case = sample(3, types, small_dims(types), rows=4)
    case.x[:] = np.where(case.x < 0, -1, 1)
    case.x[3] = 1
    for data in case.slices:
        data[:] = byte
        blocks = data.reshape(-1, FORMATS[ggml_type].block_bytes)
        for at, keep, put in TAMED[ggml_type]:
            blocks[:, at] = blocks[:, at] & keep | put
    assert_same_bits(replace(case, layer=40))


@pytest.mark.parametrize("types", [(t, t, t) for t in TYPES])
def test_a_row_has_the_same_bits_alone_and_in_any_batch(types: tuple[int, int, int]) -> None:
    case = sample(5, types, small_dims(types, (1, 1)), rows=64)
    for kernel in kernels():
        whole = case.answer(kernel)
        for size in (1, 2, 7):
            wanted = [63, 0, 31, 7, 8, 9, 62][:size]
            assert np.array_equal(case.rows(wanted).answer(kernel), whole[wanted]), (kernel.build, size)


def test_splitting_the_experts_among_nodes_never_changes_the_sums() -> None:
    case = sample(6, (8, 8, 8), (96, 64), rows=5, num_experts=4, top_k=4)
    kernel: NativeKernel = kernels()[-1]
    whole = case.answer(kernel)
    for mask in ([0], [1, 3], [0, 1, 2]):
        total = np.zeros_like(whole)
        for held in (mask, [e for e in range(4) if e not in mask]):
            keep = np.isin(case.picks, held)
            counts = np.add.reduceat(keep, np.arange(0, len(keep), 4)).astype(np.uint16)
            part = replace(case, counts=counts, picks=case.picks[keep], weights=case.weights[keep])
            total += part.answer(kernel)
        assert np.array_equal(total, whole)


def test_an_expert_may_be_picked_twice_by_a_row() -> None:
    case = sample(8, (8, 8, 8), (32, 32), rows=2)
    assert_same_bits(replace(case, picks=np.zeros_like(case.picks)))
