"""
Say what frames carry, as frozen dataclasses with `to_payload` and `from_payload`.

Control messages are JSON (this file); calls are binary (calls.py). `from_payload` raises RemoteProtocolError
naming frame and key for anything that is not exactly such a message. See PROTOCOL.md, "Messages".
"""

from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from ipaddress import ip_address
from typing import Any, ClassVar, Literal, Self

from relay.wire.calls import Dispatch, Partial
from relay.wire.fields import MAX_SAFE_INT, Fields, to_json
from relay.wire.frames import FrameType
from relay.wire.manifest import (
    HASH_CHARS,
    MAX_EXPERTS,
    MAX_LAYERS,
    MAX_SLICE_BYTES,
    JsonObject,
    Manifest,
    ManifestLayer,
    read_formula,
    read_grid,
)

__all__ = [
    "AssignLayer",
    "Assign",
    "Bye",
    "CONTROL_MESSAGES",
    "ControlMessage",
    "Dispatch",
    "Drain",
    "Failure",
    "Hello",
    "LinkHello",
    "LinkProof",
    "Manifest",
    "ManifestLayer",
    "Offer",
    "Partial",
    "PathReport",
    "PathState",
    "Pause",
    "PeerNode",
    "Peers",
    "Ping",
    "Pong",
    "Register",
    "SealAnswer",
    "SealHello",
    "Signal",
    "SliceReady",
    "SliceWanted",
    "Welcome",
]

ID_CHARS = 32  # 128 random bits, lower-case hex
SESSION_CHARS = 32
NAME_CHARS = 40
MAX_INVENTORY = 16_384  # a whole model of most families; who holds more leaves the rest out
MAX_NODES = 100_000
MAX_SECONDS = 86_400.0
MAX_URL_CHARS = 300
MAX_ADDRESS_CHARS = 45  # IPv6 at its longest
MAX_LANES = 8
MAX_WHY_CHARS = 300
MAX_SIGNAL_VALUES = 8
MAX_SIGNAL_CHARS = 12_000  # a session description with some twenty candidates
MAC_CHARS = 64
KEY_CHARS = 64  # a public key of 32 bytes
SIGNATURE_CHARS = 128
_U32 = 0xFFFF_FFFF

ROLES = frozenset({"node", "backbone"})
FAILURE_CODES = frozenset(
    {
        "refused",  # the peer will not do this call
        "not_held",  # the node lacks an expert it was asked for
        "stale_epoch",  # the call belongs to a pairing that is over
        "kernel_fault",  # the kernel failed its known-answer test or crashed
        "non_finite",  # NaN or infinity in x, weights or result
        "grid_overflow",  # a weighted output left the int64 grid
        "overloaded",  # a queue on the way was full for too long
        "gone",  # the peer is not connected
        "bad_frame",  # the payload was not what its type promises
        "bad_seal",  # a sealed frame does not open, or came unsealed from a peer that seals
    }
)
FAILURE_PHASES = frozenset({"queue", "send", "compute", "return"})

type Experts = Mapping[int, tuple[int, ...]]  # layer -> experts, rising


class Json:
    """A control message whose payload is one JSON object."""

    __slots__ = ()
    TYPE: ClassVar[FrameType]
    MAX_CONTAINERS: ClassVar[int] = 1000  # arrays and objects: what makes parsing dear

    @classmethod
    def from_payload(cls, payload: bytes) -> Self:
        return cls.from_fields(Fields.parse(cls.__name__, payload, cls.MAX_CONTAINERS))

    @classmethod
    def from_fields(cls, fields: Fields) -> Self:
        raise NotImplementedError

    def to_json(self) -> JsonObject:
        raise NotImplementedError

    def to_payload(self) -> bytes:
        return to_json(self.to_json())


