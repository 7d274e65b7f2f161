"""An expert in pieces and in parts: packed bit by bit, computed by several, always with the same bytes."""

import ctypes
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backbone.experts import native
from backbone.experts.abi import Call, CRows
from backbone.experts.native import BadCall, NativeKernel, PackedExpert, Rows, split_rows
from backbone.model.formula import FORMATS, Formula
from relay.wire.tensors import encode_x
from tests.wasm.calls import Sample, kernels, random_slice, sample
from tests.wasm.known_answers import FORMULAS

TYPES = tuple(FORMATS)
BLOCK = {ggml_type: layout.block for ggml_type, layout in FORMATS.items()}


def one_half(
    kernel: NativeKernel, case: Sample, experts: list[PackedExpert], rows: Rows, h: np.ndarray | None
) -> np.ndarray:
    """Compute with parts of experts in a memory of their own: a stretch of h, or (given h) of the sums."""
    words, _kept = kernel._words(
        case.formula, encode_x(case.x, case.encoding), case.encoding, len(case.x), case.exponents, case.grid,
        case.layer, case.counts, experts, case.picks, case.weights,
    )  # fmt: skip
    if h is None:
        out = np.empty((len(case.picks), rows[1] - rows[0]), np.float32)
        code = kernel._lib.expert_hidden(
            kernel._call(words), ctypes.byref(CRows(*rows)), out.ctypes.data, out.shape[1]
        )
    else:
        out = np.empty((len(case.x), rows[3] - rows[2]), np.int64)
        call = kernel._call(words, sums=out.ctypes.data, x=0, x_bytes=0)
        code = kernel._lib.expert_finish(
            call, ctypes.byref(CRows(*rows)), h.ctypes.data, h.shape[1], out.shape[1]
        )
    assert code == 0
    return out


def computed_by(kernel: NativeKernel, case: Sample, parts: list[Rows]) -> np.ndarray:
    """Let every part pack its rows alone; h is gathered between the steps, as workers would by messages."""
    held = [[kernel.pack(case.formula, s.tobytes(), rows) for s in case.slices] for rows in parts]
    h = np.concatenate(
        [
            one_half(kernel, case, experts, (*rows[:2], 0, 0), None)
            for rows, experts in zip(parts, held, strict=True)
        ],
        axis=1,
    )
    h = np.ascontiguousarray(h)
    sums = [
        one_half(kernel, case, experts, (0, 0, *rows[2:]), h)
        for rows, experts in zip(parts, held, strict=True)
    ]
    return np.concatenate(sums, axis=1)


def parts_of(formula: Formula, units: list[int], channels: list[int]) -> list[Rows]:
    """Cut at these multiples of 16."""
    ends = [[0, *sorted(min(16 * at, dim) for at in cuts), dim] for cuts, dim in
            ((units, formula.expert_dim), (channels, formula.hidden_dim))]  # fmt: skip
    u, c = ends
    parts = [(u[i], u[i + 1], c[i], c[i + 1]) for i in range(len(u) - 1)]
    return [rows for rows in parts if rows[0] < rows[1] or rows[2] < rows[3]]


@given(
    seed=st.integers(0, 2**32),
    types=st.tuples(*[st.sampled_from(TYPES)] * 3),
    what=st.sampled_from(({}, *FORMULAS)),
    cuts=st.integers(0, 3).flatmap(
        lambda n: st.tuples(*[st.lists(st.integers(0, 33), min_size=n, max_size=n)] * 2)
    ),
    rows=st.integers(1, 5),
)
@settings(max_examples=40, deadline=None)
def test_any_split_of_the_rows_gives_the_same_bytes(
    seed: int, types: tuple[int, int, int], what: dict[str, Any], cuts: tuple[list[int], list[int]], rows: int
) -> None:
    hidden_dim = max(BLOCK[types[0]], BLOCK[types[1]]) if max(BLOCK[t] for t in types[:2]) > 1 else 52
    case = sample(seed, types, (hidden_dim * 2, BLOCK[types[2]] if BLOCK[types[2]] > 1 else 36), rows)
    formula = replace(case.formula, **what)
    rng = np.random.default_rng(seed)
    case = replace(case, formula=formula, slices=[random_slice(rng, formula) for _ in case.slices], layer=40)
    for kernel in kernels():
        assert np.array_equal(computed_by(kernel, case, parts_of(formula, *cuts)), case.answer(kernel))


