"""The public door: keys, bounds, streaming, and errors that say what really happened."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from backbone.errors import EngineDown
from backbone.gateway.app import MAX_BODY_BYTES, Door, create_gateway


@dataclass
class Upstream:
    """A real HTTP server in the engine's place, so that the door's own client and streaming are used."""

    url: str | None = None
    seen: list[bytes] = field(default_factory=list)
    failure: str | None = None
    on_chat: Callable[[], Response] = field(default=lambda: JSONResponse({"ok": True}))

    def address(self) -> str:
        if self.url is None:
            raise EngineDown("the engine stopped: out of memory")
        return self.url

    async def chat(self, request: Request) -> Response:
        self.seen.append(await request.body())
        return self.on_chat()


class QuietServer(uvicorn.Server):
    def capture_signals(self):  # type: ignore[no-untyped-def]
        from contextlib import nullcontext

        return nullcontext()


@asynccontextmanager
async def serving(app: Starlette) -> AsyncIterator[str]:
    server = QuietServer(uvicorn.Config(app, port=0, log_level="critical"))
    task = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        await task


@asynccontextmanager
async def door(*keys: str) -> AsyncIterator[tuple[httpx.AsyncClient, Upstream]]:
    upstream = Upstream()
    gateway = create_gateway(
        Door(
            engine_url=upstream.address,
            last_failure=lambda: upstream.failure,
            status=lambda: {"nodes": []},
            metrics=lambda: b"swarm_layer_calls_total 3.0\n",
        ),
        keys,
    )
    app = Starlette(routes=[Route("/v1/chat/completions", upstream.chat, methods=["POST"])])
    async with serving(app) as upstream.url, serving(gateway) as url:
        async with httpx.AsyncClient(base_url=url, trust_env=False) as client:
            yield client, upstream


async def test_a_request_reaches_the_engine_and_its_answer_the_client() -> None:
    async with door() as (client, upstream):
        answer = await client.post("/v1/chat/completions", content=b'{"messages":[]}')
        assert answer.json() == {"ok": True}
        assert upstream.seen == [b'{"messages":[]}']


async def test_a_wrong_or_missing_key_is_refused_before_the_engine_hears_of_it() -> None:
    async with door("one", "two") as (client, upstream):
        for headers in (
            {},
            {"authorization": "Bearer three"},
            {"authorization": "one"},
            {"authorization": "Basic one"},
        ):
            answer = await client.post("/v1/chat/completions", json={}, headers=headers)
            assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
            assert (await client.get("/status.json", headers=headers)).status_code == 401
        assert upstream.seen == []
        for key in ("one", "two"):
            answer = await client.post(
                "/v1/chat/completions", json={}, headers={"authorization": f"Bearer {key}"}
            )
            assert answer.status_code == 200


async def test_only_the_listed_paths_are_forwarded() -> None:
    async with door() as (client, upstream):
        assert (await client.post("/slots/0?action=erase")).status_code == 404
        assert (await client.get("/v1/chat/completions")).status_code == 405
        assert upstream.seen == []


async def test_an_oversized_body_is_refused() -> None:
    async with door() as (client, upstream):
        answer = await client.post("/v1/chat/completions", content=bytes(MAX_BODY_BYTES + 1))
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_too_large")
        assert upstream.seen == []


async def test_a_stream_comes_through_whole() -> None:
    async def tokens() -> AsyncIterator[bytes]:
        for token in ("Paris", " is", " big"):
            yield f"data: {token}\n\n".encode()

    async with door() as (client, upstream):
        upstream.on_chat = lambda: StreamingResponse(tokens(), media_type="text/event-stream")
        answer = await client.post("/v1/chat/completions", json={"stream": True})
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.text == "data: Paris\n\ndata:  is\n\ndata:  big\n\n"


async def test_an_engine_that_dies_in_mid_stream_ends_it_with_an_error() -> None:
    async def broken() -> AsyncIterator[bytes]:
        yield b"data: Paris\n\n"
        raise ConnectionResetError

    async with door() as (client, upstream):
        upstream.on_chat = lambda: StreamingResponse(broken(), media_type="text/event-stream")
        answer = await client.post("/v1/chat/completions", json={"stream": True})
        first, last = answer.text.strip().split("\n\n")
        assert first == "data: Paris"
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "engine_down"


async def test_a_failed_computation_names_what_failed_in_the_swarm() -> None:
    async with door() as (client, upstream):

        def fail() -> Response:
            upstream.failure = (
                "layer 7: phone [0a1b] (compute): deadline passed; local kernel (compute): non_finite"
            )
            return JSONResponse({"error": {"message": "Compute error."}}, status_code=500)

        upstream.on_chat = fail
        answer = await client.post("/v1/chat/completions", json={})
        assert answer.status_code == 500
        assert "layer 7: phone [0a1b] (compute): deadline passed" in answer.json()["error"]["message"]


async def test_an_old_failure_is_not_blamed_for_a_new_error() -> None:
    async with door() as (client, upstream):
        upstream.failure = "layer 7: long ago"
        upstream.on_chat = lambda: JSONResponse({"error": {"message": "prompt too long"}}, status_code=500)
        message = (await client.post("/v1/chat/completions", json={})).json()["error"]["message"]
        assert "long ago" not in message and "prompt too long" in message


async def test_a_missing_engine_is_said_with_its_reason() -> None:
    async with door() as (client, upstream):
        port, upstream.url = upstream.url, None
        answer = await client.post("/v1/chat/completions", json={})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_down")
        assert "out of memory" in answer.json()["error"]["message"]
        assert (await client.get("/health")).status_code == 503
        upstream.url = "http://127.0.0.1:1"  # nobody listens there
        assert (await client.post("/v1/chat/completions", json={})).json()["error"]["code"] == "engine_down"
        upstream.url = port
        assert (await client.get("/health")).status_code == 200
