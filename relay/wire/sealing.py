"""
Decide what is sealed: who begins, who waits, who is refused. Pure, around the keys of seal.py.

    Offer, Register, Assign, Peers carry `seal`, the identity of an end that seals. Both seal:
    node:      Assign ──> SealHello ──(again every RESEND_S)──> SealAnswer: sealed
    backbone:  SealHello ──> SealAnswer: sealed; until then the node is kept from those who would ask it

Once both ends said that they seal, nothing passes between them unsealed. Where one does not, everything does,
unless the other requires a seal and therefore does without this peer.
"""

from dataclasses import dataclass, replace
from typing import Any

from relay.wire.fields import fingerprint
from relay.wire.messages import Assign, PeerNode, Peers, SealAnswer, SealHello
from relay.wire.seal import NodeHandshake, SealBook, SealIdentity, answer_hello, same_fingerprint

RESEND_S = 2.0  # a hello may be lost when the backbone's session just ends or begins
MAX_SEALS = 4096  # kept beside those of the nodes that are ready: nodes come and go under new handles


@dataclass(frozen=True, slots=True)
class SealPolicy:
    """
    identity: our own; None: we do not seal. required: have nothing to do with peers that do not.
    backbone: fingerprint of the only backbone to work for, which is required to seal then.
    """

    identity: SealIdentity | None = None
    required: bool = False
    backbone: str | None = None

    @property
    def public(self) -> str | None:
        """What Offer or Register says."""
        return None if self.identity is None else self.identity.public.hex()


class NodeSealing:
    """The node's end, for one session with the relay. `book` is what its frames pass."""

    __slots__ = ("_handshake", "_pairing", "_policy", "_resend_at", "book", "state", "why")

    def __init__(self, policy: SealPolicy) -> None:
        self.book = SealBook()
        self.state = "none"  # or: agreeing, sealed, unsealed
        self.why = ""  # it is unsealed, or the backbone refused
        self._policy = policy
        self._pairing: tuple[int, int, str] | None = None  # peer, epoch, identity
        self._handshake: NodeHandshake | None = None
        self._resend_at: float | None = None

    @property
    def backbone(self) -> str | None:
        """The fingerprint of the backbone we are paired with, if it seals."""
        return None if self._pairing is None else fingerprint(self._pairing[2])

    def refusal(self, assign: Assign) -> str | None:
        """Say why we do not work for this backbone, or None."""
        policy = self._policy
        if assign.peer == 0:
            return None
        found = None if assign.seal is None else fingerprint(assign.seal)
        if policy.backbone is not None and (found is None or not same_fingerprint(found, policy.backbone)):
            return f"the backbone's key is {found or 'missing'}, not the pinned {policy.backbone}"
        if (policy.required or policy.backbone is not None) and (found is None or policy.identity is None):
            return "the backbone does not seal, and this node wants it sealed"
        return None

    def assigned(self, assign: Assign, ephemeral: bytes, now: float) -> SealHello | None:
        """
        Learn of a pairing that is not refused; give the hello to send, if a new one is due.

        ephemeral: 32 random bytes that were never used.
        """
        identity = self._policy.identity
        if assign.peer == 0 or assign.seal is None or identity is None:
            self._drop()
            self.state = "none" if assign.peer == 0 else "unsealed"
            ours = "the backbone does not seal" if identity is not None else "sealing is switched off here"
            self.why = ours if assign.peer else ""
            return None
        pairing = (assign.peer, assign.epoch, assign.seal)
        if pairing == self._pairing:
            return None
        self._drop()
        self._pairing = pairing
        self.state, self.why = "agreeing", ""
        self.book.expect(assign.peer, assign.epoch)
        backbone = bytes.fromhex(assign.seal)
        self._handshake = NodeHandshake(identity, assign.epoch, backbone, ephemeral)
        self._resend_at = now + RESEND_S
        return self._handshake.hello

    def answered(self, peer: int, epoch: int, answer: SealAnswer) -> bool:
        """
        Take the backbone's half; True when keys are agreed now.

        Raises:
            SealFault: the answer is not what it must be; we go on asking.
        """
        if self._handshake is None or self._pairing is None or (peer, epoch) != self._pairing[:2]:
            return False  # the answer to a hello that was sent twice, or of a former pairing
        self.book.put(peer, epoch, self._handshake.finish(answer))
        self._handshake = self._resend_at = None
        self.state = "sealed"
        return True

    def next_timer(self) -> float | None:
        return self._resend_at

    def handle_timer(self, now: float) -> tuple[int, int, SealHello] | None:
        """Give peer, epoch and hello when it is time to say it again."""
        if self._resend_at is None or now < self._resend_at or self._handshake is None:
            return None
        assert self._pairing is not None
        self._resend_at = now + RESEND_S
        return (*self._pairing[:2], self._handshake.hello)

    def _drop(self) -> None:
        if self._pairing is not None:
            self.book.forget(self._pairing[0])
        self._pairing = self._handshake = self._resend_at = None


