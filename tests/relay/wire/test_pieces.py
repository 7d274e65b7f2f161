"""Long frames come out as they went in, whatever passes between; what is short never waits behind them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay.wire.errors import RemoteProtocolError
from relay.wire.frames import HEADER_BYTES, MAX_MESSAGE_BYTES, PIECE_BYTES, Frame, FrameType
from relay.wire.messages import Bye, Ping
from relay.wire.pieces import MAX_AGE_S, MAX_PARTS, MAX_PEER_BYTES, Assembler, SendQueue, decode_piece, pieces

T = FrameType
LONG = 3 * PIECE_BYTES + 5


def call(kind: FrameType, size: int, call_id: int = 1, peer: int = 7) -> bytes:
    return Frame(kind, bytes([call_id % 256]) * size, peer, call_id, 3, 500).encode()


PING = Frame(T.PING, Ping(1.0).to_payload()).encode()
PEERS = Frame(T.PEERS, b" " * LONG).encode()
FRAMES = st.lists(
    st.one_of(
        st.builds(
            call,
            st.sampled_from([T.PARTIAL, T.PROBE, T.DISPATCH]),
            st.sampled_from([1, PIECE_BYTES, PIECE_BYTES + 1, 2 * PIECE_BYTES, LONG]),
            st.integers(1, 4),
            st.integers(1, 2),
        ),
        st.sampled_from([PING, PEERS]),
    ),
    max_size=12,
)


@given(FRAMES)
def test_frames_survive_the_way_whatever_the_order(frames: list[bytes]) -> None:
    queue, assembler, found = SendQueue(), Assembler(), []
    for frame in frames:
        queue.put(frame)
    while (message := queue.pop()) is not None:
        assert len(message) <= MAX_MESSAGE_BYTES
        if (whole := assembler.feed(message, 0.0)) is not None:
            found.append(whole)
    assert sorted(found) == sorted(frames)
    assert (len(queue), queue.size_bytes, assembler.size_bytes) == (0, 0, 0)


@given(st.binary(max_size=80), st.integers(0, 79), st.integers(0, 255))
def test_any_piece_is_read_or_refused(tail: bytes, at: int, byte: int) -> None:
    good = pieces(call(T.PARTIAL, LONG))[-1]
    assert decode_piece(good).last
    bad = bytearray(good[: HEADER_BYTES + 12] + tail)
    bad[min(at, len(bad) - 1)] = byte
    try:
        piece = decode_piece(bytes(bad))
    except RemoteProtocolError:
        return
    assert 0 < len(piece.data) <= PIECE_BYTES < piece.whole.length


def test_beat_and_small_call_pass_a_long_answer() -> None:
    queue = SendQueue()
    queue.put(call(T.PARTIAL, LONG))
    first = queue.pop()
    queue.put(call(T.PARTIAL, 9, call_id=2))
    queue.put(PING)
    rest = [queue.pop() for _ in range(5)]
    assert first is not None and first[3] == T.PIECE
    assert [message[3] for message in rest if message] == [T.PING, T.PARTIAL, T.PIECE, T.PIECE, T.PIECE]


def test_long_answer_is_not_starved_by_small_ones() -> None:
    queue = SendQueue()
    queue.put(call(T.PARTIAL, LONG))
    for number in range(200):
        queue.put(call(T.PARTIAL, 4096, call_id=2 + number))
    kinds = [(queue.pop() or b"....")[3] for _ in range(100)]
    assert kinds.count(T.PIECE) == 4


def test_bye_is_the_last_word_and_control_keeps_its_order() -> None:
    queue = SendQueue()
    queue.put(PEERS)
    queue.put(Frame(T.BYE, Bye(1000, "").to_payload()).encode())
    short = Frame(T.PEERS, b"{}").encode()
    queue.put(short)
    out = []
    while (message := queue.pop()) is not None:
        out.append(message)
    assert [message[3] for message in out[:4]] == [T.PIECE] * 4
    assert out[4] == short and out[5][3] == T.BYE


def test_cancelled_call_does_not_travel_on_and_is_forgotten_where_it_came() -> None:
    queue, assembler = SendQueue(), Assembler()
    queue.put(call(T.DISPATCH, LONG))
    queue.put(call(T.DISPATCH, LONG, call_id=2))
    assert assembler.feed(queue.pop() or b"", 0.0) is None and assembler.size_bytes == PIECE_BYTES
    cancel = Frame(T.CANCEL, b"", 7, 1, 3).encode()
    queue.put(cancel)
    assert assembler.feed(queue.pop() or b"", 0.0) == cancel
    assert assembler.size_bytes == 0
    wholes = [assembler.feed(message, 0.0) for message in iter(queue.pop, None)]
    assert [whole for whole in wholes if whole] == [call(T.DISPATCH, LONG, call_id=2)]


def test_gap_ends_that_call_alone_and_in_control_the_session() -> None:
    assembler = Assembler()
    one, other = pieces(call(T.PARTIAL, LONG)), pieces(call(T.PARTIAL, LONG, call_id=2))
    for message in (one[0], other[0], one[2], one[3], other[1], other[2]):
        assert assembler.feed(message, 0.0) is None
    assert assembler.feed(other[3], 0.0) == call(T.PARTIAL, LONG, call_id=2)
    assert assembler.size_bytes == 0
    assembler.feed(pieces(PEERS)[0], 0.0)
    with pytest.raises(RemoteProtocolError, match="PEERS has a gap"):
        assembler.feed(pieces(PEERS)[2], 0.0)


def test_what_a_peer_leaves_unfinished_costs_itself() -> None:
    assembler = Assembler()
    assembler.feed(pieces(call(T.PARTIAL, LONG, peer=9))[0], 0.0)
    for number in range(1, 4 * MAX_PARTS):
        for piece in pieces(call(T.PARTIAL, 16 << 20, call_id=number))[: 40 if number < 40 else 1]:
            assembler.feed(piece, 0.0)
        assert assembler.size_bytes <= MAX_PEER_BYTES + PIECE_BYTES
    for piece in pieces(call(T.PARTIAL, LONG, peer=9))[1:]:
        whole = assembler.feed(piece, 0.0)
    assert whole == call(T.PARTIAL, LONG, peer=9)


def test_all_together_are_bounded_and_what_is_old_is_given_up() -> None:
    assembler = Assembler(max_bytes=10 * PIECE_BYTES)
    for peer in range(1, 50):
        assembler.feed(pieces(call(T.PARTIAL, LONG, peer=peer))[0], float(peer))
        assert assembler.size_bytes <= 10 * PIECE_BYTES
    assembler.feed(pieces(call(T.PARTIAL, LONG, peer=99))[0], 60.0 + MAX_AGE_S)
    assert assembler.size_bytes == PIECE_BYTES
