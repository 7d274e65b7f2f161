"""
Read the head of a GGUF file: metadata and where each tensor lies. Weights stay in the mapped file.

    "GGUF" · u32 version (2 or 3) · u64 number of tensors · u64 number of metadata entries
    entry    string key · u32 type · value          string  u64 length · UTF-8
                                                    array   u32 type of items · u64 count · items
    tensor   string name · u32 dimensions · u64 each · u32 ggml type · u64 offset from the start of the data
    data     starts at the next multiple of general.alignment (32)

Little endian. The `gguf` package reads the same, but makes an object of every token of the vocabulary, which
takes seconds; here all but short arrays of numbers (one per layer) are stepped over.
"""

import math
import mmap
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES

from backbone.errors import ModelError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT_KEY = "general.alignment"
DEFAULT_ALIGNMENT = 32
MAX_DIMENSIONS = 4
MAX_NUMBERS = 4096  # in an array that is kept
MAX_STRING_BYTES = 1 << 20  # a chat template is a few thousand; tokens are shorter still

# metadata type -> struct code; 8 is a string, 9 an array
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING = 8
ARRAY = 9

# ggml type id -> columns and bytes of a block. A type that is not here has no size; others than experts may
# have one that only llama.cpp knows.
SIZES = {int(type_id): size for type_id, size in GGML_QUANT_SIZES.items()}
SHOWN_CHARS = 120


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor: `shape` in ggml's order (columns first), `start` from the beginning of the file."""

    name: str
    shape: tuple[int, ...]
    type_id: int
    start: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class GgufFile:
    """Metadata without its long arrays, and the tensors by name."""

    path: Path
    values: dict[str, Any]
    tensors: dict[str, TensorInfo]
    data: npt.NDArray[np.uint8] = field(repr=False)  # the whole file, mapped read-only

    def bytes_of(self, tensor: TensorInfo) -> npt.NDArray[np.uint8]:
        """The tensor's bytes, a view into the file."""
        return self.data[tensor.start : tensor.start + tensor.size_bytes]


def read_gguf(path: Path) -> GgufFile:
    """
    Read a file's head.

    Raises:
        ModelError: there is no such file, or it is not a whole GGUF.
    """
    if path.exists() and not path.is_file():  # opening a pipe would wait for its other end
        raise ModelError(f"{path.name} is not a file")
    try:
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError as exc:
        raise ModelError(f"no such model file: {path}") from exc
    except (OSError, ValueError) as exc:  # ValueError: an empty file cannot be mapped
        raise ModelError(f"{path.name} is not a readable GGUF: {getattr(exc, 'strerror', exc)}") from exc
    try:
        values, tensors = _parse(mapped)
    except struct.error as exc:
        raise ModelError(f"{path.name} is not a readable GGUF: it ends within its head") from exc
    except (ValueError, OverflowError) as exc:
        raise ModelError(f"{path.name} is not a readable GGUF: {exc}") from exc
    return GgufFile(path, values, tensors, np.frombuffer(mapped, np.uint8))


def _parse(data: mmap.mmap) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
    if data[:4] != MAGIC:
        raise ValueError(f"it starts with {data[:4]!r}")
    cursor = _Cursor(data, 4)
    version = cursor.scalar("I")
    if version not in VERSIONS:
        raise ValueError(f"version {version} (known: {VERSIONS})")
    num_tensors, num_entries = cursor.scalar("Q"), cursor.scalar("Q")
    values: dict[str, Any] = {}
    for _ in range(num_entries):
        key = cursor.string()
        kind = cursor.scalar("I")
        if kind == ARRAY:
            if (numbers := cursor.array()) is not None:
                values[key] = numbers
        else:
            values[key] = cursor.string() if kind == STRING else cursor.scalar(_code(kind))
    heads = [_tensor_head(cursor) for _ in range(num_tensors)]
    alignment = values.get(ALIGNMENT_KEY, DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise ValueError(f"{ALIGNMENT_KEY} is {alignment!r}")
    start = -(-cursor.at // alignment) * alignment
    tensors = {}
    for name, shape, type_id, offset in heads:
        block, block_bytes = SIZES.get(type_id, (1, 0))
        if shape[0] % block:
            raise ValueError(
                f"{shown(name)}: rows of {shape[0]} columns are no whole number of blocks of {block}"
            )
        size_bytes = math.prod(shape) // block * block_bytes
        if start + offset + size_bytes > len(data):
            raise ValueError(f"{shown(name)} ends beyond the file: it is cut short")
        if name in tensors:
            raise ValueError(f"{shown(name)} is in it twice")
        tensors[name] = TensorInfo(name, shape, type_id, start + offset, size_bytes)
    return values, tensors


def _tensor_head(cursor: "_Cursor") -> tuple[str, tuple[int, ...], int, int]:
    name = cursor.string()
    num_dims = cursor.scalar("I")
    if not 1 <= num_dims <= MAX_DIMENSIONS:
        raise ValueError(f"{shown(name)} has {num_dims} dimensions")
    shape = tuple(cursor.scalar("Q") for _ in range(num_dims))
    return name, shape, cursor.scalar("I"), cursor.scalar("Q")


def shown(text: str) -> str:
    """A text of the file as it may stand in a line: short, without control characters."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text[:SHOWN_CHARS])


def _code(kind: int) -> str:
    if kind not in SCALARS:
        raise ValueError(f"a value of type {kind}, which is not known")
    return SCALARS[kind]


class _Cursor:
    """A place in the file; every read moves it and fails at the end."""

    __slots__ = ("_data", "at")

    def __init__(self, data: mmap.mmap, at: int) -> None:
        self._data = data
        self.at = at

    def scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from(f"<{code}", self._data, self.at)
        self.at += struct.calcsize(f"<{code}")
        return value

    def string(self) -> str:
        size = self.scalar("Q")
        if size > MAX_STRING_BYTES:
            raise ValueError(f"a string of {size} bytes")
        text = self._data[self.at : self.at + size]
        if len(text) != size:
            raise ValueError("it ends within a string")
        self.at += size
        return text.decode("utf-8", "replace")

    def array(self) -> tuple[Any, ...] | None:
        """Give a short array of numbers; step over any other."""
        kind, count = self.scalar("I"), self.scalar("Q")
        if kind == STRING:
            self._skip_strings(count)
            return None
        if kind == ARRAY:
            raise ValueError("an array of arrays")
        start, code = self.at, _code(kind)
        self.at += count * struct.calcsize(f"<{code}")
        if self.at > len(self._data):
            raise ValueError("it ends within an array")
        return struct.unpack_from(f"<{count}{code}", self._data, start) if count <= MAX_NUMBERS else None

    def _skip_strings(self, count: int) -> None:
        unpack = struct.Struct("<Q").unpack_from
        at, data, end = self.at, self._data, len(self._data)
        for _ in range(count):  # struct.error at the end of the file bounds the loop
            (size,) = unpack(data, at)
            at += 8 + size
            if at > end:
                raise ValueError("it ends within an array")
        self.at = at
