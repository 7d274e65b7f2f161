"""Peers that really connect to a relay: what the tests of the relay's server are written with."""

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from contextlib import suppress
from time import monotonic
from typing import Any, Self

import httpx
import numpy as np
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from relay.server import RelayServer
from relay.wire.calls import Dispatch, Partial
from relay.wire.frames import MAX_MESSAGE_BYTES
from relay.wire.manifest import Manifest, ManifestLayer
from relay.wire.messages import Assign, Hello, Offer, Peers, Register, SliceReady, SliceWanted, Welcome
from relay.wire.pieces import Assembler, pieces
from relay.wire.session import BackboneSession, ClientSession, Closed, NodeSession
from relay.wire.tensors import Grid, XEncoding

WAIT_S = 5.0
FORMULA: dict[str, Any] = {
    "hidden_dim": 4,
    "expert_dim": 2,
    "gate_type": 8,
    "up_type": 8,
    "down_type": 8,
    "activation": "silu",
    "alpha": 0.0,
    "limit": 0.0,
    "weight_position": "after",
    "biased": False,
}


def slice_data(layer: int, expert: int) -> bytes:
    return f"weights of expert {expert:02} in layer {layer:02}".encode() * 100


def slice_name(layer: int, expert: int) -> str:
    return hashlib.sha256(slice_data(layer, expert)).hexdigest()


def manifest(layers: int = 2, experts: int = 2) -> Manifest:
    grid = {"x32": 0, "x16": None}
    rows = tuple(
        ManifestLayer(
            n, FORMULA, grid, len(slice_data(n, 0)), tuple(slice_name(n, e) for e in range(experts))
        )
        for n in range(layers)
    )
    return Manifest("ab" * 32, "tiny", experts, 1, rows)


def dispatch(x: bytes = bytes(16)) -> Dispatch:
    return Dispatch(
        model_tag=1,
        layer=0,
        hidden_dim=len(x) // 4,
        x_encoding=XEncoding.F32,
        grid=Grid.X32,
        row_exponents=np.zeros(1, np.int16),
        counts=np.ones(1, np.uint16),
        experts=np.zeros(1, np.uint16),
        weights=np.ones(1, np.float32),
        x=x,
    )


PARTIAL = Partial.from_sums(0, np.ones((1, 4), np.int64), Grid.X32, 5)


class Peer:
    """A client with its session. `seen` holds every event not yet asked for."""

    def __init__(self, relay: RelayServer, session: ClientSession, hello: Hello) -> None:
        self.relay = relay
        self.session: Any = session
        self.hello = hello
        self.seen: list[Any] = []
        self.socket: ClientConnection
        self.close_code: int | None = None
        self._arrived = asyncio.Condition()
        self._assembler = Assembler()
        self._reader: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        url = self.relay.url.replace("http", "ws") + "/v1/session"
        self.socket = await connect(url, max_size=MAX_MESSAGE_BYTES, compression=None, proxy=None)
        self._reader = asyncio.create_task(self._read())
        self.session.send_hello(self.hello)
        await self.flush()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.stop()

    async def stop(self) -> None:
        """Leave without a word."""
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)
        self.socket.transport.abort()

    async def stop_reading(self) -> None:
        """Stay connected and read nothing any more."""
        assert self._reader is not None
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)
        self.socket.transport.pause_reading()

    async def flush(self) -> None:
        with suppress(ConnectionClosed):  # the reader tells
            for data in self.session.data_to_send():
                for message in pieces(data):
                    await self.socket.send(message)

    async def expect(
        self,
        kind: type,
        condition: Callable[[Any], bool] = lambda event: True,
        forget_earlier: bool = False,
    ) -> Any:
        """Wait for such an event; what came earlier stays in `seen`, or is forgotten if of the same kind."""

        def found() -> Any:
            return next((e for e in self.seen if isinstance(e, kind) and condition(e)), None)

        async with self._arrived:
            try:
                await asyncio.wait_for(self._arrived.wait_for(lambda: found() is not None), WAIT_S)
            except TimeoutError:
                raise AssertionError(f"no {kind.__name__} came; seen: {self.seen}") from None
            event = found()
            at = next(i for i, other in enumerate(self.seen) if other is event)
            earlier = [e for e in self.seen[:at] if not (forget_earlier and isinstance(e, kind))]
            self.seen = earlier + self.seen[at + 1 :]
            return event

    async def _read(self) -> None:
        while True:
            try:
                data = await self.socket.recv()
                whole = self._assembler.feed(data, monotonic()) if isinstance(data, bytes) else data
                if whole is not None:
                    self.session.receive_data(whole, monotonic())
            except ConnectionClosed as exc:
                self.close_code = exc.rcvd.code if exc.rcvd is not None else None
                self.session.receive_close(self.close_code or 1006)
                data = b""
            async with self._arrived:
                self.seen.extend(self.session.events())
                self._arrived.notify_all()
            if self.close_code is not None or not data:
                return
            await self.flush()


