"""
Encode what calls carry: Dispatch (rows of x and which experts to apply) and Partial (their weighted sum).

    Dispatch  u32 model_tag · u16 layer · u16 num_tokens · u8 x_encoding · u8 grid · u16 hidden_dim
              u32 num_picks
              i16 row_exponents[num_tokens] · u16 counts[num_tokens] · pad to 4
              u16 experts[num_picks] · pad to 4 · f32 weights[num_picks] · x
    Partial   u16 layer · u16 num_tokens · u16 hidden_dim · u8 grid · u8 0 · u32 compute_us
              u8 widths[num_tokens] · pad to 8 · rows, each padded to 8

Little endian; offsets count from the start of the payload; padding is zero. Picks stand row by row: row t has
`counts[t]` of them. Runs once per layer and token and node: no loop over picks.
"""

import struct
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from relay.wire.errors import LocalProtocolError, RemoteProtocolError
from relay.wire.frames import HEADER_BYTES, PAYLOAD_LIMITS, FrameType
from relay.wire.tensors import (
    Buffer,
    Float32Array,
    Grid,
    Int16Array,
    Int64Array,
    QuantisedRows,
    XEncoding,
    check_partial,
    decode_partial,
    decode_x,
    encode_partial,
    x_bytes,
)

type UInt16Array = npt.NDArray[np.uint16]

_DISPATCH = struct.Struct("<IHHBBHI")
_PARTIAL = struct.Struct("<HHHBBI")
_X_ENCODINGS = {int(encoding): encoding for encoding in XEncoding}
_GRIDS = {int(grid): grid for grid in Grid}
_MAX_BYTES = PAYLOAD_LIMITS[FrameType.DISPATCH]


def model_tag(model: str) -> int:
    """Return the tag a Dispatch carries: the first four bytes of the model's hash, little endian."""
    return int.from_bytes(bytes.fromhex(model[:8]), "little")


@dataclass(frozen=True, slots=True, eq=False)
class Dispatch:
    """
    Ask a node for the weighted sum of some experts of one layer.

    Shapes:
        row_exponents  int16   [num_tokens]  in [-100, 127]
        counts         uint16  [num_tokens]  picks of each row; their sum is num_picks
        experts        uint16  [num_picks]   row by row
        weights        float32 [num_picks]   finite
        x              encoded rows, see tensors.py; not looked into before `rows()`
    """

    model_tag: int
    layer: int
    hidden_dim: int
    x_encoding: XEncoding
    grid: Grid
    row_exponents: Int16Array
    counts: UInt16Array
    experts: UInt16Array
    weights: Float32Array
    x: Buffer

    @property
    def num_tokens(self) -> int:
        return len(self.row_exponents)

    @property
    def num_picks(self) -> int:
        return len(self.experts)

    def rows(self) -> QuantisedRows | Float32Array:
        """Decode x; raises RemoteProtocolError when it holds anything no sender should send."""
        return decode_x(self.x, self.num_tokens, self.hidden_dim, self.x_encoding)

    def to_payload(self) -> bytes:
        """Write the payload; raises LocalProtocolError when the arrays do not fit each other."""
        num_tokens, num_picks = len(self.row_exponents), len(self.experts)
        if len(self.counts) != num_tokens or len(self.weights) != num_picks:
            raise LocalProtocolError("dispatch: one count per row and one weight per pick are needed")
        try:
            head = _DISPATCH.pack(
                self.model_tag,
                self.layer,
                num_tokens,
                self.x_encoding,
                self.grid,
                self.hidden_dim,
                num_picks,
            )
        except struct.error as exc:
            raise LocalProtocolError(f"dispatch: a field is out of range: {exc}") from None
        return b"".join(
            (
                head,
                _as_bytes(self.row_exponents, "<i2"),
                _as_bytes(self.counts, "<u2"),  # with the exponents: 4 bytes a row, so no padding is due
                _as_bytes(self.experts, "<u2"),
                b"\0\0" if num_picks & 1 else b"",
                _as_bytes(self.weights, "<f4"),
                self.x,
            )
        )

    @classmethod
    def from_payload(cls, payload: bytes) -> Self:
        """Read the payload; arrays are views into it. Raises RemoteProtocolError for any breach."""
        if len(payload) < _DISPATCH.size:
            raise RemoteProtocolError(f"dispatch: {len(payload)} bytes, the fixed part has {_DISPATCH.size}")
        tag, layer, num_tokens, encoding_id, grid_id, hidden_dim, num_picks = _DISPATCH.unpack_from(payload)
        encoding, grid = _X_ENCODINGS.get(encoding_id), _GRIDS.get(grid_id)
        if encoding is None or grid is None:
            raise RemoteProtocolError(f"dispatch: unknown x encoding {encoding_id} or grid {grid_id}")
        if not num_tokens or not hidden_dim or not num_picks:
            raise RemoteProtocolError(
                f"dispatch: {num_tokens} rows of {hidden_dim} with {num_picks} picks, none may be 0"
            )
        try:
            size_of_x = x_bytes(num_tokens, hidden_dim, encoding)
        except ValueError as exc:
            raise RemoteProtocolError(f"dispatch: {exc}") from None
        at_counts = _DISPATCH.size + 2 * num_tokens
        at_experts = at_counts + 2 * num_tokens
        at_weights = at_experts + 2 * (num_picks + (num_picks & 1))
        at_x = at_weights + 4 * num_picks
        if len(payload) != at_x + size_of_x:
            raise RemoteProtocolError(f"dispatch: {len(payload)} bytes, {at_x + size_of_x} are needed")
        counts = np.frombuffer(payload, "<u2", num_tokens, at_counts)
        exponents = np.frombuffer(payload, "<i2", num_tokens, _DISPATCH.size)
        weights = np.frombuffer(payload, "<f4", num_picks, at_weights)
        if int(counts.sum(dtype=np.int64)) != num_picks:
            raise RemoteProtocolError(f"dispatch: counts do not add up to {num_picks} picks")
        if int(exponents.min()) < -100 or int(exponents.max()) > 127:
            raise RemoteProtocolError("dispatch: a row exponent is outside [-100, 127]")
        if not np.isfinite(weights).all():
            raise RemoteProtocolError("dispatch: a weight is not finite")
        if num_picks & 1 and payload[at_weights - 2 : at_weights] != b"\0\0":
            raise RemoteProtocolError("dispatch: padding is not zero")
        return cls(
            model_tag=tag,
            layer=layer,
            hidden_dim=hidden_dim,
            x_encoding=encoding,
            grid=grid,
            row_exponents=exponents,
            counts=counts,
            experts=np.frombuffer(payload, "<u2", num_picks, at_experts),
            weights=weights,
            x=memoryview(payload)[at_x:],
        )