@pytest.mark.parametrize("threads", [2, 3, 7])
@pytest.mark.parametrize("types", [(12, 12, 14), (8, 8, 8), (39, 39, 39), (1, 0, 30)])
def test_threads_that_share_a_call_give_the_same_bytes(
    types: tuple[int, int, int], threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "SPLIT_BYTES", 1)
    case = sample(threads, types, (512, 256), rows=5)
    for kernel in kernels():
        whole = case.answer(kernel)
        kernel_of_many = NativeKernel(kernel.build, threads=threads)
        for _ in range(3):
            assert np.array_equal(case.answer(kernel_of_many), whole)
        assert kernel_of_many._busy == 0


def test_a_refused_call_is_refused_by_every_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "SPLIT_BYTES", 1)
    case = sample(1, (8, 8, 8), (64, 64), rows=2)
    kernel = NativeKernel(threads=2)
    with pytest.raises(native.GridOverflow):
        replace(case, layer=-60).answer(kernel)
    poisoned = case.x.copy()
    poisoned[1, 5] = np.inf
    words = dict(rows=poisoned.tobytes(), encoding=0, num_tokens=2, row_exponents=case.exponents,
                 grid_kind=0, layer_exponents=12, counts=case.counts, experts=case.pack(kernel),
                 pick_expert=case.picks, pick_weight=case.weights)  # fmt: skip
    with pytest.raises(native.NonFinite):
        kernel.answer(case.formula, **words)  # type: ignore[arg-type]
    assert kernel._busy == 0


def test_a_call_takes_only_threads_that_are_idle() -> None:
    kernel = NativeKernel(threads=3)
    with kernel._threads(1) as small, kernel._threads(1 << 40) as large, kernel._threads(1 << 40) as late:
        assert (small, large, late) == (1, 2, 1)
    with kernel._threads(1 << 40) as alone:
        assert alone == 3


def test_rows_are_split_evenly_at_multiples_of_16() -> None:
    assert split_rows(768, 2) == [(0, 384), (384, 768)]
    assert split_rows(40, 3) == [(0, 16), (16, 32), (32, 40)]
    assert split_rows(5, 3) == [(0, 5), (5, 5), (5, 5)]
    for count in (1, 16, 17, 1000, 2048):
        for parts in (1, 2, 5, 8):
            bounds = split_rows(count, parts)
            assert bounds[0][0] == 0 and bounds[-1][1] == count and len(bounds) == parts
            assert all(a[1] == b[0] for a, b in zip(bounds, bounds[1:], strict=False))
            assert all(first % 16 == 0 or first == count for first, _ in bounds)


@pytest.mark.parametrize("ggml_type", TYPES)
@pytest.mark.parametrize("piece_bytes", [1, 5000, 1 << 30])
def test_a_slice_packed_in_pieces_is_the_slice_packed_whole(ggml_type: int, piece_bytes: int) -> None:
    dims = (40, 36) if BLOCK[ggml_type] == 1 else (2 * BLOCK[ggml_type], BLOCK[ggml_type])
    case = sample(9, (ggml_type,) * 3, dims, rows=1)
    formula = replace(case.formula, biased=True, scaled=True)
    data = random_slice(np.random.default_rng(ggml_type), formula).tobytes()
    for kernel in kernels():
        read: list[tuple[int, int]] = []

        def piece(at: int, size: int, read: list[tuple[int, int]] = read) -> bytes:
            read.append((at, size))
            return data[at : at + size]

        pieces = kernel.pack_pieces(formula, piece, piece_bytes=piece_bytes)
        whole = kernel.pack(formula, data)
        assert [at for at, _ in read] == list(np.cumsum([0, *[size for _, size in read[:-1]]]))
        assert sum(size for _, size in read) == len(data)
        cases = [replace(case, formula=formula, picks=np.zeros(2, np.uint16), slices=[]) for _ in range(2)]
        got = [answer_of(kernel, c, [packed]) for c, packed in zip(cases, (pieces, whole), strict=True)]
        assert np.array_equal(*got)