@dataclass(frozen=True, slots=True)
class Hello(Json):
    """
    Say who connects. `id` names the peer, `secret` proves that a reconnect is the same one.

    `resume_token` is what the Welcome of the last session said: the place of that one is asked for.
    """

    TYPE = FrameType.HELLO
    role: Literal["node", "backbone"]
    id: str
    secret: str
    token: str | None = None
    agent: str = ""
    resume: bool = False
    resume_token: str | None = None

    @classmethod
    def from_fields(cls, fields: Fields) -> Self:
        return cls(
            role="node" if fields.one_of("role", ROLES) == "node" else "backbone",
            id=fields.hex("id", ID_CHARS),
            secret=fields.hex("secret", ID_CHARS),
            token=fields.text("token", 200) if fields.raw("token") is not None else None,
            agent=fields.text("agent", 200),
            resume=fields.boolean("resume"),
            resume_token=fields.hex("resume_token", SESSION_CHARS) if fields.has("resume_token") else None,
        )

    def to_json(self) -> JsonObject:
        return {
            "role": self.role,
            "id": self.id,
            "secret": self.secret,
            "token": self.token,
            "agent": self.agent,
            "resume": self.resume,
        } | _given(resume_token=self.resume_token)


@dataclass(frozen=True, slots=True)
class Welcome(Json):
    """
    Accept a Hello. `session` is the bearer token of this session's HTTP requests.

    `resume`: token for the next Hello, should this session break. `resumed`: the last one's place was kept.
    """

    TYPE = FrameType.WELCOME
    session: str
    relay: str
    ping_interval_s: float
    max_frame_bytes: int
    stun: str | None = None  # host:port of the relay's STUN server
    resume: str | None = None
    resumed: bool = False

    @classmethod
    def from_fields(cls, fields: Fields) -> Self:
        return cls(
            session=fields.hex("session", SESSION_CHARS),
            relay=fields.text("relay", 200),
            ping_interval_s=fields.number("ping_interval_s", 0.01, MAX_SECONDS),
            max_frame_bytes=fields.integer("max_frame_bytes", 1, _U32),
            stun=fields.text("stun", MAX_URL_CHARS) if fields.has("stun") else None,
            resume=fields.hex("resume", SESSION_CHARS) if fields.has("resume") else None,
            resumed=fields.boolean("resumed") if fields.has("resumed") else False,
        )

    def to_json(self) -> JsonObject:
        return {
            "session": self.session,
            "relay": self.relay,
            "ping_interval_s": self.ping_interval_s,
            "max_frame_bytes": self.max_frame_bytes,
        } | _given(stun=self.stun, resume=self.resume, resumed=self.resumed)


@dataclass(frozen=True, slots=True)
class Offer(Json):
    """
    Say what a node gives: memory, a kernel and its measured speed, and the slices it still holds.

    `lanes` are the ways it can be reached besides the relayed one; `listen` is the URL it listens on, if any.
    `seal` is its identity (Ed25519), if it seals.
    """

    TYPE = FrameType.OFFER
    kernel: str
    memory_bytes: int
    gb_per_s: float
    battery: float | None
    metered: bool
    name: str
    inventory: tuple[str, ...] = ()
    lanes: tuple[str, ...] = ()
    listen: str | None = None
    seal: str | None = None

    @classmethod
    def from_fields(cls, fields: Fields) -> Self:
        return cls(
            kernel=fields.text("kernel", NAME_CHARS),
            memory_bytes=fields.integer("memory_bytes", 0, MAX_SAFE_INT),
            gb_per_s=fields.number("gb_per_s", 0.0, 1e6),
            battery=fields.number("battery", 0.0, 1.0) if fields.raw("battery") is not None else None,
            metered=fields.boolean("metered"),
            name=fields.text("name", NAME_CHARS),
            inventory=fields.hexes("inventory", HASH_CHARS, MAX_INVENTORY),
            lanes=_read_lanes(fields),
            listen=fields.text("listen", MAX_URL_CHARS) if fields.has("listen") else None,
            seal=_read_seal(fields),
        )

    def to_json(self) -> JsonObject:
        return {
            "kernel": self.kernel,
            "memory_bytes": self.memory_bytes,
            "gb_per_s": self.gb_per_s,
            "battery": self.battery,
            "metered": self.metered,
            "name": self.name,
            "inventory": list(self.inventory),
        } | _given(lanes=list(self.lanes), listen=self.listen, seal=self.seal)


