"""
Decide who may come in: connections and sessions by address block, who must make way for whom. Pure.

A block is an IPv4 address or an IPv6 /64: what one customer has. Many honest peers may share one (NAT,
CGNAT), so limits per block are generous: they keep one block from taking everything. What comes by
loopback is this machine's own or its proxy's: the proxy's word for the address counts there, and a connection
without one is not counted.

A connection is *waiting* until it has sent a complete request (or, as a session, its Hello and its offer). It
has a deadline for that, and when all places are taken the one that waits longest, of the block that has most
of them waiting, is given up for the newcomer: who does nothing can keep nobody out.
"""

from collections import OrderedDict
from collections.abc import Hashable, Mapping
from ipaddress import ip_address, ip_network

from relay.bucket import Bucket

STARTS = (20.0, 1000.0)  # sessions of a block, a second and at once: a swarm that comes back is many at once
FLOOD_COSTS = 100.0  # starts that a block loses with each session closed for flooding
MAX_BLOCKS = 20_000  # blocks remembered beyond those that are here


def block_of(address: str) -> str:
    """Name what shares limits with this address; empty where nothing does (unknown, or this machine)."""
    try:
        ip = ip_address(address.partition("%")[0])
    except ValueError:
        return ""
    mapped = getattr(ip, "ipv4_mapped", None)
    ip = mapped or ip
    if ip.is_loopback:
        return ""
    return str(ip) if ip.version == 4 else str(ip_network((int(ip), 64), strict=False))


def address_of(peer: str, headers: Mapping[str, str]) -> str:
    """Say where a request comes from: its connection's other end, or what a proxy on this machine says."""
    if block_of(peer):
        return peer
    said = headers.get("X-Forwarded-For", "") if "X-Forwarded-For" in headers else ""
    return said.rpartition(",")[2].strip() or peer


def ip_of(address: str) -> str | None:
    """Give the IP address of who is at `address`, IPv4 as such; None where it is not known."""
    try:
        ip = ip_address(address.partition("%")[0])
    except ValueError:
        return None
    return str(getattr(ip, "ipv4_mapped", None) or ip)


class Blocks:
    """The sessions of each block."""

    __slots__ = ("_open", "_starts", "max_open")

    def __init__(self, max_open: int) -> None:
        self.max_open = max_open
        self._open: dict[str, int] = {}
        self._starts: OrderedDict[str, Bucket] = OrderedDict()

    def enter(self, block: str, now: float) -> str | None:
        """Count one that comes; give why it may not, in words, or None."""
        if not block:
            return None
        if not self._bucket(block, now).take(now):
            return f"too many new sessions from {block}, or too many of them were closed for flooding"
        count = self._open.get(block, 0)
        if count >= self.max_open:
            return f"{block} has {count} sessions, more are not taken from one address"
        self._open[block] = count + 1
        return None

    def leave(self, block: str) -> None:
        """One that came is gone."""
        left = self._open.get(block, 0) - 1
        if left > 0:
            self._open[block] = left
        else:
            self._open.pop(block, None)

    def flooded(self, block: str, now: float) -> None:
        """A session of this block was closed for what it sent: the block comes back more slowly."""
        if block:
            self._bucket(block, now).spend(now, FLOOD_COSTS)

    def _bucket(self, block: str, now: float) -> Bucket:
        bucket = self._starts.get(block)
        if bucket is None:
            bucket = self._starts[block] = Bucket(*STARTS, now)
            if len(self._starts) > MAX_BLOCKS:
                self._starts.popitem(last=False)
        self._starts.move_to_end(block)
        return bucket


class Waiting[K: Hashable]:
    """Who has not sent a complete request yet, oldest first within each block."""

    __slots__ = ("_blocks", "_due", "_of")

    def __init__(self) -> None:
        self._of: dict[K, str] = {}
        self._due: OrderedDict[K, float] = OrderedDict()
        self._blocks: dict[str, OrderedDict[K, None]] = {}

    def __len__(self) -> int:
        return len(self._of)

    def __contains__(self, key: K) -> bool:
        return key in self._of

    def add(self, key: K, block: str, due: float) -> None:
        """This one shall complete its request until `due`; all have the same patience."""
        self.remove(key)
        self._of[key] = block
        self._due[key] = due
        self._blocks.setdefault(block, OrderedDict())[key] = None

    def remove(self, key: K) -> None:
        """Its request is complete, or it is gone."""
        block = self._of.pop(key, None)
        if block is None:
            return
        del self._due[key]
        of_block = self._blocks[block]
        del of_block[key]
        if not of_block:
            del self._blocks[block]

    def overdue(self, now: float) -> list[K]:
        """Those whose time is up; they count as removed."""
        found = []
        for key, due in self._due.items():
            if now < due:
                break
            found.append(key)
        for key in found:
            self.remove(key)
        return found

    def victim(self) -> K | None:
        """Whose place a newcomer gets: it counts as removed. None when nobody waits."""
        if not self._blocks:
            return None
        largest = max(self._blocks.values(), key=len)
        key = next(iter(largest))
        self.remove(key)
        return key
