"""
STUN: say to a datagram's sender where it came from (RFC 8489 Binding; RFC 5780 for NAT behaviour). Pure.

A request is header and attributes, each attribute a type, a length and a value padded to four bytes:

    | type 2 | length 2 | magic cookie 4 | transaction id 12 |      | type 2 | length 2 | value … |

Attribute types below 0x8000 must be understood: what is not is refused with error 420 and its list. Anything
that is no request of ours gets no answer at all, since an answer to a forged sender is an attack on it; for
the same reason a reply is never more than MAX_GROWTH times what came, and each source has a budget.

    reply = server.receive_datagram(data, source, local, now)      # a Reply to send, or None
"""

import ipaddress
import struct
import zlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

type Address = tuple[str, int]  # IP address as text, UDP port

MAGIC_COOKIE = 0x2112A442  # RFC 8489 §5
HEADER = struct.Struct("!HHI12s")
FINGERPRINT_XOR = 0x5354554E  # RFC 8489 §14.7: "STUN"
MAX_DATAGRAM_BYTES = 2048  # RFC 5780 clients ask with 1500 bytes of padding; more is not read
SOFTWARE = "expertswarm"

MAX_GROWTH = 2.0  # reply over request, both with their IP and UDP headers
RATE_PER_S, BURST = 100.0, 200.0  # per address; many phones share the address of one carrier's NAT
PORT_RATE_PER_S, PORT_BURST = (
    4.0,
    40.0,
)  # per socket: one that floods leaves its address's share to others
MAX_SOURCES = 16_384  # remembered at once, those seen longest ago are forgotten first


class Kind(IntEnum):
    """Class and method of a message; only Binding exists here."""

    REQUEST = 0x0001
    INDICATION = 0x0011
    SUCCESS = 0x0101
    ERROR = 0x0111


class Attribute(IntEnum):
    """The attributes that we write, read or may ignore although they must be understood."""

    MAPPED_ADDRESS = 0x0001
    CHANGE_REQUEST = 0x0003
    USERNAME = 0x0006
    MESSAGE_INTEGRITY = 0x0008
    ERROR_CODE = 0x0009
    UNKNOWN_ATTRIBUTES = 0x000A
    REALM = 0x0014
    NONCE = 0x0015
    MESSAGE_INTEGRITY_SHA256 = 0x001C
    PASSWORD_ALGORITHM = 0x001D
    USERHASH = 0x001E
    XOR_MAPPED_ADDRESS = 0x0020
    RESPONSE_PORT = 0x0027
    SOFTWARE = 0x8022
    FINGERPRINT = 0x8028
    RESPONSE_ORIGIN = 0x802B
    OTHER_ADDRESS = 0x802C


CHANGE_IP, CHANGE_PORT = 0x4, 0x2  # RFC 5780 §7.2


@dataclass(frozen=True, slots=True)
class Message:
    """One STUN message, checked: lengths fit, the fingerprint (if any) is right and last."""

    kind: Kind
    transaction_id: bytes
    attributes: tuple[tuple[int, bytes], ...] = ()

    def get(self, wanted: Attribute) -> bytes | None:
        """Return the first attribute of this type; RFC 8489 §14: later ones are ignored."""
        return next((value for kind, value in self.attributes if kind == wanted), None)

    @property
    def mapped(self) -> Address | None:
        """Where the request came from, as its receiver saw it."""
        value = self.get(Attribute.XOR_MAPPED_ADDRESS)
        if value is not None:
            return _read_address(value, self.transaction_id)
        value = self.get(Attribute.MAPPED_ADDRESS)
        return None if value is None else _read_address(value)

    @property
    def other(self) -> Address | None:
        """The server's other address and port, RFC 5780 §7.4."""
        value = self.get(Attribute.OTHER_ADDRESS)
        return None if value is None else _read_address(value)

    @property
    def error_code(self) -> int | None:
        value = self.get(Attribute.ERROR_CODE)
        return None if value is None or len(value) < 4 else (value[2] & 7) * 100 + value[3]

    def encode(self) -> bytes:
        """Return the bytes, FINGERPRINT last."""
        body = b"".join(_attribute(kind, value) for kind, value in self.attributes)
        head = HEADER.pack(self.kind, len(body) + 8, MAGIC_COOKIE, self.transaction_id)
        crc = zlib.crc32(head + body) ^ FINGERPRINT_XOR
        return head + body + _attribute(Attribute.FINGERPRINT, struct.pack("!I", crc))