@dataclass(frozen=True, slots=True)
class Register(Json):
    """
    Say what a backbone serves. `seal` is its identity (Ed25519), if it seals; `changes`: it takes Peers that
    say only what changed; `inexact`: it also asks nodes whose kernel is not exact.
    """

    TYPE = FrameType.REGISTER
    MAX_CONTAINERS = 100_000
    name: str
    manifest: Manifest
    seal: str | None = None
    changes: bool = False
    inexact: bool = False

    @classmethod
    def from_fields(cls, fields: Fields) -> Self:
        return cls(
            name=fields.text("name", NAME_CHARS),
            manifest=Manifest.from_fields(fields.object("manifest")),
            seal=_read_seal(fields),
            changes=fields.boolean("changes") if fields.has("changes") else False,
            inexact=fields.boolean("inexact") if fields.has("inexact") else False,
        )

    def to_json(self) -> JsonObject:
        return {"name": self.name, "manifest": self.manifest.to_json()} | _given(
            seal=self.seal, changes=self.changes, inexact=self.inexact
        )


@dataclass(frozen=True, slots=True)
class AssignLayer:
    """What a node shall hold of one layer: expert index -> slice id."""

    layer: int
    formula: JsonObject
    grid: JsonObject
    slice_bytes: int
    experts: Mapping[int, str]

    @classmethod
    def from_fields(cls, fields: Fields) -> Self:
        formula = read_formula(fields.object("formula"))
        experts = fields.object("experts")
        held = {expert: experts.hex(key, HASH_CHARS) for expert, key in experts.indexed()}
        return cls(
            layer=fields.integer("layer", 0, 0xFFFF),
            formula=formula,
            grid=read_grid(fields.object("grid"), formula["hidden_dim"]),
            slice_bytes=fields.integer("slice_bytes", 1, MAX_SLICE_BYTES),
            experts=held,
        )

    def to_json(self) -> JsonObject:
        return {
            "layer": self.layer,
            "formula": self.formula,
            "grid": self.grid,
            "slice_bytes": self.slice_bytes,
            "experts": {str(expert): slice_id for expert, slice_id in self.experts.items()},
        }


@dataclass(frozen=True, slots=True)
class Assign(Json):
    """
    Tell a node the complete set it shall hold; it replaces the former one. No layers: hold nothing.

    `peer` is the backbone's handle, `epoch` the pairing calls will carry. Both are 0 when the pairing is
    over: no calls come, and what was held is kept for the next one.
    `seal` is the backbone's identity, if it seals.
    """

    TYPE = FrameType.ASSIGN
    MAX_CONTAINERS = 100_000
    epoch: int
    peer: int
    model: str | None
    layers: tuple[AssignLayer, ...]
    seal: str | None = None

    @classmethod
    def from_fields(cls, fields: Fields) -> Self:
        layers = tuple(AssignLayer.from_fields(entry) for entry in fields.objects("layers", MAX_LAYERS))
        if len({layer.layer for layer in layers}) != len(layers):
            fields.fail("layers", "an array that names each layer once")
        return cls(
            epoch=fields.integer("epoch", 0, _U32),
            peer=fields.integer("peer", 0, _U32),
            model=fields.hex("model", HASH_CHARS) if fields.raw("model") is not None else None,
            layers=layers,
            seal=_read_seal(fields),
        )

    def to_json(self) -> JsonObject:
        return {
            "epoch": self.epoch,
            "peer": self.peer,
            "model": self.model,
            "layers": [layer.to_json() for layer in self.layers],
        } | _given(seal=self.seal)


@dataclass(frozen=True, slots=True)
class SliceReady(Json):
    """
    Say which experts of which layers can be dispatched to now: the complete set. So is `refused`: assigned
    experts that this node will not load before it offers itself anew, and `why`.
    """

    TYPE = FrameType.SLICE_READY
    MAX_CONTAINERS = 4_000
    epoch: int
    experts: Experts
    refused: Experts = dataclass_field(default_factory=dict)
    why: str = ""

    @classmethod
    def from_fields(cls, fields: Fields) -> Self:
        return cls(
            epoch=fields.integer("epoch", 0, _U32),
            experts=_read_experts(fields),
            refused=_read_experts(fields, "refused") if fields.has("refused") else {},
            why=fields.text("why", MAX_WHY_CHARS) if fields.has("why") else "",
        )

    def to_json(self) -> JsonObject:
        refused = _write_experts(self.refused) if self.refused else None
        return {"epoch": self.epoch, "experts": _write_experts(self.experts)} | _given(
            refused=refused, why=self.why or None
        )


