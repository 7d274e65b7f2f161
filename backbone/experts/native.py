"""
Call the C kernel (wasm/expert.h) from Python: the driver around `libexpert`, through ctypes.

`NativeKernel()` loads the best build for this CPU. A call releases the GIL; every buffer it needs is the
caller's or belongs to the calling thread, so any number of threads may compute at once. A call that reads
much is itself shared by the threads that are idle (`threads=`), by rows, with the same bits.

Errors: backbone/experts/abi.py.
"""

import ctypes
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Lock, local

import numpy as np
import numpy.typing as npt

from backbone.experts.abi import (
    ACTIVATION_NUMBERS,
    BUILT,
    CALL_WORDS,
    MAX_SELF_TESTS,
    NATIVE_BUILDS,
    SELF_TEST_ROWS,
    WEIGHT_POSITION_NUMBERS,
    BadCall,
    Call,
    CFormula,
    CPiece,
    CRows,
    GridOverflow,
    KernelError,
    KernelFault,
    NonFinite,
    NotSupported,
    best_build,
    check,
    load,
)
from backbone.experts.memory import Arenas
from backbone.model.formula import Formula

__all__ = [
    "BUILT", "NATIVE_BUILDS", "BadCall", "Buffer", "Float32Array", "GridOverflow", "Int64Array",
    "KernelError", "KernelFault", "NativeKernel", "NonFinite", "NotSupported", "PackedExpert", "Rows",
    "split_rows",
]  # fmt: skip

type Buffer = bytes | bytearray | memoryview
type Int64Array = npt.NDArray[np.int64]
type Float32Array = npt.NDArray[np.float32]
type Rows = tuple[int, int, int, int]  # ExpertRows: first and end unit, first and end channel

SPLIT = 16  # EXPERT_SPLIT: bounds of rows are multiples of it
SPLIT_BYTES = 8 << 20  # by thread; with less, waiting for the others costs more than they save
PIECE_BYTES = 1 << 20


