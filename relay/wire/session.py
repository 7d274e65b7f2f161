"""
Run one session without touching a socket or a clock: who may say what, when, and what a silence means.

    driver:  session.receive_data(data, now) → for event in session.events() → session.send_…()
             → for data in session.data_to_send(): write one binary message each → arm session.next_timer()

Events are the received control messages themselves (messages.py), the call events below and, last, `Closed`.
A peer's mistake never escapes as an exception: the session queues a Bye, emits `Closed` and discards what
follows. Our own mistakes raise LocalProtocolError.

The table is written for the client end; the relay's end is its mirror.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from relay.wire.calls import Dispatch, Partial, Probe
from relay.wire.close import CloseCode
from relay.wire.errors import FrameTooLarge, LocalProtocolError, RemoteProtocolError, SealFault
from relay.wire.frames import (
    CALL_TYPES,
    HEADER_BYTES,
    MAX_FRAME_BYTES,
    PASSED_ON,
    SIGNAL_TYPES,
    Frame,
    FrameType,
    Header,
    decode_header,
    readdress,
)
from relay.wire.messages import (
    CONTROL_MESSAGES,
    Assign,
    Bye,
    ControlMessage,
    Drain,
    Failure,
    Hello,
    Offer,
    PathReport,
    Pause,
    Peers,
    Ping,
    Pong,
    Register,
    SealAnswer,
    SealHello,
    Signal,
    SliceReady,
    SliceWanted,
    Welcome,
)
from relay.wire.pieces import decode_piece, is_piece

HELLO_TIMEOUT_S = 10.0
PING_INTERVAL_S = 10.0
# So many unanswered for a whole beat and the peer is dead: who vanishes without a word, a phone that changed
# networks or a tab that was frozen, is noticed within two beats.
MISSED_PINGS = 1
MIN_BYTES_PER_S = 1000.0  # bytes of unfinished frames are a sign of life at this rate, not one a beat


class State(StrEnum):
    START = "start"  # connected, nothing said
    GREETING = "greeting"  # Hello said, not yet answered
    OPEN = "open"  # welcome; what the client brings is not said yet
    READY = "ready"  # offered or registered: calls may flow
    DRAINING = "draining"  # the relay is about to stop; calls still flow
    CLOSED = "closed"

    __hash__ = str.__hash__  # see FrameType


class Way(StrEnum):
    SEND = "send"
    RECEIVE = "receive"

    __hash__ = str.__hash__


type Table = MappingProxyType[State, dict[tuple[Way, FrameType], State]]

_S, _R = Way.SEND, Way.RECEIVE
_T = FrameType


def _table(brings: FrameType, sends: set[FrameType], receives: set[FrameType]) -> Table:
    """Write out the table of a client that brings `brings` and, once ready, sends and receives those."""
    alive = {(way, kind): None for way in Way for kind in (_T.PING, _T.PONG)}
    traffic = {(_S, kind) for kind in sends | {brings}} | {(_R, kind) for kind in receives} | set(alive)

    def leaving(state: State) -> dict[tuple[Way, FrameType], State]:
        return {(_S, _T.BYE): State.CLOSED, (_R, _T.BYE): State.CLOSED, **dict.fromkeys(alive, state)}

    drain = {(_R, _T.DRAIN): State.DRAINING}
    return MappingProxyType(
        {
            State.START: {(_S, _T.HELLO): State.GREETING, (_S, _T.BYE): State.CLOSED},
            State.GREETING: {(_R, _T.WELCOME): State.OPEN, **leaving(State.GREETING)},
            State.OPEN: {(_S, brings): State.READY, **drain, **leaving(State.OPEN)},
            State.READY: {**dict.fromkeys(traffic, State.READY), **drain, **leaving(State.READY)},
            State.DRAINING: {**dict.fromkeys(traffic, State.DRAINING), **drain, **leaving(State.DRAINING)},
            State.CLOSED: {},
        }
    )


def _mirror(table: Table) -> Table:
    flip = {_S: _R, _R: _S}
    return MappingProxyType(
        {state: {(flip[way], kind): to for (way, kind), to in row.items()} for state, row in table.items()}
    )


NODE_TABLE = _table(
    brings=_T.OFFER,
    sends={_T.SLICE_READY, _T.PARTIAL, _T.FAILURE, _T.ECHO, _T.PAUSE, _T.SIGNAL, _T.SEAL_HELLO},
    receives={_T.ASSIGN, _T.DISPATCH, _T.CANCEL, _T.FAILURE, _T.PROBE, _T.SIGNAL, _T.SEAL_ANSWER},
)
BACKBONE_TABLE = _table(
    brings=_T.REGISTER,
    sends={_T.DISPATCH, _T.CANCEL, _T.FAILURE, _T.PROBE, _T.SIGNAL, _T.PATH_REPORT, _T.SEAL_ANSWER},
    receives={_T.PEERS, _T.SLICE_WANTED, _T.PARTIAL, _T.FAILURE, _T.ECHO, _T.SIGNAL, _T.SEAL_HELLO},
)
RELAY_TABLES = {"node": _mirror(NODE_TABLE), "backbone": _mirror(BACKBONE_TABLE)}


@dataclass(frozen=True, slots=True)
class DispatchReceived:
    """A call for us. Answer with `send_partial` or `send_failure`, same peer, call_id and epoch."""

    peer: int
    call_id: int
    epoch: int
    deadline_ms: int
    dispatch: Dispatch


@dataclass(frozen=True, slots=True)
class PartialReceived:
    """A node's answer; checked for shape, not yet for whether it is the one we wait for."""

    peer: int
    call_id: int
    epoch: int
    partial: Partial


