"""
Run a node: the driver that carries out what `machine.py` decides.

The kernel and its experts are `host.py`'s; here are the session, what is sealed on it, and the links past the
relay. A reply is written in the loop turn in which its computation ends: the host tells the machine, the
machine replies, the socket writes.
"""

import asyncio
import logging
import random
import secrets
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from time import monotonic
from urllib.parse import urlsplit

import numpy as np

from backbone.errors import BackboneError
from backbone.experts.native import KernelError
from backbone.lanes.direct import ListenAt
from backbone.lanes.link import Link
from backbone.lanes.network import address_towards, watch
from backbone.node import events as ev
from backbone.node.disk import SliceDisk
from backbone.node.host import ExpertHost, log_failure
from backbone.node.links import NodeLinks
from backbone.node.machine import NodeConfig, NodeMachine, State
from backbone.node.socket import ABNORMAL, ClientSocket
from backbone.node.work import Kernel, LayerWork
from relay.wire import messages, session
from relay.wire.calls import model_tag
from relay.wire.close import clip_reason, in_words
from relay.wire.errors import SealFault
from relay.wire.link import LinkEvent
from relay.wire.messages import MAX_INVENTORY, Failure, Hello, Offer, Partial, SliceReady
from relay.wire.sealing import NodeSealing, SealPolicy

log = logging.getLogger(__name__)

RATE_WINDOW_S = 10.0
TICK_S = 1.0
JUMP_S = 6.0  # a tick this late means that we did not run (a closed lid): no session survives that unnoticed
CHECK_S = 3.0  # the relay's answer may take so long after this machine's network changed
_SIGNALLING = (session.State.READY, session.State.DRAINING)


@dataclass(frozen=True, slots=True)
class Identity:
    """Who the node is: `secret` proves that a reconnect is the same one."""

    id: str
    secret: str

    @classmethod
    def new(cls) -> "Identity":
        return cls(random.SystemRandom().randbytes(16).hex(), random.SystemRandom().randbytes(16).hex())


@dataclass(frozen=True, slots=True)
class ClientConfig:
    """
    What the owner of the machine allows. `relay_url` is the http(s) URL people open.

    listen: where a backbone may reach this node directly. links: whether links past the relay are used.
    seal: whether and as whom it seals, and for which backbone only; by default it does not. cache_dir: where
    slices outlive this run, in at most cache_bytes.
    """

    relay_url: str
    memory_bytes: int
    name: str
    threads: int = 1
    listen: ListenAt | None = None
    links: bool = True
    seal: SealPolicy = field(default_factory=SealPolicy)
    cache_dir: Path | None = None
    cache_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Status:
    """
    What there is to tell about a node, at one moment.

    seal: none, agreeing, sealed, unsealed. seal_why: why it is unsealed or refused. backbone: fingerprint.
    """

    state: State
    reason: str
    kernel: str
    gb_per_s: float
    layers: tuple[int, ...]
    experts: int
    wanted: int
    held_bytes: int
    calls: int
    rows: int
    failed: int
    rows_per_s: float
    bytes_in: int
    bytes_out: int
    seal: str = "none"
    seal_why: str = ""
    backbone: str | None = None


