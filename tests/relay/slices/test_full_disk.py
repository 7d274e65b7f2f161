"""A relay whose disk is full, really: slices are served all the same, and its log says why once."""

import asyncio
import errno
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from relay.config import Config
from relay.server import RelayServer
from relay.wire.messages import SliceWanted
from tests.fakes.peers import Backbone, run, slice_data, slice_name

CONFIG = Config(host="127.0.0.1", port=0, slice_wait_s=5.0, drain_s=0.1, stun_port=0)
PLACES = [(layer, expert) for layer in range(2) for expert in range(2)]


@pytest.fixture
def full_folder(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 kB that somebody else has filled."""
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("mounting needs root on Linux")
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", tmp_path], check=False)
    if mounted.returncode != 0:
        pytest.skip("this machine mounts nothing")
    try:
        with (tmp_path / "foreign").open("wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(1024))
            except OSError as exc:
                assert exc.errno == errno.ENOSPC
        yield tmp_path
    finally:
        subprocess.run(["umount", "-l", tmp_path], check=True)


def test_slices_are_served_while_the_disk_is_full_and_it_is_said_once(
    full_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        config = replace(CONFIG, cache_dir=full_folder / "slices")
        async with RelayServer(config) as relay, Backbone(relay) as backbone, httpx.AsyncClient() as http:
            await backbone.register()
            for place in PLACES:
                name, data = slice_name(*place), slice_data(*place)
                get = asyncio.create_task(http.get(f"{relay.url}/slices/{name}"))
                assert (await backbone.expect(SliceWanted)).slice == name
                assert (await backbone.put(http, name, data)).status_code == 201
                assert (await get).content == data
            for place in PLACES:
                part = await http.get(
                    f"{relay.url}/slices/{slice_name(*place)}", headers={"range": "bytes=10-19"}
                )
                assert (part.status_code, part.content) == (206, slice_data(*place)[10:20])

    caplog.set_level(logging.INFO)
    run(test)
    said = [message for message in caplog.messages if "slices cannot be kept" in message]
    assert len(said) == 1 and "No space left on device" in said[0]
    assert "Traceback" not in caplog.text


def test_what_neither_disk_nor_memory_take_is_refused_by_name_at_once(full_folder: Path) -> None:
    async def test() -> None:
        config = replace(CONFIG, cache_dir=full_folder / "slices", slice_wait_s=30.0)
        async with RelayServer(config) as relay, Backbone(relay) as backbone, httpx.AsyncClient() as http:
            relay.app.state.cache.memory.max_bytes = 0
            await backbone.register()
            get = asyncio.create_task(http.get(f"{relay.url}/slices/{slice_name(0, 0)}", timeout=10.0))
            await backbone.expect(SliceWanted)
            put = await backbone.put(http, slice_name(0, 0), slice_data(0, 0))
            for answer in (put, await get):
                assert (answer.status_code, answer.json()["error"]["code"]) == (507, "storage_full")
                assert "No space left on device" in answer.json()["error"]["message"]

    run(test)