@dataclass(frozen=True, slots=True)
class CancelReceived:
    """Nobody waits for this call any more."""

    peer: int
    call_id: int
    epoch: int


@dataclass(frozen=True, slots=True)
class FailureReceived:
    """A call failed at the peer, or on the way to it (then the relay says so in the peer's name)."""

    peer: int
    call_id: int
    epoch: int
    failure: Failure


@dataclass(frozen=True, slots=True)
class CorruptReceived:
    """The peer beyond the relay sent a call frame whose payload is no such thing: that call alone fails."""

    type: FrameType
    peer: int
    call_id: int
    epoch: int
    error: RemoteProtocolError


@dataclass(frozen=True, slots=True)
class ProbeReceived:
    """Somebody times this path: answer at once with `send_echo`."""

    peer: int
    call_id: int
    epoch: int
    answer_bytes: int


@dataclass(frozen=True, slots=True)
class EchoReceived:
    """The answer to a probe."""

    peer: int
    call_id: int
    epoch: int


@dataclass(frozen=True, slots=True)
class SignalReceived:
    """What the other end of our pairing says about links."""

    peer: int
    epoch: int
    signal: Signal


@dataclass(frozen=True, slots=True)
class SealReceived:
    """The other end's half of the keys of our pairing."""

    peer: int
    epoch: int
    message: SealHello | SealAnswer


@dataclass(frozen=True, slots=True)
class ForwardReceived:
    """
    The relay's end only: a call frame for another peer, or a piece of one; payload not looked into.

    `header` is the whole frame's, `data` the message. piece: whether it is one; first, last: of its frame.
    """

    header: Header
    data: bytes
    piece: bool = False
    first: bool = True
    last: bool = True


@dataclass(frozen=True, slots=True)
class Closed:
    """The session is over. Close the transport with `code` and `reason` unless it is closed already."""

    code: int
    reason: str
    by_peer: bool


type CallEvent = (
    DispatchReceived | PartialReceived | CancelReceived | FailureReceived | CorruptReceived
    | ProbeReceived | EchoReceived
)  # fmt: skip
type Event = ControlMessage | CallEvent | SignalReceived | SealReceived | ForwardReceived | Closed


