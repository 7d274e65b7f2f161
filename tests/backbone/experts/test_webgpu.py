"""The graphics kernel on whatever device there is: a software one will do. Skipped where there is none."""

import json
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backbone.experts.native import BadCall, KernelFault, NativeKernel, NonFinite, NotSupported
from backbone.experts.webgpu import TOLERANCE, DeviceLost, WebGpuKernel
from backbone.experts.webgpu_formats import FORMATS, grids_script, refusal, sample
from backbone.experts.webgpu_job import grid_of, spans_of
from backbone.experts.webgpu_rows import arranged, decoded
from backbone.model.formula import FORMATS as ALL_FORMATS
from backbone.model.formula import Formula
from relay.wire.tensors import XEncoding, encode_x, row_exponents
from tests.wasm.known_answers import FORMULAS
from tests.wasm.test_pyodide import node

pytestmark = pytest.mark.filterwarnings("ignore")

KERNELS = Path(__file__).parents[3] / "node-web" / "src" / "kernels"
Q8 = Formula(0, 0, 8, 8, 8)
# Every format as gate, up or down, some pairs of which want x differently; one alone without a gate.
MIXED = [
    (0, 1, 2), (3, 6, 7), (8, 10, 11), (None, 12, 13), (14, 20, 23), (30, 34, 35), (39, 40, 12), (16, 17, 18),
    (19, 8, 21), (22, 29, 0),
]  # fmt: skip


def opened(**options: Any) -> WebGpuKernel:
    try:
        return WebGpuKernel(**options)
    except KernelFault as exc:
        pytest.skip(str(exc))


@pytest.fixture(scope="module")
def kernel() -> Iterator[WebGpuKernel]:
    yield opened()


@pytest.mark.parametrize("types", MIXED)
def test_every_formula_is_within_the_tolerance_of_the_exact_kernel(
    kernel: WebGpuKernel, types: tuple[int | None, int, int]
) -> None:
    gate, up, down = types
    for number, changes in enumerate(({"activation": "silu"}, *FORMULAS)):
        if gate is None and changes["activation"] in ("swiglu_oai", "swiglu_clamp", "situ", "silu"):
            continue
        formula = Formula(0, 0, **({"gate_type": gate} | changes), up_type=up, down_type=down)
        assert kernel.error_of(formula, (1, 6, 9)[number % 3], number) <= TOLERANCE, formula


def test_it_has_every_format_and_every_one_is_tried() -> None:
    assert set(FORMATS) == set(ALL_FORMATS)
    assert {ggml_type for types in MIXED for ggml_type in types if ggml_type is not None} == set(FORMATS)
    for ggml_type, found in FORMATS.items():
        layout = ALL_FORMATS[ggml_type]
        assert (found.file.upper(), found.cols, found.size) == layout


def test_a_matrix_larger_than_a_binding_stands_in_parts() -> None:
    kernel = opened(binding_bytes=4096)
    for types in ((8, 12, 14), (None, 10, 1)):
        gate, up, down = types
        limit = 0.0 if gate is None else 0.5
        formula = Formula(0, 0, gate, up, down, limit=limit, biased=True, scaled=True)
        assert kernel.error_of(formula, 9) <= TOLERANCE
    small, slices, _ = sample(Formula(0, 0, 8, 12, 14), 1)
    parts = kernel.pack(small, slices[0]).resident.hidden
    assert len(parts) > 5 and sum(part.rows for part in parts) == small.expert_dim
    assert all(buffer.size <= 4096 for part in parts for buffer in part.buffers)


def test_devices_without_the_packed_product_compute_the_same() -> None:
    kernel = opened()
    before = kernel.error_of(Q8), kernel.error_of(Formula(0, 0, 12, 11, 14))
    kernel._gpu.packed_dot = not kernel._gpu.packed_dot
    kernel._gpu._pipelines.clear()
    assert (kernel.error_of(Q8), kernel.error_of(Formula(0, 0, 12, 11, 14))) == before


def call_of(kernel: WebGpuKernel) -> tuple[Any, ...]:
    formula, slices, x = sample(Q8, 3)
    experts = [kernel.pack(formula, data) for data in slices]
    picks, weights = np.array([0, 1, 2], np.uint16), np.ones(3, np.float32)
    counts = np.ones(3, np.uint16)
    return (formula, x.tobytes(), XEncoding.F32, 3, row_exponents(x), 0, 4, counts, experts, picks, weights)


def test_a_lost_device_says_so_and_is_taken_anew() -> None:
    kernel = opened()
    call = call_of(kernel)
    before = kernel.answer(*call)
    kernel._gpu.device.destroy()  # what a driver that was reset looks like
    with pytest.raises(DeviceLost, match="lost"):
        kernel.answer(*call)
    with pytest.raises(DeviceLost):
        kernel.pack(call[0], sample(Q8, 3)[1][0])
    kernel.reopen()
    with pytest.raises(BadCall):
        kernel.answer(*call)  # experts of the former device
    assert np.abs(kernel.answer(*call_of(kernel)) - before).max() == 0


def test_a_device_that_takes_too_long_is_given_up() -> None:
    kernel = opened()
    call, release = call_of(kernel), threading.Event()
    kernel._deadline_s = 0.05

    def hang() -> bytes:
        release.wait(10)
        return b""

    with pytest.raises(DeviceLost, match=r"no answer within 0\.05 s"):
        kernel._in_time(hang, ())
    with pytest.raises(DeviceLost):
        kernel.answer(*call)
    release.set()


