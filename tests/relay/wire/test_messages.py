"""Messages: strict to the key, lenient to the future, and never surprised by bytes."""

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay.wire.errors import RemoteProtocolError
from relay.wire.fields import Fields
from relay.wire.frames import FrameType
from relay.wire.messages import (
    CONTROL_MESSAGES,
    Assign,
    AssignLayer,
    Bye,
    Drain,
    Failure,
    Hello,
    LinkHello,
    LinkProof,
    Manifest,
    ManifestLayer,
    Offer,
    PathReport,
    PathState,
    Pause,
    PeerNode,
    Peers,
    Ping,
    Pong,
    Register,
    SealAnswer,
    SealHello,
    Signal,
    SliceReady,
    SliceWanted,
    Welcome,
)

FORMULA = {
    "hidden_dim": 4,
    "expert_dim": 2,
    "gate_type": 8,
    "up_type": 8,
    "down_type": 8,
    "activation": "silu",
    "alpha": 0.0,
    "limit": 0.0,
    "weight_position": "after",
    "biased": False,
}
GRID = {"x32": 12, "x16": [1, -2, 3, 4]}
HASH_A, HASH_B, MODEL = "a" * 64, "b" * 64, "0" * 64
ID, SECRET = "1" * 32, "2" * 32

EXAMPLES: list[Any] = [
    Hello("node", ID, SECRET, None, "page/0.1", False),
    Hello("backbone", ID, SECRET, "token", "backbone/0.1", True),
    Welcome(ID, "relay/0.1.0", 10.0, 1 << 24),
    Offer("wasm-plain", 1 << 30, 3.5, 0.5, True, "Zoë's phone", (HASH_A,)),
    Offer("native-avx2", 1 << 30, 3.5, None, False, "box"),
    Register(
        "home",
        Manifest(MODEL, "tiny", 2, 1, (ManifestLayer(3, FORMULA, GRID, 100, (HASH_A, HASH_B)),)),
    ),
    Assign(7, 2, MODEL, (AssignLayer(3, FORMULA, GRID, 100, {0: HASH_A, 1: HASH_B}),)),
    Assign(0, 0, None, ()),
    SliceReady(7, {3: (0, 1), 4: ()}),
    SliceReady(7, {3: (0,)}, {3: (1,), 5: (0, 2)}, "weight format 99"),
    Peers((PeerNode(5, ID, "box", "native-avx2", 9.5, 7, {3: (0, 1)}),)),
    SliceWanted(HASH_A),
    Failure("not_held", "expert 3 of layer 1 is not here", "compute", 1, 3),
    Failure("gone", "", "send"),
    Ping(12.5),
    Pong(12.5),
    Pause(True),
    Drain("restart", 0.5),
    Bye(1000, "done"),
    Offer("native-avx2", 1 << 30, 3.5, None, False, "box", (), ("direct", "webrtc"), "ws://192.0.2.7:9000"),
    Welcome(ID, "relay/0.1.0", 10.0, 1 << 24, "192.0.2.1:3478"),
    Offer("native-avx2", 1 << 30, 3.5, None, False, "box", seal=HASH_A),
    Hello("node", ID, SECRET, None, "page/0.1", True, "3" * 32),
    Welcome(ID, "relay/0.1.0", 10.0, 1 << 24, resume="3" * 32, resumed=True),
    Assign(7, 2, MODEL, (), HASH_B),
    SealHello(HASH_A, HASH_B, "c" * 128),
    SealAnswer(HASH_A, HASH_B, "c" * 128),
    Signal("offer", ID, {"sdp": "v=0", "key": HASH_A}),
    LinkHello(ID, SECRET),
    LinkProof(SECRET, HASH_A),
    PathReport((PathState(5, "direct", "because", 1.5, 80.25, None),)),
]
OPTIONAL = {"layer", "expert", "stun", "lanes", "listen", "seal", "resume_token", "resumed"}


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda m: type(m).__name__)
def test_message_comes_back_as_it_went(message: Any) -> None:
    assert type(message).from_payload(message.to_payload()) == message


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda m: type(m).__name__)
def test_unknown_keys_are_ignored(message: Any) -> None:
    payload = json.dumps(message.to_json() | {"from_the_future": {"x": 1}}).encode()
    assert type(message).from_payload(payload) == message


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda m: type(m).__name__)
def test_each_missing_key_is_named(message: Any) -> None:
    whole = message.to_json()
    for key in whole:
        if key == "seal" or (key in OPTIONAL and not isinstance(message, Assign | AssignLayer)):
            continue
        if key == "resume" and isinstance(message, Welcome):
            continue
        if key in ("refused", "why") and isinstance(message, SliceReady):
            continue
        partial = {k: v for k, v in whole.items() if k != key}
        with pytest.raises(RemoteProtocolError, match=f"{type(message).__name__}.{key} is missing"):
            type(message).from_payload(json.dumps(partial).encode())


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just("a" * 64),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@given(st.sampled_from(EXAMPLES), st.data())
def test_any_value_for_any_key_gives_a_message_or_a_remote_protocol_error(
    message: Any, data: st.DataObject
) -> None:
    fields = message.to_json()
    fields[data.draw(st.sampled_from(sorted(fields)))] = data.draw(JSON)
    try:
        again = type(message).from_payload(json.dumps(fields).encode())
    except RemoteProtocolError:
        return
    assert type(message).from_payload(again.to_payload()) == again


