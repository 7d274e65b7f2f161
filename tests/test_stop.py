"""One signal ends each program within two seconds, whatever it is doing, and leaves no process behind."""

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from threading import Thread

import pytest

from backbone.model.random_model import Shape, make_random_moe
from relay.program.running import Stopped, run_async, run_blocking

ROOT = Path(__file__).parent.parent
STOP_S = 2.0
MOMENTS = 6  # per program, from a fixed seed; STOP_MOMENTS in the environment draws more
SIGNALS = (signal.SIGINT, signal.SIGTERM)

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals")


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Large enough that hashing, loading and measuring take a moment each."""
    return make_random_moe(tmp_path_factory.mktemp("stop") / "m.gguf", Shape())


class Program:
    """A real program in a session of its own, as from a terminal; ended, whatever happens, with the block."""

    def __init__(self, folder: Path, *command: str) -> None:
        self.mark = f"stop-test-{folder.name}-{random.getrandbits(64):x}"
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("RELAY_", "BACKBONE_"))}
        environment |= {
            "HOME": str(folder), "XDG_CACHE_HOME": str(folder / "cache"), "PYTHONPATH": str(ROOT),
            "STOP_TEST_MARK": self.mark,
        }  # fmt: skip
        self.out = folder / f"{self.mark}.log"
        with self.out.open("wb") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", *command], env=environment, stdout=out, stderr=out,
                start_new_session=True,
            )  # fmt: skip

    def __enter__(self) -> "Program":
        return self

    def __exit__(self, *exc: object) -> None:
        for pid in self.alive():
            os.kill(pid, signal.SIGKILL)
        self.process.wait()

    @property
    def said(self) -> str:
        return self.out.read_text(errors="replace")

    def until(self, text: str, timeout_s: float = 60.0) -> None:
        give_up = time.monotonic() + timeout_s
        while text not in self.said:
            assert time.monotonic() < give_up and self.process.poll() is None, self.said
            time.sleep(0.01)

    def alive(self) -> list[int]:
        """Give the processes of this program that still run: they inherited its mark."""
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            try:
                state = (path.parent / "stat").read_text().rpartition(")")[2].split()[0]
                if state not in "ZX" and self.mark.encode() in path.read_bytes():
                    found.append(int(path.parent.name))
            except OSError:
                continue
        return found

    def stop(self, number: signal.Signals) -> float:
        """Signal the program alone; give the seconds until it was gone."""
        started = time.monotonic()
        self.process.send_signal(number)
        self.process.wait(timeout=30)
        return time.monotonic() - started

    def ended_well(self, number: signal.Signals, took_s: float) -> None:
        assert took_s < STOP_S, self.said
        assert "Traceback" not in self.said and "Error" not in self.said, self.said
        assert self.process.returncode in (0, 128 + number, -number), self.said
        assert self.alive() == [], "a child outlived its program"


def moments(seed: int, most_s: float) -> list[tuple[float, signal.Signals]]:
    drawn = random.Random(seed)
    count = int(os.environ.get("STOP_MOMENTS", MOMENTS))
    return [(drawn.uniform(0, most_s), drawn.choice(SIGNALS)) for _ in range(count)]


@pytest.mark.parametrize(("after_s", "number"), moments(1, 4.0))
def test_backbone_ends_at_any_moment(
    after_s: float, number: signal.Signals, model: Path, tmp_path: Path
) -> None:
    command = ("backbone", "serve", "--model", str(model), "--port", "0", "--relay", "http://127.0.0.1:9",
               "--relay-token", "some-token")  # fmt: skip
    with Program(tmp_path, *command) as backbone:
        time.sleep(after_s)
        backbone.ended_well(number, backbone.stop(number))


@pytest.mark.parametrize(("after_s", "number"), moments(2, 1.0))
def test_relay_ends_at_any_moment(after_s: float, number: signal.Signals, tmp_path: Path) -> None:
    with Program(tmp_path, "relay", "serve", "--host", "127.0.0.1", "--port", "0") as relay:
        time.sleep(after_s)
        relay.ended_well(number, relay.stop(number))


@pytest.mark.parametrize(("after_s", "number"), moments(3, 2.0))
def test_node_ends_at_any_moment(after_s: float, number: signal.Signals, tmp_path: Path) -> None:
    with Program(tmp_path, "backbone.node", "--relay", "http://127.0.0.1:9") as node:
        time.sleep(after_s)
        node.ended_well(number, node.stop(number))


@pytest.mark.parametrize("command", [("relay", "doctor"), ("backbone", "doctor")])
def test_doctor_ends_at_any_moment(command: tuple[str, str], tmp_path: Path) -> None:
    for after_s, number in moments(4, 1.0):
        with Program(tmp_path, *command) as doctor:
            time.sleep(after_s)
            took_s = doctor.stop(number)
            # it may have ended by itself, with what it found
            assert took_s < STOP_S and doctor.process.returncode in (0, 1, 128 + number, -number), doctor.said
            assert "Traceback" not in doctor.said


def test_the_engine_ends_when_its_backbone_is_killed(model: Path, tmp_path: Path) -> None:
    with Program(tmp_path, "backbone", "serve", "--model", str(model), "--port", "0") as backbone:
        backbone.until("/v1")
        assert len(backbone.alive()) == 2
        backbone.stop(signal.SIGKILL)
        give_up = time.monotonic() + STOP_S
        while backbone.alive():
            assert time.monotonic() < give_up, "the engine outlived its backbone"
            time.sleep(0.01)


def test_requests_under_way_hear_that_the_backbone_stops(model: Path, tmp_path: Path) -> None:
    with Program(tmp_path, "backbone", "serve", "--model", str(model), "--port", "0", "--parallel", "2",
                 "--context", "100000") as backbone:  # fmt: skip
        backbone.until("/v1")
        url = next(word for word in backbone.said.split() if word.endswith("/v1")).removesuffix("/v1")
        answers: dict[bool, tuple[int, bytes]] = {}

        def ask(stream: bool) -> None:
            body = {"prompt": "a", "n_predict": 90_000, "stream": stream, "ignore_eos": True}
            request = urllib.request.Request(
                f"{url}/completion", json.dumps(body).encode(), {"content-type": "application/json"}
            )
            try:
                with urllib.request.urlopen(request, timeout=60) as answer:
                    answers[stream] = answer.status, answer.read()
            except urllib.error.HTTPError as exc:
                answers[stream] = exc.code, exc.read()

        threads = [Thread(target=ask, args=(stream,)) for stream in (True, False)]
        for thread in threads:
            thread.start()
        time.sleep(1.0)
        took_s = backbone.stop(signal.SIGTERM)
        for thread in threads:
            thread.join(10)
        backbone.ended_well(signal.SIGTERM, took_s)
        status, body = answers[False]
        assert status == 503 and "is being stopped" in json.loads(body)["error"]["message"]
        status, body = answers[True]
        last = body.strip().split(b"\n\n")[-1]
        assert status == 200 and last.startswith(b"data: "), last
        assert "is being stopped" in json.loads(last.removeprefix(b"data: "))["error"]["message"]


def in_process(code: str, tmp_path: Path) -> Program:
    return Program(tmp_path, "timeit", "-n1", "-r1", "-s", code, "pass")


DEAF = """
import ctypes, time
from relay.program.running import leave, run_async
async def main():
    print("up", flush=True)
    ctypes.CDLL(None).sleep(60)
