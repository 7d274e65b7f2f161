"""
The dispatcher's end of the device's socket: one call in, one answer out. The driver around link.py.

A call starts in the socket's own callback and, when it never has to wait, is answered in the same turn of
the event loop: this runs once per layer of every token.
"""

import asyncio
import shutil
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from time import monotonic
from typing import cast

from backbone.engine.link import Floats, LayerCall, RequestDecoder, encode_failure, encode_reply
from backbone.errors import BackboneError, LinkError

UNWANTED = "whoever asked for this has left"

type OnCall = Callable[[LayerCall], Awaitable[Floats]]


class LinkServer:
    """
    Listen for the device on a Unix socket at `path` and answer its calls with `on_call`.

    `last_failure` says why the last failed call failed; `on_failure` hears of each as it happens, before the
    device does. A call under way is cancelled when the device hangs up, which it does when its patience ends.
    While `wanted` says no, nobody waits for what the device computes, and its calls fail at once.
    """

    def __init__(self, on_call: OnCall) -> None:
        self.last_failure: str | None = None
        self.on_failure: Callable[[str], None] = lambda why: None
        self.wanted: Callable[[], bool] = lambda: True
        self.under_way = 0
        self.last_at = monotonic()  # when a call came or was answered
        self._on_call = on_call
        self._directory = Path(tempfile.mkdtemp(prefix="swarm-"))
        self._server: asyncio.Server | None = None
        self.connections: set[_Connection] = set()
        self.path = str(self._directory / "link")

    async def open(self) -> None:
        """Start to listen."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(lambda: _Connection(self), self.path)

    async def close(self) -> None:
        """Hang up on the device and remove the socket."""
        if self._server is not None:
            self._server.close()
        for connection in list(self.connections):
            connection.hang_up()
        if self._server is not None:
            await self._server.wait_closed()
        shutil.rmtree(self._directory, ignore_errors=True)

    async def answer(self, call: LayerCall) -> bytes:
        """Give the bytes to write for a call; whatever goes wrong becomes a failure for this call alone."""
        self.last_at = monotonic()
        if not self.wanted():
            return encode_failure(call.seq, UNWANTED)
        self.under_way += 1
        try:
            return encode_reply(call, await self._on_call(call))
        except BackboneError as exc:
            why = str(exc)
        except Exception as exc:  # the dispatcher's bug must not end the engine
            why = f"{type(exc).__name__}: {exc}"
        finally:
            self.under_way -= 1
            self.last_at = monotonic()
        self.last_failure = why
        self.on_failure(why)
        return encode_failure(call.seq, why)

    def abandon(self) -> None:
        """Nobody waits for the calls under way any more: stop them, and let the engine go on to others."""
        for connection in list(self.connections):
            connection.abandon()


class _Connection(asyncio.Protocol):
    def __init__(self, link: LinkServer) -> None:
        self._link = link
        self._decoder = RequestDecoder()
        self._transport: asyncio.Transport | None = None
        self._task: asyncio.Task[None] | None = None
        self._call: LayerCall | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's does not inherit from it
        self._link.connections.add(self)

    def data_received(self, data: bytes) -> None:
        try:
            for call in self._decoder.feed(data):
                if self._task is not None and not self._task.done():
                    raise LinkError("a second request before the first was answered")
                loop = asyncio.get_running_loop()
                self._task = asyncio.Task(self._serve(call), loop=loop, eager_start=True)
        except LinkError:
            self.hang_up()  # the device dials again for its next call

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._link.connections.discard(self)
        if self._task is not None:
            self._task.cancel()

    def hang_up(self) -> None:
        """End the connection now."""
        if self._transport is not None:
            self._transport.abort()

    async def _serve(self, call: LayerCall) -> None:
        self._call = call
        try:
            answer = await self._link.answer(call)
        finally:
            abandoned, self._call = self._call is not call, None if self._call is call else self._call
        if self._transport is not None and not abandoned:
            self._transport.write(answer)

    def abandon(self) -> None:
        """Stop the call under way, if there is one; the device is told, and the connection stays good."""
        if self._task is None or self._call is None or self._transport is None:
            return
        self._transport.write(encode_failure(self._call.seq, UNWANTED))
        self._task.cancel()
        self._task = self._call = None