def answer_of(kernel: NativeKernel, case: Sample, experts: list[PackedExpert]) -> np.ndarray:
    return kernel.answer(
        case.formula, encode_x(case.x, case.encoding), case.encoding, len(case.x), case.exponents, case.grid,
        case.layer, case.counts, experts, case.picks, case.weights,
    )  # fmt: skip


def test_a_half_packed_expert_is_refused() -> None:
    case = sample(10, (8, 8, 8), (64, 64), rows=1, num_experts=1, top_k=1)
    kernel = NativeKernel()
    packed: list[PackedExpert] = []

    class Gone(Exception):
        pass

    def read(at: int, size: int) -> bytes:
        if at > case.formula.slice_bytes // 2:
            raise Gone
        return bytes(size)

    made = native.PackedExpert

    def remember(size_bytes: int) -> PackedExpert:
        packed.append(made(size_bytes))
        return packed[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "PackedExpert", remember)
        with pytest.raises(Gone):
            kernel.pack_pieces(case.formula, read, piece_bytes=1)
    with pytest.raises(BadCall, match="another formula"):
        answer_of(kernel, case, packed)
    with pytest.raises(BadCall):
        kernel.pack_pieces(case.formula, lambda at, size: bytes(size - 1))


def test_experts_that_hold_other_rows_than_the_call_wants_are_refused() -> None:
    case = sample(11, (8, 8, 8), (64, 64), rows=1, num_experts=2, top_k=2)
    kernel = NativeKernel()
    left, right = (0, 32, 0, 32), (32, 64, 32, 64)
    parts = [kernel.pack(case.formula, s.tobytes(), left) for s in case.slices]
    mixed = [parts[0], kernel.pack(case.formula, case.slices[1].tobytes(), right)]
    for experts in (parts, mixed):  # a whole call wants all rows
        with pytest.raises(BadCall, match="another formula"):
            answer_of(kernel, case, experts)
    words, _kept = kernel._words(
        case.formula, encode_x(case.x, case.encoding), case.encoding, 1, case.exponents, case.grid,
        case.layer, case.counts, parts, case.picks, case.weights,
    )  # fmt: skip
    h = np.empty((2, 64), np.float32)
    call: ctypes.Array[ctypes.c_size_t] = kernel._call(words)
    assert isinstance(call, Call)
    codes = {}
    for rows in (right, (0, 64, 0, 0), (8, 32, 0, 0), (16, 8, 0, 0), (-16, 32, 0, 0), (0, 80, 0, 0)):
        codes[rows] = kernel._lib.expert_hidden(call, ctypes.byref(CRows(*rows)), h.ctypes.data, 64)
    assert list(codes.values()) == [-9, -9, -3, -3, -3, -3]
    with pytest.raises(BadCall):
        kernel.pack(case.formula, case.slices[0].tobytes(), (0, 8, 0, 64))


def test_packing_from_a_file_needs_little_more_than_the_packed_expert(tmp_path: Path) -> None:
    """At its peak, besides the packed expert itself (an arena, of which tracemalloc knows nothing): 4 MB."""
    formula = Formula(2048, 4096, 12, 12, 14)
    path = tmp_path / "slice"
    path.write_bytes(bytes(formula.slice_bytes))
    assert formula.slice_bytes > 15 << 20
    kernel = NativeKernel()
    kernel.known_answer_test()
    kernel.pack(Formula(256, 256, 12, 12, 14), bytes(Formula(256, 256, 12, 12, 14).slice_bytes))  # its tests
    with path.open("rb") as file:

        def read(at: int, size: int) -> bytes:
            file.seek(at)
            return file.read(size)

        tracemalloc.start()
        packed = kernel.pack_pieces(formula, read)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert packed.size_bytes > 15 << 20
    assert peak < 4 << 20
