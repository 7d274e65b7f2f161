"""
The direct lane: a plain WebSocket between node and backbone, for those who can be reached.

Either end may listen. A certificate is trusted by its fingerprint, which travelled through the relay, or by
the system's authorities. What others announce is not dialled blindly: see `Bounds`.
"""

import asyncio
import hashlib
import ipaddress
import logging
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Self, cast
from urllib.parse import urlsplit

from websockets.http11 import Request
from websockets.server import ServerProtocol

from backbone.errors import ConfigError
from backbone.lanes.link import Link
from backbone.node.socket import ClientSocket, keep_short, tune
from relay.program.ports import cannot_listen
from relay.wire.frames import MAX_MESSAGE_BYTES
from relay.wire.link import LINK_PATH

log = logging.getLogger(__name__)

BACKLOG = 1024
THIS_NETWORK = ipaddress.ip_network("0.0.0.0/8")  # RFC 791: on many systems this machine
SHARED = ipaddress.ip_network("100.64.0.0/10")  # RFC 6598: behind a provider's NAT, a cloud's own services
MAX_STRANGERS = 64  # sockets that have not proved to know a key


def fingerprint_of(certificate: Path) -> str:
    """Give the SHA-256 of a PEM file's first certificate."""
    pem = certificate.read_text("ascii")
    end = "-----END CERTIFICATE-----"
    first = pem[pem.index("-----BEGIN CERTIFICATE-----") : pem.index(end) + len(end)]
    return hashlib.sha256(ssl.PEM_cert_to_DER_cert(first)).hexdigest()


@dataclass(frozen=True, slots=True)
class ListenAt:
    """
    Where to listen for links. public_url: how others reach it (default: by host and port, when the host is an
    address others can use). certificate, key: PEM files; with them the link is TLS.
    """

    host: str
    port: int
    public_url: str | None = None
    certificate: Path | None = None
    key: Path | None = None

    @classmethod
    def of(
        cls,
        address: tuple[str, int] | None,
        public_url: str | None,
        certificate: Path | None,
        key: Path | None,
    ) -> Self | None:
        """
        Put a command line's values together; None: nobody shall dial us.

        Raises:
            ConfigError: they do not belong together, or the certificate cannot be used.
        """
        if address is None:
            given = {"--public-url": public_url, "--tls-cert": certificate, "--tls-key": key}
            idle = [option for option, value in given.items() if value is not None]
            if idle:
                raise ConfigError(f"{idle[0]} is of use with --listen HOST:PORT only, which is not given")
            return None
        host, port = address
        if public_url is None and host in ("0.0.0.0", "::"):
            raise ConfigError(f"--listen {host}:{port} is no address others can use: add --public-url")
        if public_url is not None:
            try:
                link_url(public_url)
            except ValueError as exc:
                raise ConfigError(
                    f"--public-url {public_url}: only wss://HOST:PORT, links have one path"
                ) from exc
        if certificate is None and key is not None:
            raise ConfigError("--tls-key is of use with --tls-cert only, which is not given")
        if certificate is not None:
            tls_context(certificate, key)
            if public_url is not None and urlsplit(public_url).scheme in ("ws", "http"):
                raise ConfigError(f"--public-url {public_url} is not encrypted, --tls-cert is given: wss://…")
        return cls(host, port, public_url, certificate, key)


def tls_context(certificate: Path, key: Path | None) -> ssl.SSLContext:
    """
    Load a certificate and its key.

    Raises:
        ConfigError: a file is missing or holds something else, or the two do not belong together.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        fingerprint_of(certificate)
        context.load_cert_chain(certificate, key, password=lambda: "")  # or it would ask the terminal
    except ssl.SSLError as exc:
        pair = f"{certificate} and {key}" if key else str(certificate)
        why = exc.reason or str(exc)
        raise ConfigError(f"{pair}: no certificate with its unencrypted key (PEM): {why}") from exc
    except OSError as exc:
        raise ConfigError(f"{exc.filename or certificate}: {exc.strerror}") from exc
    except ValueError as exc:
        raise ConfigError(f"{certificate}: no certificate (PEM) in it") from exc
    return context


def link_url(url: str) -> str:
    """
    Turn the announced URL (ws, wss, http, https) into the one to dial.

    Raises:
        ValueError: it is no such URL.
    """
    parts = urlsplit(url)
    scheme = {"ws": "ws", "wss": "wss", "http": "ws", "https": "wss"}.get(parts.scheme)
    odd = parts.username is not None or parts.password is not None or parts.query or parts.fragment
    if scheme is None or not parts.hostname or odd or parts.path not in ("", "/", LINK_PATH):
        raise ValueError(f"{url[:80]!r} is no URL to dial")
    return f"{scheme}://{parts.netloc}{LINK_PATH}"


def plain_address(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Read an address; one of IPv4 that is written as IPv6 is what it leads to."""
    found = ipaddress.ip_address(address)
    return getattr(found, "ipv4_mapped", None) or found


def no_peer(address: str) -> str | None:
    """Say why no peer of ours can have this address, whatever anybody allows, or None."""
    ours = plain_address(address)
    if ours.is_loopback:  # ::1 counts as reserved, too
        return None
    if (
        ours.is_unspecified
        or ours in THIS_NETWORK
        or ours.is_multicast
        or ours.is_link_local
        or ours.is_reserved
    ):
        return f"{address} is no address of a peer"
    return None


