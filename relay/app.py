"""Wire the relay together: routes, lifespan, and the one place where concrete classes are chosen."""

import io
import secrets
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from time import monotonic

import segno
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from relay import __version__, assets, verify
from relay.config import Config
from relay.forwarding.endpoint import Hub
from relay.forwarding.socket import SESSION_PATH
from relay.metrics import Metrics
from relay.nat.endpoint import StunEndpoint
from relay.slices.cache import SliceCache
from relay.slices.endpoint import Slices

SAID_FACTOR = 20  # what took a millisecond to say stands for twenty


def create_app(config: Config) -> Starlette:
    """
    Return the HTTP side of the relay as an ASGI application; server.py gives its hub the sessions' sockets.

    `app.state` has `hub`, `backbone_token`, `cache` and `stun`. Without a backbone token in `config` one is
    made for this run; without a cache folder slices go to a temporary one.
    """
    metrics = Metrics()
    token = config.backbone_token or secrets.token_hex(16)
    hub = Hub(config, token, metrics)
    stack = AsyncExitStack()
    folder = config.cache_dir
    if folder is None:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="relay-slices-")))
    cache = SliceCache(folder, config.cache_bytes)
    slices = Slices(config, cache, hub, metrics)
    stun = StunEndpoint(config, metrics)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        async with stack:
            await hub.start()
            stun.start()
            hub.stun = stun.told
            try:
                yield
            finally:
                stun.stop()
                await hub.stop()

    said: dict[str, tuple[float, Response]] = {}

    def lately(what: str, make: Callable[[], Response]) -> Response:
        """Make an answer, or repeat the last one: who asks often costs a bounded part of our time."""
        started = monotonic()
        until, response = said.get(what, (0.0, None))
        if response is None or started >= until:
            response = make()
            said[what] = monotonic() + SAID_FACTOR * (monotonic() - started), response
        return response

    async def health(_: Request) -> Response:
        return JSONResponse({"status": "draining" if hub.draining else "ok", "version": __version__})

    def make_metrics() -> Response:
        hub.count()
        hub.count_lanes()
        return Response(metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    def make_status() -> Response:
        return JSONResponse(
            hub.status()
            | {"slice_cache": {"slices": len(cache), "size_bytes": cache.size_bytes}, "stun": stun.status()},
            headers={"cache-control": "no-store"},
        )

    async def prometheus(_: Request) -> Response:
        return lately("metrics", make_metrics)

    async def status(_: Request) -> Response:
        return lately("status", make_status)

    async def offer(_: Request) -> Response:
        return JSONResponse(hub.offer(), headers={"cache-control": "no-store"})

    async def lane(request: Request) -> Response:
        id_start = request.path_params["id"]
        found = hub.path_of(id_start) if len(id_start) == 8 else None
        return JSONResponse(found, headers={"cache-control": "no-store"})  # null: not here

    def qr(request: Request) -> Response:
        image = io.BytesIO()
        url = config.public_url or str(request.base_url)
        try:
            code = segno.make(url, error="m", micro=False)
        except ValueError:  # DataOverflowError: a Host longer than any code holds
            return Response("this address is too long for a QR code\n", 400, media_type="text/plain")
        code.save(image, kind="svg", scale=8, border=2, xmldecl=False)
        headers = {"cache-control": "no-cache"}
        return Response(image.getvalue(), headers=headers, media_type="image/svg+xml")

    async def upgrade_needed(_: Request) -> Response:
        return Response("sessions are WebSockets\n", 426, {"upgrade": "websocket"}, "text/plain")

    app = Starlette(
        routes=[
            Route(SESSION_PATH, upgrade_needed),
            Route("/healthz", health),
            Route("/metrics", prometheus),
            Route("/status.json", status),
            Route("/swarm.json", offer),
            Route("/lanes/{id}.json", lane),
            Route("/qr.svg", qr),
            *slices.routes(),
            *verify.routes(config.pyodide_dir),
            *assets.routes(),
        ],
        lifespan=lifespan,
    )
    app.state.hub = hub
    app.state.backbone_token = token
    app.state.cache = cache
    app.state.stun = stun
    return app
