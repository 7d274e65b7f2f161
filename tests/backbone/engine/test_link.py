"""The messages between device and dispatcher, for any bytes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backbone.engine.link import (
    HEAD,
    MAX_ERROR_BYTES,
    REPLY_BODY,
    REPLY_MAGIC,
    REQUEST_MAGIC,
    LayerCall,
    RequestDecoder,
    encode_failure,
    encode_reply,
    encode_request,
)
from backbone.errors import LinkError


def call(seq: int = 5, num_tokens: int = 2, top_k: int = 3, hidden_dim: int = 4) -> LayerCall:
    rng = np.random.default_rng(seq)
    return LayerCall(
        seq=seq,
        layer=9,
        x=rng.standard_normal((num_tokens, hidden_dim)).astype(np.float32),
        ids=rng.integers(0, 8, (num_tokens, top_k)).astype(np.int32),
        weights=rng.random((num_tokens, top_k)).astype(np.float32),
    )


def same(a: LayerCall, b: LayerCall) -> bool:
    arrays = ((a.x, b.x), (a.ids, b.ids), (a.weights, b.weights))
    return (a.seq, a.layer) == (b.seq, b.layer) and all(np.array_equal(p, q) for p, q in arrays)


def test_request_is_laid_out_as_documented() -> None:
    data = encode_request(call())
    assert data[:4] == b"SWRQ"
    assert int.from_bytes(data[4:8], "little") == len(data) - 8
    assert np.array_equal(np.frombuffer(data[8:32], "<u4"), [5, 0, 9, 2, 3, 4])
    assert len(data) == 32 + 4 * (2 * 4 + 2 * 2 * 3)


@given(
    st.lists(
        st.tuples(st.integers(0, 2**64 - 1), st.integers(1, 5), st.integers(1, 4), st.integers(1, 9)),
        max_size=4,
    ),
    st.integers(1, 50),
)
def test_calls_survive_any_cutting_of_the_stream(shapes: list[tuple[int, int, int, int]], piece: int) -> None:
    calls = [call(*shape) for shape in shapes]
    stream = b"".join(encode_request(c) for c in calls)
    decoder = RequestDecoder()
    decoded = [c for i in range(0, len(stream), piece) for c in decoder.feed(stream[i : i + piece])]
    assert len(decoded) == len(calls)
    assert all(map(same, decoded, calls))


@given(st.binary(max_size=200))
def test_any_bytes_are_calls_or_a_link_error(data: bytes) -> None:
    for stream in (data, REQUEST_MAGIC + data, HEAD.pack(REQUEST_MAGIC, len(data)) + data):
        try:
            RequestDecoder().feed(stream)
        except LinkError:
            pass


def test_length_is_refused_before_the_bytes_are_waited_for() -> None:
    with pytest.raises(LinkError, match="4294967295 bytes"):
        RequestDecoder().feed(HEAD.pack(REQUEST_MAGIC, 2**32 - 1))


@pytest.mark.parametrize("zero", ["num_tokens", "top_k", "hidden_dim"])
def test_empty_call_is_refused(zero: str) -> None:
    with pytest.raises(LinkError):
        RequestDecoder().feed(encode_request(call(**{zero: 0})))


def test_reply_holds_the_rows() -> None:
    question = call()
    data = encode_reply(question, question.x * 2)
    assert HEAD.unpack_from(data) == (REPLY_MAGIC, len(data) - HEAD.size)
    assert REPLY_BODY.unpack_from(data, HEAD.size) == (5, 0)
    assert np.array_equal(np.frombuffer(data[20:], "<f4").reshape(2, 4), question.x * 2)


@pytest.mark.parametrize(
    ("answer", "why"),
    [(np.zeros((2, 3)), "shape"), (np.full((2, 4), np.inf), "finite"), (np.full((2, 4), np.nan), "finite")],
)
def test_answer_that_would_harm_the_model_is_not_sent(answer: np.ndarray, why: str) -> None:
    with pytest.raises(LinkError, match=why):
        encode_reply(call(), answer)


def test_failure_carries_its_text_cut_to_size() -> None:
    data = encode_failure(5, "node 3: gone " + "x" * 10_000)
    assert REPLY_BODY.unpack_from(data, HEAD.size) == (5, 1)
    assert data[20:].startswith(b"node 3: gone")
    assert len(data) == 20 + MAX_ERROR_BYTES
