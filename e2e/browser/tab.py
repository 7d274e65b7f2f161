"""Drive one tab of the page: open, wait for its state, collect what the browser complained about."""

import asyncio
import shutil
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from playwright.async_api import Browser, BrowserContext, Page, async_playwright

FLAGS = [
    "--no-sandbox",
    "--disable-quic",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]
WAIT_MS = 10_000
PHONE_AGENT = (
    "Mozilla/5.0 (Linux; Android 15; Pixel 8a) AppleWebKit/537.36 (KHTML, like Gecko) "
    "Chrome/156.0.0.0 Mobile Safari/537.36"
)


@asynccontextmanager
async def chromium(*flags: str) -> AsyncIterator[Browser]:
    """Debian's Chromium, headless."""
    path = shutil.which("chromium")
    if path is None:
        pytest.skip("no chromium in PATH: apt-get install chromium")
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=path, args=[*FLAGS, *flags])
        try:
            yield browser
        finally:
            await browser.close()


async def phone(browser: Browser, *, dark: bool = False) -> BrowserContext:
    """A phone-sized, touch-only context."""
    return await browser.new_context(
        viewport={"width": 390, "height": 844},
        device_scale_factor=2,
        is_mobile=True,
        has_touch=True,
        color_scheme="dark" if dark else "light",
        user_agent=PHONE_AGENT,
    )


def own_address() -> str:
    """An address of this machine that browsers do not trust as they trust loopback. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # RFC 5737: an address of nobody
        except OSError:
            pytest.skip("this machine has no address but loopback")
        return str(probe.getsockname()[0])


class Tab:
    """One page. `complaints` are console errors and exceptions; a test ends by asserting there are none."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.complaints: list[str] = []
        page.set_default_timeout(WAIT_MS)
        page.on("console", lambda m: self.complaints.append(m.text) if m.type == "error" else None)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))

    @classmethod
    async def open(
        cls,
        where: Browser | BrowserContext,
        url: str,
        auto: bool = True,
        fragment: str = "",
        query: str = "",
    ) -> "Tab":
        """auto: press Start, if the page does not begin by itself."""
        tab = cls(await where.new_page())
        await tab.page.goto(url + "/" + query + (f"#{fragment}" if fragment else ""))
        if auto:
            await tab.start()
        return tab

    async def start(self) -> None:
        """Press Start, if the page does not begin by itself."""
        await self.wait_for(ready="true")
        if await self.page.is_visible("#start"):
            await self.page.click("#start")

    async def crash(self) -> None:
        """End the page's process as a lack of memory does."""
        crashed = asyncio.Event()
        self.page.on("crash", lambda _: crashed.set())
        crash = asyncio.ensure_future(self.page.goto("chrome://crash"))
        await asyncio.wait_for(crashed.wait(), 20)
        crash.cancel()
        await asyncio.gather(crash, return_exceptions=True)

    async def wait_for(self, **data: str) -> None:
        """Wait until the body's data attributes have these values."""
        selector = "body" + "".join(f'[data-{name}="{value}"]' for name, value in data.items())
        await self.page.wait_for_selector(selector, timeout=WAIT_MS, state="attached")

    async def data(self, name: str) -> str:
        """One data attribute of the body."""
        return str(await self.page.evaluate(f"document.body.dataset[{name!r}]"))

    async def text(self, selector: str) -> str:
        return await self.page.inner_text(selector)

    async def until_text(self, selector: str, part: str) -> None:
        """Wait until an element shows a text."""
        async with asyncio.timeout(WAIT_MS / 1000):
            while part not in await self.text(selector):
                await asyncio.sleep(0.05)