def read_call(header: Header, data: bytes, peer: int) -> CallEvent:
    """Read a call frame that came from `peer`; a malformed payload fails that call alone."""
    payload = data[HEADER_BYTES:]
    ids = (peer, header.call_id, header.epoch)
    if header.sealed:
        return CorruptReceived(header.type, *ids, SealFault("no_key", "it is sealed, and we do not seal"))
    try:
        match header.type:
            case FrameType.DISPATCH:
                return DispatchReceived(*ids, header.deadline_ms, Dispatch.from_payload(payload))
            case FrameType.PARTIAL:
                return PartialReceived(*ids, Partial.from_payload(payload))
            case FrameType.FAILURE:
                return FailureReceived(*ids, Failure.from_payload(payload))
            case FrameType.PROBE:
                return ProbeReceived(*ids, Probe.from_payload(payload).answer_bytes)
            case FrameType.ECHO:
                return EchoReceived(*ids)
            case _:
                return CancelReceived(*ids)
    except RemoteProtocolError as exc:
        return CorruptReceived(header.type, *ids, exc)


class Session:
    """What both ends have in common: the table, liveness, the outbox and the end."""

    __slots__ = (
        "_events",
        "_hello_deadline",
        "_last_heard",
        "_missed",
        "_missed_pings",
        "_moved_at",
        "_moved_bytes",
        "_next_ping",
        "_outbox",
        "_table",
        "closed",
        "ping_interval_s",
        "rtt_ms",
        "state",
    )

    def __init__(
        self,
        table: Table,
        now: float,
        ping_interval_s: float = PING_INTERVAL_S,
        missed_pings: int = MISSED_PINGS,
    ) -> None:
        self.state = State.START
        self.closed: Closed | None = None
        self.ping_interval_s = ping_interval_s
        self.rtt_ms: float | None = None  # of the last Ping that was answered
        self._table = table
        self._events: list[Event] = []
        self._outbox: list[bytes] = []
        self._hello_deadline: float | None = now + HELLO_TIMEOUT_S
        self._last_heard = now
        self._next_ping: float | None = None
        self._missed = 0
        self._missed_pings = missed_pings
        self._moved_bytes, self._moved_at = 0, now

    # -- what came in

    def receive_data(self, data: bytes | str, now: float) -> None:
        """Take one WebSocket message; text is a breach of the protocol. Never raises."""
        if self.state is State.CLOSED:
            return
        self._last_heard = now
        self._missed = 0
        try:
            if isinstance(data, str):
                raise RemoteProtocolError("a text message; frames are binary messages")
            if len(data) > MAX_FRAME_BYTES:
                raise FrameTooLarge("message", len(data), MAX_FRAME_BYTES)
            header = self._header(data)
            self._step(_R, header.type)
            self._receive(header, data, now)
        except RemoteProtocolError as exc:
            self.close(exc.close_code, str(exc))

    def receive_close(self, code: int, reason: str = "") -> None:
        """Learn that the transport ended, by the peer or by the network."""
        self._end(Closed(code, reason, by_peer=True))

    def events(self) -> list[Event]:
        """Return what happened since last asked; `Closed` is the last event there is."""
        events, self._events = self._events, []
        return events

    # -- what goes out

    def data_to_send(self) -> list[bytes]:
        """Return the messages to write now, in order; empty means nothing."""
        outbox, self._outbox = self._outbox, []
        return outbox

    def close(self, code: int, reason: str) -> None:
        """End the session from this side: say Bye, emit `Closed`, discard what follows. Idempotent."""
        if self.closed is not None:
            return
        self._outbox.append(Frame(_T.BYE, Bye(code, reason[:500]).to_payload()).encode())
        self._end(Closed(code, reason, by_peer=False))

    # -- time

    def next_timer(self) -> float | None:
        """Return when `handle_timer` wants to be called, or None."""
        timers = [at for at in (self._hello_deadline, self._next_ping) if at is not None]
        return min(timers) if timers and self.state is not State.CLOSED else None

    def handle_timer(self, now: float, moved_bytes: int = 0) -> None:
        """
        Do what is due: give up on a silent peer, or ask for a sign of life.

        moved_bytes: what the transport has moved so far, see `moved`.
        """
        if self.state is State.CLOSED:
            return
        if self._next_ping is not None and now >= self._next_ping:
            self.moved(moved_bytes, now)
        if self._hello_deadline is not None and now >= self._hello_deadline:
            self.close(CloseCode.TIMEOUT, f"no greeting within {HELLO_TIMEOUT_S:g} s")
        elif self._next_ping is not None and now >= self._next_ping:
            if self._missed >= self._missed_pings:
                self.close(CloseCode.TIMEOUT, f"nothing heard for {now - self._last_heard:.1f} s")
                return
            self._missed += 1  # until something is heard
            self._send(Ping(now * 1000.0))
            self._next_ping = now + self.ping_interval_s

    def moved(self, moved_bytes: int, now: float) -> None:
        """
        Learn how many bytes have come, or left a queue, since the session began; asked when a ping is due.

        A pong behind bulk is late, not missing: what moves faster than a trickle is a sign of life.
        """
        moved, self._moved_bytes = moved_bytes - self._moved_bytes, moved_bytes
        since, self._moved_at = now - self._moved_at, now
        if moved > 0 and moved >= MIN_BYTES_PER_S * since:
            self._last_heard = now
            self._missed = 0

    def check_alive(self, now: float, patience_s: float, moved_bytes: int = 0) -> None:
        """Ask for a sign of life now and wait so long for it: this machine's network is another now."""
        if self._next_ping is not None and self.state is not State.CLOSED:
            self._moved_bytes, self._moved_at = moved_bytes, now
            self._missed = self._missed_pings
            self._send(Ping(now * 1000.0))
            self._next_ping = now + min(patience_s, self.ping_interval_s)

    # -- shared parts

    def _header(self, data: bytes) -> Header:
        """Read the header; pieces were put together before they came here."""
        return decode_header(data)

    def _receive(self, header: Header, data: bytes, now: float) -> None:
        """Handle one frame that the table allows."""
        match CONTROL_MESSAGES[header.type].from_payload(data[HEADER_BYTES:]):
            case Ping(t):
                self._send(Pong(t))
            case Pong(t):
                self.rtt_ms = max(0.0, now * 1000.0 - t)
            case Bye(code, reason):
                self._end(Closed(code, reason, by_peer=True))
            case message:
                self._control(message, now)

    def _control(self, message: ControlMessage, now: float) -> None:
        self._events.append(message)

    def _step(self, way: Way, kind: FrameType) -> None:
        state = self._table[self.state].get((way, kind))
        if state is None:
            if way is _S:
                raise LocalProtocolError(f"cannot send {kind.name} in state {self.state.value}")
            raise RemoteProtocolError(f"{kind.name} is not expected in state {self.state.value}")
        self.state = state

    def _send(self, message: ControlMessage) -> None:
        data = Frame(message.TYPE, message.to_payload()).encode()
        self._step(_S, message.TYPE)
        self._outbox.append(data)

    def _send_call(self, frame: Frame) -> None:
        data = frame.encode()
        self._step(_S, frame.type)
        self._outbox.append(data)

    def _greeted(self, now: float) -> None:
        """The greeting is over: from now on silence is what ends the session."""
        self._hello_deadline = None
        self._next_ping = now + self.ping_interval_s

    def _end(self, closed: Closed) -> None:
        if self.closed is not None:
            return
        self.state = State.CLOSED
        self.closed = closed
        self._events.append(closed)


