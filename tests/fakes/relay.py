"""
A relay for one node that says exactly what a test tells it: sessions on `/v1/session`, bytes on `/slices/`.

Real sockets, the product's `RelaySession`, and no decisions of its own. It serves the page too, under the
policy the real relay sets.
"""

import asyncio
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import Any, Self

from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.datastructures import Headers
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response

from relay.wire import messages
from relay.wire.calls import Dispatch, Partial
from relay.wire.frames import MAX_FRAME_BYTES, MAX_MESSAGE_BYTES, Frame, FrameType
from relay.wire.pieces import Assembler, pieces
from relay.wire.session import Closed, ForwardReceived, RelaySession

type Heard = Any  # a control message, a Closed, or a Frame of a call

WAIT_S = 10.0
ROOT = Path(__file__).resolve().parents[2]
CSP = "default-src 'self' 'wasm-unsafe-eval'; connect-src 'self' ws: wss:"
MIME = {
    ".wgsl": "text/plain; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript",
    ".css": "text/css",
    ".svg": "image/svg+xml",
    ".wasm": "application/wasm",
    ".webmanifest": "application/manifest+json",
}


class FakeRelay:
    """`slices` maps ids to bytes or to an HTTP status; `heard` is the queue of all that nodes said."""

    def __init__(self, slices: dict[str, bytes | int] | None = None, host: str = "127.0.0.1") -> None:
        self.host = host
        self.slices = slices if slices is not None else {}
        self.served: Counter[str] = Counter()
        self.heard: asyncio.Queue[Heard] = asyncio.Queue()
        self.files: dict[str, bytes] = {}  # scripts of a test, beside or instead of the page's own
        self.offer: dict[str, Any] = {"models": []}  # what is said before a node joins
        self.page_headers: dict[str, str] = {}  # with every file of the page
        self.on_slice: Callable[[str], bytes | int | None] = lambda slice_id: None
        self.deaf = False  # to what comes on the connection that is open now
        self.session: RelaySession | None = None
        self.connection: ServerConnection | None = None
        self._server: Server
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: object, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def open(self) -> None:
        """Listen; after a `close` on the same port again."""
        self._server = await serve(
            self._serve,
            self.host,
            self.port,
            process_request=self._http,
            max_size=MAX_MESSAGE_BYTES,
            compression=None,
        )
        self.port = next(iter(self._server.sockets)).getsockname()[1]

    async def close(self) -> None:
        self._server.close()
        await self._server.wait_closed()

    async def hear[T](self, kind: type[T]) -> T:
        """Wait for the next message of one kind; what came before is dropped."""
        async with asyncio.timeout(WAIT_S):
            while True:
                heard = await self.heard.get()
                if isinstance(heard, kind):
                    return heard

    async def hear_call(self) -> Frame:
        """Wait for the next Partial or Failure."""
        return await self.hear(Frame)

    async def say(self, send: Callable[[RelaySession], None]) -> None:
        """Send control frames."""
        assert self.session is not None
        send(self.session)
        await self._flush()

    async def dispatch(self, call_id: int, dispatch: Dispatch, epoch: int = 1, deadline_ms: int = 0) -> None:
        await self.send(Frame(FrameType.DISPATCH, dispatch.to_payload(), 9, call_id, epoch, deadline_ms))

    async def send(self, frame: Frame) -> None:
        assert self.connection is not None
        for message in pieces(frame.encode()):
            await self.connection.send(message)

    async def _flush(self) -> None:
        assert self.session is not None and self.connection is not None
        for data in self.session.data_to_send():
            for message in pieces(data):
                await self.connection.send(message)

    def _http(self, connection: ServerConnection, request: Request) -> Response | None:
        if request.path.startswith("/v1/session"):
            return None
        if not request.path.startswith("/slices/"):
            return self._page(request.path.partition("?")[0])
        slice_id = request.path.removeprefix("/slices/")
        self.served[slice_id] += 1
        found = self.on_slice(slice_id)
        if found is None:
            found = self.slices.get(slice_id, 404)
        body, status = (b"no", found) if isinstance(found, int) else (found, 200)
        return _response(status, body, {"Content-Type": "application/octet-stream"})

    def _page(self, path: str) -> Response:
        said = {"/healthz": {}, "/swarm.json": self.offer}.get(
            path, {} if path.startswith("/lanes/") else None
        )
        if said is not None:
            body = json.dumps(said or None).encode()
            return _response(200, body, {"Content-Type": "application/json"})
        return self._file(path)

    def _file(self, path: str) -> Response:
        """A file of the test or the page, or a kernel, as it stands in the checkout."""
        base = ROOT / ("relay/_built" if path.startswith("/kernels/") else "node-web")
        file = (base / path.removeprefix("/kernels/").lstrip("/")) if path != "/" else base / "index.html"
        body = self.files.get(path)
        if body is None:
            if not file.is_file() or base not in file.resolve().parents:
                return _response(404, b"no such file", {"Content-Type": "text/plain"})
            body = file.read_bytes()
        headers = {
            "Content-Type": MIME[file.suffix],
            "Content-Security-Policy": CSP,
            "Cache-Control": "no-cache",
        }
        return _response(200, body, headers | self.page_headers)

    async def _serve(self, connection: ServerConnection) -> None:
        self.connection = connection
        self.deaf = False
        session = self.session = RelaySession(monotonic())
        assembler = Assembler()
        try:
            async for data in connection:
                if self.deaf:
                    continue
                whole = assembler.feed(data, monotonic()) if isinstance(data, bytes) else data
                if whole is not None:
                    session.receive_data(whole, monotonic())
                for event in session.events():
                    match event:
                        case messages.Hello():
                            session.send_welcome(
                                messages.Welcome("0" * 32, "fake", 10.0, MAX_FRAME_BYTES), monotonic()
                            )
                            self.heard.put_nowait(event)
                        case ForwardReceived(_, raw):
                            self.heard.put_nowait(Frame.decode(raw))
                        case _:
                            self.heard.put_nowait(event)
                for reply in session.data_to_send():
                    await connection.send(reply)
        except ConnectionClosed:
            pass
        self.heard.put_nowait(Closed(connection.close_code or 1006, connection.close_reason or "", True))


def _response(status: int, body: bytes, headers: dict[str, str]) -> Response:
    return Response(
        status, "", Headers({**headers, "Content-Length": str(len(body)), "Connection": "close"}), body
    )


def partial_of(frame: Frame) -> Partial:
    """Read the answer to a call."""
    assert frame.type is FrameType.PARTIAL, messages.Failure.from_payload(frame.payload)
    return Partial.from_payload(frame.payload)


def failure_of(frame: Frame) -> messages.Failure:
    """Read the refusal of a call."""
    assert frame.type is FrameType.FAILURE
    return messages.Failure.from_payload(frame.payload)
