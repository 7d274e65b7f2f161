"""
Remember which calls are under way, so that a sender hears at once when the receiver is gone. Pure.

One entry per dispatch passed on, until its partial, failure or cancel passes, or its node leaves.
"""

from collections import OrderedDict
from typing import NamedTuple

MAX_CALLS_PER_NODE = 4096  # beyond it the oldest is forgotten: its sender still has its own deadline


class OpenCall(NamedTuple):
    """A dispatch that a node has not answered yet."""

    backbone: int
    call_id: int
    epoch: int


class Calls:
    """The calls under way, by node."""

    __slots__ = ("_by_node",)

    def __init__(self) -> None:
        self._by_node: dict[int, OrderedDict[tuple[int, int], OpenCall]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._by_node.values()))

    def opened(self, node: int, call: OpenCall) -> None:
        """A dispatch was passed on."""
        calls = self._by_node.setdefault(node, OrderedDict())
        calls[call.backbone, call.call_id] = call
        if len(calls) > MAX_CALLS_PER_NODE:
            calls.popitem(last=False)

    def closed(self, node: int, backbone: int, call_id: int) -> bool:
        """A partial, failure or cancel is passed on; False when no such call was under way."""
        calls = self._by_node.get(node)
        return calls is not None and calls.pop((backbone, call_id), None) is not None

    def node_left(self, node: int) -> list[OpenCall]:
        """Forget a node; return the calls nobody will answer now."""
        return list(self._by_node.pop(node, OrderedDict()).values())

    def backbone_left(self, backbone: int) -> None:
        """Forget the calls of a backbone: nobody waits for them."""
        for calls in self._by_node.values():
            for key in [key for key in calls if key[0] == backbone]:
                del calls[key]
