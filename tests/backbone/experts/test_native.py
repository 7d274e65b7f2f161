"""The binding of the native kernel: what it refuses, and that it may be used from threads."""

import ctypes
import platform
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Barrier
from time import process_time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from backbone.experts.native import (
    BadCall,
    GridOverflow,
    KernelError,
    KernelFault,
    NativeKernel,
    NonFinite,
    NotSupported,
)
from backbone.model.formula import Formula
from relay.wire.tensors import Grid, XEncoding, encode_x, x_bytes
from tests.wasm.calls import Sample, build_script, kernels, sample


@pytest.fixture(params=range(len(kernels())), ids=[k.build for k in kernels()])
def kernel(request: pytest.FixtureRequest) -> NativeKernel:
    return kernels()[request.param]


@pytest.fixture
def case() -> Sample:
    return sample(1, (8, 8, 8), (64, 32), rows=3)


def call(kernel: NativeKernel, case: Sample, **changes: object) -> np.ndarray:
    arguments: dict[str, object] = dict(
        formula=case.formula,
        rows=encode_x(case.x, case.encoding),
        encoding=case.encoding,
        num_tokens=len(case.x),
        row_exponents=case.exponents,
        grid_kind=case.grid,
        layer_exponents=case.layer,
        counts=case.counts,
        experts=case.pack(kernel),
        pick_expert=case.picks,
        pick_weight=case.weights,
    )
    return kernel.answer(**(arguments | changes))  # type: ignore[arg-type]


def test_the_core_of_the_known_answers_comes_within_10_ms_from_every_build() -> None:
    for kernel in kernels():
        started = process_time()
        kernel.known_answer_test()
        assert process_time() - started < 0.05, "the scalar build takes most; the others are below 2 ms"


def test_a_dispatch_without_picks_is_all_zeros(kernel: NativeKernel, case: Sample) -> None:
    none = np.zeros(0, np.uint16)
    counts = np.zeros(3, np.uint16)
    answer = call(
        kernel, case, counts=counts, pick_expert=none, pick_weight=none.astype(np.float32), experts=[]
    )
    assert answer.shape == (3, 64) and not answer.any()


def test_a_row_without_picks_is_zero_among_others(kernel: NativeKernel, case: Sample) -> None:
    whole = call(kernel, case)
    counts = np.array([2, 0, 2], np.uint16)
    keep = [0, 1, 4, 5]
    answer = call(kernel, case, counts=counts, pick_expert=case.picks[keep], pick_weight=case.weights[keep])
    assert np.array_equal(answer[[0, 2]], whole[[0, 2]]) and not answer[1].any()


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        (dict(num_tokens=2), BadCall),
        (dict(rows=bytes(5)), BadCall),
        (dict(rows=b""), BadCall),
        (dict(encoding=9), BadCall),
        (dict(encoding=XEncoding.Q8A256), BadCall),
        (dict(grid_kind=2), BadCall),
        (dict(grid_kind=Grid.X16), BadCall),
        (dict(layer_exponents=400), BadCall),
        (dict(row_exponents=np.array([0, 0, 200], np.int16)), BadCall),
        (dict(row_exponents=np.array([0, 0], np.int16)), BadCall),
        (dict(counts=np.array([2, 2, 1], np.uint16)), BadCall),
        (dict(counts=np.array([2, 2, 3], np.uint16)), BadCall),
        (dict(counts=np.array([2, 2, 65000], np.uint16)), BadCall),
        (dict(pick_expert=np.array([0, 1, 2, 0, 1, 3], np.uint16)), BadCall),
        (dict(pick_weight=np.ones(5, np.float32)), BadCall),
        (dict(pick_weight=np.array([1, 1, 1, 1, 1, np.nan], np.float32)), NonFinite),
        (dict(pick_weight=np.full(6, 1e30, np.float32)), GridOverflow),
        (dict(layer_exponents=-30), GridOverflow),
    ],
)
def test_wrong_calls_are_refused_by_name(
    kernel: NativeKernel, case: Sample, changes: dict[str, object], error: type[Exception]
) -> None:
    with pytest.raises(error):
        call(kernel, case, **changes)
    assert np.array_equal(call(kernel, case), case.reference()[1]), "and the next call is answered"


