"""The page that verifies a recorded call, in Chromium, with Pyodide from this machine and nowhere else."""

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from playwright.async_api import Browser

from e2e.browser.tab import Tab, chromium, phone
from relay.config import Config
from relay.server import RelayServer
from relay.verify import find_wheel
from tests.wasm.test_pyodide import NPM, record

SCREENS = os.environ.get("SCREENS")  # a folder for screenshots


@pytest.fixture
async def url() -> AsyncIterator[str]:
    if not NPM.is_dir() or find_wheel() is None:
        pytest.skip("no Pyodide or no wheel here: `make pyodide` brings both")
    config = Config(host="127.0.0.1", port=0, drain_s=0.1, pyodide_dir=NPM)
    async with RelayServer(config) as relay:
        yield relay.url


@pytest.fixture
async def browser() -> AsyncIterator[Browser]:
    async with chromium() as opened:
        yield opened


async def verify(tab: Tab, url: str, file: Path) -> str:
    """Give a file to the page; the verdict's title."""
    await tab.page.goto(url + "/verify")
    await tab.page.set_input_files("#file", file)
    await tab.page.click("#start")
    await tab.page.wait_for_selector("body[data-state=done]", timeout=90_000)
    return await tab.text("#verdict-title")


async def test_a_recorded_call_is_recomputed_and_a_changed_answer_is_found(
    browser: Browser, url: str, tmp_path: Path
) -> None:
    true, lie = tmp_path / "true.escall", tmp_path / "lie.escall"
    true.write_bytes(record())
    lie.write_bytes(record("answer"))
    for dark in (False, True):
        context = await phone(browser, dark=dark)
        tab = Tab(await context.new_page())
        file, title = (lie, "The bytes differ") if dark else (true, "The bytes agree")
        assert await verify(tab, url, file) == title
        if dark:
            assert "1 of 288 channels" in await tab.text("#verdict-detail")
            assert (await tab.text("#differences")).split()[4:6] == ["1", "7"]
        hosts = await tab.page.evaluate(
            "performance.getEntriesByType('resource').map((e) => new URL(e.name).host)"
        )
        assert set(hosts) == {url.removeprefix("http://")}
        assert not tab.complaints
        assert await tab.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        if SCREENS:
            await tab.page.screenshot(path=f"{SCREENS}/verify-phone-{dark}.png", full_page=True)
            await tab.page.set_viewport_size({"width": 1200, "height": 900})
            await tab.page.screenshot(path=f"{SCREENS}/verify-desk-{dark}.png", full_page=True)


async def test_a_file_that_is_no_record_is_named_as_such(browser: Browser, url: str, tmp_path: Path) -> None:
    file = tmp_path / "x.escall"
    file.write_bytes(b"GIF89a")
    tab = Tab(await browser.new_page())
    assert await verify(tab, url, file) == "This file cannot be checked"
    assert not tab.complaints


async def test_a_relay_without_the_means_says_what_is_missing(browser: Browser, tmp_path: Path) -> None:
    config = Config(host="127.0.0.1", port=0, drain_s=0.1, pyodide_dir=tmp_path)
    async with RelayServer(config) as relay:
        tab = Tab(await browser.new_page())
        await tab.page.goto(relay.url + "/verify")
        await tab.until_text("#notice", "pyodide.asm.wasm")
        assert await tab.page.is_disabled("#start")
        assert not tab.complaints
