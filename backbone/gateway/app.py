"""
The backbone's public port: the engine's OpenAI endpoints behind API keys, streamed as they come.

The engine listens on loopback only. This door checks the key, bounds the request, forwards it, and when a
request failed because of the swarm it adds to the engine's plain "Compute error." what really happened: node,
layer, phase.
"""

import hmac
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from backbone.errors import EngineDown

MAX_BODY_BYTES = 32 << 20  # a long chat with images encoded in it; more is a mistake or an attack
CONNECT_TIMEOUT_S = 5.0
FORWARDED = {  # path -> methods: what the engine may be asked from outside
    "/v1/models": ["GET"],
    "/v1/chat/completions": ["POST"],
    "/v1/completions": ["POST"],
    "/completion": ["POST"],
    "/tokenize": ["POST"],
    "/detokenize": ["POST"],
    "/apply-template": ["POST"],
}


@dataclass(frozen=True, slots=True)
class Door:
    """
    What the gateway needs of the backbone; all of it is asked anew for each request.

    engine_url: where the engine listens now; raises EngineDown, with the reason, while it does not.
    last_failure: what the last failed layer call said, or None.
    status: the backbone's state as JSON.
    metrics: the backbone's metrics in Prometheus' text format.
    """

    engine_url: Callable[[], str]
    last_failure: Callable[[], str | None]
    status: Callable[[], Mapping[str, Any]]
    metrics: Callable[[], bytes]


def create_gateway(door: Door, api_keys: Sequence[str]) -> Starlette:
    """Build the application; without `api_keys` everybody may ask."""
    client = httpx.AsyncClient(timeout=httpx.Timeout(None, connect=CONNECT_TIMEOUT_S), trust_env=False)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        await client.aclose()

    def allowed(request: Request) -> bool:
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        matches = [hmac.compare_digest(key.strip().encode(), known.encode()) for known in api_keys]
        return not api_keys or (scheme.lower() == "bearer" and any(matches))

    def why_down(exc: Exception, otherwise: str) -> str:
        """Say why the engine hung up: that it is being stopped, or how it ended, where that is known."""
        try:
            door.engine_url()
        except EngineDown as down:
            return str(down)
        return f"{otherwise}: {type(exc).__name__} {exc}"

    async def forward(request: Request) -> Response:
        if not allowed(request):
            return _error(401, "invalid_api_key", "this backbone needs an API key: Authorization: Bearer KEY")
        try:
            body = await _bounded_body(request)
        except ClientDisconnect:
            return Response(status_code=499)
        if body is None:
            return _error(413, "request_too_large", f"the request body exceeds {MAX_BODY_BYTES >> 20} MiB")
        try:
            url = door.engine_url()
        except EngineDown as exc:
            return _error(503, exc.code, str(exc))
        failure_before = door.last_failure()
        content_type = request.headers.get("content-type", "application/json")
        upstream_request = client.build_request(
            request.method, url + request.url.path, content=body, headers={"content-type": content_type}
        )
        try:
            upstream = await client.send(upstream_request, stream=True)
        except httpx.HTTPError as exc:
            return _error(503, EngineDown.code, why_down(exc, "the engine does not answer"))
        if upstream.status_code >= 500:
            said = _message_in(await upstream.aread())
            await upstream.aclose()
            failure = door.last_failure()
            cause = failure if failure is not None and failure != failure_before else said
            return _error(upstream.status_code, "engine_error", f"the engine could not compute this: {cause}")
        return StreamingResponse(
            _relay_body(upstream, lambda exc: why_down(exc, "the engine stopped")),
            status_code=upstream.status_code,
            headers={"cache-control": "no-store", "x-accel-buffering": "no"},
            media_type=upstream.headers.get("content-type"),
        )

    async def health(_: Request) -> Response:
        try:
            door.engine_url()
        except EngineDown as exc:
            return JSONResponse({"status": str(exc)}, status_code=503)
        return JSONResponse({"status": "ok"})

    async def status(request: Request) -> Response:
        if not allowed(request):
            return _error(401, "invalid_api_key", "the status needs an API key: Authorization: Bearer KEY")
        return JSONResponse(dict(door.status()))

    async def metrics(_: Request) -> Response:
        return Response(door.metrics(), media_type="text/plain; version=0.0.4")

    routes = [Route(path, forward, methods=methods) for path, methods in FORWARDED.items()]
    routes += [Route("/health", health), Route("/status.json", status), Route("/metrics", metrics)]
    return Starlette(routes=routes, lifespan=lifespan)


async def _bounded_body(request: Request) -> bytes | None:
    chunks, size = [], 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > MAX_BODY_BYTES:
            return None
        chunks.append(chunk)
    return b"".join(chunks)


async def _relay_body(upstream: httpx.Response, why: Callable[[Exception], str]) -> AsyncIterator[bytes]:
    try:
        async for chunk in upstream.aiter_raw():
            yield chunk
    except httpx.HTTPError as exc:  # the engine died in mid-stream: say so inside the stream, then end it
        error = {"code": EngineDown.code, "message": why(exc)}
        yield f"data: {json.dumps({'error': error})}\n\n".encode()
    finally:
        await upstream.aclose()


def _message_in(body: bytes) -> str:
    """Give the message of the engine's error body, or the body itself when it is no such thing."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body.decode("utf-8", "replace")[:1000]


def _error(status: int, code: str, message: str) -> JSONResponse:
    """Answer in the shape of OpenAI's errors."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    headers = {"www-authenticate": "Bearer"} if status == 401 else None
    return JSONResponse(
        {"error": {"message": message, "type": kind, "code": code}}, status_code=status, headers=headers
    )
