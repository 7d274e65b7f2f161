"""Frames: what is written is read back; anything else is refused by name."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay.wire.errors import FrameTooLarge, LocalProtocolError, RemoteProtocolError, VersionMismatch
from relay.wire.frames import (
    CALL_TYPES,
    HEADER,
    HEADER_BYTES,
    MAGIC,
    PAYLOAD_LIMITS,
    RESERVED_TYPES,
    SEAL_BYTES,
    SEALABLE,
    SIGNAL_TYPES,
    VERSION,
    Frame,
    FrameType,
    decode_header,
    readdress,
)

U32 = st.integers(1, 0xFFFF_FFFF)
U64 = st.integers(1, 0xFFFF_FFFF_FFFF_FFFF)


@st.composite
def frames(draw: st.DrawFn) -> Frame:
    kind = draw(st.sampled_from(sorted(PAYLOAD_LIMITS)))
    payload = draw(st.binary(max_size=min(PAYLOAD_LIMITS[kind], 64)))
    sealed = kind in SEALABLE and draw(st.booleans())
    if sealed:
        payload += bytes(SEAL_BYTES)
    if kind in SIGNAL_TYPES:
        return Frame(kind, payload, peer=draw(U32), epoch=draw(U32), sealed=sealed)
    if kind not in CALL_TYPES:
        return Frame(kind, payload)
    return Frame(kind, payload, draw(U32), draw(U64), draw(U32), draw(U32), sealed)


@given(frames())
def test_frame_comes_back_as_it_went(frame: Frame) -> None:
    assert Frame.decode(frame.encode()) == frame


@given(st.binary(max_size=80))
def test_any_bytes_give_a_frame_or_a_remote_protocol_error(data: bytes) -> None:
    try:
        Frame.decode(data)
    except RemoteProtocolError:
        pass


@given(frames(), st.integers(0, HEADER_BYTES - 1), st.integers(0, 255))
def test_any_changed_header_byte_gives_a_frame_or_a_remote_protocol_error(
    frame: Frame, at: int, value: int
) -> None:
    data = bytearray(frame.encode())
    data[at] = value
    try:
        assert Frame.decode(bytes(data)).encode() == data
    except RemoteProtocolError:
        pass


def header(kind: int = FrameType.CANCEL, **changes: int) -> bytes:
    fields = {"version": VERSION, "flags": 0, "reserved": 0, "length": 0, "peer": 1, "call_id": 1}
    fields |= changes
    return HEADER.pack(
        MAGIC,
        fields["version"],
        kind,
        fields["flags"],
        fields["reserved"],
        fields["length"],
        fields["peer"],
        fields["call_id"],
        0,
        0,
    )


def test_header_is_32_bytes_long() -> None:
    assert HEADER_BYTES == 32


def test_other_version_is_refused_with_its_own_error() -> None:
    with pytest.raises(VersionMismatch, match="version 9, this side speaks 2") as caught:
        decode_header(header(version=9))
    assert caught.value.close_code == 4426


def test_length_beyond_the_type_is_refused_before_anything_is_read() -> None:
    with pytest.raises(FrameTooLarge, match="CANCEL: 4294967295 bytes, at most 0") as caught:
        decode_header(header(length=0xFFFF_FFFF))
    assert caught.value.close_code == 4413


@pytest.mark.parametrize("kind", sorted(RESERVED_TYPES))
def test_reserved_type_is_refused_as_not_negotiated(kind: FrameType) -> None:
    with pytest.raises(RemoteProtocolError, match=f"{kind.name} frames are not negotiated"):
        decode_header(header(kind))
    with pytest.raises(LocalProtocolError, match="not negotiated"):
        Frame(kind, b"").encode()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "frame of 0 bytes"),
        (b"XX" + header()[2:], "starts with 5858"),
        (header(99), "unknown frame type 99"),
        (header(flags=2), "flags 0x2"),
        (header(flags=1), "0 bytes are no sealed payload"),
        (header(reserved=1), "reserved 0x1"),
        (header(peer=0), "CANCEL: peer 0"),
        (header(call_id=0), "call_id 0 must not be 0"),
        (header(FrameType.PING), "PING: peer, call_id, epoch and deadline_ms must be 0"),
        (header(FrameType.DISPATCH, length=5) + b"1234", "says 5 bytes, 4 came"),
        (header() + b"x", "says 0 bytes, 1 came"),
    ],
)
def test_breach_is_named(data: bytes, message: str) -> None:
    with pytest.raises(RemoteProtocolError, match=message):
        decode_header(data)


@pytest.mark.parametrize(
    "frame",
    [
        Frame(FrameType.CANCEL, b"x", 1, 1),
        Frame(FrameType.CANCEL, b"", 0, 1),
        Frame(FrameType.CANCEL, b"", 1 << 32, 1),
        Frame(FrameType.CANCEL, b"", 1, -1),
        Frame(FrameType.PING, b"{}", peer=1),
    ],
)
def test_sender_may_not_write_what_a_receiver_would_refuse(frame: Frame) -> None:
    with pytest.raises(LocalProtocolError):
        frame.encode()


@given(frames().filter(lambda frame: frame.type in CALL_TYPES), U32)
def test_readdress_changes_the_peer_and_nothing_else(frame: Frame, peer: int) -> None:
    moved = Frame.decode(readdress(frame.encode(), peer))
    assert moved.peer == peer
    assert moved == replace(frame, peer=peer)
