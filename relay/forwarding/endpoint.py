"""
Drive all sessions: greet them, feed the pool with what they say, tell them what follows, pass calls on.

    websocket ──> Connection ──> RelaySession ──events──> Hub ──> Pool (who holds what, who works for whom)
                                                            └──> Outbox of the other end
"""

import asyncio
import gc
import hmac
import logging
import secrets
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from time import monotonic
from typing import Any, NamedTuple

from relay import __version__
from relay.admission import Blocks, Waiting, block_of, ip_of
from relay.config import Config
from relay.door import Places
from relay.forwarding.connection import Connection
from relay.forwarding.queue import Outbox
from relay.forwarding.queue import Waiting as Message
from relay.forwarding.socket import ServerSocket
from relay.forwarding.table import Calls, OpenCall
from relay.forwarding.turns import Turns
from relay.metrics import Metrics
from relay.pool.inventory import BackboneRecord
from relay.pool.pool import Pool, Told
from relay.signalling.rooms import Rooms
from relay.wire.close import CloseCode
from relay.wire.errors import LocalProtocolError
from relay.wire.fields import fingerprint
from relay.wire.frames import (
    HEADER_BYTES,
    MAX_FRAME_BYTES,
    PASSED_ON,
    PAYLOAD_LIMITS,
    SEAL_BYTES,
    SIGNAL_TYPES,
    Frame,
    FrameType,
    Header,
)
from relay.wire.messages import (
    Assign,
    Drain,
    Failure,
    Hello,
    Offer,
    PathReport,
    PathState,
    Pause,
    Register,
    SliceReady,
    SliceWanted,
    Welcome,
)
from relay.wire.session import Closed, Event, ForwardReceived, RelaySession, State

log = logging.getLogger(__name__)

MAX_SETTLE_PAUSE_S = 1.0
# What a swarm holds is sets of millions, and to look through them for cycles stops the loop for up to half a
# second. Next to nothing here is in cycles, so that is done some hundred times less often than Python would.
GC_THRESHOLDS = (50_000, 20, 50)
SWITCH_S = 0.0005  # the loop does not wait for the thread that settles longer than this; Python's own is 5 ms
SETTLE_DELAY_S = 0.02  # changes within it are settled together: a swarm that reconnects is one change
TICK_S = 0.25
NOTICE_S = 60.0
HTTP_PLACES = 1024  # connections beyond sessions: pages, slices
RESERVED = 64  # places beyond max_sessions for backbones, and for who has not said yet what it is

# Ends after which a node may be back in a moment: the network's, and those that we noticed before it did.
BROKEN = frozenset({1005, 1006, int(CloseCode.TIMEOUT), int(CloseCode.REPLACED)})

_GONE = "this peer is not connected, or not paired with the sender"


class Away(NamedTuple):
    """A node whose session broke: who may have its place, and until when it is kept."""

    secret: str
    resume: str
    until: float


