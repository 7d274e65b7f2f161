"""
What slow nodes cost an answer: a prompt and some tokens, with 1, 2 and 4 nodes of each kind, and 26 silent
ones, beside this machine alone in the same run.

Real sessions: a relay, a backbone with llama.cpp, nodes in a process of their own. "first" is the first
prompt after the nodes came, of which nothing is known then; "later" the median of those after it. Answers
with nodes and by this machine alone take turns; ratios are of medians. All tokens are compared.
"""

import asyncio
import contextlib
import os
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from time import monotonic

import httpx
from slow_nodes import KINDS
from table import Row, arguments, report

from backbone.config import Config, default_cache_dir
from backbone.experts.standing import Offload
from backbone.experts.tally import Tally
from backbone.model.demo_model import ensure_demo_model
from backbone.processes import running
from backbone.server import Backbone
from relay.config import Config as RelayConfig
from relay.server import RelayServer

PROMPT_TOKENS = 530
READY_S = 60.0
SHARE = {26: 0.15}  # what each of many pledges, as a part of the model; a few pledge all


class Asking:
    """The same prompt and the same greedy tokens, through the backbone's own door."""

    def __init__(self, backbone: Backbone, tokens: int) -> None:
        self.backbone = backbone
        self.tokens = tokens
        self._client = httpx.AsyncClient(
            timeout=300, trust_env=False, base_url=backbone.engine.url or "", headers=backbone.engine.headers
        )
        self._prompt: list[int] = []

    async def prepare(self) -> None:
        text = "Nodes hold slices of experts, and whoever is quickest answers. " * 80
        found = (await self._client.post("/tokenize", json={"content": text})).json()["tokens"]
        self._prompt = found[:PROMPT_TOKENS]

    async def prompt(self) -> tuple[float, list[int]]:
        """Give the seconds to the first token after a prompt."""
        return await self._complete(self._prompt, 1)

    async def decode(self) -> tuple[float, list[int]]:
        """Give the seconds for each of some tokens after a short prompt."""
        seconds, found = await self._complete(self._prompt[:8], self.tokens)
        return seconds / self.tokens, found

    async def _complete(self, prompt: list[int], tokens: int) -> tuple[float, list[int]]:
        body = {"prompt": prompt, "n_predict": tokens, "temperature": 0, "cache_prompt": False,
                "return_tokens": True, "ignore_eos": True}  # fmt: skip
        began = monotonic()
        answer = await self._client.post("/completion", json=body)
        took_s = monotonic() - began
        if answer.status_code != 200:
            raise SystemExit(f"HTTP {answer.status_code} after {took_s:.1f} s: {answer.text[:300]}")
        return took_s, answer.json()["tokens"]

    async def close(self) -> None:
        await self._client.aclose()


@contextlib.asynccontextmanager
async def nodes(asking: Asking, relay_url: str, kind: str, count: int) -> AsyncIterator[None]:
    """Nodes of a kind, from the moment they are ready until they are gone."""
    backbone, script = asking.backbone, Path(__file__).parent / "slow_nodes.py"
    memory = int(backbone.model.expert_bytes * SHARE.get(count, 1.1)) + (1 << 20)
    table = backbone.dispatcher.nodes
    async with running(
        sys.executable, str(script), "--relay", relay_url, "--kind", kind, "--count", str(count),
        "--memory", str(memory), output=asyncio.subprocess.DEVNULL, errors=None,
    ):  # fmt: skip
        await until(lambda: len(table.by_id) == count, f"{count} {kind} nodes")
        await until(
            lambda: all(
                table.coverage(layer, backbone.model.num_experts) == 1 for layer in backbone.model.layers
            ),
            f"{count} {kind} nodes with all slices",
        )
        yield
    await until(lambda: not table.by_id, "the nodes to be gone")


async def until(condition, what: str) -> None:  # type: ignore[no-untyped-def]
    give_up = monotonic() + READY_S
    while not condition():
        if monotonic() > give_up:
            raise SystemExit(f"waited {READY_S:.0f} s for {what}")
        await asyncio.sleep(0.02)


