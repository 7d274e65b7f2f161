"""Seals: what one end seals the other opens, once, in order; else a named fault, and nothing changes."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay.wire import seal as seals
from relay.wire.errors import RemoteProtocolError, SealFault
from relay.wire.frames import HEADER_BYTES, SEAL_BYTES, Frame, FrameType, decode_header, readdress
from relay.wire.messages import Failure, SealAnswer, SealHello, Signal
from relay.wire.seal import (
    KEY_FRAMES,
    NodeHandshake,
    Seal,
    SealBook,
    SealIdentity,
    answer_hello,
    link_seal,
    same_fingerprint,
)
from relay.wire.session import BackboneSession, CorruptReceived, NodeSession

VECTORS = json.loads((Path(__file__).parents[2] / "vectors" / "seal.json").read_text("utf-8"))
EPOCH = 7
NODE, BACKBONE, OTHER = (SealIdentity.from_seed(bytes([number]) * 32) for number in (1, 2, 3))
BACKBONE_AT, NODE_AT = 2, 5  # handles at the relay


def handshake(identity: SealIdentity = NODE, epoch: int = EPOCH) -> NodeHandshake:
    return NodeHandshake(identity, epoch, BACKBONE.public, bytes([9]) * 32)


def pair() -> tuple[Seal, Seal]:
    """The node's end, the backbone's."""
    begun = handshake()
    answer, of_backbone = answer_hello(BACKBONE, EPOCH, begun.hello, bytes([8]) * 32)
    return begun.finish(answer), of_backbone


def dispatch(call_id: int = 77, payload: bytes = b"rows", kind: FrameType = FrameType.DISPATCH) -> bytes:
    return Frame(kind, payload, NODE_AT, call_id, EPOCH, 1500).encode()


def carried(data: bytes) -> bytes:
    """What the relay makes of a backbone's frame."""
    return readdress(data, BACKBONE_AT)


def opened(seal: Seal, data: bytes) -> bytes:
    return seal.open(decode_header(data), data)


def why(seal: Seal, data: bytes) -> str:
    with pytest.raises(SealFault) as caught:
        opened(seal, data)
    return caught.value.why


@given(st.binary(max_size=300), st.sampled_from(sorted(seals.SEALABLE - {FrameType.CANCEL})))
def test_frame_comes_out_as_it_went_in_and_shows_the_relay_its_header_only(
    payload: bytes, kind: FrameType
) -> None:
    node, backbone = pair()
    call_id, deadline_ms = (0, 0) if kind is FrameType.SIGNAL else (77, 1500)
    frame = Frame(kind, payload, NODE_AT, call_id, EPOCH, deadline_ms)
    data = backbone.seal(frame.encode())
    header = decode_header(data)
    assert (header.type, header.peer, header.call_id, header.deadline_ms) == (
        kind,
        NODE_AT,
        call_id,
        deadline_ms,
    )
    assert header.sealed and header.length == len(payload) + SEAL_BYTES
    assert len(payload) < 8 or payload not in data
    assert opened(node, carried(data)) == carried(frame.encode())


@given(st.integers(0, 31 + SEAL_BYTES + 4), st.integers(1, 255))
def test_any_changed_byte_is_noticed(at: int, change: int) -> None:
    node, backbone = pair()
    book = SealBook()
    book.put(BACKBONE_AT, EPOCH, node)
    book.put(NODE_AT, EPOCH, pair()[0])  # somebody else's keys
    data = bytearray(carried(backbone.seal(dispatch())))
    data[at] ^= change
    with pytest.raises(RemoteProtocolError):  # a SealFault is one
        decode_header(bytes(data))  # magic, version, length …
        book.incoming(bytes(data))


@given(st.binary(min_size=HEADER_BYTES, max_size=120))
def test_any_bytes_give_a_frame_or_a_seal_fault(data: bytes) -> None:
    book = SealBook()
    book.put(BACKBONE_AT, EPOCH, pair()[0])
    head = Frame(FrameType.DISPATCH, data, BACKBONE_AT, 1, EPOCH, sealed=True)
    for message in (data, head.encode()):
        try:
            book.incoming(message)
        except SealFault:
            pass


def test_a_frame_that_comes_again_is_refused_and_the_next_opens() -> None:
    node, backbone = pair()
    first, second = backbone.seal(dispatch(1)), backbone.seal(dispatch(2))
    opened(node, first)
    assert why(node, first) == "repeated"
    opened(node, second)
    assert why(node, first) == "repeated"


def test_gaps_are_legal_and_counted() -> None:
    node, backbone = pair()
    frames = [backbone.seal(dispatch(call)) for call in range(1, 10)]
    opened(node, frames[4])
    opened(node, frames[8])
    assert node.gaps == 4 + 3


