"""What a lane offers: calls to nodes, without waiting."""

from typing import Protocol

from relay.wire.messages import Dispatch


class LaneClosed(Exception):
    """The path to the node is gone or full; the caller asks another holder."""


class Lane(Protocol):
    """
    One way to reach nodes; what they answer goes to the handler the lane's owner gave it.

    Both methods hand the frame to the network and return at once, or raise LaneClosed.
    """

    name: str

    def send_dispatch(self, peer: int, call_id: int, epoch: int, deadline_ms: int, dispatch: Dispatch) -> int:
        """Ask a node; gives the bytes that travel."""
        ...

    def send_cancel(self, peer: int, call_id: int, epoch: int) -> None:
        """Tell a node that nobody waits any more."""
        ...