class Turns:
    """Answers with nodes and by this machine alone, turn by turn, so that a busy machine slows both."""

    def __init__(self, asking: Asking) -> None:
        self._asking = asking
        self.with_nodes: dict[str, list[float]] = {"prompt": [], "token": []}
        self.alone: dict[str, list[float]] = {"prompt": [], "token": []}
        self.same = True

    async def both(self, what: str) -> None:
        """Time one of each."""
        found = [await self._once(what, self.with_nodes, False), await self._once(what, self.alone, True)]
        self.same &= found[0] == found[1]

    async def _once(self, what: str, into: dict[str, list[float]], local_only: bool) -> list[int]:
        dispatcher = self._asking.backbone.dispatcher
        dispatcher.policy = replace(dispatcher.policy, local_only=local_only)
        took_s, tokens = await (self._asking.prompt() if what == "prompt" else self._asking.decode())
        into[what].append(took_s)
        return tokens


async def measure(asking: Asking, relay_url: str, kind: str, count: int, runs: int) -> Row:
    """One row of the table."""
    tally, turns = asking.backbone.dispatcher.tally, Turns(asking)
    async with nodes(asking, relay_url, kind, count):
        tally.clear()
        for what in ("prompt", *["prompt"] * runs, *["token"] * runs):
            await turns.both(what)
    prompt_s, token_s = (statistics.median(turns.alone[what]) for what in ("prompt", "token"))
    prompts, tokens = turns.with_nodes["prompt"], turns.with_nodes["token"]
    rows = {name: sum(work.rows.values()) for name, work in tally.work.items()}
    there = sum(count for name, count in rows.items() if name != Tally.LOCAL_NAME)
    return {
        "nodes": f"{count} {kind}",
        "prompt alone s": prompt_s,
        "first": prompts[0] / turns.alone["prompt"][0],
        "later": statistics.median(prompts[1:]) / prompt_s,
        "token alone ms": token_s * 1e3,
        "token": statistics.median(tokens) / token_s,
        "longest call s": tally.longest_call_s,
        "rows by nodes %": 100 * there / max(1, sum(rows.values())),
        "late": tally.hedges,
        "tokens": "same" if turns.same else "DIFFER",
    }


async def run() -> int:
    parser = arguments(__doc__ or "")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--kinds", nargs="*", choices=KINDS, default=KINDS[1:])
    parser.add_argument("--counts", nargs="*", type=int, default=[1, 2, 4])
    parser.add_argument("--offload", choices=[each.value for each in Offload], default="auto")
    parser.add_argument("--local-cache", type=int, default=1024, metavar="MB",
                        help="with less than the model has, experts are read again and again")  # fmt: skip
    options = parser.parse_args()
    cases = [(kind, count) for kind in options.kinds for count in options.counts]
    cases += [("silent", 26)] if "silent" in options.kinds else []
    cache_dir, rows = default_cache_dir(os.environ), list[Row]()
    model = await asyncio.to_thread(ensure_demo_model, cache_dir)
    with tempfile.TemporaryDirectory() as slices:
        async with RelayServer(RelayConfig(host="127.0.0.1", port=0, cache_dir=Path(slices))) as relay:
            config = Config(
                model=model, cache_dir=cache_dir, relay=relay.url, relay_token=relay.backbone_token, port=0,
                links=False, context=1024, offload=Offload(options.offload),
                local_cache_bytes=options.local_cache << 20,
            )  # fmt: skip
            async with Backbone(config) as backbone:
                asking = Asking(backbone, options.tokens)
                await asking.prepare()
                await asking.prompt()  # so that all experts are in memory
                for kind, count in cases:
                    rows.append(await measure(asking, relay.url, kind, count, options.runs))
                    print(".", end="", file=sys.stderr, flush=True)
                await asking.close()
    notes = [f"prompt of {PROMPT_TOKENS} tokens; ratios to this machine alone; --offload {options.offload}"]
    report("What slow nodes cost an answer", rows, options.json, notes)
    return 0 if all(row["tokens"] == "same" for row in rows) else 1


if __name__ == "__main__":
    import uvloop

    sys.exit(uvloop.run(run()))