def test_a_cancel_may_overtake_its_dispatch_and_bulk_may_not_overtake_bulk() -> None:
    node, backbone = pair()
    one, two = backbone.seal(dispatch(1)), backbone.seal(dispatch(2))
    cancel = backbone.seal(dispatch(1, b"", FrameType.CANCEL))
    opened(node, cancel)
    opened(node, two)
    assert why(node, one) == "repeated"


def test_what_does_not_open_changes_nothing() -> None:
    node, backbone = pair()
    data = backbone.seal(dispatch())
    for at in range(HEADER_BYTES, len(data)):
        assert why(node, data[:at] + bytes([data[at] ^ 64]) + data[at + 1 :]) in ("altered", "repeated")
    opened(node, data)


def test_a_frame_does_not_open_at_its_own_sender_or_another_peer() -> None:
    node, backbone = pair()
    data = backbone.seal(dispatch())
    assert why(backbone, data) == "altered"
    begun = NodeHandshake(OTHER, EPOCH, BACKBONE.public, bytes([7]) * 32)
    answer, _ = answer_hello(BACKBONE, EPOCH, begun.hello, bytes([8]) * 32)
    assert why(begun.finish(answer), data) == "altered"
    opened(node, data)


def test_keys_change_every_million_frames_and_the_receiver_follows() -> None:
    node, backbone = pair()
    sealer = backbone._sealers["bulk"]
    sealer.counter = KEY_FRAMES - 1
    last, first = backbone.seal(dispatch(1)), backbone.seal(dispatch(2))
    assert sealer._chain.number == 1
    opened(node, last)
    opened(node, first)


def test_keys_change_early_after_many_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seals, "KEY_MAX_BYTES", 1000)
    node, backbone = pair()
    frames = [backbone.seal(dispatch(call, bytes(400))) for call in range(1, 9)]
    assert backbone._sealers["bulk"].counter > 2 * KEY_FRAMES
    for data in frames:
        opened(node, data)


def test_a_counter_far_ahead_is_refused_without_work() -> None:
    node, backbone = pair()
    backbone._sealers["bulk"].counter = (seals.KEYS_AHEAD + 1) * KEY_FRAMES
    assert why(node, backbone.seal(dispatch())) == "altered"


def test_each_pairing_has_keys_of_its_own() -> None:
    node, _ = pair()
    begun = handshake(epoch=EPOCH + 1)
    _, of_backbone = answer_hello(BACKBONE, EPOCH + 1, begun.hello, bytes([8]) * 32)
    assert why(node, of_backbone.seal(dispatch())) == "altered"


def test_links_have_seals_of_their_own() -> None:
    backbone = link_seal("backbone", "1" * 32, bytes(32))
    assert opened(link_seal("node", "1" * 32, bytes(32)), backbone.seal(dispatch())) == dispatch()
    for link, key in (("2" * 32, bytes(32)), ("1" * 32, bytes([1]) * 32)):
        assert why(link_seal("node", link, key), backbone.seal(dispatch())) == "altered"


# -- the handshake


def test_backbone_refuses_a_hello_for_another_epoch_or_backbone_or_with_another_key() -> None:
    hello = handshake().hello
    swapped = SealHello(hello.identity, OTHER.public.hex(), hello.signature)
    other = SealHello(OTHER.public.hex(), hello.ephemeral, hello.signature)
    for identity, epoch, said in [
        (BACKBONE, EPOCH + 1, hello),
        (OTHER, EPOCH, hello),
        (BACKBONE, EPOCH, swapped),
        (BACKBONE, EPOCH, other),
    ]:
        with pytest.raises(SealFault, match="did not sign"):
            answer_hello(identity, epoch, said, bytes(32))


def test_node_refuses_an_answer_of_another_backbone_or_for_another_hello() -> None:
    begun = handshake()
    answer, _ = answer_hello(
        OTHER, EPOCH, NodeHandshake(NODE, EPOCH, OTHER.public, bytes(32)).hello, bytes(32)
    )
    with pytest.raises(SealFault, match="another backbone"):
        begun.finish(answer)
    again = NodeHandshake(NODE, EPOCH, BACKBONE.public, bytes([6]) * 32)
    answer, _ = answer_hello(BACKBONE, EPOCH, again.hello, bytes([8]) * 32)
    with pytest.raises(SealFault, match="did not sign"):
        begun.finish(answer)
    with pytest.raises(SealFault, match="did not sign"):
        begun.finish(SealAnswer(BACKBONE.public.hex(), answer.ephemeral, "0" * 128))


