"""
Message round trips through the relay, beside a direct WebSocket echo in the same run.

Each part is a process of its own, as in a swarm: caller, relay, and the node that answers each dispatch with
a partial of the same size. The baseline has no relay: the same caller, a server of the same kind that echoes.
A relayed round trip crosses four sockets instead of two, so a ratio of 2 is what a relay that costs nothing
beyond its sockets would show. Loopback: processing only, no propagation delay. What is longer than a piece
travels in pieces, on both paths.
"""

import asyncio
import math
import multiprocessing
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import quantiles
from typing import Any

import uvicorn
import uvloop
from table import Row, arguments, report

from backbone.node.socket import ClientSocket
from relay.config import Config
from relay.server import RelayServer, listen
from relay.wire.frames import HEADER_BYTES, MAX_FRAME_BYTES, Frame, FrameType, decode_header
from relay.wire.manifest import Manifest, ManifestLayer
from relay.wire.messages import Assign, Hello, Offer, Peers, Ping, Register, SliceReady

SIZES = (1_000, 12_000, 100_000)
WINDOW = 8  # messages under way at once, for the throughput column
TOKEN = "bench-relay-token"
FORMULA: dict[str, Any] = {
    "hidden_dim": 32, "expert_dim": 32, "gate_type": 8, "up_type": 8, "down_type": 8, "activation": "silu",
    "alpha": 0.0, "limit": 0.0, "weight_position": "after", "biased": False,
}  # fmt: skip


def relay_process(ready: Connection) -> None:
    """Run a relay; send its port, stop when told."""

    async def run() -> None:
        async with RelayServer(Config(host="127.0.0.1", port=0, backbone_token=TOKEN, drain_s=0.0)) as relay:
            ready.send(relay.port)
            await asyncio.to_thread(ready.recv)

    uvloop.run(run())


def echo_process(ready: Connection) -> None:
    """Run the baseline: uvicorn as in the relay, each message sent back as it came."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "websocket.accept"})
        while (message := await receive())["type"] == "websocket.receive":
            await send({"type": "websocket.send", "bytes": message["bytes"]})

    async def run() -> None:
        listener = listen(Config(host="127.0.0.1", port=0))
        config = uvicorn.Config(
            app, loop="none", ws="websockets-sansio", ws_max_size=MAX_FRAME_BYTES, lifespan="off",
            ws_per_message_deflate=False, log_config=None,
        )  # fmt: skip
        server = uvicorn.Server(config)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        ready.send(listener.getsockname()[1])
        await asyncio.to_thread(ready.recv)
        server.should_exit = True
        await serving

    uvloop.run(run())


class Peer:
    """A socket whose messages are handled as they come, without a session: the relay is measured."""

    def __init__(self, port: int, path: str) -> None:
        self.on_frame: Callable[[bytes], None] = lambda data: None
        self._opened = asyncio.get_running_loop().create_future()
        self._socket = ClientSocket(
            f"ws://127.0.0.1:{port}{path}",
            on_open=lambda: self._opened.set_result(None),
            on_message=lambda data: self.on_frame(data if isinstance(data, bytes) else b""),
            on_closed=lambda code, reason: None,
        )

    async def open(self) -> None:
        self._socket.open()
        await self._opened

    def send(self, data: bytes) -> None:
        self._socket.send(data)

    async def say(self, message: Any, until: FrameType) -> bytes:
        """Send a control message and wait for a frame of this type."""
        arrived: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

        def look(data: bytes) -> None:
            if decode_header(data).type is until and not arrived.done():
                arrived.set_result(data[HEADER_BYTES:])

        self.on_frame = look
        self.send(Frame(message.TYPE, message.to_payload()).encode())
        return await asyncio.wait_for(arrived, 10)

    def close(self) -> None:
        self._socket.close(1000, "")


def node_process(port: int, ready: Connection) -> None:
    """Answer every dispatch with a partial as long as it was."""

    async def run() -> None:
        node = Peer(port, "/v1/session")
        await node.open()
        await node.say(Hello("node", "1" * 32, "2" * 32), FrameType.WELCOME)
        offer = Offer("bench", 1 << 30, 1.0, None, False, "bench")
        assign = Assign.from_payload(await node.say(offer, FrameType.ASSIGN))

        def answer(data: bytes) -> None:
            header = decode_header(data)
            if header.type is FrameType.DISPATCH:
                ids = (header.peer, header.call_id, header.epoch)
                node.send(Frame(FrameType.PARTIAL, data[HEADER_BYTES:], *ids).encode())

        node.on_frame = answer
        node.send(Frame(FrameType.SLICE_READY, SliceReady(assign.epoch, {0: (0,)}).to_payload()).encode())
        ready.send(True)
        await asyncio.to_thread(ready.recv)

    uvloop.run(run())


class Burst:
    """Send messages so that `window` are under way at once; tell when `total` came back."""

    def __init__(self, peer: Peer, send: Callable[[int], None]) -> None:
        self._send = send
        self._to_send = self._to_come = 0
        self._done: asyncio.Future[None]
        peer.on_frame = self._arrived

    async def run(self, total: int, window: int) -> float:
        """Return the seconds it took."""
        self._done = asyncio.get_running_loop().create_future()
        self._to_send, self._to_come = total - window, total
        started = time.perf_counter()
        for number in range(window):
            self._send(number + 1)
        await self._done
        return time.perf_counter() - started

    def _arrived(self, data: bytes) -> None:
        self._to_come -= 1
        if self._to_send:
            self._send(self._to_send + WINDOW)
            self._to_send -= 1
        if not self._to_come:
            self._done.set_result(None)


def cpu_us(pid: int) -> float:
    """Return the processor time of a process, to the nanosecond where the kernel tells (Linux)."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e3
    except (OSError, ValueError, IndexError):
        return math.nan


