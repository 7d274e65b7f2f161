"""
What one layer call costs beyond its arithmetic, on loopback: the floor to which a path adds its delay.

The baseline is the kernel alone on the same experts, in this process and run. Then the codecs of both ends,
the dispatcher with local experts, and the whole way: dispatcher, relay (a process), node (a process), back.
"""

import asyncio
import contextlib
import secrets
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, perf_counter

import numpy as np
from table import Row, arguments, report

from backbone.engine.link import LayerCall
from backbone.experts.client import Dispatcher, DispatchPolicy
from backbone.experts.dispatch import Picks
from backbone.experts.local import LocalExperts
from backbone.experts.native import NativeKernel
from backbone.experts.nodes import nodes_of
from backbone.experts.plans import LayerPlan, layer_plans
from backbone.experts.standing import Offload
from backbone.lanes.relayed import LaneHandlers, RelayedLane
from backbone.model.gguf import Model, open_model
from backbone.model.random_model import Shape, make_random_moe
from backbone.model.slices import LayerGrid, Manifest, build_manifest, slice_hashes
from backbone.processes import running
from relay.wire.calls import model_tag
from relay.wire.fields import Fields
from relay.wire.manifest import Manifest as WireManifest
from relay.wire.messages import Dispatch, Hello, Partial, Register
from relay.wire.tensors import Grid, encode_x, row_exponents

SHAPES = {  # name -> hidden_dim, expert_dim, top_k, gate/up type, down type
    "demo 576x192, Q8_0": Shape(hidden_dim=576, expert_dim=192, top_k=8, num_heads=9, num_kv_heads=3),
    "2048x768, Q4_K + Q6_K": Shape(
        hidden_dim=2048, expert_dim=768, top_k=8, num_heads=16, gate_up_type=12, down_type=14
    ),
}
READY_S = 60.0
CARRIED = DispatchPolicy(offload=Offload.ALWAYS)


