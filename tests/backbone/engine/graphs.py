"""
Put experts together with ggml's own functions and run them through its scheduler, device beside CPU.

A program of its own (`python -m tests.backbone.engine.graphs CASE SOCKET`), because it loads the library. It
prints what the device saw, what it refused, the number of splits and the output rows as JSON.
"""

import ctypes
import json
import math
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from backbone.engine.device import Device
from backbone.engine.supervisor import device_library
from backbone.errors import EngineRefused
from backbone.gate.llama_api import library_path

D, F, E, K, T = 32, 64, 6, 3, 4  # hidden_dim, expert_dim, num_experts, top_k, num_tokens
F32, I32 = 0, 26
WEIGHTS, COMPUTE = 1, 2

P = ctypes.c_void_p
I64 = ctypes.c_int64
SIZE = ctypes.c_size_t


class _InitParams(ctypes.Structure):
    _fields_ = [("mem_size", SIZE), ("mem_buffer", P), ("no_alloc", ctypes.c_bool)]


class Ggml:
    """The functions of ggml by name; tensors are addresses."""

    def __init__(self) -> None:
        self._c = ctypes.CDLL(str(library_path()))
        self._c.ggml_init.restype = P
        self._c.ggml_init.argtypes = [_InitParams]
        self.context = self._c.ggml_init(_InitParams(1 << 22, None, True))

    def call(self, name: str, *arguments: Any, result: Any = P) -> Any:
        function = getattr(self._c, name)
        function.restype = result
        return function(*arguments)

    def op(self, name: str, *arguments: Any) -> Any:
        """Make a tensor: addresses stay addresses, integers become int64, floats float."""
        values = [
            a if isinstance(a, P | I64 | SIZE | ctypes.c_int) or a is None else _argument(a)
            for a in arguments
        ]
        return P(self.call(f"ggml_{name}", P(self.context), *values))

    def new(self, kind: int, *dims: int, name: str = "") -> Any:
        ne = [*dims, *[1] * (3 - len(dims))]
        tensor = self.op("new_tensor_3d", ctypes.c_int(kind), *map(I64, ne))
        if name:
            self.call("ggml_set_name", tensor, name.encode())
        return tensor


def _argument(value: Any) -> Any:
    return ctypes.c_float(value) if isinstance(value, float) else I64(value)


class Layer:
    """The tensors around and of the experts of one layer."""

    def __init__(self, g: Ggml, top_k: int = K, number: int = 5) -> None:
        self.g = g
        self.top_k = top_k
        self.x = g.new(F32, D, 1, T)
        self.sorted_ids = g.new(I32, E, T)
        # the router's choice is a view of the sorted experts: its rows are E apart
        self.ids = g.op("view_2d", self.sorted_ids, I64(top_k), I64(T), SIZE(4 * E), SIZE(0))
        self.router = g.new(F32, 1, top_k, T)
        names = {"gate": (D, F), "up": (D, F), "down": (F, D), "gate_up": (D, 2 * F)}
        self.matrices = {
            part: g.new(F32, *dims, E, name=f"blk.{number}.ffn_{part}_exps.weight")
            for part, dims in names.items()
        }
        self.biases = {
            part: g.new(F32, dims[1], E, name=f"blk.{number}.ffn_{part}_exps.bias")
            for part, dims in names.items()
        }

        self.scales = {
            part: g.new(F32, E, name=f"blk.{number}.ffn_{part}_exps.scale") for part in ("gate", "up", "down")
        }

    def product(self, part: str, x: Any, bias: bool = False, scale: str | None = None) -> Any:
        y = self.g.op("mul_mat_id", self.matrices[part], x, self.ids)
        if scale is not None:
            y = self.scaled(y, scale)
        return self.g.op("add_id", y, self.biases[part], self.ids) if bias else y

    def scaled(self, y: Any, part: str) -> Any:
        """Times the scale of each chosen expert, as build_lora_mm_id() does."""
        numbers = self.g.op("reshape_3d", self.scales[part], I64(1), I64(E), I64(1))
        repeated = self.g.op("repeat_4d", numbers, I64(1), I64(E), I64(T), I64(1))
        return self.g.op("mul", y, self.g.op("get_rows", repeated, self.ids))

    def pick(self, y: Any, index: int) -> Any:
        return self.g.op("view_2d", y, I64(D), I64(T), SIZE(4 * D * self.top_k), SIZE(4 * D * index))

    def total(
        self, hidden: Any, bias: bool = False, picks: int | None = None, scale: str | None = None
    ) -> Any:
        y = self.g.op("mul", self.product("down", hidden, bias, scale), self.router)
        rows = [self.pick(y, i) for i in range(picks or self.top_k)]
        out = rows[0]
        for row in rows[1:]:
            out = self.g.op("add", out, row)
        return out if len(rows) > 1 else self.g.op("cont", out)


def swiglu(layer: Layer, bias: bool = False) -> Any:
    gate, up = layer.product("gate", layer.x, bias), layer.product("up", layer.x, bias)
    return layer.g.op("swiglu_split", gate, up)