@dataclass(frozen=True, slots=True)
class PeerNode:
    """One node as its backbone sees it: where to send, under which epoch, and what it holds ready."""

    peer: int
    node_id: str
    name: str
    kernel: str
    gb_per_s: float
    epoch: int
    experts: Experts
    path: str = "relayed"
    lanes: tuple[str, ...] = ()  # as in its Offer
    listen: str | None = None
    seal: str | None = None
    seen: str | None = None  # where the relay saw it come from, if it listens

    @classmethod
    def from_fields(cls, fields: Fields) -> Self:
        return cls(
            peer=fields.integer("peer", 1, _U32),
            node_id=fields.hex("node_id", ID_CHARS),
            name=fields.text("name", NAME_CHARS),
            kernel=fields.text("kernel", NAME_CHARS),
            gb_per_s=fields.number("gb_per_s", 0.0, 1e6),
            epoch=fields.integer("epoch", 0, _U32),
            experts=_read_experts(fields),
            path=fields.text("path", NAME_CHARS),
            lanes=_read_lanes(fields),
            listen=fields.text("listen", MAX_URL_CHARS) if fields.has("listen") else None,
            seal=_read_seal(fields),
            seen=_read_address(fields, "seen"),
        )

    def to_json(self) -> JsonObject:
        return {
            "peer": self.peer,
            "node_id": self.node_id,
            "name": self.name,
            "kernel": self.kernel,
            "gb_per_s": self.gb_per_s,
            "epoch": self.epoch,
            "path": self.path,
            "experts": _write_experts(self.experts),
        } | _given(lanes=list(self.lanes), listen=self.listen, seal=self.seal, seen=self.seen)


@dataclass(frozen=True, slots=True)
class Peers(Json):
    """
    Tell a backbone all nodes that are ready for it; it replaces the former list.

    `change`: only what is different from it, which nodes came or changed, and which are `gone`.
    """

    TYPE = FrameType.PEERS
    MAX_CONTAINERS = 2_000_000
    nodes: tuple[PeerNode, ...]
    change: bool = False
    gone: tuple[int, ...] = ()

    @classmethod
    def from_fields(cls, fields: Fields) -> Self:
        return cls(
            nodes=tuple(PeerNode.from_fields(entry) for entry in fields.objects("nodes", MAX_NODES)),
            change=fields.boolean("change") if fields.has("change") else False,
            gone=fields.integers("gone", 1, _U32, MAX_NODES) if fields.has("gone") else (),
        )

    def to_json(self) -> JsonObject:
        return {"nodes": [node.to_json() for node in self.nodes]} | _given(
            change=self.change, gone=list(self.gone)
        )

    def after(self, former: "Peers") -> "Peers":
        """Return the complete list, of which this is a change or the whole."""
        if not self.change:
            return self
        nodes = {node.peer: node for node in former.nodes}
        for peer in self.gone:
            nodes.pop(peer, None)
        nodes.update((node.peer, node) for node in self.nodes)
        return Peers(tuple(nodes.values()))


@dataclass(frozen=True, slots=True)
class SliceWanted(Json):
    """Ask the backbone to PUT a slice to /slices/<slice>."""

    TYPE = FrameType.SLICE_WANTED
    slice: str

    @classmethod
    def from_fields(cls, fields: Fields) -> Self:
        return cls(slice=fields.hex("slice", HASH_CHARS))

    def to_json(self) -> JsonObject:
        return {"slice": self.slice}


@dataclass(frozen=True, slots=True)
class Failure(Json):
    """Say that one call failed, where and why. Other calls are not touched."""

    TYPE = FrameType.FAILURE
    code: str
    message: str
    phase: str
    layer: int | None = None
    expert: int | None = None

    @classmethod
    def from_fields(cls, fields: Fields) -> Self:
        return cls(
            code=fields.one_of("code", FAILURE_CODES),
            message=fields.text("message", 500),
            phase=fields.one_of("phase", FAILURE_PHASES),
            layer=fields.integer("layer", 0, 0xFFFF) if fields.has("layer") else None,
            expert=fields.integer("expert", 0, MAX_EXPERTS) if fields.has("expert") else None,
        )

    def to_json(self) -> JsonObject:
        return {
            "code": self.code,
            "message": self.message,
            "phase": self.phase,
            "layer": self.layer,
            "expert": self.expert,
        }


@dataclass(frozen=True, slots=True)
class _Heartbeat(Json):
    t: float

    @classmethod
    def from_fields(cls, fields: Fields) -> Self:
        return cls(t=fields.number("t", 0.0, float(MAX_SAFE_INT)))

    def to_json(self) -> JsonObject:
        return {"t": self.t}


