"""`expert-node`: what it reads from its command line and what it prints."""

import argparse
import asyncio
import os
import signal
import sys

import pytest

from backbone.node.cli import line, main, parser, relay_url, size_bytes, spans, threads
from backbone.node.client import ClientConfig, Status
from backbone.node.machine import State
from relay.wire import messages
from tests.fakes.model import RandomModel
from tests.fakes.relay import FakeRelay

CONFIG = ClientConfig("http://relay:8000", 10**8, "box")
STATUS = Status(
    State.SERVING, "", "native-avx2", 12.3, (0, 1, 2, 5), 24, 24, 33_000_000, 1200, 3600, 0, 88.0,
    5_000_000, 9_000_000,
)  # fmt: skip


@pytest.mark.parametrize(
    ("text", "size"),
    [("512MB", 512_000_000), ("2GiB", 2 << 30), ("300M", 300_000_000), ("1.5 gb", 1_500_000_000), ("99", 99)],
)
def test_sizes_are_read_as_people_write_them(text: str, size: int) -> None:
    assert size_bytes(text) == size


@pytest.mark.parametrize("text", ["", "lots", "-5MB", "5XB"])
def test_what_is_no_size_is_refused_by_name(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is no size"):
        size_bytes(text)


def test_relay_urls_are_the_ones_people_open() -> None:
    assert relay_url("http://192.168.1.7:8000/#auto") == "http://192.168.1.7:8000"
    assert relay_url("https://relay.example/swarm/") == "https://relay.example/swarm"
    for bad in ("relay.example", "ws://relay", "http://"):
        with pytest.raises(argparse.ArgumentTypeError, match="no relay URL"):
            relay_url(bad)


def test_threads_are_at_least_one() -> None:
    assert threads("4") == 4
    for bad in ("0", "-1", "many", "99999"):
        with pytest.raises(argparse.ArgumentTypeError, match="no number of threads"):
            threads(bad)


def test_defaults_are_modest() -> None:
    args = parser().parse_args(["--relay", "http://relay"])
    assert args.memory == 512_000_000
    assert 1 <= args.threads <= max(1, (os.cpu_count() or 1) - 1)


def test_one_line_says_it_all() -> None:
    text = line(CONFIG, STATUS)
    assert text.startswith("serving    http://relay:8000 · native-avx2 12.3 GB/s")
    assert "layers 0-2,5, 24 experts, 33 MB" in text
    assert "1200 calls, 3600 rows, 88 rows/s" in text


def test_layers_are_written_as_spans() -> None:
    assert [spans(n) for n in ((), (3,), (0, 1, 2, 5), (1, 3, 4))] == ["none", "3", "0-2,5", "1,3-4"]


def test_wrong_arguments_end_with_usage() -> None:
    with pytest.raises(SystemExit):
        main(["--relay", "nonsense"])


async def test_sigterm_ends_the_process_with_bye_and_status_0() -> None:
    model = RandomModel.make()
    async with FakeRelay(model.by_id) as relay:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "backbone.node.cli", "--relay", relay.url, "--name", "box",
            "--threads", "1", stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        try:
            offer = await relay.hear(messages.Offer)
            assert (offer.name, offer.memory_bytes) == ("box", 512_000_000)
            await relay.say(lambda session: session.send_assign(model.assign({0: [0, 1]})))
            assert process.stdout is not None
            async with asyncio.timeout(10):
                while "layers 0, 2 experts" not in (await process.stdout.readline()).decode():
                    pass
            process.send_signal(signal.SIGTERM)
            out, _ = await asyncio.wait_for(process.communicate(), 10)
        finally:
            if process.returncode is None:
                process.kill()
        assert process.returncode == 0
        assert out.decode().splitlines()[-1] == "expert-node: left"