class NodeClient:
    """One headless node: `run()` until it is closed; `on_change` hears when something may have changed."""

    def __init__(
        self,
        config: ClientConfig,
        kernel: Kernel,
        on_change: Callable[[], None] = lambda: None,
        identity: Identity | None = None,
    ) -> None:
        self.config = config
        self.machine = NodeMachine(
            NodeConfig(config.memory_bytes, threads=config.threads), random.SystemRandom().random
        )
        self._identity = identity or Identity.new()
        disk = None if config.cache_dir is None else SliceDisk(config.cache_dir, config.cache_bytes)
        self._host = ExpertHost(kernel, config.relay_url, config.threads, self._tell, disk)
        self._on_change = on_change
        self._work: dict[int, LayerWork] = {}
        self._links = NodeLinks(self._link_event, self._send_signal, config.relay_url, config.listen)
        self._ways: dict[tuple[int, int], Link] = {}  # calls that came on a link -> where their answer goes
        self._socket: ClientSocket | None = None
        self._session: session.NodeSession | None = None
        self._sealing = NodeSealing(config.seal)  # of the session
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at: float | None = None
        self._loop: asyncio.AbstractEventLoop
        self._closed: asyncio.Event
        self._last_close = ""
        self._resume_token: str | None = None
        self._refusing = False  # the backbone we are paired with: then others shall get our share
        self._bytes_in = self._bytes_out = 0  # of sessions that ended
        self._recent: deque[tuple[float, int]] = deque()  # (time, rows) of the last RATE_WINDOW_S

    async def run(self) -> str:
        """Serve until the node is closed; says why it was."""
        self._loop = asyncio.get_running_loop()
        self._closed = asyncio.Event()
        await self._links.open()
        watches = [asyncio.create_task(self._watch()), asyncio.create_task(self._watch_network())]
        for task in watches:
            task.add_done_callback(log_failure)
        try:
            self._tell(ev.Start())
            await self._closed.wait()
            await asyncio.sleep(0)  # let the last bytes leave
        finally:
            for task in watches:
                task.cancel()
            self._stop()
            await self._host.close()
        return self.machine.closed_reason or ""

    async def _watch(self) -> None:
        """Notice what no socket tells: that this machine slept, or has another address than the socket."""
        looked, asked = _clock_that_never_sleeps(), None
        while True:
            await asyncio.sleep(TICK_S)
            before, looked = looked, _clock_that_never_sleeps()
            socket, talk = self._socket, self._session
            if looked - before > JUMP_S:
                self._tell(ev.Woke())
            elif socket is not None and talk is not None and socket is not asked and socket.moved:
                asked = socket  # once: if it lives all the same, it is not asked again
                talk.check_alive(monotonic(), CHECK_S, socket.moved_bytes)
                self._flush()

    async def _watch_network(self) -> None:
        """Notice that there may be a way to the relay again, while a try to reach it waits for its time."""
        parts = urlsplit(self.config.relay_url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        look = partial(address_towards, parts.hostname or "", port)
        await watch(look, lambda: self._tell(ev.NetworkChanged()))

    def leave(self, reason: str) -> None:
        """Finish accepted calls, say Bye and end `run()`."""
        self._tell(ev.LeaveAsked(reason))

    def pause(self, paused: bool) -> None:
        """Stop or resume taking calls."""
        self._tell(ev.PauseAsked() if paused else ev.ResumeAsked())

    def status(self) -> Status:
        """What there is to tell now."""
        machine, kernel = self.machine, self.machine.kernel
        ready = machine.ready()
        now = monotonic()
        while self._recent and self._recent[0][0] < now - RATE_WINDOW_S:
            self._recent.popleft()
        socket = self._socket
        return Status(
            state=machine.state,
            reason=machine.closed_reason or self._last_close,
            kernel=self._host.kernel.build,
            gb_per_s=kernel.gb_per_s if kernel else 0.0,
            layers=tuple(sorted(ready)),
            experts=sum(len(experts) for experts in ready.values()),
            wanted=len(machine.wanted),
            held_bytes=self._host.held_bytes,
            calls=machine.counters.calls,
            rows=machine.counters.rows,
            failed=machine.counters.failed,
            rows_per_s=sum(rows for _, rows in self._recent) / RATE_WINDOW_S,
            bytes_in=self._bytes_in + self._host.bytes_in + (socket.bytes_received if socket else 0),
            bytes_out=self._bytes_out + (socket.bytes_sent if socket else 0),
            seal=self._sealing.state,
            seal_why=self._sealing.why,
            backbone=self._sealing.backbone,
        )

    # --- the machine and its effects

    def _tell(self, event: ev.Event) -> None:
        self._carry_out(self.machine.receive(event, monotonic()))
        self._flush()
        self._on_change()
        if self.machine.closed_reason is not None:
            self._closed.set()

    def _carry_out(self, effects: list[ev.Effect]) -> None:
        for effect in effects:
            match effect:
                case ev.Compute():
                    idle = self.machine.running == 1
                    self._host.compute(effect, self.machine.layer(effect.call.layer), at_once=idle)
                case ev.Reply(call, result):
                    self._reply(call, result)
                case ev.SendFailure():
                    self._send_failure(effect)
                case ev.FetchSlice():
                    self._host.fetch(effect, self._work[effect.layer].formula)
                case ev.StopFetch(slice_id):
                    self._host.stop_fetch(slice_id)
                case ev.FreeSlice(slice_id):
                    self._host.free(slice_id)
                case ev.TestKernel():
                    self._host.test_kernel()
                case ev.Connect(resume):
                    self._connect(resume)
                case ev.Disconnect(code, reason):
                    self._disconnect(code, reason)
                case _:
                    self._say(effect)

    def _say(self, effect: ev.SendOffer | ev.SendReady | ev.SendPause | ev.SendBye) -> None:
        """Send one control frame."""
        if self._session is None or self._session.closed is not None:
            return
        match effect:
            case ev.SendOffer(_, memory_bytes):
                assert self.machine.kernel is not None
                self._session.send_offer(
                    Offer(
                        kernel=self._host.kernel.build,
                        memory_bytes=0 if self._refusing else memory_bytes,
                        gb_per_s=self.machine.kernel.gb_per_s,
                        battery=None,
                        metered=False,
                        name=self.config.name,
                        inventory=self._host.inventory(MAX_INVENTORY),
                        lanes=self._links.lanes if self.config.links else (),
                        listen=self._links.listen if self.config.links else None,
                        seal=self.config.seal.public,
                    )
                )
            case ev.SendReady(epoch, experts, refused, why):
                self._session.send_slice_ready(SliceReady(epoch, experts, refused, why[:300]))
            case ev.SendPause(paused):
                self._session.send_pause(paused)
            case ev.SendBye(code, reason):
                self._session.send_bye(reason, code)

    def _flush(self) -> None:
        """Write what the session has to say, then arm the next timer."""
        self._write()
        talk = self._session
        times = [self.machine.next_timer()]
        if talk is not None:
            times += [talk.next_timer(), self._sealing.next_timer()]
        at = min((t for t in times if t is not None), default=None)
        if at == self._timer_at:
            return
        self._timer_at = at
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if at is not None:
            self._timer = self._loop.call_later(max(0.0, at - monotonic()), self._on_timer)

    def _on_timer(self) -> None:
        self._timer_at = None
        now = monotonic()
        if self._session is not None:
            self._session.handle_timer(now, self._socket.moved_bytes if self._socket else 0)
            self._session_events()
        if (again := self._sealing.handle_timer(now)) is not None:
            self._send_seal(*again)
        self._carry_out(self.machine.handle_timer(now))
        self._flush()
        self._on_change()
        if self.machine.closed_reason is not None:
            self._closed.set()

    def _stop(self) -> None:
        """Let go of everything."""
        self._links.close()
        if self._timer is not None:
            self._timer.cancel()
        if self._socket is not None:
            self._socket.abort()

    # --- session

    def _connect(self, resume: bool) -> None:
        now = monotonic()
        talk = session.NodeSession(now)
        parts = urlsplit(self.config.relay_url)
        scheme = "wss" if parts.scheme == "https" else "ws"
        url = f"{scheme}://{parts.netloc}{parts.path.rstrip('/')}/v1/session"
        self._session = talk
        self._sealing = NodeSealing(self.config.seal)
        self._socket = ClientSocket(
            url,
            on_open=lambda: self._opened(talk, resume),
            on_message=lambda data: self._message(talk, data),
            on_closed=lambda code, reason: self._socket_closed(talk, code, reason),
        )
        self._socket.open()

    def _opened(self, talk: session.NodeSession, resume: bool) -> None:
        identity = self._identity
        talk.send_hello(
            Hello(
                "node",
                identity.id,
                identity.secret,
                agent=f"expert-node {self._host.kernel.build}",
                resume=resume,
                resume_token=self._resume_token,
            )
        )
        self._flush()

    def _message(self, talk: session.NodeSession, data: bytes | str) -> None:
        if talk is self._session:
            try:
                talk.receive_data(self._sealing.book.incoming(data), monotonic())
            except SealFault as exc:
                assert isinstance(data, bytes)
                log.warning("%s", exc)
                talk.receive_fault(data, exc, monotonic())
            self._session_events()
            self._flush()

    def _socket_closed(self, talk: session.NodeSession, code: int, reason: str) -> None:
        if talk is self._session:
            talk.receive_close(code or ABNORMAL, reason)
            self._session_events()

    def _session_events(self) -> None:
        """Translate what the session saw into what the machine understands."""
        for event in self._session.events() if self._session else ():
            match event:
                case session.DispatchReceived(peer, call_id):
                    self._ways.pop((peer, call_id), None)  # asked again through the relay: answer there
                    self._tell(ev.DispatchReceived(_call_of(event)))
                case session.CancelReceived(peer, call_id, _):
                    self._ways.pop((peer, call_id), None)
                    self._tell(ev.CancelReceived(peer, call_id))
                case session.ProbeReceived(peer, call_id, epoch, answer_bytes):
                    if self._session is not None and self._session.closed is None:
                        self._session.send_echo(peer, call_id, epoch, answer_bytes)
                        self._write()
                case session.SignalReceived():
                    self._links.signalled(event)
                case session.CorruptReceived():
                    code = "bad_seal" if isinstance(event.error, SealFault) else "bad_frame"
                    failure = Failure(code, str(event.error)[:500], "queue")
                    if self._session is not None and self._session.closed is None:
                        self._session.send_failure(event.peer, event.call_id, event.epoch, failure)
                case messages.Welcome():
                    if self.config.links:
                        self._links.welcomed(event.stun)
                    self._resume_token = event.resume
                    self._last_close = ""
                    self._tell(ev.Welcomed())
                case session.SealReceived(peer, epoch, messages.SealAnswer() as answer):
                    self._agreed(peer, epoch, answer)
                case messages.Assign(peer=0):
                    self._links.close_all("the backbone left")
                    self._ways.clear()
                    self._sealing.assigned(event, secrets.token_bytes(32), monotonic())
                    self._tell(ev.Unpaired())
                case messages.Assign():
                    event = self._sealed(event)
                    self._tell(ev.Assigned(self._assignment_of(event)))
                case messages.Drain(_, reconnect_after_s):
                    self._tell(ev.DrainReceived(reconnect_after_s))
                case session.Closed(code, reason, by_peer):
                    self._last_close = in_words(code, reason)
                    if not by_peer:
                        self._flush()
                    self._disconnect(code, reason)
                    self._tell(ev.Closed(code, reason))
                case _:
                    log.debug("nothing to do for %s", type(event).__name__)

    def _sealed(self, assign: messages.Assign) -> messages.Assign:
        """Begin to seal with the backbone of an assignment; hold nothing for one that should and does not."""
        why = self._sealing.refusal(assign)
        if (why is not None) != self._refusing:
            self._refusing = why is not None
            self._carry_out(self.machine.offer())
        if why is not None:
            if why != self._sealing.why:
                log.error("nothing is served: %s", why)
            self._sealing.state, self._sealing.why = "refused", why
            return replace(assign, peer=0, layers=())
        hello = self._sealing.assigned(assign, secrets.token_bytes(32), monotonic())
        if hello is not None:
            self._send_seal(assign.peer, assign.epoch, hello)
        return assign

    def _send_seal(self, peer: int, epoch: int, hello: messages.SealHello) -> None:
        if self._session is not None and self._session.state in _SIGNALLING:
            self._session.send_seal(peer, epoch, hello)
            self._write()

    def _agreed(self, peer: int, epoch: int, answer: messages.SealAnswer) -> None:
        try:
            if self._sealing.answered(peer, epoch, answer):
                log.info("sealed with the backbone %s", self._sealing.backbone)
                self._on_change()
        except SealFault as exc:
            log.warning("the backbone's key was refused: %s", exc)

    def _link_event(self, link: Link, event: LinkEvent) -> None:
        """A call on a link is a call like any other; its answer goes back the same way."""
        match event:
            case session.DispatchReceived(peer, call_id):
                self._ways[peer, call_id] = link
                self._tell(ev.DispatchReceived(_call_of(event)))
            case session.CancelReceived(peer, call_id, _):
                self._ways.pop((peer, call_id), None)
                self._tell(ev.CancelReceived(peer, call_id))
            case session.ProbeReceived(_, call_id, epoch, answer_bytes):
                link.send_echo(call_id, epoch, answer_bytes)
            case session.CorruptReceived(_, _, call_id, epoch):
                link.send_failure(call_id, epoch, Failure("bad_frame", str(event.error)[:500], "queue"))

    def _send_signal(self, peer: int, epoch: int, signal: messages.Signal) -> None:
        if self._session is not None and self._session.state in _SIGNALLING:
            self._session.send_signal(peer, epoch, signal)
            self._write()

    def _way_back(self, peer: int, call_id: int) -> Link | None:
        """Give the link an answer goes to; None: the relay, also for calls whose link is gone."""
        link = self._ways.pop((peer, call_id), None)
        return link if link is not None and link.ready else None

    def _disconnect(self, code: int, reason: str) -> None:
        self._links.close_all("the node's session with the relay ended")
        self._ways.clear()
        self._flush()
        if self._socket is not None:
            self._bytes_in += self._socket.bytes_received
            self._bytes_out += self._socket.bytes_sent
            self._socket.close(
                code if 1000 <= code < 5000 and code not in (1005, 1006) else 1000, clip_reason(reason)
            )
        self._socket = None
        self._session = None

    def _assignment_of(self, assign: messages.Assign) -> ev.Assignment:
        """Read what this kernel needs of each layer; a layer it cannot compute is named and refused."""
        self._work = {}
        layers = []
        for assigned in assign.layers:
            work: LayerWork | None = None
            try:
                work = LayerWork.of(assigned)
                refusal = self._host.refusal(work.formula) or ""
                held_bytes = 0 if refusal else self._host.slice_cost(work.formula)
            except (BackboneError, KernelError, ArithmeticError, LookupError, TypeError, ValueError) as exc:
                refusal = str(exc) or type(exc).__name__  # a relay may say anything: that ends no session
            if refusal or work is None:
                log.error("layer %d is not served: %s", assigned.layer, refusal)
                layers.append(_refused_layer(assigned, refusal))
                continue
            self._work[assigned.layer] = work
            layers.append(
                ev.AssignedLayer(
                    assigned.layer,
                    assigned.experts,
                    assigned.slice_bytes,
                    work.formula.hidden_dim,
                    work.grids,
                    held_bytes=held_bytes,
                    body=work,
                )
            )
        tag = model_tag(assign.model) if assign.model else 0
        return ev.Assignment(assign.epoch, assign.peer, tag, tuple(layers))

    # --- answers

    def _reply(self, call: ev.Call, result: object) -> None:
        assert isinstance(result, Partial)
        if (link := self._way_back(call.peer, call.call_id)) is not None:
            link.send_partial(call.call_id, call.epoch, result)
        elif self._session is not None and self._session.closed is None:
            self._session.send_partial(call.peer, call.call_id, call.epoch, result)
            self._write()
        self._recent.append((monotonic(), call.num_tokens))

    def _send_failure(self, effect: ev.SendFailure) -> None:
        failure = Failure(effect.code, effect.message, effect.phase, effect.layer, effect.expert)
        if (link := self._way_back(effect.peer, effect.call_id)) is not None:
            link.send_failure(effect.call_id, effect.epoch, failure)
        elif self._session is not None and self._session.closed is None:
            self._session.send_failure(effect.peer, effect.call_id, effect.epoch, failure)

    def _write(self) -> None:
        if self._session is not None and self._socket is not None:
            for data in self._session.data_to_send():
                self._socket.send(self._sealing.book.outgoing(data))


def _call_of(received: session.DispatchReceived) -> ev.Call:
    dispatch = received.dispatch
    return ev.Call(
        peer=received.peer,
        call_id=received.call_id,
        epoch=received.epoch,
        deadline_ms=received.deadline_ms,
        model_tag=dispatch.model_tag,
        layer=dispatch.layer,
        hidden_dim=dispatch.hidden_dim,
        grid=dispatch.grid,
        num_tokens=dispatch.num_tokens,
        experts=tuple(np.unique(dispatch.experts).tolist()),
        body=received,
    )


def _refused_layer(assigned: messages.AssignLayer, why: str) -> ev.AssignedLayer:
    return ev.AssignedLayer(assigned.layer, assigned.experts, assigned.slice_bytes, 0, (), why or "refused")


def _clock_that_never_sleeps() -> float:
    """Seconds; goes on while the machine is suspended, where it can tell."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.time()
