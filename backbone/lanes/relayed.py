"""
The lane through the relay: one WebSocket that carries control and every call to nodes behind NATs.

The driver around `BackboneSession`; what passes between a node and us is sealed where both can. Calls are
written from the dispatcher's own stack frame and answers are handed to it from the socket's callback, since
each turn of the event loop would be paid once per layer and token. When the connection ends, `on_lost` is
told at once and a new one is tried for ever, with pauses that grow and vary.
"""

import asyncio
import logging
import random
import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace
from time import monotonic
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from backbone.errors import RelayRefused
from backbone.lanes.lane import LaneClosed
from backbone.lanes.uploads import Uploads
from backbone.lanes.wakeup import Wakeup
from backbone.node.machine import reconnect_s
from backbone.node.socket import ClientSocket
from relay.program.text import clean
from relay.wire.calls import Probe
from relay.wire.close import CloseCode, in_words, may_reconnect
from relay.wire.errors import SealFault
from relay.wire.messages import (
    Dispatch,
    Drain,
    Hello,
    PathReport,
    Peers,
    Register,
    SealHello,
    Signal,
    SliceWanted,
    Welcome,
)
from relay.wire.sealing import BackboneSealing, SealPolicy
from relay.wire.session import (
    BackboneSession,
    Closed,
    CorruptReceived,
    EchoReceived,
    FailureReceived,
    PartialReceived,
    SealReceived,
    SignalReceived,
    State,
)

log = logging.getLogger(__name__)

FULL_BYTES = 32 << 20  # two of the largest frames: a prompt's rows for several nodes at once
FATAL_PAUSE_S = 30.0  # after a refusal that will not go away by itself (token, version): look again, slowly

FINAL = {
    CloseCode.AUTH: "the relay {url} refuses this backbone ({why}): is --relay-token what that relay shows?",
    CloseCode.VERSION: "the relay {url} speaks another version of the protocol ({why}): update the older one",
}

type Answer = PartialReceived | FailureReceived | CorruptReceived


@dataclass(frozen=True, slots=True)
class LaneHandlers:
    """
    Who hears what; all are called on the event loop and must not block.

    on_peers: the complete list of nodes that are ready. on_answer: an answer to one of our calls.
    on_lost: the connection ended, one sentence why. slice_bytes: give one slice's bytes by its SHA-256, or
    None. on_echo: the answer to a probe. on_signal: what a node says about links. on_welcome: a session with
    the relay began.
    """

    on_peers: Callable[[Peers], None]
    on_answer: Callable[[Answer], None]
    on_lost: Callable[[str], None]
    slice_bytes: Callable[[str], bytes | None]
    on_echo: Callable[[EchoReceived], None] = lambda echo: None
    on_signal: Callable[[SignalReceived], None] = lambda signal: None
    on_welcome: Callable[[], None] = lambda: None


def session_url(relay_url: str) -> str:
    """
    Turn the relay's http(s) address into the address of its WebSocket.

    Raises:
        ValueError: it is no http or https address.
    """
    parts = urlsplit(relay_url)
    schemes = {"http": "ws", "https": "wss"}
    if parts.scheme not in schemes or not parts.netloc:
        raise ValueError(f"the relay's address must be http://… or https://…, not {relay_url!r}")
    return urlunsplit((schemes[parts.scheme], parts.netloc, parts.path.rstrip("/") + "/v1/session", "", ""))


