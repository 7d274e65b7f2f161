"""
Answer STUN on UDP: the driver around stun.Server.

An answer must leave from the very address that was asked, or the NAT in front of the asker drops it. A socket
bound to all addresses leaves that to the routing table; so we ask the kernel with each datagram where it came
to (IP_PKTINFO) and tell it with each answer where to leave from.
"""

import asyncio
import contextlib
import logging
import socket
import struct
from ipaddress import ip_address
from time import monotonic

from relay.config import Config
from relay.metrics import Metrics
from relay.nat.stun import MAX_DATAGRAM_BYTES, Address, Reply, Server

log = logging.getLogger(__name__)

READ_AT_ONCE = 64  # datagrams in one turn of the loop: calls of the swarm come first
_PKTINFO: int | None = getattr(socket, "IP_PKTINFO", None)  # not on Windows and macOS with this name
_ANCILLARY_BYTES = socket.CMSG_SPACE(20) if hasattr(socket, "CMSG_SPACE") else 0


class StunEndpoint:
    """
    STUN on the relay's UDP ports while it is started.

    `why_off` says why there is none: switched off, or a port that could not be had (the relay works without;
    its peers then learn their public addresses from nobody).
    """

    def __init__(self, config: Config, metrics: Metrics) -> None:
        self._config = config
        self._metrics = metrics
        self._sockets: dict[Address, socket.socket] = {}
        self._server: Server | None = None
        self.ports: tuple[int, ...] = ()
        self.why_off = "not started"
        self.address: str | None = None  # host:port of the relay as its settings name it

    def start(self) -> None:
        """Open the sockets. Does not raise when it cannot: it warns and stays off."""
        config = self._config
        if config.stun_port == 0:
            self.why_off = "switched off (stun_port is 0)"
            return
        self.ports = (config.stun_port, config.stun_alt_port) if config.stun_alt_port else (config.stun_port,)
        addresses = config.stun_address_pair
        try:
            for address in addresses or (config.host,):
                for port in self.ports:
                    self._sockets[address, port] = _bound(address, port)
        except OSError as exc:
            self.stop()
            self.why_off = f"UDP {address}:{port}: {exc.strerror or exc}"
            log.warning("no STUN: %s", self.why_off)
            return
        self._server = Server(self.ports, addresses)
        self.why_off = ""
        loop = asyncio.get_running_loop()
        for bound, each in self._sockets.items():
            loop.add_reader(each.fileno(), self._readable, each, bound)

    def stop(self) -> None:
        """Close the sockets."""
        for each in self._sockets.values():
            with contextlib.suppress(RuntimeError):  # no loop runs: nothing was added
                asyncio.get_running_loop().remove_reader(each.fileno())
            each.close()
        self._sockets.clear()
        self.ports = ()
        self._server = None
        self.why_off = "stopped"

    def told(self, reached_at: str) -> str | None:
        """
        Give the host:port that a peer is told, whose session came to this address of ours; None: no STUN.

        Settings that name an address decide. A relay that listens on all addresses cannot know which of
        them a peer reaches; the peer's session has shown it, unless a proxy on this machine stands between.
        """
        if self.why_off:
            return None
        config, plain = self._config, _plain(reached_at.partition("%")[0])
        named = config.public_url is not None or config.stun_addresses is not None
        if named or config.host not in ("0.0.0.0", "::", "") or not plain or ip_address(plain).is_loopback:
            return self.address
        return f"[{plain}]:{config.stun_port}" if ":" in plain else f"{plain}:{config.stun_port}"

    def status(self) -> dict[str, object]:
        """For the status page."""
        return {"ports": list(self.ports), "why_off": self.why_off}

    def _readable(self, each: socket.socket, bound: Address) -> None:
        server = self._server
        assert server is not None
        before = server.ignored, server.limited
        for _ in range(READ_AT_ONCE):
            try:
                data, ancillary, _flags, source = each.recvmsg(MAX_DATAGRAM_BYTES + 1, _ANCILLARY_BYTES)
            except BlockingIOError:
                break
            except OSError:
                continue  # an ICMP error for an earlier answer
            local = (_destination(ancillary) or bound[0], bound[1])
            reply = server.receive_datagram(data, (_plain(source[0]), source[1]), local, monotonic())
            if reply is not None:
                self._metrics.stun.labels(reply.outcome).inc()
                self._answer(reply, bound, each, (source[0], reply.destination[1], *source[2:]))
        self._metrics.stun.labels("ignored").inc(server.ignored - before[0])
        self._metrics.stun.labels("limited").inc(server.limited - before[1])

    def _answer(self, reply: Reply, bound: Address, asked: socket.socket, to: tuple[object, ...]) -> None:
        """Send from `reply.origin`: the socket of its port; its address, where that has all."""
        origin = reply.origin
        sender = self._sockets.get(origin) or self._sockets.get((bound[0], origin[1])) or asked
        ancillary = []
        if origin[0] != bound[0] and _PKTINFO is not None:
            ancillary = [_leave_from(origin[0], sender.family)]
        with contextlib.suppress(OSError):  # a full buffer or no route: UDP may lose it, the asker repeats
            sender.sendmsg([reply.data], ancillary, 0, to)


def _bound(address: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    made = socket.socket(family, socket.SOCK_DGRAM)
    try:
        made.setblocking(False)
        made.bind((address, port))
        if _PKTINFO is not None:
            if family == socket.AF_INET:
                made.setsockopt(socket.IPPROTO_IP, _PKTINFO, 1)
            else:
                made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_RECVPKTINFO, 1)
    except BaseException:
        made.close()
        raise
    return made


def _destination(ancillary: list[tuple[int, int, bytes]]) -> str | None:
    """Read where a datagram came to."""
    for level, kind, data in ancillary:
        if level == socket.IPPROTO_IP and kind == _PKTINFO and len(data) >= 12:
            return socket.inet_ntop(socket.AF_INET, data[8:12])  # struct in_pktinfo: index, local, address
        if level == socket.IPPROTO_IPV6 and kind == socket.IPV6_PKTINFO and len(data) >= 16:
            return _plain(socket.inet_ntop(socket.AF_INET6, data[:16]))
    return None


def _leave_from(address: str, family: int) -> tuple[int, int, bytes]:
    if family == socket.AF_INET:
        assert _PKTINFO is not None
        packed = struct.pack("@i4s4s", 0, socket.inet_aton(address), bytes(4))
        return socket.IPPROTO_IP, _PKTINFO, packed
    address = address if ":" in address else f"::ffff:{address}"
    packed = socket.inet_pton(socket.AF_INET6, address) + bytes(4)
    return socket.IPPROTO_IPV6, socket.IPV6_PKTINFO, packed


def _plain(address: str) -> str:
    """An IPv4 address as such, also where a socket for both families wraps it."""
    return address.removeprefix("::ffff:") if "." in address else address
