"""How the backbone opens direct links: it dials a node that listens, or has a node dial where it listens."""

import asyncio
import logging
from dataclasses import replace

from backbone.lanes.chooser import Attempt
from backbone.lanes.direct import Bounds, LinkListener, dial
from relay.wire.messages import PeerNode, Signal

log = logging.getLogger(__name__)

DIRECT = "direct"


class DirectOpener:
    """
    `listener` is the backbone's own, None when it does not listen; `relay_url` bounds what is dialled, to
    where the relay saw a node come from unless `dial_any`.

    seals: whether we seal. Calls to nodes that do so, too, are sealed on links without TLS.
    """

    def __init__(
        self, relay_url: str, listener: LinkListener | None, seals: bool = False, dial_any: bool = False
    ) -> None:
        self._relay_url = relay_url
        self._listener = listener
        self._seals = seals
        self._dial_any = dial_any

    def offers(self, node: PeerNode) -> bool:
        return DIRECT in node.lanes and (node.listen is not None or self._listener is not None)

    async def open(self, attempt: Attempt) -> None:
        listen = attempt.node.listen
        data = {"key": attempt.known.key.hex()}
        url = self._listener.url if listen is None and self._listener is not None else listen or ""
        if self._seals and attempt.node.seal is not None and not url.startswith(("wss:", "https:")):
            attempt.known = replace(attempt.known, seal=True)
            data["seal"] = "1"
        if listen is None:
            assert self._listener is not None
            data["url"] = self._listener.url
            if self._listener.fingerprint:
                data["fingerprint"] = self._listener.fingerprint
            attempt.signal("dial", data)
            return
        said: asyncio.Future[Signal] = asyncio.get_running_loop().create_future()

        def signalled(signal: Signal) -> None:
            if signal.kind == "expecting" and not said.done():
                said.set_result(signal)

        def close() -> None:
            said.cancel()

        attempt.signalled, attempt.close, attempt.coarse = signalled, close, True
        attempt.signal("expect", data)
        try:
            signal = await said
        except asyncio.CancelledError:
            if said.cancelled():
                return  # the attempt is over
            raise
        link = attempt.make_link()
        link.session.known = attempt.known
        bounds = Bounds(self._relay_url, attempt.node.seen, proved=True, trusted=self._dial_any)
        await dial(listen, link, signal.data.get("fingerprint"), bounds)
