"""Run a program for as long as a block lasts."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import IO

STOP_TIMEOUT_S = 5.0


@asynccontextmanager
async def running(
    *command: str, output: IO[bytes] | int, errors: int | None = asyncio.subprocess.STDOUT
) -> AsyncIterator[asyncio.subprocess.Process]:
    """
    Start a program whose output goes to a file (or `asyncio.subprocess.DEVNULL`); end it with the block.

    errors: where its standard error goes; None leaves it where ours goes.

    It is asked by SIGTERM and killed when it has not ended after STOP_TIMEOUT_S. It has a session of its own:
    Ctrl-C is for us, and we end it in order.
    """
    process = await asyncio.create_subprocess_exec(
        *command, stdout=output, stderr=errors, start_new_session=True
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.terminate()
            try:
                await asyncio.wait_for(process.wait(), STOP_TIMEOUT_S)
            except TimeoutError:
                process.kill()
        await process.wait()