def test_an_ephemeral_of_small_order_is_refused() -> None:
    for point in (bytes(32), bytes([1]) + bytes(31)):
        begun = handshake()
        signature = NODE.sign(begun.pairing.of_node(point))
        hello = SealHello(NODE.public.hex(), point.hex(), signature.hex())
        with pytest.raises(SealFault, match="small order"):
            answer_hello(BACKBONE, EPOCH, hello, bytes([8]) * 32)


def test_fingerprints_are_compared_as_people_write_them() -> None:
    print_ = NODE.fingerprint
    assert len(print_) == 24 and same_fingerprint(print_, print_.replace("-", "").upper())
    assert not same_fingerprint(print_, BACKBONE.fingerprint)


# -- the book


def test_book_seals_what_goes_to_a_peer_and_opens_what_comes() -> None:
    node, backbone = pair()
    ours, theirs = SealBook(), SealBook()
    theirs.put(BACKBONE_AT, EPOCH, node)
    assert ours.outgoing(dispatch()) == dispatch(), "nothing agreed yet"
    ours.put(NODE_AT, EPOCH, backbone)
    sealed = ours.outgoing(dispatch())
    assert sealed != dispatch()
    assert theirs.incoming(carried(sealed)) == carried(dispatch())
    control = Frame(FrameType.PING, b'{"t":1}').encode()
    assert ours.outgoing(control) == control and theirs.incoming(control) == control
    assert (ours.sealed, theirs.opened, theirs.faults) == (1, 1, {})


def test_book_refuses_unsealed_frames_once_a_seal_is_expected_but_for_failures_that_a_relay_may_report() -> (
    None
):
    book = SealBook()
    assert book.incoming(carried(dispatch())) == carried(dispatch())
    book.expect(BACKBONE_AT, EPOCH)
    signal = Frame(FrameType.SIGNAL, Signal("x", "1" * 32).to_payload(), BACKBONE_AT, 0, EPOCH).encode()
    for data in (carried(dispatch()), signal):
        with pytest.raises(SealFault) as caught:
            book.incoming(data)
        assert caught.value.why == "unsealed"
    for code, passes in [("gone", True), ("overloaded", True), ("bad_seal", True), ("grid_overflow", False)]:
        payload = Failure(code, "", "send").to_payload()
        data = Frame(FrameType.FAILURE, payload, BACKBONE_AT, 7, EPOCH).encode()
        if passes:
            assert book.incoming(data) == data
        else:
            with pytest.raises(SealFault):
                book.incoming(data)


def test_book_knows_one_pairing_per_peer() -> None:
    node, backbone = pair()
    book = SealBook()
    book.put(BACKBONE_AT, EPOCH, node)
    book.expect(BACKBONE_AT, EPOCH + 1)
    with pytest.raises(SealFault) as caught:
        book.incoming(carried(backbone.seal(dispatch())))
    assert caught.value.why == "no_key" and book.faults == {"no_key": 1}
    book.forget(BACKBONE_AT)
    assert book.incoming(carried(dispatch())) == carried(dispatch())


def test_session_fails_the_call_of_a_frame_that_does_not_open_and_lives() -> None:
    for session in (NodeSession(0.0), BackboneSession(0.0)):
        session.receive_fault(dispatch(), SealFault("altered", "it does not open"), 1.0)
        (event,) = session.events()
        assert isinstance(event, CorruptReceived) and event.call_id == 77
        assert session.closed is None


# -- golden bytes; node-web/test/seal.test.js reads the same


def test_golden_frames_open() -> None:
    node, backbone = (VECTORS[end] for end in ("node", "backbone"))
    ours = SealIdentity.from_seed(bytes.fromhex(node["seed"]))
    theirs = SealIdentity.from_seed(bytes.fromhex(backbone["seed"]))
    assert (ours.fingerprint, theirs.fingerprint) == (node["fingerprint"], backbone["fingerprint"])
    begun = NodeHandshake(ours, VECTORS["epoch"], theirs.public, bytes.fromhex(node["ephemeral_private"]))
    assert begun.hello.to_json() == node["hello"]
    private = bytes.fromhex(backbone["ephemeral_private"])
    answer, of_backbone = answer_hello(theirs, VECTORS["epoch"], begun.hello, private)
    assert answer.to_json() == backbone["answer"]
    of_node = begun.finish(answer)
    vector: dict[str, Any]
    for vector in VECTORS["sealed"]:
        receiver = of_backbone if vector["from"] == "node" else of_node
        assert opened(receiver, bytes.fromhex(vector["sealed"])).hex() == vector["frame"]
