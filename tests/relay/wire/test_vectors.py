"""The golden vectors are fresh and read back as written; node-web/test/wire.test.js reads them too."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relay.wire.calls import Dispatch, Partial, Probe
from relay.wire.frames import Frame, FrameType
from relay.wire.messages import CONTROL_MESSAGES, Failure, SealAnswer, SealHello, Signal
from relay.wire.session import Closed, NodeSession, RelaySession
from relay.wire.tensors import Grid, XEncoding, decode_partial, encode_partial, encode_x, row_exponents

ROOT = Path(__file__).parents[3]
VECTORS = ROOT / "tests" / "vectors"
FRAMES = json.loads((VECTORS / "frames.json").read_text("utf-8"))
TENSORS = json.loads((VECTORS / "tensors.json").read_text("utf-8"))


def test_vectors_are_what_the_code_writes() -> None:
    command = [sys.executable, str(VECTORS / "wire_vectors.py"), "--check"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("vector", FRAMES["valid"], ids=lambda v: v["name"])
def test_golden_frame_is_read_field_by_field(vector: dict[str, Any]) -> None:
    frame = Frame.decode(bytes.fromhex(vector["hex"]))
    assert (frame.type, len(frame.payload)) == (vector["type"], vector["length"])
    assert (frame.peer, str(frame.call_id)) == (vector["peer"], vector["call_id"])
    assert (frame.epoch, frame.deadline_ms) == (vector["epoch"], vector["deadline_ms"])
    fields = vector["fields"]
    match frame.type:
        case FrameType.DISPATCH:
            dispatch = Dispatch.from_payload(frame.payload)
            assert dispatch.experts.tolist() == fields["experts"]
            assert dispatch.weights.tolist() == fields["weights"]
            assert dispatch.row_exponents.tolist() == fields["row_exponents"]
            assert bytes(dispatch.x).hex() == fields["x"]
        case FrameType.PARTIAL:
            partial = Partial.from_payload(frame.payload)
            assert [[str(value) for value in row] for row in partial.sums().tolist()] == fields["sums"]
        case FrameType.CANCEL:
            assert frame.payload == b""
        case FrameType.PROBE:
            probe = Probe.from_payload(frame.payload)
            assert {"size_bytes": probe.size_bytes, "answer_bytes": probe.answer_bytes} == fields
        case FrameType.ECHO:
            assert len(frame.payload) == fields["size_bytes"]
        case FrameType.SIGNAL:
            assert Signal.from_payload(frame.payload).to_json() == fields
        case FrameType.SEAL_HELLO:
            assert SealHello.from_payload(frame.payload).to_json() == fields
        case FrameType.SEAL_ANSWER:
            assert SealAnswer.from_payload(frame.payload).to_json() == fields
        case FrameType.FAILURE:
            assert Failure.from_payload(frame.payload).to_json() == fields
        case kind:
            assert CONTROL_MESSAGES[kind].from_payload(frame.payload).to_json() == fields


@pytest.mark.parametrize("vector", FRAMES["refused"], ids=lambda v: v["name"])
def test_golden_breach_closes_with_its_code(vector: dict[str, Any]) -> None:
    for session in (NodeSession(0.0), RelaySession(0.0)):
        session.receive_data(bytes.fromhex(vector["hex"]), 0.0)
        (closed,) = session.events()
        assert isinstance(closed, Closed) and closed.code == vector["close_code"]


@pytest.mark.parametrize("vector", TENSORS["x"])
def test_golden_x_is_rounded_alike(vector: dict[str, Any]) -> None:
    shape = (vector["num_tokens"], vector["hidden_dim"])
    x = np.frombuffer(bytes.fromhex(vector["x_f32"]), "<f4").reshape(shape)
    assert encode_x(x, XEncoding(vector["encoding"])).hex() == vector["encoded"]
    assert row_exponents(x).tolist() == vector["row_exponents"]


@pytest.mark.parametrize("vector", TENSORS["partials"])
def test_golden_partial_is_packed_alike(vector: dict[str, Any]) -> None:
    sums = np.array([int(value) for value in vector["sums"]], np.int64).reshape(-1, vector["hidden_dim"])
    widths, data = bytes.fromhex(vector["widths"]), bytes.fromhex(vector["data"])
    assert encode_partial(sums, Grid(vector["grid"])) == (widths, data)
    back = decode_partial(widths, data, vector["hidden_dim"], Grid(vector["grid"]))
    assert np.array_equal(back, sums)