def decode(data: bytes) -> Message | None:
    """Read a Binding message; None for everything else: it is dropped silently, RFC 8489 §6.3."""
    if not HEADER.size <= len(data) <= MAX_DATAGRAM_BYTES:
        return None
    kind, length, cookie, transaction_id = HEADER.unpack_from(data)
    if cookie != MAGIC_COOKIE or kind not in Kind or length != len(data) - HEADER.size or length % 4:
        return None
    attributes = []
    at = HEADER.size
    while at < len(data):
        attribute, size = struct.unpack_from("!HH", data, at)
        end = at + 4 + size
        if end > len(data):
            return None
        value = data[at + 4 : end]
        after = end + -size % 4
        if attribute == Attribute.FINGERPRINT:
            crc = zlib.crc32(data[:at]) ^ FINGERPRINT_XOR
            if value != struct.pack("!I", crc) or after != len(data):
                return None
        else:
            attributes.append((attribute, value))
        at = after
    return Message(Kind(kind), transaction_id, tuple(attributes))


def binding_request(transaction_id: bytes, change: int = 0) -> bytes:
    """Ask where we are seen; `change`: CHANGE_IP, CHANGE_PORT, or both: answer from there instead."""
    attributes = [(int(Attribute.SOFTWARE), SOFTWARE.encode())]
    if change:
        attributes.append((Attribute.CHANGE_REQUEST, struct.pack("!I", change)))
    return Message(Kind.REQUEST, transaction_id, tuple(attributes)).encode()


@dataclass(frozen=True, slots=True)
class Reply:
    """What to send: to `destination`, from our address `origin` (the socket bound there)."""

    data: bytes
    origin: Address
    destination: Address
    outcome: str  # the label in the metrics: answered, changed, refused