async def measure(
    path: str, size: int, server: int, peer: Peer, send: Callable[[int], None], count: int
) -> Row:
    """Time `count` round trips one by one, then as many with a window; `server` is the pid in the middle."""
    burst = Burst(peer, send)
    await burst.run(50, 1)  # warm up
    cpu_before = cpu_us(server)
    times_us = [await burst.run(1, 1) * 1e6 for _ in range(count)]
    cpu_after = cpu_us(server)
    seconds = await burst.run(count, WINDOW)
    cuts = quantiles(times_us, n=100)
    return {
        "path": path,
        "bytes": size,
        "p50_us": cuts[49],
        "p99_us": cuts[98],
        "server_cpu_us": (cpu_after - cpu_before) / count,
        "one_way_mb_s": size * count / seconds / 1e6,
    }


async def measure_all(processes: "Processes", count: int) -> list[Row]:
    """Measure both paths, size by size in turn, so that both see the same machine."""
    direct = Peer(processes.start(echo_process), "/")
    await direct.open()
    relay_port = processes.start(relay_process)
    backbone = Peer(relay_port, "/v1/session")
    await backbone.open()
    await backbone.say(Hello("backbone", "3" * 32, "4" * 32, TOKEN), FrameType.WELCOME)
    layer = ManifestLayer(0, FORMULA, {"x32": 0, "x16": None}, 1, ("a" * 64,))
    register = Register("bench", Manifest("b" * 64, "bench", 1, 1, (layer,)))
    peers = Peers.from_payload(await backbone.say(register, FrameType.PEERS))
    processes.start(node_process, relay_port)
    while not peers.nodes:  # the ping only lends a message to `say`
        peers = Peers.from_payload(await backbone.say(Ping(0.0), FrameType.PEERS))
    (node,) = peers.nodes

    rows: list[Row] = []
    for size in SIZES:
        payload = bytes(size)

        def dispatch(number: int, payload: bytes = payload) -> None:
            backbone.send(Frame(FrameType.DISPATCH, payload, node.peer, number, node.epoch).encode())

        def echo(number: int, payload: bytes = payload) -> None:
            direct.send(Frame(FrameType.DISPATCH, payload, node.peer, number, node.epoch).encode())

        alone = await measure("direct", size, processes.pid_of(echo_process), direct, echo, count)
        relayed = await measure("relay", size, processes.pid_of(relay_process), backbone, dispatch, count)
        rows += [row | {"p50_ratio": row["p50_us"] / alone["p50_us"]} for row in (alone, relayed)]
    return rows


class Processes:
    """The other parts, each a process that says something once it is up and stops when its pipe closes."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("spawn")
        self._running: list[tuple[Any, Connection]] = []
        self._pids: dict[Callable[..., None], int] = {}

    def pid_of(self, target: Callable[..., None]) -> int:
        return self._pids[target]

    def start(self, target: Callable[..., None], *arguments: Any) -> Any:
        """Start one and return what it said."""
        here, there = self._context.Pipe()
        process = self._context.Process(target=target, args=(*arguments, there), daemon=True)
        process.start()
        self._running.append((process, here))
        self._pids[target] = process.pid or 0
        if not here.poll(20):
            raise RuntimeError(f"{target.__name__} did not start")
        return here.recv()

    def stop(self) -> None:
        for process, pipe in reversed(self._running):
            pipe.send(None)
            process.join(5)
            process.kill()


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--count", type=int, default=2000, help="round trips per cell")
    options = parser.parse_args()
    processes = Processes()
    try:
        rows = uvloop.run(measure_all(processes, options.count))
    finally:
        processes.stop()
    report(
        "Relay against direct echo, loopback, message there and back",
        rows,
        options.json,
        notes=["p50_ratio: to the direct echo of the same size; two sockets against four, so 2 is the ideal"],
    )


if __name__ == "__main__":
    main()
