"""`expert-node`: arguments -> ClientConfig -> run; one line on the terminal per change."""

import argparse
import asyncio
import json
import logging
import os
import re
import shutil
import socket
import sys
from collections.abc import Callable
from time import strftime
from typing import Any

import httpx

from backbone.errors import BackboneError, ConfigError
from backbone.experts.native import KernelFault, NativeKernel
from backbone.experts.nodes import INEXACT_KERNELS
from backbone.experts.webgpu import WebGpuKernel
from backbone.lanes.direct import ListenAt
from backbone.node.client import ClientConfig, NodeClient, Status
from backbone.node.disk import default_cache_dir
from backbone.node.idle import why_idle
from backbone.node.keys import default_key_file, fresh_identity, kept_identity
from backbone.node.machine import State
from relay.program import values
from relay.program.running import leave, run_async
from relay.program.text import clean, log_to_stderr
from relay.program.values import BadValue, OneLineParser
from relay.wire.messages import NAME_CHARS
from relay.wire.sealing import SealPolicy

REPORT_S = 10.0  # between two lines while only the numbers grow
IDLE_S = 10.0  # whoever is not asked for so long wants to know why
MOST_STATUS_BYTES = 8 << 20
SETTLE_S = 0.2  # changes within this time share a line


def fingerprint(text: str) -> str:
    """Read a key's fingerprint as `backbone serve` logs it, with or without dashes."""
    if not re.fullmatch(r"[0-9a-fA-F]{20}", text.replace("-", "")):
        raise BadValue(f"{text[:60]!r} is no fingerprint like 12ab-34cd-56ef-7890-1234")
    return text