@pytest.mark.parametrize("encoding", [XEncoding.F32, XEncoding.F16, XEncoding.Q8A32])
def test_activations_that_are_not_finite_are_refused(kernel: NativeKernel, encoding: XEncoding) -> None:
    case = sample(1, (8, 8, 8), (64, 32), rows=2)
    dtype = {XEncoding.F32: "<f4", XEncoding.F16: "<f2", XEncoding.Q8A32: "<f4"}[encoding]
    for value in (np.nan, np.inf, -np.inf):
        rows = bytearray(encode_x(case.x, encoding))
        rows[: np.dtype(dtype).itemsize] = np.array(value, dtype).tobytes()
        with pytest.raises(NonFinite):
            call(kernel, case, rows=bytes(rows), encoding=encoding)


def test_an_int8_activation_of_minus_128_is_refused(kernel: NativeKernel, case: Sample) -> None:
    rows = bytearray(encode_x(case.x, XEncoding.Q8A32))
    rows[-1] = 0x80
    with pytest.raises(BadCall):
        call(kernel, case, rows=bytes(rows), encoding=XEncoding.Q8A32)


def test_blocks_of_another_size_than_the_weights_want_are_refused(kernel: NativeKernel) -> None:
    case = sample(1, (12, 8, 8), (256, 32), rows=1)
    for encoding in (XEncoding.Q8A32, XEncoding.Q8A256):
        with pytest.raises(BadCall, match="send f32 or f16"):
            call(kernel, replace(case, encoding=encoding))