class Ping(_Heartbeat):
    """Ask for a sign of life; `t` (ms) means something to its sender only."""

    __slots__ = ()
    TYPE = FrameType.PING


class Pong(_Heartbeat):
    """Answer a Ping with its `t`."""

    __slots__ = ()
    TYPE = FrameType.PONG


@dataclass(frozen=True, slots=True)
class Pause(Json):
    """Say that a node takes no calls for now (or takes them again); it keeps what it holds."""

    TYPE = FrameType.PAUSE
    paused: bool

    @classmethod
    def from_fields(cls, fields: Fields) -> Self:
        return cls(paused=fields.boolean("paused"))

    def to_json(self) -> JsonObject:
        return {"paused": self.paused}


@dataclass(frozen=True, slots=True)
class Drain(Json):
    """Say that the relay is about to stop: finish what runs, come back after `reconnect_after_s`."""

    TYPE = FrameType.DRAIN
    reason: str
    reconnect_after_s: float

    @classmethod
    def from_fields(cls, fields: Fields) -> Self:
        return cls(
            reason=fields.text("reason", 500),
            reconnect_after_s=fields.number("reconnect_after_s", 0.0, MAX_SECONDS),
        )

    def to_json(self) -> JsonObject:
        return {"reason": self.reason, "reconnect_after_s": self.reconnect_after_s}


@dataclass(frozen=True, slots=True)
class Bye(Json):
    """Leave on purpose. The transport closes with `code` afterwards."""

    TYPE = FrameType.BYE
    code: int
    reason: str

    @classmethod
    def from_fields(cls, fields: Fields) -> Self:
        return cls(code=fields.integer("code", 1000, 4999), reason=fields.text("reason", 500))

    def to_json(self) -> JsonObject:
        return {"code": self.code, "reason": self.reason}


@dataclass(frozen=True, slots=True)
class Signal(Json):
    """
    Tell the other end of a pairing, through the relay, how to open a link. PROTOCOL.md, "Links".

    `link` names the attempt. What `data` holds depends on `kind`; all its values are strings.
    """

    TYPE = FrameType.SIGNAL
    kind: str
    link: str
    data: Mapping[str, str] = dataclass_field(default_factory=dict)

    @classmethod
    def from_fields(cls, fields: Fields) -> Self:
        data = fields.object("data")
        if len(data.json) > MAX_SIGNAL_VALUES:
            fields.fail("data", f"an object of at most {MAX_SIGNAL_VALUES} keys")
        return cls(
            kind=fields.text("kind", NAME_CHARS),
            link=fields.hex("link", ID_CHARS),
            data={key: data.text(key, MAX_SIGNAL_CHARS) for key in data.json},
        )

    def to_json(self) -> JsonObject:
        return {"kind": self.kind, "link": self.link, "data": dict(self.data)}


@dataclass(frozen=True, slots=True)
class _SealKeys(Json):
    identity: str
    ephemeral: str
    signature: str

    @classmethod
    def from_fields(cls, fields: Fields) -> Self:
        return cls(
            identity=fields.hex("identity", KEY_CHARS),
            ephemeral=fields.hex("ephemeral", KEY_CHARS),
            signature=fields.hex("signature", SIGNATURE_CHARS),
        )

    def to_json(self) -> JsonObject:
        return {"identity": self.identity, "ephemeral": self.ephemeral, "signature": self.signature}


class SealHello(_SealKeys):
    """A node's half of the keys of a pairing: its identity, a fresh X25519 key, and its word for that."""

    __slots__ = ()
    TYPE = FrameType.SEAL_HELLO


class SealAnswer(_SealKeys):
    """The backbone's half; its signature covers the node's."""

    __slots__ = ()
    TYPE = FrameType.SEAL_ANSWER


@dataclass(frozen=True, slots=True)
class LinkHello(Json):
    """Open a link: say which one, and a nonce the other end must sign."""

    TYPE = FrameType.LINK_HELLO
    link: str
    nonce: str

    @classmethod
    def from_fields(cls, fields: Fields) -> Self:
        return cls(link=fields.hex("link", ID_CHARS), nonce=fields.hex("nonce", ID_CHARS))

    def to_json(self) -> JsonObject:
        return {"link": self.link, "nonce": self.nonce}


