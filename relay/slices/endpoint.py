"""
Serve slices to nodes and take them from backbones: `GET`, `HEAD` and `PUT /slices/<sha256>`.

What is absent is asked of a backbone that has it, once for all who wait (`asking.py`), and they wait for a
bounded time.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from time import monotonic
from typing import BinaryIO

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from relay.config import Config
from relay.errors import (
    AuthError,
    Overloaded,
    RelayError,
    SliceError,
    SliceTimeout,
    SliceUnknown,
    StorageFull,
)
from relay.forwarding.endpoint import Hub
from relay.metrics import Metrics
from relay.slices.asking import Asking
from relay.slices.cache import SliceCache
from relay.slices.ranges import span_of
from relay.wire.fields import is_hex
from relay.wire.manifest import HASH_CHARS

CHUNK_BYTES = 128 << 10  # small enough that calls pass between two chunks
LOOK_AGAIN_S = 1.0  # whoever waits looks whether another backbone is to be asked


class Slices:
    """The three routes, and who waits for which slice."""

    def __init__(self, config: Config, cache: SliceCache, hub: Hub, metrics: Metrics) -> None:
        self._config = config
        self._cache = cache
        self._hub = hub
        self._metrics = metrics
        self._waiters: dict[str, list[asyncio.Event]] = {}
        self._refused: dict[str, StorageFull] = {}  # of those waited for: it came, and could not be kept
        self._asking = Asking()
        metrics.cache_bytes.set_function(lambda: cache.size_bytes)
        hub.on_backbones_changed = self._wake_all
        hub.awaited = lambda slice_id: self._asking.awaited(slice_id, monotonic())

    def routes(self) -> list[Route]:
        path = "/slices/{slice_id}"
        return [
            Route(path, self.get, methods=["GET", "HEAD"]),
            Route(path, self.put, methods=["PUT"]),
        ]

    # -- to nodes

    async def get(self, request: Request) -> Response:
        slice_id = request.path_params["slice_id"]
        if not is_hex(slice_id, HASH_CHARS):
            return JSONResponse({"error": {"code": "not_found", "message": "no slice has this name"}}, 404)
        try:
            opened = await asyncio.to_thread(self._cache.open, slice_id)
            if opened is None and request.method == "HEAD":
                return Response(status_code=404)
            while opened is None:
                await self._fetch(slice_id)
                opened = await asyncio.to_thread(self._cache.open, slice_id)
        except RelayError as exc:
            self._metrics.slices_served.labels(exc.code).inc()
            return error_response(exc)
        self._metrics.slices_served.labels("ok").inc()
        return self._respond(request, slice_id, *opened)

    def _respond(self, request: Request, slice_id: str, file: BinaryIO, size_bytes: int) -> Response:
        headers = {
            "accept-ranges": "bytes",
            "cache-control": "public, max-age=31536000, immutable",
            "content-type": "application/octet-stream",
            "etag": f'"{slice_id}"',
        }
        span = span_of(request.headers.get("range"), size_bytes)
        if span is None or request.method == "HEAD" or headers["etag"] in _etags(request):
            file.close()
            if span is None:
                return Response(status_code=416, headers=headers | {"content-range": f"bytes */{size_bytes}"})
            if request.method == "GET":
                return Response(status_code=304, headers=headers)
            return Response(headers=headers | {"content-length": str(size_bytes)})
        headers["content-length"] = str(span.end - span.start)
        if span.partial:
            headers["content-range"] = span.content_range(size_bytes)
        body = self._chunks(file, span.start, span.end)
        return StreamingResponse(body, 206 if span.partial else 200, headers)

    async def _chunks(self, file: BinaryIO, start: int, end: int) -> AsyncIterator[bytes]:
        sent = self._metrics.slice_bytes.labels("sent")
        with file:
            file.seek(start)
            while start < end:
                data = await asyncio.to_thread(file.read, min(CHUNK_BYTES, end - start))
                if not data:
                    raise SliceError("the file became shorter while it was read")
                start += len(data)
                sent.inc(len(data))
                yield data

    async def _fetch(self, slice_id: str) -> None:
        """Wait until the slice is in the cache, asking a backbone for it; raises SliceError or Overloaded."""
        if sum(map(len, self._waiters.values())) >= self._config.slice_waiters:
            raise Overloaded("too many requests wait for slices", self._config.slice_wait_s)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._config.slice_wait_s
        arrived = asyncio.Event()
        self._waiters.setdefault(slice_id, []).append(arrived)
        try:
            while slice_id not in self._cache:
                backbones = self._hub.pool.backbones_with(slice_id)
                if not backbones:
                    raise SliceUnknown(slice_id)
                if (refused := self._refused.get(slice_id)) is not None:
                    raise refused
                if loop.time() >= deadline:
                    late = self._asking.asked(slice_id)
                    names = " and ".join(b.name for b in backbones if b.handle in late)
                    raise SliceTimeout(slice_id, names or backbones[0].name, self._config.slice_wait_s)
                asked = self._asking.ask(slice_id, [b.handle for b in backbones], monotonic())
                if asked is not None:
                    self._hub.want_slice(asked, slice_id)
                arrived.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout_at(min(deadline, loop.time() + LOOK_AGAIN_S)):
                        await arrived.wait()
        finally:
            self._waiters[slice_id].remove(arrived)
            if not self._waiters[slice_id]:
                del self._waiters[slice_id]
                self._refused.pop(slice_id, None)

    def _wake_all(self) -> None:
        """Backbones came or went: everybody who waits looks again."""
        self._asking.left(list(self._hub.pool.backbones))
        for waiters in self._waiters.values():
            for arrived in waiters:
                arrived.set()

    # -- from backbones

    async def put(self, request: Request) -> Response:
        slice_id = request.path_params["slice_id"]
        try:
            return await self._store(request, slice_id)
        except RelayError as exc:
            # the rest of the body is not read: the connection cannot be used again
            return error_response(exc, {"connection": "close"})
        except ClientDisconnect:
            return Response(status_code=400)

    async def _store(self, request: Request, slice_id: str) -> Response:
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        backbone = self._hub.backbone_of_session(token.strip()) if scheme.lower() == "bearer" else None
        if backbone is None:
            raise AuthError("slices are taken from registered backbones only: bearer token of the session")
        expected = backbone.catalogue.slice_bytes.get(slice_id)
        if expected is None:
            raise AuthError(f"slice {slice_id[:12]} is not in the manifest of this backbone")
        try:
            await self._write(request, slice_id, expected, backbone.handle)
            self._asking.arrived(slice_id)
        except BaseException as exc:
            self._asking.failed(slice_id, backbone.handle)
            if isinstance(exc, StorageFull) and slice_id in self._waiters:
                self._refused[slice_id] = exc
            raise
        finally:
            for arrived in self._waiters.get(slice_id, ()):
                arrived.set()
        return Response(status_code=201)

    async def _write(self, request: Request, slice_id: str, size_bytes: int, backbone: int) -> None:
        """Store a slice as it comes."""
        with await asyncio.to_thread(self._cache.writer, slice_id, size_bytes) as writer:
            async for data in request.stream():
                self._asking.came(backbone, monotonic())
                await asyncio.to_thread(writer.write, data)
            await asyncio.to_thread(writer.commit)
        self._metrics.slice_bytes.labels("stored").inc(writer.size_bytes)


def error_response(exc: RelayError, headers: dict[str, str] | None = None) -> JSONResponse:
    """Draw an error the way the whole relay does."""
    extra = dict(headers or {})
    if isinstance(exc, Overloaded):
        extra["retry-after"] = f"{exc.retry_after_s:.0f}"
    return JSONResponse({"error": {"code": exc.code, "message": str(exc)}}, exc.status, extra)


def _etags(request: Request) -> list[str]:
    return [tag.strip() for tag in request.headers.get("if-none-match", "").split(",")]
