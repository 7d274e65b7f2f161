"""What wire_vectors.py writes to pieces.json: in which order and with which heads messages leave."""

from typing import Any

from relay.wire.frames import CALL_TYPES, HEADER_BYTES, PIECE_BYTES, PIECE_HEAD_BYTES, Frame, FrameType
from relay.wire.messages import Welcome
from relay.wire.pieces import SendQueue

T = FrameType
PUTS: dict[str, list[tuple[FrameType, int, int] | int]] = {  # type, payload bytes, call; or how many to pop
    "one that is as long as fits": [(T.PARTIAL, PIECE_BYTES, 1), 1],
    "one byte more": [(T.PARTIAL, PIECE_BYTES + 1, 1), 2],
    "small calls, control and a beat pass a long answer": [
        (T.PARTIAL, 3 * PIECE_BYTES + 5, 1), 1, (T.PARTIAL, 9, 2), (T.FAILURE, 40, 3), (T.PING, 0, 0), 6,
    ],
    "a long answer is not starved": [
        (T.PARTIAL, 2 * PIECE_BYTES, 1), *[(T.PARTIAL, 20_000, 2 + n) for n in range(5)], 7,
    ],
    "control keeps its order, Bye is last": [
        (T.BYE, 30, 0), (T.OFFER, PIECE_BYTES + 9, 0), (T.OFFER, 30, 0), (T.PARTIAL, 5, 9), 5,
    ],
}  # fmt: skip


def piece_vectors() -> dict[str, Any]:
    scenarios = []
    for name, script in PUTS.items():
        queue, steps = SendQueue(), []
        for step in script:
            if isinstance(step, int):
                for _ in range(step):
                    message = queue.pop()
                    assert message is not None
                    head = message[: HEADER_BYTES + PIECE_HEAD_BYTES].hex()
                    steps.append({"pop": {"head": head, "size": len(message)}})
                continue
            kind, size, call = step
            ids = (7, call, 3, 500) if kind in CALL_TYPES else ()
            queue.put(Frame(kind, bytes([call]) * size, *ids).encode())
            steps.append({"put": {"type": int(kind), "size": size, "call": call, "fill": call}})
        assert not len(queue)
        scenarios.append({"name": name, "steps": steps})
    welcome = Welcome("33" * 16, "relay/0.1.0", 10.0, 16777248)
    return {
        "about": "golden pieces, written by wire_vectors.py; heads are the first 44 bytes of a message",
        "scenarios": scenarios,
        "welcome": Frame(T.WELCOME, welcome.to_payload()).encode().hex(),
    }
