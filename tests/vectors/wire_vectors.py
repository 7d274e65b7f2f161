"""
Write frames.json, pieces.json, seal.json and tensors.json, the golden bytes that Python and JavaScript read.

    python tests/vectors/wire_vectors.py           write them
    python tests/vectors/wire_vectors.py --check   fail if they are stale (a test does so too)

A diff in these files is a change of the protocol: it needs a new version, or a reason.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from piece_vectors import piece_vectors
from seal_vectors import seal_vectors

from relay.wire.calls import Dispatch, Partial, Probe
from relay.wire.close import CloseCode
from relay.wire.frames import HEADER, MAGIC, VERSION, Frame, FrameType
from relay.wire.messages import (
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
from relay.wire.tensors import Grid, XEncoding, encode_partial, encode_x, row_exponents

HERE = Path(__file__).parent

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
HASH_A, HASH_B, MODEL = "aa" * 32, "bb" * 32, "01020304" + "00" * 28
ID, SECRET = "11" * 16, "22" * 16

CONTROL: list[tuple[str, Any]] = [
    ("a node says hello", Hello("node", ID, SECRET, None, "page/0.1", False)),
    ("a backbone says hello", Hello("backbone", ID, SECRET, "token", "backbone/0.1", True)),
    ("the relay welcomes", Welcome("33" * 16, "relay/0.1.0", 10.0, 16777248)),
    ("a phone offers", Offer("wasm-plain", 1 << 30, 3.5, 0.5, True, "Zoë's phone", (HASH_A,))),
    ("a box offers", Offer("native-avx2", 1 << 40, 12.25, None, False, "box")),
    (
        "a box that listens offers",
        Offer("native-avx2", 1 << 40, 12.25, None, False, "box", (), ("direct",), "ws://192.0.2.7:9000"),
    ),
    ("the relay welcomes and has STUN", Welcome("33" * 16, "relay/0.1.0", 10.0, 16777248, "192.0.2.1:3478")),
    (
        "a backbone registers",
        Register(
            "home",
            Manifest(MODEL, "tiny", 2, 1, (ManifestLayer(3, FORMULA, GRID, 100, (HASH_A, HASH_B)),)),
        ),
    ),
    (
        "a node is assigned one expert",
        Assign(7, 2, MODEL, (AssignLayer(3, FORMULA, GRID, 100, {1: HASH_B}),)),
    ),
    ("a node is assigned nothing", Assign(0, 0, None, ())),
    ("a node is ready", SliceReady(7, {3: (0, 1), 12: (5,)})),
    ("a node will not load some of it", SliceReady(7, {3: (0,)}, {3: (1,), 4: (0,)}, "no room")),
    ("a backbone learns of one node", Peers((PeerNode(5, ID, "box", "native-avx2", 9.5, 7, {3: (0, 1)}),))),
    (
        "a backbone learns of a node that listens",
        Peers(
            (
                PeerNode(
                    5,
                    ID,
                    "box",
                    "native-avx2",
                    9.5,
                    7,
                    {3: (0, 1)},
                    lanes=("direct", "webrtc"),
                    listen="ws://192.0.2.7:9000",
                    seen="192.0.2.7",
                ),
            )
        ),
    ),
    ("a node comes back", Hello("node", ID, SECRET, None, "page/0.1", True, "44" * 16)),
    (
        "its place was kept",
        Welcome("33" * 16, "relay/0.1.0", 10.0, 16777248, resume="55" * 16, resumed=True),
    ),
    (
        "a phone that seals offers",
        Offer("wasm-plain", 1 << 30, 3.5, 0.5, True, "phone", (), ("webrtc",), seal=HASH_A),
    ),
    (
        "a backbone that seals registers",
        Register(
            "home", Manifest(MODEL, "tiny", 1, 1, (ManifestLayer(3, FORMULA, GRID, 100, (HASH_A,)),)), HASH_B
        ),
    ),
    ("a node is assigned to a backbone that seals", Assign(7, 2, MODEL, (), HASH_B)),
    (
        "a backbone learns of a node that seals",
        Peers((PeerNode(5, ID, "box", "native-avx2", 9.5, 7, {3: (0,)}, seal=HASH_A),)),
    ),
    (
        "a backbone that takes changes registers",
        Register(
            "home",
            Manifest(MODEL, "tiny", 1, 1, (ManifestLayer(3, FORMULA, GRID, 100, (HASH_A,)),)),
            changes=True,
        ),
    ),
    (
        "a backbone learns what changed",
        Peers((PeerNode(5, ID, "box", "native-avx2", 9.5, 7, {3: (0,)}),), change=True, gone=(8, 9)),
    ),
    ("a link is opened", LinkHello(ID, SECRET)),
    ("a link's key is proved", LinkProof(SECRET, HASH_A)),
    (
        "a backbone reports its paths",
        PathReport((PathState(5, "direct", "12 KB: 80 ms against 85 ms", 1.5, 80.25, 81.5),)),
    ),
    ("a slice is wanted", SliceWanted(HASH_A)),
    ("ping", Ping(1234.5)),
    ("pong", Pong(1234.5)),
    ("a node pauses", Pause(True)),
    ("the relay drains", Drain("restart", 0.5)),
    ("a page is closed", Bye(CloseCode.GOING_AWAY, "page closed")),
]


def rows(num_tokens: int, hidden_dim: int) -> np.ndarray:
    """Return rows of mixed size, the same everywhere: an outlier, a zero block, ties, tiny values."""
    steps = np.arange(num_tokens * hidden_dim, dtype=np.int64)
    x = (((steps * 7919) % 1009 - 504) / 37.0).astype(np.float32).reshape(num_tokens, hidden_dim)
    x[0, :4] = [127.0, 0.5, 1.5, -2.5]
    x[-1, -32:] = 0.0
    x[-1, 0] = 300.25
    if hidden_dim > 64:
        x[0, 32:64] *= np.float32(2.0**-110)
    return x


def dispatch(encoding: XEncoding, grid: Grid, counts: list[int], hidden_dim: int) -> Dispatch:
    x = rows(len(counts), hidden_dim)
    num_picks = sum(counts)
    return Dispatch(
        model_tag=0x04030201,
        layer=3,
        hidden_dim=hidden_dim,
        x_encoding=encoding,
        grid=grid,
        row_exponents=row_exponents(x),
        counts=np.array(counts, np.uint16),
        experts=(np.arange(num_picks) * 17 % 256).astype(np.uint16),
        weights=((np.arange(num_picks) + 1) / 8.0).astype(np.float32),
        x=encode_x(x, encoding),
    )


def sums(num_tokens: int, hidden_dim: int, reach: int) -> np.ndarray:
    steps = np.arange(num_tokens * hidden_dim, dtype=np.int64)
    return ((steps * 2654435761) % (2 * reach) - reach).reshape(num_tokens, hidden_dim)


def frame_vectors() -> dict[str, Any]:
    valid = []
    for name, message in CONTROL:
        frame = Frame(message.TYPE, message.to_payload())
        valid.append(entry(name, frame, type(message).__name__, message.to_json()))
    calls = [
        ("one row, one pick", dispatch(XEncoding.Q8A32, Grid.X32, [1], 32)),
        ("two rows, three picks", dispatch(XEncoding.F32, Grid.X16, [1, 2], 32)),
    ]
    for name, call in calls:
        frame = Frame(FrameType.DISPATCH, call.to_payload(), 5, 0x0123456789ABCDEF, 7, 1500)
        fields = {
            "model_tag": call.model_tag,
            "layer": call.layer,
            "num_tokens": call.num_tokens,
            "hidden_dim": call.hidden_dim,
            "x_encoding": int(call.x_encoding),
            "grid": int(call.grid),
            "row_exponents": call.row_exponents.tolist(),
            "counts": call.counts.tolist(),
            "experts": call.experts.tolist(),
            "weights": call.weights.tolist(),
            "x": call.x.hex(),
        }
        valid.append(entry(f"a dispatch: {name}", frame, "Dispatch", fields))
    for name, rows_, grid in [
        ("two narrow rows", sums(2, 5, 100), Grid.X16),
        ("a narrow and a wide row", np.vstack([sums(1, 3, 9), sums(1, 3, 1 << 40)]), Grid.X32),
    ]:
        partial = Partial.from_sums(3, rows_, grid, 250)
        frame = Frame(FrameType.PARTIAL, partial.to_payload(), 5, 77, 7)
        fields = {
            "layer": 3,
            "hidden_dim": partial.hidden_dim,
            "grid": int(grid),
            "compute_us": 250,
            "widths": partial.widths.hex(),
            "sums": [[str(value) for value in row] for row in rows_.tolist()],
        }
        valid.append(entry(f"a partial: {name}", frame, "Partial", fields))
    failure = Failure("not_held", "expert 3 of layer 1 is not here", "compute", 1, 3)
    frame = Frame(FrameType.FAILURE, failure.to_payload(), 5, 77, 7)
    valid.append(entry("a call fails", frame, "Failure", failure.to_json()))
    valid.append(entry("a call is cancelled", Frame(FrameType.CANCEL, b"", 5, 77, 7), "Cancel", {}))
    signal = Signal("offer", ID, {"sdp": "v=0", "key": HASH_A})
    frame = Frame(FrameType.SIGNAL, signal.to_payload(), 5, 0, 7)
    valid.append(entry("a signal", frame, "Signal", signal.to_json()))
    for half in (SealHello(HASH_A, HASH_B, "cc" * 64), SealAnswer(HASH_B, HASH_A, "dd" * 64)):
        frame = Frame(half.TYPE, half.to_payload(), 5, 0, 7)
        valid.append(entry(f"keys: {type(half).__name__}", frame, type(half).__name__, half.to_json()))
    probe = Probe(12, 8)
    frame = Frame(FrameType.PROBE, probe.to_payload(), 5, 77, 7)
    valid.append(entry("a probe", frame, "Probe", {"size_bytes": 12, "answer_bytes": 8}))
    valid.append(entry("an echo", Frame(FrameType.ECHO, bytes(8), 5, 77, 7), "Echo", {"size_bytes": 8}))
    return {"about": f"golden frames, written by {Path(__file__).name}", "valid": valid, "refused": refused()}


def entry(name: str, frame: Frame, message: str, fields: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": name,
        "type": int(frame.type),
        "length": len(frame.payload),
        "peer": frame.peer,
        "call_id": str(frame.call_id),  # u64: more than a JSON number holds everywhere
        "epoch": frame.epoch,
        "deadline_ms": frame.deadline_ms,
        "message": message,
        "fields": fields,
        "hex": frame.encode().hex(),
    }


def refused() -> list[dict[str, Any]]:
    def head(kind: int, length: int = 0, version: int = VERSION, flags: int = 0, call: int = 0) -> bytes:
        return HEADER.pack(MAGIC, version, kind, flags, 0, length, call, call, 0, 0)

    def control(kind: FrameType, payload: bytes) -> bytes:
        return head(kind, len(payload)) + payload

    cases: list[tuple[str, bytes, int]] = [
        ("nothing", b"", CloseCode.PROTOCOL),
        ("a cut header", head(FrameType.PING)[:31], CloseCode.PROTOCOL),
        ("other magic", b"XX" + head(FrameType.PING)[2:], CloseCode.PROTOCOL),
        ("version 1", head(FrameType.PING, version=1), CloseCode.VERSION),
        ("an unknown type", head(99), CloseCode.PROTOCOL),
        ("a reserved type", head(FrameType.RECEIPT), CloseCode.PROTOCOL),
        ("flags", head(FrameType.PING, flags=1), CloseCode.PROTOCOL),
        ("a sealed message to the relay", head(FrameType.OFFER, flags=1), CloseCode.PROTOCOL),
        ("a sealed call too short for a seal", head(FrameType.CANCEL, flags=1, call=1), CloseCode.PROTOCOL),
        ("a sealed key", head(FrameType.SEAL_HELLO, flags=1), CloseCode.PROTOCOL),
        ("a key without a peer", control(FrameType.SEAL_HELLO, b"{}"), CloseCode.PROTOCOL),
        ("a length beyond its type", head(FrameType.HELLO, length=1 << 20), CloseCode.TOO_LARGE),
        ("a length that is not there", head(FrameType.PING, length=9), CloseCode.PROTOCOL),
        ("a call without peer and id", head(FrameType.CANCEL), CloseCode.PROTOCOL),
        ("a signal without a peer", control(FrameType.SIGNAL, b"{}"), CloseCode.PROTOCOL),
        ("a control frame with a peer", head(FrameType.PING, call=1), CloseCode.PROTOCOL),
        ("JSON that is none", control(FrameType.PING, b"{"), CloseCode.PROTOCOL),
        ("JSON that is no object", control(FrameType.PING, b"[]"), CloseCode.PROTOCOL),
        ("no UTF-8", control(FrameType.PING, b'{"t":1,"x":"\xff"}'), CloseCode.PROTOCOL),
        ("a missing key", control(FrameType.PING, b"{}"), CloseCode.PROTOCOL),
        ("an ill-typed key", control(FrameType.PING, b'{"t":"1"}'), CloseCode.PROTOCOL),
        ("an infinite number", control(FrameType.PING, b'{"t":1e999}'), CloseCode.PROTOCOL),
        ("a short hash", control(FrameType.SLICE_WANTED, b'{"slice":"aa"}'), CloseCode.PROTOCOL),
        (
            "a name with half a character",
            control(FrameType.DRAIN, b'{"reason":"\\ud800","reconnect_after_s":0}'),
            CloseCode.PROTOCOL,
        ),
    ]
    return [{"name": name, "hex": data.hex(), "close_code": int(code)} for name, data, code in cases]


def tensor_vectors() -> dict[str, Any]:
    xs = []
    for encoding, num_tokens, hidden_dim in [
        (XEncoding.F32, 2, 33),
        (XEncoding.F16, 2, 33),
        (XEncoding.Q8A32, 1, 96),
        (XEncoding.Q8A32, 3, 96),
        (XEncoding.Q8A256, 2, 512),
    ]:
        x = rows(num_tokens, hidden_dim)
        xs.append(
            {
                "encoding": int(encoding),
                "num_tokens": num_tokens,
                "hidden_dim": hidden_dim,
                "x_f32": x.tobytes().hex(),
                "row_exponents": row_exponents(x).tolist(),
                "encoded": encode_x(x, encoding).hex(),
            }
        )
    partials = []
    for grid in Grid:
        for reach in (1 << 7, 1 << 15, 1 << 31, 1 << 50):
            for num_tokens, hidden_dim in ((1, 8), (2, 3)):
                values = sums(num_tokens, hidden_dim, reach)
                values[0, :2] = [-reach, reach - 1]
                widths, data = encode_partial(values, grid)
                partials.append(
                    {
                        "grid": int(grid),
                        "hidden_dim": hidden_dim,
                        "sums": [str(value) for value in values.ravel().tolist()],
                        "widths": widths.hex(),
                        "data": data.hex(),
                    }
                )
    return {"about": f"golden tensors, written by {Path(__file__).name}", "x": xs, "partials": partials}


def texts() -> dict[Path, str]:
    """Return what each file should hold."""
    vectors = {
        HERE / "frames.json": frame_vectors(),
        HERE / "pieces.json": piece_vectors(),
        HERE / "seal.json": seal_vectors(),
        HERE / "tensors.json": tensor_vectors(),
    }
    return {path: json.dumps(value, indent=1, ensure_ascii=False) + "\n" for path, value in vectors.items()}


def main() -> int:
    stale = [path for path, text in texts().items() if not path.exists() or path.read_text("utf-8") != text]
    if "--check" in sys.argv[1:]:
        for path in stale:
            print(f"{path} is stale: run {Path(__file__).name}", file=sys.stderr)
        return 1 if stale else 0
    for path in stale:
        path.write_text(texts()[path], "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
