"""Uploads: each slice once, however often it is asked for; two at a time; nothing that arrived meanwhile."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from backbone.lanes import uploads
from backbone.lanes.uploads import TRIES, Uploads


class Door:
    """An HTTP server that takes PUTs when it is let, and counts."""

    def __init__(self) -> None:
        self.puts: Counter[str] = Counter()
        self.heads: Counter[str] = Counter()
        self.has: set[str] = set()
        self.at_once = self.most_at_once = 0
        self.breaks = 0
        self.open = asyncio.Event()
        self.open.set()

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[str]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        async with server:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                method, path, _ = head.split(" ", 2)
                name = path.rpartition("/")[2]
                length = (
                    int(head.lower().partition("content-length:")[2].split()[0]) if method == "PUT" else 0
                )
                if method == "PUT":
                    self.puts[name] += 1
                    self.at_once += 1
                    self.most_at_once = max(self.most_at_once, self.at_once)
                    if self.breaks:
                        self.breaks -= 1
                        self.at_once -= 1
                        return
                    await reader.readexactly(length)
                    await self.open.wait()
                    self.at_once -= 1
                    self.has.add(name)
                    status = "201 Created"
                else:
                    self.heads[name] += 1
                    status = "200 OK" if name in self.has else "404 Not Found"
                writer.write(f"HTTP/1.1 {status}\r\ncontent-length: 0\r\n\r\n".encode())
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


async def drained(made: Uploads) -> None:
    async with asyncio.timeout(10):
        while len(made):
            await asyncio.sleep(0.005)


async def test_each_slice_is_sent_once_however_often_it_is_asked_for_and_two_at_a_time() -> None:
    door = Door()
    async with door.listening() as url:
        made = Uploads(url, lambda name: name.encode() * 1000)
        made.begin("token")
        door.open.clear()
        for _ in range(5):
            for number in range(8):
                made.wanted(f"{number}")
        assert len(made) == 8
        await asyncio.sleep(0.05)
        made.wanted("0")
        door.open.set()
        await drained(made)
        assert door.puts == Counter({f"{number}": 1 for number in range(8)}) and door.most_at_once == 2
        await made.close()


async def test_what_the_relay_got_meanwhile_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploads, "STALE_S", 0.0)
    door = Door()
    door.has = {"1"}
    async with door.listening() as url:
        made = Uploads(url, lambda name: b"x")
        made.begin("token")
        made.wanted("1")
        made.wanted("2")
        await drained(made)
        assert door.puts == {"2": 1}
        await made.close()


async def test_an_upload_that_breaks_off_is_tried_again_and_then_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(uploads, "backoff_s", lambda attempt, jitter: 0.0)
    door = Door()
    async with door.listening() as url:
        made = Uploads(url, lambda name: b"x" * 100_000)
        made.begin("token")
        door.breaks = 1
        made.wanted("1")
        await drained(made)
        assert door.puts == {"1": 2} and door.has == {"1"}
        door.breaks = 100
        made.wanted("2")
        await drained(made)
        assert door.puts["2"] == TRIES
        await made.close()


async def test_a_session_that_begins_forgets_what_the_former_one_asked_for() -> None:
    door = Door()
    async with door.listening() as url:
        made = Uploads(url, lambda name: b"x")
        made.begin("token")
        door.open.clear()
        for number in range(5):
            made.wanted(f"{number}")
        made.begin("another")
        door.open.set()
        await drained(made)
        assert set(door.puts) == {"0", "1"}, "those under way"
        await made.close()


async def test_more_than_it_can_remember_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploads, "MOST_WAITING", 3)
    made = Uploads("http://127.0.0.1:9", lambda name: None)
    for number in range(100):
        made.wanted(f"{number}")
    assert len(made) == 3 + uploads.UPLOADS_AT_ONCE
    await made.close()
