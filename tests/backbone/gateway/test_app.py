"""The public door: keys, bounds, streaming, and errors that say what really happened."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from backbone.errors import EngineDown
from backbone.gateway.app import Door, create_gateway
from backbone.gateway.line import MAX_WAITING_OF_ONE
from backbone.gateway.prompts import MIN_BODY_BYTES

MESSAGES = [{"role": "user", "content": "hi"}]
CHAT = {"messages": MESSAGES}


def events(*texts: str, error: str | None = None) -> Response:
    """What llama-server streams for a chat."""

    async def body() -> AsyncIterator[bytes]:
        for text in texts:
            yield _event({"choices": [{"index": 0, "finish_reason": None, "delta": {"content": text}}]})
        if error is not None:
            yield _event({"error": {"message": error, "code": 500, "type": "server_error"}})
            return
        yield _event({"choices": [{"index": 0, "finish_reason": "stop", "delta": {}}], "object": "chunk"})
        yield b"data: [DONE]\n\n"

    return StreamingResponse(body(), media_type="text/event-stream")


def _event(value: object) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


@dataclass
class Upstream:
    """A real HTTP server in the engine's place, so that the door's own client and streaming are used."""

    _url: str | None = None
    seen: list[Any] = field(default_factory=list)
    cancelled: int = 0
    abandoned: int = 0
    ends: int = 0
    on_chat: Callable[[], Response] = field(default=lambda: events("Paris"))
    on_failure: Callable[[str], None] = print
    on_end: Callable[[str], bool] = lambda why: False
    wanted: Callable[[], bool] = lambda: True
    runs: Callable[[], bool] = lambda: False
    headers: dict[str, str] = field(default_factory=lambda: {"authorization": "Bearer inner"})
    up: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def url(self) -> str:
        if self._url is None:
            raise EngineDown("the engine stopped: out of memory")
        return self._url

    def hear_failures(self, on_failure: Callable[[str], None]) -> None:
        self.on_failure = on_failure

    def abandon(self) -> None:
        self.abandoned += 1

    async def why_ended(self, ends_before: int) -> str | None:
        return "signal SIGABRT: GGML_ASSERT(x) failed" if self.ends != ends_before else None

    async def wait_up(self) -> str:
        await self.up.wait()
        return self.url

    def crash(self) -> None:
        """What the supervisor does when the process ended."""
        self.ends += 1
        self.on_end("signal SIGABRT: GGML_ASSERT(x) failed")

    async def chat(self, request: Request) -> Response:
        assert request.headers["authorization"] == "Bearer inner"
        self.seen.append(json.loads(await request.body()))
        return self.on_chat()

    async def models(self, _: Request) -> Response:
        return JSONResponse({"data": [{"id": "m", "meta": {"n_vocab": 100}}]})

    def stuck(self) -> Response:
        """Stream one token, then nothing, until the door hangs up."""

        async def body() -> AsyncIterator[bytes]:
            try:
                yield _event({"choices": [{"index": 0, "finish_reason": None, "delta": {"content": "P"}}]})
                await asyncio.Event().wait()
            finally:
                self.cancelled += 1

        return StreamingResponse(body(), media_type="text/event-stream")


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
async def door(*keys: str, parallel: int = 1) -> AsyncIterator[tuple[httpx.AsyncClient, Upstream]]:
    upstream = Upstream()
    gateway = create_gateway(
        Door(
            engine=upstream,
            status=lambda: {"nodes": []},
            metrics=lambda: b"swarm_layer_calls_total 3.0\n",
            context=512,
            parallel=parallel,
        ),
        keys,
    )
    app = Starlette(
        routes=[
            Route("/v1/chat/completions", upstream.chat, methods=["POST"]),
            Route("/completion", upstream.chat, methods=["POST"]),
            Route("/v1/models", upstream.models),
        ]
    )
    async with serving(app) as upstream._url, serving(gateway) as url:
        async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=10) as client:
            yield client, upstream


async def until(condition: Callable[[], bool], limit_s: float = 5.0) -> None:
    async with asyncio.timeout(limit_s):
        while not condition():
            await asyncio.sleep(0.005)


async def test_a_request_reaches_the_engine_and_its_whole_answer_the_client() -> None:
    async with door() as (client, upstream):
        upstream.on_chat = lambda: events("Par", "is")
        answer = await client.post("/v1/chat/completions", json=CHAT)
        assert answer.json()["choices"][0]["message"] == {"role": "assistant", "content": "Paris"}
        assert answer.json()["object"] == "chat.completion"
        assert upstream.seen == [
            CHAT | {"stream": True, "stream_options": {"include_usage": True}}
        ]  # only a stream notices that nobody listens


async def test_a_wrong_or_missing_key_is_refused_before_the_engine_hears_of_it() -> None:
    async with door("one", "two") as (client, upstream):
        for headers in (
            {},
            {"authorization": "Bearer three"},
            {"authorization": "one"},
            {"authorization": "Basic one"},
        ):
            answer = await client.post("/v1/chat/completions", json=CHAT, headers=headers)
            assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
            assert (await client.get("/status.json", headers=headers)).status_code == 401
        assert upstream.seen == []
        for key in ("one", "two"):
            answer = await client.post(
                "/v1/chat/completions", json=CHAT, headers={"authorization": f"Bearer {key}"}
            )
            assert answer.status_code == 200


async def test_only_the_listed_paths_are_forwarded() -> None:
    async with door() as (client, upstream):
        assert (await client.post("/slots/0?action=erase")).status_code == 404
        assert (await client.get("/v1/chat/completions")).status_code == 405
        assert upstream.seen == []


async def test_an_oversized_body_is_refused() -> None:
    async with door() as (client, upstream):
        answer = await client.post("/v1/chat/completions", content=bytes(MIN_BODY_BYTES + 1))
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_too_large")
        assert upstream.seen == []


async def test_a_stream_comes_through_as_it_is() -> None:
    async with door() as (client, upstream):
        upstream.on_chat = lambda: events("Paris", " is", " big")
        answer = await client.post("/v1/chat/completions", json=CHAT | {"stream": True})
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert [line for line in answer.text.split("\n\n") if line][-1] == "data: [DONE]"
        assert answer.text.count("data: {") == 4


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_ends_its_request(stream: bool) -> None:
    async with door() as (client, upstream):
        upstream.on_chat = upstream.stuck
        asking = asyncio.create_task(client.post("/v1/chat/completions", json=CHAT | {"stream": stream}))
        await until(lambda: bool(upstream.seen))
        assert upstream.wanted() and not upstream.abandoned
        asking.cancel()
        await until(lambda: upstream.abandoned == 1, 1.0)
        await until(lambda: upstream.cancelled == 1, 1.0)
        assert not upstream.wanted()
        upstream.on_chat = lambda: events("next")
        assert (await client.post("/v1/chat/completions", json=CHAT)).status_code == 200


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_the_line_never_reaches_the_engine(stream: bool) -> None:
    async with door() as (client, upstream):
        upstream.on_chat = upstream.stuck
        first = asyncio.create_task(client.post("/v1/chat/completions", json=CHAT))
        await until(lambda: len(upstream.seen) == 1)
        second = asyncio.create_task(client.post("/v1/chat/completions", json=CHAT | {"stream": stream}))
        await asyncio.sleep(0.1)
        second.cancel()
        await asyncio.gather(second, return_exceptions=True)
        assert not upstream.abandoned  # the first one still listens
        upstream.on_chat = lambda: events("third")
        first.cancel()
        assert (await client.post("/v1/chat/completions", json=CHAT)).status_code == 200
        assert len(upstream.seen) == 2


async def test_a_waiting_stream_says_so_at_once() -> None:
    async with door() as (client, upstream):
        upstream.on_chat = upstream.stuck
        first = asyncio.create_task(client.post("/v1/chat/completions", json=CHAT))
        await until(lambda: len(upstream.seen) == 1)
        async with asyncio.timeout(1):
            async with client.stream("POST", "/v1/chat/completions", json=CHAT | {"stream": True}) as reply:
                assert reply.status_code == 200
                assert await anext(reply.aiter_raw()) == b": waiting\n\n"
        first.cancel()


async def test_the_line_is_bounded_and_what_needs_no_slot_never_waits_in_it() -> None:
    async with door() as (client, upstream):
        upstream.on_chat = upstream.stuck
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=client.base_url, trust_env=False, limits=limits) as many:
            asked = [asyncio.create_task(many.post("/v1/chat/completions", json=CHAT)) for _ in range(120)]
            await until(lambda: sum(task.done() for task in asked) == 120 - 1 - MAX_WAITING_OF_ONE)
            for refused in [task.result() for task in asked if task.done()]:
                assert refused.status_code == 429
                assert 1 <= int(refused.headers["retry-after"]) <= 60
                assert refused.json()["error"]["type"] == "rate_limit_error"
            for path in ("/v1/models", "/health", "/metrics", "/status.json", "/"):
                async with asyncio.timeout(1):
                    assert (await client.get(path)).status_code == 200
            for task in asked:
                task.cancel()


async def test_an_engine_that_dies_in_mid_stream_ends_it_with_an_error() -> None:
    async with door() as (client, upstream):

        async def broken() -> AsyncIterator[bytes]:
            yield _event({"choices": [{"index": 0, "delta": {"content": "Paris"}}]})
            upstream.crash()
            raise ConnectionResetError

        upstream.on_chat = lambda: StreamingResponse(broken(), media_type="text/event-stream")
        answer = await client.post("/v1/chat/completions", json=CHAT | {"stream": True})
        first, last = answer.text.strip().split("\n\n")
        assert "Paris" in first
        error = json.loads(last.removeprefix("data: "))["error"]
        assert error["code"] == "engine_down" and "GGML_ASSERT(x) failed" in error["message"]


async def test_a_request_that_ended_the_engine_is_refused_when_it_comes_again() -> None:
    async with door() as (client, upstream):

        async def broken() -> AsyncIterator[bytes]:
            upstream.crash()
            raise ConnectionResetError
            yield b""

        upstream.on_chat = lambda: StreamingResponse(broken(), media_type="text/event-stream")
        for stream in (False, True):
            answer = await client.post("/v1/chat/completions", json=CHAT | {"stream": stream, "seed": 3})
            assert answer.status_code == (422 if stream else 503)
            assert "GGML_ASSERT(x) failed" in answer.json()["error"]["message"]
        upstream.on_chat = lambda: events("fine")
        other = {"messages": [{"role": "user", "content": "another"}]}
        assert (await client.post("/v1/chat/completions", json=other)).status_code == 200


async def test_who_ran_beside_a_crash_is_served_alone_afterwards() -> None:
    """One of two requests ends the engine; the other's client never hears of it."""
    async with door(parallel=2) as (client, upstream):
        bad = {"messages": [{"role": "user", "content": "bad"}]}
        both = asyncio.Event()

        async def crashes() -> AsyncIterator[bytes]:
            await both.wait()
            await asyncio.sleep(0.05)
            if not upstream.ends:
                upstream.crash()
                upstream.up.set()
            raise ConnectionResetError
            yield b""

        upstream.on_chat = lambda: StreamingResponse(crashes(), media_type="text/event-stream")
        good_one = asyncio.create_task(client.post("/v1/chat/completions", json=CHAT))
        bad_one = asyncio.create_task(client.post("/v1/chat/completions", json=bad))
        await until(lambda: len(upstream.seen) == 2)

        def later() -> Response:
            if upstream.seen[-1]["messages"] == MESSAGES:
                return events("fine")
            upstream.crash()
            return StreamingResponse(crashes(), media_type="text/event-stream")

        upstream.on_chat = later
        both.set()
        assert (await good_one).json()["choices"][0]["message"]["content"] == "fine"
        assert (await bad_one).status_code == 503
        assert (await client.post("/v1/chat/completions", json=bad)).status_code == 422


