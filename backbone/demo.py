"""
`make demo`: a whole swarm on one machine, one real answer, and the proof that it is the right one.

Starts a relay, a headless node and (where Chromium is installed) a browser tab as processes of their own, a
backbone in this one; asks a question; shows who computed what; asks again with all experts local and compares
the token ids; compares with plain llama.cpp; then waits for phones until Ctrl-C.
"""

import argparse
import asyncio
import json
import logging
import os
import secrets
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
import segno

from backbone.config import Config, default_cache_dir
from backbone.errors import BackboneError
from backbone.experts.standing import Offload
from backbone.experts.tally import Tally
from backbone.gate.compare import common_prefix, compare_logits
from backbone.gate.logits import teacher_forced_logits
from backbone.model.demo_model import ensure_demo_model
from backbone.processes import running
from backbone.server import Backbone
from relay.program.running import leave, run_async

QUESTION = "Why is the sky blue? Answer in two sentences."
MAX_TOKENS = 64
READY_TIMEOUT_S = 120.0
START_TIMEOUT_S = 30.0
STOP_S = 8.0  # four programs end one after another
CHROMIUM_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
CHROMIUM_FLAGS = (
    "--headless=new", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-extensions", "--mute-audio",
    "--user-agent=Chrome swarm-agreed",  # whose browser it is agrees: the page begins without a press
)  # fmt: skip


class DemoFailed(Exception):
    """The demo did not show what it is there to show; the message says what and where to look."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A chat answer: its text and the ids of its tokens."""

    text: str
    tokens: tuple[int, ...]


