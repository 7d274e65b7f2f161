"""A relay that keeps what passes and meddles with it: the product's own with two methods replaced."""

from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Any

import pytest

from relay.forwarding.connection import Connection
from relay.forwarding.queue import Waiting
from relay.wire.frames import HEADER_BYTES, Frame, FrameType, decode_header, readdress
from relay.wire.session import RelaySession


class Meddling(Enum):
    """What is done with bulk frames: dispatches, partials, probes, echoes."""

    NONE = "passes them on"
    FLIP = "changes a bit of the payload"
    FLIP_COUNTER = "changes the counter"
    RECALL = "writes another call's number"
    DEADLINE = "gives the node more time than it has"
    REPLAY = "sends them twice"
    REORDER = "lets the next one overtake"
    DROP = "loses them"
    SWAP = "says that another peer sent them"
    STRIP = "clears the flag that says sealed"
    GARBAGE = "sends something of its own"


class NosyRelay:
    """`seen` are all frames that passed; `meddling` may be changed at any time and counts in `meddled`."""

    def __init__(self) -> None:
        self.seen: list[bytes] = []
        self.meddling = Meddling.NONE
        self.meddled = 0
        self.only: FrameType | None = None
        self.every = 1
        self._passed = 0
        self._held: dict[int, Waiting] = {}
        self._handles: set[int] = set()

    @contextmanager
    def installed(self) -> Iterator["NosyRelay"]:
        """Replace the methods of every relay in this process."""
        queue, forward = Connection.queue, RelaySession.forward

        def nosy_forward(session: RelaySession, header: Any, data: bytes, sender: int) -> bytes:
            passed = forward(session, header, data, sender)
            self.seen.append(passed)
            return passed

        def nosy_queue(connection: Connection, message: Waiting) -> bool:
            said = [message._replace(data=data) for data in self._meddle(connection, message)]
            return all([queue(connection, each) for each in said])

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(RelaySession, "forward", nosy_forward)
            patch.setattr(Connection, "queue", nosy_queue)
            yield self

    def payloads(self) -> bytes:
        """All that could be read of calls and Signals."""
        return b"".join(data[HEADER_BYTES:] for data in self.seen)

    def _meddle(self, connection: Connection, message: Waiting) -> list[bytes]:
        data = message.data
        header = decode_header(data)
        self._handles.add(header.peer)
        wanted = self.meddling is not Meddling.NONE and self.only in (None, header.type)
        self._passed += wanted
        if not wanted or self._passed % self.every:
            held = self._held.pop(connection.handle, None)
            return [data] if held is None else [data, held.data]
        self.meddled += 1
        match self.meddling:
            case Meddling.FLIP:
                return [flipped(data, -3)]
            case Meddling.FLIP_COUNTER:
                return [flipped(data, HEADER_BYTES)]
            case Meddling.RECALL:
                return [flipped(data, 16)]
            case Meddling.DEADLINE:
                return [flipped(data, 29)]
            case Meddling.REPLAY:
                return [data, data]
            case Meddling.REORDER:
                held = self._held.pop(connection.handle, None)
                if held is None:
                    self._held[connection.handle] = message
                    return []
                return [data, held.data]
            case Meddling.DROP:
                return []
            case Meddling.SWAP:
                others = [handle for handle in self._handles if handle != header.peer]
                return [readdress(data, others[self.meddled % len(others)])] if others else [data]
            case Meddling.STRIP:
                return [data[:4] + b"\0\0" + data[6:]]
            case _:
                ids = (header.peer, header.call_id, header.epoch, header.deadline_ms)
                return [Frame(header.type, bytes(range(64)), *ids, sealed=header.sealed).encode()]


def flipped(data: bytes, at: int) -> bytes:
    changed = bytearray(data)
    changed[at] ^= 1
    return bytes(changed)