class ClientSession(Session):
    """The end that connects: says Hello, is welcomed, brings what it has."""

    __slots__ = ("welcome",)

    def __init__(self, table: Table, now: float) -> None:
        super().__init__(table, now)
        self.welcome: Welcome | None = None

    def send_hello(self, hello: Hello) -> None:
        self._send(hello)

    def send_bye(self, reason: str, code: int = CloseCode.NORMAL) -> None:
        """Leave on purpose."""
        self._step(_S, _T.BYE)
        self._outbox.append(Frame(_T.BYE, Bye(code, reason).to_payload()).encode())
        self._end(Closed(code, reason, by_peer=False))

    def send_failure(self, peer: int, call_id: int, epoch: int, failure: Failure) -> None:
        self._send_call(Frame(_T.FAILURE, failure.to_payload(), peer, call_id, epoch))

    def send_signal(self, peer: int, epoch: int, signal: Signal) -> None:
        """Say something about links to the peer we are paired with."""
        self._send_call(Frame(_T.SIGNAL, signal.to_payload(), peer, 0, epoch))

    def send_seal(self, peer: int, epoch: int, half: SealHello | SealAnswer) -> None:
        """Say our half of the keys of a pairing."""
        self._send_call(Frame(half.TYPE, half.to_payload(), peer, 0, epoch))

    def receive_fault(self, data: bytes, fault: SealFault, now: float) -> None:
        """Take a frame that seal.py refused: its call fails, the session lives. Never raises."""
        if self.state is State.CLOSED:
            return
        self._last_heard = now
        self._missed = 0
        header = decode_header(data)  # seal.py has read it before
        if header.type in CALL_TYPES:
            ids = (header.peer, header.call_id, header.epoch)
            self._events.append(CorruptReceived(header.type, *ids, fault))

    def _receive(self, header: Header, data: bytes, now: float) -> None:
        if header.type in CALL_TYPES:
            self._events.append(read_call(header, data, header.peer))
        elif header.type in SIGNAL_TYPES:
            with suppress(RemoteProtocolError):  # the peer's fault, not the relay's: the session lives
                self._signal(header, data[HEADER_BYTES:])
        else:
            super()._receive(header, data, now)

    def _signal(self, header: Header, payload: bytes) -> None:
        ids = (header.peer, header.epoch)
        match header.type:
            case FrameType.SIGNAL if not header.sealed:
                self._events.append(SignalReceived(*ids, Signal.from_payload(payload)))
            case FrameType.SEAL_HELLO:
                self._events.append(SealReceived(*ids, SealHello.from_payload(payload)))
            case FrameType.SEAL_ANSWER:
                self._events.append(SealReceived(*ids, SealAnswer.from_payload(payload)))

    def _control(self, message: ControlMessage, now: float) -> None:
        if isinstance(message, Welcome):
            self.welcome = message
            self.ping_interval_s = message.ping_interval_s
            self._greeted(now)
        self._events.append(message)


