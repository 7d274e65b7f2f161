"""
One submission to a graphics device: shaders put together, buffers, passes, one read back.

Mirrors `Job` of node-web/src/kernels/webgpu.js and its shaders.js. Everything here talks to the driver and
may block or raise whatever the driver raises; webgpu.py bounds the time and translates.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from backbone.experts.native import Float32Array
from backbone.experts.webgpu_formats import (
    ACTIVATIONS,
    FORMATS,
    READ_BEYOND,
    TILE,
    Side,
    grid_bytes,
    matrices,
    rows_per_part,
    uses_grid,
)
from backbone.experts.webgpu_rows import Words
from backbone.model.formula import Formula
from relay.assets import page_folder

WIDTH = 65535  # workgroups beside one another
# What every device has (WebGPU, "limits"); asked for by name, so that nothing here needs more.
LIMITS = {
    "max-storage-buffers-per-shader-stage": 8,
    "max-storage-buffer-binding-size": 128 << 20,
    "max-buffer-size": 256 << 20,
    "max-compute-workgroup-storage-size": 16384,
    "max-compute-invocations-per-workgroup": 256,
    "max-compute-workgroup-size-x": 256,
    "max-compute-workgroups-per-dimension": 65535,
}


class Shaders:
    """The WGSL of each stage, put together from its files; `$` in them is the name of the matrix."""

    def __init__(self, packed_dot: bool, folder: Path | None = None) -> None:
        self._folder = folder or page_folder() / "src" / "kernels" / "webgpu"
        self._dot = "dot_packed" if packed_dot else "dot_plain"

    def _text(self, *names: str) -> str:
        return "\n".join((self._folder / f"{name}.wgsl").read_text() for name in names)

    def _matrix(self, ggml_type: int, name: str) -> str:
        layout = FORMATS[ggml_type]
        return self._text(f"formats/{layout.file}", "ints" if layout.block else "floats").replace("$", name)

    def hidden(self, gate: int | None, up: int) -> str:
        gated = self._text("ungated") if gate is None else self._matrix(gate, "gate_") + self._text("gated")
        head = self._head(up, gate) + self._matrix(up, "up_")
        return head + gated + self._text("activations", "hidden")

    def down(self, ggml_type: int) -> str:
        return self._head(ggml_type) + self._matrix(ggml_type, "down_") + self._text("down")

    def _head(self, *types: int | None) -> str:
        return self._text("head", self._dot, *(["grids"] if any(map(uses_grid, types)) else []))

    def quantise(self) -> str:
        return self._text("quantise")


@dataclass(frozen=True, slots=True)
class Part:
    """Some rows of gate (unless there is none) and up, or of down; each buffer fits a binding."""

    first: int
    rows: int
    buffers: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Resident:
    """An expert on the device; `scales` of gate, up, down."""

    hidden: tuple[Part, ...]
    down: tuple[Part, ...]
    biases: Any
    scales: tuple[float, float, float]


@dataclass(frozen=True, slots=True, eq=False)
class Inputs:
    """
    Picks that stand sorted by expert.

    Shapes: up_x, gate_x [num_tokens, words of a row]; expert_of, row_of, weights [num_picks].
    """

    up_x: Words
    gate_x: Words
    expert_of: npt.NDArray[np.intp]
    row_of: npt.NDArray[np.intp]
    weights: Float32Array


class GpuDevice:
    """One device and its pipelines, made when first needed."""

    def __init__(self, wgpu: Any) -> None:
        adapter = wgpu.gpu.request_adapter_sync(power_preference="high-performance")
        if adapter is None:
            raise RuntimeError("no adapter")
        self.device = adapter.request_device_sync(required_limits=LIMITS)
        self.usage = wgpu.BufferUsage
        self.name = str(adapter.info.get("device") or adapter.info.get("description"))
        self._pipelines: dict[tuple[object, ...], Any] = {}
        self._grids: Any = None
        self.packed_dot = str(adapter.info.get("vendor")).lower() != "apple"  # Metal only imitates it
        try:
            self.pipeline("down", 8)
        except Exception:  # this compiler does not have it
            self.packed_dot = False

    @property
    def grids(self) -> Any:
        """The grids of the IQ formats, brought when first needed."""
        if self._grids is None:
            self._grids = self.buffer(grid_bytes(), self.usage.STORAGE)
        return self._grids

    def buffer(self, data: npt.NDArray[Any], usage: int, beyond: int = 0) -> Any:
        raw = np.ascontiguousarray(data).view(np.uint8).reshape(-1)
        size = max(16, -(-(raw.size + beyond) // 4) * 4)
        return self.device.create_buffer_with_data(data=np.pad(raw, (0, size - raw.size)), usage=usage)

    def bring(self, formula: Formula, data: npt.NDArray[np.uint8], binding_bytes: int) -> Resident:
        """Put a slice on the device, in parts that fit a binding."""
        sides = matrices(formula)
        cuts = np.cumsum([side.rows * side.row_bytes for side in sides])
        *blocks, extras = np.split(data, cuts)
        scales = np.ones(3, np.float32)
        if formula.scaled:
            scales[3 - len(sides) :] = extras[-4 * len(sides) :].view("<f4")
        gate, up, down = (float(scale) for scale in scales)
        return Resident(
            self._parts(sides[:-1], blocks[:-1], binding_bytes),
            self._parts(sides[-1:], blocks[-1:], binding_bytes),
            self.buffer(extras, self.usage.STORAGE, 4),
            (gate, up, down),
        )

    def _parts(
        self, sides: list[Side], blocks: list[npt.NDArray[np.uint8]], binding_bytes: int
    ) -> tuple[Part, ...]:
        step, total = rows_per_part(sides, binding_bytes), sides[0].rows
        return tuple(
            Part(
                first,
                min(step, total - first),
                tuple(
                    self.buffer(
                        raw[first * side.row_bytes : (first + step) * side.row_bytes],
                        self.usage.STORAGE,
                        READ_BEYOND,
                    )
                    for side, raw in zip(sides, blocks, strict=True)
                ),
            )
            for first in range(0, total, step)
        )

    def pipeline(self, *key: Any) -> Any:
        if (found := self._pipelines.get(key)) is None:
            shaders = Shaders(self.packed_dot)
            match key:
                case ("hidden", gate, up):
                    code = shaders.hidden(gate, up)
                case ("down", ggml_type):
                    code = shaders.down(ggml_type)
                case _:
                    code = shaders.quantise()
            module = self.device.create_shader_module(code=code)
            compute = {"module": module, "entry_point": "main"}
            found = self.device.create_compute_pipeline(layout="auto", compute=compute)
            self._pipelines[key] = found
        return found

    def compute(
        self, formula: Formula, inputs: Inputs, experts: Sequence[Resident]
    ) -> tuple[Float32Array, bool]:
        """Give the weighted outputs, [num_picks, hidden_dim], and whether something was not finite."""
        job = _Job(self, formula, inputs)
        staging = job.submit(experts)
        staging.map_sync(mode=1)
        data = np.frombuffer(bytes(staging.read_mapped()), np.float32)
        return data[:-1].reshape(-1, formula.hidden_dim), bool(data[-1:].view(np.uint32)[0])


class _Job:
    """The buffers and passes of one submission."""

    def __init__(self, gpu: GpuDevice, formula: Formula, inputs: Inputs) -> None:
        self._gpu, self._formula, self._inputs = gpu, formula, inputs
        self._encoder = gpu.device.create_command_encoder()

    def _pass(self, pipeline: Any, buffers: list[Any], params: bytes, groups: int, depth: int = 1) -> None:
        """Run one stage; the uniform goes to the place of None, nothing to that of an ellipsis."""
        uniform = self._gpu.buffer(np.frombuffer(params, np.uint8), self._gpu.usage.UNIFORM)
        entries = [
            {"binding": i, "resource": {"buffer": buffer, "offset": 0, "size": buffer.size}}
            for i, buffer in enumerate(uniform if each is None else each for each in buffers)
            if buffer is not ...
        ]
        group = self._gpu.device.create_bind_group(layout=pipeline.get_bind_group_layout(0), entries=entries)
        step = self._encoder.begin_compute_pass()
        step.set_pipeline(pipeline)
        step.set_bind_group(0, group)
        step.dispatch_workgroups(*grid_of(groups, depth))
        step.end()

    def submit(self, experts: Sequence[Resident]) -> Any:
        """Encode and submit everything; gives the buffer to map."""
        gpu, formula, inputs = self._gpu, self._formula, self._inputs
        usage, device = gpu.usage, gpu.device
        picks, d, f = len(inputs.row_of), formula.hidden_dim, formula.expert_dim
        gate, up, down = formula.gate_type, formula.up_type, formula.down_type
        h_block = FORMATS[down].block
        h_words = f // h_block + f // 4 if h_block else f
        storage = usage.STORAGE
        up_x = gpu.buffer(inputs.up_x, storage)
        gate_x = up_x if inputs.gate_x is inputs.up_x else gpu.buffer(inputs.gate_x, storage)
        rows, weights = inputs.row_of.astype(np.uint32), inputs.weights.astype(np.float32).view(np.uint32)
        picks_of = gpu.buffer(np.stack([rows, weights], axis=1), storage)
        hidden = device.create_buffer(size=picks * f * 4, usage=storage)
        ints = device.create_buffer(size=picks * h_words * 4, usage=storage)
        out = device.create_buffer(size=picks * d * 4, usage=storage | usage.COPY_SRC)
        bad = gpu.buffer(np.zeros(1, np.uint32), storage | usage.COPY_SRC)
        staging = device.create_buffer(size=picks * d * 4 + 4, usage=usage.COPY_DST | usage.MAP_READ)

        extras = (2 if formula.scaled else 0) | (4 if formula.biased else 0)
        before = formula.weight_position == "before"
        up_biases = 0 if gate is None else f
        gate_words = (0, 0) if gate is None else (inputs.gate_x.shape[1], FORMATS[gate].block)
        alpha, limit = np.float32(formula.alpha), np.float32(formula.limit)
        bounds = (alpha, limit, *(np.float32(1) / bound if bound else 0 for bound in (alpha, limit)))
        stage = gpu.pipeline("hidden", gate, up)
        for e, at, n in spans_of(inputs.expert_of):
            expert = experts[e]
            for part in expert.hidden:
                params = params_of(
                    (part.rows, part.first, f, d, inputs.up_x.shape[1], FORMATS[up].block, *gate_words, at, n,
                     WIDTH, extras | before, ACTIVATIONS.index(formula.activation), up_biases),
                    (expert.scales[1], expert.scales[0], *bounds),
                )  # fmt: skip
                gated = [..., ...] if gate is None else [part.buffers[0], gate_x]
                grids = gpu.grids if uses_grid(gate) or uses_grid(up) else ...
                buffers = [part.buffers[-1], up_x, picks_of, expert.biases, hidden, None, *gated, grids]
                self._pass(stage, buffers, params, part.rows, -(-n // TILE))
        blocks = picks * (f // h_block if h_block else 1)
        params = struct.pack("<4I", f, h_block, blocks, WIDTH)
        self._pass(gpu.pipeline("quantise"), [hidden, ints, bad, None], params, blocks)
        stage = gpu.pipeline("down", down)
        for e, at, n in spans_of(inputs.expert_of):
            expert = experts[e]
            for part in expert.down:
                params = params_of(
                    (part.rows, part.first, d, f, h_words, h_block, 0, 0, at, n, WIDTH,
                     extras | (0 if before else 8), 0, up_biases + f),
                    (expert.scales[2], 0, 0, 0, 0, 0),
                )  # fmt: skip
                grids = gpu.grids if uses_grid(down) else ...
                buffers = [part.buffers[0], ints, picks_of, expert.biases, out, None, ..., ..., grids]
                self._pass(stage, buffers, params, part.rows, -(-n // TILE))
        self._encoder.copy_buffer_to_buffer(out, 0, staging, 0, picks * d * 4)
        self._encoder.copy_buffer_to_buffer(bad, 0, staging, picks * d * 4, 4)
        device.queue.submit([self._encoder.finish()])
        return staging


def params_of(integers: tuple[int, ...], floats: tuple[Any, ...]) -> bytes:
    """The uniform `Params` of head.wgsl."""
    return struct.pack("<14I6f", *integers, *floats)


def spans_of(expert_of: npt.NDArray[np.intp]) -> list[tuple[int, int, int]]:
    """Runs of equal experts: expert, first pick, number of picks."""
    starts = np.flatnonzero(np.diff(expert_of, prepend=-1))
    ends = [*starts[1:], len(expert_of)]
    return [(int(expert_of[a]), int(a), int(b - a)) for a, b in zip(starts, ends, strict=True)]


def grid_of(groups: int, depth: int) -> tuple[int, int, int]:
    """Lay workgroups out: at most WIDTH beside one another."""
    return min(groups, WIDTH), -(-groups // WIDTH), depth
