"""The line in front of the engine, and which requests ended it."""

import asyncio

import pytest

from backbone.gateway.errors import Busy
from backbone.gateway.line import MAX_WAITING, MAX_WAITING_BYTES, MAX_WAITING_OF_ONE, Line
from backbone.gateway.suspects import KEPT_S, MAX_KEPT, Suspects, fingerprint_of


class Clients:
    """Requests of several clients; `ran` is the order of their turns."""

    def __init__(self, line: Line) -> None:
        self.line = line
        self.ran: list[str] = []
        self.end: dict[str, asyncio.Event] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def ask(self, client: str, name: str, seats: int = 1, size_bytes: int = 0) -> None:
        self.end[name] = asyncio.Event()

        async def run() -> None:
            async with self.line.turn(client, seats, size_bytes):
                self.ran.append(name)
                await self.end[name].wait()

        self.tasks[name] = asyncio.create_task(run())
        await asyncio.sleep(0)

    async def finish(self, name: str) -> None:
        self.end[name].set()
        await self.tasks[name]
        await asyncio.sleep(0)
        await asyncio.sleep(0)


async def test_turns_go_round_among_clients() -> None:
    clients = Clients(Line(1))
    for name in ("a1", "a2", "a3", "b1", "c1"):
        await clients.ask(name[0], name)
    for name in ("a1", "a2", "b1", "c1", "a3"):
        await clients.finish(name)
    assert clients.ran == ["a1", "a2", "b1", "c1", "a3"]
    assert clients.line.free == 1 and clients.line.waiting == 0


async def test_a_large_request_is_not_overtaken_for_ever() -> None:
    clients = Clients(Line(2))
    await clients.ask("a", "a1")
    await clients.ask("b", "large", seats=5)
    await clients.ask("c", "c1")
    assert clients.ran == ["a1"]
    await clients.finish("a1")
    assert clients.ran == ["a1", "large"]
    await clients.finish("large")
    await clients.finish("c1")
    assert clients.line.free == 2


async def test_who_leaves_the_line_leaves_nothing_behind() -> None:
    clients = Clients(Line(1))
    for name in ("a1", "b1", "c1"):
        await clients.ask(name[0], name)
    clients.tasks["b1"].cancel()
    await asyncio.gather(clients.tasks["b1"], return_exceptions=True)
    assert clients.line.waiting == 1
    clients.end["a1"].set()
    clients.tasks["c1"].cancel()  # in the moment its turn comes
    await asyncio.gather(*clients.tasks.values(), return_exceptions=True)
    assert clients.line.free == 1 and clients.line.waiting == 0


async def test_the_line_is_bounded_altogether_and_for_each_client() -> None:
    clients = Clients(Line(1))
    await clients.ask("a", "running")
    for n in range(MAX_WAITING_OF_ONE):
        await clients.ask("a", f"a{n}")
    with pytest.raises(Busy) as caught:
        clients.line.check_room("a", 0)
    assert caught.value.status == 429 and caught.value.retry_after_s is not None
    clients.line.check_room("b", 0)
    with pytest.raises(Busy):
        clients.line.check_room("b", MAX_WAITING_BYTES + 1)
    for n in range(MAX_WAITING - MAX_WAITING_OF_ONE):
        await clients.ask("b", f"b{n}")
    with pytest.raises(Busy):
        clients.line.check_room("c", 0)
    for task in clients.tasks.values():
        task.cancel()
    await asyncio.gather(*clients.tasks.values(), return_exceptions=True)
    assert clients.line.free == 1 and clients.line.waiting == 0


def test_the_one_that_ran_alone_is_refused_for_an_hour() -> None:
    suspects = Suspects()
    suspects.engine_ended(["x"], "GGML_ASSERT", 100.0)
    assert suspects.why_refused("x", 101.0) == "GGML_ASSERT"
    assert suspects.why_refused("y", 101.0) is None
    assert suspects.why_refused("x", 101.0 + KEPT_S) is None


def test_of_several_each_runs_alone_until_it_is_known() -> None:
    suspects = Suspects()
    suspects.engine_ended(["x", "y"], "why", 0.0)
    assert suspects.runs_alone("x", 1.0) and suspects.why_refused("x", 1.0) is None
    suspects.served("y")
    assert not suspects.runs_alone("y", 1.0)
    suspects.engine_ended(["x"], "why", 2.0)
    assert suspects.why_refused("x", 3.0) == "why"


def test_somebody_elses_kill_proves_nothing() -> None:
    suspects = Suspects()
    suspects.engine_ended(["x"], "signal SIGKILL", 0.0, by_itself=False)
    assert suspects.why_refused("x", 1.0) is None


def test_memory_for_suspects_is_bounded() -> None:
    suspects = Suspects()
    for n in range(3 * MAX_KEPT):
        suspects.engine_ended([str(n)], "why", 0.0)
    assert suspects.why_refused(str(2 * MAX_KEPT - 1), 1.0) is None
    assert suspects.why_refused(str(3 * MAX_KEPT - 1), 1.0) == "why"


def test_a_request_is_known_again_whatever_changes_nothing() -> None:
    one = fingerprint_of("/completion", {"prompt": "a", "grammar": "g", "seed": 1, "stream": True})
    assert one == fingerprint_of("/completion", {"grammar": "g", "prompt": "a", "seed": 2})
    assert one != fingerprint_of("/completion", {"grammar": "h", "prompt": "a"})