def test_a_formula_is_compared_before_its_first_slice_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = opened()
    tried: list[Formula] = []

    def wrong(like: Formula, num_tokens: int = 7, seed: int = 1) -> float:
        tried.append(like)
        return 0.5 if like.activation == "relu" else 0.0

    monkeypatch.setattr(kernel, "error_of", wrong)
    formula, slices, _ = sample(Q8, 1)
    kernel.pack(formula, slices[0])
    kernel.pack(formula, slices[1])
    assert len(tried) == 1
    with pytest.raises(KernelFault, match="off by"):
        kernel.pack(replace(formula, activation="relu"), slices[0])


def test_bad_slices_and_picks_are_refused(kernel: WebGpuKernel) -> None:
    formula, slices, x = sample(Q8, 3)
    poisoned = bytearray(slices[0])
    poisoned[0:2] = b"\x00\x7c"
    with pytest.raises(NonFinite):
        kernel.pack(formula, poisoned)
    with pytest.raises(BadCall):
        kernel.pack(formula, slices[0][1:])
    call = list(call_of(kernel))
    call[9] = np.array([0, 1, 3], np.uint16)
    with pytest.raises(BadCall):
        kernel.answer(*call)
    with pytest.raises(NotSupported):
        kernel.pack(replace(formula, down_type=99), slices[0])


@pytest.mark.parametrize("ggml_type", [0, 8])
def test_what_is_not_finite_is_refused_though_a_clamp_would_hide_it(
    kernel: WebGpuKernel, ggml_type: int
) -> None:
    formula = Formula(
        64, 32, ggml_type, ggml_type, ggml_type, activation="swiglu_clamp", limit=0.5, biased=True
    )
    _, slices, _ = sample(formula, 1)
    plain = NativeKernel()
    x, rng = np.full((1, 64), 1e30, np.float32), np.random.default_rng(1)
    if ggml_type == 0:
        huge = np.full(formula.slice_bytes // 4, 3e38, np.float32).tobytes()
    else:
        blocks = rng.integers(100, 128, (3 * 64 * 32 // 32, 34), dtype=np.uint8)
        blocks[:, :2] = np.frombuffer(np.float16(60000).tobytes(), np.uint8)
        biases = np.full(formula.num_biases, 3e38, np.float32).tobytes()
        huge, x = blocks.tobytes() + biases, np.full((1, 64), 3e38, np.float32)
    one = np.zeros(1, np.uint16)
    call = (formula, x.tobytes(), XEncoding.F32, 1, row_exponents(x), 0, 100, one + 1)
    for each in (plain, kernel):
        with pytest.raises(NonFinite):
            each.answer(*call, [each.pack(formula, huge)], one, np.ones(1, np.float32))


def test_what_it_cannot_compute_is_named() -> None:
    formula = Formula(512, 256, 12, 12, 14)
    assert refusal(formula) is None
    assert refusal(replace(formula, hidden_dim=65536, expert_dim=8192)) is None
    assert refusal(replace(formula, gate_type=None, activation="gelu", biased=True)) is None
    assert "format 99" in str(refusal(replace(formula, down_type=99)))
    assert "activation swish" in str(refusal(replace(formula, activation="swish")))
    assert "one binding holds 256" in str(refusal(formula, 256))


def test_the_page_has_the_same_grids() -> None:
    """Written by `python -m backbone.experts.webgpu_formats`."""
    assert (KERNELS / "webgpu" / "grids.js").read_text() == grids_script()


def test_the_page_has_the_same_formats() -> None:
    script = f"import({json.dumps((KERNELS / 'webgpu' / 'formats.js').as_uri())}).then((m) => console.log("
    script += "JSON.stringify([m.FORMATS, m.ACTIVATIONS, m.TILE, m.BINDING_BYTES, m.READ_BEYOND])))"
    done = subprocess.run([node(), "-e", script], capture_output=True, text=True, check=True)
    from backbone.experts import webgpu_formats as ours

    formats, *constants = json.loads(done.stdout)
    assert constants == [list(ours.ACTIVATIONS), ours.TILE, ours.BINDING_BYTES, ours.READ_BEYOND]
    names = {"file": "file", "block": "block", "cols": "cols", "bytes": "size", "tame": "tame"}
    assert {int(key): value for key, value in formats.items()} == {
        ggml_type: json.loads(json.dumps({name: getattr(found, ours_) for name, ours_ in names.items()}))
        for ggml_type, found in FORMATS.items()
    }


@pytest.mark.parametrize(("block", "encoding"), [(32, XEncoding.Q8A32), (256, XEncoding.Q8A256)])
def test_rows_that_travel_encoded_are_the_rows_we_would_make(block: int, encoding: XEncoding) -> None:
    x = np.random.default_rng(1).standard_normal((3, 512), np.float32)
    ours = arranged(x, block)
    assert np.array_equal(decoded(encode_x(x, encoding), encoding, 3, 512, block), ours)
    assert np.array_equal(decoded(x.tobytes(), XEncoding.F32, 3, 512, block), ours)
    negative = np.float32(-1e-45).tobytes() + encode_x(x, encoding)[4:]
    with pytest.raises(BadCall):
        decoded(negative, encoding, 3, 512, block)


def test_many_workgroups_stand_in_several_rows() -> None:
    assert grid_of(10, 3) == (10, 1, 3)
    assert grid_of(70_000, 1) == (65535, 2, 1)
    assert spans_of(np.array([0, 0, 2, 3, 3], np.intp)) == [(0, 0, 2), (2, 2, 1), (3, 3, 2)]
