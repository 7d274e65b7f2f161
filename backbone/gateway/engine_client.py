"""
Ask the engine on behalf of a client: one request at a time per turn, always streamed, cancelled with it.

A stream that is closed frees its slot at the next batch. When nobody at all waits for the engine any more,
the layer calls under way are stopped, too, so that slot and nodes are free at once even in a long prefill.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, Protocol

import httpx

from backbone.errors import EngineDown
from backbone.gateway.collect import Events, collect
from backbone.gateway.errors import Refused, engine_down, from_engine
from backbone.gateway.prompts import Prepared, chunks_to_count, too_long
from backbone.gateway.suspects import Suspects

CONNECT_TIMEOUT_S = 5.0
CONTROL_TIMEOUT_S = 30.0
CONTROL_CONNECTIONS = 4
FREE_WITHIN_S = 2.0  # llama-server looks once a second whether a client is still there
FREE_LOOK_S = 0.05
RESTART_WAIT_S = 60.0
MAX_LEFT = 64
MAX_ANSWER_BYTES = 256 << 20
CRASHES = ("SIGABRT", "SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL", "exit status", "MiB more than", "stood still")
NULL_EVENT = b"data: null\n\n"  # some versions of llama-server begin /completion with it


class EngineLike(Protocol):
    """What the door needs of engine/supervisor.py."""

    ends: int
    wanted: Callable[[], bool]
    runs: Callable[[], bool]
    on_end: Callable[[str], bool]

    @property
    def url(self) -> str: ...
    @property
    def headers(self) -> dict[str, str]: ...
    def hear_failures(self, on_failure: Callable[[str], None]) -> None: ...
    def abandon(self) -> None: ...
    async def why_ended(self, ends_before: int) -> str | None: ...
    async def wait_up(self) -> str: ...


@dataclass(slots=True, eq=False)
class Run:
    """A request in the engine. seats: slots it takes. failure: why a layer call failed meanwhile."""

    fingerprint: str
    seats: int = 1
    failure: str | None = None


class EngineEnded(Exception):
    """The engine ended under a request. guilty: it alone can have been the cause."""

    def __init__(self, why: str, guilty: bool, comes_back: bool) -> None:
        self.why = why
        self.guilty = guilty
        self.comes_back = comes_back
        super().__init__(why)


@dataclass(slots=True)
class EngineClient:
    """Runs requests, and knows which run: causes and crashes belong to them."""

    engine: EngineLike
    suspects: Suspects = field(default_factory=Suspects)
    running: set[Run] = field(default_factory=set)
    left: set[str] = field(default_factory=set)  # whose clients left, and nobody was served since
    _work: httpx.AsyncClient = field(init=False)
    _control: httpx.AsyncClient = field(init=False)
    _vocabulary: tuple[int, int | None] = (-1, None)  # number of the engine's end it was asked after

    def __post_init__(self) -> None:
        # A connection that is kept holds one of llama-server's threads.
        no_limit = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        few = httpx.Limits(max_connections=CONTROL_CONNECTIONS, max_keepalive_connections=0)
        patient = httpx.Timeout(None, connect=CONNECT_TIMEOUT_S)
        self._work = httpx.AsyncClient(timeout=patient, trust_env=False, limits=no_limit)
        self._control = httpx.AsyncClient(timeout=CONTROL_TIMEOUT_S, trust_env=False, limits=few)
        self.engine.wanted = self.engine.runs = lambda: bool(self.running)
        self.engine.on_end = self._ended
        self.engine.hear_failures(self._failed)

    async def aclose(self) -> None:
        await self._work.aclose()
        await self._control.aclose()

    def _failed(self, why: str) -> None:
        for run in self.running:  # one step computes for all of them
            run.failure = why

    def _ended(self, why: str) -> bool:
        crashed = any(sign in why.partition(":")[0] + why[:200] for sign in CRASHES)
        there = {run.fingerprint for run in self.running} | self.left
        self.suspects.engine_ended(there, why, monotonic(), crashed)
        self.left.clear()
        return bool(there)

    def require_harmless(self, prepared: Prepared) -> None:
        """
        Raises:
            Refused: this request ended the engine before.
        """
        why = self.suspects.why_refused(prepared.fingerprint, monotonic())
        if why is not None:
            message = (
                f"this request ended the engine when it was computed last, and is not tried again: {why}"
            )
            raise Refused(422, "engine_ended_by_this_request", message)

    def runs_alone(self, prepared: Prepared) -> bool:
        return self.suspects.runs_alone(prepared.fingerprint, monotonic())

    async def vocabulary(self) -> int | None:
        """Ask how many tokens the model knows, once per start of the engine; None: it did not say."""
        if self._vocabulary[0] != self.engine.ends:
            reply = await self.control("GET", "/v1/models")
            try:
                self._vocabulary = (self.engine.ends, int(reply.json()["data"][0]["meta"]["n_vocab"]))
            except (ValueError, KeyError, IndexError, TypeError):
                self._vocabulary = (self.engine.ends, None)
        return self._vocabulary[1]

    async def require_short(self, prepared: Prepared, context: int) -> None:
        """
        Count the tokens of a text that may be too long, piece by piece.

        Raises:
            Refused: it is too long for the context.
        """
        for text in prepared.texts:
            count = 0
            for number, chunk in enumerate(chunks_to_count(text, context)):
                reply = await self.control("POST", "/tokenize", {"content": chunk})
                if reply.status_code == 200:
                    count += len(reply.json()["tokens"]) - (1 if number else 0)  # a cut may cost one
                if count > context + number:
                    raise too_long(count, context, "at least ")

    async def control(self, method: str, path: str, body: Any = None, query: str = "") -> httpx.Response:
        """
        Ask what takes no slot.

        Raises:
            Refused: 503, the engine is down or busy.
        """
        ends = self.engine.ends
        url = self._url() + path + (f"?{query}" if query else "")
        try:
            return await self._control.request(method, url, json=body, headers=self.engine.headers)
        except httpx.TimeoutException as exc:
            message = "the engine is busy with a step of its work"
            raise Refused(503, "engine_busy", message, retry_after_s=2) from exc
        except httpx.HTTPError as exc:
            why = await self.engine.why_ended(ends) or f"{type(exc).__name__} {exc}"
            raise engine_down(f"the engine does not answer: {why}") from exc

    async def whole(self, prepared: Prepared) -> Any:
        """Give the whole answer; raises Refused."""
        body = {name: value for name, value in prepared.body.items() if name != "response_fields"}
        if prepared.path.endswith("completions") and prepared.path != "/completions":
            body["stream_options"] = {"include_usage": True}
        events, found, size = Events(), [], 0
        async with self.stream(prepared, body) as (run, chunks):
            async for chunk in chunks:
                size += len(chunk)
                if size > MAX_ANSWER_BYTES:
                    raise Refused(500, "engine_error", f"the answer exceeds {MAX_ANSWER_BYTES >> 20} MiB")
                try:
                    found += events.feed(chunk)
                except ValueError as exc:
                    raise Refused(502, "engine_error", f"the engine's answer is malformed: {exc}") from exc
        for event in found:
            if event.get("error"):
                error = event["error"]
                status = error.get("code", 500) if isinstance(error, Mapping) else 500
                status = status if isinstance(status, int) and 400 <= status < 600 else 500
                raise from_engine(status, json.dumps(event).encode(), run.failure)
        try:
            return collect(prepared.path, found, prepared.body)
        except (ValueError, KeyError, TypeError) as exc:
            raise Refused(502, "engine_error", f"the engine's answer is not whole: {exc}") from exc

    @asynccontextmanager
    async def stream(
        self, prepared: Prepared, body: Mapping[str, Any] | None = None
    ) -> AsyncIterator[tuple[Run, AsyncIterator[bytes]]]:
        """
        Run a request; inside the block its answer comes as the engine streams it.

        Raises:
            Refused: the engine refused it, could not compute it, or is not there. EngineEnded: it ended.
        """
        run = Run(prepared.fingerprint, prepared.seats)
        url, ends = self._url(), self.engine.ends
        self.running.add(run)
        left = True
        try:
            request = self._work.build_request(
                "POST",
                url + prepared.path,
                json={**(prepared.body if body is None else body), "stream": True},
                headers=self.engine.headers,
            )
            reply = await self._work.send(request, stream=True)
            try:
                if reply.status_code != 200:
                    raise from_engine(reply.status_code, await reply.aread(), run.failure)
                yield run, self._chunks(reply, run)
            finally:
                await reply.aclose()
            left = False
            self.left.clear()
            self.suspects.served(prepared.fingerprint)
        except httpx.HTTPError as exc:
            why = await self.engine.why_ended(ends)
            said = why or f"the engine hung up: {type(exc).__name__} {exc}"
            guilty = self.suspects.why_refused(prepared.fingerprint, monotonic()) is not None
            raise EngineEnded(said, guilty, self.engine.ends != ends) from exc
        finally:
            self.running.discard(run)
            if left and len(self.left) < MAX_LEFT:
                self.left.add(prepared.fingerprint)
            if left:
                if not self.running:
                    self.engine.abandon()
                await self._until_free()

    async def _until_free(self) -> None:
        """
        Keep the seats of who left until their slots are free, for a bounded time.

        The next request would wait for those, and while it is here, somebody wants what they compute.
        """
        with suppress(TimeoutError, Refused, ValueError, KeyError, TypeError):
            async with asyncio.timeout(FREE_WITHIN_S):
                busy = True
                while busy:
                    await asyncio.sleep(FREE_LOOK_S)  # first: what was just sent takes a slot meanwhile
                    slots = (await self.control("GET", "/slots")).json()
                    busy = sum(bool(slot["is_processing"]) for slot in slots) > sum(
                        run.seats for run in self.running
                    )

    async def _chunks(self, reply: httpx.Response, run: Run) -> AsyncIterator[bytes]:
        first = True
        async for chunk in reply.aiter_raw():
            if first and chunk.startswith(NULL_EVENT):
                chunk = chunk[len(NULL_EVENT) :]
            if chunk:
                first = False
                if run.failure is not None and b'"error"' in chunk:
                    chunk = _with_cause(chunk, run.failure)
                yield chunk

    def _url(self) -> str:
        try:
            return self.engine.url
        except EngineDown as exc:
            raise engine_down(str(exc)) from exc


def _with_cause(chunk: bytes, cause: str) -> bytes:
    """Say in the engine's error event what really failed."""
    lines = []
    for line in chunk.split(b"\n"):
        if line.startswith(b"data:") and b'"error"' in line:
            try:
                event = json.loads(line[5:])
                event["error"]["message"] = f"the engine could not compute this: {cause}"
                line = b"data: " + json.dumps(event).encode()
            except (ValueError, KeyError, TypeError):
                pass
        lines.append(line)
    return b"\n".join(lines)
