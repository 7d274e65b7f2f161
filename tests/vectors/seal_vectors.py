"""What wire_vectors.py writes to seal.json: one pairing's keys and frames, byte by byte."""

from typing import Any

from relay.wire.errors import SealFault
from relay.wire.fields import fingerprint
from relay.wire.frames import Frame, FrameType, decode_header
from relay.wire.messages import Failure, SealAnswer, Signal
from relay.wire.seal import KEY_FRAMES, NodeHandshake, Seal, SealIdentity, answer_hello, link_seal

EPOCH = 7
NODE, BACKBONE = bytes(range(32)), bytes(range(32, 64))  # seeds of identities
LINK, LINK_KEY = "1" * 32, bytes(range(128, 160))
NODE_EPHEMERAL, BACKBONE_EPHEMERAL = bytes(range(64, 96)), bytes(range(96, 128))  # private


def pair() -> tuple[NodeHandshake, SealAnswer, Seal, Seal]:
    """Agree on keys: the node's half, the backbone's, the seals of both."""
    node, backbone = SealIdentity.from_seed(NODE), SealIdentity.from_seed(BACKBONE)
    handshake = NodeHandshake(node, EPOCH, backbone.public, NODE_EPHEMERAL)
    answer, of_backbone = answer_hello(backbone, EPOCH, handshake.hello, BACKBONE_EPHEMERAL)
    return handshake, answer, handshake.finish(answer), of_backbone


def frames() -> list[tuple[str, str, int, Frame]]:
    """Name, sender, the counter before it (gaps, and the change of key), frame."""
    partial, dispatch = bytes(range(40)), bytes(range(200, 232))
    return [
        ("a dispatch", "backbone", 0, Frame(FrameType.DISPATCH, dispatch, 5, 77, EPOCH, 1500)),
        ("a signal", "backbone", 0, Frame(FrameType.SIGNAL, Signal("x", "1" * 32).to_payload(), 5, 0, EPOCH)),
        ("a partial", "node", 0, Frame(FrameType.PARTIAL, partial, 2, 77, EPOCH)),
        ("a partial after a gap", "node", 9, Frame(FrameType.PARTIAL, partial, 2, 78, EPOCH)),
        (
            "a failure",
            "node",
            0,
            Frame(FrameType.FAILURE, Failure("refused", "no", "queue").to_payload(), 2, 79, EPOCH),
        ),
        ("an empty cancel", "backbone", 1, Frame(FrameType.CANCEL, b"", 5, 79, EPOCH)),
        ("under the second key", "node", KEY_FRAMES, Frame(FrameType.ECHO, bytes(8), 2, 80, EPOCH)),
        ("under the fourth key", "node", 3 * KEY_FRAMES + 5, Frame(FrameType.ECHO, bytes(8), 2, 81, EPOCH)),
    ]


def seal_vectors() -> dict[str, Any]:
    handshake, answer, node, backbone = pair()
    sealed = []
    for name, sender, counter, frame in frames():
        ours, theirs = (node, backbone) if sender == "node" else (backbone, node)
        express = frame.type in (FrameType.CANCEL, FrameType.FAILURE, FrameType.SIGNAL)
        ours._sealers["express" if express else "bulk"].counter = counter
        data = ours.seal(frame.encode())
        assert theirs.open(decode_header(data), data) == frame.encode()
        sealed.append({"name": name, "from": sender, "counter": counter, "frame": frame.encode().hex(),
                       "sealed": data.hex()})  # fmt: skip
    *_, fresh = pair()
    frame = Frame(FrameType.ECHO, bytes(8), 2, 82, EPOCH).encode()
    on_link = link_seal("node", LINK, LINK_KEY).seal(frame)
    return {
        "about": "golden seals, written by wire_vectors.py; seeds and private keys are 32 bytes each",
        "epoch": EPOCH,
        "node": {
            "seed": NODE.hex(),
            "ephemeral_private": NODE_EPHEMERAL.hex(),
            "hello": handshake.hello.to_json(),
            "fingerprint": fingerprint(handshake.hello.identity),
        },
        "backbone": {
            "seed": BACKBONE.hex(),
            "ephemeral_private": BACKBONE_EPHEMERAL.hex(),
            "answer": answer.to_json(),
            "fingerprint": fingerprint(answer.identity),
        },
        "link": {"link": LINK, "key": LINK_KEY.hex(), "frame": frame.hex(), "sealed": on_link.hex()},
        "sealed": sealed,
        "refused": refused(fresh),
    }


def refused(backbone: Seal) -> list[dict[str, str]]:
    """What the node must refuse, in this order, with one seal that has opened `first` before."""
    frame = Frame(FrameType.DISPATCH, bytes(16), 5, 77, EPOCH, 100)
    first, second = (bytearray(backbone.seal(frame.encode())) for _ in range(2))
    cases = [("it came before", first, "repeated")]
    changes = [
        ("its counter was raised", 32),
        ("its text was changed", 45),
        ("its tag was changed", -1),
        ("its call is another", 16),
        ("its deadline is another", 28),
    ]
    for name, at in changes:
        data = bytearray(second)
        data[at] ^= 1 if at != 32 else 6
        cases.append((name, data, "altered"))
    far = bytearray(second)
    far[39] = 1
    cases.append(("its counter is far ahead", far, "altered"))
    kind = bytearray(second)
    kind[3] = FrameType.PROBE
    cases.append(("it is of another type", kind, "altered"))
    *_, node, _ = pair()
    node.open(decode_header(bytes(first)), bytes(first))
    for name, data, why in cases:
        try:
            node.open(decode_header(bytes(data)), bytes(data))
        except SealFault as exc:
            assert exc.why == why, name
        else:
            raise AssertionError(name)
    return [{"name": "first", "sealed": first.hex(), "why": ""}] + [
        {"name": name, "sealed": data.hex(), "why": why} for name, data, why in cases
    ]