leave(run_async(main))
"""
SLOW = """
import asyncio
from relay.program.running import leave, run_async
async def main():
    print("up", flush=True)
    try:
        await asyncio.sleep(60)
    finally:
        print("tidying", flush=True)
        await asyncio.sleep(60)
leave(run_async(main))
"""


def test_a_program_stuck_in_c_is_cut_short(tmp_path: Path) -> None:
    with in_process(DEAF, tmp_path) as program:
        program.until("up")
        assert program.stop(signal.SIGTERM) < STOP_S
        assert program.process.returncode == 128 + signal.SIGTERM


def test_a_second_signal_ends_it_at_once(tmp_path: Path) -> None:
    with in_process(SLOW, tmp_path) as program:
        program.until("up")
        program.process.send_signal(signal.SIGINT)
        program.until("tidying")
        assert program.stop(signal.SIGINT) < 0.5
        assert program.process.returncode == 128 + signal.SIGINT


def test_what_a_program_raises_is_raised_and_its_status_is_returned() -> None:
    async def fails() -> int:
        raise LookupError("its own")

    async def succeeds() -> int:
        await asyncio.to_thread(time.sleep, 0)
        return 3

    with pytest.raises(LookupError, match="its own"):
        run_async(fails)
    assert run_async(succeeds) == 3 and run_blocking(lambda: 4) == 4


def test_a_plain_function_unwinds() -> None:
    unwound = []

    def work() -> int:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            while True:
                time.sleep(0.01)
        except Stopped:
            unwound.append("finally")
            raise

    assert run_blocking(work) == 128 + signal.SIGTERM
    assert unwound == ["finally"]
