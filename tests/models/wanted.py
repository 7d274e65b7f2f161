"""
Ask the pinned engine which tensors a family has.

`python -m tests.models.wanted KEYS.gguf` prints their names and shapes.

llama.cpp makes a model "from a user" (`llama_model_init_from_user`): given the keys it creates every tensor
that its loader would look for, and calls back to have each filled. So no table of tensors is kept here, and
what is asked is the engine that will read the file. A process of its own: llama.cpp may abort.
"""

import ctypes
import json
import sys
from pathlib import Path

from backbone.gate.llama_api import MODEL_DEFAULTS, ModelParams, _require_defaults, library_path

P = ctypes.c_void_p
MAX_DIMS = 4
CALLBACK = ctypes.CFUNCTYPE(None, P, P)


class _InitParams(ctypes.Structure):
    _fields_ = [("no_alloc", ctypes.c_bool), ("ctx", P)]


class _TensorHead(ctypes.Structure):  # the first fields of struct ggml_tensor
    _fields_ = [("type", ctypes.c_int), ("buffer", P), ("ne", ctypes.c_int64 * MAX_DIMS)]


def main(path: Path) -> None:
    c = ctypes.CDLL(str(library_path()))
    c.llama_model_default_params.restype = ModelParams
    c.gguf_init_from_file.restype, c.gguf_init_from_file.argtypes = P, [ctypes.c_char_p, _InitParams]
    c.ggml_get_name.restype, c.ggml_get_name.argtypes = ctypes.c_char_p, [P]
    c.llama_model_init_from_user.restype = P
    c.llama_model_init_from_user.argtypes = [P, CALLBACK, P, ModelParams]
    c.llama_backend_init()
    wanted: dict[str, list[int]] = {}

    def note(tensor: int, _data: int) -> None:
        ne = list(_TensorHead.from_address(tensor).ne)
        while len(ne) > 1 and ne[-1] == 1:
            ne.pop()
        wanted[c.ggml_get_name(tensor).decode()] = ne

    params = c.llama_model_default_params()
    _require_defaults(params, MODEL_DEFAULTS)
    params.n_gpu_layers = 0
    params.load_mtp = True
    keys = c.gguf_init_from_file(str(path).encode(), _InitParams(True, None))
    if not keys or not c.llama_model_init_from_user(keys, CALLBACK(note), None, params):
        raise SystemExit("the engine makes no model of these keys")
    print(json.dumps(wanted))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
