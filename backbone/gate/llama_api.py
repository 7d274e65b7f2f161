"""
llama.cpp's C API, as far as the gate needs it, through ctypes on the library inside the xllamacpp wheel.

The parameter structs are mirrored for the pinned version and checked at each start: the defaults that the
library returns must be the known ones at the known places, and what is set must be read back by its calls.
Only for processes of their own (`logits_child.py`): llama.cpp may abort.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from backbone.engine.device import DEVICE_NAME, WEIGHTS_PATTERN
from backbone.engine.link import Floats
from backbone.errors import EngineError

P = ctypes.c_void_p
I32 = ctypes.c_int32
U32 = ctypes.c_uint32
F32 = ctypes.c_float
Bool = ctypes.c_bool

LOAD_MODE_MMAP = 1
TYPE_F32 = 0


class ModelParams(ctypes.Structure):
    _fields_ = [
        ("devices", P),
        ("tensor_buft_overrides", P),
        ("n_gpu_layers", I32),
        ("split_mode", I32),
        ("load_mode", I32),
        ("lazy_mode", I32),
        ("main_gpu", I32),
        ("tensor_split", P),
        ("progress_callback", P),
        ("progress_callback_user_data", P),
        ("kv_overrides", P),
        ("vocab_only", Bool),
        ("check_tensors", Bool),
        ("use_extra_bufts", Bool),
        ("no_host", Bool),
        ("no_alloc", Bool),
        ("load_mtp", Bool),
    ]


class ContextParams(ctypes.Structure):
    _fields_ = [
        ("n_ctx", U32),
        ("n_batch", U32),
        ("n_ubatch", U32),
        ("n_seq_max", U32),
        ("n_rs_seq", U32),
        ("n_outputs_max", U32),
        ("n_outputs_max_per_seq", U32),
        ("n_threads", I32),
        ("n_threads_batch", I32),
        ("ctx_type", I32),
        ("rope_scaling_type", I32),
        ("pooling_type", I32),
        ("attention_type", I32),
        ("flash_attn_type", I32),
        ("rope_freq_base", F32),
        ("rope_freq_scale", F32),
        ("yarn_ext_factor", F32),
        ("yarn_attn_factor", F32),
        ("yarn_beta_fast", F32),
        ("yarn_beta_slow", F32),
        ("yarn_orig_ctx", U32),
        ("defrag_thold", F32),
        ("cb_eval", P),
        ("cb_eval_user_data", P),
        ("type_k", I32),
        ("type_v", I32),
        ("abort_callback", P),
        ("abort_callback_data", P),
        ("unnamed_pointer", P),  # null by default; its meaning is not needed
        ("embeddings", Bool),
        ("offload_kqv", Bool),
        ("no_perf", Bool),
        ("op_offload", Bool),
        ("swa_full", Bool),
        ("kv_unified", Bool),
        ("samplers", P),
        ("n_samplers", ctypes.c_size_t),
        ("ctx_other", P),
        ("spare", ctypes.c_uint8 * 64),  # room, should the struct be longer than we know: never touched
    ]


class Batch(ctypes.Structure):
    _fields_ = [
        ("n_tokens", I32),
        ("token", ctypes.POINTER(I32)),
        ("embd", ctypes.POINTER(F32)),
        ("pos", ctypes.POINTER(I32)),
        ("n_seq_id", ctypes.POINTER(I32)),
        ("seq_id", ctypes.POINTER(ctypes.POINTER(I32))),
        ("logits", ctypes.POINTER(ctypes.c_int8)),
    ]


class BufferOverride(ctypes.Structure):
    _fields_ = [("pattern", ctypes.c_char_p), ("buffer_type", P)]


# Defaults of the pinned version: each is read at its place in the struct.
MODEL_DEFAULTS = {
    "n_gpu_layers": -1, "split_mode": 1, "load_mode": -1, "lazy_mode": 1, "main_gpu": 0,
    "vocab_only": False, "check_tensors": False, "use_extra_bufts": True, "no_host": False,
    "no_alloc": False, "load_mtp": False,
}  # fmt: skip
CONTEXT_DEFAULTS = {
    "n_ctx": 512, "n_batch": 2048, "n_ubatch": 512, "n_seq_max": 1, "n_outputs_max": 0,
    "n_outputs_max_per_seq": 1, "n_threads": 4, "n_threads_batch": 4, "rope_scaling_type": -1,
    "pooling_type": -1, "attention_type": -1, "flash_attn_type": -1, "yarn_ext_factor": -1.0,
    "yarn_beta_slow": -1.0, "yarn_orig_ctx": 0, "defrag_thold": -1.0, "cb_eval": None, "type_k": 1,
    "type_v": 1, "abort_callback": None, "embeddings": False, "offload_kqv": True, "no_perf": True,
    "op_offload": True, "swa_full": True, "kv_unified": False, "samplers": None, "n_samplers": 0,
}  # fmt: skip

_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "llama_backend_init": (None, []),
    "llama_model_default_params": (ModelParams, []),
    "llama_context_default_params": (ContextParams, []),
    "llama_model_load_from_file": (P, [ctypes.c_char_p, ModelParams]),
    "llama_model_free": (None, [P]),
    "llama_init_from_model": (P, [P, ContextParams]),
    "llama_free": (None, [P]),
    "llama_n_ctx": (U32, [P]),
    "llama_n_batch": (U32, [P]),
    "llama_n_ubatch": (U32, [P]),
    "llama_n_threads": (I32, [P]),
    "llama_model_get_vocab": (P, [P]),
    "llama_vocab_n_tokens": (I32, [P]),
    "llama_tokenize": (I32, [P, ctypes.c_char_p, I32, ctypes.POINTER(I32), I32, Bool, Bool]),
    "llama_get_memory": (P, [P]),
    "llama_memory_clear": (None, [P, Bool]),
    "llama_decode": (I32, [P, Batch]),
    "llama_get_logits_ith": (ctypes.POINTER(F32), [P, I32]),
    "ggml_backend_dev_by_name": (P, [ctypes.c_char_p]),
    "ggml_backend_dev_buffer_type": (P, [P]),
}


@dataclass(frozen=True, slots=True)
class Settings:
    """
    What may differ between two runs of llama.cpp that ought to agree.

    repack: let it reorder weights in memory for faster kernels (its default; the engine does without).
    flash_attention: the fused attention kernel; None leaves it to llama.cpp, which takes it.
    cache_f32: keys and values cached as float32, not float16.
    """

    n_threads: int = 2
    n_batch: int = 512
    n_ubatch: int = 512
    n_ctx: int = 2048
    repack: bool = False
    flash_attention: bool | None = None
    cache_f32: bool = False


def library_path() -> Path:
    """The extension module of xllamacpp, which exports llama.cpp's C API; importing it loads the library."""
    from xllamacpp import xllamacpp as extension

    return Path(extension.__file__)


