"""The graphics kernel on whatever device there is: a software one will do. Skipped where there is none."""

import threading
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from backbone.experts.native import BadCall, KernelFault, NonFinite, NotSupported
from backbone.experts.webgpu import (
    BLOCK_OF_X,
    TOLERANCE,
    DeviceLost,
    WebGpuKernel,
    arranged,
    decoded,
    grid_of,
    refusal,
    sample,
)
from backbone.model.formula import Formula
from relay.wire.tensors import XEncoding, encode_x, row_exponents

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def kernel() -> Iterator[WebGpuKernel]:
    try:
        made = WebGpuKernel()
    except KernelFault as exc:
        pytest.skip(str(exc))
    yield made


@pytest.mark.parametrize("ggml_type", BLOCK_OF_X)
@pytest.mark.parametrize("rows", [1, 6])
def test_outputs_are_within_the_tolerance_of_the_exact_kernel(
    kernel: WebGpuKernel, ggml_type: int, rows: int
) -> None:
    assert kernel.error_of(ggml_type, rows) <= TOLERANCE


def call_of(kernel: WebGpuKernel, ggml_type: int = 8) -> tuple[object, ...]:
    formula, slices, x = sample(ggml_type, 3)
    experts = [kernel.pack(formula, data) for data in slices]
    picks, weights = np.array([0, 1, 2], np.uint16), np.ones(3, np.float32)
    counts = np.ones(3, np.uint16)
    return (formula, x.tobytes(), XEncoding.F32, 3, row_exponents(x), 0, 4, counts, experts, picks, weights)


def test_a_lost_device_says_so_and_is_taken_anew() -> None:
    try:
        kernel = WebGpuKernel()
    except KernelFault as exc:
        pytest.skip(str(exc))
    call = call_of(kernel)
    before = kernel.answer(*call)  # type: ignore[arg-type]
    kernel.lose("pulled out")
    with pytest.raises(DeviceLost, match="pulled out"):
        kernel.answer(*call)  # type: ignore[arg-type]
    kernel.reopen()
    with pytest.raises(BadCall):
        kernel.answer(*call)  # type: ignore[arg-type]
    assert np.abs(kernel.answer(*call_of(kernel)) - before).max() == 0  # type: ignore[arg-type]


def test_a_device_that_takes_too_long_is_given_up() -> None:
    try:
        kernel = WebGpuKernel(deadline_s=0.05)
    except KernelFault as exc:
        pytest.skip(str(exc))
    call, release = call_of(kernel), threading.Event()

    def hang() -> bytes:
        release.wait(10)
        return b""

    with pytest.raises(DeviceLost, match="no answer within 0.05 s"):
        kernel._in_time(hang, ())
    with pytest.raises(DeviceLost):
        kernel.answer(*call)  # type: ignore[arg-type]
    release.set()


def test_bad_slices_and_picks_are_refused(kernel: WebGpuKernel) -> None:
    formula, slices, _ = sample(8, 1)
    poisoned = bytearray(slices[0])
    poisoned[0:2] = b"\x00\x7c"
    with pytest.raises(NonFinite):
        kernel.pack(formula, poisoned)
    with pytest.raises(BadCall):
        kernel.pack(formula, slices[0][1:])
    call = list(call_of(kernel))
    call[9] = np.array([0, 1, 3], np.uint16)
    with pytest.raises(BadCall):
        kernel.answer(*call)  # type: ignore[arg-type]
    with pytest.raises(NotSupported):
        kernel.pack(replace(formula, activation="relu"), slices[0])


def test_what_it_cannot_compute_is_named() -> None:
    formula = Formula(512, 256, 12, 12, 14)
    assert refusal(formula) is None
    assert "format 2" in str(refusal(replace(formula, down_type=2)))
    assert "without a gate" in str(refusal(replace(formula, gate_type=None)))
    assert "differently" in str(refusal(replace(formula, gate_type=8)))
    assert "activation" in str(refusal(replace(formula, activation="gelu")))
    assert "one binding holds" in str(refusal(replace(formula, hidden_dim=65536, expert_dim=8192)))


@pytest.mark.parametrize(("block", "encoding"), [(32, XEncoding.Q8A32), (256, XEncoding.Q8A256)])
def test_rows_that_travel_encoded_are_the_rows_we_would_make(block: int, encoding: XEncoding) -> None:
    x = np.random.default_rng(1).standard_normal((3, 512), np.float32)
    ours = arranged(x, block)
    assert np.array_equal(decoded(encode_x(x, encoding), encoding, 3, 512, block), ours)
    assert np.array_equal(decoded(x.tobytes(), XEncoding.F32, 3, 512, block), ours)


def test_many_workgroups_stand_in_several_rows() -> None:
    assert grid_of(10, 3) == (10, 1, 3)
    assert grid_of(70_000, 1) == (65535, 2, 1)
