"""A program runs as long as its block, whatever it does with SIGTERM."""

import asyncio
import sys

import pytest

from backbone import processes
from backbone.processes import running


async def test_program_ends_with_the_block(tmp_path):
    with (tmp_path / "log").open("wb") as log:
        async with running(
            sys.executable, "-c", "import time; print('up', flush=True); time.sleep(60)", output=log
        ) as process:
            while not (tmp_path / "log").read_bytes():
                await asyncio.sleep(0.01)
            assert process.returncode is None
    assert process.returncode == -15
    assert (tmp_path / "log").read_text() == "up\n"


async def test_program_that_does_not_listen_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "STOP_TIMEOUT_S", 0.2)
    deaf = "import signal as s, time; s.signal(s.SIGTERM, s.SIG_IGN); print(flush=True); time.sleep(60)"
    with (tmp_path / "log").open("wb") as log:
        async with running(sys.executable, "-c", deaf, output=log) as process:
            while not (tmp_path / "log").read_bytes():
                await asyncio.sleep(0.01)
    assert process.returncode == -9


async def test_program_that_ended_by_itself_is_left_in_peace():
    with pytest.raises(ValueError, match="the block's own"):
        async with running(sys.executable, "-c", "", output=asyncio.subprocess.DEVNULL) as process:
            await process.wait()
            raise ValueError("the block's own")
    assert process.returncode == 0
