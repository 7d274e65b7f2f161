"""The HTTP door of a real relay: who asks for nothing keeps nobody out."""

import asyncio
import contextlib
from time import monotonic
from types import SimpleNamespace
from typing import Protocol

import httpx
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from relay.config import Config
from relay.door import Places, door
from relay.server import RelayServer
from tests.fakes.peers import Node, run

CONFIG = Config(host="127.0.0.1", port=0, drain_s=0.1, request_s=0.3, stun_port=0)
HEADERS = b"GET /healthz HTTP/1.1\r\nHost: x\r\n"


class HasPort(Protocol):
    port: int


class Raw:
    """A connection that says what it is told to."""

    def __init__(self, relay: HasPort, first: bytes = b"") -> None:
        self._port = relay.port
        self._first = first

    async def __aenter__(self) -> "Raw":
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self._port)
        self.writer.write(self._first)
        await asyncio.sleep(0.01)
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.writer.close()

    async def ended_after_s(self) -> float:
        """How long until the relay ended it."""
        started = monotonic()
        try:
            async with asyncio.timeout(5):
                while await self.reader.read(4096):
                    pass
        except ConnectionError:
            pass
        return monotonic() - started


@pytest.mark.parametrize(
    "first",
    [
        b"",
        b"GET",
        HEADERS,
        b"PUT /slices/" + b"ab" * 32 + b" HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n",
    ],
    ids=["nothing", "a word", "headers", "an upload"],
)
def test_request_that_is_never_complete_is_given_up(first: bytes) -> None:
    async def test() -> None:
        async with RelayServer(CONFIG) as relay, Raw(relay, first) as raw:
            assert 0.1 < await raw.ended_after_s() < 2.0
            assert len(relay.hub.places) == 0

    run(test)


def test_second_request_of_a_connection_has_the_same_deadline() -> None:
    async def test() -> None:
        async with RelayServer(CONFIG) as relay, Raw(relay, HEADERS + b"\r\n") as raw:
            await raw.reader.readuntil(b"}")
            raw.writer.write(HEADERS)
            assert 0.1 < await raw.ended_after_s() < 2.0

    run(test)


def test_header_that_drips_gets_no_more_time() -> None:
    async def test() -> None:
        async with RelayServer(CONFIG) as relay, Raw(relay, HEADERS) as raw:

            async def drip() -> None:
                while True:
                    raw.writer.write(b"x: y\r\n")
                    await asyncio.sleep(0.05)

            dripping = asyncio.create_task(drip())
            assert await raw.ended_after_s() < 2.0
            dripping.cancel()

    run(test)


def test_session_and_connection_that_is_kept_alive_have_no_such_deadline() -> None:
    async def test() -> None:
        async with RelayServer(CONFIG) as relay, httpx.AsyncClient() as http, Node(relay) as node:
            await node.offer()
            assert (await http.get(f"{relay.url}/healthz")).status_code == 200
            places = len(relay.hub.places)
            await asyncio.sleep(1.2)
            assert len(relay.hub.places) == places == 2
            assert relay.hub.status()["sessions"] == 1

    run(test)


def test_newcomer_gets_the_place_of_who_asks_for_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        async with RelayServer(Config(host="127.0.0.1", port=0, stun_port=0)) as relay, Node(relay) as node:
            await node.offer()
            relay.hub.places.most = 10
            async with asyncio.TaskGroup() as tasks:
                idle = [await Raw(relay, HEADERS[:n]).__aenter__() for n in range(20)]
                tasks.create_task(idle[0].ended_after_s())
            async with Node(relay, 2) as second, httpx.AsyncClient() as http:
                await second.offer()
                assert (await http.get(f"{relay.url}/healthz")).status_code == 200
            assert relay.hub.status()["sessions"] >= 1
            for each in idle:
                each.writer.close()

    run(test)
    said = [record.getMessage() for record in caplog.records if "places" in record.getMessage()]
    assert said == ["all 10 places for connections are taken: who asks for nothing makes way"]


def test_sessions_without_an_offer_make_way_and_others_stay() -> None:
    async def test() -> None:
        async with RelayServer(Config(host="127.0.0.1", port=0, stun_port=0)) as relay, Node(relay) as node:
            await node.offer()
            silent = [await Node(relay, n).__aenter__() for n in range(2, 8)]
            relay.hub.places.most = 7
            async with Node(relay, 9) as newcomer:
                await newcomer.offer()
                async with asyncio.timeout(5):
                    while relay.hub.status()["sessions"] > 7:
                        await asyncio.sleep(0.01)
            assert len(relay.hub.status()["nodes"]) >= 1
            for each in silent:
                await each.__aexit__(None, None, None)

    run(test)


def test_answer_that_nobody_reads_is_given_up() -> None:
    async def test() -> None:
        config = Config(host="127.0.0.1", port=0, stun_port=0, stall_s=0.3)
        async with RelayServer(config) as relay, Raw(relay) as raw:
            raw.writer.transport.pause_reading()  # type: ignore[attr-defined]
            ask = b"GET /src/main.js HTTP/1.1\r\nHost: x\r\n\r\n"
            async with asyncio.timeout(10):
                while len(relay.hub.places):
                    raw.writer.write(ask * 50)
                    await asyncio.sleep(0.05)

    run(test)


def test_door_of_another_program_lets_bodies_that_go_on_and_answers_that_take_long_be() -> None:
    async def slow(request: Request) -> Response:
        size = len(await request.body())
        await asyncio.sleep(1.2)
        return Response(str(size))

    async def test() -> None:
        app = Starlette(routes=[Route("/", slow, methods=["POST"])])
        made = door(Places(10, 10, 0.5, 5.0))
        server = uvicorn.Server(uvicorn.Config(app, port=0, log_config=None, http=made, lifespan="off"))
        server.capture_signals = contextlib.nullcontext  # type: ignore[assignment]
        serving = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        port = SimpleNamespace(port=server.servers[0].sockets[0].getsockname()[1])
        head = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n"
        async with Raw(port, head) as patient, Raw(port, head + b"12345") as silent:
            for _ in range(10):
                patient.writer.write(b"x")
                await asyncio.sleep(0.12)
            assert (await patient.reader.readuntil(b"10")).startswith(b"HTTP/1.1 200")
            assert await silent.ended_after_s() < 2.0
        server.should_exit = True
        await serving

    run(test)