class NodeSession(ClientSession):
    """A node's end. Hello → Welcome → Offer → Assign, Dispatch …"""

    __slots__ = ()

    def __init__(self, now: float) -> None:
        super().__init__(NODE_TABLE, now)

    def send_offer(self, offer: Offer) -> None:
        """Say what we give; may be repeated when it changes."""
        self._send(offer)

    def send_slice_ready(self, ready: SliceReady) -> None:
        self._send(ready)

    def send_pause(self, paused: bool) -> None:
        self._send(Pause(paused))

    def send_partial(self, peer: int, call_id: int, epoch: int, partial: Partial) -> None:
        self._send_call(Frame(_T.PARTIAL, partial.to_payload(), peer, call_id, epoch))

    def send_echo(self, peer: int, call_id: int, epoch: int, answer_bytes: int) -> None:
        """Answer a probe."""
        self._send_call(Frame(_T.ECHO, bytes(answer_bytes), peer, call_id, epoch))


class BackboneSession(ClientSession):
    """A backbone's end. Hello → Welcome → Register → Peers, Partial … Its `Peers` are complete lists."""

    __slots__ = ("_peers",)

    def __init__(self, now: float) -> None:
        super().__init__(BACKBONE_TABLE, now)
        self._peers = Peers(())

    def send_register(self, register: Register) -> None:
        self._send(register)

    def send_dispatch(
        self, peer: int, call_id: int, epoch: int, deadline_ms: int, dispatch: Dispatch
    ) -> None:
        self._send_call(Frame(_T.DISPATCH, dispatch.to_payload(), peer, call_id, epoch, deadline_ms))

    def send_cancel(self, peer: int, call_id: int, epoch: int) -> None:
        self._send_call(Frame(_T.CANCEL, b"", peer, call_id, epoch))

    def send_probe(self, peer: int, call_id: int, epoch: int, deadline_ms: int, probe: Probe) -> None:
        """Time the path to a node with a message of a real size."""
        self._send_call(Frame(_T.PROBE, probe.to_payload(), peer, call_id, epoch, deadline_ms))

    def send_path_report(self, report: PathReport) -> None:
        self._send(report)

    def _control(self, message: ControlMessage, now: float) -> None:
        if isinstance(message, Peers):
            message = self._peers = message.after(self._peers)
        super()._control(message, now)


