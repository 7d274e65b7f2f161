"""A backbone without a model: registers a random one, delivers its slices, asks nodes, checks every byte."""

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Self

import numpy as np

from backbone.experts.native import NativeKernel
from backbone.lanes.relayed import Answer, LaneHandlers, RelayedLane
from relay.wire.messages import Dispatch, Failure, Hello, PeerNode, Peers, Register
from relay.wire.sealing import SealPolicy
from relay.wire.session import FailureReceived, PartialReceived
from tests.fakes.model import RandomModel

WAIT_S = 20.0


class FakeBackbone:
    """
    `nodes` is the relay's latest list; `delivered` counts the slices it asked for. `stray`: answers that
    nobody awaits, which are a mistake unless a test expects them.
    """

    def __init__(
        self,
        relay_url: str,
        token: str,
        model: RandomModel,
        kernel: NativeKernel,
        seal: SealPolicy | None = None,
    ) -> None:
        self.model = model
        self.nodes: tuple[PeerNode, ...] = ()
        self.delivered: list[str] = []
        self._kernel = kernel
        self._by_id = model.by_id
        self._calls: dict[int, asyncio.Future[Answer]] = {}
        self._next_call = 0
        self._changed = asyncio.Event()
        hello = Hello("backbone", "b" * 32, "5" * 32, token=token)
        handlers = LaneHandlers(self._peers, self._answer, lambda why: self._peers(Peers(())), self._slice)
        self.lane = RelayedLane(relay_url, hello, Register("fake", model.manifest), handlers, seal)
        self.stray: list[Answer] | None = None
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self.lane.run())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: object, trace: TracebackType | None
    ) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def until(
        self, condition: Callable[[tuple[PeerNode, ...]], bool], what: str
    ) -> tuple[PeerNode, ...]:
        """Wait until the list of nodes is as wanted."""
        try:
            async with asyncio.timeout(WAIT_S):
                while not condition(self.nodes):
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise AssertionError(f"waited {WAIT_S:.0f} s for {what}; nodes: {self.nodes}") from None
        return self.nodes

    async def until_covered(self, nodes: int) -> tuple[PeerNode, ...]:
        """Wait for so many nodes that together hold every expert."""
        everything = {(layer, e) for layer, ids in enumerate(self.model.ids) for e in range(len(ids))}

        def covered(listed: tuple[PeerNode, ...]) -> bool:
            held = {(layer, e) for node in listed for layer, experts in node.experts.items() for e in experts}
            return len(listed) == nodes and held == everything

        return await self.until(covered, f"{nodes} nodes that hold everything")

    async def call(self, node: PeerNode, dispatch: Dispatch) -> Answer:
        """Ask one node and wait for whatever it answers."""
        self._next_call += 1
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._calls[self._next_call] = future
        self.lane.send_dispatch(node.peer, self._next_call, node.epoch, 10_000, dispatch)
        async with asyncio.timeout(WAIT_S):
            return await future

    async def check(self, node: PeerNode, seed: int, layer: int | None = None) -> None:
        """Ask a node for random rows of something it holds; its sums must be those of the native kernel."""
        rng = np.random.default_rng(seed)
        layer = int(rng.choice(sorted(node.experts))) if layer is None else layer
        held = node.experts[layer]
        picks = [
            rng.choice(held, size=min(len(held), 2), replace=False).tolist() for _ in range(1 + seed % 4)
        ]
        dispatch = self.model.dispatch(layer, picks, seed=seed)
        answer = await self.call(node, dispatch)
        assert isinstance(answer, PartialReceived), answer
        assert np.array_equal(answer.partial.sums(), self.model.answer(self._kernel, dispatch))

    async def refused(self, node: PeerNode, dispatch: Dispatch) -> Failure:
        """Ask a node for what it must refuse."""
        answer = await self.call(node, dispatch)
        assert isinstance(answer, FailureReceived), answer
        return answer.failure

    def _peers(self, peers: Peers) -> None:
        self.nodes = peers.nodes
        self._changed.set()

    def _answer(self, answer: Answer) -> None:
        future = self._calls.pop(answer.call_id, None)
        if future is None and self.stray is not None:
            self.stray.append(answer)
            return
        assert future is not None, f"call {answer.call_id} was answered twice or never asked"
        if not future.done():
            future.set_result(answer)

    def _slice(self, slice_id: str) -> bytes | None:
        self.delivered.append(slice_id)
        data = self._by_id.get(slice_id)
        return data if isinstance(data, bytes) else None