class Hub:
    """All sessions of this relay."""

    def __init__(self, config: Config, backbone_token: str, metrics: Metrics) -> None:
        self.config = config
        self.pool = Pool(first_epoch=1 + secrets.randbelow(1 << 31))  # not one of an earlier life
        self.calls = Calls()
        self.rooms = Rooms()
        self.stun: Callable[[str], str | None] = lambda reached_at: None  # host:port, see StunEndpoint.told
        self.draining = False
        self.on_backbones_changed: Callable[[], None] = lambda: None
        self.awaited: Callable[[str], bool] = lambda slice_id: False  # see Pool.tick
        self._token = backbone_token
        self._metrics = metrics
        self._passed = {kind: [0, 0] for kind in PASSED_ON}  # frames, bytes; not yet in the metrics
        self._connections: dict[int, Connection] = {}
        self._by_id: dict[str, Connection] = {}  # greeted ones
        self._by_session_token: dict[str, Connection] = {}
        self._away: dict[str, Away] = {}  # by id, oldest first; `config.resume_places` at most
        self._paths: dict[int, dict[int, tuple[PathState, float]]] = {}  # backbone -> node -> said, when
        self._sealed: dict[int, bool] = {}  # node -> whether the last frame for it came sealed
        self._next_handle = 1
        self.turns = Turns()
        most = config.max_sessions + RESERVED + HTTP_PLACES
        self.places = Places(most, config.connections_per_address, config.request_s, config.stall_s)
        self.places.make_way = self._make_way
        self._blocks = Blocks(config.sessions_per_address)
        self._waiting: Waiting[int] = Waiting()  # greeted or not, without an offer yet
        self._refused, self._noticed_at = 0, -NOTICE_S
        self._settling: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(1, "settle")
        self._ticker: asyncio.Task[None] | None = None
        metrics.queued.set_function(lambda: sum(c.outbox.size_bytes for c in self._connections.values()))

    # -- life

    async def start(self) -> None:
        sys.setswitchinterval(SWITCH_S)
        gc.set_threshold(*GC_THRESHOLDS)
        self._ticker = asyncio.create_task(self._tick_forever())

    async def drain(self, reason: str) -> None:
        """Say that we stop, let calls finish for a bounded time, say goodbye."""
        self.draining = True
        for connection in list(self._connections.values()):
            if connection.session.state in (State.OPEN, State.READY):
                connection.session.send_drain(Drain(reason, self.config.reconnect_after_s))
                connection.flush()
        deadline = monotonic() + self.config.drain_s
        while len(self.calls) and monotonic() < deadline:
            await asyncio.sleep(0.01)
        for connection in list(self._connections.values()):
            self._end(connection, CloseCode.GOING_AWAY, reason)

    async def stop(self) -> None:
        tasks = [task for task in (self._settling, self._ticker) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._thread.shutdown(wait=False, cancel_futures=True)

    # -- one socket

    def opened(self, socket: ServerSocket) -> Connection:
        """Take a new socket."""
        now = monotonic()
        session = RelaySession(now, self.config.ping_interval_s)
        outbox = Outbox(self.config.queue_bytes, self.config.queue_frames)
        connection = Connection(self._next_handle, session, outbox, socket, self._receive, self._lost)
        while self._next_handle in self._connections or connection.handle == self._next_handle:
            self._next_handle = self._next_handle % 0xFFFF_FFFF + 1  # a handle is a u32
        self._connections[connection.handle] = connection
        session.refuses = partial(self._refuses, connection)
        if self.draining:
            self._end(connection, CloseCode.GOING_AWAY, "this relay takes no more sessions now")
            return connection
        block = block_of(connection.address)
        why = self._blocks.enter(block, now)
        if why is None:
            connection.block = block
            why = self._no_room()
        if why is not None:
            self._notice(why, now)
            self._end(connection, CloseCode.OVERLOADED, why)
        else:
            self._waiting.add(connection.handle, block, now)
        return connection

    def _no_room(self) -> str | None:
        """Make room for one more session: who said nothing yet makes way. Say so when nobody does."""
        if len(self._connections) <= self.config.max_sessions + RESERVED:
            return None
        if not self._make_way():
            return f"all {self.config.max_sessions} places are taken (max_sessions)"
        return None

    def _make_way(self) -> bool:
        """End the session that waited longest without an offer; False when there is none."""
        victim = self._waiting.victim()
        if victim is None:
            return False
        self._end(self._connections[victim], CloseCode.OVERLOADED, "it waited longest without an offer")
        return True

    def _notice(self, why: str, now: float) -> None:
        """Log what is refused: once a minute, with how often."""
        self._refused += 1
        if now >= self._noticed_at + NOTICE_S:
            log.warning("%s (%d refused since the last such line)", why, self._refused)
            self._refused, self._noticed_at = 0, now

    def _refuses(self, connection: Connection, kind: FrameType, now: float) -> str | None:
        """Say why a peer may not say this now; then its session ends."""
        why = connection.allowance.message(kind, now)
        if why is not None:
            self._flooded(connection, why, now)
        return why

    def _flooded(self, connection: Connection, why: str, now: float) -> None:
        """A session ends for what it sent: its block comes back more slowly."""
        self._notice(f"{self._named(connection)}: {why}", now)
        self._blocks.flooded(connection.block, now)
        self._metrics.floods.inc()

    def _named(self, connection: Connection) -> str:
        hello = connection.session.hello
        return "a stranger" if hello is None else f"{hello.role} {hello.id[:8]}"

    def _receive(self, connection: Connection, data: bytes | str) -> None:
        connection.session.receive_data(data, monotonic())
        for event in connection.session.events():
            if isinstance(event, ForwardReceived):
                self._forward(connection, event)
            else:
                self._handle(connection, event)
        connection.flush()

    def _lost(self, connection: Connection, code: int, reason: str) -> None:
        connection.session.receive_close(code, reason)
        for event in connection.session.events():
            self._handle(connection, event)

    def _handle(self, connection: Connection, event: Event) -> None:
        handle = connection.handle
        match event:
            case Hello():
                self._greet(connection, event)
            case Offer():
                self._waiting.remove(handle)
                self._away.pop(self._id(connection), None)  # it takes its place
                self.pool.offer(handle, self._id(connection), event, ip_of(connection.address))
            case SliceReady():
                self.pool.slices_ready(handle, event, monotonic())
            case Pause(paused):
                self.pool.pause(handle, paused, monotonic())
            case PathReport(paths):
                self._paths[handle] = {path.peer: (path, monotonic()) for path in paths}
            case Register():
                self._waiting.remove(handle)
                self.pool.register(handle, self._id(connection), event)
                log.info("backbone %r registered %s", event.name, event.manifest.name)
                self.on_backbones_changed()
            case Closed(code, reason):
                known = code in CloseCode  # peers may say any number: no label for each
                self._metrics.sessions_closed.labels(str(code) if known else "other").inc()
                self._forget(connection)
                connection.close(code, reason)
        if self.pool.unsettled:
            self._settle_soon()

    def _greet(self, connection: Connection, hello: Hello) -> None:
        if hello.role == "backbone" and not _equal(hello.token or "", self._token):
            why = "wrong backbone token" if hello.token else "no backbone token was given"
            self._end(connection, CloseCode.AUTH, why)
            return
        if (
            hello.role == "node"
            and len(self._by_id) >= self.config.max_sessions
            and hello.id not in self._by_id
        ):
            why = f"all {self.config.max_sessions} places are taken (max_sessions)"
            self._notice(why, monotonic())
            self._end(connection, CloseCode.OVERLOADED, why)
            return
        ghost = self._by_id.get(hello.id)
        if ghost is not None:
            assert ghost.session.hello is not None
            if not _equal(hello.secret, ghost.session.hello.secret):
                self._end(connection, CloseCode.AUTH, "this id is in use and the secret is another")
                return
            self._end(ghost, CloseCode.REPLACED, "a newer session of the same id")
        away = self._away.get(hello.id)
        if away is not None and not _equal(hello.secret, away.secret):
            self._end(connection, CloseCode.AUTH, "this id is in use and the secret is another")
            return
        resumed = away is not None and _equal(hello.resume_token or "", away.resume)
        if resumed:
            self._metrics.sessions_resumed.inc()
        connection.admit(hello.role)
        connection.resume_token = secrets.token_hex(16)
        connection.session_token = secrets.token_hex(16)
        self._by_id[hello.id] = connection
        self._by_session_token[connection.session_token] = connection
        self._metrics.sessions.labels(hello.role).inc()
        connection.session.send_welcome(
            Welcome(
                connection.session_token,
                f"relay/{__version__}",
                self.config.ping_interval_s,
                MAX_FRAME_BYTES,
                self.stun(connection.reached_at),
                connection.resume_token,
                resumed,
            ),
            monotonic(),
        )

    # -- calls

    def _forward(self, sender: Connection, event: ForwardReceived) -> None:
        header = event.header
        target = self._connections.get(header.peer)
        if header.type in SIGNAL_TYPES:
            self._signal(sender, target, event)
            return
        kind, size_bytes = header.type, len(event.data)
        asks = kind is FrameType.DISPATCH or kind is FrameType.PROBE or kind is FrameType.CANCEL
        if (
            not asks
            and not sender.allowance.answer(size_bytes, event.last)
            and self._floods(sender, size_bytes)
        ):
            return
        if target is None or not target.ready or not self.pool.paired(sender.handle, target.handle):
            self._refuse(sender, header, "gone", _GONE)
            return
        data = target.session.forward(header, event.data, sender.handle)
        if kind is FrameType.DISPATCH:
            self._sealed[target.handle] = header.sealed
            target.allowance.called(size_bytes, first=event.first)
            self.calls.opened(target.handle, OpenCall(sender.handle, header.call_id, header.epoch))
        elif kind is FrameType.CANCEL:
            if not self.calls.closed(target.handle, sender.handle, header.call_id):
                return  # answered already, or never asked
            if target.outbox.cancel(sender.handle, header.call_id):
                self._metrics.dropped.labels("cancelled").inc()
                return  # the dispatch never left, so there is nothing to cancel
        elif kind is FrameType.PROBE:
            target.allowance.called(
                size_bytes, HEADER_BYTES + SEAL_BYTES + PAYLOAD_LIMITS[FrameType.ECHO], event.first
            )
        elif event.last:
            self.calls.closed(sender.handle, target.handle, header.call_id)

        if kind is FrameType.CANCEL or kind is FrameType.FAILURE:
            if target.outbox.put_control(data):
                target.flush()
        else:
            expires_at = monotonic() + header.deadline_ms / 1000.0 if header.deadline_ms else None
            message = Message(data, sender.handle, header.call_id, expires_at, event.piece)
            if not target.queue(message):
                sender.pause_reading()
                sender.blocked = asyncio.create_task(self._forward_later(sender, target, header, message))
                return
        self._passed_on(kind, len(data))

    def _floods(self, sender: Connection, size_bytes: int) -> bool:
        """An answer to no call came. A few pass, their receiver knows such; then it is a flood."""
        why = sender.allowance.unasked(size_bytes, monotonic())
        if why is None:
            return False
        self._metrics.dropped.labels("unasked").inc()
        self._flooded(sender, why, monotonic())
        self._end(sender, CloseCode.OVERLOADED, why)
        return True

    def _signal(self, sender: Connection, target: Connection | None, event: ForwardReceived) -> None:
        """Pass a Signal or keys on ahead of calls, if the two are paired; drop them otherwise."""
        why = self._refuses(sender, event.header.type, monotonic())
        if why is not None:
            self._end(sender, CloseCode.OVERLOADED, why)
            return
        epoch = None if target is None else self.pool.epoch_of(sender.handle, target.handle)
        if (
            target is None
            or not target.ready
            or not self.rooms.passes(sender.handle, event.header.epoch, epoch, monotonic())
        ):
            self._metrics.dropped.labels("signal").inc()
            return
        data = target.session.forward(event.header, event.data, sender.handle)
        if target.outbox.put_control(data):
            target.flush()
        self._passed_on(event.header.type, len(data))

    async def _forward_later(
        self, sender: Connection, target: Connection, header: Header, message: Message
    ) -> None:
        """Hold the sender back until its frame fits, bounded; what else it sends waits in its socket."""
        backbone = self.pool.backbones.get(sender.handle)
        shared = backbone is not None and len(backbone.nodes) > 1
        room = await target.wait_for_room(len(message.data), self.config.backpressure_s, shared)
        if room and target.queue(message):
            self._passed_on(header.type, len(message.data))
        else:
            if header.type is FrameType.DISPATCH:
                self.calls.closed(target.handle, sender.handle, header.call_id)
            self._refuse(sender, header, "overloaded", "the receiver's queue stayed full")
        sender.blocked = None
        while sender.backlog and sender.blocked is None:
            sender.received(sender.backlog.popleft())
        if sender.blocked is None:
            sender.resume_reading()

    def _passed_on(self, kind: FrameType, size_bytes: int) -> None:
        passed = self._passed[kind]
        passed[0] += 1
        passed[1] += size_bytes

    def _refuse(self, sender: Connection, header: Header, code: str, why: str) -> None:
        """Answer a call that cannot be passed on, in the receiver's name."""
        self._metrics.dropped.labels(code).inc()
        if sender.ready and header.type in (
            FrameType.DISPATCH,
            FrameType.PARTIAL,
        ):  # never a failure for a failure
            failure = Failure(code, why, "send" if header.type is FrameType.DISPATCH else "return")
            sender.session.send_failure(header.peer, header.call_id, header.epoch, failure)
            sender.flush()

    # -- the end of a session

    def _end(self, connection: Connection, code: CloseCode, reason: str) -> None:
        """End a session from our side, whatever its reader is doing."""
        connection.session.close(code, reason)
        connection.flush()
        for event in connection.session.events():
            if isinstance(event, Closed):
                self._handle(connection, event)

    def _forget(self, connection: Connection) -> None:
        """Take a session out of all tables and fail the calls it would have answered. Idempotent."""
        if self._connections.pop(connection.handle, None) is None:
            return
        self._waiting.remove(connection.handle)
        self._blocks.leave(connection.block)
        hello = connection.session.hello
        if hello is not None and self._by_session_token.pop(connection.session_token, None) is not None:
            self._by_id.pop(hello.id, None)
            self._metrics.sessions.labels(hello.role).dec()
        self._fail_calls(connection.handle, "the node left before it answered")
        self.calls.backbone_left(connection.handle)
        self.rooms.left(connection.handle)
        self._paths.pop(connection.handle, None)
        self._sealed.pop(connection.handle, None)
        is_backbone = connection.handle in self.pool.backbones
        end = connection.session.closed
        kept = self.config.resume_s > 0 and self.config.resume_places > 0
        broken = kept and end is not None and end.code in BROKEN
        if hello is not None and broken and self.pool.park(connection.handle):
            until = monotonic() + self.config.resume_s
            self._away.pop(hello.id, None)  # it is the newest now
            while len(self._away) >= self.config.resume_places:
                self._give_up(next(iter(self._away)))
            self._away[hello.id] = Away(hello.secret, connection.resume_token, until)
        else:
            self.pool.remove(connection.handle)
        if is_backbone:
            self.on_backbones_changed()
        if self.pool.unsettled:
            self._settle_soon()

    def _fail_calls(self, node: int, why: str) -> None:
        """Tell backbones at once that a node will not answer, instead of letting their deadlines tell."""
        for call in self.calls.node_left(node):
            backbone = self._connections.get(call.backbone)
            if backbone is not None and backbone.ready:
                failure = Failure("gone", why, "return")
                backbone.session.send_failure(node, call.call_id, call.epoch, failure)
                backbone.flush()

    # -- time

    def _settle_soon(self) -> None:
        if self._settling is None:
            self._settling = asyncio.create_task(self._settle())

    async def _settle(self) -> None:
        """
        Settle a copy of the pool in a thread, adopt what it decided, and tell it in small turns of the loop.

        Then as long a pause as it took: however much happens, calls have half of the processor.
        """
        await asyncio.sleep(SETTLE_DELAY_S)
        started = monotonic()
        try:
            before = self.pool.copy()
            working = await self._aside(before.copy)
            with self._metrics.settle_seconds.time():
                told = await self._aside(partial(working.settle, started))
            former = {node.handle: node.backbone for node in self.pool.nodes.values()}
            self.pool.adopt(working, before)
            for node in self.pool.nodes.values():
                if node.backbone != former[node.handle]:
                    self._fail_calls(node.handle, "the node works for another backbone now")
            garbage = [before, working]
            del before, working
            await self._aside(garbage.clear)  # what millions of entries cost to free, the loop does not pay
            while told:
                await self._tell(told.pop(0))
            await asyncio.sleep(min(MAX_SETTLE_PAUSE_S, monotonic() - started))
        except Exception:
            log.exception("settling failed; it is tried again")
            self.pool.unsettle()
            await asyncio.sleep(MAX_SETTLE_PAUSE_S)
        self._settling = None
        if self.pool.unsettled:
            self._settle_soon()

    async def _tell(self, item: Told) -> None:
        """Send one message to a peer that is still the one it was made for."""
        connection = self._connections.get(item.handle)
        if connection is None or not connection.ready:
            return
        message = item.message
        try:
            data = await self._aside(lambda: Frame(message.TYPE, message.to_payload()).encode())
        except LocalProtocolError as exc:  # one peer's message, nobody else's
            log.error("peer %d is not told what it shall know: %s", item.handle, exc)
            return
        node = self.pool.nodes.get(item.handle)
        if isinstance(message, Assign) and (node is None or node.told is not message):
            return  # it is out of date
        if connection.ready:
            connection.session.send_encoded(message.TYPE, data)
            connection.flush()

    async def _aside[T](self, work: Callable[[], T]) -> T:
        """Do what takes long in a thread. One at a time: it shares the interpreter with the loop."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def count(self) -> None:
        """Bring the metrics up to date: their locks are too dear for every frame."""
        for kind, (frames, size_bytes) in self._passed.items():
            self._metrics.frames.labels(kind.name).inc(frames)
            self._metrics.bytes.labels(kind.name).inc(size_bytes)
            self._passed[kind] = [0, 0]

    def count_lanes(self) -> None:
        """Write into the metrics which lane carries each node's calls."""
        self._metrics.lane.clear()
        self._metrics.lane_age.clear()
        for node in self.pool.nodes.values():
            path = self._path(node.backbone, node.handle)
            labels = node.node_id[:8], path["lane"]
            self._metrics.lane.labels(*labels).set(1)
            if path["age_s"] is not None:
                self._metrics.lane_age.labels(*labels).set(path["age_s"])

    async def _tick_forever(self) -> None:
        while True:
            await asyncio.sleep(min(TICK_S, self.config.ping_interval_s / 4))
            self.count()
            self.pool.tick(monotonic(), self.awaited)
            self._expire(monotonic())
            self._bound_memory(monotonic())
            for connection in list(self._connections.values()):
                try:
                    self._tick(connection, monotonic())
                except Exception:  # one session's trouble must not stop everybody's clock
                    log.exception("session %d", connection.handle)
                    self._end(connection, CloseCode.GOING_AWAY, "an error in the relay")

    def _expire(self, now: float) -> None:
        """Give the places of nodes that did not come back to others."""
        for node_id in [node_id for node_id, away in self._away.items() if now >= away.until]:
            self._give_up(node_id)
        if self.pool.unsettled:
            self._settle_soon()

    def _bound_memory(self, now: float) -> None:
        """Who holds most of what is held for peers goes, while it is more than all may have."""
        held = {handle: connection.held_bytes for handle, connection in self._connections.items()}
        total = sum(held.values())
        while total > self.config.memory_bytes:
            handle = max(held, key=held.__getitem__)
            total -= held.pop(handle)
            connection = self._connections[handle]
            why = f"it holds most of the memory all peers have together ({self.config.memory_bytes} bytes)"
            self._flooded(connection, why, now)
            self._end(connection, CloseCode.OVERLOADED, why)

    def _give_up(self, node_id: str) -> None:
        del self._away[node_id]
        self.pool.expire(node_id)

    def _tick(self, connection: Connection, now: float) -> None:
        session = connection.session
        due = session.next_timer()
        if due is not None and now >= due:
            connection.handle_timer(now)
        since = connection.full_since
        if since is not None and now - since > self.config.stall_s:
            session.close(CloseCode.OVERLOADED, f"took no bytes for {self.config.stall_s:g} s")
        if connection.outbox.dropped:
            self._metrics.dropped.labels("expired").inc(connection.outbox.dropped)
            connection.outbox.dropped = 0
        connection.flush()
        for event in session.events():
            self._handle(connection, event)

    # -- for the HTTP side

    def backbone_of_session(self, session_token: str) -> BackboneRecord | None:
        """Return the registered backbone that this bearer token belongs to."""
        connection = self._by_session_token.get(session_token)
        return self.pool.backbones.get(connection.handle) if connection is not None else None

    def want_slice(self, handle: int, slice_id: str) -> None:
        """Ask a backbone for a slice."""
        connection = self._connections.get(handle)
        if connection is not None and connection.ready:
            connection.session.send_slice_wanted(SliceWanted(slice_id))
            connection.flush()

    def status(self) -> dict[str, Any]:
        """Describe who is here, for people and tests. Nothing in it lets one take a peer's place."""
        pool, connections = self.pool, self._connections
        return {
            "relay": __version__,
            "draining": self.draining,
            "sessions": len(connections),
            "open_calls": len(self.calls),
            "away": [node_id[:8] for node_id in self._away],
            "nodes": [
                {
                    "peer": node.handle,
                    "id": node.node_id[:8],
                    "name": node.offer.name,
                    "kernel": node.offer.kernel,
                    "gb_per_s": node.offer.gb_per_s,
                    "memory_bytes": node.offer.memory_bytes,
                    "paused": node.paused,
                    "backbone": node.backbone,
                    "path": self._path(node.backbone, node.handle),
                    "seal": self._seal(node.handle, node.offer.seal),
                    "epoch": node.epoch,
                    "slices_assigned": len(node.desired),
                    "slices_ready": len(node.ready & node.desired),
                    "slices_refused": len(node.refused),
                    "why_refused": node.why,
                    "doubted": node.loading.doubted or node.set_aside,
                    "rtt_ms": connections[node.handle].session.rtt_ms,
                    "queued_bytes": connections[node.handle].outbox.size_bytes,
                }
                for node in pool.nodes.values()
            ],
            "backbones": [
                {
                    "peer": backbone.handle,
                    "id": backbone.backbone_id[:8],
                    "name": backbone.name,
                    "seal": backbone.seal and fingerprint(backbone.seal),
                    "model": backbone.catalogue.manifest.model,
                    "model_name": backbone.catalogue.manifest.name,
                    "slices": len(backbone.catalogue.slices),
                    "size_bytes": backbone.catalogue.size_bytes,
                    "slice_bytes": min(backbone.catalogue.slice_bytes.values(), default=0),  # the smallest
                    "inexact": backbone.inexact,
                    "nodes": sorted(backbone.nodes),
                    "rtt_ms": connections[backbone.handle].session.rtt_ms,
                    "queued_bytes": connections[backbone.handle].outbox.size_bytes,
                }
                for backbone in pool.backbones.values()
            ],
        }

    def offer(self) -> dict[str, Any]:
        """Say what a page may tell before its device joins: which models are here."""
        return {
            "models": [
                {
                    "name": backbone.catalogue.manifest.name,
                    "size_bytes": backbone.catalogue.size_bytes,
                    "nodes": len(backbone.nodes),
                }
                for backbone in self.pool.backbones.values()
            ]
        }

    def path_of(self, id_start: str) -> dict[str, Any] | None:
        """Say which lane carries the calls of the node whose id begins so; None if it is not here."""
        for node in self.pool.nodes.values():
            if node.node_id.startswith(id_start):
                backbone = self.pool.backbones.get(node.backbone or 0)
                model = None if backbone is None else backbone.catalogue.manifest.name
                return self._path(node.backbone, node.handle) | {"model": model}
        return None

    def _path(self, backbone: int | None, node: int) -> dict[str, Any]:
        """Say which lane carries a node's calls, as its backbone reported; without a report, the relay's."""
        said = self._paths.get(backbone or 0, {}).get(node)
        if said is None:
            return {"lane": "relayed", "why": "no other lane was reported", "age_s": None}
        path, at = said
        return {
            "lane": path.lane,
            "why": path.why,
            "age_s": None if path.p50_ms is None else round(path.age_s + monotonic() - at, 1),
            "p50_ms": path.p50_ms,
            "p95_ms": path.p95_ms,
        }

    def _seal(self, node: int, identity: str | None) -> dict[str, Any]:
        """Say who a node says it is, and whether what passes here is sealed; null until something passed."""
        return {
            "identity": None if identity is None else fingerprint(identity),
            "sealed": self._sealed.get(node),
        }

    def _id(self, connection: Connection) -> str:
        hello = connection.session.hello
        assert hello is not None  # the session's table lets nothing through before it
        return hello.id


def _equal(one: str, other: str) -> bool:
    return hmac.compare_digest(one.encode(), other.encode())
