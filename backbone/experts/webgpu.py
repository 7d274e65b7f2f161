"""
The kernel of node-web/src/kernels/webgpu.wgsl on this machine's graphics device, through the package `wgpu`.

Experts stay on the device as the blocks of the GGUF. A dispatch is one submission: per expert a pass for
gate, up and silu and one for down, with the hidden activations rounded to int8 in between; then one read
back. What comes back is put on the integer grid here, so partials combine as any other's do. It is a class
of its own: see wasm/CONTRACT.md, "WebGPU".
A device that was lost or does not answer in time raises `DeviceLost`.
"""

import struct
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from backbone.experts.native import (
    BadCall,
    Buffer,
    Float32Array,
    GridOverflow,
    Int64Array,
    KernelFault,
    NativeKernel,
    NonFinite,
    NotSupported,
)
from backbone.experts.native import PackedExpert as NativeExpert
from backbone.experts.reference import quantise
from backbone.model.formula import FORMATS, Formula
from relay.assets import page_folder
from relay.wire.tensors import XEncoding, row_exponents

BUILD = "webgpu"
BLOCK_OF_X = {0: 0, 1: 0, 8: 32, 12: 256, 14: 256, 39: 32}  # 0: floats
SAFE_BINDING_BYTES = 128 << 20
TOLERANCE = 2.0**-10  # of the largest output of a row; CONTRACT.md "WebGPU" says what was measured
DEADLINE_S = 10.0
TILE = 4
WIDTH = 65535  # workgroups beside one another
_ABANDONED: list[object] = []  # what a device that did not answer may still be using


class DeviceLost(KernelFault):
    """The device is gone, or did not answer in time; its experts are gone with it."""

    def __init__(self, why: str) -> None:
        super().__init__(-11, f"the graphics device was lost: {why}")


class DeviceExpert:
    """One expert on the device: a buffer for each matrix."""

    def __init__(self, device: Any, buffers: tuple[Any, Any, Any], size_bytes: int) -> None:
        self.device = device
        self.buffers = buffers
        self.size_bytes = size_bytes


def refusal(formula: Formula, binding_bytes: int = SAFE_BINDING_BYTES) -> str | None:
    """Name the first thing this kernel cannot compute, or None."""
    for ggml_type in (formula.gate_type, formula.up_type, formula.down_type):
        if ggml_type not in BLOCK_OF_X:
            return "experts without a gate" if ggml_type is None else f"format {ggml_type}"
    if BLOCK_OF_X[formula.gate_type or 0] != BLOCK_OF_X[formula.up_type]:
        return "gate and up of formats that want x differently"
    if formula.activation != "silu" or formula.limit:
        return f"activation {formula.activation} with limit {formula.limit}"
    if formula.weight_position != "after" or formula.biased or formula.scaled:
        return "router weights before the experts, biases or scales"
    if max(formula.part_bytes()) + 8 > binding_bytes:
        return f"a matrix of {max(formula.part_bytes())} bytes: one binding holds {binding_bytes}"
    return None


def sections(text: str) -> dict[str, str]:
    """Cut the WGSL at its `//@ name` lines."""
    parts = text.split("\n//@ ")
    return {part.partition("\n")[0]: part.partition("\n")[2] for part in parts[1:]}


class Shaders:
    """The WGSL of each stage, put together from its pieces."""

    def __init__(self, packed_dot: bool, path: Path | None = None) -> None:
        file = path or page_folder() / "src" / "kernels" / "webgpu.wgsl"
        self._parts = sections(file.read_text())
        self._head = self._parts["head"] + self._parts["dot packed" if packed_dot else "dot plain"]

    def _matrix(self, ggml_type: int, name: str) -> str:
        kind = "floats" if BLOCK_OF_X[ggml_type] == 0 else "ints"
        text = self._parts[f"format {ggml_type}"] + self._parts[f"matrix {kind}"]
        return text.replace("$", name)

    def hidden(self, gate: int, up: int) -> str:
        return self._head + self._matrix(gate, "gate_") + self._matrix(up, "up_") + self._parts["hidden"]

    def down(self, ggml_type: int) -> str:
        return self._head + self._matrix(ggml_type, "down_") + self._parts["down"]

    @property
    def quantise(self) -> str:
        return self._parts["quantise"]


