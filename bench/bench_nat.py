"""
Which pairs of NATs end direct, which on the relay, and how soon a node that joins answers: one row per pair.

The real relay, backbone and headless node in network namespaces (e2e/natlab; root and nftables), a model of
random weights, the backbone asked without pause. Times count from the moment the relay knows the node.
`ended` is the path that carried calls when watching stopped, which is when it is direct; first_answer_ms
includes fetching the slices, `why` is what the backbone says.
"""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]

from table import Row, arguments, report  # noqa: E402

from backbone.model.random_model import Shape, make_random_moe  # noqa: E402
from e2e.natlab.lab import NAT_TYPES, Lab, Leg, why_not  # noqa: E402
from e2e.natlab.swarm import LabSwarm  # noqa: E402


def measure(
    model: Path, nat_a: str, nats_b: Sequence[str], rtt_ms: float, relay_ms: float, watch_s: float
) -> Iterator[Row]:
    """Run one backbone behind one NAT, and let nodes join it one after the other, each behind another."""
    half = Leg(rtt_ms / 4)  # two legs, both ways
    with (
        TemporaryDirectory(prefix="bench-nat-") as folder,
        Lab(nat_a, leg_a=half, leg_b=half, leg_relay=Leg(relay_ms)) as lab,
    ):
        swarm = LabSwarm(lab, Path(folder))
        swarm.start_relay()
        swarm.start_backbone(model)
        for nat_b in nats_b:
            lab.set_nat("B", nat_b)
            joined = swarm.join(watch_s, until="direct", name=f"node-{nat_b}")
            (node,) = [each for each in swarm.status()["nodes"] if each["name"] == f"node-{nat_b}"]
            swarm.leave(f"node-{nat_b}")
            direct_ms = joined.direct_after_ms
            yield {
                "nat_a": nat_a,
                "nat_b": nat_b,
                "ended": joined.ended,
                "first_answer_ms": round(joined.first_answer_ms),
                "direct_after_ms": None if direct_ms is None else round(direct_ms),
                "lane": node["path"]["lane"],
                "why": node["path"]["why"],
            }
        swarm.close()


def main() -> int:
    parser = arguments(__doc__ or "")
    parser.add_argument("--nats", default=",".join(NAT_TYPES), help="kinds of NAT, comma between (all)")
    parser.add_argument("--nats-a", help="on the backbone's side (as --nats)")
    parser.add_argument("--rtt-ms", type=float, default=0.0, help="round trip between the two hosts (0)")
    relay_help = "one way from the exchange to the relay; a direct path saves it four times (15)"
    parser.add_argument("--relay-ms", type=float, default=15.0, help=relay_help)
    parser.add_argument(
        "--watch-s", type=float, default=8.0, help="how long a pair may take to go direct (8)"
    )
    given = parser.parse_args()
    reason = why_not(delay=given.rtt_ms + given.relay_ms > 0)
    if reason is not None:
        print(f"bench-nat: {reason}", file=sys.stderr)
        return 1
    kinds = given.nats.split(",")
    with TemporaryDirectory(prefix="bench-nat-model-") as folder:
        model = make_random_moe(Path(folder) / "model.gguf", Shape())
        rows = [
            row
            for nat_a in (given.nats_a.split(",") if given.nats_a else kinds)
            for row in measure(model, nat_a, kinds, given.rtt_ms, given.relay_ms, given.watch_s)
        ]
    report(
        f"Pairs of NATs, backbone behind nat_a and node behind nat_b; round trip {given.rtt_ms:g} ms direct, "
        f"{given.rtt_ms + 4 * given.relay_ms:g} ms through the relay",
        rows,
        given.json,
        ["times from the moment the relay knows the node; the first answer includes fetching slices"],
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
