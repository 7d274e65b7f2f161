"""Frames come out of a stream of pieces as they went in, wherever it was cut."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay.wire.errors import FrameTooLarge
from relay.wire.frames import Frame, FrameType
from relay.wire.stream import Reassembler, packets

FRAMES = st.lists(st.binary(max_size=60).map(lambda data: Frame(FrameType.PROBE, data, 1, 2).encode()))


@given(FRAMES, st.integers(1, 100))
def test_frames_survive_any_cut(frames: list[bytes], size: int) -> None:
    stream = Reassembler()
    found = [f for frame in frames for piece in packets(frame, size) for f in stream.feed(piece)]
    assert found == frames


@given(FRAMES, st.integers(1, 200))
def test_pieces_may_hold_the_end_of_one_frame_and_the_start_of_the_next(
    frames: list[bytes], size: int
) -> None:
    data = b"".join(frames)
    stream = Reassembler()
    found = [f for at in range(0, len(data), size) for f in stream.feed(data[at : at + size])]
    assert found == frames


def test_length_beyond_any_frame_is_refused_before_it_is_waited_for() -> None:
    with pytest.raises(FrameTooLarge):
        Reassembler().feed(bytes(8) + b"\xff\xff\xff\xff" + bytes(30))
