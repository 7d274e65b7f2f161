"""
Call the C kernel (wasm/expert.h) from Python: the driver around `libexpert`, through ctypes.

`NativeKernel()` loads the best build for this CPU. A call releases the GIL; every buffer it needs is the
caller's or belongs to the calling thread, so any number of threads may compute at once.

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
from collections.abc import Iterable, Sequence
from pathlib import Path
from threading import local
from typing import Any

import numpy as np
import numpy.typing as npt

from backbone.model.formula import Formula

type Buffer = bytes | bytearray | memoryview
type Int64Array = npt.NDArray[np.int64]
type Float32Array = npt.NDArray[np.float32]

BUILT = Path(__file__).resolve().parent.parent / "_built"
ABI_VERSION = 1
ACTIVATION_NUMBERS = {
    "silu": 0, "gelu": 1, "relu": 2, "relu2": 3, "swiglu_oai": 4, "swiglu_clamp": 5, "situ": 6,
}  # fmt: skip  # enum expert_activation
WEIGHT_POSITION_NUMBERS = {"after": 0, "before": 1}  # enum expert_weight_position
MAX_SELF_TESTS = 16
SELF_TEST_ROWS = (2, 7)  # together they have a tile of every size
ALIGN = 64
_ARM = platform.machine().lower() in ("arm64", "aarch64")
NATIVE_BUILDS = (
    ("scalar", "neon") if _ARM else ("scalar", "sse41", "avx2")
)  # worst first, by expert_cpu_level()


class KernelError(Exception):
    """The kernel refused a call."""

    def __init__(self, code: int, what: str) -> None:
        self.code = code
        super().__init__(f"{what}: {_MEANINGS.get(code, f'error {code}')}")


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


_MEANINGS = {
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
_CLASSES: dict[int, type[KernelError]] = {
    -1: NonFinite,
    -2: GridOverflow,
    -4: NotSupported,
    -5: NotSupported,
    -11: KernelFault,
}


def _raise(code: int, what: str) -> None:
    if code < 0:
        raise _CLASSES.get(code, BadCall)(code, what)


class _CFormula(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_int32)
        for name in (
            "hidden_dim", "expert_dim", "gate_type", "up_type", "down_type", "activation", "weight_position",
            "extras",
        )
    ] + [("alpha", ctypes.c_float), ("limit", ctypes.c_float)]  # fmt: skip


# The words of ExpertCall in wasm/expert.h, in order; one machine word each.
_CALL_WORDS = (
    "formula", "num_tokens", "num_picks", "num_experts", "x_encoding", "x", "x_bytes", "row_exponents",
    "grid", "layer_exponents", "counts", "pick_expert", "pick_weight", "experts", "scratch", "scratch_bytes",
    "sums", "outputs",
)  # fmt: skip
_Call = ctypes.c_size_t * len(_CALL_WORDS)


class PackedExpert:
    """One expert, rearranged for this build. Holds the memory; freed with the object."""

    __slots__ = ("_memory", "address", "size_bytes")

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self._memory = np.empty(size_bytes + ALIGN, np.uint8)
        self.address = -(-self._memory.ctypes.data // ALIGN) * ALIGN


class _Scratch(local):
    """Memory that one thread reuses from call to call."""

    memory: npt.NDArray[np.uint8] = np.empty(0, np.uint8)
    address = 0


class NativeKernel:
    """
    The kernel of wasm/, compiled for this CPU.

    build: which one, as nodes announce it ("native-avx2"). `build=` picks another than the best ("scalar").

    Raises:
        KernelFault: there is no library for this machine; the message says how to make one.
    """

    def __init__(self, build: str | None = None, folder: Path = BUILT) -> None:
        name = build.removeprefix("native-") if build else _best_build(folder)
        self._lib = _load(folder, name)
        self.build = f"native-{self._lib.expert_build().decode()}"
        self._formulas: dict[Formula, tuple[_CFormula, int, int]] = {}
        self._scratch = _Scratch()
        self._proven: set[int] = set()  # known-answer tests that this build passed

    def pack(self, formula: Formula, slice_bytes: Buffer) -> PackedExpert:
        """
        Rearrange one slice (gate, up, down as they stand in the GGUF, then biases and scales) for this CPU.

        Raises:
            NonFinite: a weight or scale is an infinity or NaN.
            BadCall: the length is not that of the formula.
            NotSupported: no such format or formula yet.
            KernelFault: this build gives a wrong answer in one of these formats; the message names the test.
        """
        c_formula, _, packed_bytes = self._formula(formula)
        data = np.frombuffer(slice_bytes, np.uint8)
        packed = PackedExpert(packed_bytes)
        code = self._lib.expert_pack(
            ctypes.byref(c_formula), data.ctypes.data, data.size, packed.address, packed_bytes
        )
        _raise(code, f"slice of {data.size} bytes refused")
        return packed

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
        experts: Sequence[PackedExpert],
        pick_expert: npt.NDArray[np.uint16],
        pick_weight: Float32Array,
    ) -> Int64Array:
        """
        Compute a whole dispatch: the sum of weighted expert outputs per row, on the integer grid.

        Shapes:
            rows             num_tokens rows of x in `encoding` (relay/wire/PROTOCOL.md, "x encodings")
            row_exponents    [num_tokens]
            layer_exponents  x32: one number; x16: [hidden_dim]
            counts           [num_tokens] picks of each row
            pick_expert      [num_picks] row by row, index into `experts`
            pick_weight      [num_picks]
            returns          [num_tokens, hidden_dim]

        Raises:
            NonFinite, GridOverflow, BadCall, NotSupported: see above.
        """
        sums = np.empty((num_tokens, formula.hidden_dim), np.int64)
        self._call(
            formula, rows, encoding, num_tokens, row_exponents, grid_kind, layer_exponents, counts, experts,
            pick_expert, pick_weight, sums, None,
        )  # fmt: skip
        return sums

    def outputs(
        self,
        formula: Formula,
        rows: Buffer,
        encoding: int,
        num_tokens: int,
        counts: npt.NDArray[np.uint16],
        experts: Sequence[PackedExpert],
        pick_expert: npt.NDArray[np.uint16],
        pick_weight: Float32Array,
    ) -> Float32Array:
        """Give the weighted output of every pick before the grid, [num_picks, hidden_dim]."""
        outputs = np.empty((len(pick_expert), formula.hidden_dim), np.float32)
        zeros = np.zeros(num_tokens, np.int16)
        self._call(
            formula, rows, encoding, num_tokens, zeros, 0, 0, counts, experts, pick_expert, pick_weight, None,
            outputs,
        )  # fmt: skip
        return outputs

    def encode_partial(self, sums: Int64Array, grid_kind: int) -> tuple[bytes, bytes]:
        """Narrow sums for the wire: the width of each row, and the rows one after another."""
        sums = np.ascontiguousarray(sums, np.int64)
        num_tokens, hidden_dim = sums.shape
        widths = np.empty(num_tokens, np.uint8)
        data = np.empty(num_tokens * hidden_dim * 8, np.uint8)
        used: int = self._lib.expert_encode_partial(
            sums.ctypes.data, num_tokens, hidden_dim, grid_kind, widths.ctypes.data, data.ctypes.data,
            data.size,
        )  # fmt: skip
        _raise(used, "partial not encoded")
        return widths.tobytes(), data[:used].tobytes()

    def known_answer_test(self, every: bool = False) -> None:
        """
        Compute what hashes.txt knows the answer of: one format of each kind of product, or everything.

        Each format and formula has its own test besides, which runs before the first slice of it is packed.

        Raises:
            KernelFault: another answer; this machine must not serve.
        """
        if every:
            self._prove_all(range(self._lib.expert_num_self_tests()))
        else:
            self._prove(None)

    def _prove(self, c_formula: _CFormula | None) -> None:
        """Run the tests that this formula needs (none: those before anything) and that did not run yet."""
        tests = (ctypes.c_int32 * MAX_SELF_TESTS)()
        count = self._lib.expert_self_tests_for(None if c_formula is None else ctypes.byref(c_formula), tests)
        _raise(count, "formula refused")
        self._prove_all(test for test in tests[:count] if test not in self._proven)

    def _prove_all(self, tests: Iterable[int]) -> None:
        for index in tests:
            for rows in SELF_TEST_ROWS:
                self.known_answer(index, rows)
            self._proven.add(index)

    def known_answer(self, index: int, num_tokens: int) -> str:
        """Run one known-answer test (wasm/expert.h says which); return its digest."""
        scratch = np.empty(self._lib.expert_self_test_scratch_bytes(), np.uint8)
        digest = np.zeros(32, np.uint8)
        code = self._lib.expert_self_test(
            index, num_tokens, scratch.ctypes.data, scratch.size, digest.ctypes.data
        )
        if code:
            what = (
                f"format {self._lib.expert_format_type(index)}"
                if index < self._lib.expert_num_formats()
                else "a formula"
            )
            raise KernelFault(code, f"{self.build}, {what}, test {index}, digest {digest.tobytes().hex()}")
        return digest.tobytes().hex()

    def read_expert(self, packed: PackedExpert) -> int:
        """Read an expert as fast as memory allows; a checksum comes back. For benchmarks."""
        checksum: int = self._lib.expert_read_memory(packed.address, packed.size_bytes)
        return checksum

    def _formula(self, formula: Formula) -> tuple[_CFormula, int, int]:
        """Give the C form of a formula, proven, with the sizes of its slices, as found and packed."""
        if (known := self._formulas.get(formula)) is not None:
            return known
        gate_type = -1 if formula.gate_type is None else formula.gate_type
        activation = ACTIVATION_NUMBERS.get(formula.activation)
        position = WEIGHT_POSITION_NUMBERS.get(formula.weight_position)
        if activation is None or position is None:
            raise NotSupported(-5, f"activation {formula.activation}, weight {formula.weight_position}")
        c_formula = _CFormula(
            formula.hidden_dim, formula.expert_dim, gate_type, formula.up_type, formula.down_type,
            activation, position, formula.biased | formula.scaled << 1, formula.alpha, formula.limit,
        )  # fmt: skip
        slice_bytes = self._lib.expert_slice_bytes(ctypes.byref(c_formula))
        _raise(slice_bytes, f"formula {formula}")
        self._prove(c_formula)
        known = c_formula, slice_bytes, self._lib.expert_packed_bytes(ctypes.byref(c_formula))
        self._formulas[formula] = known
        return known

    def _call(
        self,
        formula: Formula,
        rows: Buffer,
        encoding: int,
        num_tokens: int,
        row_exponents: npt.NDArray[np.int16],
        grid_kind: int,
        layer_exponents: int | npt.NDArray[np.int32],
        counts: npt.NDArray[np.uint16],
        experts: Sequence[PackedExpert],
        pick_expert: npt.NDArray[np.uint16],
        pick_weight: Float32Array,
        sums: Int64Array | None,
        outputs: Float32Array | None,
    ) -> None:
        c_formula, _, _ = self._formula(formula)
        # Contiguous, right type, and alive until the call returns.
        x = np.frombuffer(rows, np.uint8)
        exponents = np.ascontiguousarray(row_exponents, np.int16)
        layer = np.ascontiguousarray(layer_exponents, np.int32)
        counts = np.ascontiguousarray(counts, np.uint16)
        pick_expert = np.ascontiguousarray(pick_expert, np.uint16)
        pick_weight = np.ascontiguousarray(pick_weight, np.float32)
        addresses = (ctypes.c_void_p * len(experts))(*[packed.address for packed in experts])
        layer_size = formula.hidden_dim if grid_kind == 1 else 1
        if layer.size != layer_size or exponents.size != num_tokens or counts.size != num_tokens:
            raise BadCall(-3, f"{num_tokens} rows on grid {grid_kind}")
        if pick_weight.size != pick_expert.size:
            raise BadCall(-3, f"{pick_expert.size} picks with {pick_weight.size} weights")
        scratch_bytes = self._lib.expert_scratch_bytes(
            ctypes.byref(c_formula), num_tokens, pick_expert.size, len(experts)
        )
        _raise(scratch_bytes, f"{num_tokens} rows, {pick_expert.size} picks")
        call = _Call(
            ctypes.addressof(c_formula), num_tokens, pick_expert.size, len(experts), encoding, x.ctypes.data,
            x.size, exponents.ctypes.data, grid_kind, layer.ctypes.data, counts.ctypes.data,
            pick_expert.ctypes.data, pick_weight.ctypes.data, ctypes.addressof(addresses),
            self._scratch_address(scratch_bytes), scratch_bytes,
            0 if sums is None else sums.ctypes.data, 0 if outputs is None else outputs.ctypes.data,
        )  # fmt: skip
        _raise(self._lib.expert_answer(call), f"dispatch of {num_tokens} rows refused")

    def _scratch_address(self, size_bytes: int) -> int:
        """Give this thread's scratch memory, grown when needed."""
        scratch = self._scratch
        if scratch.memory.size < size_bytes:
            scratch.memory = np.empty(max(size_bytes, 2 * scratch.memory.size), np.uint8)
            scratch.address = scratch.memory.ctypes.data
        return scratch.address


def _best_build(folder: Path) -> str:
    return NATIVE_BUILDS[_load(folder, "scalar").expert_cpu_level()]


def _load(folder: Path, name: str) -> ctypes.CDLL:
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
        "expert_scratch_bytes": (size, [pointer, word, word, word]),
        "expert_answer": (i32, [pointer]),
        "expert_encode_partial": (size, [pointer, word, word, word, pointer, pointer, word]),
        "expert_num_formats": (i32, []),
        "expert_format_type": (i32, [i32]),
        "expert_num_self_tests": (i32, []),
        "expert_self_tests_for": (i32, [pointer, pointer]),
        "expert_self_test_scratch_bytes": (size, []),
        "expert_self_test": (i32, [i32, i32, pointer, word, pointer]),
        "expert_read_memory": (ctypes.c_uint32, [pointer, word]),
    }
    for function, (result, arguments) in signatures.items():
        getattr(lib, function).restype = result
        getattr(lib, function).argtypes = arguments
    return lib