async def test_the_same_failure_twice_is_told_twice() -> None:
    async with door() as (client, upstream):
        why = "layer 7: phone [0a1b] (compute): deadline passed; local kernel (compute): non_finite"

        def fail() -> Response:
            upstream.on_failure(why)
            return JSONResponse({"error": {"message": "Compute error.", "code": 500}}, status_code=500)

        upstream.on_chat = fail
        for stream in (False, False, True, True):
            answer = await client.post("/v1/chat/completions", json=CHAT | {"stream": stream})
            assert answer.status_code == 500
            assert why in answer.json()["error"]["message"]


async def test_a_failure_in_mid_stream_says_what_failed() -> None:
    async with door() as (client, upstream):

        def fail() -> Response:
            upstream.on_failure("layer 3: nobody")
            return events("Par", error="Compute error.")

        upstream.on_chat = fail
        answer = await client.post("/v1/chat/completions", json=CHAT | {"stream": True})
        assert "layer 3: nobody" in answer.text
        whole = await client.post("/v1/chat/completions", json=CHAT)
        assert whole.status_code == 500 and "layer 3: nobody" in whole.json()["error"]["message"]


async def test_a_failure_belongs_to_those_that_ran() -> None:
    async with door() as (client, upstream):
        upstream.on_failure("layer 7: long ago")
        upstream.on_chat = lambda: JSONResponse({"error": {"message": "Compute error."}}, status_code=500)
        message = (await client.post("/v1/chat/completions", json=CHAT)).json()["error"]["message"]
        assert "long ago" not in message and "Compute error." in message


