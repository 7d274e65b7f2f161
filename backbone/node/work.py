"""What a node's threads do: test and time the kernel, answer one dispatch. No sockets, no loop."""

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np

from backbone.errors import ModelError
from backbone.experts.native import (
    GridOverflow,
    KernelError,
    KernelFault,
    NativeKernel,
    NonFinite,
    PackedExpert,
)
from backbone.experts.webgpu import DeviceExpert, WebGpuKernel
from backbone.model.formula import Formula
from relay.wire.messages import AssignLayer, Dispatch, Partial
from relay.wire.tensors import Grid, XEncoding, encode_x, row_exponents

type Kernel = NativeKernel | WebGpuKernel
type Packed = PackedExpert | DeviceExpert

_SPEED_SHAPE = Formula(hidden_dim=1024, expert_dim=512, gate_type=8, up_type=8, down_type=8)
_SPEED_EXPERTS = 8  # 13 MB together: more than the caches of a phone hold
_SPEED_RUNS = 5
_SPEED_S = 0.5  # a slow device is known sooner


@dataclass(frozen=True, slots=True)
class LayerWork:
    """What is constant of an assigned layer, as the kernel wants it."""

    layer: int
    formula: Formula
    x32: int
    x16: np.ndarray[tuple[int], np.dtype[np.int32]] | None

    @classmethod
    def of(cls, assigned: AssignLayer) -> "LayerWork":
        """
        Read one layer of an Assign.

        Raises:
            ModelError: the formula cannot be read, or does not fit the rest.
            FormulaUnsupported: this kernel cannot compute it.
        """
        formula = Formula.from_json(assigned.formula)
        formula.require_supported(assigned.layer)
        if assigned.slice_bytes != formula.slice_bytes:
            raise ModelError(f"layer {assigned.layer}: its slices do not have the size of its formula")
        x16 = assigned.grid["x16"]
        exponents = None if x16 is None else np.asarray(x16, np.int32)
        if exponents is not None and exponents.shape != (formula.hidden_dim,):
            raise ModelError(f"layer {assigned.layer}: its grid does not have the width of its formula")
        return cls(assigned.layer, formula, int(assigned.grid["x32"]), exponents)

    @property
    def grids(self) -> tuple[int, ...]:
        """The grids this layer has exponents for."""
        return (Grid.X32,) if self.x16 is None else (Grid.X32, Grid.X16)


@dataclass(frozen=True, slots=True)
class Refused:
    """Why a call was not computed: a Failure code and a message."""

    code: str
    message: str


def answer(
    kernel: Kernel,
    work: LayerWork,
    dispatch: Dispatch,
    numbers: Sequence[int],
    packed: Sequence[Packed],
) -> Partial | Refused:
    """
    Compute one dispatch: one partial row per row of x, the sum over its picks.

    `numbers` are the distinct experts of the dispatch and `packed[i]` belongs to `numbers[i]`. Blocks without
    the GIL; never raises for anything a peer may send.
    """
    started = perf_counter()
    at = {number: index for index, number in enumerate(numbers)}
    index = np.array([at[number] for number in dispatch.experts.tolist()], np.uint16)
    try:
        sums = kernel.answer(
            work.formula,
            dispatch.x,
            dispatch.x_encoding,
            dispatch.num_tokens,
            dispatch.row_exponents,
            dispatch.grid,
            work.x32 if dispatch.grid is Grid.X32 or work.x16 is None else work.x16,
            dispatch.counts,
            packed,  # type: ignore[arg-type]  # of this very kernel
            index,
            dispatch.weights,
        )
        widths, data = kernel.encode_partial(sums, dispatch.grid)
    except KernelError as exc:
        return Refused(_code(exc), str(exc)[:500])
    compute_us = int((perf_counter() - started) * 1e6)
    return Partial(work.layer, dispatch.hidden_dim, dispatch.grid, compute_us, widths, data)


def _code(exc: KernelError) -> str:
    match exc:
        case NonFinite():
            return "non_finite"
        case GridOverflow():
            return "grid_overflow"
        case KernelFault():
            return "kernel_fault"
        case _:
            return "bad_frame"


def prove_and_time(kernel: Kernel) -> float:
    """
    Run the known-answer test, then measure: GB of weights per second, one row, one thread.

    Raises:
        KernelFault: this machine does not compute what the contract says; it must not serve.
    """
    kernel.known_answer_test()
    formula = _SPEED_SHAPE
    rng = np.random.default_rng(1)
    blocks = rng.integers(-127, 128, (formula.slice_bytes // 34, 34), dtype=np.int8).view(np.uint8)
    blocks[:, 0], blocks[:, 1] = 0x00, 0x20  # scale 2^-7 as f16
    packed: list[Any] = [kernel.pack(formula, blocks.tobytes()) for _ in range(_SPEED_EXPERTS)]
    x = rng.standard_normal((1, formula.hidden_dim), dtype=np.float32)
    picks = np.arange(_SPEED_EXPERTS, dtype=np.uint16)
    weights = np.full(_SPEED_EXPERTS, 1 / _SPEED_EXPERTS, np.float32)
    counts = np.array([_SPEED_EXPERTS], np.uint16)
    rows, exponents = encode_x(x, XEncoding.Q8A32), row_exponents(x)
    best_s = float("inf")
    until = perf_counter() + _SPEED_S
    for run in range(_SPEED_RUNS):
        if run and perf_counter() > until:
            break
        started = perf_counter()
        kernel.answer(
            formula,
            rows,
            XEncoding.Q8A32,
            1,
            exponents,
            Grid.X32,
            20,
            counts,
            packed,
            picks,
            weights,
        )
        best_s = min(best_s, perf_counter() - started)
    return _SPEED_EXPERTS * formula.slice_bytes / best_s / 1e9