def refusal(address: str, relay_address: str) -> str | None:
    """
    Say why an address that a peer announced is not dialled, or None.

    Peers are strangers: none may make us talk to our own machine, to our local network or to a cloud's
    metadata service, unless the swarm itself lives there, as the relay's address shows.
    """
    ours, relay = plain_address(address), plain_address(relay_address)
    if (why := no_peer(address)) is not None:
        return why
    if ours.is_loopback and not relay.is_loopback:
        return f"{address} is this machine"
    if ours in SHARED and relay not in SHARED:
        return f"{address} is in a provider's network"
    if ours.is_private and not ours.is_loopback and not (relay.is_private or relay.is_loopback):
        return f"{address} is in a private network"
    return None


@dataclass(frozen=True, slots=True)
class Bounds:
    """
    What may be dialled for somebody who announces a URL through the relay at `relay_url`.

    proved: only where the relay saw that peer come from, `seen`. trusted: the operator vouches for all peers.
    """

    relay_url: str
    seen: str | None = None
    proved: bool = False
    trusted: bool = False

    def refusal(self, address: str, relay_address: str) -> str | None:
        """Say why this address is not dialled, or None."""
        if self.trusted:
            return no_peer(address)
        if self.proved and not self._proved(address, relay_address):
            return f"{address} is not where the relay saw that node ({self.seen})"
        return refusal(address, relay_address)

    def _proved(self, address: str, relay_address: str) -> bool:
        """Whether it is where the peer was seen. Who was seen on loopback is on the relay's machine."""
        if self.seen is None:
            return False
        ours, relay, seen = plain_address(address), plain_address(relay_address), plain_address(self.seen)
        if not seen.is_loopback:
            return ours == seen
        return ours == relay or (relay.is_loopback and ours.is_private)


async def dial(url: str, link: Link, fingerprint: str | None, bounds: Bounds | None) -> None:
    """
    Open a WebSocket for a link; the link learns of success and failure.

    bounds: None for a URL that we know ourselves.
    """
    try:
        target = link_url(url)
        host = None if bounds is None else await _allowed(target, bounds)
    except (ValueError, OSError) as exc:
        log.info("%.80s is not dialled: %s", url, exc)
        link.ended(0, str(exc))
        return
    made = ClientSocket(target, link.opened, link.received, link.ended, host=host, fingerprint=fingerprint)
    link.transport = made
    made.open()


async def _allowed(target: str, bounds: Bounds) -> str:
    """Resolve the host once, and give the first of its addresses that may be dialled."""
    loop = asyncio.get_running_loop()
    ours, relay = urlsplit(target), urlsplit(bounds.relay_url)
    found = await loop.getaddrinfo(ours.hostname, ours.port or 443, type=socket.SOCK_STREAM)
    relays = await loop.getaddrinfo(relay.hostname, relay.port or 443, type=socket.SOCK_STREAM)
    why = None
    for address in dict.fromkeys(str(at[4][0]) for at in found):
        refused = bounds.refusal(address, str(relays[0][4][0]))
        if refused is None:
            return address
        why = why or refused
    raise ValueError(why or f"{ours.hostname} has no address")


class AcceptedSocket(ClientSocket):
    """The accepting end of a link's WebSocket; same callbacks as the dialling end."""

    def __init__(self, link: Link, on_gone: Callable[["AcceptedSocket"], None]) -> None:
        super().__init__(f"ws://here{LINK_PATH}", link.opened, link.received, link.ended)
        self._server = ServerProtocol(max_size=MAX_MESSAGE_BYTES)
        self._protocol = self._server  # type: ignore[assignment]
        self._on_gone = on_gone

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport = cast(asyncio.Transport, transport)
        keep_short(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._on_gone(self)

    def _other_event(self, event: object) -> None:
        if not isinstance(event, Request):
            return
        if urlsplit(event.path).path == LINK_PATH:
            self._server.send_response(self._server.accept(event))
        else:
            self._server.send_response(self._server.reject(404, "links only\n"))
        if self._server.state.name == "OPEN":
            self._on_open()


class LinkListener:
    """Accept links at one address while the context is open. `url` is what others dial."""

    def __init__(self, where: ListenAt, make_link: Callable[[], Link]) -> None:
        self.fingerprint = fingerprint_of(where.certificate) if where.certificate else None
        self.url = ""
        self._where = where
        self._make_link = make_link
        self._server: asyncio.Server | None = None
        self._sockets: dict[AcceptedSocket, Link] = {}

    async def open(self) -> None:
        """
        Start listening.

        Raises:
            ConfigError: the address or the certificate cannot be used.
        """
        where, context = self._where, None
        if where.certificate is not None:
            context = tls_context(where.certificate, where.key)
        loop = asyncio.get_running_loop()
        family = socket.AF_INET6 if ":" in where.host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            tune(listener)  # each accepted socket inherits it
            try:
                listener.bind((where.host, where.port))
                listener.listen(BACKLOG)
            except OSError as exc:
                raise ConfigError(cannot_listen("links", where.host, where.port, exc)) from exc
            self._server = await loop.create_server(self._accept, sock=listener, backlog=BACKLOG, ssl=context)
        except BaseException:
            listener.close()
            raise
        port = self._server.sockets[0].getsockname()[1]
        scheme = "ws" if context is None else "wss"
        host = f"[{where.host}]" if ":" in where.host else where.host
        self.url = where.public_url or f"{scheme}://{host}:{port}"

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for accepted in list(self._sockets):
            accepted.abort()

    def _gone(self, accepted: AcceptedSocket) -> None:
        self._sockets.pop(accepted, None)

    def _accept(self) -> asyncio.Protocol:
        link = self._make_link()
        accepted = AcceptedSocket(link, self._gone)
        link.transport = accepted
        self._sockets[accepted] = link
        strangers = [made for made, of in self._sockets.items() if not of.ready]
        for stranger in strangers[: max(0, len(strangers) - MAX_STRANGERS)]:
            stranger.abort()
            self._sockets.pop(stranger, None)
        return accepted
