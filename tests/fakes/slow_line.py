"""A line of limited rate between a client and a server on loopback, with little in its own queues."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

QUEUE_BYTES = 16 << 10  # what the line holds by itself, each way
STEP_S = 0.01


class SlowLine:
    """`url` leads to the server; `silent` stops all bytes, without a word."""

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self.silent = False
        self.url = ""
        self._tasks: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def to(self, url: str) -> AsyncIterator["SlowLine"]:
        port = int(url.rsplit(":", 1)[1])
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, QUEUE_BYTES)
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        listener.setblocking(False)
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        accepting = asyncio.create_task(self._accept(listener, port))
        try:
            yield self
        finally:
            accepting.cancel()
            for task in list(self._tasks):
                task.cancel()
            await asyncio.gather(accepting, *self._tasks, return_exceptions=True)
            listener.close()

    async def _accept(self, listener: socket.socket, port: int) -> None:
        loop = asyncio.get_running_loop()
        while True:
            near, _ = await loop.sock_accept(listener)
            far = socket.socket()
            far.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, QUEUE_BYTES)
            far.setblocking(False)
            near.setblocking(False)
            await loop.sock_connect(far, ("127.0.0.1", port))
            for ends in ((near, far), (far, near)):
                task = asyncio.create_task(self._carry(*ends))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _carry(self, here: socket.socket, there: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        try:
            while data := await loop.sock_recv(here, max(1, int(self.bytes_per_s * STEP_S))):
                while self.silent:
                    await asyncio.sleep(STEP_S)
                await loop.sock_sendall(there, data)
                await asyncio.sleep(len(data) / self.bytes_per_s)
        except OSError:
            pass
        finally:
            there.close()
