"""
The node's end of links to its backbone: does what the backbone's signals ask, and owns what comes of it.

Nothing here decides about calls; they go to the same machine as those from the relay.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping

from backbone.lanes.chooser import NOT_REACHED
from backbone.lanes.direct import Bounds, LinkListener, ListenAt, dial
from backbone.lanes.link import Link, accepting_session, opening_session
from backbone.lanes.nat import NatWatch
from backbone.lanes.webrtc import WEBRTC, RtcEnd, native
from relay.wire.close import CloseCode
from relay.wire.fields import is_hex
from relay.wire.link import LinkEvent, LinkKey
from relay.wire.messages import Signal
from relay.wire.session import SignalReceived

log = logging.getLogger(__name__)

EXPECT_S = 10.0
MAX_EARLY = 32
MAX_LINKS = 8  # a backbone has one per lane

type SendSignal = Callable[[int, int, Signal], None]


class NodeLinks:
    """
    All links of one node.

    on_event(link, event): a call, a cancel or a probe came. send_signal(peer, epoch, signal): say it through
    the relay. relay_url: what bounds where we dial.
    """

    def __init__(
        self,
        on_event: Callable[[Link, LinkEvent], None],
        send_signal: SendSignal,
        relay_url: str,
        listen: ListenAt | None = None,
    ) -> None:
        self._on_event = on_event
        self._send_signal = send_signal
        self._bounds = Bounds(relay_url)
        self._listener = None if listen is None else LinkListener(listen, self._accepted)
        self._expected: dict[str, LinkKey] = {}
        self._links: set[Link] = set()
        self._channels: dict[str, RtcEnd] = {}  # by link id
        self._early: dict[str, list[Signal]] = {}  # candidates of offers we still look at
        self._nat = NatWatch()
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        """Start listening, where that was asked for; raises OSError when it cannot."""
        if self._listener is not None:
            await self._listener.open()

    @property
    def lanes(self) -> tuple[str, ...]:
        """What the Offer says."""
        return ("direct", WEBRTC) if native() is not None else ("direct",)

    @property
    def listen(self) -> str | None:
        """The URL the Offer announces."""
        return None if self._listener is None else self._listener.url

    @property
    def ready(self) -> int:
        """How many links can carry calls."""
        return sum(link.ready for link in self._links)

    def welcomed(self, stun: str | None) -> None:
        """A session began, perhaps on another network: find out what NAT we are behind, links may ask."""
        if native() is not None:
            self._nat.forget()
            self._nat.prepare(stun)

    def signalled(self, received: SignalReceived) -> None:
        """The backbone said something about a link; what makes no sense is answered with `failed`."""
        signal, data = received.signal, received.signal.data

        def say(kind: str, values: Mapping[str, str]) -> None:
            self._send_signal(received.peer, received.epoch, Signal(kind, signal.link, values))

        if signal.kind == "candidate":
            if (channel := self._channels.get(signal.link)) is not None:
                channel.candidate(data.get("candidate", ""), data.get("mid", ""))
            elif len(early := self._early.get(signal.link, [])) < MAX_EARLY:
                early.append(signal)
            return
        key = data.get("key", "")
        if not is_hex(key, 64):
            return
        known = LinkKey(received.peer, received.epoch, bytes.fromhex(key), data.get("seal") == "1")
        match signal.kind:
            case "expect" if self._listener is not None and len(self._expected) < MAX_LINKS:
                self._expected[signal.link] = known
                asyncio.get_running_loop().call_later(EXPECT_S, self._expected.pop, signal.link, None)
                fingerprint = self._listener.fingerprint
                say("expecting", {"fingerprint": fingerprint} if fingerprint else {})
            case "dial" if len(self._links) < MAX_LINKS:

                def failed(link: Link, why: str) -> None:
                    if not link.ready:
                        say("failed", {"reason": NOT_REACHED})
                    self._closed(link, why)

                session = opening_session("node", signal.link, known)
                link = Link(session, self._made, self._on_event, failed)
                self._links.add(link)
                self._start(dial(data.get("url", ""), link, data.get("fingerprint"), self._bounds))
            case "offer" if native() is not None and self._room_for(signal.link):
                early = self._early[signal.link] = []
                self._start(self._answer(signal, known, say, early))
            case _:
                say("failed", {"reason": f"{signal.kind} is not possible here"})

    async def _answer(
        self,
        signal: Signal,
        known: LinkKey,
        say: Callable[[str, Mapping[str, str]], None],
        early: list[Signal],
    ) -> None:
        """Answer an offer of a data channel, unless no punch can come through both NATs."""
        data = signal.data
        why = await self._nat.why_hopeless(data.get("stun"), data.get("nat"))
        if self._early.get(signal.link) is not early:
            return  # the pairing ended meanwhile
        del self._early[signal.link]
        if why is not None:
            say("failed", {"reason": why[:200]})
            return

        def over(link: Link, why: str) -> None:
            self._channels.pop(signal.link, None)
            self._closed(link, why)

        session = accepting_session("node", {signal.link: known}.get)
        link = Link(session, self._made, self._on_event, over)
        self._links.add(link)
        channel = self._channels[signal.link] = RtcEnd(link, say, data.get("stun"))
        for candidate in early:
            channel.candidate(candidate.data.get("candidate", ""), candidate.data.get("mid", ""))
        await channel.accept(data.get("sdp", ""))

    def _room_for(self, link: str) -> bool:
        """Whether an offer may be looked at: a new one, within MAX_LINKS with all others."""
        known = link in self._early or link in self._channels
        return not known and len(self._links) + len(self._early) < MAX_LINKS

    def close_all(self, reason: str) -> None:
        """The pairing or the session is over."""
        self._expected.clear()
        self._early.clear()
        self._channels.clear()
        for link in list(self._links):
            link.close(CloseCode.GOING_AWAY, reason)
        self._links.clear()

    def close(self) -> None:
        """Let go of everything, the listener too."""
        self.close_all("the node stops")
        self._nat.close()
        for task in self._tasks:
            task.cancel()
        if self._listener is not None:
            self._listener.close()

    def _accepted(self) -> Link:
        return Link(
            accepting_session("node", lambda link: self._expected.pop(link, None)),
            self._made,
            self._on_event,
            self._closed,
        )

    def _made(self, link: Link) -> None:
        self._links.add(link)

    def _closed(self, link: Link, why: str) -> None:
        self._links.discard(link)
        log.info("a link ended: %s", why)

    def _start(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