async def timed(step: Callable[[], Awaitable[object]], runs: int) -> tuple[float, float]:
    """Run a step often; give median and 95th percentile in microseconds."""
    for _ in range(max(5, runs // 10)):
        await step()
    spent = []
    for _ in range(runs):
        began = perf_counter()
        await step()
        spent.append((perf_counter() - began) * 1e6)
    spent.sort()
    return spent[runs // 2], spent[int(runs * 0.95)]


@dataclass(frozen=True, slots=True)
class Setting:
    """One model of one layer, ready to be called locally or through a swarm."""

    name: str
    shape: Shape
    model: Model
    kernel: NativeKernel
    local: LocalExperts
    plan: LayerPlan
    manifest: Manifest


def setting(name: str, shape: Shape, folder: Path) -> Setting:
    """Make the model and everything constant of it."""
    model = open_model(make_random_moe(folder / f"{shape.hidden_dim}.gguf", shape))
    kernel = NativeKernel()
    grids = {layer: LayerGrid(12) for layer in model.layers}
    manifest = build_manifest(model, slice_hashes(model, folder), grids)
    local = LocalExperts(model, kernel, 1 << 30, threads=1)
    return Setting(name, shape, model, kernel, local, layer_plans(model, grids, Grid.X32)[0], manifest)


async def measure(s: Setting, num_tokens: int, runs: int) -> list[Row]:
    """Time one call of `num_tokens` rows, step by step."""
    random = np.random.default_rng(0)
    x = random.standard_normal((num_tokens, s.shape.hidden_dim)).astype(np.float32)
    ids = np.stack([random.permutation(s.shape.num_experts)[: s.shape.top_k] for _ in range(num_tokens)])
    call = LayerCall(0, 0, x, ids.astype(np.int32), np.full(ids.shape, 0.125, np.float32))
    picks, encoding = Picks.of(call.ids, call.weights), s.plan.x_encoding
    encoded, exponents = encode_x(x, encoding), row_exponents(x)
    used, pick_expert = picks.distinct()
    experts = [s.local.expert(0, expert) for expert in used]

    async def kernel_alone() -> object:
        return s.kernel.answer(
            s.plan.formula, encoded, encoding, num_tokens, exponents, Grid.X32, 12, picks.counts, experts,
            pick_expert, picks.weights,
        )  # fmt: skip

    async def codecs() -> object:
        again = Dispatch(
            0, 0, s.plan.formula.hidden_dim, encoding, Grid.X32, row_exponents(x), picks.counts,
            picks.experts, picks.weights, encode_x(x, encoding),
        )  # fmt: skip
        Dispatch.from_payload(again.to_payload())
        return Partial.from_payload(Partial.from_sums(0, sums, Grid.X32, 0).to_payload()).sums()

    sums = s.kernel.answer(
        s.plan.formula, encoded, encoding, num_tokens, exponents, Grid.X32, 12, picks.counts, experts,
        pick_expert, picks.weights,
    )  # fmt: skip
    here = Dispatcher({0: s.plan}, Grid.X32, s.local, DispatchPolicy(local_only=True), 0)
    steps: dict[str, tuple[float, float]] = {
        "kernel alone": await timed(kernel_alone, runs),
        "codecs of both ends": await timed(codecs, runs),
        "dispatcher, experts local": await timed(lambda: here.call(call), runs),
    }
    async with swarm(s) as there:
        steps["dispatcher - relay - node and back"] = await timed(lambda: there.call(call), runs)
    base = steps["kernel alone"][0]
    return [
        dict(shape=s.name, rows=num_tokens, step=step, p50_us=p50, p95_us=p95, over_kernel=p50 / base)
        for step, (p50, p95) in steps.items()
    ]


@contextlib.asynccontextmanager
async def listening(port: int) -> AsyncIterator[None]:
    """Go on when somebody listens there."""
    give_up = monotonic() + READY_S
    while True:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            if monotonic() > give_up:
                raise SystemExit("the relay did not start") from None
            await asyncio.sleep(0.05)
        else:
            writer.close()
            break
    yield


@contextlib.asynccontextmanager
async def swarm(s: Setting) -> AsyncIterator[Dispatcher]:
    """A relay and a node as processes, a dispatcher here; ready when the node holds everything."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    token, url = secrets.token_hex(16), f"http://127.0.0.1:{port}"
    dispatcher = Dispatcher({0: s.plan}, Grid.X32, s.local, CARRIED, model_tag(s.manifest.model))
    places = {slice_id: (m.layer, e) for m in s.manifest.layers for e, slice_id in enumerate(m.slices)}
    handlers = LaneHandlers(
        on_peers=lambda peers: dispatcher.nodes_changed(nodes_of(peers)),
        on_answer=dispatcher.answer_received,
        on_lost=lambda why: None,
        slice_bytes=lambda slice_id: s.model.slice_bytes(*places[slice_id]),
    )
    hello = Hello("backbone", secrets.token_hex(16), secrets.token_hex(16), token, "bench")
    manifest = WireManifest.from_fields(Fields("Manifest", s.manifest.to_json()))
    lane = RelayedLane(url, hello, Register("bench", manifest), handlers)
    dispatcher.lane = lane
    memory = str(s.model.expert_bytes * 2)
    with tempfile.TemporaryDirectory() as cache:
        python, nowhere = sys.executable, asyncio.subprocess.DEVNULL
        relay = running(python, "-m", "relay.cli", "serve", "--host", "127.0.0.1", "--port", str(port),
                        "--backbone-token", token, "--cache-dir", cache, output=nowhere)  # fmt: skip
        node = running(python, "-m", "backbone.node.cli", "--relay", url, "--memory", memory,
                       "--threads", "1", output=nowhere)  # fmt: skip
        async with relay, listening(port), node:
            task = asyncio.create_task(lane.run())
            give_up = monotonic() + READY_S
            while dispatcher.nodes.coverage(0, s.model.num_experts) < 1:
                if monotonic() > give_up:
                    raise SystemExit(f"the node did not get ready; lane: {lane.why_down}")
                await asyncio.sleep(0.05)
            try:
                yield dispatcher
            finally:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)


async def run() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--runs", type=int, default=400)
    options = parser.parse_args()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for name, shape in SHAPES.items():
            made = setting(name, shape, Path(folder))
            for num_tokens in (1, 8):
                rows += await measure(made, num_tokens, options.runs)
            made.local.close()
    report("One layer call on loopback, top-8, q8a + x32", rows, options.json)


if __name__ == "__main__":
    import uvloop

    uvloop.run(run())