def _plain(g: Ggml) -> Any:
    layer = Layer(g)
    return layer, layer.total(swiglu(layer))


def _top_1(g: Ggml) -> Any:
    layer = Layer(g, top_k=1)
    return layer, layer.total(swiglu(layer))


def _biased(g: Ggml) -> Any:
    layer = Layer(g)
    return layer, layer.total(swiglu(layer, bias=True), bias=True)


def _silu_and_mul(g: Ggml) -> Any:
    layer = Layer(g)
    gate = g.op("silu", layer.product("gate", layer.x))
    return layer, layer.total(g.op("mul", gate, layer.product("up", layer.x)))


def _merged(g: Ggml) -> Any:
    layer = Layer(g)
    both = layer.product("gate_up", layer.x)
    return layer, layer.total(g.op("swiglu", both))


def _merged_views(g: Ggml) -> Any:
    layer = Layer(g)
    both = layer.product("gate_up", layer.x)
    rows = (SIZE(8 * F), SIZE(8 * F * K))
    gate, up = (g.op("view_3d", both, I64(F), I64(K), I64(T), *rows, SIZE(offset)) for offset in (0, 4 * F))
    return layer, layer.total(g.op("swiglu_split", gate, up))


def _relu_squared(g: Ggml) -> Any:
    layer = Layer(g)
    return layer, layer.total(g.op("sqr", g.op("relu", layer.product("up", layer.x))))


def _gelu(g: Ggml) -> Any:
    layer = Layer(g)
    return layer, layer.total(
        g.op("geglu_split", layer.product("gate", layer.x), layer.product("up", layer.x))
    )


def _oai(g: Ggml) -> Any:
    layer = Layer(g)
    gate, up = layer.product("gate", layer.x), layer.product("up", layer.x)
    return layer, layer.total(g.op("swiglu_oai", gate, up, 1.702, 7.0))


def _weight_before(g: Ggml, top_k: int = K, up_too: bool = True) -> Any:
    layer = Layer(g, top_k)
    weighted = g.op("mul", g.op("repeat_4d", layer.x, I64(D), I64(top_k), I64(T), I64(1)), layer.router)
    gate, up = layer.product("gate", weighted), layer.product("up", weighted if up_too else layer.x)
    y = layer.product("down", g.op("swiglu_split", gate, up))
    out = layer.pick(y, 0)
    for i in range(1, top_k):
        out = g.op("add", out, layer.pick(y, i))
    return layer, out if top_k > 1 else g.op("cont", out)


def _weight_before_top_1(g: Ggml) -> Any:
    return _weight_before(g, top_k=1)


def _weight_before_one_product(g: Ggml) -> Any:
    return _weight_before(g, up_too=False)


def _scaled(g: Ggml) -> Any:
    layer = Layer(g)
    gate, up = (layer.product(part, layer.x, bias=True, scale=part) for part in ("gate", "up"))
    return layer, layer.total(g.op("swiglu_split", gate, up), bias=True, scale="down")


def _merged_scaled(g: Ggml) -> Any:
    layer = Layer(g)
    both = layer.product("gate_up", layer.x, scale="up")
    return layer, layer.total(g.op("geglu", both), scale="down")


def _scaled_after_bias(g: Ggml) -> Any:
    layer = Layer(g)
    gate, up = layer.scaled(layer.product("gate", layer.x, bias=True), "gate"), layer.product("up", layer.x)
    return layer, layer.total(g.op("swiglu_split", gate, up))


def _relu(g: Ggml) -> Any:
    layer = Layer(g)
    return layer, layer.total(
        g.op("reglu_split", layer.product("gate", layer.x), layer.product("up", layer.x))
    )


def _gelu_alone(g: Ggml) -> Any:
    layer = Layer(g)
    return layer, layer.total(g.op("gelu", layer.product("up", layer.x)))


def _clamp(g: Ggml) -> Any:
    layer = Layer(g)
    gate, up = layer.product("gate", layer.x), layer.product("up", layer.x)
    return layer, layer.total(g.op("swiglu_clamp", gate, up, 7.0))


def _clamped_silu(g: Ggml, low: float = -7.0) -> Any:
    layer = Layer(g)
    up = g.op("clamp", layer.product("up", layer.x), low, 7.0)
    gate = g.op("clamp", g.op("silu", layer.product("gate", layer.x)), -math.inf, 7.0)
    return layer, layer.total(g.op("mul", gate, up))


def _clamps_that_differ(g: Ggml) -> Any:
    return _clamped_silu(g, low=-6.0)


def _situ(g: Ggml, linear: bool = True) -> Any:
    layer = Layer(g)
    gate, up = layer.product("gate", layer.x), layer.product("up", layer.x)

    def bounded(x: Any, bound: float) -> Any:
        inner = g.op("scale", x, float(np.float32(1) / np.float32(bound)))
        return g.op("scale", g.op("tanh", inner), bound)

    act = g.op("mul", bounded(gate, 4.0), g.op("sigmoid", gate))
    return layer, layer.total(g.op("mul", act, bounded(up, 25.0) if linear else up))


def _situ_one_bound(g: Ggml) -> Any:
    return _situ(g, linear=False)