def _default_memory_bytes() -> int:
    total = values.machine_bytes()
    return 512_000_000 if total is None else min(512_000_000, total // 2)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = OneLineParser(prog="expert-node", description="Hold experts of a model and compute them for a swarm.")
    p.add_argument(
        "--relay",
        required=True,
        type=values.url("http", "https"),
        metavar="URL",
        help="the relay's URL, as in a browser",
    )
    p.add_argument(
        "--memory",
        type=values.memory(1 << 20),
        default=_default_memory_bytes(),
        metavar="SIZE",
        help="memory to give (512MB)",
    )
    p.add_argument(
        "--name",
        type=values.line(1, NAME_CHARS),
        default=clean(socket.gethostname(), NAME_CHARS),
        help="how others see this node (the host's name)",
    )
    p.add_argument(
        "--threads", type=values.threads, default=max(1, (os.cpu_count() or 2) - 1), help="compute threads"
    )
    p.add_argument(
        "--listen",
        type=values.host_and_port,
        metavar="HOST:PORT",
        help="let the backbone reach this node directly",
    )
    p.add_argument(
        "--public-url",
        type=values.url("ws", "wss", "http", "https"),
        metavar="URL",
        help="how others reach --listen (ws://HOST:PORT)",
    )
    p.add_argument(
        "--tls-cert", type=values.path, metavar="PEM", help="certificate of --listen; any, it is pinned"
    )
    p.add_argument("--tls-key", type=values.path, metavar="PEM", help="its key")
    p.add_argument("--no-links", action="store_true", help="let all calls come through the relay")
    p.add_argument(
        "--backbone-key",
        type=fingerprint,
        metavar="FINGERPRINT",
        help="work only for the backbone with this key, and sealed",
    )
    p.add_argument(
        "--require-sealed", action="store_true", help="work only for a backbone that seals, whichever"
    )
    p.add_argument("--no-seal", action="store_true", help="let the relay read what passes")
    p.add_argument(
        "--key-file", type=values.path, metavar="PEM", help="this node's key (in the user's XDG state folder)"
    )
    p.add_argument(
        "--kernel",
        choices=["native", "webgpu"],
        default="native",
        help="webgpu: this machine's graphics device, for backbones that allow inexact nodes (native)",
    )
    p.add_argument(
        "--cache-dir",
        type=values.path,
        metavar="FOLDER",
        help="where slices outlive this run (in the user's XDG cache folder); nodes may share it",
    )
    p.add_argument(
        "--cache-size",
        type=values.size(),
        metavar="SIZE",
        help="how much disk they may take; 0: keep none (twice --memory)",
    )
    p.add_argument("--verbose", action="store_true", help="say more")
    return p


def main(argv: list[str] | None = None) -> int:
    """Run until Ctrl-C, or until the node cannot serve; the exit status says which."""
    args = parser().parse_args(argv)
    level = logging.DEBUG if args.verbose else logging.WARNING
    log_to_stderr(level)
    logging.getLogger("httpcore").setLevel(logging.WARNING)
    try:
        config = ClientConfig(
            args.relay,
            args.memory,
            args.name,
            1 if args.kernel == "webgpu" else args.threads,
            ListenAt.of(args.listen, args.public_url, args.tls_cert, args.tls_key),
            not args.no_links,
            seal_policy(args),
            None if args.cache_size == 0 else args.cache_dir or default_cache_dir(os.environ),
            2 * args.memory if args.cache_size is None else args.cache_size,
        )
        return run_async(lambda: _serve(config, args.kernel), stopped_status=0)
    except (BackboneError, KernelFault, OSError) as exc:
        print(f"expert-node: {exc}", file=sys.stderr)
        return 1


def seal_policy(args: argparse.Namespace) -> SealPolicy:
    """
    Say how this node seals. Its own key is kept where that is possible; it only names the node to others.

    Raises:
        ConfigError: the options contradict each other, or the key that was named cannot be used.
    """
    wanted = args.require_sealed or args.backbone_key is not None
    if args.no_seal and wanted:
        raise ConfigError("--no-seal contradicts --require-sealed and --backbone-key")
    if args.no_seal:
        return SealPolicy()
    if args.key_file is not None:
        identity = kept_identity(args.key_file)
    else:
        try:
            identity = kept_identity(default_key_file(os.environ, "node"))
        except ConfigError as exc:
            logging.warning("%s; this node has another key at each start", exc)
            identity = fresh_identity()
    return SealPolicy(identity, args.require_sealed, args.backbone_key)


async def _serve(config: ClientConfig, kernel_name: str) -> int:
    kernel = WebGpuKernel() if kernel_name == "webgpu" else NativeKernel(threads=config.threads)
    reporter = Reporter(config, asyncio.get_running_loop())
    client = NodeClient(config, kernel, reporter.changed)
    reporter.status = client.status
    serving = asyncio.create_task(client.run())
    idle = asyncio.create_task(reporter.say_why_idle())
    try:
        reason = await asyncio.shield(serving)
    except asyncio.CancelledError:
        client.leave("the owner stopped this node")
        reason = await serving
    finally:
        idle.cancel()
    reporter.print_line()
    print(f"expert-node: {reason or 'left'}", flush=True)
    return 0 if reason in ("left", "") else 1


async def _relay_status(url: str) -> dict[str, Any]:
    """Ask the relay who is there; empty when it does not say."""
    data = bytearray()
    try:
        async with (
            httpx.AsyncClient(timeout=5.0, trust_env=False) as http,
            http.stream("GET", f"{url}/status.json") as answer,
        ):
            async for piece in answer.aiter_bytes():
                data += piece
                if len(data) > MOST_STATUS_BYTES:
                    return {}
        found = json.loads(data)
    except (httpx.HTTPError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


class Reporter:
    """Print one line when state or holdings change, and now and then while calls flow."""

    def __init__(self, config: ClientConfig, loop: asyncio.AbstractEventLoop) -> None:
        self._config = config
        self._loop = loop
        self._due: asyncio.TimerHandle | None = None
        self._said: tuple[object, ...] = ()
        self._grown_said = (0, 0)
        self._said_at = loop.time()
        self.status: Callable[[], Status]

    def changed(self) -> None:
        """Something may have changed; look at it when the dust has settled."""
        if self._due is None:
            self._due = self._loop.call_later(SETTLE_S, self._look)

    def _look(self) -> None:
        self._due = None
        status = self.status()
        what = (status.state, status.wanted, status.failed > 0, status.seal)
        now = (status.calls, status.experts)
        grown = now != self._grown_said and self._loop.time() - self._said_at >= REPORT_S
        if what != self._said or grown:
            self._said = what
            self.print_line()

    def print_line(self) -> None:
        """One line, everything in it measured."""
        status = self.status()
        self._grown_said, self._said_at = (status.calls, status.experts), self._loop.time()
        self._print(line(self._config, status))

    def _print(self, text: str) -> None:
        text = f"{strftime('%H:%M:%S')} {clean(text, 1000)}"
        if sys.stdout.isatty():
            text = clean(text, max(20, shutil.get_terminal_size().columns))
        print(text, flush=True)

    async def say_why_idle(self) -> None:
        """While nobody asks this node, say why, as far as the relay's status tells; each reason once."""
        said, idle_since = "", self._loop.time()
        while True:
            await asyncio.sleep(IDLE_S / 4)
            status = self.status()
            asked = status.calls > 0 and status.state is not State.OFFERED
            if asked or status.state not in (State.OFFERED, State.SERVING):
                idle_since = self._loop.time()
            if self._loop.time() - idle_since < IDLE_S:
                continue
            idle_since = self._loop.time()
            exact = status.kernel not in INEXACT_KERNELS
            seen = await _relay_status(self._config.relay_url)
            why = why_idle(seen, status.kernel, self._config.memory_bytes, exact)
            if why is not None and why != said:
                self._print(f"idle: {why}")
            said = why or ""


def line(config: ClientConfig, status: Status) -> str:
    """Write a status as one line."""
    word = "waiting" if status.state is State.OFFERED else status.state.value.lower()  # for a backbone
    parts = [f"{word:<10} {config.relay_url}"]
    if status.state is State.CONNECTING and status.reason:
        parts.append(f"last: {status.reason}")
    if status.seal == "sealed":
        parts.append(f"sealed, backbone {status.backbone}")
    elif status.seal in ("unsealed", "refused"):
        parts.append(f"{status.seal}: {status.seal_why}")
    if status.gb_per_s:
        parts.append(f"{status.kernel} {status.gb_per_s:.1f} GB/s")
    if status.wanted or status.experts:
        parts.append(
            f"layers {spans(status.layers)}, {status.experts} experts, {status.held_bytes / 1e6:.0f} MB"
        )
    if status.calls or status.failed:
        parts.append(f"{status.calls} calls, {status.rows} rows, {status.rows_per_s:.0f} rows/s")
        parts.append(f"in {status.bytes_in / 1e6:.1f} MB, out {status.bytes_out / 1e6:.1f} MB")
    if status.failed:
        parts.append(f"{status.failed} refused")
    return " · ".join(parts)


def spans(numbers: tuple[int, ...]) -> str:
    """Write 0,1,2,5 as `0-2,5`; nothing as `none`."""
    out: list[str] = []
    for number in numbers:
        first, _, last = out[-1].partition("-") if out else ("", "", "")
        if out and number == int(last or first) + 1:
            out[-1] = f"{first}-{number}"
        else:
            out.append(str(number))
    return ",".join(out) or "none"


if __name__ == "__main__":
    leave(main())
