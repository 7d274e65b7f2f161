"""
Round trips of one pair through a relay while a stranger does something to it, and in the quiet just before.

Caller, relay, the node that answers, a crowd of other ready nodes, and the stranger are processes of their
own. The stranger has the lowest priority (nice 19), since on the real network he has a machine of his own.
`newcomer_ms` is how long a new node took to be welcomed during the attack. Loopback.
"""

import asyncio
import multiprocessing
import os
import random
import resource
import time
from argparse import Namespace
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import quantiles
from typing import Any

import uvloop
from bench_relay import FORMULA, TOKEN, Burst, Peer, Processes, node_process, relay_process
from strangers import ATTACKS
from table import Row, arguments, report

from relay.wire.frames import HEADER_BYTES, Frame, FrameType, decode_header
from relay.wire.manifest import Manifest, ManifestLayer
from relay.wire.messages import Assign, Hello, Offer, Peers, Register, SliceReady, Welcome

LAYERS, EXPERTS, PER_NODE = 48, 128, 240
SIZE = 1_000
GAP_S = 0.001  # between two round trips: a pair that leaves the relay half of its time


def crowd_process(port: int, how_many: int, ready: Connection) -> None:
    """So many nodes that are ready and do nothing."""

    async def run() -> None:
        crowd = []
        for number in range(how_many):
            peer = Peer(port, "/v1/session")
            await peer.open()
            await peer.say(Hello("node", f"c{number:031x}", "2" * 32), FrameType.WELCOME)

            def answer(data: bytes, peer: Peer = peer) -> None:
                kind = decode_header(data).type
                if kind is FrameType.ASSIGN:
                    assign = Assign.from_payload(data[HEADER_BYTES:])
                    experts = {layer.layer: tuple(layer.experts) for layer in assign.layers}
                    said = SliceReady(assign.epoch, experts)
                    peer.send(Frame(FrameType.SLICE_READY, said.to_payload()).encode())
                elif kind is FrameType.PING:
                    peer.send(Frame(FrameType.PONG, data[HEADER_BYTES:]).encode())

            peer.on_frame = answer
            offer = Offer("bench", PER_NODE << 10, 1.0, None, False, "crowd")
            peer.send(Frame(FrameType.OFFER, offer.to_payload()).encode())
            crowd.append(peer)
        ready.send(True)
        await asyncio.to_thread(ready.recv)

    uvloop.run(run())


def stranger_process(attack: str, port: int) -> None:
    os.nice(19)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(8192, hard), hard))
    ATTACKS[attack](port)


def small_relay_process(limit: int, ready: Connection) -> None:
    """A relay on a machine that gives it few descriptors."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    relay_process(ready)


def memory_mb(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096 / 1e6


class Pair:
    """The two whose calls others shall not notice."""

    def __init__(self, backbone: Peer, node: Any) -> None:
        self._call = 0
        self._node = node
        self._backbone = backbone
        self._burst = Burst(backbone, self._send)

    def _send(self, number: int) -> None:
        self._call += 1
        ids = (self._node.peer, self._call, self._node.epoch)
        self._backbone.send(Frame(FrameType.DISPATCH, bytes(SIZE), *ids).encode())

    async def round_trips_ms(self, seconds: float) -> list[float]:
        found = []
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            try:
                found.append(await asyncio.wait_for(self._burst.run(1, 1), 10) * 1e3)
            except TimeoutError:
                found.append(10_000.0)
            await asyncio.sleep(GAP_S * random.uniform(0.5, 1.5))
        return found if len(found) > 1 else found * 2  # one that took longer than all the time there was


async def newcomer_ms(port: int) -> float:
    """How long it takes a new node to be welcomed; 10 s if it is not."""
    started = time.perf_counter()
    try:
        async with asyncio.timeout(10):
            peer = Peer(port, "/v1/session")
            await peer.open()
            hello = Hello("node", f"{random.getrandbits(128):032x}", "2" * 32)
            Welcome.from_payload(await peer.say(hello, FrameType.WELCOME))
            peer.close()
    except (TimeoutError, OSError):
        return 10_000.0
    return (time.perf_counter() - started) * 1e3


async def measure(processes: Processes, options: Namespace) -> list[Row]:
    attacks, seconds, crowd = options.only or list(ATTACKS), options.seconds, options.crowd
    port = processes.start(small_relay_process, options.descriptors)
    relay_pid = processes.pid_of(small_relay_process)
    backbone = Peer(port, "/v1/session")
    await backbone.open()
    await backbone.say(Hello("backbone", "3" * 32, "4" * 32, TOKEN), FrameType.WELCOME)
    names = [[f"{layer:032x}{expert:032x}" for expert in range(EXPERTS)] for layer in range(LAYERS)]
    layers = tuple(
        ManifestLayer(number, FORMULA, {"x32": 0, "x16": None}, 1 << 10, tuple(slices))
        for number, slices in enumerate(names)
    )
    register = Register("bench", Manifest("b" * 64, "bench", EXPERTS, 1, layers), changes=True)
    await backbone.say(register, FrameType.PEERS)
    peers = Peers(())
    ready = asyncio.Event()

    def look(data: bytes) -> None:
        nonlocal peers
        if decode_header(data).type is FrameType.PEERS:
            peers = Peers.from_payload(data[HEADER_BYTES:]).after(peers)
            ready.set()

    backbone.on_frame = look
    await asyncio.to_thread(processes.start, node_process, port)
    while not peers.nodes:
        await ready.wait()
        ready.clear()
    (node,) = peers.nodes
    if crowd:
        await asyncio.to_thread(processes.start, crowd_process, port, crowd)
        await asyncio.sleep(2)
    pair = Pair(backbone, node)
    await pair.round_trips_ms(1)
    rows: list[Row] = []
    context = multiprocessing.get_context("spawn")
    for attack in attacks:
        quiet = quantiles(await pair.round_trips_ms(seconds / 2), n=100)
        stranger = context.Process(target=stranger_process, args=(attack, port), daemon=True)
        stranger.start()
        await asyncio.sleep(0.7)  # for it to start
        asking = asyncio.create_task(newcomer_ms(port))
        found = await pair.round_trips_ms(seconds)
        memory = memory_mb(relay_pid)
        stranger.kill()
        stranger.join()
        cuts = quantiles(found, n=100)
        rows.append(
            {
                "stranger": attack,
                "quiet_p50_ms": quiet[49],
                "quiet_p99_ms": quiet[98],
                "p50_ms": cuts[49],
                "p99_ms": cuts[98],
                "max_ms": max(found),
                "p50_ratio": cuts[49] / quiet[49],
                "newcomer_ms": await asking,
                "relay_mb": memory,
            }
        )
        print(f"{attack}: p50 {cuts[49]:.2f} p99 {cuts[98]:.2f} max {max(found):.1f} ms", flush=True)
        await asyncio.sleep(0.5)
    return rows


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--seconds", type=float, default=6.0, help="per attack, and half of it quiet before")
    parser.add_argument("--crowd", type=int, default=300, help="other nodes that are ready")
    parser.add_argument("--only", nargs="*", choices=list(ATTACKS), help="these attacks")
    parser.add_argument("--descriptors", type=int, default=1024, help="of the relay")
    options = parser.parse_args()
    processes = Processes()
    try:
        rows = uvloop.run(measure(processes, options))
    finally:
        processes.stop()
    report(
        "One pair's round trips of 1 KB while a stranger does something, and in the quiet just before",
        rows,
        options.json,
        notes=[f"{options.crowd} other nodes with {PER_NODE} slices each; 10,000: not within 10 s"],
    )


if __name__ == "__main__":
    main()
