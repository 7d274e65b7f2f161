"""
Read Dispatch and Partial without numpy: the layout of relay/wire/calls.py, in `struct` and `memoryview`.

A test holds both against the same bytes.
"""

import struct
from dataclasses import dataclass
from math import isfinite
from typing import Self

from expertswarm_verify.wire.errors import RemoteProtocolError

_DISPATCH = struct.Struct("<IHHBBHI")
_PARTIAL = struct.Struct("<HHHBBI")
BLOCKS = {2: 32, 3: 256}  # x encoding -> columns of one scale; 0 is f32, 1 is f16
WIDTHS = {0: (4, 8), 1: (2, 4, 8)}  # grid -> bytes of a channel
ROW_EXPONENTS = range(-100, 128)


def x_bytes(num_tokens: int, hidden_dim: int, encoding: int) -> int:
    """Return how long x is; raises RemoteProtocolError when rows do not divide into blocks."""
    block = BLOCKS.get(encoding)
    if block is None:
        return num_tokens * hidden_dim * (2 if encoding else 4)
    if hidden_dim % block:
        raise RemoteProtocolError(f"dispatch: {hidden_dim} columns are no multiple of {block}")
    return num_tokens * -(-(hidden_dim // block * 4 + hidden_dim) // 4) * 4


@dataclass(frozen=True, slots=True)
class Dispatch:
    """What a node was asked: row t has counts[t] picks, which stand row by row in experts and weights."""

    model_tag: int
    layer: int
    hidden_dim: int
    x_encoding: int
    grid: int
    row_exponents: tuple[int, ...]
    counts: tuple[int, ...]
    experts: tuple[int, ...]
    weights: tuple[float, ...]
    x: bytes

    @property
    def num_tokens(self) -> int:
        return len(self.counts)

    @classmethod
    def from_payload(cls, payload: bytes) -> Self:
        """Read the payload; raises RemoteProtocolError for any breach."""
        if len(payload) < _DISPATCH.size:
            raise RemoteProtocolError(f"dispatch: {len(payload)} bytes, the fixed part has {_DISPATCH.size}")
        tag, layer, rows, encoding, grid, dim, picks = _DISPATCH.unpack_from(payload)
        if encoding > 3 or grid not in WIDTHS:
            raise RemoteProtocolError(f"dispatch: unknown x encoding {encoding} or grid {grid}")
        if not rows or not dim or not picks:
            raise RemoteProtocolError(f"dispatch: {rows} rows of {dim} with {picks} picks, none may be 0")
        form = struct.Struct(f"<{rows}h{rows}H{picks}H{2 * (picks & 1)}s{picks}f")
        at_x = _DISPATCH.size + form.size
        if len(payload) != at_x + x_bytes(rows, dim, encoding):
            raise RemoteProtocolError(f"dispatch: {len(payload)} bytes do not hold what they announce")
        fields = form.unpack_from(payload, _DISPATCH.size)
        exponents, counts = fields[:rows], fields[rows : 2 * rows]
        experts, padding = fields[2 * rows : 2 * rows + picks], fields[2 * rows + picks]
        weights = fields[2 * rows + picks + 1 :]
        if any(padding) or sum(counts) != picks:
            raise RemoteProtocolError("dispatch: padding is not zero, or counts do not add up")
        if not all(e in ROW_EXPONENTS for e in exponents) or not all(isfinite(w) for w in weights):
            raise RemoteProtocolError("dispatch: a row exponent out of range or a weight that is not finite")
        return cls(tag, layer, dim, encoding, grid, exponents, counts, experts, weights, payload[at_x:])


@dataclass(frozen=True, slots=True)
class Partial:
    """What a node answered: integers on the grid, each row in a width of its own."""

    layer: int
    hidden_dim: int
    grid: int
    compute_us: int
    widths: bytes
    data: bytes

    @classmethod
    def from_payload(cls, payload: bytes) -> Self:
        """Read the payload; raises RemoteProtocolError for any breach but padding inside rows."""
        if len(payload) < _PARTIAL.size:
            raise RemoteProtocolError(f"partial: {len(payload)} bytes, the fixed part has {_PARTIAL.size}")
        layer, rows, dim, grid, reserved, compute_us = _PARTIAL.unpack_from(payload)
        at_padding = _PARTIAL.size + rows
        at_rows = -(-at_padding // 8) * 8
        if reserved or grid not in WIDTHS or len(payload) < at_rows or any(payload[at_padding:at_rows]):
            raise RemoteProtocolError("partial: cut off, an unknown grid, or padding that is not zero")
        widths = payload[_PARTIAL.size : at_padding]
        if not rows or not dim or any(width not in WIDTHS[grid] for width in widths):
            raise RemoteProtocolError("partial: no rows, or a width the grid does not have")
        if len(payload) != at_rows + sum(-(-dim * width // 8) * 8 for width in widths):
            raise RemoteProtocolError("partial: another number of bytes than its widths say")
        return cls(layer, dim, grid, compute_us, widths, payload[at_rows:])

    def to_payload(self) -> bytes:
        """Write the payload."""
        head = _PARTIAL.pack(self.layer, len(self.widths), self.hidden_dim, self.grid, 0, self.compute_us)
        return head + self.widths + bytes(-(len(head) + len(self.widths)) % 8) + self.data