def parser() -> argparse.ArgumentParser:
    """The demo's options; `make demo` passes ONCE=1, NO_TAB=1 and DEMO_FLAGS on."""
    options = argparse.ArgumentParser(prog="make demo", description=__doc__)
    options.add_argument("--once", action="store_true", help="exit after the check")
    options.add_argument(
        "--no-tab", action="store_true", help="no browser tab, even where Chromium is installed"
    )
    options.add_argument("--model", type=Path, metavar="GGUF", help="any MoE GGUF instead of the demo model")
    options.add_argument("--port", type=int, default=8765, help="the relay's port, for phones (8765)")
    options.add_argument("--question", default=QUESTION)
    options.add_argument(
        "--tokens", type=int, default=MAX_TOKENS, help=f"length of the answer ({MAX_TOKENS})"
    )
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; the line `demo: …` says how it went, the exit status too."""
    options = parser().parse_args(argv)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    try:
        return run_async(lambda: _run(options), grace_s=STOP_S)
    except (DemoFailed, BackboneError, OSError) as exc:
        print(f"demo: failed: {exc}")
        return 1


async def _run(options: argparse.Namespace) -> int:
    cache_dir = default_cache_dir(os.environ)
    model = options.model or await asyncio.to_thread(ensure_demo_model, cache_dir)
    async with AsyncExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="swarm-demo-")))
        token, port = secrets.token_hex(16), _free_port(options.port)
        local_url, phone_url = f"http://127.0.0.1:{port}", f"http://{_lan_address()}:{port}"
        _say("relay", f"{phone_url}")
        await stack.enter_async_context(
            _process(logs / "relay.log", sys.executable, "-m", "relay.cli", "serve", "--host", "0.0.0.0",
                     "--port", str(port), "--public-url", phone_url, "--backbone-token", token,
                     "--cache-dir", str(logs / "slices"))
        )  # fmt: skip
        await _until(
            lambda: _answers(f"{local_url}/healthz"), START_TIMEOUT_S, "the relay", logs / "relay.log"
        )
        config = Config(
            model=model,
            cache_dir=cache_dir,
            name="demo",
            relay=local_url,
            relay_token=token,
            port=_free_port(8080),
            offload=Offload.ALWAYS,  # this machine alone would be as quick: show the swarm
        )
        backbone = await stack.enter_async_context(Backbone(config))
        _say("backbone", describe(backbone))
        chromium = None if options.no_tab else next(filter(None, map(shutil.which, CHROMIUM_NAMES)), None)
        # Beside a tab the headless node lends half of what is needed, so that both are.
        share = 1.05 if chromium is None else 0.55
        memory = str(int(backbone.model.expert_bytes * share) + (1 << 20))
        await stack.enter_async_context(
            _process(logs / "node.log", sys.executable, "-m", "backbone.node.cli", "--relay", local_url,
                     "--memory", memory, "--name", "headless", "--threads", "1")
        )  # fmt: skip
        expected = 1
        if chromium is not None:
            profile = stack.enter_context(
                tempfile.TemporaryDirectory(prefix="swarm-tab-", ignore_cleanup_errors=True)
            )
            root = ["--no-sandbox"] if os.geteuid() == 0 else []
            await stack.enter_async_context(
                _process(logs / "tab.log", chromium, *CHROMIUM_FLAGS, *root, f"--user-data-dir={profile}",
                         f"{local_url}/?auto=1")
            )  # fmt: skip
            expected = 2
        else:
            _say("tab", "left out" if options.no_tab else "left out: no Chromium found in PATH")
        await _until(
            lambda: _covered(backbone, expected),
            READY_TIMEOUT_S,
            "all nodes with all slices",
            logs / "node.log",
        )
        for node in backbone.dispatcher.nodes.by_id.values():
            _say("node", f"{node.name}: {node.kernel}, {len(node.experts)} layers, {node.path}")
        return await _show(options, backbone, phone_url, expected)


async def _show(options: argparse.Namespace, backbone: Backbone, phone_url: str, expected: int) -> int:
    """Ask, account for the work, compare, and say how it went."""
    print(f"\n> {options.question}\n", flush=True)
    dispatcher = backbone.dispatcher
    dispatcher.tally.clear()
    started = time.monotonic()
    swarm = await _ask(backbone.url, options.question, options.tokens, show=True)
    seconds = time.monotonic() - started
    print(f"\n\n{len(swarm.tokens)} tokens in {seconds:.1f} s, every expert row computed by:\n")
    print(work_table(dispatcher.tally), flush=True)
    used = sum(1 for name, work in dispatcher.tally.work.items() if name != Tally.LOCAL_NAME and work.calls)
    dispatcher.policy = replace(dispatcher.policy, local_only=True)
    local = await _ask(backbone.url, options.question, options.tokens, show=False)
    dispatcher.policy = replace(dispatcher.policy, local_only=False)
    identical = common_prefix(swarm.tokens, local.tokens)
    _say(
        "identity",
        f"{identical} of {len(swarm.tokens)} greedy tokens equal to the run with all experts local",
    )
    print(await _beside_llama_cpp(backbone, options, swarm), flush=True)
    if identical != len(swarm.tokens) or len(local.tokens) != len(swarm.tokens):
        raise DemoFailed(f"token {identical} differs between swarm and local experts")
    if used != expected:
        raise DemoFailed(f"{used} of {expected} nodes computed something")
    print(f"demo: ok tokens={len(swarm.tokens)} identical={identical} nodes={used}", flush=True)
    if not options.once:
        print(f"\nOpen on a phone in this network:  {phone_url}\n")
        segno.make(phone_url, error="m").terminal(compact=True)
        print(f"OpenAI endpoint: {backbone.url}/v1    Ctrl-C ends everything.", flush=True)
        await asyncio.Event().wait()
    return 0


async def _ask(url: str, question: str, max_tokens: int, *, show: bool) -> Answer:
    """Ask the OpenAI endpoint greedily, streaming; the same request always, so that runs can be compared."""
    body = {
        "messages": [{"role": "user", "content": question}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "logprobs": True,
        "top_logprobs": 1,
        "cache_prompt": False,
    }
    text, tokens = "", []
    async with (
        httpx.AsyncClient(timeout=300, trust_env=False) as client,
        client.stream("POST", f"{url}/v1/chat/completions", json=body) as reply,
    ):
        if reply.status_code != 200:
            raise DemoFailed(f"the chat request failed: {(await reply.aread()).decode()[:500]}")
        async for line in reply.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise DemoFailed(f"the stream ended with an error: {event['error'].get('message')}")
            for choice in event["choices"]:
                piece = choice["delta"].get("content") or ""
                text += piece
                tokens += [entry["id"] for entry in (choice.get("logprobs") or {}).get("content") or []]
                if show:
                    print(piece, end="", flush=True)
    return Answer(text, tuple(tokens))


async def _beside_llama_cpp(backbone: Backbone, options: argparse.Namespace, swarm: Answer) -> str:
    """Say how close we are to plain llama.cpp, with the same text forced on both."""
    engine = backbone.engine
    async with httpx.AsyncClient(
        timeout=60, trust_env=False, base_url=engine.url, headers=engine.headers
    ) as client:
        messages = [{"role": "user", "content": options.question}]
        prompt = (await client.post("/apply-template", json={"messages": messages})).json()["prompt"]
        ids = (await client.post("/tokenize", json={"content": prompt, "parse_special": True})).json()[
            "tokens"
        ]
    tokens = [*ids, *swarm.tokens]
    path = backbone.model.path
    plain = await teacher_forced_logits(path, [tokens])
    ours = await teacher_forced_logits(path, [tokens], swarm=backbone.dispatcher.call)
    result = compare_logits(plain, ours)
    greedy = [int(row.argmax()) for row in plain[0][len(ids) - 1 : -1]]
    prefix = common_prefix(greedy, swarm.tokens)
    return (
        f"llama.cpp     greedy prefix in common {prefix} of {len(swarm.tokens)} tokens; teacher-forced over"
        f" {result.positions} positions: argmax equal {result.argmax_agreement:.1%}, cosine of the logits"
        f" worst {result.cosine_worst:.6f}, mean {result.cosine_mean:.6f}"
    )


def describe(backbone: Backbone) -> str:
    """Say what is served and what that costs this machine."""
    model, held_mb = backbone.model, backbone.engine.rss_bytes() / 1e6
    return (
        f"{model.name}, {len(model.layers)} layers x {model.num_experts} experts; llama.cpp's process has"
        f" {held_mb:.0f} MB resident, {model.expert_bytes / 1e6:.0f} MB of experts are not among them"
    )


def work_table(tally: Tally) -> str:
    """Write who computed what: one line per holder."""
    head = ("node", "kernel", "path", "layers", "expert rows", "calls", "out kB", "in kB", "rtt p50/p95 ms")
    rows = [
        (
            work.name, work.kernel, work.path, work.layers(), str(sum(work.rows.values())), str(work.calls),
            f"{work.bytes_out / 1e3:.0f}", f"{work.bytes_in / 1e3:.0f}",
            f"{work.round_trip_ms(0.5):.2f} / {work.round_trip_ms(0.95):.2f}",
        )
        for work in tally.work.values()
    ]  # fmt: skip
    widths = [max(len(line[i]) for line in [head, *rows]) for i in range(len(head))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        for line in [head, *rows]
    ]
    total = sum(work.bytes_out + work.bytes_in for work in tally.work.values())
    per_token = total / max(1, tally.tokens) / 1e3
    return "\n".join(
        ["  " + line.rstrip() for line in lines] + [f"  {per_token:.2f} kB per token and layer on the wire"]
    )


@asynccontextmanager
async def _process(log: Path, *command: str) -> AsyncIterator[None]:
    """Run a program of the swarm, its output in `log`; it ends with the demo."""
    with log.open("wb") as output:
        async with running(*command, output=output):
            yield


async def _until(check: Callable[[], Awaitable[bool]], timeout_s: float, what: str, log: Path) -> None:
    """Wait until `check()` is true; when it never is, show the end of the log that should tell why."""
    give_up = time.monotonic() + timeout_s
    while not await check():
        if time.monotonic() > give_up:
            tail = log.read_text(errors="replace").splitlines()[-8:] if log.exists() else []
            raise DemoFailed(
                f"{what} did not come up within {timeout_s:.0f} s; {log.name} ends:\n" + "\n".join(tail)
            )
        await asyncio.sleep(0.1)


async def _answers(url: str) -> bool:
    async with httpx.AsyncClient(timeout=2, trust_env=False) as client:
        try:
            return (await client.get(url)).status_code == 200
        except httpx.HTTPError:
            return False


async def _covered(backbone: Backbone, nodes: int) -> bool:
    table = backbone.dispatcher.nodes
    everywhere = all(
        table.coverage(layer, backbone.model.num_experts) == 1 for layer in backbone.model.layers
    )
    return everywhere and len(table.by_id) == nodes


def _free_port(wanted: int) -> int:
    for port in (wanted, 0):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("0.0.0.0", port))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    raise DemoFailed("no free port")


def _lan_address() -> str:
    """Give the address this machine has in its network: what a phone on the same Wi-Fi can reach."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # RFC 5737 TEST-NET-1: chooses a route, sends nothing
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])


def _say(what: str, text: str) -> None:
    print(f"{what:<12}  {text}", flush=True)


if __name__ == "__main__":
    leave(main())
