"""
Cut long frames into pieces, choose what leaves next, put pieces together again. Pure.

A frame whose payload is longer than PIECE_BYTES never travels as one message: a beat or a small call would
wait behind all of it, and who receives messages only whole (a browser) would see no sign of life meanwhile.
It is cut after it was sealed and put together before it is opened; a relay passes on pieces of calls.

    Piece  u8 type of the whole · u8 1: it is sealed · u16 0 · u32 its length · u32 offset · bytes from there

Header fields are those of the whole, so that a relay can forward each piece. See PROTOCOL.md, "Pieces".
"""

import struct
from collections import deque
from dataclasses import dataclass, field

from relay.wire.errors import FrameTooLarge, RemoteProtocolError
from relay.wire.frames import (
    CALL_TYPES,
    FLAG_SEALED,
    HEADER,
    HEADER_BYTES,
    MAGIC,
    PAYLOAD_LIMITS,
    PIECE_BYTES,
    PIECE_HEAD_BYTES,
    SEAL_BYTES,
    SEALABLE,
    VERSION,
    FrameType,
    Header,
    decode_header,
)

_HEAD = struct.Struct("<BBHII")
assert _HEAD.size == PIECE_HEAD_BYTES
_CUT = frozenset(kind for kind, limit in PAYLOAD_LIMITS.items() if limit > PIECE_BYTES)
_KINDS = {int(kind): kind for kind in _CUT}
_BULK = frozenset({FrameType.DISPATCH, FrameType.PARTIAL, FrameType.PROBE, FrameType.ECHO})
_BEATS = frozenset({FrameType.PING, FrameType.PONG})

