"""
The kernel on this machine's graphics device, through the package `wgpu`; mirrors the page's webgpu.js.

Experts stay on the device as the blocks of the GGUF, in parts that fit a binding. A dispatch is one
submission (more when its picks are many): per expert gate, up and the activation, then down, with the hidden
activations rounded to int8 in between; then one read back. What comes back is put on the integer grid here,
so partials combine as any other's do. It is a class of its own: see wasm/CONTRACT.md, "WebGPU".
A device that was lost or does not answer in time raises `DeviceLost`; `reopen` takes another.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout

import numpy as np
import numpy.typing as npt

from backbone.experts.native import (
    BadCall,
    Buffer,
    Float32Array,
    Int64Array,
    KernelFault,
    NativeKernel,
    NonFinite,
    NotSupported,
)
from backbone.experts.webgpu_formats import BINDING_BYTES, FORMATS, TILE, refusal, sample, worst_of
from backbone.experts.webgpu_job import GpuDevice, Inputs, Resident
from backbone.experts.webgpu_rows import decoded, on_grid
from backbone.model.formula import Formula
from relay.wire.tensors import XEncoding, row_exponents

__all__ = ["TOLERANCE", "DeviceExpert", "DeviceLost", "WebGpuKernel", "refusal"]

BUILD = "webgpu"
TOLERANCE = 2.0**-8  # of the largest output of a row; CONTRACT.md "WebGPU" says what was measured
DEADLINE_S = 10.0
OPEN_DEADLINE_S = 60.0  # a driver may compile a while before its first answer
CORE = (1, 8, 12)  # formats every test computes: floats, blocks of 32, blocks of 256
SAMPLE_EXPONENT = -8  # of the grid on which samples are compared: fine, and far from overflow
_ABANDONED: list[object] = []  # what a device that did not answer may still be using


class DeviceLost(KernelFault):
    """The device is gone, or did not answer in time; its experts are gone with it."""

    def __init__(self, why: str) -> None:
        super().__init__(-11, f"the graphics device was lost: {why}")


class DeviceExpert:
    """One expert on a device."""

    def __init__(self, gpu: GpuDevice, resident: Resident, size_bytes: int) -> None:
        self.gpu = gpu
        self.resident = resident
        self.size_bytes = size_bytes


class WebGpuKernel:
    """
    Like NativeKernel, on a graphics device; one call at a time.

    binding_bytes: the largest part of a matrix; smaller ones are for tests.

    Raises:
        KernelFault: there is no usable device, or no package `wgpu`.
    """

    build = BUILD

    def __init__(self, deadline_s: float = DEADLINE_S, binding_bytes: int = BINDING_BYTES) -> None:
        self._native = NativeKernel()
        self._deadline_s = deadline_s
        self._binding_bytes = binding_bytes
        self._lock = threading.RLock()
        self._wrong: KernelFault | None = None
        self._open()

    def _open(self) -> None:
        try:
            import wgpu  # type: ignore[import-untyped]  # optional
        except ImportError as exc:
            raise KernelFault(-11, "pip install 'expertswarm[webgpu]' for --kernel webgpu") from exc
        self.lost: str | None = None
        self._proven: set[Formula] = set()  # with what is small about them; on this device
        try:
            self._gpu = self._in_time(lambda: GpuDevice(wgpu), (), OPEN_DEADLINE_S)
        except DeviceLost as exc:  # whatever the driver says
            raise KernelFault(-11, f"no graphics device: {self.lost}") from exc
        self.device_name = self._gpu.name

    def reopen(self) -> None:
        """Take a new device after a loss; what was packed before is gone."""
        with self._lock:
            self._open()

    def lose(self, why: str) -> None:
        """Give the device up. It is not destroyed: a thread may be waiting inside the driver."""
        self.lost = why

    def pack(self, formula: Formula, slice_bytes: Buffer) -> DeviceExpert:
        """
        Bring one slice to the device. The first slice of a formula has its shaders compared first.

        Raises:
            NonFinite, BadCall, NotSupported: as the native kernel, which looks at the slice first.
            DeviceLost: it must be reopened.
            KernelFault: this device computes this formula wrong.
        """
        self._require(formula)
        self._native.pack(formula, slice_bytes)  # refuses what is not finite, or of another length
        with self._lock:
            self._prove(formula)
            return self._bring(formula, slice_bytes)

    def holds(self, expert: object) -> bool:
        """Tell whether an expert stands on the device of now."""
        return self.lost is None and isinstance(expert, DeviceExpert) and expert.gpu is self._gpu

    def _bring(self, formula: Formula, slice_bytes: Buffer) -> DeviceExpert:
        data = np.frombuffer(slice_bytes, np.uint8)
        with self._lock:
            self._alive()
            gpu = self._gpu
            resident = self._in_time(lambda: gpu.bring(formula, data, self._binding_bytes), (gpu, data))
        return DeviceExpert(gpu, resident, data.size)

    def answer(
        self,
        formula: Formula,
        rows: Buffer,
        encoding: int,
        num_tokens: int,
        row_exponents: npt.NDArray[np.int16],
        grid_kind: int,
        layer_exponents: int | npt.NDArray[np.int32],
        counts: npt.NDArray[np.uint16],
        experts: Sequence[DeviceExpert],
        pick_expert: npt.NDArray[np.uint16],
        pick_weight: Float32Array,
    ) -> Int64Array:
        """
        Compute a whole dispatch; arguments and result as NativeKernel.answer.

        Raises:
            DeviceLost: it must be reopened and the experts packed again.
        """
        self._require(formula)
        picks = len(pick_expert)
        if len(counts) != num_tokens or int(counts.sum()) != picks or picks != len(pick_weight):
            raise BadCall(-3, f"{num_tokens} rows")
        if picks and int(pick_expert.max()) >= len(experts):
            raise BadCall(-6, "dispatch refused")
        if not np.isfinite(pick_weight).all():
            raise NonFinite(-1, "router weights")
        blocks = [FORMATS[t].block for t in (formula.up_type, formula.gate_type) if t is not None]
        xs = [
            decoded(rows, encoding, num_tokens, formula.hidden_dim, block) for block in dict.fromkeys(blocks)
        ]
        row_of = np.repeat(np.arange(num_tokens), counts)
        order = np.argsort(pick_expert, kind="stable")
        bits = 31 if grid_kind == 0 else 15
        sums = np.zeros((num_tokens, formula.hidden_dim), np.int64)
        wide = max(formula.hidden_dim, formula.expert_dim * 5 // 4)
        most = max(1, self._binding_bytes // (4 * wide))  # picks whose outputs fit a binding
        for first in range(0, picks, most):
            some = order[first : first + most]
            inputs = Inputs(
                xs[0], xs[-1], pick_expert[some].astype(np.intp), row_of[some],
                pick_weight[some].astype(np.float32),
            )  # fmt: skip
            with self._lock:
                self._alive()
                if not all(self.holds(expert) for expert in experts):
                    raise BadCall(-9, "dispatch refused")
                p = self._compute(formula, inputs, experts)
            sums += on_grid(p, row_of[some], row_exponents, layer_exponents, bits, num_tokens)
        return sums

    def _compute(self, formula: Formula, inputs: Inputs, experts: Sequence[DeviceExpert]) -> Float32Array:
        gpu, residents = self._gpu, [expert.resident for expert in experts]
        used = (gpu, inputs, residents)
        p, bad = self._in_time(lambda: gpu.compute(formula, inputs, residents), used)
        if bad:
            raise NonFinite(-1, "products or hidden activations")
        return p

    def encode_partial(self, sums: Int64Array, grid_kind: int) -> tuple[bytes, bytes]:
        return self._native.encode_partial(sums, grid_kind)

    def known_answer_test(self) -> None:
        """
        Compare with the native kernel, which knows its own answers, within the tolerance of the class.

        Other formats and formulas are compared when they are first packed.

        Raises:
            KernelFault: too far off; this device must not serve.
        """
        self._native.known_answer_test()
        if self._wrong is not None:
            raise self._wrong
        with self._lock:
            self._proven.clear()
            for ggml_type in CORE:
                self._prove(Formula(0, 0, ggml_type, ggml_type, ggml_type))

    def _prove(self, formula: Formula) -> None:
        """Compare the shaders of a formula, once per device."""
        like, _, _ = sample(formula, 1)
        if like in self._proven:
            return
        error = self.error_of(like, TILE + 1)
        if not error <= TOLERANCE:
            types = (like.gate_type, like.up_type, like.down_type)
            what = f"{self.device_name}, {like.activation} in formats {types}: off by {error:.1e} of a row"
            self._wrong = KernelFault(-11, what)
            raise self._wrong
        self._proven.add(like)

    def error_of(self, like: Formula, num_tokens: int = 7, seed: int = 1) -> float:
        """Give the largest difference from the native kernel on a small expert, as a share of the row's
        largest output."""
        formula, slices, x = sample(like, num_tokens, seed)
        exponents = row_exponents(x)
        picks = (np.arange(2 * num_tokens) * 7 // 3 % len(slices)).astype(np.uint16)
        weights = np.linspace(0.1, 1, len(picks), dtype=np.float32)
        counts = np.full(num_tokens, 2, np.uint16)
        call = (formula, x.tobytes(), XEncoding.F32, num_tokens, exponents, 0, SAMPLE_EXPONENT, counts)
        held = [self._native.pack(formula, data) for data in slices]
        exact = self._native.answer(*call, held, picks, weights)
        ours = self.answer(*call, [self._bring(formula, data) for data in slices], picks, weights)
        return worst_of(ours, exact)

    # --- the device

    def _require(self, formula: Formula) -> None:
        if (why := refusal(formula, self._binding_bytes)) is not None:
            raise NotSupported(-5, f"the graphics kernel: {why}")

    def _alive(self) -> None:
        if self.lost is not None:
            raise DeviceLost(self.lost)

    def _in_time[T](self, work: Callable[[], T], used: tuple[object, ...], deadline_s: float = 0.0) -> T:
        """Run in a thread that we stop waiting for at the deadline: a driver may hang."""
        future: Future[T] = Future()

        def body() -> None:
            try:
                future.set_result(work())
            except BaseException as exc:
                future.set_exception(exc)

        threading.Thread(target=body, name="webgpu", daemon=True).start()
        deadline_s = deadline_s or self._deadline_s
        try:
            return future.result(deadline_s)
        except FutureTimeout:
            _ABANDONED.append(used)  # the driver may still write there
            self.lose(f"no answer within {deadline_s:g} s")
        except Exception as exc:  # the driver's own words
            self.lose(str(exc)[:300])
        assert self.lost is not None
        raise DeviceLost(self.lost)