def split_rows(count: int, parts: int) -> list[tuple[int, int]]:
    """Give the bounds of `parts` nearly equal stretches of `count` rows; the last may be empty."""
    bounds = [min(count, -(-count * i // (parts * SPLIT)) * SPLIT) for i in range(parts)] + [count]
    return list(zip(bounds, bounds[1:], strict=False))


_ARENAS = Arenas()


class PackedExpert:
    """One expert, rearranged for this build. Holds the memory; freed with the object."""

    __slots__ = ("__weakref__", "address", "size_bytes")

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.address = _ARENAS.take(self, size_bytes)


class _Scratch(local):
    """Memory that one thread reuses from call to call."""

    memory: npt.NDArray[np.uint8] = np.empty(0, np.uint8)
    address = 0


class NativeKernel:
    """
    The kernel of wasm/, compiled for this CPU.

    build: which one, as nodes announce it ("native-avx2"). `build=` picks another than the best ("scalar").
    threads: how many may compute at once; calls that come from several threads count.

    Raises:
        KernelFault: there is no library for this machine; the message says how to make one.
    """

    def __init__(self, build: str | None = None, folder: Path = BUILT, threads: int = 1) -> None:
        name = build.removeprefix("native-") if build else best_build(folder)
        self._lib = load(folder, name)
        self.build = f"native-{self._lib.expert_build().decode()}"
        self.threads = threads
        self._pool = ThreadPoolExecutor(max(1, threads - 1), "rows")  # starts no thread before it is used
        self._lock = Lock()
        self._busy = 0  # threads that compute, under _lock
        self._formulas: dict[Formula, tuple[CFormula, int, int]] = {}
        self._scratch = _Scratch()
        self._proven: set[int] = set()  # known-answer tests that this build passed

    def packed_bytes(self, formula: Formula) -> int:
        """Say how much memory one packed expert takes; NotSupported where there is none."""
        return self._sized(formula)[2]

    def reserve(self, formula: Formula) -> PackedExpert:
        """
        Take the memory of one expert for a later `pack`.

        Raises:
            MemoryError: there is none. Else as `pack`.
        """
        return PackedExpert(self._formula(formula)[2])

    def pack(
        self,
        formula: Formula,
        slice_bytes: Buffer,
        rows: Rows | None = None,
        into: PackedExpert | None = None,
    ) -> PackedExpert:
        """
        Rearrange one slice (gate, up, down as they stand in the GGUF, then biases and scales) for this CPU;
        with `rows`, only these of its matrices: for expert_hidden and expert_finish. into: from `reserve`.

        Raises:
            NonFinite: a weight or scale is an infinity or NaN.
            BadCall: the length is not that of the formula.
            NotSupported: no such format or formula yet.
            KernelFault: this build gives a wrong answer in one of these formats; the message names the test.
        """
        c_formula, expected_bytes, packed_bytes = self._formula(formula)
        data = np.frombuffer(slice_bytes, np.uint8)
        if rows is not None:
            if data.size != expected_bytes:
                raise BadCall(-3, f"slice of {data.size} bytes refused")
            return self.pack_pieces(formula, lambda at, size: data[at : at + size].data, rows)
        packed = PackedExpert(packed_bytes) if into is None else into
        if packed.size_bytes != packed_bytes:
            raise BadCall(-3, f"{packed.size_bytes} bytes reserved for an expert of {packed_bytes}")
        code = self._lib.expert_pack(
            ctypes.byref(c_formula), data.ctypes.data, data.size, packed.address, packed_bytes
        )
        check(code, f"slice of {data.size} bytes refused")
        return packed

    def pack_pieces(
        self,
        formula: Formula,
        read: Callable[[int, int], Buffer],
        rows: Rows | None = None,
        piece_bytes: int = PIECE_BYTES,
    ) -> PackedExpert:
        """
        Like `pack`, from pieces, so that no second copy of the slice is ever in memory.

        `read(offset, size)` gives those bytes of the slice; it is called in ascending order, with sizes up to
        piece_bytes (or 16 rows of a matrix, if they are more), and only for what belongs to `rows`.
        """
        c_formula, _, _ = self._formula(formula)
        part = None if rows is None else ctypes.byref(CRows(*rows))
        size_bytes: int = self._lib.expert_part_bytes(ctypes.byref(c_formula), part)
        check(size_bytes, f"rows {rows}")
        packed, piece = PackedExpert(size_bytes), CPiece(0, 0)
        while True:
            self._lib.expert_next_piece(ctypes.byref(c_formula), part, piece_bytes, ctypes.byref(piece))
            if piece.size == 0:
                return packed
            data = np.frombuffer(read(piece.offset, piece.size), np.uint8)
            if data.size != piece.size:
                raise BadCall(-3, f"{data.size} bytes of a slice instead of {piece.size}")
            code = self._lib.expert_pack_piece(
                ctypes.byref(c_formula),
                part,
                ctypes.byref(piece),
                data.ctypes.data,
                packed.address,
                size_bytes,
            )
            check(code, f"bytes {piece.offset} to {piece.offset + piece.size} of a slice refused")

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
        words, kept = self._words(
            formula, rows, encoding, num_tokens, row_exponents, grid_kind, layer_exponents, counts, experts,
            pick_expert, pick_weight,
        )  # fmt: skip
        words["sums"] = sums.ctypes.data
        read_bytes = formula.slice_bytes * max(len(experts), len(pick_expert) // 4)
        with self._threads(read_bytes) as threads:
            self._answer(formula, words, threads)
        del kept
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
        words, kept = self._words(
            formula, rows, encoding, num_tokens, np.zeros(num_tokens, np.int16), 0, 0, counts, experts,
            pick_expert, pick_weight,
        )  # fmt: skip
        words["outputs"] = outputs.ctypes.data
        self._answer(formula, words, 1)
        del kept
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
        check(used, "partial not encoded")
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

    def _prove(self, c_formula: CFormula | None) -> None:
        """Run the tests that this formula needs (none: those before anything) and that did not run yet."""
        tests = (ctypes.c_int32 * MAX_SELF_TESTS)()
        count = self._lib.expert_self_tests_for(None if c_formula is None else ctypes.byref(c_formula), tests)
        check(count, "formula refused")
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

    def _formula(self, formula: Formula) -> tuple[CFormula, int, int]:
        """Give the C form of a formula, proven, with the sizes of its slices, as found and packed."""
        if (known := self._formulas.get(formula)) is None:
            known = self._sized(formula)
            self._prove(known[0])
            # Another thread may have been first, and calls under way read its memory: the first one stays.
            known = self._formulas.setdefault(formula, known)
        return known

    def _sized(self, formula: Formula) -> tuple[CFormula, int, int]:
        """The same before it is proven."""
        gate_type = -1 if formula.gate_type is None else formula.gate_type
        activation = ACTIVATION_NUMBERS.get(formula.activation)
        position = WEIGHT_POSITION_NUMBERS.get(formula.weight_position)
        if activation is None or position is None:
            raise NotSupported(-5, f"activation {formula.activation}, weight {formula.weight_position}")
        c_formula = CFormula(
            formula.hidden_dim, formula.expert_dim, gate_type, formula.up_type, formula.down_type,
            activation, position, formula.biased | formula.scaled << 1, formula.alpha, formula.limit,
        )  # fmt: skip
        slice_bytes = self._lib.expert_slice_bytes(ctypes.byref(c_formula))
        check(slice_bytes, f"formula {formula}")
        return c_formula, slice_bytes, self._lib.expert_packed_bytes(ctypes.byref(c_formula))

    def _words(
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
    ) -> tuple[dict[str, int], object]:
        """Give the words of a call, all but scratch and results, and what has to live as long as they do."""
        c_formula, _, _ = self._formula(formula)
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
        check(scratch_bytes, f"{num_tokens} rows, {pick_expert.size} picks")
        values = (
            ctypes.addressof(c_formula), num_tokens, pick_expert.size, len(experts), encoding, x.ctypes.data,
            x.size, exponents.ctypes.data, grid_kind, layer.ctypes.data, counts.ctypes.data,
            pick_expert.ctypes.data, pick_weight.ctypes.data, ctypes.addressof(addresses), 0, scratch_bytes,
            0, 0,
        )  # fmt: skip
        kept = c_formula, x, exponents, layer, counts, pick_expert, pick_weight, addresses, experts
        return dict(zip(CALL_WORDS, values, strict=True)), kept

    def _call(self, words: dict[str, int], **changed: int) -> "ctypes.Array[ctypes.c_size_t]":
        """Give a call as C wants it, with this thread's scratch."""
        scratch = self._scratch_address(words["scratch_bytes"])
        return Call(*(words | {"scratch": scratch} | changed).values())

    def _answer(self, formula: Formula, words: dict[str, int], threads: int) -> None:
        what = f"dispatch of {words['num_tokens']} rows refused"
        if threads == 1:
            check(self._lib.expert_answer(self._call(words)), what)
            return
        d, f = formula.hidden_dim, formula.expert_dim
        h = np.empty((words["num_picks"], f), np.float32)

        def hidden(units: tuple[int, int]) -> int:
            code: int = self._lib.expert_hidden(
                self._call(words), ctypes.byref(CRows(*units, 0, 0)), h.ctypes.data + 4 * units[0], f
            )
            return code

        def finish(channels: tuple[int, int]) -> int:
            sums = words["sums"] + 8 * channels[0]
            code: int = self._lib.expert_finish(
                self._call(words, sums=sums), ctypes.byref(CRows(0, 0, *channels)), h.ctypes.data, f, d
            )
            return code

        for half, count in ((hidden, f), (finish, d)):
            mine, *others = split_rows(count, threads)
            jobs = [self._pool.submit(half, part) for part in others]
            codes = [half(mine), *[job.result() for job in jobs]]
            check(min(codes), what)

    @contextmanager
    def _threads(self, read_bytes: int) -> Iterator[int]:
        """Give how many threads a call may use that reads so many bytes: this one and those that are idle."""
        wanted = min(self.threads, max(1, read_bytes // SPLIT_BYTES))
        with self._lock:
            taken = max(1, min(wanted, self.threads - self._busy))
            self._busy += taken
        try:
            yield taken
        finally:
            with self._lock:
                self._busy -= taken

    def _scratch_address(self, size_bytes: int) -> int:
        """Give this thread's scratch memory, grown when needed."""
        scratch = self._scratch
        if scratch.memory.size < size_bytes:
            scratch.memory = np.empty(max(size_bytes, 2 * scratch.memory.size), np.uint8)
            scratch.address = scratch.memory.ctypes.data
        return scratch.address
