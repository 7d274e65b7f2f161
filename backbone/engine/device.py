"""
Open the ggml device "Swarm" in this process: the ctypes side of swarm_device.h.

Used by the engine process and by the gate's, never by the backbone itself: llama.cpp may abort, and it holds
the interpreter lock while it loads, so it lives in processes of its own.
"""

import ctypes
from pathlib import Path

from backbone.errors import EngineError, EngineRefused
from backbone.model.expert_tensors import PATTERN as WEIGHTS_PATTERN  # tensors that lie on the device
from backbone.model.formula import ACTIVATIONS, Formula
from backbone.model.graph import SeenLayer

__all__ = ["DEVICE_NAME", "WEIGHTS_PATTERN", "Device", "SeenLayer"]

DEVICE_NAME = "Swarm"
MAX_LAYERS = 512


class _Layer(ctypes.Structure):
    _fields_ = [
        ("layer", ctypes.c_int32),
        ("num_experts", ctypes.c_int32),
        ("top_k", ctypes.c_int32),
        ("hidden_dim", ctypes.c_int32),
        ("expert_dim", ctypes.c_int32),
        ("gate_type", ctypes.c_int32),
        ("up_type", ctypes.c_int32),
        ("down_type", ctypes.c_int32),
        ("activation", ctypes.c_int32),
        ("alpha", ctypes.c_float),
        ("limit", ctypes.c_float),
        ("biased", ctypes.c_int32),
        ("scaled", ctypes.c_int32),
        ("weight_before", ctypes.c_int32),
    ]


class _Refusal(ctypes.Structure):
    _fields_ = [
        ("layer", ctypes.c_int32),
        ("op", ctypes.c_char * 32),
        ("tensor", ctypes.c_char * 64),
        ("why", ctypes.c_char * 160),
    ]


class _Stats(ctypes.Structure):
    _fields_ = [
        ("calls", ctypes.c_uint64),
        ("rows", ctypes.c_uint64),
        ("failures", ctypes.c_uint64),
        ("weight_bytes", ctypes.c_uint64),
        ("dropped_bytes", ctypes.c_uint64),
        ("released_bytes", ctypes.c_uint64),
    ]


class Device:
    """The device of this process; there can be one."""

    def __init__(self, library: Path, llama_library: Path, socket_path: str, call_timeout_s: float) -> None:
        """
        Register the device and connect it to the dispatcher.

        Raises:
            EngineError: the library is not the known one, or nobody listens on the socket.
        """
        self._c = ctypes.CDLL(str(library))
        self._c.swarm_open.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_double]
        self._c.swarm_error.restype = ctypes.c_char_p
        self._c.swarm_layers.argtypes = [ctypes.POINTER(_Layer), ctypes.c_int]
        self._c.swarm_refused.argtypes = [ctypes.POINTER(_Refusal)]
        self._c.swarm_read_stats.argtypes = [ctypes.POINTER(_Stats)]
        self._c.swarm_read_stats.restype = None
        if self._c.swarm_open(str(llama_library).encode(), socket_path.encode(), call_timeout_s):
            raise EngineError(f"the ggml device cannot be used: {self.last_error()}")

    def last_error(self) -> str:
        text: bytes = self._c.swarm_error()
        return text.decode("utf-8", "replace")

    def require_accepted(self) -> None:
        """
        Raises:
            EngineRefused: the graph used expert weights in a way the device does not know.
        """
        refusal = _Refusal()
        if self._c.swarm_refused(ctypes.byref(refusal)):
            texts = (refusal.op, refusal.tensor, refusal.why)
            op, tensor, why = (text.decode("utf-8", "replace") for text in texts)
            raise EngineRefused(op, refusal.layer, tensor, why)

    def seen_layers(self) -> list[SeenLayer]:
        """What was recognised so far, by layer."""
        array = (_Layer * MAX_LAYERS)()
        count = self._c.swarm_layers(array, MAX_LAYERS)
        return sorted((_seen(array[i]) for i in range(count)), key=lambda seen: seen.layer)

    def stats(self) -> dict[str, int]:
        stats = _Stats()
        self._c.swarm_read_stats(ctypes.byref(stats))
        return {name: int(getattr(stats, name)) for name, *_ in _Stats._fields_}


def _seen(c: _Layer) -> SeenLayer:
    formula = Formula(
        hidden_dim=c.hidden_dim,
        expert_dim=c.expert_dim,
        gate_type=None if c.gate_type < 0 else c.gate_type,
        up_type=c.up_type,
        down_type=c.down_type,
        activation=ACTIVATIONS[c.activation],
        alpha=_as_written(c.alpha),
        limit=_as_written(c.limit),
        weight_position="before" if c.weight_before else "after",
        biased=bool(c.biased),
        scaled=bool(c.scaled),
    )
    return SeenLayer(c.layer, c.num_experts, c.top_k, formula)


def _as_written(value: float) -> float:
    """The shortest decimal that is this float32: 1.702, not 1.7020000219345093."""
    texts = (f"{value:.{digits}g}" for digits in range(6, 10))
    return next(float(text) for text in texts if ctypes.c_float(float(text)).value == value)
