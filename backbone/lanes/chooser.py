"""
The lane the dispatcher uses: for each node the relayed one, or a link past the relay once it proved faster.

The driver around `relay.nat.paths.PathBook`: it opens links, races them with probes, and hands each call to
the lane in use. A call sent on a link is kept until it is answered; when the link ends, or is late, it is
sent again through the relay under the same call id. The dispatcher uses the first answer and drops others by
call id, so whatever lanes do, a call is answered once.
"""

import asyncio
import logging
import secrets
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, Protocol

from backbone.lanes.lane import LaneClosed
from backbone.lanes.link import Link, opening_session
from relay.nat.evidence import LONGEST_PROBE_KB, RELAYED, SIZES_KB, Evidence, PathPolicy, clear_race
from relay.nat.paths import Open, PathBook, Race
from relay.wire.calls import Probe
from relay.wire.close import CloseCode
from relay.wire.frames import HEADER_BYTES
from relay.wire.link import LinkEvent, LinkKey
from relay.wire.messages import Dispatch, Failure, PathReport, PathState, PeerNode, Peers, Signal
from relay.wire.session import (
    CorruptReceived,
    EchoReceived,
    FailureReceived,
    PartialReceived,
    SignalReceived,
)

log = logging.getLogger(__name__)

OPEN_TIMEOUT_S = 10.0  # a punch that takes longer is not coming (evidence: 0.1 to 1.5 s)
PROBE_TIMEOUT_S = 2.0
WARM_KB = 100  # opens a new link's windows both ways: a prompt's piece then takes one flight, not three
PROBE_CALLS = 1 << 63  # call ids of probes start here, the dispatcher's at 1
NOT_REACHED = "not reached"  # all that others hear of an address somebody announced: nobody scans ports by us
LINK_MAX_BYTES = 512 << 10  # larger calls are bulk: they take the relay and leave the link to the quick ones
REPORT_S = 1.0  # for people who ask the relay; it takes two a second
WATCH_S = 0.05
PATIENCE_S = 0.1
TIMES_KEPT = 64
MAX_TIMED = 1024  # calls on the relay whose time is kept; beyond that nobody answers

type Answer = PartialReceived | FailureReceived | CorruptReceived


class Relayed(Protocol):
    """What is needed of the lane through the relay."""

    def send_dispatch(
        self, peer: int, call_id: int, epoch: int, deadline_ms: int, dispatch: Dispatch
    ) -> int: ...

    def send_cancel(self, peer: int, call_id: int, epoch: int) -> None: ...

    def send_probe(self, peer: int, call_id: int, epoch: int, deadline_ms: int, probe: Probe) -> None: ...

    def send_signal(self, peer: int, epoch: int, signal: Signal) -> None: ...

    def send_path_report(self, report: PathReport) -> None: ...


@dataclass(slots=True)
class Attempt:
    """
    One try to open a link. `link` is made by `make_link` when this end opens, else by whoever accepts.

    coarse: why it could not be opened is for our log alone. signalled: hears what the node says about it.
    `close` is called when the attempt or its link is over.
    """

    lane: str
    id: str
    node: PeerNode
    known: LinkKey
    signal: Callable[[str, Mapping[str, str]], None]
    make_link: Callable[[], Link]
    fail: Callable[[str], None]
    signalled: Callable[[Signal], None] = lambda signal: None
    close: Callable[[], None] = lambda: None
    link: Link | None = None
    timer: asyncio.TimerHandle | None = None
    coarse: bool = False
    proved: bool = False  # its link was ready


class Opener(Protocol):
    """Opens links of one lane."""

    def offers(self, node: PeerNode) -> bool:
        """Tell whether this node could be reached that way."""
        ...

    async def open(self, attempt: Attempt) -> None:
        """Begin; the attempt's link reports success."""
        ...