def arranged(x: Float32Array, block: int) -> npt.NDArray[np.uint32]:
    """Rows of f32 as the shaders read them: scales and ints, or floats, as words."""
    if block == 0:
        return np.ascontiguousarray(x).view(np.uint32)
    ints, scales = quantise(x, block)
    words = ints.astype(np.int8).reshape(len(x), -1).view(np.uint32)
    return np.hstack([np.ascontiguousarray(scales).view(np.uint32), words])


def decoded(rows: Buffer, encoding: int, num_tokens: int, dim: int, block: int) -> npt.NDArray[np.uint32]:
    """Rows of x as they travel, as the shaders read them."""
    data = np.frombuffer(rows, np.uint8).reshape(num_tokens, -1)
    if encoding in (XEncoding.F32, XEncoding.F16):
        x = np.ascontiguousarray(data).view("<f4" if encoding == XEncoding.F32 else "<f2").astype(np.float32)
        if x.shape[1] != dim:
            raise BadCall(-3, f"rows of {x.shape[1]} values")
        if not np.isfinite(x).all():
            raise NonFinite(-1, "x")
        return arranged(x, block)
    if block != (32 if encoding == XEncoding.Q8A32 else 256):
        raise BadCall(-7, "dispatch refused")
    size = dim // block * 4 + dim
    if data.shape[1] != -(-size // 4) * 4:
        raise BadCall(-3, f"rows of {data.shape[1]} bytes")
    words = np.ascontiguousarray(data[:, :size]).view(np.uint32)
    if not np.isfinite(words[:, : dim // block].view(np.float32)).all():
        raise NonFinite(-1, "x")
    if (data[:, dim // block * 4 : size].view(np.int8) == -128).any():
        raise BadCall(-8, "dispatch refused")
    return words


def on_grid(
    p: Float32Array,
    row_of: npt.NDArray[np.int64],
    exponents: npt.NDArray[np.int16],
    layer: int | npt.NDArray[np.int32],
    bits: int,
    rows: int,
) -> Int64Array:
    """Put outputs of picks on the grid and add them up by row."""
    if not np.isfinite(p).all():
        raise NonFinite(-1, "outputs")
    shift = bits - exponents.astype(np.int32)[row_of][:, None] - np.asarray(layer, np.int32)
    n: npt.NDArray[np.float64] = np.rint(np.ldexp(p.astype(np.float64), shift))
    if (np.abs(n) >= 2.0**51).any():
        raise GridOverflow(-2, "outputs")
    sums = np.zeros((rows, p.shape[1]), np.int64)
    np.add.at(sums, row_of, n.astype(np.int64))
    return sums


class WebGpuKernel:
    """
    Like NativeKernel, on a graphics device; one call at a time.

    Raises:
        KernelFault: there is no usable device, or no package `wgpu`.
    """

    build = BUILD

    def __init__(self, deadline_s: float = DEADLINE_S) -> None:
        self._native = NativeKernel()
        self._deadline_s = deadline_s
        self._lock = threading.Lock()
        self._open()

    def _open(self) -> None:
        try:
            import wgpu  # type: ignore[import-untyped]  # optional
        except ImportError as exc:
            raise KernelFault(-11, "pip install 'expertswarm[webgpu]' for --kernel webgpu") from exc
        try:
            adapter = wgpu.gpu.request_adapter_sync(power_preference="high-performance")
            if adapter is None:
                raise RuntimeError("no adapter")
            self._device = adapter.request_device_sync()
        except Exception as exc:  # whatever the driver says
            raise KernelFault(-11, f"no graphics device: {exc}") from exc
        self._usage = wgpu.BufferUsage
        self.device_name = str(adapter.info.get("device") or adapter.info.get("description"))
        self.lost: str | None = None
        self._pipelines: dict[tuple[object, ...], Any] = {}
        try:
            self._shaders = Shaders(packed_dot=True)
            self._pipeline("down", 8)
        except Exception:
            self._shaders = Shaders(packed_dot=False)
            self._pipelines.clear()

    def reopen(self) -> None:
        """Take a new device after a loss; what was packed before is gone."""
        with self._lock:
            self._open()

    def lose(self, why: str) -> None:
        """Give the device up. It is not destroyed: a thread may be waiting inside the driver."""
        self.lost = why

    def pack(self, formula: Formula, slice_bytes: Buffer) -> DeviceExpert:
        """
        Bring one slice to the device.

        Raises:
            NonFinite, BadCall, NotSupported: as the native kernel, which looks at the slice first.
        """
        self._require(formula)
        self._native.pack(formula, slice_bytes)  # refuses what is not finite, or of another length
        data = np.frombuffer(slice_bytes, np.uint8)
        cuts = np.cumsum(formula.part_bytes())
        with self._lock:
            self._alive()
            device = self._device
            gate, up, down = (
                self._buffer(np.pad(part, (0, 8 - part.size % 4)), self._usage.STORAGE)
                for part in np.split(data, cuts[:-1])
            )
        return DeviceExpert(device, (gate, up, down), data.size)

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
        if (
            len(counts) != num_tokens
            or int(counts.sum()) != len(pick_expert)
            or len(pick_expert) != len(pick_weight)
        ):
            raise BadCall(-3, f"{num_tokens} rows")
        if len(pick_expert) and int(pick_expert.max()) >= len(experts):
            raise BadCall(-6, "dispatch refused")
        if not np.isfinite(pick_weight).all():
            raise NonFinite(-1, "router weights")
        x = decoded(rows, encoding, num_tokens, formula.hidden_dim, BLOCK_OF_X[formula.up_type])
        row_of = np.repeat(np.arange(num_tokens), counts)
        order = np.argsort(pick_expert, kind="stable")
        p = np.zeros((0, formula.hidden_dim), np.float32)
        if len(order):
            with self._lock:
                self._alive()
                if any(expert.device is not self._device for expert in experts):
                    raise BadCall(-9, "dispatch refused")
                p = self._compute(formula, x, experts, pick_expert[order], pick_weight[order], row_of[order])
        bits = 31 if grid_kind == 0 else 15
        return on_grid(p, row_of[order], row_exponents, layer_exponents, bits, num_tokens)

    def encode_partial(self, sums: Int64Array, grid_kind: int) -> tuple[bytes, bytes]:
        return self._native.encode_partial(sums, grid_kind)

    def known_answer_test(self) -> None:
        """
        Compare with the native kernel, which knows its own answers, within the tolerance of the class.

        Raises:
            KernelFault: too far off; this device must not serve.
        """
        self._native.known_answer_test()
        for ggml_type in BLOCK_OF_X:
            error = self.error_of(ggml_type)
            if not error <= TOLERANCE:
                raise KernelFault(-11, f"{self.device_name}, format {ggml_type}: off by {error:.1e} of a row")

    def error_of(self, ggml_type: int, num_tokens: int = 7) -> float:
        """Give the largest difference from the native kernel, as a share of the row's largest output."""
        formula, slices, x = sample(ggml_type, num_tokens)
        exponents = row_exponents(x)
        picks = (np.arange(2 * num_tokens) * 7 // 3 % len(slices)).astype(np.uint16)
        weights = np.linspace(0.1, 1, len(picks), dtype=np.float32)
        counts = np.full(num_tokens, 2, np.uint16)
        call = (formula, x.tobytes(), XEncoding.F32, num_tokens, exponents, 0, 4, counts)
        ours = self.answer(*call, [self.pack(formula, s) for s in slices], picks, weights)
        held: list[NativeExpert] = [self._native.pack(formula, s) for s in slices]
        exact = self._native.answer(*call, held, picks, weights)
        scale = np.abs(exact).max(axis=1, keepdims=True)
        return float((np.abs(ours - exact) / scale).max())

    # --- the device

    def _require(self, formula: Formula) -> None:
        if (why := refusal(formula)) is not None:
            raise NotSupported(-5, f"the graphics kernel: {why}")

    def _alive(self) -> None:
        if self.lost is not None:
            raise DeviceLost(self.lost)

    def _buffer(self, data: npt.NDArray[Any], usage: int) -> Any:
        return self._device.create_buffer_with_data(data=np.ascontiguousarray(data), usage=usage)

    def _pipeline(self, *key: Any) -> Any:
        if (found := self._pipelines.get(key)) is None:
            match key:
                case ("hidden", gate, up):
                    code = self._shaders.hidden(gate, up)
                case ("down", ggml_type):
                    code = self._shaders.down(ggml_type)
                case _:
                    code = self._shaders.quantise
            module = self._device.create_shader_module(code=code)
            compute = {"module": module, "entry_point": "main"}
            found = self._pipelines[key] = self._device.create_compute_pipeline(
                layout="auto", compute=compute
            )
        return found

    def _compute(
        self,
        formula: Formula,
        x: npt.NDArray[np.uint32],
        experts: Sequence[DeviceExpert],
        pick_expert: npt.NDArray[np.uint16],
        pick_weight: Float32Array,
        row_of: npt.NDArray[np.int64],
    ) -> Float32Array:
        """Give the weighted outputs of picks that stand sorted by expert, [num_picks, hidden_dim]."""
        usage, device = self._usage, self._device
        picks, d, f = len(pick_expert), formula.hidden_dim, formula.expert_dim
        x_block, h_block = BLOCK_OF_X[formula.up_type], BLOCK_OF_X[formula.down_type]
        h_words = f // h_block + f // 4 if h_block else f
        storage = usage.STORAGE
        x_buffer, rows = self._buffer(x, storage), self._buffer(row_of.astype(np.uint32), storage)
        weights = self._buffer(pick_weight.astype(np.float32), storage)
        hidden = device.create_buffer(size=picks * f * 4, usage=storage)
        ints = device.create_buffer(size=picks * h_words * 4, usage=storage) if h_block else hidden
        out = device.create_buffer(size=picks * d * 4 + 4, usage=storage | usage.COPY_SRC)
        bad = self._buffer(np.zeros(1, np.uint32), storage | usage.COPY_SRC | usage.COPY_DST)
        staging = device.create_buffer(size=picks * d * 4 + 4, usage=usage.COPY_DST | usage.MAP_READ)
        encoder = device.create_command_encoder()

        def run(
            pipeline: Any, buffers: list[Any], params: tuple[int, ...], size: tuple[int, int, int]
        ) -> None:
            uniform = self._buffer(
                np.frombuffer(struct.pack(f"<{len(params)}I", *params), np.uint32), usage.UNIFORM
            )
            entries = [
                {"binding": i, "resource": {"buffer": buffer, "offset": 0, "size": buffer.size}}
                for i, buffer in enumerate([*buffers, uniform])
            ]
            group = device.create_bind_group(layout=pipeline.get_bind_group_layout(0), entries=entries)
            step = encoder.begin_compute_pass()
            step.set_pipeline(pipeline)
            step.set_bind_group(0, group)
            step.dispatch_workgroups(*size)
            step.end()

        first = np.searchsorted(pick_expert, np.arange(len(experts) + 1))
        spans = [
            (e, int(a), int(b - a)) for e, (a, b) in enumerate(zip(first, first[1:], strict=False)) if b > a
        ]
        stage = self._pipeline("hidden", formula.gate_type, formula.up_type)
        for e, at, n in spans:
            gate, up, _ = experts[e].buffers
            params = (f, d, x.shape[1], at, n, WIDTH, x_block, 0)
            run(stage, [gate, up, x_buffer, rows, hidden], params, grid_of(f, -(-n // TILE)))
        if h_block:
            blocks = picks * f // h_block
            run(
                self._pipeline("quantise"),
                [hidden, ints, bad],
                (f, h_block, blocks, WIDTH),
                grid_of(blocks, 1),
            )
        stage = self._pipeline("down", formula.down_type)
        for e, at, n in spans:
            params = (d, f, h_words, at, n, WIDTH, h_block, 0)
            run(stage, [experts[e].buffers[2], ints, weights, out], params, grid_of(d, -(-n // TILE)))
        encoder.copy_buffer_to_buffer(out, 0, staging, 0, picks * d * 4)
        encoder.copy_buffer_to_buffer(bad, 0, staging, picks * d * 4, 4)

        device.queue.submit([encoder.finish()])

        def finish() -> bytes:
            staging.map_sync(mode=1)
            return bytes(staging.read_mapped())

        used = (device, staging, x_buffer, rows, weights, hidden, ints, out, bad, experts, encoder)
        data = np.frombuffer(self._in_time(finish, used), np.float32)
        if data[-1:].view(np.uint32)[0]:
            raise NonFinite(-1, "hidden activations")
        return data[:-1].reshape(picks, d)

    def _in_time(self, work: Callable[[], bytes], used: tuple[object, ...]) -> bytes:
        """Run in a thread that we stop waiting for at the deadline: a driver may hang."""
        future: Future[bytes] = Future()

        def body() -> None:
            try:
                future.set_result(work())
            except BaseException as exc:
                future.set_exception(exc)

        threading.Thread(target=body, name="webgpu", daemon=True).start()
        try:
            return future.result(self._deadline_s)
        except FutureTimeout:
            _ABANDONED.append((used, self._pipelines))  # the driver may still write there
            self.lose(f"no answer within {self._deadline_s:g} s")
        except Exception as exc:  # the driver's own words
            self.lose(str(exc)[:300])
        assert self.lost is not None
        raise DeviceLost(self.lost)


def grid_of(groups: int, depth: int) -> tuple[int, int, int]:
    """Lay workgroups out: at most WIDTH beside one another."""
    return min(groups, WIDTH), -(-groups // WIDTH), depth


def sample(ggml_type: int, num_tokens: int) -> tuple[Formula, list[bytes], Float32Array]:
    """Give a small expert layer of one format with tame scales, and rows for it."""
    rng = np.random.default_rng(ggml_type)
    dims = {0: 64, 1: 64, 8: 96, 39: 96}
    d = dims.get(ggml_type, 512)
    f = {64: 36, 96: 64}.get(d, 256)
    formula = Formula(d, f, ggml_type, ggml_type, ggml_type)
    slices = []
    for _ in range(3):
        count = 3 * d * f
        if ggml_type in (0, 1):
            floats = rng.standard_normal(count, np.float32) / 8
            slices.append(floats.astype(np.float32 if ggml_type == 0 else np.float16).tobytes())
            continue
        layout = FORMATS[ggml_type]
        blocks = rng.integers(0, 256, (count // layout.block, layout.block_bytes), np.uint8)
        if ggml_type == 39:
            blocks[:, 0] = 120 + blocks[:, 0] % 8
        for at in {8: (0,), 12: (0, 2), 14: (208,)}.get(ggml_type, ()):
            blocks[:, at : at + 2] = np.frombuffer(np.float16(2.0**-10).tobytes(), np.uint8)
        slices.append(blocks.tobytes())
    return formula, slices, rng.standard_normal((num_tokens, d), np.float32)