@dataclass(frozen=True, slots=True)
class Partial:
    """Answer a Dispatch: per row the sum over its picks, integers on the grid, each row in its own width."""

    layer: int
    hidden_dim: int
    grid: Grid
    compute_us: int
    widths: bytes
    data: Buffer

    @property
    def num_tokens(self) -> int:
        return len(self.widths)

    @property
    def frame_bytes(self) -> int:
        """Size of the whole frame, header included."""
        at_padding = _PARTIAL.size + len(self.widths)
        return HEADER_BYTES + at_padding + -at_padding % 8 + len(self.data)

    @classmethod
    def from_sums(cls, layer: int, sums: Int64Array, grid: Grid, compute_us: int) -> Self:
        """Encode int64 sums [num_tokens, hidden_dim], each row as narrow as it fits."""
        widths, data = encode_partial(sums, grid)
        return cls(layer, sums.shape[1], grid, compute_us, widths, data)

    def sums(self) -> Int64Array:
        """Decode the rows to int64 [num_tokens, hidden_dim]; raises RemoteProtocolError."""
        return decode_partial(self.widths, self.data, self.hidden_dim, self.grid)

    def to_payload(self) -> bytes:
        """Write the payload; raises LocalProtocolError for fields out of range."""
        num_tokens = len(self.widths)
        try:
            head = _PARTIAL.pack(
                self.layer, num_tokens, self.hidden_dim, self.grid, 0, min(self.compute_us, 0xFFFF_FFFF)
            )
        except struct.error as exc:
            raise LocalProtocolError(f"partial: a field is out of range: {exc}") from None
        return b"".join((head, self.widths, bytes(-(_PARTIAL.size + num_tokens) % 8), self.data))

    @classmethod
    def from_payload(cls, payload: bytes) -> Self:
        """Read the payload; rows are checked for length and decoded by `sums()`."""
        if len(payload) < _PARTIAL.size:
            raise RemoteProtocolError(f"partial: {len(payload)} bytes, the fixed part has {_PARTIAL.size}")
        layer, num_tokens, hidden_dim, grid_id, reserved, compute_us = _PARTIAL.unpack_from(payload)
        grid = _GRIDS.get(grid_id)
        if grid is None or reserved:
            raise RemoteProtocolError(f"partial: unknown grid {grid_id} or reserved byte {reserved}")
        at_padding = _PARTIAL.size + num_tokens
        at_rows = at_padding + -at_padding % 8
        if len(payload) < at_rows or any(payload[at_padding:at_rows]):
            raise RemoteProtocolError("partial: cut off in its widths, or padding is not zero")
        widths = payload[_PARTIAL.size : at_padding]
        check_partial(widths, len(payload) - at_rows, hidden_dim, grid)
        return cls(layer, hidden_dim, grid, compute_us, widths, memoryview(payload)[at_rows:])


@dataclass(frozen=True, slots=True)
class Probe:
    """
    Ask for an Echo, to time a message of this size each way. What fills it says nothing.

    `size_bytes` is the size of this payload, `answer_bytes` the size the answer's shall have.
    """

    size_bytes: int
    answer_bytes: int

    def to_payload(self) -> bytes:
        return self.answer_bytes.to_bytes(4, "little") + bytes(self.size_bytes - 4)

    @classmethod
    def from_payload(cls, payload: bytes) -> Self:
        """Read the payload; raises RemoteProtocolError when the answer would be larger than a frame."""
        if len(payload) < 4:
            raise RemoteProtocolError(f"probe: {len(payload)} bytes, at least 4 are needed")
        answer_bytes = int.from_bytes(payload[:4], "little")
        if answer_bytes > PAYLOAD_LIMITS[FrameType.ECHO]:
            raise RemoteProtocolError(f"probe: an answer of {answer_bytes} bytes is larger than a frame")
        return cls(len(payload), answer_bytes)


def _as_bytes(values: npt.NDArray[Any], dtype: str) -> bytes:
    return values.tobytes() if values.dtype == dtype else values.astype(dtype).tobytes()