def _unknown_activation(g: Ggml) -> Any:
    layer = Layer(g)
    return layer, layer.total(g.op("tanh", layer.product("up", layer.x)))


def _unknown_op(g: Ggml) -> Any:
    layer = Layer(g)
    return layer, layer.total(g.op("mul", swiglu(layer), layer.product("up", layer.x)))


def _one_expert_missing(g: Ggml) -> Any:
    layer = Layer(g)
    return layer, layer.total(swiglu(layer), picks=K - 1)


def _weights_read_otherwise(g: Ggml) -> Any:
    layer = Layer(g)
    return layer, g.op("cont", layer.matrices["down"])


def _weighted_twice(g: Ggml) -> Any:
    layer = Layer(g)
    y = g.op("mul", g.op("mul", layer.product("down", swiglu(layer)), layer.router), layer.router)
    out = layer.pick(y, 0)
    for i in range(1, K):
        out = g.op("add", out, layer.pick(y, i))
    return layer, out


CASES: dict[str, Callable[[Ggml], Any]] = {
    case.__name__.removeprefix("_"): case
    for case in (
        _plain, _top_1, _biased, _silu_and_mul, _merged, _merged_views, _relu_squared, _gelu, _oai,
        _weight_before, _weight_before_top_1, _weight_before_one_product, _scaled, _merged_scaled,
        _scaled_after_bias, _relu, _gelu_alone, _clamp, _clamped_silu, _clamps_that_differ, _situ,
        _situ_one_bound, _unknown_activation, _unknown_op, _one_expert_missing, _weights_read_otherwise,
        _weighted_twice,
    )
}  # fmt: skip


def main() -> None:
    case, socket = sys.argv[1:]
    path = library_path()
    device = Device(device_library(), path, socket, 5.0)
    g = Ggml()
    layer, out = CASES[case](g)
    residual = g.new(F32, D, T)
    final = g.op("add", out, residual) if case != "weights_read_otherwise" else out
    swarm = P(g.call("ggml_backend_dev_init", P(g.call("ggml_backend_dev_by_name", b"Swarm")), None))
    cpu = P(g.call("ggml_backend_dev_init", P(g.call("ggml_backend_dev_by_name", b"CPU")), None))
    _place(g, swarm, [*layer.matrices.values(), *layer.biases.values(), *layer.scales.values()], WEIGHTS)
    inputs = [
        (layer.x, _x()),
        (layer.sorted_ids, _ids()),
        (layer.router, _router(layer.top_k)),
        (residual, np.full((T, D), 100, np.float32)),
    ]
    _place(g, cpu, [tensor for tensor, _ in inputs], COMPUTE)
    for tensor, value in inputs:
        data = value.tobytes()
        g.call("ggml_backend_tensor_set", tensor, data, SIZE(0), SIZE(len(data)), result=None)
    graph = P(g.call("ggml_new_graph", P(g.context)))
    g.call("ggml_build_forward_expand", graph, final, result=None)
    backends = (P * 2)(swarm, cpu)
    false = ctypes.c_bool(False)
    sched = P(g.call("ggml_backend_sched_new", backends, None, 2, SIZE(256), false, false))
    status = g.call("ggml_backend_sched_graph_compute", sched, graph, result=ctypes.c_int)
    rows = (ctypes.c_float * (T * D))()
    if status == 0:
        g.call("ggml_backend_tensor_get", final, rows, SIZE(0), SIZE(4 * T * D), result=None)
    report = {
        "status": status,
        "splits": g.call("ggml_backend_sched_get_n_splits", sched, result=ctypes.c_int),
        "seen": [seen.to_json() for seen in device.seen_layers()],
        "rows": list(rows),
        "refused": None,
    }
    try:
        device.require_accepted()
    except EngineRefused as exc:
        report["refused"] = {"op": exc.op, "layer": exc.layer, "tensor": exc.tensor, "why": exc.why}
    print(json.dumps(report))


def _place(g: Ggml, backend: Any, tensors: list[Any], usage: int) -> None:
    """Give tensors memory in a buffer of this backend."""
    buft = P(g.call("ggml_backend_get_default_buffer_type", backend))
    sizes = [g.call("ggml_nbytes", tensor, result=SIZE) for tensor in tensors]
    buffer = P(g.call("ggml_backend_buft_alloc_buffer", buft, SIZE(sum(sizes) + 64 * len(sizes))))
    base = g.call("ggml_backend_buffer_get_base", buffer)
    g.call("ggml_backend_buffer_set_usage", buffer, usage, result=None)
    for tensor, size in zip(tensors, sizes, strict=True):
        g.call("ggml_backend_tensor_alloc", buffer, tensor, P(base), result=ctypes.c_int)
        base += -(-size // 64) * 64


def _x() -> np.ndarray:
    return np.arange(T * D, dtype=np.float32)


def _ids() -> np.ndarray:
    return np.stack([np.roll(np.arange(E, dtype=np.int32), t) for t in range(T)])


def _router(top_k: int) -> np.ndarray:
    return np.arange(T * top_k, dtype=np.float32) / 8


if __name__ == "__main__":
    main()
