"""
Give one answer to one client, and stop all work for it the moment the client leaves.

The work runs as a task beside a watch on the connection, in the line, in prefill and while tokens come,
streamed or not. A streamed answer that has to wait says so at once: headers, then comments of the stream.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from backbone.gateway import errors
from backbone.gateway.engine_client import RESTART_WAIT_S, EngineClient, EngineEnded
from backbone.gateway.errors import Refused, engine_down
from backbone.gateway.line import Line
from backbone.gateway.prompts import Prepared

STATUS_WAIT_S = 0.5  # so long an error may still become the status
COMMENT_EVERY_S = 5.0
WAITING = b": waiting\n\n"
STREAM_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-store",
    "x-accel-buffering": "no",
}


class WatchedResponse(Response):
    """Runs `work(scope, receive, send)` until it ends or the client leaves."""

    def __init__(self, work: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self._work = work
        self.status_code = 200
        self.background = None
        self.body = b""
        self.init_headers(None)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = asyncio.ensure_future(self._work(scope, receive, send))
        watch = asyncio.ensure_future(_until_gone(receive))
        try:
            await asyncio.wait((work, watch), return_when=asyncio.FIRST_COMPLETED)
        finally:
            watch.cancel()
            gone = not work.done()
            work.cancel()
            await asyncio.gather(work, watch, return_exceptions=True)
        if not gone and not work.cancelled() and (exc := work.exception()) is not None:
            raise exc


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class Answers:
    """Makes the response to a request that needs the model."""

    def __init__(self, client: EngineClient, line: Line, context: int) -> None:
        self._client = client
        self._line = line
        self._context = context

    def response(self, prepared: Prepared, who: str) -> Response:
        """
        Raises:
            Refused: the request ended the engine before, or the line is full.
        """
        self._client.require_harmless(prepared)
        if self._line.must_wait(self._seats(prepared)):
            self._line.check_room(who, prepared.size_bytes)
        make = self._stream if prepared.stream else self._whole
        return WatchedResponse(lambda scope, receive, send: make(prepared, who, scope, receive, send))

    def _seats(self, prepared: Prepared) -> int:
        return self._line.seats if self._client.runs_alone(prepared) else prepared.seats

    async def _whole(self, prepared: Prepared, who: str, scope: Scope, receive: Receive, send: Send) -> None:
        async def one() -> Any:
            return await self._client.whole(prepared)

        try:
            found = await self._in_turn(prepared, who, one, lambda: True)
            answer: Response = JSONResponse(found, headers={"cache-control": "no-store"})
        except Refused as exc:
            answer = errors.response(exc, prepared.path)
        await answer(scope, receive, send)

    async def _in_turn[T](
        self, prepared: Prepared, who: str, work: Callable[[], Awaitable[T]], again: Callable[[], bool]
    ) -> T:
        """Wait for a turn and work; once more, alone, if the engine ended for another's request."""
        await self._client.require_short(prepared, self._context)
        for last in (False, True):
            try:
                async with self._line.turn(who, self._seats(prepared), prepared.size_bytes):
                    self._client.require_harmless(prepared)
                    return await work()
            except EngineEnded as exc:
                if last or exc.guilty or not exc.comes_back or not again():
                    raise engine_down(f"the engine ended: {exc.why}") from exc
            try:
                await asyncio.wait_for(self._client.engine.wait_up(), RESTART_WAIT_S)
            except TimeoutError:
                raise engine_down("the engine ended and did not come back in time") from None
        raise AssertionError("unreachable")

    async def _stream(self, prepared: Prepared, who: str, scope: Scope, receive: Receive, send: Send) -> None:
        out = _EventStream(send)
        chunks: asyncio.Queue[bytes | None] = asyncio.Queue(maxsize=16)  # a slow client slows its stream

        async def one() -> None:
            async with self._client.stream(prepared) as (_, found):
                async for chunk in found:
                    await chunks.put(chunk)

        async def all_of_it() -> None:
            try:
                await self._in_turn(prepared, who, one, lambda: not out.sent)
            finally:
                if not asyncio.current_task().cancelling():  # type: ignore[union-attr]
                    await chunks.put(None)

        work = asyncio.ensure_future(all_of_it())
        try:
            await out.forward(chunks, self._line.must_wait(self._seats(prepared)))
            await work
            await out.end()
        except Refused as exc:
            if out.began:
                await out.write(errors.event(exc, prepared.path))
                await out.end()
            else:
                await errors.response(exc, prepared.path)(scope, receive, send)
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)


class _EventStream:
    """The client's end of a stream: headers as late as they may be, comments while nothing comes."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.began = False
        self.sent = False  # something of the answer itself
        self._between_events = True

    async def forward(self, chunks: asyncio.Queue[bytes | None], waits: bool) -> None:
        patience_s = 0.01 if waits else STATUS_WAIT_S
        while True:
            try:
                chunk = await asyncio.wait_for(chunks.get(), patience_s)
            except TimeoutError:
                if self._between_events:
                    await self.write(WAITING)
                patience_s = COMMENT_EVERY_S
                continue
            if chunk is None:
                return
            self.sent = True
            await self.write(chunk)
            self._between_events = chunk.endswith(b"\n\n")
            patience_s = COMMENT_EVERY_S

    async def write(self, data: bytes) -> None:
        if not self.began:
            self.began = True
            headers = [(name.encode(), value.encode()) for name, value in STREAM_HEADERS.items()]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self) -> None:
        if not self.began:
            await self.write(b"")
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})
