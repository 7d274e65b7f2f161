"""
Seal frames between a node and its backbone, so that the relay reads only what it forwards by. Pure.

    node                                      backbone     each knows the other's identity from the relay
      | SealHello {identity, ephemeral, signature} -> |      signed: "node", epoch, both identities, ephemeral
      | <- SealAnswer {identity, ephemeral, signature}|      signed: "backbone", the same, its own ephemeral
      | <========= sealed calls and Signals ========> |

Identities are Ed25519 and live long; ephemerals are X25519 and made for one pairing. Of their shared secret
HKDF-SHA-256 (salt: hash of epoch, identities and ephemerals) makes one secret per direction and stream;
frames are sealed with AES-256-GCM. Control goes ahead of calls, and calls overtake those that travel in
pieces, so each of the three is a stream with a counter of its own. Counters only rise: the relay may drop a
frame, so gaps are legal; repetitions are not.

    sealed payload = u64 counter | AES-256-GCM(key, nonce = 4 zero bytes | counter, header, payload) | tag

`header` is the sealed frame's own with `peer` as 0: the relay rewrites that, and the keys say who speaks.

Time, randomness and files are the caller's. See PROTOCOL.md, "Sealing".
"""

import hashlib
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from relay.wire.errors import LocalProtocolError, RemoteProtocolError, SealFault
from relay.wire.fields import fingerprint
from relay.wire.frames import (
    FLAG_SEALED,
    HEADER,
    HEADER_BYTES,
    MAGIC,
    PIECE_BYTES,
    SEAL_BYTES,
    SEALABLE,
    VERSION,
    FrameType,
    Header,
    decode_header,
)
from relay.wire.messages import Failure, SealAnswer, SealHello

SEAL_VERSION = 1
KEY_BYTES = 32
# NIST SP 800-38D and RFC 8446 §5.5 bound what one AES-GCM key may protect (2^38.5 bytes in long records). The
# counter's upper bits number the keys; whoever has sealed too many bytes goes on with the next one early.
KEY_FRAMES = 1 << 20
KEY_MAX_BYTES = 1 << 36
MAX_COUNTER = (1 << 53) - 1  # what JavaScript counts exactly: some 285 years at a million frames a second
KEYS_AHEAD = 4  # a receiver follows so many changes of key that it saw nothing of

type Role = Literal["node", "backbone"]
type Stream = Literal["bulk", "express", "long"]

# What the relay sends ahead of bulk (relay/forwarding/queue.py): here it is a stream of its own.
EXPRESS = frozenset({FrameType.CANCEL, FrameType.FAILURE, FrameType.SIGNAL})
# Said unsealed by the relay in a peer's name, or by a peer that could not open something: it makes the call
# be asked elsewhere, no more, which who carries the frames can bring about anyway.
MAY_BE_BARE = frozenset({"gone", "overloaded", "bad_seal"})

STREAMS: tuple[Stream, ...] = ("bulk", "express", "long")
_OTHER: Mapping[Role, Role] = MappingProxyType({"node": "backbone", "backbone": "node"})
_LABEL = b"expertswarm seal 1 "
_COUNTER = struct.Struct("<Q")


def stream_of(kind: int, sealed_bytes: int) -> Stream:
    """Name the stream of a frame: what overtakes others on the way has a counter of its own."""
    if kind in EXPRESS:
        return "express"
    return "long" if sealed_bytes > PIECE_BYTES else "bulk"


def same_fingerprint(one: str, other: str) -> bool:
    """Compare two as people write them: with or without dashes, in either case."""
    return one.replace("-", "").lower() == other.replace("-", "").lower()


class SealIdentity:
    """Who an end is: its long-lived signing key."""

    __slots__ = ("_key", "public")

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key
        self.public = key.public_key().public_bytes_raw()

    @classmethod
    def from_seed(cls, seed: bytes) -> "SealIdentity":
        return cls(Ed25519PrivateKey.from_private_bytes(seed))

    @property
    def fingerprint(self) -> str:
        return fingerprint(self.public.hex())

    def sign(self, text: bytes) -> bytes:
        return self._key.sign(text)