class Server:
    """
    Answers Binding requests.

    ports: the port, and the alternate one if there is one. addresses: two local addresses when NAT behaviour
    is to be told completely (RFC 5780), else empty. CHANGE-REQUEST is answered as far as ports and addresses
    go and refused (420) beyond; OTHER-ADDRESS is said only where both can be changed, RFC 5780 §6.1.
    """

    def __init__(self, ports: Sequence[int], addresses: Sequence[str] = (), software: str = SOFTWARE) -> None:
        self._ports = tuple(ports)
        self._addresses = tuple(addresses)
        self._software = software.encode()
        self._budget = Budget(RATE_PER_S, BURST, MAX_SOURCES)
        self._of_port = Budget(PORT_RATE_PER_S, PORT_BURST, MAX_SOURCES)
        self.limited = 0
        self.ignored = 0

    def receive_datagram(self, data: bytes, source: Address, local: Address, now: float) -> Reply | None:
        """Answer a datagram that came from `source` to our address `local`, or do not."""
        message = decode(data)
        if message is None or message.kind is not Kind.REQUEST or not _may_be_answered(source):
            self.ignored += 1
            return None
        network = _network(source[0])
        if not self._of_port.take(f"{network} {source[1]}", now) or not self._budget.take(network, now):
            self.limited += 1
            return None
        seen = source
        unknown = [kind for kind, _ in message.attributes if kind < 0x8000 and kind not in _UNDERSTOOD]
        port = message.get(Attribute.RESPONSE_PORT)
        if (
            port is not None and len(port) >= 2 and not unknown
        ):  # RFC 5780 §7.5: another port of the same asker
            source = source[0], struct.unpack_from("!H", port)[0] or source[1]
        change = message.get(Attribute.CHANGE_REQUEST)
        flags = 0
        if change is not None and not unknown:
            flags = struct.unpack("!I", change)[0] if len(change) == 4 else CHANGE_IP | CHANGE_PORT
        origin = self._changed(local, flags)
        if unknown or origin is None:
            unknown = unknown or [Attribute.CHANGE_REQUEST]
            return self._send(message, data, _refusal(unknown), local, source, "refused")
        attributes = [
            (Attribute.XOR_MAPPED_ADDRESS, _write_address(seen, message.transaction_id)),
            (Attribute.RESPONSE_ORIGIN, _write_address(origin)),
        ]
        other = self._changed(local, CHANGE_IP | CHANGE_PORT)
        if other is not None:
            attributes.append((Attribute.OTHER_ADDRESS, _write_address(other)))
        attributes.append((Attribute.SOFTWARE, self._software))
        return self._send(message, data, attributes, origin, source, "changed" if flags else "answered")

    def _changed(self, local: Address, flags: int) -> Address | None:
        """Our address after a change of IP, port or both; None if we have no other."""
        address, port = local
        if flags & CHANGE_IP:
            if len(self._addresses) != 2 or address not in self._addresses:
                return None
            address = self._addresses[1 - self._addresses.index(address)]
        if flags & CHANGE_PORT:
            if len(self._ports) != 2 or port not in self._ports:
                return None
            port = self._ports[1 - self._ports.index(port)]
        return address, port

    def _send(
        self,
        request: Message,
        data: bytes,
        attributes: list[tuple[Attribute, bytes]],
        origin: Address,
        destination: Address,
        outcome: str,
    ) -> Reply:
        """Fit the reply: the attributes at the end of the list are left out when it would grow too much."""
        kind = Kind.ERROR if outcome == "refused" else Kind.SUCCESS
        overhead = 48 if ":" in destination[0] else 28  # IP and UDP headers
        room = MAX_GROWTH * (len(data) + overhead) - overhead
        while True:
            reply = Message(kind, request.transaction_id, tuple(attributes)).encode()
            if len(reply) <= room or len(attributes) == 1:
                return Reply(reply, origin, destination, outcome)
            attributes = attributes[:-1]


class Budget:
    """A token bucket per source, in bounded memory."""

    def __init__(self, rate_per_s: float, burst: float, max_sources: int) -> None:
        self._rate_per_s = rate_per_s
        self._burst = burst
        self._max_sources = max_sources
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()  # source -> tokens, when counted

    def __len__(self) -> int:
        return len(self._left)

    def take(self, source: str, now: float) -> bool:
        """Spend one token of this source; False when it has none."""
        tokens, counted = self._left.pop(source, (self._burst, now))
        tokens = min(self._burst, tokens + max(0.0, now - counted) * self._rate_per_s)
        allowed = tokens >= 1
        self._left[source] = (tokens - 1 if allowed else tokens, now)
        if len(self._left) > self._max_sources:
            self._left.popitem(last=False)
        return allowed


