"""Downloads by a node: resumed where they broke off, never again what is on disk, never more than fits."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from backbone.experts.native import NativeKernel
from backbone.node import store
from backbone.node.client import ClientConfig, NodeClient
from backbone.node.disk import SliceDisk
from backbone.node.room import SPARE_BYTES, memory_left
from relay.config import Config
from relay.server import RelayServer
from relay.wire import messages
from tests.fakes.backbone import FakeBackbone
from tests.fakes.model import RandomModel
from tests.fakes.relay import FakeRelay

MODEL = RandomModel.make(layers=2, experts=2)
KERNEL = NativeKernel()
SLICE_BYTES = MODEL.formula.slice_bytes


class Line:
    """A TCP proxy that lets so many bytes pass towards the node on each connection, then breaks it."""

    def __init__(self, port: int, breaks_after: int) -> None:
        self.port, self.breaks_after = port, breaks_after
        self.broken = self.carried = 0

    @asynccontextmanager
    async def open(self) -> AsyncIterator[str]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        async with server:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"

    async def _serve(self, near: asyncio.StreamReader, near_out: asyncio.StreamWriter) -> None:
        far, far_out = await asyncio.open_connection("127.0.0.1", self.port)
        head = await near.read(65536)
        far_out.write(head)
        up = asyncio.create_task(self._pass(near, far_out, 1 << 60))
        down = asyncio.create_task(
            self._pass(far, near_out, 1 << 60 if b"/v1/session" in head else self.breaks_after)
        )
        try:
            await asyncio.wait((up, down), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (up, down):
                task.cancel()
            await asyncio.gather(up, down, return_exceptions=True)
            near_out.transport.abort()
            far_out.transport.abort()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, most: int) -> None:
        while most > 0 and (data := await reader.read(min(4096, most))):
            most -= len(data)
            self.carried += len(data)
            writer.write(data)
            await writer.drain()
        self.broken += most <= 0


@asynccontextmanager
async def node(url: str, cache_dir: Path | None = None, memory: int = 1 << 20) -> AsyncIterator[NodeClient]:
    config = ClientConfig(url, memory, "node", cache_dir=cache_dir, cache_bytes=1 << 20, links=False)
    client = NodeClient(config, KERNEL)
    client.machine._random = client.machine.holdings._random = lambda: 0.0
    task = asyncio.create_task(client.run())
    try:
        yield client
    finally:
        client.leave("test over")
        async with asyncio.timeout(10):
            await task


@asynccontextmanager
async def swarm(tmp_path: Path) -> AsyncIterator[tuple[RelayServer, FakeBackbone]]:
    config = Config(host="127.0.0.1", port=0, cache_dir=tmp_path / "relay", drain_s=0.1, stun_port=0)
    async with RelayServer(config) as relay:
        async with FakeBackbone(relay.url, relay.backbone_token, MODEL, KERNEL) as backbone:
            yield relay, backbone


async def test_on_a_line_that_always_breaks_in_mid_slice_every_slice_arrives(tmp_path: Path) -> None:
    async with swarm(tmp_path) as (relay, backbone):
        line = Line(relay.port, breaks_after=SLICE_BYTES // 3)
        async with line.open() as url, node(url) as client:
            await backbone.until_covered(1)
            assert line.broken >= 2 * len(MODEL.by_id)
            assert client._host.bytes_in == len(MODEL.by_id) * SLICE_BYTES, "no byte came twice"


async def test_a_node_that_starts_again_fetches_nothing_again(tmp_path: Path) -> None:
    async with swarm(tmp_path) as (relay, backbone):
        async with node(relay.url, tmp_path / "node") as first:
            await backbone.until_covered(1)
            assert first._host.bytes_in == len(MODEL.by_id) * SLICE_BYTES
        await backbone.until(lambda nodes: not nodes, "no nodes")
        (rotten, *_) = (tmp_path / "node").glob("??/*")
        rotten.write_bytes(rotten.read_bytes()[:-1] + b"x")
        async with node(relay.url, tmp_path / "node") as again:
            (found,) = await backbone.until_covered(1)
            await backbone.check(found, 1)
            assert again._host.bytes_in == SLICE_BYTES, "but for the one that rotted"


@pytest.mark.parametrize("good", [True, False])
async def test_a_download_goes_on_where_the_former_run_left_it(tmp_path: Path, good: bool) -> None:
    disk = SliceDisk(tmp_path / "node", 1 << 20)
    name, data = next(iter(MODEL.by_id.items()))
    disk.write_part(name, data[:1000] if good else bytes(1000))
    async with swarm(tmp_path) as (relay, backbone), node(relay.url, tmp_path / "node") as client:
        await backbone.until_covered(1)
        whole = len(MODEL.by_id) * SLICE_BYTES
        assert client._host.bytes_in == whole - 1000 + (0 if good else SLICE_BYTES)


async def test_no_more_is_fetched_than_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    needs = KERNEL.packed_bytes(MODEL.formula) + SLICE_BYTES
    left = iter([needs, needs])
    monkeypatch.setattr(store, "memory_left", lambda: next(left, needs - 1))
    async with FakeRelay(MODEL.by_id) as relay, node(relay.url) as client:
        pledge = (await relay.hear(messages.Offer)).memory_bytes
        await relay.say(lambda session: session.send_assign(MODEL.assign({0: [0, 1], 1: [0, 1]})))
        while pledge > 2 * SLICE_BYTES:
            pledge = (await relay.hear(messages.Offer)).memory_bytes
        await asyncio.sleep(0.3)
        assert client._host.bytes_in <= pledge + SLICE_BYTES
        assert client.status().held_bytes <= pledge and sum(relay.served.values()) <= 2


async def test_bytes_that_are_always_wrong_are_fetched_twice_and_told() -> None:
    async with FakeRelay(MODEL.by_id) as relay, node(relay.url) as client:
        bad = MODEL.ids[0][1]
        relay.on_slice = lambda name: bytes(SLICE_BYTES) if name == bad else None
        await relay.hear(messages.Offer)
        await relay.say(lambda session: session.send_assign(MODEL.assign({0: [0, 1], 1: [0, 1]})))
        while not (said := await relay.hear(messages.SliceReady)).refused:
            pass
        assert said.refused == {0: (1,)} and "hash" in said.why
        await asyncio.sleep(0.5)
        assert relay.served[bad] == 2 and client.status().experts == 3


def test_memory_that_is_left_is_what_machine_and_control_group_leave(tmp_path: Path) -> None:
    assert memory_left(tmp_path) is None
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9 kB\nMemAvailable:    1048576 kB\n")
    assert memory_left(tmp_path) == (1 << 30) - SPARE_BYTES
    (tmp_path / "proc/self/cgroup").write_text("0::/box\n")
    group = tmp_path / "sys/fs/cgroup/box"
    group.mkdir(parents=True)
    (group / "memory.max").write_text("300000000\n")
    (group / "memory.current").write_text("200000000\n")
    (group / "memory.stat").write_text("anon 1\ninactive_file 50000000\n")
    assert memory_left(tmp_path) == 150_000_000 - SPARE_BYTES
    (group / "memory.max").write_text("max\n")
    assert memory_left(tmp_path) == (1 << 30) - SPARE_BYTES