@given(st.sampled_from(sorted(CONTROL_MESSAGES) + [FrameType.FAILURE]), st.binary(max_size=60))
def test_any_bytes_give_a_message_or_a_remote_protocol_error(kind: FrameType, payload: bytes) -> None:
    message = CONTROL_MESSAGES.get(kind, Failure)
    try:
        message.from_payload(payload)
    except RemoteProtocolError:
        pass


@pytest.mark.parametrize(
    "payload",
    [
        b'{"t":NaN}',
        b'{"t":1e999}',
        b'{"t":true}',
        b'{"t":"1"}',
        b'{"t":' + b"9" * 400 + b"}",
        b'{"t":' + b"9" * 5000 + b"}",
        b'{"t":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"t":' + b"[" * 900 + b"]" * 900 + b"}",
        b"[]",
        b"\xff",
    ],
    ids=["nan", "inf", "bool", "text", "huge", "digits", "bottomless", "deep", "array", "utf8"],
)
def test_number_that_is_none_is_refused(payload: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match="Ping"):
        Ping.from_payload(payload)


def test_error_names_frame_key_and_value() -> None:
    bad = replace(EXAMPLES[6], layers=(replace(EXAMPLES[6].layers[0], slice_bytes=-1),))
    with pytest.raises(RemoteProtocolError, match=r"Assign.layers\[0\].slice_bytes: .* not -1"):
        Assign.from_payload(bad.to_payload())


def test_name_with_a_lone_surrogate_is_refused() -> None:
    fields = EXAMPLES[3].to_json() | {"name": "\ud800"}
    with pytest.raises(RemoteProtocolError, match="surrogates"):
        Offer.from_payload(json.dumps(fields).encode())


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"slices": [HASH_A]}, "slices"),
        ({"slices": [HASH_A, "A" * 64]}, "slices"),
        ({"grid": {"x32": 1, "x16": [1]}}, "x16"),
        ({"grid": {"x32": 1.5, "x16": None}}, "x32"),
        ({"formula": FORMULA | {"weight_position": "middle"}}, "weight_position"),
    ],
)
def test_manifest_layer_that_does_not_fit_is_refused(change: dict[str, Any], key: str) -> None:
    fields = EXAMPLES[5].to_json()
    fields["manifest"]["layers"][0] |= change
    with pytest.raises(RemoteProtocolError, match=key):
        Register.from_payload(json.dumps(fields).encode())


@pytest.mark.parametrize("index", ["-1", "01", "65536", "x", "", "1.0"])
def test_index_that_is_none_is_refused(index: str) -> None:
    with pytest.raises(RemoteProtocolError, match="is no index"):
        SliceReady.from_payload(json.dumps({"epoch": 1, "experts": {index: [1]}}).encode())


def test_formula_keys_of_later_versions_are_carried_on() -> None:
    fields = EXAMPLES[5].to_json()
    fields["manifest"]["layers"][0]["formula"] = FORMULA | {"latent_dim": 7}
    register = Register.from_payload(json.dumps(fields).encode())
    assert register.manifest.layers[0].formula["latent_dim"] == 7


def test_text_of_brackets_is_refused_before_it_is_parsed() -> None:
    for text in (b'{"x":[' + b"[]," * 5000 + b"[]]}", b"[" * 5000, b'{"a":' * 5000):
        with pytest.raises(RemoteProtocolError, match="more than 1000 arrays and objects"):
            Pause.from_payload(text)


def test_long_lists_are_checked_item_by_item() -> None:
    good = ["ab" * 32, "01" * 32]
    for bad in ("AB" * 32, "ab" * 31, "zz" * 32, "é" * 64, "\u0661" * 64, 7, None, ["a"]):
        fields = Fields("Offer", {"inventory": [*good, bad]})
        with pytest.raises(RemoteProtocolError, match="64 lower-case hex digits"):
            fields.hexes("inventory", 64, 10)
    assert Fields("Offer", {"inventory": good}).hexes("inventory", 64, 10) == tuple(good)
    for number in (True, 1.0, "1", -1, 11, None):
        with pytest.raises(RemoteProtocolError, match="integers from 0 to 10"):
            Fields("x", {"n": [1, number]}).integers("n", 0, 10, 10)
    assert Fields("x", {"n": []}).integers("n", 0, 10, 10) == ()
