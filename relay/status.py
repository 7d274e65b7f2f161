"""
Who is at a relay, and which lane carries each node's calls: `relay status`, from the relay's /status.json.

The lane is what the backbone reported last; age is how old the evidence for it is by now. Key is the
fingerprint a node or backbone gave of itself; sealed: whether this relay could not read the last call.
"""

import json
import shutil
import sys
import time
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from relay.program.text import clean

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


def show(status: Mapping[str, Any], out: TextIO, width: int | None = None) -> None:
    """Print it for people; names are the peers' own words. width: columns of the terminal; None: no limit."""
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
        name, model, count = clean(each["name"]), clean(each["model_name"]), len(each["nodes"])
        print(f"backbone {name}: {model}, {count} node{'' if count == 1 else 's'}{rtt}{key}", file=out)
    lines = [_line(node, backbones) for node in status["nodes"]]
    if lines:
        _table([COLUMNS, *lines], out, width)


def _line(node: Mapping[str, Any], backbones: Mapping[int, Mapping[str, Any]]) -> tuple[str, ...]:
    path, backbone = node["path"], backbones.get(node["backbone"])
    seal = node.get("seal") or {}
    times = [path.get("p50_ms"), path.get("p95_ms")]
    return (
        clean(node["name"]) + (" (paused)" if node["paused"] else ""),
        clean(node["kernel"]),
        "-" if backbone is None else clean(backbone["name"]),
        f"{node['slices_ready']}/{node['slices_assigned']}",
        seal.get("identity") or "-",
        "-" if seal.get("sealed") is None else "yes" if seal["sealed"] else "no",
        clean(path["lane"]),
        "-" if None in times else "/".join(f"{ms:.1f}" for ms in times),
        "-" if path["age_s"] is None else f"{path['age_s']:.0f}",
        clean(path["why"]),
    )


def _table(lines: Sequence[Sequence[str]], out: TextIO, width: int | None) -> None:
    """Print columns; where they do not fit, the last one (why) goes to a line of its own below each row."""
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    wraps = width is not None and sum(widths) + 2 * (len(widths) - 1) > width
    for number, line in enumerate(lines):
        cells = line[:-1] if wraps else line
        row = "  ".join(cell.ljust(each) for cell, each in zip(cells, widths, strict=False)).rstrip()
        print(row if width is None else _cut(row, width), file=out)
        if wraps and number and line[-1]:
            print(_cut(f"    {line[-1]}", width or 0), file=out)


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: max(1, width - 1)] + "…"


def run(url: str, out: TextIO, as_json: bool = False, watch_s: float | None = None) -> int:
    """Print a relay's status, once or for ever; returns the exit status."""
    while True:
        try:
            status = fetch(url)
        except (OSError, ValueError) as exc:
            print(f"relay: {url}: {clean(str(getattr(exc, 'reason', exc)))}", file=sys.stderr)
            if watch_s is None:
                return 1
        else:
            if watch_s is not None and out.isatty():
                out.write("\x1b[H\x1b[2J")  # from the top, on an empty screen
            if as_json:
                print(json.dumps(status), file=out)
            else:
                show(status, out, shutil.get_terminal_size().columns if out.isatty() else None)
            out.flush()
        if watch_s is None:
            return 0
        time.sleep(watch_s)
