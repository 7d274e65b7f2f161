"""A backbone that chooses lanes, around a model in memory: asks nodes and checks every byte."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager

import numpy as np

from backbone.experts.native import NativeKernel
from backbone.lanes.chooser import LaneChooser, Opener
from backbone.lanes.relayed import Answer, LaneHandlers, RelayedLane
from backbone.node.client import ClientConfig, NodeClient
from relay.nat.evidence import PathPolicy
from relay.wire.messages import Hello, Peers, Register
from relay.wire.sealing import SealPolicy
from relay.wire.session import PartialReceived
from tests.fakes.model import RandomModel

WAIT_S = 8.0
EAGER = PathPolicy(hysteresis=-10.0, hysteresis_ms=-1e6, probes=2, retry_s=0.2, max_lost=0)
"""Takes any lane that works, so that tests do not depend on which of two loopback paths is faster."""


class LinkedBackbone:
    """`chooser` is under test; `answers` notes every answer by call id, to see that none comes twice."""

    def __init__(
        self,
        relay_url: str,
        token: str,
        model: RandomModel,
        kernel: NativeKernel,
        seal: SealPolicy | None = None,
    ) -> None:
        self.relay_url = relay_url
        self.model = model
        self.peers = Peers(())
        self.answers: list[int] = []
        self.lanes: list[str] = []
        self.first_lane = ""  # when the first node was ready
        self.openers: dict[str, Opener] = {}
        self._kernel = kernel
        self._calls: dict[int, asyncio.Future[Answer]] = {}
        self._next_call = 0
        by_id = model.by_id
        handlers = LaneHandlers(
            self._peers,
            lambda answer: self.chooser.answer_received(answer),
            lambda why: self._lost(),
            by_id.get,
            lambda echo: self.chooser.echo_received(echo),
            lambda signal: self.chooser.signal_received(signal),
        )
        hello = Hello("backbone", "b" * 32, "5" * 32, token=token)
        self.lane = RelayedLane(relay_url, hello, Register("linked", model.manifest), handlers, seal)
        self.chooser = LaneChooser(
            self.lane, self.openers, self._answer, lambda node_id, lane: self.lanes.append(lane), EAGER
        )

    @asynccontextmanager
    async def running(self) -> AsyncIterator["LinkedBackbone"]:
        task = asyncio.create_task(self.lane.run())
        try:
            yield self
        finally:
            await self.chooser.close()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def until(self, condition: Callable[[], bool], what: str) -> None:
        async with asyncio.timeout(WAIT_S):
            while not condition():
                await asyncio.sleep(0.005)
        assert condition(), what

    async def until_ready(self, nodes: int = 1) -> None:
        """Wait for so many nodes that hold everything."""
        whole = {layer: tuple(range(len(ids))) for layer, ids in enumerate(self.model.ids)}
        await self.until(
            lambda: len(self.peers.nodes) == nodes and all(n.experts == whole for n in self.peers.nodes),
            "nodes",
        )

    async def until_lane(self, lane: str) -> None:
        await self.until(lambda: self.chooser.lane_of(self.peers.nodes[0].peer) == lane, lane)

    async def ask(self, seed: int, deadline_ms: int = 10_000) -> None:
        """Ask the first node for random rows; its sums must be those of the native kernel."""
        rng = np.random.default_rng(seed)
        node = self.peers.nodes[0]
        layer = int(rng.choice(sorted(node.experts)))
        picks = [rng.choice(node.experts[layer], 2, replace=False).tolist() for _ in range(1 + seed % 4)]
        dispatch = self.model.dispatch(layer, picks, seed=seed)
        self._next_call += 1
        self._calls[self._next_call] = future = asyncio.get_running_loop().create_future()
        self.chooser.send_dispatch(node.peer, self._next_call, node.epoch, deadline_ms, dispatch)
        async with asyncio.timeout(WAIT_S):
            answer = await future
        assert isinstance(answer, PartialReceived), answer
        assert np.array_equal(answer.partial.sums(), self.model.answer(self._kernel, dispatch))

    def _answer(self, answer: Answer) -> None:
        self.answers.append(answer.call_id)
        future = self._calls[answer.call_id]
        if not future.done():
            future.set_result(answer)

    def _peers(self, peers: Peers) -> None:
        self.peers = peers
        self.chooser.peers_changed(peers)
        if peers.nodes and not self.first_lane:
            self.first_lane = self.chooser.lane_of(peers.nodes[0].peer)

    def _lost(self) -> None:
        self.peers = Peers(())
        self.chooser.relayed_lost()


@asynccontextmanager
async def running_node(config: ClientConfig, kernel: NativeKernel) -> AsyncIterator[NodeClient]:
    client = NodeClient(config, kernel)
    task = asyncio.create_task(client.run())
    async with AsyncExitStack() as stack:

        async def stop() -> None:
            client.leave("the test is over")
            await asyncio.wait([task], timeout=5)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

        stack.push_async_callback(stop)
        yield client
