"""Bring up a swarm for a test: relay and backbone here, nodes as processes, liars in this process."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from backbone.config import Config
from backbone.experts.native import NativeKernel
from backbone.experts.standing import Offload
from backbone.node.client import ClientConfig
from backbone.processes import running
from backbone.server import Backbone
from relay.config import Config as RelayConfig
from relay.server import RelayServer
from tests.fakes.lying_node import LyingNode, Vice

READY_S = 60.0


@dataclass(slots=True)
class Swarm:
    """What a test holds: the backbone, the relay it may restart, the nodes it may kill."""

    relay: RelayServer
    backbone: Backbone = field(init=False)
    processes: list[asyncio.subprocess.Process] = field(default_factory=list)
    liars: list[LyingNode] = field(default_factory=list)

    async def until_covered(self, nodes: int) -> None:
        """Wait until so many nodes are ready and every expert of every layer is held."""
        table, model = self.backbone.dispatcher.nodes, self.backbone.model

        def ready() -> bool:
            whole = all(table.coverage(layer, model.num_experts) == 1 for layer in model.layers)
            return len(table.by_id) == nodes and (whole or nodes == 0)

        await until(ready, f"{nodes} nodes that hold everything")

    def kill(self, index: int) -> None:
        """End a node's process without a word, as a crash does."""
        os.kill(self.processes[index].pid, signal.SIGKILL)

    async def restart_relay(self) -> None:
        """Let the relay crash, and start another at the same address that remembers nothing."""
        await self.relay.kill()
        config = replace(self.relay.config, port=self.relay.port, backbone_token=self.relay.backbone_token)
        self.relay = RelayServer(config)
        await self.relay.__aenter__()


async def until(condition: Callable[[], bool], what: str, timeout_s: float = READY_S) -> None:
    """Wait for a condition; a test fails by name when it never comes."""
    give_up = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < give_up, f"waited {timeout_s:.0f} s for {what}"
        await asyncio.sleep(0.02)


@asynccontextmanager
async def swarm(
    model: Path,
    cache_dir: Path,
    *,
    nodes: int = 0,
    liars: tuple[Vice, ...] = (),
    share: float = 1.1,
    **settings: object,
) -> AsyncIterator[Swarm]:
    """
    Start everything and wait until all nodes hold what they were assigned.

    share: what each node pledges, as a part of all experts' size. settings: fields of backbone.config.Config;
    nodes carry what they can, since a test is about them, unless it says otherwise.
    """
    async with AsyncExitStack() as stack:
        slices = Path(stack.enter_context(TemporaryDirectory(prefix="swarm-slices-")))
        relay = RelayServer(RelayConfig(host="127.0.0.1", port=0, cache_dir=slices, drain_s=1.0))
        made = Swarm(relay)
        await relay.__aenter__()
        stack.push_async_callback(lambda: made.relay.__aexit__(None, None, None))
        config = Config(
            model=model,
            cache_dir=cache_dir,
            relay=relay.url,
            relay_token=relay.backbone_token,
            port=0,
            **({"offload": Offload.ALWAYS} | settings),
        )  # type: ignore[arg-type]
        made.backbone = backbone = await stack.enter_async_context(Backbone(config))
        memory_bytes = int(1.1 * backbone.model.expert_bytes * share) + (1 << 20)  # packed is larger
        for index in range(nodes):
            made.processes.append(
                await stack.enter_async_context(node_process(relay.url, memory_bytes, f"node-{index}"))
            )
        for index, vice in enumerate(liars):
            made.liars.append(
                await stack.enter_async_context(lying_node(relay.url, memory_bytes, f"liar-{index}", vice))
            )
        if nodes or liars:
            await made.until_covered(nodes + len(liars))
        yield made


def node_process(
    relay_url: str, memory_bytes: int, name: str
) -> AbstractAsyncContextManager[asyncio.subprocess.Process]:
    """Run `expert-node` until the block ends."""
    return running(
        sys.executable, "-m", "backbone.node.cli", "--relay", relay_url, "--memory", str(memory_bytes),
        "--name", name, "--threads", "1", "--cache-size", "0", output=asyncio.subprocess.DEVNULL, errors=None,
    )  # fmt: skip


@asynccontextmanager
async def lying_node(relay_url: str, memory_bytes: int, name: str, vice: Vice) -> AsyncIterator[LyingNode]:
    """Run a node with a vice in this process."""
    node = LyingNode(ClientConfig(relay_url, memory_bytes, name, threads=1), NativeKernel(), vice)
    task = asyncio.create_task(node.run())
    try:
        yield node
    finally:
        node.leave("the test is over")
        await asyncio.wait([task], timeout=5)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def while_running[T](work: Awaitable[T], *events: Callable[[], Awaitable[None]]) -> T:
    """Await `work`; meanwhile do each of `events` in turn."""

    async def happen() -> None:
        for event in events:
            await event()

    meanwhile = asyncio.create_task(happen())
    try:
        return await work
    finally:
        meanwhile.cancel()
        await asyncio.gather(meanwhile, return_exceptions=True)
