"""A real node whose last step goes wrong in a chosen way; up to the reply it is the product's own code."""

import asyncio
from enum import Enum

from backbone.experts.native import NativeKernel
from backbone.node import events as ev
from backbone.node.client import ClientConfig, NodeClient
from relay.wire.frames import Frame, FrameType
from relay.wire.messages import Partial


class Vice(Enum):
    """What the node does instead of answering well."""

    NONE = "answers well"
    WRONG_SIZE = "answers one row too many"
    WRONG_LAYER = "answers for the layer above"
    GARBAGE = "answers bytes that are no partial"
    TWICE = "answers twice"
    NEVER = "never answers"
    SLOW = "answers long after the deadline"
    VANISH = "drops the connection instead of answering"


class LyingNode(NodeClient):
    """`vice` may be changed at any time; `lies` counts how often it was acted on."""

    def __init__(self, config: ClientConfig, kernel: NativeKernel, vice: Vice) -> None:
        super().__init__(config, kernel)
        self.vice = vice
        self.lies = 0
        self.late: set[asyncio.Task[None]] = set()

    def _reply(self, call: ev.Call, result: object) -> None:
        assert isinstance(result, Partial)
        self.lies += self.vice is not Vice.NONE
        match self.vice:
            case Vice.NONE:
                super()._reply(call, result)
            case Vice.WRONG_SIZE:
                row = len(result.data) // result.num_tokens
                data = bytes(result.data) + bytes(result.data)[:row]
                widths = result.widths + result.widths[:1]
                super()._reply(call, Partial(result.layer, result.hidden_dim, result.grid, 0, widths, data))
            case Vice.WRONG_LAYER:
                other = Partial(
                    result.layer + 1, result.hidden_dim, result.grid, 0, result.widths, result.data
                )
                super()._reply(call, other)
            case Vice.GARBAGE:
                frame = Frame(FrameType.PARTIAL, b"\xff" * 40, call.peer, call.call_id, call.epoch)
                assert self._socket is not None
                self._socket.send(frame.encode())
            case Vice.TWICE:
                super()._reply(call, result)
                super()._reply(call, result)
            case Vice.NEVER:
                pass
            case Vice.SLOW:
                task = asyncio.create_task(self._answer_late(call, result))
                self.late.add(task)
                task.add_done_callback(self.late.discard)
            case Vice.VANISH:
                assert self._socket is not None and self._socket._transport is not None
                self._socket._transport.abort()

    async def _answer_late(self, call: ev.Call, result: Partial) -> None:
        await asyncio.sleep(1.5)
        super()._reply(call, result)
