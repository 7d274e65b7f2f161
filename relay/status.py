"""
Who is at a relay, and which lane carries each node's calls: `relay status`, from the relay's /status.json.

The lane is what the backbone reported last; age is how old the evidence for it is by now. Key is the
fingerprint a node or backbone gave of itself; sealed: whether this relay could not read the last call.
"""

import json
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

TIMEOUT_S = 5.0
COLUMNS = ("node", "kernel", "backbone", "slices", "key", "sealed", "lane", "p50/p95 ms", "age s", "why")


def fetch(url: str) -> dict[str, Any]:
    """
    Ask a relay.

    Raises:
        OSError: it does not answer. ValueError: what answers is no relay.
    """
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"{url.rstrip('/')}/status.json", timeout=TIMEOUT_S) as answer:
        status = json.load(answer)
    if not isinstance(status, dict) or not {"relay", "nodes", "backbones"} <= status.keys():
        raise ValueError(f"{url} is no relay")
    return status


def show(status: Mapping[str, Any], out: TextIO) -> None:
    """Print it for people."""
    backbones = {each["peer"]: each for each in status["backbones"]}
    stun = status.get("stun") or {}
    ports = ", ".join(map(str, stun.get("ports", ())))
    said = [
        f"relay {status['relay']}{', stopping' if status['draining'] else ''}: {status['sessions']} sessions",
        f"{status['open_calls']} calls under way",
        f"STUN on UDP {ports}" if ports else f"no STUN: {stun.get('why_off', '')}",
    ]
    print(", ".join(said), file=out)
    for each in backbones.values():
        rtt = "" if each["rtt_ms"] is None else f", {each['rtt_ms']:.1f} ms away"
        key = f", key {each['seal']}" if each.get("seal") else ", does not seal"
        print(
            f"backbone {each['name']}: {each['model_name']}, {len(each['nodes'])} nodes{rtt}{key}", file=out
        )
    lines = [_line(node, backbones) for node in status["nodes"]]
    if lines:
        _table([COLUMNS, *lines], out)


def _line(node: Mapping[str, Any], backbones: Mapping[int, Mapping[str, Any]]) -> tuple[str, ...]:
    path, backbone = node["path"], backbones.get(node["backbone"])
    seal = node.get("seal") or {}
    times = [path.get("p50_ms"), path.get("p95_ms")]
    return (
        node["name"] + (" (paused)" if node["paused"] else ""),
        node["kernel"],
        "-" if backbone is None else str(backbone["name"]),
        f"{node['slices_ready']}/{node['slices_assigned']}",
        seal.get("identity") or "-",
        "-" if seal.get("sealed") is None else "yes" if seal["sealed"] else "no",
        path["lane"],
        "-" if None in times else "/".join(f"{ms:.1f}" for ms in times),
        "-" if path["age_s"] is None else f"{path['age_s']:.0f}",
        path["why"],
    )


def _table(lines: Sequence[Sequence[str]], out: TextIO) -> None:
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    for line in lines:
        print(
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip(), file=out
        )


def run(url: str, out: TextIO) -> int:
    """Print a relay's status; returns the exit status."""
    try:
        show(fetch(url), out)
    except (OSError, ValueError) as exc:
        print(f"relay: {url}: {getattr(exc, 'reason', exc)}", file=out)
        return 1
    return 0
