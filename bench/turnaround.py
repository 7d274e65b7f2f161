"""
Where a message there and back spends its time besides the path: one row per lane and box.

In the laboratory of bench_paths, every box is watched for packets with the kernel's own time of each. turn_ms
is the median from the last packet of a message that came into a box to the first of the one that then left:
at the far end Chromium or the node, at the relay one way and the other, at the backbone's end the lane and
the asking program (it asks again as soon as it was answered). 12 KB a message, warm, one after the other.

    turnaround.py [--peer chromium] [--rtt 30]
"""

import socket
import struct
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

from bench_paths import NODE_PORT, REAL_TIME, in_lab  # noqa: E402
from paths_ends import LINK_PORT, RELAY_PORT, TCP_PORT  # noqa: E402
from table import Row, arguments, report  # noqa: E402

from e2e.natlab.lab import Lab, why_not  # noqa: E402

BOXES = {"hA": "backbone", "relay": "relay", "hB": "far end"}
LANE_OF_PORT = {RELAY_PORT: "relayed", LINK_PORT: "direct", NODE_PORT: "direct", TCP_PORT: "tcp"}
MESSAGE_BYTES = range(11_900, 13_000)  # 12 KB and what goes around them
GAP_NS, TURN_NS = 4_000_000, 15_000_000  # between messages; at most between a question and its answer
ETH_P_ALL, ETH_P_IP, SO_TIMESTAMPNS, PACKET_OUTGOING, TCP = 3, b"\x08\x00", 35, 4, 6  # <linux/if_*.h>


class Burst(NamedTuple):
    """One message on the wire: when its first and last packet passed, which way, on which lane, to whom."""

    first_ns: int
    last_ns: int
    out: bool
    lane: str
    peer: str


def watch(path: Path) -> None:
    """Write a line for each TCP packet with a payload that passes this box, until ended."""
    with (
        socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL)) as raw,
        path.open("w", buffering=1) as out,
    ):
        raw.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
        while True:
            data, notes, _, (_, _, kind, *_) = raw.recvmsg(1 << 17, 128)
            if data[12:14] != ETH_P_IP or data[23] != TCP:
                continue
            seconds, ns = struct.unpack("qq", next(v for _, t, v in notes if t == SO_TIMESTAMPNS)[:16])
            head = 14 + (data[14] & 15) * 4
            size = 14 + int.from_bytes(data[16:18]) - head - (data[head + 12] >> 4) * 4
            ends = (socket.inet_ntoa(data[26:30]), socket.inet_ntoa(data[30:34]))
            ports = struct.unpack_from("!HH", data, head)
            outgoing = kind == PACKET_OUTGOING
            if size > 0:
                print(seconds * 10**9 + ns, int(outgoing), ends[outgoing], *ports, size, file=out)


def bursts(lines: Sequence[str]) -> Iterator[Burst]:
    """Put the packets of each connection and direction together to messages; only those of the size asked."""
    flows: dict[tuple[str, ...], list[tuple[int, int]]] = {}
    for line in lines:
        at, *flow, size = line.split()
        flows.setdefault(tuple(flow), []).append((int(at), int(size)))
    for (out, peer, *ports), packets in flows.items():
        lane = next((LANE_OF_PORT[int(p)] for p in ports if int(p) in LANE_OF_PORT), "")
        starts = [0] + [i for i in range(1, len(packets)) if packets[i][0] - packets[i - 1][0] > GAP_NS]
        for start, end in zip(starts, [*starts[1:], len(packets)], strict=True):
            message = packets[start:end]
            if lane and sum(size for _, size in message) in MESSAGE_BYTES:
                yield Burst(message[0][0], message[-1][0], out == "1", lane, peer)


def turns(found: Sequence[Burst]) -> dict[tuple[str, str], list[float]]:
    """Lane and from whom -> ms from each message in to the next one out on the same lane."""
    result: dict[tuple[str, str], list[float]] = {}
    ordered = sorted(found)
    for i, came in enumerate(ordered):
        left = next((b for b in ordered[i + 1 :] if b.out and b.lane == came.lane), None)
        if not came.out and left is not None and left.first_ns - came.last_ns < TURN_NS:
            result.setdefault((came.lane, came.peer), []).append((left.first_ns - came.last_ns) / 1e6)
    return result


def measure(peer: str, rtt_ms: float, messages: int) -> Iterator[Row]:
    """Watch one run."""
    seen: dict[str, list[str]] = {}

    def start(lab: Lab, folder: Path) -> None:
        for box in BOXES:
            lab.start(box, *REAL_TIME, sys.executable, __file__, "watch", str(folder / f"{box}.packets"),
                      log=folder / f"{box}.log")  # fmt: skip
        time.sleep(1.0)

    def end(folder: Path) -> None:
        seen.update({box: (folder / f"{box}.packets").read_text().splitlines() for box in BOXES})

    cells, path_ms = in_lab(rtt_ms, 0.0, peer, dict(warm=messages, idle=0, first=0), beside=(start, end))
    for box, name in BOXES.items():
        for (lane, whence), found in sorted(turns(list(bursts(seen[box]))).items()):
            yield {"peer": peer, "lane": lane, "box": name, "from": whence, "turn_ms": median(found),
                   "messages": len(found)}  # fmt: skip
    for cell in cells:
        if cell["size_kb"] == 12:
            beyond = 1e3 * median(cell["took_s"]) - path_ms
            yield {"peer": peer, "lane": cell["lane"], "box": "all, beyond the path", "from": "",
                   "turn_ms": beyond, "messages": len(cell["took_s"])}  # fmt: skip


def main() -> int:
    if sys.argv[1:2] == ["watch"]:
        watch(Path(sys.argv[2]))
    parser = arguments(str(__doc__))
    parser.add_argument("--peer", choices=("python", "chromium"), default="chromium")
    parser.add_argument("--rtt", type=float, default=30.0)
    parser.add_argument("--messages", type=int, default=24)
    args = parser.parse_args()
    why = why_not(delay=True)
    if why is not None:
        print(f"no laboratory here: {why}", file=sys.stderr)
        return 1
    report("where a message spends its time", list(measure(args.peer, args.rtt, args.messages)), args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
