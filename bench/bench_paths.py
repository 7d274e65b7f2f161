"""
Time a message there and back over each lane, as a multiple of the propagation delay.

In network namespaces (e2e/natlab: Linux, root, nftables): relay, node and backbone in boxes of their own,
half of the delay on either leg, so that the way through the relay is as long as the direct one. A real relay,
a real `expert-node`, and the backbone's own lanes; the messages are probes, so nothing is computed. `tcp` is
an echo over a bare TCP connection with the same socket options: the floor of this machine on this day.
"""

import argparse
import asyncio
import json
import secrets
import socket
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from statistics import quantiles
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]  # both: the laboratory is of the tests

from table import Row, arguments, report  # noqa: E402

from backbone.lanes.chooser import LaneChooser, Opener  # noqa: E402
from backbone.lanes.openers import DIRECT, DirectOpener  # noqa: E402
from backbone.lanes.relayed import LaneHandlers, RelayedLane  # noqa: E402
from backbone.lanes.webrtc import WEBRTC, WebRtcOpener, native  # noqa: E402
from backbone.model.gguf import open_model  # noqa: E402
from backbone.model.random_model import Shape, make_random_moe  # noqa: E402
from backbone.model.slices import LayerGrid, build_manifest, slice_hashes  # noqa: E402
from backbone.node.socket import connected, tune  # noqa: E402
from e2e.natlab.lab import RELAY, RELAY_2, Lab, Leg, why_not  # noqa: E402
from relay.nat.paths import RELAYED, SIZES_KB, PathPolicy  # noqa: E402
from relay.wire.fields import Fields  # noqa: E402
from relay.wire.manifest import Manifest  # noqa: E402
from relay.wire.messages import Hello, Peers, Register  # noqa: E402

TOKEN = "bench-paths-token"
PORT, NODE_PORT, TCP_PORT = 8765, 9000, 9001
NODE_ADDRESS = "10.2.0.2"
WARM, IDLE, FIRST = 24, 8, 4
IDLE_S = 0.5
NEVER_S = 1e6
WAIT_S = 30.0

type Ask = Callable[[int], Awaitable[float | None]]


# --- the backbone's end, run inside a box


async def ends(relay_url: str, node_host: str, folder: Path, rtt_ms: float) -> list[Row]:
    """Measure from where the backbone stands."""
    model = open_model(make_random_moe(folder / "model.gguf", Shape(num_layers=1, num_experts=4, top_k=2)))
    hashes = slice_hashes(model, folder)
    manifest = build_manifest(model, hashes, {layer: LayerGrid(8, None) for layer in model.layers})
    places = {
        slice_id: (layer, expert) for layer, ids in hashes.items() for expert, slice_id in enumerate(ids)
    }
    found = Peers(())

    def peers(latest: Peers) -> None:
        nonlocal found
        found = latest
        chooser.peers_changed(latest)

    handlers = LaneHandlers(
        peers,
        lambda answer: None,
        lambda why: None,
        lambda slice_id: model.slice_bytes(*places[slice_id]),
        lambda echo: chooser.echo_received(echo),
        lambda signal: chooser.signal_received(signal),
    )
    register = Register("bench", Manifest.from_fields(Fields("Manifest", manifest.to_json())))
    hello = Hello("backbone", secrets.token_hex(16), secrets.token_hex(16), TOKEN)
    relayed = RelayedLane(relay_url, hello, register, handlers)
    openers: dict[str, Opener] = {DIRECT: DirectOpener(relay_url, None)}
    if native() is not None:
        openers[WEBRTC] = WebRtcOpener(lambda: relayed.stun)
    # No races: they would run beside what is measured.
    policy = PathPolicy(probes=0, retry_s=NEVER_S, retry_max_s=NEVER_S)
    chooser = LaneChooser(relayed, openers, lambda answer: None, policy=policy)
    running = asyncio.create_task(relayed.run())
    try:
        await until(lambda: bool(found.nodes) and any(n.experts for n in found.nodes), "the node")
        lanes = chooser._peers[found.nodes[0].peer]
        await until(lambda: len(opened(lanes)) == len(openers), f"links {sorted(openers)}")
        rows = await measure("tcp", rtt_ms, await tcp(node_host), lambda: tcp(node_host))
        for lane in (RELAYED, *openers):

            async def ask(size_kb: int, lane: str = lane) -> float | None:
                return await chooser._probe(lanes, lane, size_kb)

            async def anew(lane: str = lane, ask: Ask = ask) -> Ask:
                link = lanes.attempts[lane].link
                assert link is not None
                chooser.link_closed(link, "for a first message")
                chooser._open(lanes, lane)
                await until(lambda: lane in opened(lanes), lane)
                return ask

            rows += await measure(lane, rtt_ms, ask, None if lane == RELAYED else anew)
        return rows
    finally:
        await chooser.close()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def opened(lanes: object) -> list[str]:
    attempts = lanes.attempts  # type: ignore[attr-defined]
    return [name for name, attempt in attempts.items() if attempt.link is not None and attempt.link.ready]


async def until(condition: Callable[[], bool], what: str) -> None:
    give_up = time.monotonic() + WAIT_S
    while not condition():
        if time.monotonic() > give_up:
            raise TimeoutError(f"waited {WAIT_S:g} s for {what}")
        await asyncio.sleep(0.01)