@dataclass(frozen=True, slots=True)
class Pairing:
    """What both ends know of a pairing before either has said a word about keys: epoch and identities."""

    epoch: int
    node: bytes
    backbone: bytes

    def of_node(self, ephemeral: bytes) -> bytes:
        """What the node signs."""
        return self._text(b"node", ephemeral)

    def of_backbone(self, node_ephemeral: bytes, ephemeral: bytes) -> bytes:
        """What the backbone signs; its hash is the salt of all keys."""
        return self._text(b"backbone", node_ephemeral, ephemeral)

    def _text(self, role: bytes, *ephemerals: bytes) -> bytes:
        head = _LABEL + role + b"\0" + struct.pack("<BI", SEAL_VERSION, self.epoch)
        return head + self.node + self.backbone + b"".join(ephemerals)


class NodeHandshake:
    """The node's half: say `hello`, read the answer, have a Seal. `ephemeral`: 32 random bytes, used once."""

    __slots__ = ("_ephemeral", "hello", "pairing")

    def __init__(self, identity: SealIdentity, epoch: int, backbone: bytes, ephemeral: bytes) -> None:
        self.pairing = Pairing(epoch, identity.public, backbone)
        self._ephemeral = X25519PrivateKey.from_private_bytes(ephemeral)
        public = self._ephemeral.public_key().public_bytes_raw()
        signature = identity.sign(self.pairing.of_node(public))
        self.hello = SealHello(identity.public.hex(), public.hex(), signature.hex())

    def finish(self, answer: SealAnswer) -> "Seal":
        """
        Read the backbone's answer.

        Raises:
            SealFault: it is not from the identity that Assign named, or not for this hello.
        """
        if bytes.fromhex(answer.identity) != self.pairing.backbone:
            raise SealFault("other_identity", "the answer is of another backbone than the one assigned")
        ours, theirs = bytes.fromhex(self.hello.ephemeral), bytes.fromhex(answer.ephemeral)
        text = self.pairing.of_backbone(ours, theirs)
        _check(self.pairing.backbone, answer.signature, text, "the backbone")
        return Seal("node", self.pairing.backbone, _agree(self._ephemeral, theirs), text)


def answer_hello(
    identity: SealIdentity, epoch: int, hello: SealHello, ephemeral: bytes
) -> tuple[SealAnswer, "Seal"]:
    """
    Be the backbone's half: check a node's hello, give what to answer and the Seal.

    Raises:
        SealFault: the hello is not signed by the identity it names, for us and this epoch.
    """
    node, theirs = bytes.fromhex(hello.identity), bytes.fromhex(hello.ephemeral)
    pairing = Pairing(epoch, node, identity.public)
    _check(node, hello.signature, pairing.of_node(theirs), "the node")
    key = X25519PrivateKey.from_private_bytes(ephemeral)
    ours = key.public_key().public_bytes_raw()
    text = pairing.of_backbone(theirs, ours)
    answer = SealAnswer(identity.public.hex(), ours.hex(), identity.sign(text).hex())
    return answer, Seal("backbone", node, _agree(key, theirs), text)


def _check(identity: bytes, signature: str, text: bytes, who: str) -> None:
    try:
        Ed25519PublicKey.from_public_bytes(identity).verify(bytes.fromhex(signature), text)
    except (InvalidSignature, ValueError) as exc:
        raise SealFault(
            "unsigned", f"{who} did not sign this: it was altered, or is of another pairing"
        ) from exc


def _agree(ours: X25519PrivateKey, theirs: bytes) -> bytes:
    try:
        return ours.exchange(X25519PublicKey.from_public_bytes(theirs))
    except (
        ValueError
    ) as exc:  # a point of small order: the secret would be known to everybody (RFC 7748 §6.1)
        raise SealFault("unsigned", "the ephemeral key is of small order") from exc


def derive(secret: bytes, salt: bytes, label: str) -> bytes:
    """HKDF-SHA-256 (RFC 5869), 32 bytes."""
    return HKDF(SHA256(), KEY_BYTES, salt, _LABEL + label.encode("ascii")).derive(secret)


