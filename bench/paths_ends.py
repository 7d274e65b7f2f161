"""
What bench_paths.py runs inside the laboratory's boxes: the backbone's end that measures, and plain echoes.

    paths_ends.py echo ADDRESS          far end of tcp and quic: a message comes back once it is all there
    paths_ends.py end {…}               measure; prints what each message took as JSON

The lanes are the product's own and the far end a real `expert-node` or a real page; messages are probes, so
nothing is computed.
"""

import asyncio
import json
import secrets
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT)]

import uvloop  # noqa: E402
from aioquic.asyncio import connect, serve  # noqa: E402
from aioquic.quic.configuration import QuicConfiguration  # noqa: E402
from cryptography import x509  # noqa: E402
from cryptography.hazmat.primitives import hashes, serialization  # noqa: E402
from cryptography.hazmat.primitives.asymmetric import ec  # noqa: E402

from backbone.lanes.chooser import LaneChooser, Opener  # noqa: E402
from backbone.lanes.direct import LinkListener, ListenAt  # noqa: E402
from backbone.lanes.link import Link, accepting_session  # noqa: E402
from backbone.lanes.openers import DIRECT, DirectOpener  # noqa: E402
from backbone.lanes.relayed import LaneHandlers, RelayedLane  # noqa: E402
from backbone.lanes.webrtc import WEBRTC, WebRtcOpener, native  # noqa: E402
from backbone.model.gguf import open_model  # noqa: E402
from backbone.model.random_model import Shape, make_random_moe  # noqa: E402
from backbone.model.slices import LayerGrid, build_manifest, slice_hashes  # noqa: E402
from backbone.node.keys import fresh_identity  # noqa: E402
from backbone.node.socket import connected, tune  # noqa: E402
from relay.nat.evidence import RELAYED, SIZES_KB, PathPolicy  # noqa: E402
from relay.wire.fields import Fields  # noqa: E402
from relay.wire.frames import HEADER_BYTES  # noqa: E402
from relay.wire.manifest import Manifest  # noqa: E402
from relay.wire.messages import Hello, Peers, Register  # noqa: E402
from relay.wire.sealing import SealPolicy  # noqa: E402

TOKEN = "bench-paths-token"
RELAY_PORT, LINK_PORT, TCP_PORT, QUIC_PORT, SINK_PORT = 8765, 9000, 9001, 9002, 9003
IDLE_S = 0.5
WAIT_S = 40.0
LOST_AFTER_S = 20.0  # of a message; with loss, 100 KB may take longer than the product would wait
BULK_KB = 100  # of the throughput rows
IN_FLIGHT, IN_FLIGHT_RELAYED = 8, 32  # a link holds back 1 MB at most; two legs hold more
STREAM_BYTES = 1 << 26
TCP, QUIC = "tcp", "quic"

type Ask = Callable[[int], Awaitable[float | None]]  # size in KB -> seconds there and back, None: lost


@dataclass(frozen=True, slots=True)
class Task:
    """What one run measures. relay_box: where the relay's TCP connections are reset for first messages."""

    relay: str
    node: str  # address of the far end's echoes; empty: it has none
    here: str  # address of this box
    relay_box: str
    warm: int
    idle: int
    first: int
    bulk_mb: int = 0  # more than 0: measure throughput instead
    sealed: bool = False  # seal what passes the relay, and measure only that


@dataclass(slots=True)
class Measured:
    """Messages of one cell; took_s in order, lost ones missing."""

    lane: str
    size_kb: int
    state: str
    asked: int
    took_s: list[float]


# --- far ends for comparison


async def read_message(reader: asyncio.StreamReader) -> bytes:
    """Read one message; its first four bytes are the length of the rest."""
    head = await reader.readexactly(4)
    return head + await reader.readexactly(int.from_bytes(head, "little"))


def message(size_kb: int) -> bytes:
    return ((size_kb << 10) - 4).to_bytes(4, "little") + bytes((size_kb << 10) - 4)


