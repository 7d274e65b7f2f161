"""
Messages between the ggml device and the dispatcher, over a Unix stream socket. Pure: bytes in, calls out.

    request  "SWRQ" · u32 length of what follows · u64 seq · u32 layer · u32 num_tokens · u32 top_k
             · u32 hidden_dim · f32 x[num_tokens, hidden_dim] · i32 ids[num_tokens, top_k]
             · f32 weights[num_tokens, top_k]
    reply    "SWRP" · u32 length of what follows · u64 seq · u32 status
             · status 0: f32 y[num_tokens, hidden_dim], else UTF-8 text saying what failed

Little endian. The device sends one request and waits for its reply: at most one of each is under way.
link.c is the other end.
"""

import struct
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from backbone.errors import LinkError

REQUEST_MAGIC = b"SWRQ"
REPLY_MAGIC = b"SWRP"
HEAD = struct.Struct("<4sI")
REQUEST_BODY = struct.Struct("<QIIII")
REPLY_BODY = struct.Struct("<QI")

STATUS_OK = 0
STATUS_FAILED = 1

MAX_REQUEST_BYTES = 1 << 28  # 2048 rows of 16384 columns, twice over
MAX_ERROR_BYTES = 2048  # link.c takes 4096

type Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class LayerCall:
    """
    The routed experts of one layer for a few tokens: what the swarm is asked.

    Shapes: x [num_tokens, hidden_dim] float32; ids [num_tokens, top_k] int32; weights as ids, float32.
    The arrays are read-only. The answer is [num_tokens, hidden_dim]: each row the sum of weight · expert(x).
    """

    seq: int
    layer: int
    x: Floats
    ids: npt.NDArray[np.int32]
    weights: Floats


class RequestDecoder:
    """Cut a byte stream into calls; memory stays within MAX_REQUEST_BYTES."""

    __slots__ = ("_buffer",)

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[LayerCall]:
        """
        Take bytes as they come, give the calls that are complete.

        Raises:
            LinkError: this is no request; the connection is of no more use.
        """
        self._buffer += data
        calls = []
        while len(self._buffer) >= HEAD.size:
            magic, length = HEAD.unpack_from(self._buffer)
            if magic != REQUEST_MAGIC:
                raise LinkError(f"a request starts with {REQUEST_MAGIC!r}, not {bytes(magic)!r}")
            if not REQUEST_BODY.size <= length <= MAX_REQUEST_BYTES:
                raise LinkError(f"a request of {length} bytes")
            if len(self._buffer) < HEAD.size + length:
                break
            body = bytes(memoryview(self._buffer)[HEAD.size : HEAD.size + length])
            del self._buffer[: HEAD.size + length]
            calls.append(_decode_body(body))
        return calls


def encode_request(call: LayerCall) -> bytes:
    """Write a call as the device does (tests and fakes)."""
    num_tokens, hidden_dim = call.x.shape
    body = REQUEST_BODY.pack(call.seq, call.layer, num_tokens, call.ids.shape[1], hidden_dim)
    body += call.x.astype("<f4").tobytes() + call.ids.astype("<i4").tobytes()
    body += call.weights.astype("<f4").tobytes()
    return HEAD.pack(REQUEST_MAGIC, len(body)) + body


def encode_reply(call: LayerCall, y: npt.ArrayLike) -> bytes:
    """
    Write the answer to a call.

    Raises:
        LinkError: wrong shape, or numbers that are not finite: the device must not be given those.
    """
    rows = np.ascontiguousarray(y, dtype="<f4")
    if rows.shape != call.x.shape:
        raise LinkError(f"the answer to layer {call.layer} has shape {rows.shape}, expected {call.x.shape}")
    if not np.isfinite(rows).all():
        raise LinkError(f"the answer to layer {call.layer} is not finite")
    body = REPLY_BODY.pack(call.seq, STATUS_OK) + rows.tobytes()
    return HEAD.pack(REPLY_MAGIC, len(body)) + body


def encode_failure(seq: int, text: str) -> bytes:
    """Write that a call failed, and why; long texts are cut."""
    words = text.encode("utf-8", "replace")[:MAX_ERROR_BYTES]
    body = REPLY_BODY.pack(seq, STATUS_FAILED) + words
    return HEAD.pack(REPLY_MAGIC, len(body)) + body


def _decode_body(body: bytes) -> LayerCall:
    seq, layer, num_tokens, top_k, hidden_dim = REQUEST_BODY.unpack_from(body)
    expected = REQUEST_BODY.size + 4 * num_tokens * (hidden_dim + 2 * top_k)
    if len(body) != expected or not (num_tokens and top_k and hidden_dim):
        raise LinkError(
            f"a request of {len(body)} bytes for {num_tokens} x {hidden_dim} and {top_k} experts "
            f"(expected {expected})"
        )
    x_end = REQUEST_BODY.size + 4 * num_tokens * hidden_dim
    ids_end = x_end + 4 * num_tokens * top_k
    return LayerCall(
        seq=seq,
        layer=layer,
        x=np.frombuffer(body[REQUEST_BODY.size : x_end], "<f4").reshape(num_tokens, hidden_dim),
        ids=np.frombuffer(body[x_end:ids_end], "<i4").reshape(num_tokens, top_k),
        weights=np.frombuffer(body[ids_end:], "<f4").reshape(num_tokens, top_k),
    )