class Chain:
    """The keys of one stream, one after the other: each secret makes a key and the next secret."""

    __slots__ = ("_secret", "key", "number")

    def __init__(self, secret: bytes, number: int = 0) -> None:
        self._secret = secret
        self.number = number
        self.key = AESGCM(derive(secret, b"", "key"))

    def at(self, number: int) -> "Chain":
        """The chain `number - self.number` steps on; this one stays."""
        secret = self._secret
        for _ in range(number - self.number):
            secret = derive(secret, b"", "next")
        return Chain(secret, number)


class Sealer:
    """The sending end of one stream."""

    __slots__ = ("_bytes", "_chain", "counter")

    def __init__(self, secret: bytes) -> None:
        self.counter = 0  # of the next frame
        self._chain = Chain(secret)
        self._bytes = 0

    def seal(self, payload: bytes | memoryview, header: bytes) -> bytes:
        if self._bytes > KEY_MAX_BYTES:
            self.counter = (self._chain.number + 1) * KEY_FRAMES
        counter = self.counter
        if counter > MAX_COUNTER:
            raise LocalProtocolError("this stream has sealed all frames it may")
        if counter // KEY_FRAMES != self._chain.number:
            self._chain, self._bytes = self._chain.at(counter // KEY_FRAMES), 0
        self.counter = counter + 1
        self._bytes += len(payload)
        count = _COUNTER.pack(counter)
        return count + self._chain.key.encrypt(b"\0\0\0\0" + count, payload, header)


class Opener:
    """The receiving end of one stream. `gaps` counts frames that never came."""

    __slots__ = ("_chain", "expected", "gaps")

    def __init__(self, secret: bytes) -> None:
        self.expected = 0  # the lowest counter that was not used yet
        self.gaps = 0
        self._chain = Chain(secret)

    def open(self, sealed: memoryview, header: bytes) -> bytes:
        """Raises SealFault; what does not open changes nothing here."""
        (counter,) = _COUNTER.unpack_from(sealed)
        if counter < self.expected:
            raise SealFault("repeated", f"frame {counter} of its stream came again, or late")
        number = counter // KEY_FRAMES
        if number > self._chain.number + KEYS_AHEAD or counter > MAX_COUNTER:
            raise SealFault("altered", f"frame {counter} is far ahead of its stream")
        chain = self._chain if number == self._chain.number else self._chain.at(number)
        try:
            payload = chain.key.decrypt(b"\0\0\0\0" + sealed[:8], sealed[8:], header)
        except InvalidTag as exc:
            message = "it does not open: altered on the way by the relay, or sealed for somebody else"
            raise SealFault("altered", message) from exc
        self._chain = chain
        self.gaps += counter - self.expected
        self.expected = counter + 1
        return payload


class Seal:
    """
    The keys of one pairing, at one end: whole frames in, whole frames out.

    other: the identity of the other end, proved. text: what was agreed on, see Pairing. A frame that does not
    open raises SealFault and leaves everything as it was.
    """

    __slots__ = ("_openers", "_salt", "_sealers", "_secret", "other")

    def __init__(self, role: Role, other: bytes, secret: bytes, text: bytes) -> None:
        self.other = other
        self._secret = secret
        self._salt = hashlib.sha256(text).digest()
        self._sealers = {s: Sealer(self._derive(f"{role} {s}")) for s in STREAMS}
        self._openers = {s: Opener(self._derive(f"{_OTHER[role]} {s}")) for s in STREAMS}

    @property
    def gaps(self) -> int:
        """Frames of the other end that never came."""
        return sum(opener.gaps for opener in self._openers.values())

    def seal(self, data: bytes) -> bytes:
        """Take a frame, give the sealed one."""
        magic, version, kind, _, _, length, peer, call_id, epoch, deadline_ms = HEADER.unpack_from(data)
        fields = (magic, version, kind, FLAG_SEALED, 0, length + SEAL_BYTES)
        bound = HEADER.pack(*fields, 0, call_id, epoch, deadline_ms)
        sealer = self._sealers[stream_of(kind, length + SEAL_BYTES)]
        sealed = sealer.seal(memoryview(data)[HEADER_BYTES:], bound)
        return HEADER.pack(*fields, peer, call_id, epoch, deadline_ms) + sealed

    def open(self, header: Header, data: bytes) -> bytes:
        """Take a sealed frame whose header was read, give the frame that was sealed. Raises SealFault."""
        ids = (header.call_id, header.epoch, header.deadline_ms)
        bound = HEADER.pack(MAGIC, VERSION, header.type, FLAG_SEALED, 0, header.length, 0, *ids)
        opener = self._openers[stream_of(header.type, header.length)]
        payload = opener.open(memoryview(data)[HEADER_BYTES:], bound)
        return HEADER.pack(MAGIC, VERSION, header.type, 0, 0, len(payload), header.peer, *ids) + payload

    def _derive(self, label: str) -> bytes:
        return derive(self._secret, self._salt, label)


def link_seal(role: Role, link: str, key: bytes) -> Seal:
    """Give the seal of a link past the relay; its key came sealed, so it vouches for the other end."""
    return Seal(role, b"", key, _LABEL + b"link\0" + link.encode("ascii"))


class SealBook:
    """
    The seals of one session with the relay, by peer: what goes out and comes in passes here.

    `expect(peer)`: from now on nothing unsealed passes between that peer and us.
    """

    __slots__ = ("_seals", "faults", "opened", "sealed")

    def __init__(self) -> None:
        self.faults: dict[str, int] = {}  # why -> frames
        self.sealed = 0
        self.opened = 0
        self._seals: dict[int, tuple[int, Seal | None]] = {}  # peer -> epoch, seal once agreed

    def expect(self, peer: int, epoch: int) -> None:
        """A pairing with a peer that seals began."""
        self._seals[peer] = (epoch, None)

    def expect_at_least(self, peer: int, epoch: int) -> None:
        """The same, unless more is known of the peer: its next pairing may be sealed before we hear of it."""
        if peer not in self._seals:
            self.expect(peer, epoch)

    def put(self, peer: int, epoch: int, seal: Seal) -> None:
        """The keys of a pairing are agreed; those of the peer's former one are forgotten."""
        self._seals[peer] = (epoch, seal)

    def get(self, peer: int, epoch: int) -> Seal | None:
        found = self._seals.get(peer)
        return found[1] if found is not None and found[0] == epoch else None

    def forget(self, peer: int) -> None:
        self._seals.pop(peer, None)

    def outgoing(self, data: bytes) -> bytes:
        """Take a frame of ours, give what to write."""
        if data[3] not in SEALABLE or not self._seals:
            return data
        peer, epoch = struct.unpack_from("<I8xI", data, 12)
        seal = self.get(peer, epoch)
        if seal is None:
            return data  # to whom we agreed on nothing; a peer that expects a seal refuses it
        self.sealed += 1
        return seal.seal(data)

    def incoming(self, data: bytes | str) -> bytes | str:
        """
        Take what came, give what the session shall read.

        Raises:
            SealFault: see `fault_of` for what the session is told.
        """
        if isinstance(data, str) or len(data) < HEADER_BYTES or data[3] not in SEALABLE:
            return data  # the session says what is wrong with it, or it is the relay's own word
        if not self._seals and not data[4]:
            return data  # nobody seals here: no second look
        try:
            header = decode_header(data)
        except RemoteProtocolError:
            return data
        found = self._seals.get(header.peer)
        if not header.sealed:
            if found is None or _may_be_bare(header, data):
                return data
            raise self._fault("unsealed", f"{header.type.name} came unsealed from a peer that seals")
        if found is None or found[1] is None or found[0] != header.epoch:
            raise self._fault("no_key", f"{header.type.name} is sealed and we share no key for its pairing")
        try:
            opened = found[1].open(header, data)
        except SealFault as exc:
            raise self._fault(exc.why, f"{header.type.name}: {exc}") from exc
        self.opened += 1
        return opened

    def _fault(self, why: str, message: str) -> SealFault:
        self.faults[why] = self.faults.get(why, 0) + 1
        return SealFault(why, message)


def _may_be_bare(header: Header, data: bytes) -> bool:
    """Whether an unsealed frame is a failure that the relay may report in its peer's name."""
    if header.type is not FrameType.FAILURE:
        return False
    try:
        return Failure.from_payload(data[HEADER_BYTES:]).code in MAY_BE_BARE
    except RemoteProtocolError:
        return False
