"""
Cut messages out of a stream of bytes, and a message into packets: how they travel on a data channel. Pure.

A data channel carries packets of bounded size, and some ends send small ones best. So messages (short frames
and pieces of long ones) are one stream, cut anywhere; the length in a header says where the next one begins.
"""

from collections.abc import Iterator

from relay.wire.errors import FrameTooLarge
from relay.wire.frames import HEADER_BYTES, MAX_MESSAGE_BYTES

_LENGTH_AT = 8


class Reassembler:
    """Feed it pieces in order; it gives whole frames. Their content is not looked at, but their length."""

    __slots__ = ("_buffer",)

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, piece: bytes) -> list[bytes]:
        """
        Give the frames that are complete now.

        Raises:
            FrameTooLarge: a header promises more than any frame may have; the stream is lost.
        """
        if not self._buffer and len(piece) >= HEADER_BYTES and len(piece) == _frame_bytes(piece):
            return [piece]  # the usual case: one piece is one frame
        self._buffer += piece
        frames = []
        while len(self._buffer) >= HEADER_BYTES:
            size = _frame_bytes(self._buffer)
            if len(self._buffer) < size:
                break
            frames.append(bytes(self._buffer[:size]))
            del self._buffer[:size]
        return frames


def packets(frame: bytes, size_bytes: int) -> Iterator[bytes]:
    """Cut a message into packets of at most this size."""
    if len(frame) <= size_bytes:
        yield frame
        return
    for start in range(0, len(frame), size_bytes):
        yield frame[start : start + size_bytes]


def _frame_bytes(data: bytes | bytearray) -> int:
    size = HEADER_BYTES + int.from_bytes(data[_LENGTH_AT : _LENGTH_AT + 4], "little")
    if size > MAX_MESSAGE_BYTES:
        raise FrameTooLarge("message in a stream", size, MAX_MESSAGE_BYTES)
    return size
