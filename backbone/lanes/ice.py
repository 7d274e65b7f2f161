"""Which ICE candidates of the other end are tried: few, and none where no peer can be. Pure."""

from backbone.lanes.direct import SHARED, no_peer, plain_address

# A machine has one host candidate for each of its addresses and one more as STUN sees it: few on a phone,
# more on a server with containers' bridges. Each that is tried costs up to 22 packets.
MAX_CANDIDATES = 16
MAX_PER_ADDRESS = 4  # one socket's ports as seen through several NATs; many ports of one address are a scan


class Candidates:
    """The candidates of one data channel, those of its description and those that come later together."""

    __slots__ = ("_taken",)

    def __init__(self) -> None:
        self._taken: set[tuple[str, str]] = set()  # address, port

    def take(self, candidate: str) -> bool:
        """Tell whether to try this one; names lead nowhere (.local) or cannot be judged."""
        line = candidate.strip("\r\n")
        fields = line.split()
        if len(fields) < 8 or not (line.isascii() and line.isprintable()):  # others split it elsewhere
            return False
        address, port = fields[4], fields[5]
        if special(address) or (address, port) in self._taken:
            return False
        same = sum(taken == address for taken, _ in self._taken)
        if len(self._taken) >= MAX_CANDIDATES or same >= MAX_PER_ADDRESS:
            return False
        self._taken.add((address, port))
        return True

    def of(self, sdp: str) -> str:
        """Take the candidates that are not tried out of a session description."""
        lines = sdp.split("\n")
        return "\n".join(line for line in lines if not line.startswith("a=candidate:") or self.take(line))


def special(address: str) -> bool:
    """Whether no peer can be here: no address, this machine, a link, a group, a provider's own network."""
    try:
        ours = plain_address(address)
        return no_peer(address) is not None or ours.is_loopback or ours in SHARED
    except ValueError:
        return True