@pytest.mark.parametrize(
    ("types", "offset", "poison"),
    [
        ((0, 0, 0), 0, np.float32(np.nan).tobytes()),
        ((0, 0, 0), 0, np.float32(np.inf).tobytes()),
        ((1, 1, 1), 0, np.float16(np.inf).tobytes()),
        ((8, 8, 8), 0, np.float16(np.nan).tobytes()),
        ((12, 12, 12), 0, np.float16(-np.inf).tobytes()),
        ((12, 12, 12), 2, np.float16(np.nan).tobytes()),
        ((14, 14, 14), 208, np.float16(np.inf).tobytes()),
    ],
)
def test_slices_that_are_not_finite_are_refused(
    kernel: NativeKernel, types: tuple[int, int, int], offset: int, poison: bytes
) -> None:
    """In the first block of gate, and in the last of down."""
    case = sample(1, types, (256, 256), rows=1)
    block_bytes = {0: 4, 1: 2, 8: 34, 12: 144, 14: 210}[types[0]]
    for block in (0, len(case.slices[0]) // block_bytes - 1):
        at = block * block_bytes + offset
        data = bytearray(case.slices[0].tobytes())
        data[at : at + len(poison)] = poison
        with pytest.raises(NonFinite):
            kernel.pack(case.formula, bytes(data))


def test_slices_of_the_wrong_length_are_refused(kernel: NativeKernel, case: Sample) -> None:
    data = case.slices[0].tobytes()
    for wrong in (b"", data[:-1], data + b"\0"):
        with pytest.raises(BadCall):
            kernel.pack(case.formula, wrong)


@pytest.mark.parametrize(
    "formula",
    [
        Formula(64, 64, 8, 8, 5),
        Formula(64, 64, 8, 8, 8, activation="nonsense"),
        Formula(64, 64, None, 8, 8, limit=7.0),
        Formula(64, 64, 8, 8, 8, activation="gelu", limit=7.0),
        Formula(64, 64, None, 8, 8, activation="swiglu_oai", alpha=1.7, limit=7.0),
        Formula(64, 64, 8, 8, 8, activation="swiglu_oai", limit=7.0),
        Formula(64, 64, 8, 8, 8, activation="swiglu_clamp"),
        Formula(64, 64, 8, 8, 8, activation="situ", alpha=2.0**21),
        Formula(64, 64, 8, 8, 8, limit=-1.0),
        Formula(64, 64, 8, 8, 8, weight_position="middle"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(kernel: NativeKernel, formula: Formula) -> None:
    with pytest.raises(NotSupported, match="not supported yet"):
        kernel.pack(formula, b"")


@pytest.mark.parametrize("dims", [(0, 32), (-32, 32), (48, 32), (32, 48), (1 << 20, 32), (32, 1 << 30)])
def test_impossible_dimensions_are_refused(kernel: NativeKernel, dims: tuple[int, int]) -> None:
    with pytest.raises(BadCall):
        kernel.pack(Formula(*dims, 8, 8, 8), b"")


def test_an_expert_packed_for_another_formula_is_refused(kernel: NativeKernel, case: Sample) -> None:
    other = sample(1, (8, 8, 8), (32, 64), rows=1)
    with pytest.raises(BadCall, match="another formula"):
        call(kernel, case, experts=[*case.pack(kernel)[:2], other.pack(kernel)[0]])


def test_slices_may_be_read_only_views(kernel: NativeKernel, case: Sample) -> None:
    data = case.slices[0].tobytes()
    for view in (memoryview(data), bytearray(data), memoryview(b"x" + data)[1:]):
        kernel.pack(case.formula, view)


def test_many_threads_get_the_bits_of_one(kernel: NativeKernel) -> None:
    cases = [sample(seed, (8, 8, 8), (64, 32), rows=1 + seed % 5) for seed in range(12)]
    alone = [case.answer(kernel) for case in cases]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda case: case.answer(kernel), cases * 4))
    assert all(np.array_equal(a, b) for a, b in zip(alone * 4, together, strict=True))


@given(
    data=st.data(),
    encoding=st.sampled_from(XEncoding),
    grid=st.sampled_from(Grid),
    types=st.tuples(*[st.sampled_from([0, 1, 8])] * 3),
    rows=st.integers(0, 4),
)
@settings(deadline=None, max_examples=80)
def test_any_bytes_give_an_answer_or_a_kernel_error(
    data: st.DataObject, encoding: XEncoding, grid: Grid, types: tuple[int, int, int], rows: int
) -> None:
    case = sample(2, types, (64, 32), rows=1)
    size = 0 if encoding is XEncoding.Q8A256 else x_bytes(rows, 64, encoding)
    counts = data.draw(arrays(np.uint16, rows, elements=st.integers(0, 3)))
    num_picks = int(counts.sum()) + data.draw(st.sampled_from([0, 0, 0, 1]))
    changes: dict[str, object] = dict(
        rows=data.draw(st.binary(min_size=size, max_size=size) | st.binary(max_size=64)),
        encoding=encoding,
        num_tokens=rows,
        row_exponents=data.draw(arrays(np.int16, rows)),
        grid_kind=grid,
        layer_exponents=data.draw(arrays(np.int32, 64 if grid is Grid.X16 else 1)),
        counts=counts,
        pick_expert=data.draw(arrays(np.uint16, num_picks, elements=st.integers(0, 3))),
        pick_weight=data.draw(arrays(np.float32, num_picks)),
    )
    answers = []
    for kernel in kernels():
        try:
            answers.append(call(kernel, case, **changes).tobytes())
        except KernelError as exc:
            answers.append(str(exc.code).encode())
    assert len(set(answers)) == 1, "and every build says the same"


FLUSH = """
#include <xmmintrin.h>
unsigned flush_subnormals(void) { unsigned old = _mm_getcsr(); _mm_setcsr(old | 0x8040); return old; }
unsigned current(void) { return _mm_getcsr(); }
void restore(unsigned old) { _mm_setcsr(old); }
"""


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="MXCSR is a register of x86")
def test_a_library_that_switched_subnormals_off_changes_nothing(kernel: NativeKernel, tmp_path: Path) -> None:
    source, library = tmp_path / "flush.c", tmp_path / "flush.so"
    source.write_text(FLUSH)
    flags = build_script().TARGETS["scalar"].flags
    subprocess.run(
        [sys.executable, "-m", "ziglang", "cc", *flags, str(source), "-o", str(library)], check=True
    )
    flush = ctypes.CDLL(str(library))
    case = sample(4, (0, 0, 0), (24, 12), rows=2)
    case = replace(case, weights=case.weights * np.float32(2.0**-128), layer=-110)
    outputs, sums = case.reference()
    assert np.count_nonzero(np.abs(outputs) < np.finfo(np.float32).tiny) > 10 and sums.any()
    packed, rows, exponents = case.pack(kernel), encode_x(case.x, case.encoding), case.exponents
    old = flush.flush_subnormals()
    try:
        answer = kernel.answer(
            case.formula, rows, 0, 2, exponents, 0, case.layer, case.counts, packed, case.picks, case.weights
        )
        assert flush.current() & 0x8040 == 0x8040, "the kernel leaves the thread as it found it"
    finally:
        flush.restore(old)
    assert np.array_equal(answer, sums)


def test_a_missing_library_says_what_to_run(tmp_path: Path) -> None:
    with pytest.raises(KernelFault, match=r"wasm/build\.py"):
        NativeKernel(folder=tmp_path)


def test_threads_that_meet_a_formula_at_once_use_the_same_memory_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A second copy would free the first under a call that reads it."""
    found, formula, both = NativeKernel(), Formula(64, 64, 8, 8, 8), Barrier(2)
    prove = found._prove

    def prove_together(c_formula: object) -> None:
        both.wait(10)
        prove(c_formula)  # type: ignore[arg-type]

    monkeypatch.setattr(found, "_prove", prove_together)
    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(found._formula, [formula, formula])
    assert one[0] is other[0] is found._formula(formula)[0]