@dataclass(frozen=True, slots=True)
class LinkProof(Json):
    """Prove to know the link's key. `nonce` is the accepting end's, the same in both proofs."""

    TYPE = FrameType.LINK_PROOF
    nonce: str
    mac: str

    @classmethod
    def from_fields(cls, fields: Fields) -> Self:
        return cls(nonce=fields.hex("nonce", ID_CHARS), mac=fields.hex("mac", MAC_CHARS))

    def to_json(self) -> JsonObject:
        return {"nonce": self.nonce, "mac": self.mac}


@dataclass(frozen=True, slots=True)
class PathState:
    """Which lane carries the calls to one node, why, and how old the evidence for that is."""

    peer: int
    lane: str
    why: str
    age_s: float
    p50_ms: float | None
    p95_ms: float | None

    @classmethod
    def from_fields(cls, fields: Fields) -> Self:
        def number(key: str) -> float | None:
            return fields.number(key, 0.0, 1e9) if fields.raw(key) is not None else None

        return cls(
            peer=fields.integer("peer", 1, _U32),
            lane=fields.text("lane", NAME_CHARS),
            why=fields.text("why", 200),
            age_s=fields.number("age_s", 0.0, 1e9),
            p50_ms=number("p50_ms"),
            p95_ms=number("p95_ms"),
        )

    def to_json(self) -> JsonObject:
        return {
            "peer": self.peer,
            "lane": self.lane,
            "why": self.why,
            "age_s": self.age_s,
            "p50_ms": self.p50_ms,
            "p95_ms": self.p95_ms,
        }


@dataclass(frozen=True, slots=True)
class PathReport(Json):
    """Tell the relay which lanes a backbone uses: for people who ask it, nothing follows from it."""

    TYPE = FrameType.PATH_REPORT
    MAX_CONTAINERS = 100_000
    paths: tuple[PathState, ...]

    @classmethod
    def from_fields(cls, fields: Fields) -> Self:
        return cls(paths=tuple(PathState.from_fields(entry) for entry in fields.objects("paths", MAX_NODES)))

    def to_json(self) -> JsonObject:
        return {"paths": [path.to_json() for path in self.paths]}


type ControlMessage = (
    Hello | Welcome | Offer | Register | Assign | SliceReady | Peers | SliceWanted
    | Ping | Pong | Pause | Drain | Bye | LinkHello | LinkProof | PathReport
)  # fmt: skip

CONTROL_MESSAGES: dict[FrameType, Any] = {
    message.TYPE: message
    for message in (
        Hello,
        Welcome,
        Offer,
        Register,
        Assign,
        SliceReady,
        Peers,
        SliceWanted,
        Ping,
        Pong,
        Pause,
        Drain,
        Bye,
        LinkHello,
        LinkProof,
        PathReport,
    )
}


def _given(**optional: object) -> JsonObject:
    """Keep what says something: a key that came later is left out where it has nothing to say."""
    return {key: value for key, value in optional.items() if value}


def _is_address(text: str) -> bool:
    try:
        ip_address(text)
    except ValueError:
        return False
    return text.isascii() and "%" not in text


def _read_address(fields: Fields, key: str) -> str | None:
    """Read an IP address; None where there is none."""
    if not fields.has(key):
        return None
    value = fields.text(key, MAX_ADDRESS_CHARS)
    if not _is_address(value):
        fields.fail(key, "an IP address")
    return value


def _read_seal(fields: Fields) -> str | None:
    return fields.hex("seal", KEY_CHARS) if fields.has("seal") else None


def _read_lanes(fields: Fields) -> tuple[str, ...]:
    if not fields.has("lanes"):
        return ()
    lanes = fields.array("lanes", MAX_LANES)
    if not all(isinstance(lane, str) and len(lane) <= NAME_CHARS and lane.isascii() for lane in lanes):
        fields.fail("lanes", f"an array of ASCII strings of at most {NAME_CHARS} characters")
    return tuple(lanes)


def _read_experts(fields: Fields, key: str = "experts") -> Experts:
    layers = fields.object(key)
    return {layer: layers.integers(index, 0, MAX_EXPERTS, MAX_EXPERTS) for layer, index in layers.indexed()}


def _write_experts(experts: Experts) -> JsonObject:
    return {str(layer): list(numbers) for layer, numbers in experts.items()}