@pytest.mark.parametrize(
    ("status", "message", "expected"),
    [
        (500, "'messages' is required", 400),
        (500, "Failed to parse tools: Missing tool function", 400),
        (500, "[json.exception.type_error.302] type must be string, but is number", 400),
        (400, "request (900 tokens) exceeds the available context size", 400),
        (500, "Compute error.", 500),
        (500, "failed to decode the batch: out of memory", 500),
        (501, "This server does not support embeddings.", 501),
        (401, "Invalid API Key", 500),
    ],
)
async def test_an_error_of_the_engine_gets_the_status_of_its_kind(
    status: int, message: str, expected: int
) -> None:
    async with door() as (client, upstream):
        body = {"error": {"message": message, "code": status, "type": "server_error"}}
        upstream.on_chat = lambda: JSONResponse(body, status_code=status)
        for stream in (False, True):
            answer = await client.post("/v1/chat/completions", json=CHAT | {"stream": stream})
            assert answer.status_code == expected


async def test_a_missing_engine_is_said_with_its_reason() -> None:
    async with door() as (client, upstream):
        port, upstream._url = upstream._url, None
        answer = await client.post("/v1/chat/completions", json=CHAT)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_down")
        assert "out of memory" in answer.json()["error"]["message"]
        assert (await client.get("/health")).status_code == 503
        upstream._url = "http://127.0.0.1:1"  # nobody listens there
        assert (await client.post("/v1/chat/completions", json=CHAT)).json()["error"]["code"] == "engine_down"
        upstream._url = port
        assert (await client.get("/health")).status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("GET", "/nothing", b"", 404),
        ("PUT", "/v1/models", b"", 405),
        ("GET", "/v1/models/other", b"", 404),
        ("POST", "/v1/chat/completions", b"{", 400),
        ("POST", "/v1/chat/completions", b"[" * 100_000, 400),
        ("POST", "/v1/chat/completions", b'{"messages":[{"role":"user","content":"\\ud800"}]}', 400),
        ("POST", "/v1/chat/completions", b'{"messages":[{"role":1,"content":"a"}]}', 400),
        ("POST", "/completion", b'{"prompt":[100]}', 400),
        ("POST", "/completion", b'{"prompt":"a","temperature":NaN}', 400),
        ("POST", "/completion", b'{"prompt":"a","temperature":1e999}', 400),
        ("POST", "/completion", b'{"prompt":"a","top_k":' + b"9" * 5000 + b"}", 400),
        ("POST", "/completion", b"\xff\xfe", 400),
    ],
)
async def test_every_error_is_json(method: str, path: str, body: bytes, status: int) -> None:
    async with door() as (client, upstream):
        answer = await client.request(method, path, content=body)
        assert answer.status_code == status
        assert answer.json()["error"]["message"]
        assert answer.headers["access-control-allow-origin"] == "*"
        assert upstream.seen == []


