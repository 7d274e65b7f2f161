"""
Call the C kernel (wasm/expert.h) through ctypes, without numpy, as backbone/experts/native.py does with it.

Everything that a call needs is made for the call: this checks answers, it does not serve.
"""

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

LIBRARY = Path(__file__).with_name("libexpert.so")
ACTIVATIONS = (
    "silu",
    "gelu",
    "relu",
    "relu2",
    "swiglu_oai",
    "swiglu_clamp",
    "situ",
)  # enum expert_activation
POSITIONS = ("after", "before")  # enum expert_weight_position
_FORMULA_INTS = (
    "hidden_dim",
    "expert_dim",
    "gate_type",
    "up_type",
    "down_type",
    "activation",
    "weight",
    "extras",
)
_SIGNATURES: dict[str, tuple[Any, int]] = {  # result, number of word-sized arguments
    "expert_build": (ctypes.c_char_p, 0),
    "expert_slice_bytes": (ctypes.c_ssize_t, 1),
    "expert_packed_bytes": (ctypes.c_ssize_t, 1),
    "expert_pack": (ctypes.c_int32, 5),
    "expert_scratch_bytes": (ctypes.c_ssize_t, 4),
    "expert_answer": (ctypes.c_int32, 1),
    "expert_encode_x": (ctypes.c_ssize_t, 6),
    "expert_row_exponents": (ctypes.c_int32, 4),
    "expert_encode_partial": (ctypes.c_ssize_t, 7),
    "expert_add_partial": (ctypes.c_int32, 7),
    "expert_num_self_tests": (ctypes.c_int32, 0),
    "expert_self_test_scratch_bytes": (ctypes.c_ssize_t, 0),
    "expert_sha256": (None, 3),
}


class KernelError(Exception):
    """The kernel refused; `code` is the number of wasm/expert.h."""

    def __init__(self, code: int, what: str) -> None:
        self.code = code
        super().__init__(f"{what}: kernel error {code} (wasm/expert.h)")


def _ok(code: int, what: str) -> int:
    if code < 0:
        raise KernelError(code, what)
    return code


class _Formula(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int32) for name in _FORMULA_INTS] + [
        ("alpha", ctypes.c_float),
        ("limit", ctypes.c_float),
    ]


def _formula(formula: dict[str, Any]) -> _Formula:
    """The C form of a formula as it travels in JSON."""
    gate = formula["gate_type"]
    return _Formula(
        formula["hidden_dim"],
        formula["expert_dim"],
        -1 if gate is None else gate,
        formula["up_type"],
        formula["down_type"],
        ACTIVATIONS.index(formula["activation"]),
        POSITIONS.index(formula["weight_position"]),
        bool(formula.get("biased")) | bool(formula.get("scaled")) << 1,
        formula["alpha"],
        formula["limit"],
    )