class Llama:
    """One model with one context. Use as a context manager."""

    def __init__(self, model: Path, settings: Settings, *, swarm: bool) -> None:
        """
        Load the model; with `swarm` the device must be registered already, and gets the experts.

        Raises:
            EngineError: the library is not the known one, or the model does not load.
        """
        self._c = ctypes.CDLL(str(library_path()))
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(self._c, name)
            function.restype, function.argtypes = result, arguments
        self._c.llama_backend_init()
        self.settings = settings
        self._model = self._load(model, swarm)
        self._context = self._open_context()
        self._vocab = self._c.llama_model_get_vocab(self._model)
        self.n_vocab = int(self._c.llama_vocab_n_tokens(self._vocab))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self._c.llama_free(self._context)
        self._c.llama_model_free(self._model)

    def tokenise(self, text: str) -> list[int]:
        """Tokens of a text; control tokens are recognised, none is added."""
        data = text.encode()
        room = len(data) + 8
        tokens = (I32 * room)()
        count = int(self._c.llama_tokenize(self._vocab, data, len(data), tokens, room, False, True))
        if count < 0:
            raise EngineError(f"llama.cpp does not tokenise a text of {len(data)} bytes")
        return list(tokens[:count])

    def forget(self) -> None:
        """Start a new sequence."""
        self._c.llama_memory_clear(self._c.llama_get_memory(self._context), True)

    def decode(self, tokens: Sequence[int], start: int) -> Floats:
        """
        Run tokens at positions start, start + 1, …; returns the logits of each, [num_tokens, n_vocab].

        Raises:
            EngineError: llama.cpp failed; with a swarm, the device knows why.
        """
        rows: list[Floats] = []
        for first in range(0, len(tokens), self.settings.n_batch):
            piece = tokens[first : first + self.settings.n_batch]
            status = self._c.llama_decode(self._context, _batch(piece, start + first))
            if status:
                raise EngineError(f"llama_decode failed with status {status}")
            for i in range(len(piece)):
                row = self._c.llama_get_logits_ith(self._context, i)
                if not row:
                    raise EngineError(f"llama.cpp has no logits for position {start + first + i}")
                rows.append(np.ctypeslib.as_array(row, (self.n_vocab,)).copy())
        return np.stack(rows)

    def _load(self, model: Path, swarm: bool) -> int:
        params = self._c.llama_model_default_params()
        _require_defaults(params, MODEL_DEFAULTS)
        params.n_gpu_layers = 0
        params.load_mode = LOAD_MODE_MMAP
        params.use_extra_bufts = self.settings.repack
        if swarm:
            device = self._c.ggml_backend_dev_by_name(DEVICE_NAME.encode())
            buffer_type = self._c.ggml_backend_dev_buffer_type(device)
            last = BufferOverride(None, None)  # ends the list; the list must outlive the loading
            first = BufferOverride(WEIGHTS_PATTERN.encode(), buffer_type)
            self._overrides = (BufferOverride * 2)(first, last)
            params.tensor_buft_overrides = ctypes.cast(self._overrides, P)
        handle = self._c.llama_model_load_from_file(str(model).encode(), params)
        if not handle:
            raise EngineError(f"llama.cpp does not load {model}")
        return int(handle)

    def _open_context(self) -> int:
        settings = self.settings
        params = self._c.llama_context_default_params()
        _require_defaults(params, CONTEXT_DEFAULTS)
        params.n_ctx = settings.n_ctx
        params.n_batch = settings.n_batch
        params.n_ubatch = settings.n_ubatch
        if settings.flash_attention is not None:
            params.flash_attn_type = int(settings.flash_attention)
        if settings.cache_f32:
            params.type_k = params.type_v = TYPE_F32
        params.n_outputs_max_per_seq = settings.n_batch
        params.n_threads = params.n_threads_batch = settings.n_threads
        context = self._c.llama_init_from_model(self._model, params)
        if not context:
            raise EngineError("llama.cpp makes no context")
        read_back = {
            "n_batch": (settings.n_batch, self._c.llama_n_batch(context)),
            "n_ubatch": (settings.n_ubatch, self._c.llama_n_ubatch(context)),
            "n_threads": (settings.n_threads, self._c.llama_n_threads(context)),
        }
        for name, (wanted, found) in read_back.items():
            if wanted != found:
                raise EngineError(f"llama.cpp was told {name}={wanted} and runs with {found}")
        if self._c.llama_n_ctx(context) < settings.n_ctx:
            raise EngineError(f"llama.cpp gives fewer than {settings.n_ctx} tokens of context")
        return int(context)


def _batch(tokens: Sequence[int], start: int) -> Batch:
    """One sequence, all positions with logits."""
    count = len(tokens)
    seq = (I32 * 1)(0)
    seqs = (ctypes.POINTER(I32) * count)(*[ctypes.cast(seq, ctypes.POINTER(I32))] * count)
    return Batch(
        count,
        (I32 * count)(*tokens),
        None,
        (I32 * count)(*range(start, start + count)),
        (I32 * count)(*[1] * count),
        seqs,
        (ctypes.c_int8 * count)(*[1] * count),
    )


def _require_defaults(params: ctypes.Structure, known: dict[str, Any]) -> None:
    for name, value in known.items():
        if getattr(params, name) != value:
            raise EngineError(
                f"{type(params).__name__} of this llama.cpp is not the known one: {name} is "
                f"{getattr(params, name)!r} by default, expected {value!r}; install the pinned xllamacpp"
            )