async def test_keys_come_as_clients_of_both_kinds_send_them() -> None:
    async with door("one") as (client, _):
        for headers in ({"authorization": "Bearer one"}, {"x-api-key": "one"}):
            assert (await client.post("/v1/chat/completions", json=CHAT, headers=headers)).status_code == 200
        for headers in ({"x-api-key": "two"}, {"x-api-key": ""}, {"authorization": "Bearer"}):
            assert (await client.get("/v1/models", headers=headers)).status_code == 401


async def test_the_chat_page_is_behind_the_key() -> None:
    async with door("one") as (client, _):
        asked = await client.get("/", headers={"accept": "text/html"})
        assert asked.status_code == 401 and "<form>" in asked.text and "/v1/chat" not in asked.text
        assert (await client.get("/")).json()["error"]["code"] == "invalid_api_key"
        shown = await client.get("/", headers={"authorization": "Bearer one"})
        assert shown.status_code == 200 and "/v1/chat/completions" in shown.text
        assert "default-src 'none'" in shown.headers["content-security-policy"]


async def test_a_preflight_needs_no_key() -> None:
    async with door("one") as (client, _):
        answer = await client.options("/v1/chat/completions", headers={"origin": "https://a.example"})
        assert answer.status_code == 204
        assert answer.headers["access-control-allow-origin"] == "*"
        assert "authorization" in answer.headers["access-control-allow-headers"]
        assert "access-control-allow-credentials" not in answer.headers
