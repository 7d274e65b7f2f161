"""
What wasm/expert.h says, for ctypes: error codes, structures, signatures, and where the libraries lie.

    KernelError              the kernel refused; `code` is the number of wasm/expert.h
    ├── NonFinite            an infinity or NaN in weights, activations, router weights or outputs
    ├── GridOverflow         an output does not fit the integer grid
    ├── BadCall              sizes, indices or values that cannot be: whoever made the call erred
    ├── NotSupported         this version has no such format or formula
    └── KernelFault          this machine does not compute what the contract says; it must not serve
"""

import ctypes
import platform
import sys
from pathlib import Path
from typing import Any

from relay.wire.rebuild import Rebuildable

BUILT = Path(__file__).resolve().parent.parent / "_built"
ABI_VERSION = 1
ACTIVATION_NUMBERS = {
    "silu": 0, "gelu": 1, "relu": 2, "relu2": 3, "swiglu_oai": 4, "swiglu_clamp": 5, "situ": 6,
}  # fmt: skip  # enum expert_activation
WEIGHT_POSITION_NUMBERS = {"after": 0, "before": 1}  # enum expert_weight_position
MAX_SELF_TESTS = 16
SELF_TEST_ROWS = (2, 7)  # together they have a tile of every size
_ARM = platform.machine().lower() in ("arm64", "aarch64")
NATIVE_BUILDS = (
    ("scalar", "neon") if _ARM else ("scalar", "sse41", "avx2", "avx512vnni")
)  # worst first, by expert_cpu_level()


class KernelError(Rebuildable):
    """The kernel refused a call."""

    def __init__(self, code: int, what: str) -> None:
        self.code = code
        super().__init__(f"{what}: {MEANINGS.get(code, f'error {code}')}")


class NonFinite(KernelError):
    pass


class GridOverflow(KernelError):
    pass


class BadCall(KernelError):
    pass


class NotSupported(KernelError):
    pass


class KernelFault(KernelError):
    pass


MEANINGS = {
    -1: "an infinity or NaN in weights, activations or outputs",
    -2: "an output does not fit the integer grid",
    -3: "a dimension is no multiple of its block, or a buffer has the wrong length",
    -4: "weight format not supported yet",
    -5: "formula not supported yet",
    -6: "a pick names an expert that was not passed",
    -7: "x is in int8 blocks of another size than gate or up want; send f32 or f16",
    -8: "a value out of range (an activation of -128, an exponent, an unknown encoding or grid)",
    -9: "an expert was packed for another formula",
    -10: "scratch memory too small",
    -11: "the known-answer test gave another answer; this machine must not serve",
}
CLASSES: dict[int, type[KernelError]] = {
    -1: NonFinite,
    -2: GridOverflow,
    -4: NotSupported,
    -5: NotSupported,
    -11: KernelFault,
}


def check(code: int, what: str) -> None:
    """Raise the error that a negative code stands for."""
    if code < 0:
        raise CLASSES.get(code, BadCall)(code, what)


class CFormula(ctypes.Structure):
    """ExpertFormula."""

    _fields_ = [
        (name, ctypes.c_int32)
        for name in (
            "hidden_dim", "expert_dim", "gate_type", "up_type", "down_type", "activation", "weight_position",
            "extras",
        )
    ] + [("alpha", ctypes.c_float), ("limit", ctypes.c_float)]  # fmt: skip


# The words of ExpertCall in wasm/expert.h, in order; one machine word each.
CALL_WORDS = (
    "formula", "num_tokens", "num_picks", "num_experts", "x_encoding", "x", "x_bytes", "row_exponents",
    "grid", "layer_exponents", "counts", "pick_expert", "pick_weight", "experts", "scratch", "scratch_bytes",
    "sums", "outputs",
)  # fmt: skip
Call = ctypes.c_size_t * len(CALL_WORDS)


class CRows(ctypes.Structure):
    """ExpertRows."""

    _fields_ = [(name, ctypes.c_int32) for name in ("first_unit", "end_unit", "first_channel", "end_channel")]


class CPiece(ctypes.Structure):
    """ExpertPiece."""

    _fields_ = [("offset", ctypes.c_size_t), ("size", ctypes.c_size_t)]


def best_build(folder: Path) -> str:
    """Give the best build that this CPU runs."""
    return NATIVE_BUILDS[load(folder, "scalar").expert_cpu_level()]


def load(folder: Path, name: str) -> ctypes.CDLL:
    """
    Load one build and give its functions their types.

    Raises:
        KernelFault: no such library, or of another version.
    """
    suffix = {"darwin": ".dylib", "win32": ".dll"}.get(sys.platform, ".so")
    path = folder / f"libexpert-{name}{suffix}"
    try:
        lib = ctypes.CDLL(str(path))
    except OSError as exc:
        raise KernelFault(-11, f"{path} cannot be loaded ({exc}); run `python wasm/build.py`") from exc
    if lib.expert_abi_version() != ABI_VERSION:
        raise KernelFault(-11, f"{path} is of another version; run `python wasm/build.py`")
    size, pointer, word, i32 = ctypes.c_ssize_t, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int32
    signatures: dict[str, tuple[Any, list[Any]]] = {
        "expert_build": (ctypes.c_char_p, []),
        "expert_slice_bytes": (size, [pointer]),
        "expert_packed_bytes": (size, [pointer]),
        "expert_pack": (i32, [pointer, pointer, word, pointer, word]),
        "expert_part_bytes": (size, [pointer, pointer]),
        "expert_next_piece": (i32, [pointer, pointer, word, pointer]),
        "expert_pack_piece": (i32, [pointer, pointer, pointer, pointer, pointer, word]),
        "expert_hidden": (i32, [pointer, pointer, pointer, word]),
        "expert_finish": (i32, [pointer, pointer, pointer, word, word]),
        "expert_scratch_bytes": (size, [pointer, word, word, word]),
        "expert_answer": (i32, [pointer]),
        "expert_encode_partial": (size, [pointer, word, word, word, pointer, pointer, word]),
        "expert_num_formats": (i32, []),
        "expert_format_type": (i32, [i32]),
        "expert_num_self_tests": (i32, []),
        "expert_self_tests_for": (i32, [pointer, pointer]),
        "expert_self_test_scratch_bytes": (size, []),
        "expert_self_test": (i32, [i32, i32, pointer, word, pointer]),
        "expert_known_digest": (i32, [i32, i32, i32, pointer, word, pointer]),
        "expert_read_memory": (ctypes.c_uint32, [pointer, word]),
    }
    for function, (result, arguments) in signatures.items():
        getattr(lib, function).restype = result
        getattr(lib, function).argtypes = arguments
    return lib
