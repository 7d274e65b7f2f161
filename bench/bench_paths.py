"""
Time a message there and back over each lane, as a multiple of the propagation delay.

In network namespaces (e2e/natlab: Linux, root, nftables): relay, far end and backbone in boxes of their own,
half of the delay on either leg, so that the way through the relay is as long as the direct one. A real relay,
a real `expert-node` or a real page in a headless Chromium, and the backbone's own lanes; see paths_ends.py.

rtt_ms is what the lines are told; the ratios divide by path_ms, what a ping through them takes in the same
run at the median. warm: one message after the other; idle: each lane after 0.5 s without a word; first: the
first on a new session or link. `tcp` and `quic` (aioquic, cubic) are echoes of whole messages by a few lines
of Python with nothing else around, for comparison: the floor of this machine on this day.

Sockets are tuned by the programs; the boxes as `relay doctor` and `backbone doctor` prescribe (no slow start
after idle, initial windows of 80 segments, receive buffers of 1 MB), the far end's box too unless
--far-defaults: a phone has no doctor. All programs run at real-time priority, as if nothing else ran on the
machine, and their memory is kept from being taken away by the host of a virtual machine (keep_mapped.py).

Where cells miss the aims (12 KB at most 1.06, 100 KB at most 1.15, after a pause 1.3), and what limits
them: to Chromium at 30 ms, 12 KB relayed, 1.10 to 1.12, and direct after a pause, 1.08: some 3 ms more than
the path at every distance. turnaround.py reads off the wire where: Chromium takes 1.6 to 2.1 ms from the
last packet in to the first out, the relay half a millisecond each way, the backbone's end 0.9. webrtc to
Chromium, first 100 KB and later ones until its window is open, 2: what leaves Chromium in one flight is as
large as its SCTP window, which nothing sets from outside. webrtc, 100 KB at 30 ms, 1.25, and 12 KB to
Chromium, 1.04 to 1.14: 7 ms and 2 to 3 ms more than the path at every distance, so it is SCTP and DTLS at
work in user space; the relay is quicker there and stays in use. tcp, first 100 KB, 2: a SYN-ACK can offer
64 KB; our lanes have exchanged their greetings by then. quic, first messages: an initial window of ten
packets, and 100 KB: aioquic's processor time. With loss every lane waits for retransmissions: 1 % on either
leg leaves cubic a window of some nine packets.
"""

import contextlib
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median, quantiles
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]  # both: the laboratory is of the tests

from keep_mapped import kept  # noqa: E402
from paths_ends import RELAY_PORT, TOKEN  # noqa: E402
from table import Row, arguments, report, write_json  # noqa: E402

from e2e.natlab.lab import RELAY, RELAY_2, SIDES, Lab, Leg, why_not  # noqa: E402
from relay.doctor import INITIAL_WINDOW, RECEIVE_BYTES  # noqa: E402
from relay.nat.evidence import SIZES_KB  # noqa: E402

NODE_PORT = 9000
RTTS_MS, LOSSES_PCT, PEERS = (30.0, 80.0, 100.0), (0.0, 1.0), ("python", "chromium")
LANES = ("tcp", "relayed", "direct", "webrtc", "quic")
STATES = ("warm", "idle", "first")
MESSAGES = {"warm": 12, "idle": 5, "first": 2}
LOSSY = {"warm": 12, "idle": 3, "first": 1}  # many of them wait for a retransmission
QUICK = {"warm": 8, "idle": 3, "first": 1}
BULK_MB, BULK_RTT_MS, BULK_RATE_MBIT = 20, 30.0, 100.0
ENDS = Path(__file__).with_name("paths_ends.py")
REAL_TIME = ("chrt", "--rr", "5")

type Beside = tuple[Callable[[Lab, Path], None], Callable[[Path], None]]


@contextlib.contextmanager
def path(rtt_ms: float, loss_pct: float, rate_mbit: float, far_defaults: bool) -> Iterator[Lab]:
    """One path: half of the delay on either side of the relay's switch."""
    leg = Leg(rtt_ms / 4, loss_pct, rate_mbit)
    with Lab("open", "open", leg_a=leg, leg_b=leg) as lab:
        window = str(INITIAL_WINDOW)
        for box in ("hA", "relay", "hB"):
            if box != "hB" or not far_defaults:
                lab.sysctl(box, "net.ipv4.tcp_slow_start_after_idle", 0)
                lab.sysctl(box, "net.ipv4.tcp_rmem", f"4096 {RECEIVE_BYTES} {32 << 20}")
                for line in lab.run(box, "ip", "route").splitlines():
                    lab.run(
                        box, "ip", "route", "change", *line.split(), "initcwnd", window, "initrwnd", window
                    )
        allow_cubic(lab)
        yield lab


def allow_cubic(lab: Lab) -> None:
    """Give Chromium's sockets what a phone's kernel gives them; a box takes only what the machine allows."""
    allowed = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control")
    before = allowed.read_text()
    allowed.write_text(before.strip() + " cubic")
    try:
        lab.sysctl("hB", "net.ipv4.tcp_congestion_control", "cubic")
    finally:
        allowed.write_text(before)