class Transaction:
    """
    The client's side of one request: what to send when, and whether a datagram is its answer.

    RFC 8489 §6.2.1: an answer is late after a time-out, and each wait doubles. Until a round trip to that
    server is known (`round_trip`) the first wait is RTO_S; then twice the round trip, within RTO_RANGE_S. The
    sends are as many as tell a lost answer from one that a filter keeps back: where each twentieth packet is
    lost either way, one verdict in ten thousand is wrong, and they are spread over most of a second.
    """

    RTO_S = 0.25
    RTO_RANGE_S = (0.1, 0.5)
    SENDS = 4  # with 0.1 s at 0, 0.1, 0.3, 0.7 s and given up at 0.9 s

    __slots__ = ("request", "transaction_id", "answer", "_rto_s", "_sent", "_sent_at")

    def __init__(self, transaction_id: bytes, now: float, change: int = 0) -> None:
        self.transaction_id = transaction_id
        self.request = binding_request(transaction_id, change)
        self.answer: Message | None = None
        self._rto_s = self.RTO_S
        self._sent = 0
        self._sent_at = now

    def receive_datagram(self, data: bytes) -> bool:
        """True if this was the answer."""
        message = decode(data)
        if message is None or message.transaction_id != self.transaction_id:
            return False
        if message.kind not in (Kind.SUCCESS, Kind.ERROR):
            return False
        self.answer = self.answer or message
        return True

    def round_trip(self, took_s: float) -> None:
        """Another request to this server was answered after so long; moves `next_timer`."""
        least_s, most_s = self.RTO_RANGE_S
        self._rto_s = min(most_s, max(least_s, 2.0 * took_s))

    @property
    def over(self) -> bool:
        """Answered or given up."""
        return self.answer is not None or (self._sent > self.SENDS)

    def next_timer(self) -> float | None:
        if self.over:
            return None
        if self._sent == 0:
            return self._sent_at
        doublings = self._sent - 1 if self._sent < self.SENDS else 1
        return self._sent_at + self._rto_s * 2.0**doublings

    def handle_timer(self, now: float) -> bytes | None:
        """Return the request if it must be sent (again) now."""
        due = self.next_timer()
        if due is None or now < due:
            return None
        self._sent += 1
        self._sent_at = now
        return self.request if self._sent <= self.SENDS else None


_UNDERSTOOD = frozenset(kind for kind in Attribute if kind < 0x8000)


def _attribute(kind: int, value: bytes) -> bytes:
    return struct.pack("!HH", kind, len(value)) + value + bytes(-len(value) % 4)


def _refusal(unknown: Sequence[int]) -> list[tuple[Attribute, bytes]]:
    listed = sorted(set(unknown))[:8]
    reason = struct.pack("!HBB", 0, 4, 20) + b"Unknown"  # short: the list must fit too
    return [
        (Attribute.ERROR_CODE, reason),
        (Attribute.UNKNOWN_ATTRIBUTES, struct.pack(f"!{len(listed)}H", *listed)),
    ]


def _write_address(address: Address, transaction_id: bytes | None = None) -> bytes:
    """Encode MAPPED-ADDRESS, or XOR-MAPPED-ADDRESS when a transaction id is given, RFC 8489 §14.1, §14.2."""
    ip = ipaddress.ip_address(address[0].partition("%")[0])
    port, raw = address[1], ip.packed
    if transaction_id is not None:
        mask = struct.pack("!I", MAGIC_COOKIE) + transaction_id
        port ^= MAGIC_COOKIE >> 16
        raw = bytes(a ^ b for a, b in zip(raw, mask, strict=False))
    return struct.pack("!BBH", 0, 1 if ip.version == 4 else 2, port) + raw


def _read_address(value: bytes, transaction_id: bytes | None = None) -> Address | None:
    if len(value) < 4:
        return None
    _, family, port = struct.unpack_from("!BBH", value)
    raw = value[4:]
    if len(raw) != {1: 4, 2: 16}.get(family):
        return None
    if transaction_id is not None:
        mask = struct.pack("!I", MAGIC_COOKIE) + transaction_id
        port ^= MAGIC_COOKIE >> 16
        raw = bytes(a ^ b for a, b in zip(raw, mask, strict=False))
    return str(ipaddress.ip_address(raw)), port


def _may_be_answered(source: Address) -> bool:
    """No answers to addresses that cannot be one peer's."""
    try:
        ip = ipaddress.ip_address(source[0].partition("%")[0])
    except ValueError:
        return False
    return source[1] != 0 and not ip.is_multicast and not ip.is_unspecified and str(ip) != "255.255.255.255"


def _network(address: str) -> str:
    """What shares a budget: an IPv4 address, or an IPv6 /64 (one customer has all of it)."""
    if ":" not in address:
        return address
    return str(ipaddress.ip_network((address.partition("%")[0], 64), strict=False))