class Kernel:
    """One build of the kernel; `library`: another than the one in this package (for tests)."""

    def __init__(self, library: Path = LIBRARY) -> None:
        self._lib = ctypes.CDLL(str(library))
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(self._lib, name)
            function.restype, function.argtypes = result, [ctypes.c_void_p] * arguments
        test = self._lib.expert_self_test
        test.restype = ctypes.c_int32
        test.argtypes = [ctypes.c_int32, ctypes.c_int32, *[ctypes.c_void_p] * 3]
        self.build: str = self._lib.expert_build().decode()

    @property
    def num_known_answers(self) -> int:
        return int(self._lib.expert_num_self_tests())

    def known_answer(self, index: int, num_tokens: int) -> str:
        """Run one known-answer test; return its digest. Raises KernelError when hashes.txt has another."""
        size = self._lib.expert_self_test_scratch_bytes()
        scratch, digest = ctypes.create_string_buffer(size), ctypes.create_string_buffer(32)
        code = self._lib.expert_self_test(
            index, num_tokens, ctypes.addressof(scratch), size, ctypes.addressof(digest)
        )
        _ok(code, f"known answer {index} with {num_tokens} rows")
        return digest.raw.hex()

    def sha256(self, data: bytes) -> str:
        digest = ctypes.create_string_buffer(32)
        self._lib.expert_sha256(_address(data), len(data), ctypes.addressof(digest))
        return digest.raw.hex()

    def answer(
        self,
        formula: dict[str, Any],
        slices: Sequence[bytes],
        picks: Sequence[int],
        weights: Sequence[float],
        counts: Sequence[int],
        x: bytes,
        encoding: int,
        row_exponents: Sequence[int],
        grid: int,
        layer_exponents: Sequence[int],
    ) -> list[int]:
        """Compute a dispatch from slices as they stand in the GGUF: its sums, row by row."""
        c_formula = _formula(formula)
        at_formula = ctypes.addressof(c_formula)
        size = _ok(self._lib.expert_packed_bytes(at_formula), "formula")
        packed = [ctypes.create_string_buffer(size) for _ in slices]
        for memory, data in zip(packed, slices, strict=True):
            _ok(
                self._lib.expert_pack(at_formula, _address(data), len(data), ctypes.addressof(memory), size),
                "slice",
            )
        rows, total = len(counts), len(picks)
        if len(weights) != total or len(row_exponents) != rows:
            raise KernelError(-3, "dispatch")
        if len(layer_exponents) != (formula["hidden_dim"] if grid else 1):
            raise KernelError(-3, "layer exponents")
        size = _ok(self._lib.expert_scratch_bytes(at_formula, rows, total, len(slices)), "dispatch")
        scratch = ctypes.create_string_buffer(size)
        sums = (ctypes.c_int64 * (rows * formula["hidden_dim"]))()
        arrays = (
            (ctypes.c_int16 * rows)(*row_exponents),
            (ctypes.c_int32 * len(layer_exponents))(*layer_exponents),
            (ctypes.c_uint16 * rows)(*counts),
            (ctypes.c_uint16 * total)(*picks),
            (ctypes.c_float * total)(*weights),
            (ctypes.c_void_p * len(slices))(*map(ctypes.addressof, packed)),
        )
        exponents, layer, of_rows, of_picks, of_weights, experts = map(ctypes.addressof, arrays)
        call = (ctypes.c_size_t * 18)(
            at_formula, rows, total, len(slices), encoding, _address(x), len(x), exponents, grid, layer,
            of_rows, of_picks, of_weights, experts, ctypes.addressof(scratch), size, ctypes.addressof(sums),
            0,
        )  # fmt: skip
        _ok(self._lib.expert_answer(ctypes.addressof(call)), "dispatch")
        return list(sums)

    def encode_x(self, x: Sequence[float], num_tokens: int, encoding: int) -> bytes:
        """Give rows of floats as they travel."""
        values = (ctypes.c_float * len(x))(*x)
        out = ctypes.create_string_buffer(5 * len(x) + 8)
        used = self._lib.expert_encode_x(
            ctypes.addressof(values),
            num_tokens,
            len(x) // num_tokens,
            encoding,
            ctypes.addressof(out),
            len(out),
        )
        return out.raw[: _ok(used, "x")]

    def row_exponents(self, x: Sequence[float], num_tokens: int) -> list[int]:
        """Give the row exponents (wasm/CONTRACT.md, "Grid") of rows of floats."""
        values, out = (ctypes.c_float * len(x))(*x), (ctypes.c_int16 * num_tokens)()
        at = ctypes.addressof(values)
        _ok(self._lib.expert_row_exponents(at, num_tokens, len(x) // num_tokens, ctypes.addressof(out)), "x")
        return list(out)

    def encode_partial(self, sums: Sequence[int], num_tokens: int, grid: int) -> tuple[bytes, bytes]:
        """Give sums as they travel: the width of each row, and the rows."""
        values = (ctypes.c_int64 * len(sums))(*sums)
        widths, out = ctypes.create_string_buffer(num_tokens), ctypes.create_string_buffer(8 * len(sums))
        used = self._lib.expert_encode_partial(
            ctypes.addressof(values), num_tokens, len(sums) // num_tokens, grid, ctypes.addressof(widths),
            ctypes.addressof(out), len(out),
        )  # fmt: skip
        return widths.raw, out.raw[: _ok(used, "partial")]

    def decode_partial(self, widths: bytes, data: bytes, hidden_dim: int, grid: int) -> list[int]:
        """Read rows of a partial."""
        sums = (ctypes.c_int64 * (len(widths) * hidden_dim))()
        code = self._lib.expert_add_partial(
            _address(widths), _address(data), len(data), len(widths), hidden_dim, grid, ctypes.addressof(sums)
        )
        _ok(code, "partial")
        return list(sums)


def _address(data: bytes) -> int | None:
    """Where the bytes of a bytes object stand; valid while it lives."""
    return ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p).value