def start_far_end(lab: Lab, peer: str, folder: Path, sealed: bool) -> None:
    """Start a node in hB, and the echoes beside a headless one."""
    relay, here = f"http://{RELAY}:{RELAY_PORT}", SIDES["B"].address
    if peer == "chromium":
        flags = [
            "--headless=new", "--no-sandbox", "--no-first-run", "--disable-background-networking",
            "--disable-component-update", "--disable-sync", "--disable-gpu", "--disable-dev-shm-usage",
            "--disable-features=LocalNetworkAccessChecks", f"--user-data-dir={folder}/profile",
            "--user-agent=Chrome swarm-agreed",
        ]  # fmt: skip
        if sealed:  # WebCrypto, as with https
            flags.append(f"--unsafely-treat-insecure-origin-as-secure={relay}")
        lab.start("hB", *REAL_TIME, "chromium", *flags, f"{relay}/?workers=1#auto", log=folder / "node.log",
                  environment={"HOME": str(folder)})  # fmt: skip
        return
    lab.start("hB", *REAL_TIME, sys.executable, str(ENDS), "echo", here, log=folder / "echo.log")
    lab.start("hB", *REAL_TIME, sys.executable, "-m", "backbone.node.cli", "--relay", relay,
              "--memory", "64MB", "--threads", "1", "--listen", f"{here}:{NODE_PORT}",
              log=folder / "node.log")  # fmt: skip


def in_lab(
    rtt_ms: float, loss_pct: float, peer: str, numbers: dict[str, int], *, far_defaults: bool = False,
    rate_mbit: float = 0.0, sealed: bool = False, beside: Beside | None = None,
) -> tuple[list[dict[str, Any]], float]:  # fmt: skip
    """Run one configuration; gives what the backbone's end measured, and the ping in ms. beside: what starts
    before the messages, and what is then done before everything goes."""
    with (
        TemporaryDirectory(prefix="bench-paths-", ignore_cleanup_errors=True) as name,
        path(rtt_ms, loss_pct, rate_mbit, far_defaults) as lab,
    ):
        folder, here = Path(name), SIDES["A"].address
        caches = {"XDG_CACHE_HOME": name, "XDG_STATE_HOME": name}
        lab.start("relay", *REAL_TIME, sys.executable, "-m", "relay.cli", "serve", "--port", str(RELAY_PORT),
                  "--backbone-token", TOKEN, "--stun-addresses", f"{RELAY},{RELAY_2}",
                  environment=caches, log=folder / "relay.log")  # fmt: skip
        lab.round_trips_s("hA", SIDES["B"].address, 5)  # who is where
        path_ms = 1e3 * median(lab.round_trips_s("hA", SIDES["B"].address)) if rtt_ms else 0.0
        wait_for(lab)
        start_far_end(lab, peer, folder, sealed)
        task = {
            "relay": f"http://{RELAY}:{RELAY_PORT}",
            "node": SIDES["B"].address if peer == "python" and not sealed else "",
            "sealed": sealed,
            "here": here,
            "relay_box": lab.command("relay")[3],
            **numbers,
        }
        try:
            if beside is not None:
                beside[0](lab, folder)
            with kept(task["relay_box"].removesuffix("relay")):
                said = lab.run(
                    "hA", *REAL_TIME, sys.executable, str(ENDS), "end", json.dumps(task), timeout_s=900.0
                )
        except Exception as exc:
            for log in ("relay.log", "node.log"):
                exc.add_note(f"--- {log}\n{(folder / log).read_text()[-1500:]}")
            raise
        if beside is not None:
            beside[1](folder)
        return json.loads(said.splitlines()[-1]), path_ms


def wait_for(lab: Lab) -> None:
    give_up = time.monotonic() + 30
    while True:
        try:
            return lab.connect("hA", (RELAY, RELAY_PORT)).close()
        except OSError:
            if time.monotonic() > give_up:
                raise
            time.sleep(0.05)


def row(cell: dict[str, Any], peer: str, rtt_ms: float, path_ms: float, loss_pct: float, sealed: bool) -> Row:
    took_s = cell["took_s"]
    cuts = (
        [float("nan")] * 19
        if not took_s
        else took_s * 19
        if len(took_s) < 2
        else quantiles(took_s, n=20, method="inclusive")
    )
    p50_ms, p95_ms = 1e3 * cuts[9], 1e3 * cuts[18]
    return {
        "lane": cell["lane"],
        "peer": peer,
        "size_kb": cell["size_kb"],
        "state": cell["state"],
        "rtt_ms": rtt_ms,
        "loss_pct": loss_pct,
        "sealed": sealed and cell["lane"] == "relayed",
        "p50_over_rtt": p50_ms / path_ms,
        "p95_over_rtt": p95_ms / path_ms,
        "p50_ms": p50_ms,
        "p95_ms": p95_ms,
        "path_ms": path_ms,
        "messages": cell["asked"],
        "lost": cell["asked"] - len(took_s),
    }