@dataclass(slots=True, eq=False)
class _Flying:
    """A call on a link, until it is answered."""

    peer: int
    epoch: int
    deadline_ms: int
    dispatch: Dispatch
    link: Link
    at: float
    size_kb: int
    again: bool = False  # sent through the relay as well


@dataclass(slots=True, eq=False)
class _Lanes:
    """All about one node."""

    node: PeerNode
    book: PathBook
    attempts: dict[str, Attempt] = field(default_factory=dict)  # by lane; open or being opened
    in_use: Link | None = None
    calls: Counter[str] = field(default_factory=Counter)  # answers by lane
    times_s: dict[int, deque[float]] = field(default_factory=dict)  # rows -> newest round trips on the link
    timer: asyncio.TimerHandle | None = None


class LaneChooser:
    """
    A lane for the dispatcher. Tell it the relay's lists of nodes, answers and signals.

    on_answer: hears every answer, whichever lane brought it. on_lane(node_id, lane): another lane is used.
    """

    name = "chosen"

    def __init__(
        self,
        relayed: Relayed,
        openers: Mapping[str, Opener],
        on_answer: Callable[[Answer], None],
        on_lane: Callable[[str, str], None] = lambda node_id, lane: None,
        policy: PathPolicy | None = None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self.policy = policy or PathPolicy()
        self._relayed = relayed
        self._openers = openers
        self._on_answer = on_answer
        self._on_lane = on_lane
        self._clock = clock
        self._reported_at = -REPORT_S
        self._report_timer: asyncio.TimerHandle | None = None
        self._peers: dict[int, _Lanes] = {}
        self._flying: dict[int, _Flying] = {}
        self._timed: dict[int, tuple[int, float]] = {}  # calls on the relay: size class, when they were sent
        self._probes: dict[int, asyncio.Future[None]] = {}
        self._next_probe = PROBE_CALLS
        self._attempts: dict[str, tuple[_Lanes, Attempt]] = {}  # by link id
        self._sizes: Counter[int] = Counter()  # KB class -> calls of about that size
        self._tasks: set[asyncio.Task[None]] = set()
        self._watch: asyncio.TimerHandle | None = None

    # -- the lane

    def send_dispatch(self, peer: int, call_id: int, epoch: int, deadline_ms: int, dispatch: Dispatch) -> int:
        lanes = self._peers.get(peer)
        link = None if lanes is None else lanes.in_use
        small = len(dispatch.x) <= LINK_MAX_BYTES
        if link is not None and lanes is not None and small and self._fits(lanes, len(dispatch.x)):
            try:
                size_bytes = link.send_dispatch(call_id, deadline_ms, dispatch)
            except LaneClosed:
                pass  # full: this call takes the relay
            else:
                size_kb = _size_kb(size_bytes)
                flying = _Flying(peer, epoch, deadline_ms, dispatch, link, self._clock(), size_kb)
                self._flying[call_id] = flying
                if self._watch is None:
                    self._watch = asyncio.get_running_loop().call_later(WATCH_S, self._look)
                self._sizes[min(size_kb, LONGEST_PROBE_KB)] += 1
                return size_bytes
        size_bytes = self._relayed.send_dispatch(peer, call_id, epoch, deadline_ms, dispatch)
        size_kb = _size_kb(size_bytes)
        self._sizes[min(size_kb, LONGEST_PROBE_KB)] += 1
        if lanes is not None and self._openers:
            self._timed[call_id] = size_kb, self._clock()
            if len(self._timed) > MAX_TIMED:
                del self._timed[next(iter(self._timed))]
        return size_bytes

    def _fits(self, lanes: _Lanes, size_bytes: int) -> bool:
        """Whether a call of this size takes the lane in use."""
        return lanes.book.lane_of(_size_kb(size_bytes)) == lanes.book.current

    def send_cancel(self, peer: int, call_id: int, epoch: int) -> None:
        self._timed.pop(call_id, None)
        flying = self._flying.pop(call_id, None)
        if flying is not None:
            flying.link.send_cancel(call_id)
            if not flying.again:
                return
        self._relayed.send_cancel(peer, call_id, epoch)

    # -- what comes in

    def peers_changed(self, peers: Peers) -> None:
        """Take the relay's complete list."""
        now = self._clock()
        listed = {node.peer: node for node in peers.nodes}
        for peer, lanes in list(self._peers.items()):
            node = listed.get(peer)
            if node is None or (node.epoch, node.node_id) != (lanes.node.epoch, lanes.node.node_id):
                self._forget(peer, "the pairing is over")
            else:
                lanes.node = node
        for peer, node in listed.items():
            if peer not in self._peers:
                offered = [name for name, opener in self._openers.items() if opener.offers(node)]
                self._peers[peer] = lanes = _Lanes(node, PathBook(offered, self.policy, now))
                self._arm(lanes)
        if any(lanes.node.lanes for lanes in self._peers.values()):
            self._report()

    def relayed_lost(self) -> None:
        """The session with the relay ended, and with it all pairings."""
        for peer in list(self._peers):
            self._forget(peer, "the session with the relay ended")

    def answer_received(self, answer: Answer) -> None:
        """An answer came through the relay."""
        flying = self._flying.pop(answer.call_id, None)
        timed = self._timed.pop(answer.call_id, None)
        lanes = self._peers.get(answer.peer)
        if lanes is not None:
            lanes.calls[RELAYED] += 1
            if timed is not None and isinstance(answer, PartialReceived):
                now = self._clock()
                lanes.book.called(RELAYED, timed[0], 1e3 * (now - timed[1]), now)
            if flying is not None and flying.again:
                lanes.book.missed(lanes.book.current, self._clock())
                self._choose(lanes)
        self._on_answer(answer)

    def echo_received(self, echo: EchoReceived) -> None:
        """A probe came back, by whichever lane."""
        waiting = self._probes.pop(echo.call_id, None)
        if waiting is not None and not waiting.done():
            waiting.set_result(None)

    def signal_received(self, received: SignalReceived) -> None:
        """A node said something about a link."""
        found = self._attempts.get(received.signal.link)
        if found is None or found[0].node.peer != received.peer:
            return
        if received.signal.kind == "failed":
            found[1].fail(received.signal.data.get("reason", "the node could not")[:200])
        else:
            found[1].signalled(received.signal)

    def expected(self, link_id: str) -> LinkKey | None:
        """What an accepted link must know; for the listener."""
        found = self._attempts.get(link_id)
        return None if found is None else found[1].known

    def link_ready(self, link: Link) -> None:
        """A link proved its key: fill its windows, then race it."""
        found = self._attempts.get(link.session.link)
        if found is None:
            link.close(CloseCode.GOING_AWAY, "too late")
            return
        lanes, attempt = found
        if attempt.timer is not None:
            attempt.timer.cancel()
        attempt.link, attempt.proved = link, True
        log.info("%s: a %s link is open", lanes.node.name, attempt.lane)
        self._start(self._warm(lanes, attempt))

    def link_event(self, link: Link, event: LinkEvent) -> None:
        """A link brought something."""
        found = self._attempts.get(link.session.link)
        if found is None:
            return
        lanes, attempt = found
        match event:
            case EchoReceived():
                self.echo_received(event)
            case PartialReceived() | FailureReceived() | CorruptReceived():
                flying = self._flying.pop(event.call_id, None)
                lanes.calls[attempt.lane] += 1
                if flying is not None:
                    times = lanes.times_s.setdefault(flying.dispatch.num_tokens, deque(maxlen=TIMES_KEPT))
                    now = self._clock()
                    times.append(now - flying.at)
                    if len(lanes.times_s) > TIMES_KEPT:
                        del lanes.times_s[next(iter(lanes.times_s))]
                    if isinstance(event, PartialReceived) and not flying.again:
                        took_ms = 1e3 * (now - flying.at)
                        if lanes.book.called(attempt.lane, flying.size_kb, took_ms, now):
                            self._choose(lanes)
                            self._arm(lanes)
                self._on_answer(event)

    def link_closed(self, link: Link, why: str) -> None:
        """A link ended, or could not be opened."""
        found = self._attempts.get(link.session.link)
        if found is not None and found[1].link in (link, None):
            self._end(*found, why)

    def network_changed(self) -> None:
        """This machine's network is another now: try all lanes again."""
        for lanes in self._peers.values():
            lanes.book.network_changed(self._clock())
            self._arm(lanes)

    async def close(self) -> None:
        """Let go of everything."""
        self.relayed_lost()
        if self._watch is not None:
            self._watch.cancel()
        if self._report_timer is not None:
            self._report_timer.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # -- what people ask

    def lane_of(self, peer: int) -> str:
        """Name the lane that carries a node's calls."""
        lanes = self._peers.get(peer)
        return RELAYED if lanes is None else lanes.book.current

    def describe(self, peer: int) -> dict[str, Any]:
        """Say which lane carries a node's calls, why, and how old the evidence is."""
        lanes, now = self._peers.get(peer), self._clock()
        if lanes is None:
            return {"lane": RELAYED, "why": "this node is not ready", "evidence_age_s": None}
        book = lanes.book
        evidence = {} if book.evidence is None else book.evidence.round_trips_ms
        return {
            "lane": book.current,
            "why": book.why,
            "since_s": round(now - book.since, 3),
            "evidence_age_s": None if book.evidence_at is None else round(now - book.evidence_at, 3),
            "evidence_ms": {
                f"{kb} KB": [round(book.evidence.percentile_ms(kb, share), 3) for share in (0.5, 0.95)]
                for kb in evidence
                if book.evidence is not None
            },
            "lane_of_long_calls": book.lane_of_long_calls,
            "open": [lane for lane, attempt in lanes.attempts.items() if attempt.link is not None],
            "calls": dict(lanes.calls),
        }

    def described(self) -> dict[str, dict[str, Any]]:
        """Describe all nodes, by id."""
        return {lanes.node.node_id: self.describe(peer) for peer, lanes in self._peers.items()}

    # -- opening

    def _arm(self, lanes: _Lanes) -> None:
        if lanes.timer is not None:
            lanes.timer.cancel()
            lanes.timer = None
        at = lanes.book.next_timer()
        if at is not None:
            loop = asyncio.get_running_loop()
            lanes.timer = loop.call_later(max(0.0, at - self._clock()), self._due, lanes)

    def _due(self, lanes: _Lanes) -> None:
        lanes.timer = None
        for action in lanes.book.handle_timer(self._clock()):
            match action:
                case Open(lane):
                    self._open(lanes, lane)
                case Race():
                    self._start(self._race(lanes, action))
        self._arm(lanes)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("a lane could not be opened or raced", exc_info=task.exception())

    def _open(self, lanes: _Lanes, lane: str) -> None:
        node, link_id = lanes.node, secrets.token_hex(16)
        known = LinkKey(node.peer, node.epoch, secrets.token_bytes(32))

        def signal(kind: str, data: Mapping[str, str]) -> None:
            try:
                self._relayed.send_signal(node.peer, node.epoch, Signal(kind, link_id, data))
            except LaneClosed:
                pass  # the pairing is over, we shall hear

        def make_link() -> Link:
            attempt.link = Link(
                opening_session("backbone", link_id, known),
                self.link_ready,
                self.link_event,
                self.link_closed,
            )
            return attempt.link

        def fail(why: str) -> None:
            if self._attempts.get(link_id) is not None:
                self._end(lanes, attempt, why)

        attempt = Attempt(lane, link_id, node, known, signal, make_link, fail)
        lanes.attempts[lane] = attempt
        self._attempts[link_id] = (lanes, attempt)
        loop = asyncio.get_running_loop()
        attempt.timer = loop.call_later(OPEN_TIMEOUT_S, fail, f"not open within {OPEN_TIMEOUT_S:g} s")
        self._start(self._openers[lane].open(attempt))

    def _end(self, lanes: _Lanes, attempt: Attempt, why: str) -> None:
        """An attempt or its link is over: what it owes is asked again through the relay, now."""
        self._attempts.pop(attempt.id, None)
        lanes.attempts.pop(attempt.lane, None)
        if attempt.timer is not None:
            attempt.timer.cancel()
        attempt.close()
        if attempt.link is not None:
            attempt.link.close(CloseCode.GOING_AWAY, "this link is over")
        log.info("%s: %s lane: %s", lanes.node.name, attempt.lane, why)
        if attempt.coarse and not attempt.proved:
            why = NOT_REACHED
        lanes.book.lost(attempt.lane, why, self._clock())
        self._choose(lanes)
        for call_id, flying in list(self._flying.items()):
            if flying.link is attempt.link and not flying.again:
                self._again(call_id, flying)
        self._report()
        self._arm(lanes)

    def _forget(self, peer: int, why: str) -> None:
        lanes = self._peers.pop(peer)
        for attempt in list(lanes.attempts.values()):
            self._attempts.pop(attempt.id, None)
            if attempt.timer is not None:
                attempt.timer.cancel()
            attempt.close()
            if attempt.link is not None:
                attempt.link.close(CloseCode.GOING_AWAY, why)
        if lanes.timer is not None:
            lanes.timer.cancel()
            lanes.timer = None
        for call_id in [call_id for call_id, flying in self._flying.items() if flying.peer == peer]:
            del self._flying[call_id]  # the dispatcher hears of the node itself

    def _choose(self, lanes: _Lanes) -> None:
        """Use the lane the book says."""
        attempt = lanes.attempts.get(lanes.book.current)
        link = None if attempt is None else attempt.link
        if link is lanes.in_use:
            return
        lanes.in_use = link
        log.info("%s: calls take the %s lane: %s", lanes.node.name, lanes.book.current, lanes.book.why)
        self._on_lane(lanes.node.node_id, lanes.book.current)
        self._report()

    # -- calls that are late

    def _look(self) -> None:
        self._watch = None
        now = self._clock()
        for call_id, flying in list(self._flying.items()):
            if not flying.again and now - flying.at > self._patience_s(flying):
                self._again(call_id, flying)
        if any(not flying.again for flying in self._flying.values()):
            self._watch = asyncio.get_running_loop().call_later(WATCH_S, self._look)

    def _patience_s(self, flying: _Flying) -> float:
        """Give the time after which a call is sent again: twice the longest of its size, at most."""
        lanes = self._peers.get(flying.peer)
        times = None if lanes is None else lanes.times_s.get(flying.dispatch.num_tokens)
        most_s = 0.6 * flying.deadline_ms / 1e3
        return most_s if not times else min(most_s, PATIENCE_S + 2.0 * max(times))

    def _again(self, call_id: int, flying: _Flying) -> None:
        flying.again = True
        left_ms = max(1, flying.deadline_ms - int(1e3 * (self._clock() - flying.at)))
        try:
            self._relayed.send_dispatch(flying.peer, call_id, flying.epoch, left_ms, flying.dispatch)
        except LaneClosed as exc:
            self._flying.pop(call_id, None)
            failure = Failure("gone", f"link and relay are lost: {exc}"[:500], "send")
            self._on_answer(FailureReceived(flying.peer, call_id, flying.epoch, failure))

    # -- racing

    async def _warm(self, lanes: _Lanes, attempt: Attempt) -> None:
        """
        Send bulk both ways before a link counts as open, once.

        A fresh connection takes 14 KB in its first flight (RFC 6928), and 100 KB three round trips each way.
        Neither race nor calls shall measure or pay that.
        """
        await self._probe(lanes, attempt.lane, WARM_KB)
        if lanes.attempts.get(attempt.lane) is attempt:
            lanes.book.opened(attempt.lane, self._clock())
            self._arm(lanes)

    async def _race(self, lanes: _Lanes, race: Race) -> None:
        """Send the same messages over both lanes, turn by turn, and tell the book."""
        evidence = {race.current: Evidence(), race.other: Evidence()}
        sizes = sorted(kb for kb, _ in self._sizes.most_common(2)) or list(SIZES_KB[:2])
        for _ in range(self.policy.probes):
            for size_kb in sizes:
                took = await asyncio.gather(*(self._probe(lanes, lane, size_kb) for lane in evidence))
                for lane, took_s in zip(evidence, took, strict=True):
                    evidence[lane].add(size_kb, None if took_s is None else took_s * 1e3)
            if any(found.lost > self.policy.max_lost for found in evidence.values()):
                break
            if clear_race(evidence[race.current], evidence[race.other], self.policy):
                break
        if self._peers.get(lanes.node.peer) is not lanes:
            return
        lanes.book.raced(race, evidence[race.current], evidence[race.other], self._clock())
        self._choose(lanes)
        self._report()
        self._arm(lanes)

    async def _probe(self, lanes: _Lanes, lane: str, size_kb: int) -> float | None:
        """Time one message each way; None when it did not come back."""
        payload_bytes = (size_kb << 10) - HEADER_BYTES
        return await self._time_probe(lanes, lane, payload_bytes, payload_bytes, PROBE_TIMEOUT_S)

    async def _time_probe(
        self, lanes: _Lanes, lane: str, size_bytes: int, answer_bytes: int, timeout_s: float
    ) -> float | None:
        call_id, self._next_probe = self._next_probe, self._next_probe + 1
        back: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._probes[call_id] = back
        probe, node = Probe(size_bytes, answer_bytes), lanes.node
        started = self._clock()
        try:
            if lane == RELAYED:
                self._relayed.send_probe(node.peer, call_id, node.epoch, int(timeout_s * 1e3), probe)
            else:
                attempt = lanes.attempts.get(lane)
                if attempt is None or attempt.link is None:
                    return None
                attempt.link.send_probe(call_id, probe)
            await asyncio.wait_for(back, timeout_s)
            return self._clock() - started
        except (LaneClosed, TimeoutError):
            return None
        finally:
            self._probes.pop(call_id, None)

    def _report(self) -> None:
        """Tell the relay which lanes are used, now or, after a report, when the next one may leave."""
        if self._report_timer is None:
            wait_s = max(0.0, self._reported_at + REPORT_S - self._clock())
            if wait_s == 0.0:
                self._report_now()
            else:
                self._report_timer = asyncio.get_running_loop().call_later(wait_s, self._report_now)

    def _report_now(self) -> None:
        self._report_timer = None
        self._reported_at = now = self._clock()
        paths = []
        for peer, lanes in self._peers.items():
            book = lanes.book
            if not lanes.node.lanes:
                continue  # its relay may be too old to understand
            found = None if book.evidence is None else book.evidence
            sizes = [] if found is None else sorted(found.round_trips_ms)
            p50, p95 = [
                None if found is None or not sizes else found.percentile_ms(sizes[0], share)
                for share in (0.5, 0.95)
            ]
            age_s = 0.0 if book.evidence_at is None else now - book.evidence_at
            paths.append(PathState(peer, book.current, book.why[:200], age_s, p50, p95))
        if paths:
            try:
                self._relayed.send_path_report(PathReport(tuple(paths)))
            except LaneClosed:
                pass


def _size_kb(size_bytes: int) -> int:
    """Give the size class of a message; of one that is longer than any probe, its size."""
    return next((kb for kb in SIZES_KB if size_bytes <= kb << 10), -(-size_bytes // 1024))
