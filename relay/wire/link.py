"""
Run one link between a node and a backbone, past the relay, without touching a socket or a clock.

    opening end                          accepting end
      | LinkHello {link, nonce}  ----------> |      link names the key both got through the relay
      | <----------- LinkProof {nonce, mac}  |      mac = HMAC-SHA256(key, "accept" | link | nonces)
      | LinkProof {nonce, mac}  -----------> |      mac = HMAC-SHA256(key, "open" | link | nonces)
      | <======== calls, probes, pings ====> |

Calls are the same bytes as on a session with the relay, so that a call can be sent again on the other lane:
`peer` is the receiver's handle at the relay. Nobody rewrites it here; the receiver takes every frame to come
from the peer the link was made for. See PROTOCOL.md, "Links".
"""

import hashlib
import hmac
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from relay.wire.calls import Dispatch, Partial, Probe
from relay.wire.close import CloseCode
from relay.wire.errors import RemoteProtocolError
from relay.wire.frames import CALL_TYPES, Frame, FrameType, Header
from relay.wire.messages import ControlMessage, Failure, LinkHello, LinkProof
from relay.wire.session import CallEvent, Closed, Session, State, Table, Way, read_call

BEAT_S = 2.0  # between two pings
MISSED_PINGS = 2  # unanswered ones that end the link; a machine may be busy for a beat of 2 s
LINK_PATH = "/v1/link"

_S, _R = Way.SEND, Way.RECEIVE
_T = FrameType


@dataclass(frozen=True, slots=True)
class LinkKey:
    """
    What both ends of a link know of it: whom it leads to (its handle at the relay), and the secret.

    seal: whether its calls are sealed, as on the relayed lane; the driver does it.
    """

    peer: int
    epoch: int
    key: bytes
    seal: bool = False


@dataclass(frozen=True, slots=True)
class LinkReady:
    """Both ends have proved to know the key; calls may flow."""

    link: str
    known: LinkKey


type LinkEvent = LinkReady | CallEvent | Closed

TRAFFIC: Mapping[str, frozenset[FrameType]] = MappingProxyType(
    {
        "backbone": frozenset({_T.DISPATCH, _T.CANCEL, _T.PROBE}),
        "node": frozenset({_T.PARTIAL, _T.FAILURE, _T.ECHO}),
    }
)


def link_table(role: Literal["node", "backbone"], opens: bool) -> Table:
    """Write out who may say what: the handshake by who opens, what follows by role."""
    alive = {(way, kind) for way in Way for kind in (_T.PING, _T.PONG)}
    other = "node" if role == "backbone" else "backbone"
    calls = {(_S, kind) for kind in TRAFFIC[role]} | {(_R, kind) for kind in TRAFFIC[other]}
    ends: dict[tuple[Way, FrameType], State] = {(way, _T.BYE): State.CLOSED for way in Way}
    first, second = (_S, _R) if opens else (_R, _S)
    return MappingProxyType(
        {
            State.START: {(first, _T.LINK_HELLO): State.GREETING, **ends},
            State.GREETING: {(second, _T.LINK_PROOF): State.OPEN, **ends},
            State.OPEN: {(first, _T.LINK_PROOF): State.READY, **ends},
            State.READY: {**dict.fromkeys(calls | alive, State.READY), **ends},
            State.CLOSED: {},
        }
    )


def link_mac(key: bytes, end: str, link: str, opener_nonce: str, acceptor_nonce: str) -> str:
    """Prove to know the key: `end` is "open" or "accept"."""
    text = f"{end} {link} {opener_nonce} {acceptor_nonce}"
    return hmac.new(key, text.encode("ascii"), hashlib.sha256).hexdigest()


class LinkSession(Session):
    """
    One end of a link.

    The opening end gives `link` and `known`; the accepting end gives `find`, which names what it knows of a
    link by its id, or None. `nonce` is 32 random hex digits.
    """

    __slots__ = ("_find", "_nonce", "_opener_nonce", "known", "link", "role")

    def __init__(
        self,
        role: Literal["node", "backbone"],
        now: float,
        nonce: str,
        *,
        link: str = "",
        known: LinkKey | None = None,
        find: Callable[[str], LinkKey | None] = lambda link: None,
    ) -> None:
        super().__init__(link_table(role, opens=known is not None), now, BEAT_S, MISSED_PINGS)
        self.link = link
        self.role = role
        self.known = known
        self._find = find
        self._nonce = nonce
        self._opener_nonce = nonce

    def start(self) -> None:
        """Say hello; for the opening end, once its transport is open."""
        self._send(LinkHello(self.link, self._nonce))

    @property
    def ready(self) -> bool:
        """Whether calls may flow."""
        return self.state is State.READY

    def send_dispatch(self, call_id: int, deadline_ms: int, dispatch: Dispatch) -> None:
        known = self._known()
        payload = dispatch.to_payload()
        self._send_call(Frame(_T.DISPATCH, payload, known.peer, call_id, known.epoch, deadline_ms))

    def send_cancel(self, call_id: int) -> None:
        known = self._known()
        self._send_call(Frame(_T.CANCEL, b"", known.peer, call_id, known.epoch))

    def send_probe(self, call_id: int, probe: Probe) -> None:
        known = self._known()
        self._send_call(Frame(_T.PROBE, probe.to_payload(), known.peer, call_id, known.epoch))

    def send_partial(self, call_id: int, epoch: int, partial: Partial) -> None:
        self._send_call(Frame(_T.PARTIAL, partial.to_payload(), self._known().peer, call_id, epoch))

    def send_failure(self, call_id: int, epoch: int, failure: Failure) -> None:
        self._send_call(Frame(_T.FAILURE, failure.to_payload(), self._known().peer, call_id, epoch))

    def send_echo(self, call_id: int, epoch: int, answer_bytes: int) -> None:
        self._send_call(Frame(_T.ECHO, bytes(answer_bytes), self._known().peer, call_id, epoch))

    def _known(self) -> LinkKey:
        assert self.known is not None  # the table lets no call pass before
        return self.known

    def _receive(self, header: Header, data: bytes, now: float) -> None:
        if header.type in CALL_TYPES:
            self._events.append(read_call(header, data, self._known().peer))
        else:
            super()._receive(header, data, now)

    def _control(self, message: ControlMessage, now: float) -> None:
        match message:
            case LinkHello(link, nonce):
                self.known = self._find(link)
                if self.known is None:
                    self.close(CloseCode.AUTH, "no such link is expected here")
                    return
                self.link, self._opener_nonce = link, nonce
                self._send(LinkProof(self._nonce, self._mac("accept", self._nonce)))
            case LinkProof(nonce, mac):
                self._proved(nonce, mac, now)
            case _:
                raise RemoteProtocolError(f"{type(message).__name__} is no message of a link")

    def _proved(self, nonce: str, mac: str, now: float) -> None:
        opens = self.state is State.OPEN  # the acceptor's proof leads there, the opener's to READY
        expected = self._mac("accept" if opens else "open", nonce if opens else self._nonce)
        if not hmac.compare_digest(mac, expected):
            self.close(CloseCode.AUTH, "the other end does not know the key of this link")
            return
        if opens:
            self._send(LinkProof(nonce, self._mac("open", nonce)))
        self._greeted(now)
        self._events.append(LinkReady(self.link, self._known()))  # type: ignore[arg-type]

    def _mac(self, end: str, acceptor_nonce: str) -> str:
        return link_mac(self._known().key, end, self.link, self._opener_nonce, acceptor_nonce)