def wide(rows: Sequence[Row]) -> list[Row]:
    """One line per path, peer and lane: sizes by states, p50 then p95."""
    lines: dict[tuple[object, ...], Row] = {}
    for each in sorted(
        rows, key=lambda r: (r["loss_pct"], r["rtt_ms"], r["peer"] != "python", LANES.index(r["lane"]))
    ):
        key = tuple(each[name] for name in ("rtt_ms", "loss_pct", "peer", "lane", "sealed"))
        head = {"rtt": each["rtt_ms"], "loss": each["loss_pct"], "peer": each["peer"],
                "lane": each["lane"] + (" sealed" if each["sealed"] else "")}  # fmt: skip
        blank: Row = {f"{kb} {state}": "-" for state in STATES for kb in SIZES_KB}
        line = lines.setdefault(key, head | blank)
        line[f"{each['size_kb']} {each['state']}"] = f"{each['p50_over_rtt']:.2f}/{each['p95_over_rtt']:.2f}"
    return list(lines.values())


def throughput(peer: str) -> list[Row]:
    """The same bytes over each lane and over plain TCP, one way, on lines of a rate."""
    cells, _ = in_lab(
        BULK_RTT_MS, 0.0, peer, dict(warm=0, idle=0, first=0, bulk_mb=BULK_MB), rate_mbit=BULK_RATE_MBIT
    )
    took_s = {cell["lane"]: median(cell["took_s"]) for cell in cells}
    return [
        {"lane": lane, "peer": peer, "rtt_ms": BULK_RTT_MS, "rate_mbit": BULK_RATE_MBIT, "mb": BULK_MB,
         "seconds": s, "mbit_per_s": 8 * BULK_MB / s, "over_tcp_pct": 100 * (s / took_s["tcp"] - 1)}
        for lane, s in took_s.items()
    ]  # fmt: skip


def masking() -> list[Row]:
    """What a WebSocket client's masking (RFC 6455 §5.3) costs: the frame as we send it, and unmasked."""
    from websockets.frames import Frame, Opcode
    from websockets.protocol import CLIENT, SERVER  # noqa: F401

    rows: list[Row] = []
    for size_kb in (12, 100):
        data = os.urandom(size_kb << 10)
        us = {}
        for masked in (False, True):
            frame = Frame(Opcode.BINARY, data)
            rounds = []
            for _ in range(30):
                started = time.perf_counter()
                for _ in range(50):
                    frame.serialize(mask=masked, extensions=[])
                rounds.append((time.perf_counter() - started) / 50 * 1e6)
            us[masked] = median(rounds)
        rows.append(
            {
                "size_kb": size_kb,
                "unmasked_us": us[False],
                "masked_us": us[True],
                "masking_us": us[True] - us[False],
            }
        )
    return rows


def main() -> int:
    parser = arguments(str(__doc__))
    parser.add_argument("--rtt", type=float, action="append", metavar="MS", help="propagation (30, 80, 100)")
    parser.add_argument(
        "--loss", type=float, action="append", metavar="PCT", help="on each leg, each way (0, 1)"
    )
    parser.add_argument("--peer", choices=PEERS, action="append", help="far end (both)")
    parser.add_argument("--only", choices=("paths", "throughput", "masking"), help="one of the three tables")
    parser.add_argument(
        "--seal", choices=("both", "yes", "no"), default="both", help="through the relay (both)"
    )
    parser.add_argument("--far-defaults", action="store_true", help="the far end's kernel as it is")
    parser.add_argument("--quick", action="store_true", help="80 ms without loss, python, few messages")
    args = parser.parse_args()
    why = why_not(delay=True)
    if why is not None:
        print(f"no laboratory here: {why}", file=sys.stderr)
        return 1
    peers = args.peer or (
        ["python"] if args.quick else [p for p in PEERS if p == "python" or shutil.which(p)]
    )
    rows: list[Row] = []
    if args.only in (None, "paths"):
        for rtt_ms in args.rtt or ([80.0] if args.quick else RTTS_MS):
            for loss_pct in args.loss or ([0.0] if args.quick else LOSSES_PCT):
                for peer in peers:
                    print(f"{rtt_ms:g} ms, {loss_pct:g} % loss, {peer}", file=sys.stderr, flush=True)
                    for sealed in (False, True):
                        if args.seal == ("no" if sealed else "yes"):
                            continue
                        numbers = QUICK if args.quick else LOSSY if loss_pct else MESSAGES
                        cells, path_ms = in_lab(
                            rtt_ms, loss_pct, peer, numbers, far_defaults=args.far_defaults, sealed=sealed
                        )
                        rows += [row(cell, peer, rtt_ms, path_ms, loss_pct, sealed) for cell in cells]
        report(
            "messages there and back, as a multiple of the ping: p50/p95 by size in KB and state",
            wide(rows),
            None,
            [
                "loss: on both legs, each way. far end's kernel: "
                + ("its defaults" if args.far_defaults else "as prescribed")
            ],
        )
    if args.only in (None, "throughput") and not args.quick:
        found = [each for peer in peers if peer == "python" for each in throughput(peer)]
        report("the same bytes over each lane and over plain TCP, one way", found)
    if args.only in (None, "masking"):
        report("masking of one frame", masking())
    if args.json is not None:
        write_json(rows, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
