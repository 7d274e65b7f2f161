"""Turns of the loop: what one sends in bulk waits, in order and unread; others are served as they come."""

import asyncio
from time import perf_counter

from relay.bucket import Bucket
from relay.forwarding.turns import FIRST_PIECE_BYTES, QUANTUM_S, Inlet, Turns

BULK = bytes(range(256)) * 1024


def poor() -> Bucket:
    """An account that is empty and stays so."""
    account = Bucket(0.0, 1.0, perf_counter())
    account.spend(perf_counter(), 1.0)
    return account


class Socket:
    def __init__(self, turns: Turns, account: Bucket, work_s: float = 0.0) -> None:
        self.done = bytearray()
        self.pieces: list[int] = []
        self.reading = True
        self.work_s = work_s
        self.inlet = Inlet(turns, self.work, self.read)
        self.inlet.account = account

    def work(self, data: bytes) -> None:
        until = perf_counter() + self.work_s
        self.done += data
        self.pieces.append(len(data))
        while perf_counter() < until:
            pass

    def read(self, on: bool) -> None:
        self.reading = on

    async def until_done(self, size: int) -> None:
        async with asyncio.timeout(10):
            while len(self.done) < size:
                await asyncio.sleep(0)


def rich() -> Bucket:
    return Bucket(1.0, 1.0, perf_counter())


async def test_who_has_time_left_is_served_at_once() -> None:
    socket = Socket(Turns(), rich())
    socket.inlet.feed(BULK)
    assert socket.done == BULK and socket.reading


async def test_who_has_none_waits_for_turns_in_order_and_is_not_read_meanwhile() -> None:
    socket = Socket(Turns(), poor())
    socket.inlet.feed(BULK)
    assert not socket.done and not socket.reading
    socket.inlet.feed(b"more")
    await socket.until_done(len(BULK) + 4)
    assert socket.done == BULK + b"more" and socket.reading


async def test_one_read_that_takes_long_goes_on_in_turns() -> None:
    socket = Socket(Turns(), rich(), work_s=QUANTUM_S * 1.1)
    socket.inlet.feed(BULK)
    assert 0 < len(socket.done) < len(BULK) and not socket.reading
    await asyncio.sleep(0)
    socket.inlet.close()


async def test_pieces_shrink_until_each_takes_little() -> None:
    socket = Socket(Turns(), poor(), work_s=0.002)
    socket.inlet.feed(BULK)
    async with asyncio.timeout(10):
        while len(socket.pieces) < 6:
            await asyncio.sleep(0)
    assert socket.pieces[0] == FIRST_PIECE_BYTES and socket.pieces[-1] < FIRST_PIECE_BYTES / 8
    socket.inlet.close()


async def test_a_flood_does_not_delay_who_has_time_left() -> None:
    turns = Turns()
    floods = [Socket(turns, poor(), work_s=0.0005) for _ in range(5)]
    for flood in floods:
        flood.inlet.feed(BULK)
    honest = Socket(turns, rich())
    for n in range(20):
        await asyncio.sleep(0)
        honest.inlet.feed(b"x")
        assert len(honest.done) == n + 1
    assert all(0 < len(flood.done) < len(BULK) for flood in floods), "and those take turns"
    for flood in floods:
        flood.inlet.close()


async def test_who_is_held_back_is_served_on_release() -> None:
    socket = Socket(Turns(), rich())
    socket.inlet.hold()
    socket.inlet.feed(b"one")
    await asyncio.sleep(0)
    assert not socket.done and not socket.reading
    socket.inlet.release()
    socket.inlet.feed(b"two")
    await socket.until_done(6)
    assert socket.done == b"onetwo" and socket.reading


async def test_who_is_held_back_by_what_it_does_keeps_the_rest() -> None:
    socket = Socket(Turns(), rich())
    work = socket.work
    socket.inlet._work = lambda data: (work(data), socket.inlet.hold())[0]
    socket.inlet.feed(BULK)
    await asyncio.sleep(0)
    assert len(socket.done) == FIRST_PIECE_BYTES and not socket.reading
    socket.inlet._work = work
    socket.inlet.release()
    await socket.until_done(len(BULK))
    assert socket.done == BULK
