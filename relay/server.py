"""
Listen: sockets with the options that message latency needs, uvicorn on them, a stop that lets calls finish.

    async with RelayServer(config) as relay:
        relay.url, relay.backbone_token
"""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Iterator
from functools import partial
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

import uvicorn

from relay.app import create_app
from relay.config import Config
from relay.door import door
from relay.errors import ConfigError
from relay.forwarding.endpoint import Hub
from relay.forwarding.socket import ServerSocket
from relay.forwarding.turns import Inlet
from relay.program.ports import cannot_listen

log = logging.getLogger(__name__)

HTTP_STOP_S = 0.4  # downloads under way get so long; whoever is cut off resumes elsewhere, or later
STOP_S = 0.9  # a stop without the drain, at most
BACKLOG = 4096  # a swarm that reconnects at once: with asyncio's 100, SYN retries cost seconds


def listen(config: Config) -> socket.socket:
    """
    Return a listening socket; what is set on it, each accepted socket inherits (Linux).

    Congestion control, because BBR paces small bursts: 12 KB take 1.5 round trips instead of one.
    TCP_USER_TIMEOUT, so that a peer that neither reads nor answers is given up by the kernel as well.
    """
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            timeout_ms = int(max(1.0, config.stall_s) * 1000)
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, timeout_ms)
        if config.congestion_control and hasattr(socket, "TCP_CONGESTION"):
            wanted = config.congestion_control.encode()
            try:
                listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, wanted)
            except OSError as exc:
                found = listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0")
                log.warning(
                    "congestion control %s is not available (%s), %s is used",
                    config.congestion_control,
                    exc.strerror,
                    found.decode(),
                )
        try:
            listener.bind((config.host, config.port))
            listener.listen(BACKLOG)
        except OSError as exc:
            raise ConfigError(cannot_listen("page and sessions", config.host, config.port, exc)) from exc
    except BaseException:
        listener.close()
        raise
    return listener


class _Server(uvicorn.Server):
    """Uvicorn without its signal handlers: who starts a RelayServer decides when it stops."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class RelayServer:
    """A relay that listens while the context is open. Leaving it drains: Drain, a bounded wait, Bye."""

    def __init__(self, config: Config | None = None) -> None:
        self.config = config or Config(host="127.0.0.1", port=0)
        self.app = create_app(self.config)
        self.app.state.stun.address = stun_server(self.config)
        self.hub: Hub = self.app.state.hub
        self.backbone_token: str = self.app.state.backbone_token
        self.port = 0
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        """Where this machine reaches the relay."""
        host = self.config.host
        host = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    async def __aenter__(self) -> Self:
        listener = listen(self.config)
        self.port = listener.getsockname()[1]
        self._server = _Server(
            uvicorn.Config(
                self.app,
                loop="none",  # whatever loop runs us
                http=door(self.hub.places, inlet=staticmethod(partial(Inlet, self.hub.turns))),
                ws=type("RelaySocket", (ServerSocket,), {"host": self.hub}),
                lifespan="on",
                log_config=None,
                access_log=False,
                server_header=False,
                backlog=BACKLOG,
                timeout_graceful_shutdown=HTTP_STOP_S,  # type: ignore[arg-type]  # any number will do
            )
        )
        self._serving = asyncio.create_task(self._server.serve(sockets=[listener]))
        while not self._server.started:
            if self._serving.done():
                listener.close()
                await self._serving
                raise RuntimeError("the relay's server stopped before it started")
            await asyncio.sleep(0.001)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._server is not None and self._serving is not None
        await self.hub.drain("the relay stops")
        self._server.should_exit = True
        await self._serving

    async def kill(self) -> None:
        """Stop without a word, as a crash would; for tests of what peers do then."""
        assert self._server is not None and self._serving is not None
        self.hub.draining = True
        self._server.should_exit = self._server.force_exit = True
        await self._serving


def stun_server(config: Config) -> str:
    """Return `host:port` under which peers reach our STUN: where they were told that the relay is."""
    if config.public_url is None and config.stun_addresses is not None:
        host: str | None = config.stun_address_pair[0]
    else:
        host = urlsplit(config.public_url or lan_urls(config, config.port)[0]).hostname
    return f"[{host}]:{config.stun_port}" if host and ":" in host else f"{host}:{config.stun_port}"


def lan_urls(config: Config, port: int) -> list[str]:
    """Return the URLs under which machines on the local network probably reach us."""
    if config.host not in ("0.0.0.0", "::", ""):
        return [f"http://{config.host}:{port}"]
    addresses = []
    with contextlib.closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as probe:
        with contextlib.suppress(OSError):
            probe.connect(("192.0.2.1", 9))  # RFC 5737: nothing is sent, the kernel only picks a route
            addresses.append(probe.getsockname()[0])
    with contextlib.suppress(OSError):
        addresses += [
            str(info[4][0]) for info in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)
        ]
    shown = [address for address in dict.fromkeys(addresses) if not address.startswith("127.")]
    return [f"http://{address}:{port}" for address in shown or ["127.0.0.1"]]
