"""
Chromium by its raw DevTools protocol, for what Playwright cannot show.

Playwright keeps every page "visible"; a tab can only be hidden and frozen in a browser it does not drive.
"""

import asyncio
import itertools
import json
import re
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from websockets.asyncio.client import ClientConnection, connect

from e2e.browser.tab import FLAGS

WAIT_S = 15.0


class RawTab:
    """One tab of a raw browser."""

    def __init__(self, browser: "RawBrowser", target: str, session: str) -> None:
        self.browser = browser
        self.target = target
        self.session = session

    async def send(self, method: str, **params: Any) -> Any:
        return await self.browser.send(method, params, self.session)

    async def evaluate(self, expression: str) -> Any:
        result = await self.send(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        return result["result"].get("value")

    async def until(self, expression: str) -> None:
        """Wait until an expression is true in the page."""
        async with asyncio.timeout(WAIT_S):
            while not await self.evaluate(expression):
                await asyncio.sleep(0.05)

    async def to_front(self) -> None:
        await self.browser.send("Target.activateTarget", {"targetId": self.target})

    async def lifecycle(self, state: str) -> None:
        """`frozen` or `active`."""
        await self.send("Page.setWebLifecycleState", state=state)


class RawBrowser:
    """The browser's own end of the protocol."""

    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}

    async def read(self) -> None:
        """Hand answers to those who wait for them; events are not needed."""
        async for text in self._connection:
            message = json.loads(text)
            future = self._waiting.pop(message.get("id"), None)
            if future is None or future.done():
                continue
            if "error" in message:
                future.set_exception(RuntimeError(message["error"]["message"]))
            else:
                future.set_result(message["result"])

    async def send(self, method: str, params: dict[str, Any], session: str | None = None) -> Any:
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": params}
        if session is not None:
            message["sessionId"] = session
        self._waiting[number] = asyncio.get_running_loop().create_future()
        await self._connection.send(json.dumps(message))
        async with asyncio.timeout(WAIT_S):
            return await self._waiting[number]

    async def open(self, url: str) -> RawTab:
        target = (await self.send("Target.createTarget", {"url": url}))["targetId"]
        attached = await self.send("Target.attachToTarget", {"targetId": target, "flatten": True})
        return RawTab(self, target, attached["sessionId"])


@asynccontextmanager
async def raw_chromium() -> AsyncIterator[RawBrowser]:
    """Start Chromium, connect, and end it again with its profile."""
    path = shutil.which("chromium")
    if path is None:
        pytest.skip("no chromium in PATH: apt-get install chromium")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = await asyncio.create_subprocess_exec(
            path, "--headless=new", *FLAGS, "--remote-debugging-port=0", f"--user-data-dir={profile}",
            "about:blank", stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        assert process.stderr is not None
        try:
            async with asyncio.timeout(WAIT_S):
                while not (found := re.search(r"ws://\S+", (await process.stderr.readline()).decode())):
                    pass
            async with connect(found[0], max_size=None, compression=None) as connection:
                browser = RawBrowser(connection)
                reader = asyncio.create_task(browser.read())
                try:
                    yield browser
                finally:
                    await browser.send("Browser.close", {})
                    reader.cancel()
                    await asyncio.gather(reader, return_exceptions=True)
        finally:
            if process.returncode is None:
                try:
                    async with asyncio.timeout(5):
                        await process.communicate()
                except TimeoutError:
                    process.kill()
                    await process.wait()
