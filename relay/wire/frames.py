"""
Encode and decode one frame: a 32-byte header and a payload, in one binary WebSocket message.

    offset 0         2     3      4       6          8        12      16        24      28
           "ES"      u8    u8     u16     u16        u32      u32     u64       u32     u32
           magic     ver   type   flags   reserved   length   peer    call_id   epoch   deadline_ms

Little endian throughout. See PROTOCOL.md, "Frame".
"""

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from relay.wire.errors import FrameTooLarge, LocalProtocolError, RemoteProtocolError, VersionMismatch

MAGIC = b"ES"
VERSION = 2
HEADER = struct.Struct("<2sBBHHIIQII")
HEADER_BYTES = HEADER.size
_PEER_OFFSET = 12
FLAG_SEALED = 1  # the payload is sealed between node and backbone, see seal.py
SEAL_BYTES = 8 + 16  # what a sealed payload is longer: counter and tag
PIECE_BYTES = 32 << 10  # longer payloads are cut (pieces.py); at 1 Mbit/s one takes a quarter of a second
PIECE_HEAD_BYTES = 12

_KIB, _MIB = 1 << 10, 1 << 20


class FrameType(IntEnum):
    """What a frame is. 1-15 pairing, 16-31 calls, 32-47 the session itself, 48-63 paths between peers."""

    HELLO = 1
    WELCOME = 2
    OFFER = 3
    REGISTER = 4
    ASSIGN = 5
    SLICE_READY = 6
    PEERS = 7
    SLICE_WANTED = 8
    LINK_HELLO = 9
    LINK_PROOF = 10
    DISPATCH = 16
    PARTIAL = 17
    CANCEL = 18
    FAILURE = 19
    PROBE = 20
    ECHO = 21
    PIECE = 22
    PING = 32
    PONG = 33
    DRAIN = 34
    BYE = 35
    PAUSE = 36
    SIGNAL = 48
    PATH_REPORT = 49
    RECEIPT = 50
    SEAL_HELLO = 51
    SEAL_ANSWER = 52

    __hash__ = int.__hash__  # Enum's own is written in Python, and tables are asked for every frame


CALL_TYPES = frozenset(
    {
        FrameType.DISPATCH,
        FrameType.PARTIAL,
        FrameType.CANCEL,
        FrameType.FAILURE,
        FrameType.PROBE,
        FrameType.ECHO,
    }
)
SIGNAL_TYPES = frozenset({FrameType.SIGNAL, FrameType.SEAL_HELLO, FrameType.SEAL_ANSWER})
PASSED_ON = CALL_TYPES | SIGNAL_TYPES  # go to a peer beyond the relay, which reads the header only
SEALABLE = CALL_TYPES | {FrameType.SIGNAL}
RESERVED_TYPES = frozenset({FrameType.RECEIPT})

# Longest payload per type. What lists slices of a whole model may be long; nothing else needs to be.
PAYLOAD_LIMITS: dict[FrameType, int] = {
    FrameType.HELLO: 16 * _KIB,  # read before anybody is known: keep it small
    FrameType.WELCOME: 16 * _KIB,
    FrameType.OFFER: 1280 * _KIB,  # 16384 slices held
    FrameType.REGISTER: 16 * _MIB,
    FrameType.ASSIGN: 16 * _MIB,
    FrameType.SLICE_READY: 256 * _KIB,
    FrameType.PEERS: 16 * _MIB,
    FrameType.SLICE_WANTED: _KIB,
    FrameType.LINK_HELLO: _KIB,
    FrameType.LINK_PROOF: _KIB,
    FrameType.DISPATCH: 16 * _MIB,
    FrameType.PARTIAL: 16 * _MIB,
    FrameType.CANCEL: 0,
    FrameType.FAILURE: 16 * _KIB,
    FrameType.PROBE: 256 * _KIB,
    FrameType.ECHO: 256 * _KIB,
    FrameType.PIECE: PIECE_HEAD_BYTES + PIECE_BYTES,
    FrameType.PING: _KIB,
    FrameType.PONG: _KIB,
    FrameType.DRAIN: 4 * _KIB,
    FrameType.BYE: 4 * _KIB,
    FrameType.PAUSE: _KIB,
    FrameType.SIGNAL: 16 * _KIB,
    FrameType.PATH_REPORT: _MIB,
    FrameType.SEAL_HELLO: _KIB,
    FrameType.SEAL_ANSWER: _KIB,
}
MAX_FRAME_BYTES = HEADER_BYTES + 16 * _MIB + SEAL_BYTES
MAX_MESSAGE_BYTES = HEADER_BYTES + PIECE_HEAD_BYTES + PIECE_BYTES  # nothing longer is written in one message

_TYPES = {int(kind): kind for kind in FrameType}
_U32 = 0xFFFF_FFFF
_U64 = 0xFFFF_FFFF_FFFF_FFFF


