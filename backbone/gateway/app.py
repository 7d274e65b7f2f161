"""
The backbone's public port: llama-server's endpoints behind API keys, bounds and a line.

The engine listens on loopback only, and answers nobody but this door. What needs the model waits in the line
(line.py) and runs as long as its client listens (answer.py); what does not is asked directly and never waits
behind it. DIFFERENCES.md lists where the door answers otherwise than plain llama-server.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from backbone.errors import EngineDown
from backbone.gateway import errors, page
from backbone.gateway.answer import Answers
from backbone.gateway.auth import client_of, require_key
from backbone.gateway.cors import Cors
from backbone.gateway.engine_client import EngineClient, EngineLike
from backbone.gateway.errors import Refused, bad_request
from backbone.gateway.limits import MAX_INT, Row, by_name, table
from backbone.gateway.line import Line
from backbone.gateway.prompts import most_body_bytes, parse, prepare

log = logging.getLogger(__name__)

BODY_TIMEOUT_S = 60.0  # without a byte
MAX_CONTROL_BYTES = 2 << 20
MAX_TOKENS_TO_TEXT = 1 << 18
INLINE_BYTES = 1 << 17  # a larger body is read beside the event loop, which layer calls need

MODEL_ROUTES = (  # answered by the model: these wait in the line
    "/completion",
    "/completions",
    "/v1/completions",
    "/chat/completions",
    "/v1/chat/completions",
    "/responses",
    "/v1/responses",
    "/v1/messages",
    "/infill",
)
ASKED_ROUTES = (  # answered without the model, or refused by llama-server itself
    "/tokenize",
    "/detokenize",
    "/apply-template",
    "/chat/completions/input_tokens",
    "/v1/chat/completions/input_tokens",
    "/responses/input_tokens",
    "/v1/responses/input_tokens",
    "/v1/messages/count_tokens",
    "/embedding",
    "/embeddings",
    "/v1/embeddings",
    "/rerank",
    "/reranking",
    "/v1/rerank",
    "/v1/reranking",
    "/props",
)
READ_ROUTES = ("/models", "/v1/models", "/props", "/slots", "/lora-adapters")


@dataclass(frozen=True, slots=True)
class Door:
    """
    What the gateway needs of the backbone.

    engine: engine/supervisor.py. status: the backbone's state as JSON. metrics: its metrics in Prometheus'
    text format. context, parallel: tokens per slot, and slots.
    """

    engine: EngineLike
    status: Callable[[], Mapping[str, Any]]
    metrics: Callable[[], bytes]
    context: int = 4096
    parallel: int = 1


def create_gateway(door: Door, api_keys: Sequence[str]) -> Starlette:
    """Build the application; without `api_keys` everybody may ask."""
    gateway = _Gateway(door, api_keys)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        await gateway.client.aclose()

    def guarded(
        handler: Callable[[Request], Awaitable[Response]],
    ) -> Callable[[Request], Awaitable[Response]]:
        async def run(request: Request) -> Response:
            try:
                require_key(request.headers, api_keys)
                return await handler(request)
            except Refused as exc:
                return errors.response(exc, request.url.path)
            except ClientDisconnect:
                return Response(status_code=499)

        return run

    routes = [
        Route("/health", gateway.health),
        Route("/v1/health", gateway.health),
        Route("/metrics", gateway.metrics),
        Route("/", gateway.page),
        Route("/status.json", guarded(gateway.status)),
        Route("/models/{name:path}", guarded(gateway.model)),
        Route("/v1/models/{name:path}", guarded(gateway.model)),
        *(Route(path, guarded(gateway.answer), methods=["POST"]) for path in MODEL_ROUTES),
    ]
    both = {path: ["GET"] for path in READ_ROUTES}
    for path in ASKED_ROUTES:
        both.setdefault(path, []).append("POST")
    routes += [Route(path, guarded(gateway.ask), methods=methods) for path, methods in both.items()]
    app = Starlette(
        routes=routes,
        lifespan=lifespan,
        exception_handlers={HTTPException: _http_error, Exception: _our_error},
    )
    app.router.redirect_slashes = False
    app.add_middleware(Cors)
    return app


class _Gateway:
    def __init__(self, door: Door, api_keys: Sequence[str]) -> None:
        self.door = door
        self.client = EngineClient(door.engine)
        self._api_keys = api_keys
        self._answers = Answers(self.client, Line(door.parallel), door.context)
        self._rows: tuple[int | None, dict[str, Row]] = (-1, {})
        self._large = asyncio.Lock()

    async def answer(self, request: Request) -> Response:
        raw = await _bounded_body(request, most_body_bytes(self.door.context))
        vocabulary = await self.client.vocabulary()
        if self._rows[0] != vocabulary:
            rows = by_name(table(self.door.context, self.door.parallel, vocabulary or MAX_INT))
            self._rows = (vocabulary, rows)
        arguments = (request.url.path, raw, self._rows[1], self.door.context, vocabulary)
        prepared = (
            prepare(*arguments) if len(raw) < INLINE_BYTES else await asyncio.to_thread(prepare, *arguments)
        )
        address = request.client.host if request.client is not None else ""
        return self._answers.response(prepared, client_of(request.headers, address))

    async def ask(self, request: Request) -> Response:
        path, query = request.url.path, request.url.query
        if request.method != "POST":
            return _passed_on(await self.client.control("GET", path, query=query), path)
        raw = await _bounded_body(request, MAX_CONTROL_BYTES)
        body = parse(raw)
        if path == "/detokenize":
            await self._require_tokens(body.get("tokens"))
        if len(raw) < INLINE_BYTES:
            return _passed_on(await self.client.control("POST", path, body, query), path)
        async with self._large:  # llama.cpp takes 300 bytes of memory for each byte of text
            return _passed_on(await self.client.control("POST", path, body, query), path)

    async def _require_tokens(self, tokens: Any) -> None:
        vocabulary = await self.client.vocabulary() or MAX_INT
        if not isinstance(tokens, list) or len(tokens) > MAX_TOKENS_TO_TEXT:
            raise bad_request(f"tokens must be an array of at most {MAX_TOKENS_TO_TEXT}")
        for token in tokens:
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocabulary:
                raise bad_request(f"token {str(token)[:40]} is none of the model's {vocabulary} tokens")

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        reply = await self.client.control("GET", "/v1/models")
        known = reply.json()["data"] if reply.status_code == 200 else []
        for entry in known:
            if entry["id"] == name:
                return JSONResponse(entry)
        names = ", ".join(entry["id"] for entry in known)
        raise Refused(404, "model_not_found", f"there is no model {name[:200]!r} here, only {names}")

    async def health(self, _: Request) -> Response:
        try:
            _url = self.door.engine.url
        except EngineDown as exc:
            refused = errors.engine_down(str(exc))
            return JSONResponse({"status": str(exc)} | errors.body_of(refused), status_code=503)
        return JSONResponse({"status": "ok"})

    async def status(self, _: Request) -> Response:
        return JSONResponse(dict(self.door.status()))

    async def metrics(self, _: Request) -> Response:
        return Response(self.door.metrics(), media_type="text/plain; version=0.0.4")

    async def page(self, request: Request) -> Response:
        try:
            require_key(request.headers, self._api_keys)
        except Refused as exc:
            if "text/html" in request.headers.get("accept", ""):
                return page.ask_for_key()
            return errors.response(exc)
        return page.chat()


async def _bounded_body(request: Request, most: int) -> bytes:
    """
    Raises:
        Refused: 413, 408. ClientDisconnect.
    """
    too_large = Refused(413, "request_too_large", f"the request body exceeds {most} bytes")
    declared = request.headers.get("content-length", "0")
    if declared.isdigit() and int(declared[:18]) > most:
        raise too_large
    chunks, size = [], 0
    stream = request.stream()
    try:
        while (chunk := await asyncio.wait_for(anext(stream, None), BODY_TIMEOUT_S)) is not None:
            size += len(chunk)
            if size > most:
                raise too_large
            chunks.append(chunk)
    except TimeoutError:
        message = f"no byte of the body for {BODY_TIMEOUT_S:.0f} s"
        raise Refused(408, "request_timeout", message) from None
    return b"".join(chunks)


def _passed_on(reply: Any, path: str) -> Response:
    if reply.status_code >= 400:
        raise errors.from_engine(reply.status_code, reply.content, None)
    return Response(
        reply.content,
        status_code=reply.status_code,
        headers={"cache-control": "no-store"},
        media_type=reply.headers.get("content-type"),
    )


async def _http_error(request: Request, exc: Exception) -> Response:
    assert isinstance(exc, HTTPException)
    known = {404: f"there is no {request.url.path[:200]} here", 405: f"not by {request.method}"}
    code = errors.CODES.get(exc.status_code, "invalid_request")
    refused = Refused(exc.status_code, code, known.get(exc.status_code, str(exc.detail)))
    answer = errors.response(refused, request.url.path)
    answer.headers.update(exc.headers or {})
    return answer


async def _our_error(request: Request, exc: Exception) -> Response:
    log.error("%s %s: %s: %s", request.method, request.url.path, type(exc).__name__, exc)
    refused = Refused(500, "internal_error", "the door itself failed; its log says how")
    return errors.response(refused, request.url.path)