class RelaySession(Session):
    """The relay's end of either role; the first Hello decides which. Calls are passed on unread."""

    __slots__ = ("hello", "refuses")

    _BEFORE_HELLO: Table = MappingProxyType(
        {
            State.START: {(_R, _T.HELLO): State.GREETING, (_R, _T.BYE): State.CLOSED},
            State.CLOSED: {},
        }
    )

    def __init__(self, now: float, ping_interval_s: float = PING_INTERVAL_S) -> None:
        super().__init__(self._BEFORE_HELLO, now, ping_interval_s)
        self.hello: Hello | None = None
        self.refuses: Callable[[FrameType, float], str | None] = lambda kind, now: None  # see rates.py

    def send_welcome(self, welcome: Welcome, now: float) -> None:
        """Accept the Hello. To refuse it, `close(CloseCode.AUTH, reason)`."""
        self._send(welcome)
        self._greeted(now)

    def send_assign(self, assign: Assign) -> None:
        self._send(assign)

    def send_peers(self, peers: Peers) -> None:
        self._send(peers)

    def send_encoded(self, kind: FrameType, data: bytes) -> None:
        """Send a control message that was encoded elsewhere: a long one, or one for many."""
        self._step(_S, kind)
        self._outbox.append(data)

    def send_slice_wanted(self, wanted: SliceWanted) -> None:
        self._send(wanted)

    def send_drain(self, drain: Drain) -> None:
        self._send(drain)

    def send_failure(self, peer: int, call_id: int, epoch: int, failure: Failure) -> None:
        """Answer a call in the name of `peer`, which cannot be reached."""
        self._send_call(Frame(_T.FAILURE, failure.to_payload(), peer, call_id, epoch))

    def _header(self, data: bytes) -> Header:
        """Give the header of the whole: what may be said of it goes for its pieces."""
        return decode_piece(data).whole if is_piece(data) else decode_header(data)

    def expects(self, kind: FrameType) -> bool:
        """Whether a frame of this type may come now: its pieces are not kept otherwise."""
        return (_R, kind) in self._table[self.state]

    def forward(self, header: Header, data: bytes, sender: int) -> bytes:
        """
        Return `data`, a call or a piece of one that another session received, as this peer shall get it.

        The caller queues it; it does not pass through `data_to_send`, so that bulk cannot hold up control.
        """
        self._step(_S, header.type)
        return readdress(data, sender)

    def _receive(self, header: Header, data: bytes, now: float) -> None:
        if header.type in PASSED_ON:
            if not is_piece(data):
                self._events.append(ForwardReceived(header, data))
                return
            piece = decode_piece(data)
            self._events.append(ForwardReceived(header, data, True, piece.offset == 0, piece.last))
        elif (why := self.refuses(header.type, now)) is not None:
            self.close(CloseCode.OVERLOADED, why)
        else:
            super()._receive(header, data, now)

    def _control(self, message: ControlMessage, now: float) -> None:
        if isinstance(message, Hello):
            self.hello = message
            self._table = RELAY_TABLES[message.role]
        self._events.append(message)