@dataclass(frozen=True, slots=True)
class Frame:
    """
    One frame. `peer`, `call_id`, `epoch` and `deadline_ms` belong to calls and are 0 in control frames; a
    Signal, SealHello or SealAnswer has `peer` and `epoch`.

    `peer` is the handle of the other end beyond the relay: the receiver when sent, the sender when received.
    `deadline_ms` is the time left for the call when its sender sent it; 0 means none.
    """

    type: FrameType
    payload: bytes = b""
    peer: int = 0
    call_id: int = 0
    epoch: int = 0
    deadline_ms: int = 0
    sealed: bool = False  # the payload is what seal.py made of it

    def encode(self) -> bytes:
        """Return header and payload as one message; LocalProtocolError for what `decode` would refuse."""
        length = len(self.payload)
        limit = PAYLOAD_LIMITS.get(self.type)
        if limit is None:
            raise LocalProtocolError(f"{self.type.name} frames are not negotiated in version {VERSION}")
        if self.sealed:
            limit += SEAL_BYTES
        if length > limit:
            raise LocalProtocolError(
                f"{self.type.name}: payload of {length} bytes, at most {limit} are allowed"
            )
        if self.sealed and (self.type not in SEALABLE or length < SEAL_BYTES):
            raise LocalProtocolError(f"{self.type.name}: {length} bytes are no sealed payload")
        fields = (self.peer, self.call_id, self.epoch, self.deadline_ms)
        fault = _field_fault(self.type, *fields)
        if fault is not None:
            raise LocalProtocolError(fault)
        bounds = (_U32, _U64, _U32, _U32)
        if not all(0 <= value <= bound for value, bound in zip(fields, bounds, strict=True)):
            raise LocalProtocolError(f"{self.type.name}: a header field is out of range: {fields}")
        return HEADER.pack(MAGIC, VERSION, self.type, int(self.sealed), 0, length, *fields) + self.payload

    @classmethod
    def decode(cls, data: bytes) -> "Frame":
        """Read one message; raises RemoteProtocolError for anything that is not exactly one frame."""
        head = decode_header(data)
        return cls(head.type, data[HEADER_BYTES:], *head[2:])


class Header(NamedTuple):  # made for every frame: half the cost of a frozen dataclass
    """The header of a frame whose payload nobody has looked at: all a forwarder needs."""

    type: FrameType
    length: int
    peer: int
    call_id: int
    epoch: int
    deadline_ms: int
    sealed: bool


def decode_header(data: bytes) -> Header:
    """Check and read the header of one whole message; payload: `data[HEADER_BYTES:]`, length checked."""
    if len(data) < HEADER_BYTES:
        raise RemoteProtocolError(f"frame of {len(data)} bytes, a header alone has {HEADER_BYTES}")
    magic, version, number, flags, reserved, length, *fields = HEADER.unpack_from(data)
    peer, call_id, epoch, deadline_ms = fields
    if magic != MAGIC:
        raise RemoteProtocolError(f"no frame: starts with {magic.hex()}, expected {MAGIC.hex()}")
    if version != VERSION:
        raise VersionMismatch(version, VERSION)
    kind = _TYPES.get(number)
    if kind is None:
        raise RemoteProtocolError(f"unknown frame type {number}")
    limit = PAYLOAD_LIMITS.get(kind)
    if limit is None:
        raise RemoteProtocolError(f"{kind.name} frames are not negotiated in version {VERSION}")
    sealed = flags == FLAG_SEALED and kind in SEALABLE
    if (flags and not sealed) or reserved:
        raise RemoteProtocolError(f"{kind.name}: flags {flags:#x} and reserved {reserved:#x} must be 0")
    if sealed:
        limit += SEAL_BYTES
        if length < SEAL_BYTES:
            raise RemoteProtocolError(f"{kind.name}: {length} bytes are no sealed payload")
    if length > limit:
        raise FrameTooLarge(kind.name, length, limit)
    if length != len(data) - HEADER_BYTES:
        raise RemoteProtocolError(f"{kind.name}: header says {length} bytes, {len(data) - HEADER_BYTES} came")
    fault = _field_fault(kind, peer, call_id, epoch, deadline_ms)
    if fault is not None:
        raise RemoteProtocolError(fault)
    return Header(kind, length, peer, call_id, epoch, deadline_ms, sealed)


def readdress(data: bytes, peer: int) -> bytes:
    """Return the same message with another `peer`: what the relay does to every call it carries. One copy."""
    view = memoryview(data)
    return b"".join((view[:_PEER_OFFSET], peer.to_bytes(4, "little"), view[_PEER_OFFSET + 4 :]))


def _field_fault(kind: FrameType, peer: int, call_id: int, epoch: int, deadline_ms: int) -> str | None:
    if kind in CALL_TYPES:
        return None if peer and call_id else f"{kind.name}: peer {peer} and call_id {call_id} must not be 0"
    if kind is FrameType.PIECE and (peer or call_id):
        return None if peer and call_id else "PIECE: peer and call_id must both be 0 or both not"
    if kind in SIGNAL_TYPES:
        clean = peer and not call_id and not deadline_ms
        return None if clean else f"{kind.name}: peer must not be 0, call_id and deadline_ms must be 0"
    if peer or call_id or epoch or deadline_ms:
        return f"{kind.name}: peer, call_id, epoch and deadline_ms must be 0 in a control frame"
    return None