class RelayedLane:
    """
    A connection to one relay that is kept up while `run` runs.

    `connected` says whether calls can be sent now; `why_down` why not. seal: whether and as whom we seal; by
    default not at all.
    """

    name = "relayed"

    def __init__(
        self,
        relay_url: str,
        hello: Hello,
        register: Register,
        handlers: LaneHandlers,
        seal: SealPolicy | None = None,
    ) -> None:
        self.relay_url = relay_url.rstrip("/")
        self.why_down = "not connected yet"
        self._session_url = session_url(relay_url)
        self._hello = hello
        self._policy = seal or SealPolicy()
        self._register = replace(register, seal=self._policy.public, changes=True)
        self._sealing = BackboneSealing(self._policy)  # of the session, as the next two
        self._peers = Peers(())
        self._handlers = handlers
        self._session: BackboneSession | None = None
        self._socket: ClientSocket | None = None
        self._closed: asyncio.Future[Closed]
        self._uploads: Uploads  # kept: making its client reads all of the system's certificates
        self._wakeup = Wakeup(self._wake)
        self._pause_s = 0.0
        self._known = False  # the relay welcomed us once: what it refuses now it may take again

    @property
    def connected(self) -> bool:
        """True while the relay has welcomed us and the socket is open."""
        return self._session is not None and self._session.state in (State.READY, State.DRAINING)

    def send_dispatch(self, peer: int, call_id: int, epoch: int, deadline_ms: int, dispatch: Dispatch) -> int:
        session, socket = self._ready()
        session.send_dispatch(peer, call_id, epoch, deadline_ms, dispatch)
        return self._write(session, socket)

    def send_cancel(self, peer: int, call_id: int, epoch: int) -> None:
        session, socket = self._ready()
        session.send_cancel(peer, call_id, epoch)
        self._write(session, socket)

    def send_probe(self, peer: int, call_id: int, epoch: int, deadline_ms: int, probe: Probe) -> None:
        """Time this lane with a message of a real size."""
        session, socket = self._ready()
        session.send_probe(peer, call_id, epoch, deadline_ms, probe)
        self._write(session, socket)

    def send_signal(self, peer: int, epoch: int, signal: Signal) -> None:
        """Say something about links to a node."""
        session, socket = self._ready()
        session.send_signal(peer, epoch, signal)
        self._write(session, socket)

    def send_path_report(self, report: PathReport) -> None:
        """Tell the relay which lanes carry the calls."""
        session, socket = self._ready()
        session.send_path_report(report)
        self._write(session, socket)

    @property
    def stun(self) -> str | None:
        """Where the relay's STUN server listens, `host:port`."""
        return None if self._session is None or self._session.welcome is None else self._session.welcome.stun

    def describe_seal(self, peer: int) -> dict[str, Any]:
        """Say whether calls to a node are sealed, and who it proved to be."""
        return self._sealing.describe(peer)

    @property
    def unsealed_nodes(self) -> tuple[str, ...]:
        """The names of nodes that are ready and are not asked, because they do not seal."""
        return tuple(node.name for node in self._sealing.refused)

    @property
    def seal_faults(self) -> dict[str, int]:
        """Frames of this session that did not open, by why."""
        return self._sealing.book.faults

    async def run(self) -> None:
        """
        Keep the lane up until cancelled; says Bye then.

        Raises:
            RelayRefused: the relay refuses us, and never welcomed us before.
        """
        attempt = 0
        self._uploads = Uploads(self.relay_url, self._handlers.slice_bytes)
        try:
            while True:
                welcomed, closed = await self._one_session()
                self._known |= welcomed
                attempt = 0 if welcomed else attempt + 1
                fatal = not may_reconnect(closed.code)
                self.why_down = f"no session with {self.relay_url}: {in_words(closed.code, closed.reason)}"
                self._handlers.on_lost(self.why_down)
                if closed.code in FINAL and not self._known:
                    why = clean(closed.reason)
                    raise RelayRefused(FINAL[CloseCode(closed.code)].format(url=self.relay_url, why=why))
                again_s = reconnect_s(closed.code, attempt, random.random())
                wait_s = FATAL_PAUSE_S if fatal else max(again_s, self._pause_s)
                self._pause_s = 0.0
                log.log(
                    logging.ERROR if fatal else logging.WARNING,
                    "%s; next try in %.1f s",
                    self.why_down,
                    wait_s,
                )
                await asyncio.sleep(wait_s)
        finally:
            await self._uploads.close()

    async def _one_session(self) -> tuple[bool, Closed]:
        """Connect and serve one session to its end; say whether the relay ever welcomed us."""
        session = BackboneSession(monotonic())
        closed: asyncio.Future[Closed] = asyncio.get_running_loop().create_future()

        def opened() -> None:
            session.send_hello(self._hello)
            self._pump()

        sealing = BackboneSealing(self._policy)

        def received(data: bytes | str) -> None:
            try:
                session.receive_data(sealing.book.incoming(data), monotonic())
            except SealFault as exc:
                assert isinstance(data, bytes)
                log.warning("%s", exc)
                session.receive_fault(data, exc, monotonic())
            self._pump()

        def ended(code: int, reason: str) -> None:
            session.receive_close(code, reason)
            self._pump()

        socket = ClientSocket(self._session_url, opened, received, ended)
        self._session, self._socket, self._closed = session, socket, closed
        self._sealing, self._peers = sealing, Peers(())
        try:
            socket.open()
            end = await closed
            return session.welcome is not None, end
        finally:
            if session.state in (State.OPEN, State.READY, State.DRAINING):
                session.send_bye("the backbone stops")
                self._write(session, socket)
            socket.close(1000, "")
            self._session = self._socket = None
            self._wakeup.cancel()

    def _ready(self) -> tuple[BackboneSession, ClientSocket]:
        session, socket = self._session, self._socket
        if session is None or socket is None or not self.connected:
            raise LaneClosed(self.why_down)
        if socket.unsent_bytes > FULL_BYTES:
            raise LaneClosed("the relay does not take more bytes at the moment")
        return session, socket

    def _pump(self) -> None:
        """Handle events, write what is due, arm the timer: after anything that may have moved the session."""
        session, socket = self._session, self._socket
        if session is None or socket is None:
            return
        for event in session.events():
            match event:
                case PartialReceived() | FailureReceived() | CorruptReceived():
                    self._handlers.on_answer(event)
                case EchoReceived():
                    self._handlers.on_echo(event)
                case SignalReceived():
                    self._handlers.on_signal(event)
                case SealReceived(peer, epoch, SealHello() as hello):
                    self._agree(session, peer, epoch, hello)
                case Peers():
                    self._peers = event
                    self._tell_peers()
                case SliceWanted(slice=slice_id):
                    self._uploads.wanted(slice_id)
                case Welcome():
                    self._uploads.begin(event.session)
                    session.send_register(self._register)
                    self._handlers.on_welcome()
                    log.info("connected to %s at %s", event.relay, self.relay_url)
                case Drain():
                    self._pause_s = event.reconnect_after_s
                case Closed() if not self._closed.done():
                    self._closed.set_result(event)
        self._write(session, socket)
        self._wakeup.set(session.next_timer())

    def _agree(self, session: BackboneSession, peer: int, epoch: int, hello: SealHello) -> None:
        """Answer a node's half of the keys; it may be asked from now on."""
        try:
            answer = self._sealing.hello_received(peer, epoch, hello, secrets.token_bytes(32))
        except SealFault as exc:
            log.warning("a node's key was refused: %s", exc)
            return
        if answer is not None:
            session.send_seal(peer, epoch, answer)
            if any(node.peer == peer for node in self._sealing.waiting):
                self._tell_peers()

    def _tell_peers(self) -> None:
        """Tell of the nodes that may be asked: who seals once that is agreed, others if they are allowed."""
        before = set(self.unsealed_nodes)
        admitted = self._sealing.admitted(self._peers)
        for name in set(self.unsealed_nodes) - before:
            log.warning("node %r is not asked: it does not seal, and that is required here", name)
        self._handlers.on_peers(admitted)

    def _write(self, session: BackboneSession, socket: ClientSocket) -> int:
        size_bytes, book = 0, self._sealing.book
        for data in session.data_to_send():
            data = book.outgoing(data)
            size_bytes += len(data)
            socket.send(data)
        return size_bytes

    def _wake(self) -> None:
        if self._session is not None:
            self._session.handle_timer(monotonic(), self._socket.moved_bytes if self._socket else 0)
            self._pump()
