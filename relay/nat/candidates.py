"""
How a peer's NAT behaves, in the words of RFC 4787, and which pairs need not try a direct path. Pure.

*Mapping*: does one local socket keep one public port towards everybody (endpoint-independent: an easy NAT),
or another one per remote address or port (a hard NAT)? *Filtering*: who may send to that public port:
everybody, addresses that were sent to, or only the very address and port that was sent to?

A packet of the punch gets through if the receiver's filter lets it pass, given what the receiver has sent to
before; and both directions must work in the end. `hopeless` goes through that for both sides.
"""

from dataclasses import dataclass, field, replace
from enum import Enum
from ipaddress import ip_address
from typing import Any, Self

from relay.nat.stun import Address


class Behaviour(Enum):
    """RFC 4787 §4.1 (mapping), §5 (filtering)."""

    ENDPOINT_INDEPENDENT = "endpoint-independent"
    ADDRESS_DEPENDENT = "address-dependent"
    ADDRESS_AND_PORT_DEPENDENT = "address-and-port-dependent"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Observation:
    """
    What one peer's STUN requests gave.

    local: the asking socket's own address. mapped: how it was seen by the server's first address and port;
    None: no answer, so no UDP. mapped_other_port, mapped_other_address: the same socket as seen by the
    others; None: not asked or not answered. answered_from_*: a fresh socket that asked the first address and
    port only was answered from another; None: the server has no other. waiting: names of the fields above
    that may still change; empty when all is said.
    """

    local: Address
    mapped: Address | None
    mapped_other_port: Address | None = None
    mapped_other_address: Address | None = None
    answered_from_other_address: bool | None = None
    answered_from_other_port: bool | None = None
    waiting: frozenset[str] = field(default=frozenset())


@dataclass(frozen=True, slots=True)
class NatClass:
    """udp: STUN was answered. translated: what is seen is not the local address. public_ip: as seen."""

    udp: bool
    translated: bool
    mapping: Behaviour
    filtering: Behaviour
    public_ip: str | None = None

    @property
    def words(self) -> str:
        """For people."""
        if not self.udp:
            return "no UDP"
        if not self.translated:
            open_to_all = self.filtering in (Behaviour.ENDPOINT_INDEPENDENT, Behaviour.UNKNOWN)
            return "no NAT" if open_to_all else f"no NAT, {self.filtering.value} filtering"
        kind = {Behaviour.ENDPOINT_INDEPENDENT: "easy NAT", Behaviour.UNKNOWN: "NAT"}.get(
            self.mapping, "hard NAT"
        )
        return f"{kind} ({self.mapping.value} mapping, {self.filtering.value} filtering)"

    def to_json(self) -> dict[str, object]:
        return {
            "udp": self.udp,
            "translated": self.translated,
            "mapping": self.mapping.value,
            "filtering": self.filtering.value,
            "public_ip": self.public_ip,
        }

    @classmethod
    def from_json(cls, given: object) -> Self | None:
        """Read what a peer says of itself; None for anything that `to_json` does not write."""
        match given:
            case {
                "udp": bool(udp),
                "translated": bool(translated),
                "mapping": str(mapping),
                "filtering": str(filtering),
                "public_ip": None | str() as public_ip,
            }:
                try:
                    ip = None if public_ip is None else str(ip_address(public_ip))
                    return cls(udp, translated, Behaviour(mapping), Behaviour(filtering), ip)
                except ValueError:
                    return None
        return None


NO_UDP = NatClass(False, False, Behaviour.UNKNOWN, Behaviour.UNKNOWN)


def nat_class(seen: Observation) -> NatClass:
    """
    Say what the observations mean.

    With one server address, "another port than to the second port" shows address-and-port-dependent mapping
    and filtering; their absence is taken for endpoint-independent: what lies between is rare, and assuming
    the better only costs one try.
    """
    if seen.mapped is None:
        return NO_UDP
    if seen.mapped_other_port is None and seen.mapped_other_address is None:
        mapping = Behaviour.UNKNOWN
    elif seen.mapped_other_port not in (None, seen.mapped):
        mapping = Behaviour.ADDRESS_AND_PORT_DEPENDENT
    elif seen.mapped_other_address not in (None, seen.mapped):
        mapping = Behaviour.ADDRESS_DEPENDENT
    else:
        mapping = Behaviour.ENDPOINT_INDEPENDENT
    match seen.answered_from_other_address, seen.answered_from_other_port:
        case True, _:
            filtering = Behaviour.ENDPOINT_INDEPENDENT
        case False, True:
            filtering = Behaviour.ADDRESS_DEPENDENT
        case None, True:
            filtering = Behaviour.ENDPOINT_INDEPENDENT
        case _, False:
            filtering = Behaviour.ADDRESS_AND_PORT_DEPENDENT
        case _:
            filtering = Behaviour.UNKNOWN
    return NatClass(True, seen.mapped[0] != seen.local[0], mapping, filtering, seen.mapped[0])


STRICTEST = NatClass(True, True, Behaviour.ADDRESS_AND_PORT_DEPENDENT, Behaviour.ADDRESS_AND_PORT_DEPENDENT)


def strictest_class(seen: Observation) -> NatClass:
    """
    Say the worst that can still come of observations that are not complete.

    A pair that is not hopeless with this class is not hopeless, whatever the missing answers say: nobody has
    to wait for an answer that a strict filter keeps back, which is known only after several times-out.
    """
    if seen.mapped is None:
        return STRICTEST if seen.waiting else nat_class(seen)
    elsewhere = ("", 0)  # as if seen from another place
    worst = {
        "mapped_other_port": elsewhere,
        "mapped_other_address": elsewhere,
        "answered_from_other_address": False,
        "answered_from_other_port": False,
    }
    missing: dict[str, Any] = {name: worst[name] for name in seen.waiting & worst.keys()}
    return nat_class(replace(seen, **missing, waiting=frozenset()))


def hopeless(a: NatClass | None, b: NatClass | None) -> bool:
    """
    True if a direct UDP path between the two need not be tried.

    Peers behind one public address may share a network, where no NAT is in the way: always tried. What is not
    known (None, UNKNOWN) counts as the friendlier behaviour: a try costs little, and it is only made once.
    """
    if a is None or b is None:
        return False
    if a.public_ip is not None and a.public_ip == b.public_ip:
        return False
    if not (a.udp and b.udp):
        return True
    return not (_opens(a, b) or _opens(b, a))


def _opens(sender: NatClass, receiver: NatClass) -> bool:
    """Both send to the address the other was seen at: does `sender`'s packet arrive, and the answer to it?"""
    match receiver.filtering:
        case Behaviour.ADDRESS_AND_PORT_DEPENDENT:
            # It sent from the port it was seen at, to the port the sender really uses, only if both are easy.
            arrives = _easy(receiver) and _easy(sender)
        case Behaviour.ADDRESS_DEPENDENT:
            arrives = _easy(receiver)  # a hard one opened another port than the one it was seen at
        case _:
            arrives = True
    # The answer of a hard NAT leaves from another port than the one the sender sent to.
    return arrives and (_easy(receiver) or sender.filtering is not Behaviour.ADDRESS_AND_PORT_DEPENDENT)


def _easy(peer: NatClass) -> bool:
    return peer.mapping in (Behaviour.ENDPOINT_INDEPENDENT, Behaviour.UNKNOWN)