class BackboneSealing:
    """The backbone's end, for one session with the relay."""

    __slots__ = ("_answers", "_listed", "_policy", "book", "refused", "waiting")

    def __init__(self, policy: SealPolicy) -> None:
        self.book = SealBook()
        self.refused: tuple[PeerNode, ...] = ()  # ready, but they do not seal and we require it
        self.waiting: tuple[PeerNode, ...] = ()  # ready, their hello did not come yet
        self._policy = policy
        self._answers: dict[int, tuple[int, SealHello, SealAnswer]] = {}
        self._listed: frozenset[int] = frozenset()

    def hello_received(self, peer: int, epoch: int, hello: SealHello, ephemeral: bytes) -> SealAnswer | None:
        """
        Take a node's half; give what to answer, None when we do not seal. Then ask `admitted` again.

        A hello that comes twice is answered alike: the node may use either answer.

        Raises:
            SealFault: the node did not sign it.
        """
        identity = self._policy.identity
        if identity is None:
            return None
        said = self._answers.get(peer)
        if said is not None and said[:2] == (epoch, hello):
            return said[2]
        answer, seal = answer_hello(identity, epoch, hello, ephemeral)
        self._answers.pop(peer, None)
        if len(self._answers) >= MAX_SEALS + len(self._listed):
            oldest = next(other for other in self._answers if other not in self._listed)
            del self._answers[oldest]
            self.book.forget(oldest)
        self._answers[peer] = (epoch, hello, answer)
        self.book.put(peer, epoch, seal)
        return answer

    def admitted(self, peers: Peers) -> Peers:
        """Keep of the relay's list the nodes that may be asked now."""
        admitted: list[PeerNode] = []
        refused: list[PeerNode] = []
        waiting: list[PeerNode] = []
        self._listed = frozenset(node.peer for node in peers.nodes)
        for node in peers.nodes:
            if node.seal is None or self._policy.identity is None:
                (refused if self._policy.required else admitted).append(node)
            elif self._sealed(node):
                admitted.append(node)
            else:
                self.book.expect_at_least(node.peer, node.epoch)
                waiting.append(node)
        self.refused, self.waiting = tuple(refused), tuple(waiting)
        return replace(peers, nodes=tuple(admitted))

    def describe(self, node_peer: int) -> dict[str, Any]:
        """Say whether calls to a node are sealed, who it proved to be, how many of its frames never came."""
        said = self._answers.get(node_peer)
        seal = None if said is None else self.book.get(node_peer, said[0])
        if seal is None:
            return {"sealed": False, "identity": None, "gaps": 0}
        return {"sealed": True, "identity": fingerprint(seal.other.hex()), "gaps": seal.gaps}

    def _sealed(self, node: PeerNode) -> bool:
        seal = self.book.get(node.peer, node.epoch)
        return seal is not None and seal.other.hex() == node.seal