async def echo_stream(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while True:
            writer.write(await read_message(reader))
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()


async def swallow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Take as many bytes as the first eight say, then say so with one."""
    try:
        while True:
            left = int.from_bytes(await reader.readexactly(8), "little")
            while left:
                left -= len(await reader.read(min(left, 1 << 18)))
            writer.write(b".")
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()


def listener(host: str, port: int) -> socket.socket:
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    tune(made)
    made.bind((host, port))
    return made


def quic_settings(**more: object) -> QuicConfiguration:
    return QuicConfiguration(
        alpn_protocols=["echo"],
        congestion_control_algorithm="cubic",
        max_data=STREAM_BYTES,
        max_stream_data=STREAM_BYTES,
        idle_timeout=600.0,  # the other lanes take their time
        **more,  # type: ignore[arg-type]
    )


def self_signed(folder: Path) -> tuple[Path, Path]:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "bench")])
    now = datetime.now(UTC)
    made = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    made = made.serial_number(1).not_valid_before(now).not_valid_after(now + timedelta(days=1))
    pem = folder / "cert.pem", folder / "key.pem"
    pem[0].write_bytes(made.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
    plain = serialization.NoEncryption()
    encoding, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    pem[1].write_bytes(key.private_bytes(encoding, form, plain))
    return pem


async def echoes(host: str) -> None:
    """Answer tcp and quic until ended."""
    started: list[asyncio.Task[None]] = []

    def on_stream(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        started.append(asyncio.ensure_future(echo_stream(reader, writer)))

    with TemporaryDirectory() as name:
        settings = quic_settings(is_client=False)
        settings.load_cert_chain(*self_signed(Path(name)))
    await serve(host, QUIC_PORT, configuration=settings, stream_handler=on_stream)
    await asyncio.start_server(swallow, sock=listener(host, SINK_PORT))
    async with await asyncio.start_server(
        echo_stream, sock=listener(host, TCP_PORT), limit=1 << 20
    ) as server:
        await server.serve_forever()


async def stream_ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, size_kb: int) -> float:
    data = message(size_kb)
    started = time.monotonic()
    writer.write(data)
    await read_message(reader)
    return time.monotonic() - started


# --- the backbone's end


class End:
    """A backbone that has one node and all lanes to it, and never races them: that would disturb."""

    def __init__(self, task: Task, folder: Path) -> None:
        self.task = task
        self.found = Peers(())
        self.lost = 0
        model = open_model(
            make_random_moe(folder / "model.gguf", Shape(num_layers=1, num_experts=4, top_k=2))
        )
        ids = slice_hashes(model, folder)
        manifest = build_manifest(model, ids, {layer: LayerGrid(8, None) for layer in model.layers})
        places = {
            slice_id: (layer, number) for layer, names in ids.items() for number, slice_id in enumerate(names)
        }
        handlers = LaneHandlers(
            self._peers,
            lambda answer: None,
            self._lost,
            lambda slice_id: model.slice_bytes(*places[slice_id]),
            lambda echo: self.chooser.echo_received(echo),
            lambda signal: self.chooser.signal_received(signal),
        )
        register = Register("bench", Manifest.from_fields(Fields("Manifest", manifest.to_json())))
        hello = Hello("backbone", secrets.token_hex(16), secrets.token_hex(16), TOKEN)
        seal = SealPolicy(fresh_identity(), required=True) if task.sealed else SealPolicy()
        self.relayed = RelayedLane(task.relay, hello, register, handlers, seal)
        self.openers: dict[str, Opener] = {}
        # No race decides anything; a link that did not open is tried again soon.
        policy = PathPolicy(probes=0, retry_s=1.0, retry_max_s=60.0, recheck_s=1e6)
        self.chooser = LaneChooser(self.relayed, self.openers, lambda answer: None, policy=policy)

    async def run(self) -> list[Measured]:
        def make_link() -> Link:
            chooser = self.chooser
            session = accepting_session("backbone", chooser.expected)
            return Link(session, chooser.link_ready, chooser.link_event, chooser.link_closed)

        accepts = LinkListener(ListenAt(self.task.here, LINK_PORT), make_link)
        await accepts.open()
        if not self.task.sealed:
            self.openers[DIRECT] = DirectOpener(self.task.relay, accepts)
        if not self.task.sealed and native() is not None:
            self.openers[WEBRTC] = WebRtcOpener(lambda: self.relayed.stun)
        running = asyncio.create_task(self.relayed.run())
        try:
            await self.joined()
            return await (self.bulk() if self.task.bulk_mb else self.messages())
        finally:
            await self.chooser.close()
            accepts.close()
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    def _peers(self, peers: Peers) -> None:
        self.found = peers
        self.chooser.peers_changed(peers)

    def _lost(self, why: str) -> None:
        self.found = Peers(())
        self.lost += 1
        self.chooser.relayed_lost()

    async def joined(self) -> None:
        await until(lambda: any(node.experts for node in self.found.nodes), "the node")

    async def linked(self) -> None:
        await until(lambda: set(self.openers) == self.open(), f"links {sorted(self.openers)}")

    def open(self) -> set[str]:
        """Lanes past the relay that can carry calls now."""
        for lanes in self.chooser._peers.values():
            return {name for name, lane in lanes.book._lanes.items() if lane.state == "open"}
        return set()

    def lane(self, name: str) -> Ask:
        async def ask(size_kb: int) -> float | None:
            (lanes,) = self.chooser._peers.values()
            payload = (size_kb << 10) - HEADER_BYTES
            return await self.chooser._time_probe(lanes, name, payload, payload, LOST_AFTER_S)

        return ask

    async def tcp(self, port: int = TCP_PORT) -> Ask:
        streams = await asyncio.open_connection(sock=await connected(self.task.node, port))
        return partial(stream_ask, *streams)

    async def quic(self, stack: AsyncExitStack) -> Ask:
        settings = quic_settings(is_client=True, verify_mode=ssl.CERT_NONE)
        made = await stack.enter_async_context(connect(self.task.node, QUIC_PORT, configuration=settings))
        return partial(stream_ask, *await made.create_stream())

    # -- what is measured

    async def messages(self) -> list[Measured]:
        """Warm, idle and first messages on all lanes; idle ones turn by turn, first ones after a reset."""
        task, cells = self.task, dict[tuple[str, int, str], Measured]()

        async def note(lane: str, ask: Ask, size_kb: int, state: str) -> None:
            cell = cells.setdefault((lane, size_kb, state), Measured(lane, size_kb, state, 0, []))
            cell.asked += 1
            took = await ask(size_kb)
            if took is not None:
                cell.took_s.append(took)

        await self.linked()
        asks: dict[str, Ask] = {TCP: await self.tcp()} if task.node else {}
        asks |= {name: self.lane(name) for name in (RELAYED, *self.openers)}
        async with AsyncExitStack() as stack:
            if task.node:
                asks[QUIC] = await self.quic(stack)
            for lane, ask in asks.items():
                say(f"warm {lane}")
                for size_kb in SIZES_KB:
                    for _ in range(3):
                        await ask(size_kb)
                    for _ in range(task.warm):
                        await note(lane, ask, size_kb, "warm")
            say("idle")
            last = dict.fromkeys(asks, 0.0)
            for _ in range(task.idle):
                for size_kb in SIZES_KB:
                    for lane, ask in asks.items():
                        await asyncio.sleep(max(0.0, last[lane] + IDLE_S - time.monotonic()))
                        await note(lane, ask, size_kb, "idle")
                        last[lane] = time.monotonic()
        say("first")
        for _ in range(task.first):
            for size_kb in SIZES_KB:
                await self.anew()
                await note(RELAYED, asks[RELAYED], size_kb, "first")
                await self.linked()
                for lane in self.openers:
                    await note(lane, asks[lane], size_kb, "first")
                if task.node:
                    await note(TCP, await self.tcp(), size_kb, "first")
                    async with AsyncExitStack() as stack:
                        await note(QUIC, await self.quic(stack), size_kb, "first")
        return list(cells.values())

    async def anew(self) -> None:
        """Reset every connection with the relay: all sessions and links begin again."""
        before = self.lost
        kill = ("ip", "netns", "exec", self.task.relay_box, "ss", "-K", "sport", "=", f":{RELAY_PORT}")
        await asyncio.to_thread(subprocess.run, kill, capture_output=True, check=False)
        await until(lambda: self.lost > before, "the reset")
        await self.joined()

    async def bulk(self) -> list[Measured]:
        """Send the same bytes over plain TCP and over each lane in messages, several rounds, turn by turn."""
        await self.linked()
        total = self.task.bulk_mb * 1_000_000
        count = total // (BULK_KB << 10)
        total = count * (BULK_KB << 10)
        streams = await asyncio.open_connection(sock=await connected(self.task.node, SINK_PORT))

        async def plain() -> float:
            started = time.monotonic()
            streams[1].write(total.to_bytes(8, "little") + bytes(total))
            await streams[0].readexactly(1)
            return time.monotonic() - started

        cells = [Measured(lane, BULK_KB, "bulk", 0, []) for lane in (TCP, RELAYED, *self.openers)]
        for number in range(4):
            for cell in cells:
                say(f"bulk {cell.lane}")
                took = await (plain() if cell.lane == TCP else self.pour(cell.lane, count))
                if number and took is not None:  # the first opens the windows
                    cell.took_s.append(took)
                cell.asked += 1
        return cells

    async def pour(self, lane: str, count: int) -> float | None:
        """Send so many messages one way, some in flight; their echoes are small."""
        (lanes,) = self.chooser._peers.values()
        payload = (BULK_KB << 10) - HEADER_BYTES
        room, failed = asyncio.Semaphore(IN_FLIGHT_RELAYED if lane == RELAYED else IN_FLIGHT), 0

        async def one() -> None:
            nonlocal failed
            try:
                failed += await self.chooser._time_probe(lanes, lane, payload, 64, LOST_AFTER_S) is None
            finally:
                room.release()

        started = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for _ in range(count):
                await room.acquire()
                group.create_task(one())
        return None if failed else time.monotonic() - started


async def until(condition: Callable[[], bool], what: str) -> None:
    give_up = time.monotonic() + WAIT_S
    while not condition():
        if time.monotonic() > give_up:
            raise TimeoutError(f"waited {WAIT_S:g} s for {what}")
        await asyncio.sleep(0.002)


def say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


async def measure(task: Task) -> list[Measured]:
    with TemporaryDirectory(prefix="bench-paths-") as name:
        return await End(task, Path(name)).run()


def main() -> int:
    what, argument = sys.argv[1:3]
    if what == "echo":
        uvloop.run(echoes(argument))
    else:
        found = uvloop.run(measure(Task(**json.loads(argument))))
        print(json.dumps([asdict(cell) for cell in found]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
