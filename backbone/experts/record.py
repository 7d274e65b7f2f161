"""
Keep calls that nodes answered as files, so that anybody can compute them again (`serve --record FOLDER`).

    8 bytes   "ESCALL", 0, version 1
    u32       bytes of the header, little endian
    header    JSON: the model, the formula, the layer's exponents, the node, the slices with their hashes
    request   the Dispatch, a whole frame (the handle of the peer is the backbone's)
    answer    the Partial, a whole frame
    slices    of the experts asked for, one after another, as they stand in the GGUF

The first answer of each node is kept, of at most MOST_RECORDS nodes, if its slices fit MOST_BYTES: a call of
many rows asks for every expert of a layer, a later one of one row does not. wasm/pyodide has the other side.
"""

import hashlib
import json
import logging
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from backbone.experts.nodes import Node
from backbone.experts.plans import LayerPlan
from backbone.model.files import written_atomically
from backbone.model.formula import Formula
from relay.program.complaints import Complaints
from relay.wire.calls import Dispatch, Partial
from relay.wire.frames import Frame, FrameType

log = logging.getLogger(__name__)

MAGIC = b"ESCALL\0\1"
MOST_RECORDS = 8
MOST_BYTES = 256 << 20
SUFFIX = ".escall"


@dataclass(frozen=True, slots=True, eq=False)
class _Asked:
    """A call under way that may become a record."""

    node: Node
    plan: LayerPlan
    dispatch: Dispatch
    call_id: int
    deadline_ms: int


class Recorder:
    """
    Write the first answer of each node into a folder.

    slice_of gives the bytes of (layer, expert). A thread of its own writes files; `close` waits for it.
    """

    def __init__(
        self,
        folder: Path,
        model: str,
        model_name: str,
        slice_of: Callable[[int, int], bytes | memoryview],
        most_bytes: int = MOST_BYTES,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._model, self._model_name = model, model_name
        self._slice_of = slice_of
        self._most_bytes = most_bytes
        self._asked: dict[str, _Asked] = {}  # by node: one call of each at a time
        self._kept: set[str] = set()
        self._complaints = Complaints(log)
        self._writer = ThreadPoolExecutor(1, "record")

    def sent(self, node: Node, plan: LayerPlan, dispatch: Dispatch, call_id: int, deadline_ms: int) -> None:
        """A call leaves for a node. Costs a look at a set once there are enough records."""
        if len(self._kept) >= MOST_RECORDS or node.node_id in self._kept:
            return
        if len(set(dispatch.experts.tolist())) * plan.formula.slice_bytes <= self._most_bytes:
            self._asked[node.node_id] = _Asked(node, plan, dispatch, call_id, deadline_ms)
            if len(self._asked) > 4 * MOST_RECORDS:  # nodes that never answer
                self._asked.pop(next(iter(self._asked)))

    def answered(self, node: Node, call_id: int, partial: Partial) -> None:
        """A node answered a call with something of the right shape."""
        asked = self._asked.get(node.node_id)
        if asked is None or asked.call_id != call_id:
            return
        del self._asked[node.node_id]
        if len(self._kept) < MOST_RECORDS:
            self._kept.add(node.node_id)
            self._writer.submit(self._write_if_possible, asked, partial)

    def close(self) -> None:
        """Finish writing."""
        self._writer.shutdown()

    def _write_if_possible(self, asked: _Asked, partial: Partial) -> None:
        """A disk that does not take a record loses it, and nothing else."""
        try:
            self._write(asked, partial)
        except OSError as exc:
            self._complaints.say(
                "write", f"calls cannot be recorded in {self._folder}: {exc.strerror or exc}"
            )
        except Exception as exc:
            log.exception("a call could not be recorded: %s", exc)

    def _write(self, asked: _Asked, partial: Partial) -> None:
        experts = sorted(set(asked.dispatch.experts.tolist()))
        slices = {expert: bytes(self._slice_of(asked.plan.layer, expert)) for expert in experts}
        node = asked.node
        data = record_bytes(
            {"model": self._model, "model_name": self._model_name},
            {"id": node.node_id, "name": node.name, "kernel": node.kernel},
            asked.plan.formula,
            np.atleast_1d(asked.plan.layer_exponents).tolist(),
            _frames(asked, partial),
            slices,
        )
        name = re.sub(r"[^A-Za-z0-9_-]", "", node.node_id)[:32] or "node"  # the node chose its id
        path = self._folder / (name + SUFFIX)
        with written_atomically(path) as fresh:
            fresh.write_bytes(data)
        log.info("recorded a call that %s answered: %s (%d bytes)", node.name, path, len(data))


def _frames(asked: _Asked, partial: Partial) -> tuple[bytes, bytes]:
    """The two frames of a call as they went over the wire, unsealed."""
    peer, epoch = asked.node.peer, asked.node.epoch
    request = Frame(
        FrameType.DISPATCH, asked.dispatch.to_payload(), peer, asked.call_id, epoch, asked.deadline_ms
    )
    return request.encode(), Frame(
        FrameType.PARTIAL, partial.to_payload(), peer, asked.call_id, epoch
    ).encode()


def record_bytes(
    model: dict[str, str],
    node: dict[str, str],
    formula: Formula,
    layer_exponents: list[int],
    frames: tuple[bytes, bytes],
    slices: dict[int, bytes],
) -> bytes:
    """Put a record together; `frames` are request and answer, `slices` by expert."""
    request, answer = frames
    header = json.dumps(
        model
        | {
            "layer": Dispatch.from_payload(Frame.decode(request).payload).layer,
            "formula": formula.to_json(),
            "layer_exponents": layer_exponents,
            "node": node,
            "recorded_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "request_bytes": len(request),
            "answer_bytes": len(answer),
            "slices": [
                {"expert": expert, "sha256": hashlib.sha256(data).hexdigest(), "size_bytes": len(data)}
                for expert, data in slices.items()
            ],
        }
    ).encode()
    return b"".join((MAGIC, len(header).to_bytes(4, "little"), header, request, answer, *slices.values()))
