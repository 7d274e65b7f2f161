"""
Read a recorded call, as backbone/experts/record.py writes it.

    8 bytes   "ESCALL", 0, version 1
    u32       bytes of the header, little endian
    header    JSON, see HEADER
    request   the Dispatch, a whole frame
    answer    the Partial, a whole frame
    slices    one after another, as the header lists them
"""

import json
from dataclasses import dataclass
from typing import Any, Self

from expertswarm_verify.calls import Dispatch, Partial
from expertswarm_verify.wire.errors import WireError
from expertswarm_verify.wire.frames import Frame, FrameType

MAGIC = b"ESCALL\0\1"
HEADER = {  # key -> type of its value
    "model": str,  # hash of the manifest
    "model_name": str,
    "layer": int,
    "formula": dict,  # backbone/model/formula.py
    "layer_exponents": list,  # x32: one; x16: one per channel
    "node": dict,  # id, name, kernel: as the node said
    "recorded_at": str,
    "request_bytes": int,
    "answer_bytes": int,
    "slices": list,  # {expert, sha256, size_bytes}
}


class BadRecord(ValueError):
    """This is no record, or not a whole one."""


@dataclass(frozen=True, slots=True)
class Record:
    """A call as it went over the wire, and what is needed to compute it again."""

    header: dict[str, Any]
    request: Dispatch
    answer: Partial
    slices: dict[int, bytes]  # by expert

    @classmethod
    def read(cls, data: bytes) -> Self:
        """Read a whole file; raises BadRecord."""
        if data[:8] != MAGIC or len(data) < 12:
            raise BadRecord("this file is no recorded call (backbone serve --record FOLDER writes them)")
        at = 12 + int.from_bytes(data[8:12], "little")
        try:
            header = json.loads(data[12:at])
            strange = [key for key, kind in HEADER.items() if not isinstance(header[key], kind)]
            sizes = [int(each["size_bytes"]) for each in header["slices"]]
            experts = [int(each["expert"]) for each in header["slices"]]
        except (ValueError, KeyError, TypeError) as exc:
            raise BadRecord(f"the header cannot be read: {exc!r}") from exc
        if strange:
            raise BadRecord(f"the header has values of another kind: {', '.join(strange)}")
        parts = []
        for size in [header["request_bytes"], header["answer_bytes"], *sizes]:
            if size < 0 or at + size > len(data):
                raise BadRecord("the file is cut off")
            parts.append(data[at : at + size])
            at += size
        if at != len(data):
            raise BadRecord(f"{len(data) - at} bytes too many")
        try:
            asked, answered = Frame.decode(parts[0]), Frame.decode(parts[1])
            request, answer = Dispatch.from_payload(asked.payload), Partial.from_payload(answered.payload)
        except WireError as exc:
            raise BadRecord(str(exc)) from exc
        if (asked.type, answered.type) != (FrameType.DISPATCH, FrameType.PARTIAL):
            raise BadRecord("the frames are not a Dispatch and a Partial")
        if (asked.call_id, asked.epoch) != (answered.call_id, answered.epoch):
            raise BadRecord("the answer belongs to another call")
        return cls(header, request, answer, dict(zip(experts, parts[2:], strict=True)))
