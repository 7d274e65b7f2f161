"""Nodes that are slow in a chosen way, for bench_stragglers.py: real nodes up to the line or last step."""

import argparse
import asyncio
import contextlib
import random
import socket
import time
from urllib.parse import urlsplit

from backbone.experts.native import NativeKernel
from backbone.node import events as ev
from backbone.node.client import ClientConfig, NodeClient
from relay.wire.messages import Partial

KINDS = ("good", "thin", "slow", "silent", "jittery")
UP_BYTES_PER_S = 125_000  # "thin": 1 Mbit/s up, nothing else is limited
SLOWER = 100  # "slow": so many times slower than this core
STALLED, STALL_S = 0.1, 0.3  # "jittery": this share of answers waits that long
PIECE_BYTES = 4096


class SlowNode(NodeClient):
    """Answers as its kind does."""

    def __init__(self, config: ClientConfig, kernel: NativeKernel, kind: str) -> None:
        super().__init__(config, kernel)
        self._kind = kind
        self._busy_until = 0.0

    def _reply(self, call: ev.Call, result: object) -> None:
        assert isinstance(result, Partial)
        wait_s = 0.0
        if self._kind == "silent":
            return
        if self._kind == "jittery" and random.random() < STALLED:
            wait_s = STALL_S
        if self._kind == "slow":
            more_s, now = (SLOWER - 1) * result.compute_us * 1e-6, time.monotonic()
            self._busy_until = max(self._busy_until, now) + more_s
            wait_s = self._busy_until - now
            took_us = result.compute_us * SLOWER
            result = Partial(
                result.layer, result.hidden_dim, result.grid, took_us, result.widths, result.data
            )
        if wait_s:
            asyncio.get_running_loop().call_later(wait_s, super()._reply, call, result)
        else:
            super()._reply(call, result)


async def thin_line(host: str, port: int) -> int:
    """Carry connections to a server, UP_BYTES_PER_S for all together towards it; gives the port."""
    free_at = 0.0

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, limited: bool) -> None:
        nonlocal free_at
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while data := await reader.read(PIECE_BYTES if limited else 1 << 16):
                if limited:
                    free_at = max(free_at, time.monotonic()) + len(data) / UP_BYTES_PER_S
                    await asyncio.sleep(free_at - time.monotonic())
                writer.write(data)
                await writer.drain()
        writer.close()

    async def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(host, port)
        await asyncio.gather(carry(reader, far_writer, True), carry(far_reader, writer, False))

    listener = socket.create_server(("127.0.0.1", 0))
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16 << 10)  # or the line would be in the buffer
    await asyncio.start_server(accepted, sock=listener, limit=PIECE_BYTES)
    return int(listener.getsockname()[1])


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--relay", required=True)
    parser.add_argument("--kind", choices=KINDS, required=True)
    parser.add_argument("--count", type=int, required=True)
    parser.add_argument("--memory", type=int, required=True)
    options = parser.parse_args()
    kernel, tasks = NativeKernel(), []
    for i in range(options.count):
        url = options.relay
        if options.kind == "thin":
            parts = urlsplit(url)
            url = f"http://127.0.0.1:{await thin_line(parts.hostname or '', parts.port or 80)}"
        config = ClientConfig(url, options.memory, f"{options.kind}-{i}", threads=1, links=False)
        tasks.append(SlowNode(config, kernel, options.kind).run())
    await asyncio.gather(*tasks)


if __name__ == "__main__":
    asyncio.run(main())