class Node(Peer):
    def __init__(self, relay: RelayServer, number: int = 1, **hello: Any) -> None:
        fields = {"id": f"{number:032x}", "secret": "5" * 32} | hello
        super().__init__(relay, NodeSession(monotonic()), Hello("node", **fields))
        self.assign = Assign(0, 0, None, ())

    async def offer(self, memory: int = 1 << 20, inventory: tuple[str, ...] = ()) -> None:
        await self.expect(Welcome)
        self.session.send_offer(Offer("fake", memory, 1.0, None, False, "node", inventory))
        await self.flush()

    async def serve(self) -> None:
        """Take the assignment and say that all of it is ready."""
        self.assign = await self.expect(Assign)
        experts = {layer.layer: tuple(layer.experts) for layer in self.assign.layers}
        self.session.send_slice_ready(SliceReady(self.assign.epoch, experts))
        await self.flush()


class Backbone(Peer):
    def __init__(self, relay: RelayServer, number: int = 1001, **hello: Any) -> None:
        fields = {"id": f"{number:032x}", "secret": "6" * 32, "token": relay.backbone_token} | hello
        super().__init__(relay, BackboneSession(monotonic()), Hello("backbone", **fields))
        self.uploads = True
        self.wanted: list[str] = []

    async def register(self, what: Manifest | None = None) -> None:
        self.welcome = await self.expect(Welcome)
        self.session.send_register(Register("home", what or manifest()))
        await self.flush()

    async def nodes(self, count: int) -> dict[str, Any]:
        """Wait until exactly so many nodes are ready; node id -> PeerNode."""
        peers = await self.expect(Peers, lambda peers: len(peers.nodes) == count, forget_earlier=True)
        return {node.node_id: node for node in peers.nodes}

    async def call(self, node: Any, call_id: int, x: bytes = bytes(16), deadline_ms: int = 0) -> None:
        self.session.send_dispatch(node.peer, call_id, node.epoch, deadline_ms, dispatch(x))
        await self.flush()

    async def put(self, http: httpx.AsyncClient, name: str, data: bytes, **headers: str) -> httpx.Response:
        bearer = {"authorization": f"Bearer {self.welcome.session}"} | headers
        return await http.put(f"{self.relay.url}/slices/{name}", content=data, headers=bearer)

    async def upload_what_is_wanted(self, http: httpx.AsyncClient) -> None:
        """Answer every SliceWanted, for ever."""
        everything = {slice_name(n, e): slice_data(n, e) for n in range(4) for e in range(4)}
        while True:
            wanted = await self.expect(SliceWanted)
            self.wanted.append(wanted.slice)
            await self.put(http, wanted.slice, everything[wanted.slice])


async def closed(peer: Peer) -> Closed:
    """Wait for the end of a session."""
    event = await peer.expect(Closed)
    assert isinstance(event, Closed)
    return event


def run(test: Callable[[], Awaitable[None]]) -> None:
    """Run one test on uvloop, as the relay does, with an end in any case."""
    import uvloop

    async def bounded() -> None:
        await asyncio.wait_for(test(), 30.0)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(bounded())
