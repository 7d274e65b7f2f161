"""Open the relay's page in a real Chromium, as a node."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from playwright.async_api import Page, async_playwright

FLAGS = (
    "--no-sandbox", "--disable-quic", "--disable-background-networking", "--disable-component-update",
    "--disable-sync", "--no-first-run", "--mute-audio",
)  # fmt: skip


@asynccontextmanager
async def browser_tab(chromium: str, relay_url: str, query: str = "?auto=1") -> AsyncIterator[Page]:
    """Open one tab that starts to contribute by itself; closes with the block."""
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=chromium, args=list(FLAGS))
        page = await browser.new_page()
        await page.goto(f"{relay_url}/{query}")
        try:
            yield page
        finally:
            await browser.close()
