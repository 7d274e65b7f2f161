"""Calls: Dispatch and Partial round-trip bit by bit, and no bytes decode to anything half-checked."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay.wire.calls import Dispatch, Partial, model_tag
from relay.wire.errors import LocalProtocolError, RemoteProtocolError
from relay.wire.tensors import Grid, XEncoding, encode_x, row_exponents


@st.composite
def dispatches(draw: st.DrawFn) -> Dispatch:
    num_tokens = draw(st.integers(1, 4))
    counts = draw(st.lists(st.integers(0, 3), min_size=num_tokens, max_size=num_tokens).filter(any))
    rng = np.random.default_rng(draw(st.integers(0, 1000)))
    encoding = draw(st.sampled_from(list(XEncoding)))
    x = rng.standard_normal((num_tokens, 256)).astype(np.float32)
    return Dispatch(
        model_tag=draw(st.integers(0, 0xFFFF_FFFF)),
        layer=draw(st.integers(0, 0xFFFF)),
        hidden_dim=256,
        x_encoding=encoding,
        grid=draw(st.sampled_from(list(Grid))),
        row_exponents=row_exponents(x),
        counts=np.array(counts, np.uint16),
        experts=rng.integers(0, 65536, sum(counts)).astype(np.uint16),
        weights=rng.standard_normal(sum(counts)).astype(np.float32),
        x=encode_x(x, encoding),
    )


def example(**changes: Any) -> Dispatch:
    x = np.ones((2, 32), np.float32)
    fields: dict[str, Any] = {
        "model_tag": 1,
        "layer": 2,
        "hidden_dim": 32,
        "x_encoding": XEncoding.Q8A32,
        "grid": Grid.X32,
        "row_exponents": row_exponents(x),
        "counts": np.array([1, 2], np.uint16),
        "experts": np.array([0, 1, 2], np.uint16),
        "weights": np.array([0.5, 0.25, 0.25], np.float32),
        "x": encode_x(x, XEncoding.Q8A32),
    }
    return Dispatch(**(fields | changes))


@given(dispatches())
def test_dispatch_comes_back_as_it_went(dispatch: Dispatch) -> None:
    payload = dispatch.to_payload()
    again = Dispatch.from_payload(payload)
    assert again.to_payload() == payload
    assert again.num_tokens == dispatch.num_tokens and again.num_picks == dispatch.num_picks
    assert np.array_equal(again.experts, dispatch.experts)
    assert np.array_equal(again.weights, dispatch.weights)
    assert np.array_equal(again.counts, dispatch.counts)
    assert np.array_equal(again.row_exponents, dispatch.row_exponents)
    assert bytes(again.x) == dispatch.x
    again.rows()


@given(dispatches(), st.data())
def test_any_changed_byte_gives_a_dispatch_or_a_remote_protocol_error(
    dispatch: Dispatch, data: st.DataObject
) -> None:
    payload = bytearray(dispatch.to_payload())
    payload[data.draw(st.integers(0, min(len(payload), 60) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(payload)))
    for attempt in (bytes(payload), bytes(payload[:cut])):
        try:
            Dispatch.from_payload(attempt).rows()
        except RemoteProtocolError:
            pass


@given(st.binary(max_size=200))
def test_any_bytes_give_a_call_or_a_remote_protocol_error(payload: bytes) -> None:
    for message in (Dispatch, Partial):
        try:
            message.from_payload(payload)
        except RemoteProtocolError:
            pass


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weights": np.array([1, np.nan, 1], np.float32)}, "weight is not finite"),
        ({"counts": np.array([1, 1], np.uint16)}, "do not add up to 3"),
        ({"row_exponents": np.array([0, -101], np.int16)}, "row exponent"),
        ({"hidden_dim": 33}, "no multiple of 32"),
        ({"x": b""}, "are needed"),
        ({"x_encoding": 9}, "unknown x encoding 9"),
        ({"grid": 9}, "grid 9"),
    ],
)
def test_receiver_refuses_a_dispatch_that_does_not_fit(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RemoteProtocolError, match=message):
        Dispatch.from_payload(example(**changes).to_payload())


@pytest.mark.parametrize(
    "changes",
    [{"layer": 1 << 16}, {"weights": np.ones(2, np.float32)}, {"counts": np.ones(3, np.uint16)}],
)
def test_sender_refuses_a_dispatch_that_does_not_fit(changes: dict[str, Any]) -> None:
    with pytest.raises(LocalProtocolError):
        example(**changes).to_payload()


def test_receiver_refuses_padding_that_is_not_zero() -> None:
    payload = bytearray(example().to_payload())
    payload[16 + 8 + 6] = 1
    with pytest.raises(RemoteProtocolError, match="padding"):
        Dispatch.from_payload(bytes(payload))


@given(
    st.lists(st.integers(-(1 << 40), 1 << 40), min_size=3, max_size=3),
    st.sampled_from(list(Grid)),
    st.integers(0, 1 << 40),
)
def test_partial_comes_back_as_it_went(sums: list[int], grid: Grid, compute_us: int) -> None:
    rows = np.array([sums, [0, 1, -1]], np.int64)
    partial = Partial.from_sums(7, rows, grid, compute_us)
    again = Partial.from_payload(partial.to_payload())
    assert np.array_equal(again.sums(), rows)
    assert (again.layer, again.hidden_dim, again.num_tokens) == (7, 3, 2)
    assert again.compute_us == min(compute_us, 0xFFFF_FFFF)


def test_receiver_refuses_a_partial_that_does_not_fit() -> None:
    payload = Partial.from_sums(7, np.zeros((1, 3), np.int64), Grid.X32, 5).to_payload()
    for bad, message in [
        (payload[:-1], "are needed"),
        (payload + b"\0", "are needed"),
        (payload[:6] + b"\x09" + payload[7:], "unknown grid 9"),
        (payload[:12] + b"\x03" + payload[13:], "bytes wide"),
        (payload[:13] + b"\x01" + payload[14:], "padding"),
        (payload[:11], "fixed part"),
    ]:
        with pytest.raises(RemoteProtocolError, match=message):
            Partial.from_payload(bad)


def test_model_tag_is_the_head_of_the_hash() -> None:
    assert model_tag("01020304" + "0" * 56) == 0x04030201