async def tcp(host: str) -> Ask:
    """Connect to the echo; gives what times one message."""
    reader, writer = await asyncio.open_connection(sock=await connected(host, TCP_PORT))

    async def ask(size_kb: int) -> float:
        data = bytes(size_kb << 10)
        started = time.monotonic()
        writer.write(data)
        await reader.readexactly(len(data))
        return time.monotonic() - started

    return ask


async def measure(lane: str, rtt_ms: float, ask: Ask, anew: Callable[[], Awaitable[Ask]] | None) -> list[Row]:
    """Time all sizes and states of one lane; `anew` gives a connection that has carried nothing."""
    rows = []
    for size_kb in SIZES_KB:
        for state, times, pause_s in (("warm", WARM, 0.0), ("idle", IDLE, IDLE_S), ("first", FIRST, 0.0)):
            if state == "first" and anew is None:
                continue
            if state == "warm":
                for _ in range(3):
                    await ask(size_kb)
            took = []
            for _ in range(times):
                if state == "first" and anew is not None:
                    ask = await anew()
                await asyncio.sleep(pause_s)
                took.append(await ask(size_kb))
            rows.append(row(lane, size_kb, state, rtt_ms, [s for s in took if s is not None], times))
    return rows


def row(lane: str, size_kb: int, state: str, rtt_ms: float, took_s: list[float], asked: int) -> Row:
    cuts = [0.0] * 19 if len(took_s) < 2 else quantiles(took_s, n=20, method="inclusive")
    ms = [1e3 * cuts[9], 1e3 * cuts[18]]
    ratio = [value / rtt_ms if rtt_ms else None for value in ms]
    return {
        "lane": lane,
        "peer": "python",
        "size_kb": size_kb,
        "state": state,
        "rtt_ms": rtt_ms,
        "loss_pct": 0.0,
        "sealed": False,
        "p50_over_rtt": ratio[0],
        "p95_over_rtt": ratio[1],
        "p50_ms": ms[0],
        "p95_ms": ms[1],
        "lost": asked - len(took_s),
    }


async def echo(host: str) -> None:
    """The far end of `tcp`."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            writer.write(data)
        writer.close()

    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    tune(listener)
    listener.bind((host, TCP_PORT))
    async with await asyncio.start_server(serve, sock=listener) as server:
        await server.serve_forever()


# --- the whole, from outside


def in_lab(rtt_ms: float, loss_pct: float, quick: bool) -> list[Row]:
    """One path: half of the delay on either side of the relay's switch."""
    leg = Leg(delay_ms=rtt_ms / 4, loss_pct=loss_pct)
    with (
        TemporaryDirectory(prefix="bench-paths-") as name,
        Lab("open", "open", leg_a=leg, leg_b=leg) as lab,
    ):
        folder = Path(name)
        for box in ("hA", "hB", "relay"):
            lab.sysctl(box, "net.ipv4.tcp_slow_start_after_idle", 0)
        caches = {"XDG_CACHE_HOME": name, "XDG_STATE_HOME": name}
        python = sys.executable
        lab.start("relay", python, "-m", "relay.cli", "serve", "--port", str(PORT),
                  "--backbone-token", TOKEN, "--stun-addresses", f"{RELAY},{RELAY_2}",
                  environment=caches, log=folder / "relay.log")  # fmt: skip
        lab.start("hB", python, __file__, "--echo", NODE_ADDRESS, log=folder / "echo.log")
        lab.start("hB", python, "-m", "backbone.node.cli", "--relay", f"http://{RELAY}:{PORT}",
                  "--memory", "64MB", "--threads", "1", "--listen", f"{NODE_ADDRESS}:{NODE_PORT}",
                  log=folder / "node.log")  # fmt: skip
        time.sleep(3.0)
        flags = ["--quick"] if quick else []
        said = lab.run(
            "hA", python, __file__, "--end", f"http://{RELAY}:{PORT}", "--node", NODE_ADDRESS,
            "--folder", name, "--rtt", str(rtt_ms), *flags, timeout_s=900.0,
        )  # fmt: skip
        return [found | {"loss_pct": loss_pct} for found in json.loads(said.splitlines()[-1])]


def main() -> int:
    parser = arguments(str(__doc__))
    parser.add_argument("--rtt", type=float, action="append", metavar="MS", help="propagation (80)")
    parser.add_argument("--loss", type=float, action="append", metavar="PCT", help="on each leg (0)")
    parser.add_argument("--quick", action="store_true", help="fewer messages")
    for inner in ("--end", "--node", "--echo", "--folder"):
        parser.add_argument(inner, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.quick:
        global WARM, IDLE, FIRST
        WARM, IDLE, FIRST = 8, 3, 2
    if args.echo:
        asyncio.run(echo(args.echo))
        return 0
    if args.end:
        print(json.dumps(asyncio.run(ends(args.end, args.node, Path(args.folder), args.rtt[0]))))
        return 0
    why = why_not(delay=True)
    if why is not None:
        print(f"no laboratory here: {why}", file=sys.stderr)
        return 1
    rows = [
        found
        for rtt_ms in args.rtt or [80.0]
        for loss_pct in args.loss or [0.0]
        for found in in_lab(rtt_ms, loss_pct, args.quick)
    ]
    notes = [
        "relayed: half of the delay on either side; no first message there, its session is never new.",
        "first: before a lane is taken its race has carried messages, so that no call is the first.",
        "tcp_slow_start_after_idle 0 in all boxes, cubic on all sockets, the kernel's own initial window.",
    ]
    report("message there and back over each lane", rows, args.json, notes)
    return 0


if __name__ == "__main__":
    sys.exit(main())