MAX_PARTS = 64  # unfinished frames of one peer; the oldest is given up
MAX_PEER_BYTES = 34 << 20  # of one peer: two of the longest
MAX_BYTES = 256 << 20  # of all peers of a session; a prompt's answers of many nodes come side by side
MAX_AGE_S = 120.0  # for one frame, whatever its size: no call waits as long


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a frame. `whole` is the header of that frame."""

    whole: Header
    offset: int
    data: memoryview

    @property
    def last(self) -> bool:
        return self.offset + len(self.data) == self.whole.length


def is_piece(data: bytes | str) -> bool:
    return isinstance(data, bytes) and len(data) >= HEADER_BYTES and data[3] == FrameType.PIECE


def decode_piece(data: bytes) -> Piece:
    """
    Read a Piece.

    Raises:
        RemoteProtocolError: it is no piece that a sender who keeps to the protocol makes.
    """
    head = decode_header(data)
    if head.type is not FrameType.PIECE or head.length <= PIECE_HEAD_BYTES:
        raise RemoteProtocolError(f"PIECE: {head.length} bytes are no piece")
    number, flags, reserved, length, offset = _HEAD.unpack_from(data, HEADER_BYTES)
    kind = _KINDS.get(number)
    if kind is None or (kind in CALL_TYPES) != bool(head.peer):
        raise RemoteProtocolError(f"PIECE: of a frame of type {number}, which is not cut")
    sealed = flags == FLAG_SEALED and kind in SEALABLE
    if reserved or (flags and not sealed):
        raise RemoteProtocolError(f"PIECE: flags {flags:#x} and reserved {reserved:#x} must be 0")
    limit = PAYLOAD_LIMITS[kind] + (SEAL_BYTES if sealed else 0)
    if length > limit:
        raise FrameTooLarge(kind.name, length, limit)
    part = memoryview(data)[HEADER_BYTES + PIECE_HEAD_BYTES :]
    if length <= PIECE_BYTES or offset % PIECE_BYTES or len(part) != min(PIECE_BYTES, length - offset):
        raise RemoteProtocolError(f"PIECE: {len(part)} bytes at {offset} are no piece of {length}")
    whole = Header(kind, length, head.peer, head.call_id, head.epoch, head.deadline_ms, sealed)
    return Piece(whole, offset, part)


def cut(frame: bytes, offset: int) -> bytes:
    """Give the piece of a whole frame that begins at `offset` of its payload."""
    view = memoryview(frame)
    magic, version, kind, flags, _, length, *fields = HEADER.unpack_from(frame)
    part = view[HEADER_BYTES + offset : HEADER_BYTES + offset + PIECE_BYTES]
    size = PIECE_HEAD_BYTES + len(part)
    head = HEADER.pack(magic, version, FrameType.PIECE, 0, 0, size, *fields)
    return b"".join((head, _HEAD.pack(kind, flags, 0, length, offset), part))


def too_long(frame: bytes) -> bool:
    """Whether a frame must be cut."""
    return len(frame) > HEADER_BYTES + PIECE_BYTES


def pieces(frame: bytes) -> list[bytes]:
    """Give the messages a frame travels in: itself, or its pieces."""
    if not too_long(frame):
        return [frame]
    return [cut(frame, offset) for offset in range(0, len(frame) - HEADER_BYTES, PIECE_BYTES)]


class SendQueue:
    """
    What one end has to say: put frames, pop messages in the order in which they leave.

    Beats go first. Then what is short, control before calls; once as much as a piece of that has passed while
    something long waits, one piece of the long goes. Long frames keep their order, and so does control, short
    or long. Bye is the last word. A Cancel takes its call out as far as it has not left.
    """

    __slots__ = ("_beats", "_bulk", "_bye", "_calls", "_control", "_passed", "_turn", "size_bytes")

    def __init__(self) -> None:
        self.size_bytes = 0
        self._beats: deque[bytes] = deque()
        self._control: deque[bytes] = deque()
        self._calls: deque[bytes] = deque()
        self._bulk: deque[bytes] = deque()
        self._bye: deque[bytes] = deque()
        self._turn: dict[int, int] = {}  # id of a queue whose head is being cut -> offset of its next piece
        self._passed = 0  # bytes of short frames since the last piece

    def __len__(self) -> int:
        return sum(map(len, (self._beats, self._control, self._calls, self._bulk, self._bye)))

    def put(self, frame: bytes) -> None:
        """Queue one whole frame, as it was sealed."""
        kind = frame[3]
        if kind == FrameType.CANCEL:
            self._cancel(frame)
        if kind in _BEATS:
            queue = self._beats
        elif kind == FrameType.BYE:
            queue = self._bye
        elif kind in _BULK:
            queue = self._bulk if too_long(frame) else self._calls
        else:
            queue = self._control
        queue.append(frame)
        self.size_bytes += len(frame)

    def pop(self) -> bytes | None:
        """Take the next message to write, or None."""
        if self._beats:
            return self._whole(self._beats)
        long_control = bool(self._control) and too_long(self._control[0])
        short = self._calls if long_control or not self._control else self._control
        if short and (self._passed < PIECE_BYTES or not (long_control or self._bulk)):
            message = self._whole(short)
            self._passed += len(message)
            return message
        if long_control or self._bulk:
            self._passed = 0
            return self._next_piece(self._control if long_control else self._bulk)
        return self._whole(self._bye) if self._bye else None

    def _whole(self, queue: deque[bytes]) -> bytes:
        frame = queue.popleft()
        self.size_bytes -= len(frame)
        return frame

    def _next_piece(self, queue: deque[bytes]) -> bytes:
        frame = queue[0]
        offset = self._turn.pop(id(queue), 0)
        piece = cut(frame, offset)
        if offset + PIECE_BYTES < len(frame) - HEADER_BYTES:
            self._turn[id(queue)] = offset + PIECE_BYTES
        else:
            self._whole(queue)
        return piece

    def _cancel(self, cancel: bytes) -> None:
        ids = cancel[12:24]  # peer, call_id
        for queue in (self._calls, self._bulk):
            for frame in [frame for frame in queue if frame[12:24] == ids]:
                if frame is queue[0]:
                    self._turn.pop(id(queue), None)
                queue.remove(frame)
                self.size_bytes -= len(frame)


@dataclass(slots=True)
class _Part:
    whole: Header
    began: float
    data: bytearray = field(default_factory=bytearray)


class Assembler:
    """
    Put pieces together. Memory follows what came, never what was promised, and is bounded for each peer and
    in all; what a peer leaves unfinished costs that peer's oldest frames, then the oldest of all.
    """

    __slots__ = ("_parts", "max_bytes", "size_bytes")

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self.max_bytes = max_bytes
        self.size_bytes = 0
        self._parts: dict[tuple[int, int, FrameType], _Part] = {}  # oldest first

    def feed(self, data: bytes, now: float) -> bytes | None:
        """
        Take one message; give the frame that is whole now, or None.

        A gap in a call (a relay drops what expired) ends that call's frame alone.

        Raises:
            RemoteProtocolError: what came is no piece, or a control frame has a gap.
        """
        if not is_piece(data):
            if len(data) >= HEADER_BYTES and data[3] == FrameType.CANCEL:
                ids = int.from_bytes(data[12:16], "little"), int.from_bytes(data[16:24], "little")
                for kind in _BULK:
                    self._drop((*ids, kind))
            return data
        piece = decode_piece(data)
        whole = piece.whole
        key = (whole.peer, whole.call_id, whole.type)
        if piece.offset == 0:
            self._drop(key)
            self._parts[key] = part = _Part(whole, now)
            self._make_room(key, len(piece.data), now)
        else:
            found = self._parts.get(key)
            if found is None or found.whole != whole or len(found.data) != piece.offset:
                self._drop(key)
                if whole.peer == 0:
                    raise RemoteProtocolError(f"PIECE: {whole.type.name} has a gap before {piece.offset}")
                return None
            part = found
            self._make_room(key, len(piece.data), now)
        part.data += piece.data
        self.size_bytes += len(piece.data)
        if not piece.last:
            return None
        self._drop(key)
        flags = FLAG_SEALED if whole.sealed else 0
        fields = (whole.peer, whole.call_id, whole.epoch, whole.deadline_ms)
        return HEADER.pack(MAGIC, VERSION, whole.type, flags, 0, whole.length, *fields) + bytes(part.data)

    def _make_room(self, keep: tuple[int, int, FrameType], size_bytes: int, now: float) -> None:
        peer = keep[0]
        of_peer = [key for key in self._parts if key[0] == peer and key != keep]
        held = sum(len(self._parts[key].data) for key in of_peer) + len(self._parts[keep].data) + size_bytes
        while of_peer and (len(of_peer) >= MAX_PARTS or held > MAX_PEER_BYTES):
            held -= len(self._parts[of_peer[0]].data)
            self._drop(of_peer.pop(0))
        for key in [key for key, part in self._parts.items() if key != keep]:
            if self.size_bytes + size_bytes <= self.max_bytes and now - self._parts[key].began <= MAX_AGE_S:
                break
            self._drop(key)

    def _drop(self, key: tuple[int, int, FrameType]) -> None:
        part = self._parts.pop(key, None)
        if part is not None:
            self.size_bytes -= len(part.data)
