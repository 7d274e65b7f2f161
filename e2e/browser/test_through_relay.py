"""Tabs on the page of the real relay, beside a headless node; every answer has the native kernel's bytes."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
from playwright.async_api import Browser

from backbone.experts.native import NativeKernel
from backbone.node.client import ClientConfig, NodeClient
from e2e.browser.tab import Tab, chromium, own_address, phone
from relay.config import Config
from relay.server import RelayServer
from tests.fakes.backbone import FakeBackbone
from tests.fakes.model import RandomModel

MODEL = RandomModel.make(layers=4, experts=4, hidden_dim=96, expert_dim=64)
KERNEL = NativeKernel()
TOKEN = "t" * 16
SCREENSHOTS = Path(__file__).parents[1] / "screenshots"


def config(folder: Path, host: str = "127.0.0.1", port: int = 0) -> Config:
    return Config(host=host, port=port, cache_dir=folder, backbone_token=TOKEN, drain_s=0.2)


def backbone_of(relay: RelayServer) -> FakeBackbone:
    return FakeBackbone(relay.url, TOKEN, MODEL, KERNEL)


@pytest.fixture
async def relay(tmp_path: Path) -> AsyncIterator[RelayServer]:
    async with RelayServer(config(tmp_path)) as server:
        yield server


@pytest.fixture
async def backbone(relay: RelayServer) -> AsyncIterator[FakeBackbone]:
    async with backbone_of(relay) as fake:
        yield fake


@pytest.fixture
async def browser() -> AsyncIterator[Browser]:
    async with chromium() as opened:
        yield opened


@asynccontextmanager
async def headless(url: str, memory_bytes: int) -> AsyncIterator[NodeClient]:
    client = NodeClient(ClientConfig(url, memory_bytes, "headless"), KERNEL)
    task = asyncio.create_task(client.run())
    try:
        yield client
    finally:
        client.leave("test over")
        await task


async def test_tab_on_the_relays_page_is_found_and_answers_like_the_native_kernel(
    relay: RelayServer, backbone: FakeBackbone, browser: Browser
) -> None:
    tab = await Tab.open(await phone(browser), relay.url)
    (node,) = await backbone.until_covered(1)
    assert (node.name, node.path) == ("Chrome, Android", "relayed") and node.kernel.startswith("wasm-")
    for seed in range(40):
        await backbone.check(node, seed)
    await tab.wait_for(state="serving", layers="4", calls="40")
    assert "relayed" in await tab.text("#details")
    assert tab.complaints == []


async def test_tab_and_headless_node_share_a_model_and_cannot_be_told_apart_by_their_bytes(
    relay: RelayServer, backbone: FakeBackbone, browser: Browser
) -> None:
    half = 2 * 4 * MODEL.formula.slice_bytes
    async with headless(relay.url, half):
        await backbone.until(lambda nodes: len(nodes) == 1, "the headless node")
        await Tab.open(browser, relay.url)
        nodes = await backbone.until_covered(2)
        assert {node.kernel.partition("-")[0] for node in nodes} == {"native", "wasm"}
        for seed in range(20):
            await asyncio.gather(*(backbone.check(node, seed) for node in nodes))


async def test_paused_tab_leaves_the_list_comes_back_and_leaves_for_good(
    relay: RelayServer, backbone: FakeBackbone, browser: Browser
) -> None:
    tab = await Tab.open(browser, relay.url)
    await backbone.until_covered(1)
    await tab.page.get_by_role("button", name="Pause").click()
    await backbone.until(lambda nodes: not nodes, "no nodes")
    await tab.page.get_by_role("button", name="Resume").click()
    (node,) = await backbone.until_covered(1)
    await backbone.check(node, 1)
    await tab.page.get_by_role("button", name="Stop and leave").click()
    await backbone.until(lambda nodes: not nodes, "no nodes")
    await tab.wait_for(state="closed")


async def test_tab_whose_page_is_closed_leaves_the_list_at_once(
    relay: RelayServer, backbone: FakeBackbone, browser: Browser
) -> None:
    tab = await Tab.open(browser, relay.url)
    await backbone.until_covered(1)
    await tab.page.close()
    async with asyncio.timeout(3):
        await backbone.until(lambda nodes: not nodes, "no nodes")


async def test_tab_rejoins_a_restarted_relay_without_loading_anything_twice(
    tmp_path: Path, browser: Browser
) -> None:
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(RelayServer(config(tmp_path / "a")))
        backbone = await stack.enter_async_context(backbone_of(first))
        tab = await Tab.open(browser, first.url)
        await backbone.until_covered(1)
        await first.kill()
        await backbone.until(lambda nodes: not nodes, "no nodes")
        await tab.wait_for(state="connecting")
        # Another folder: a slice fetched again would have to come from the backbone again.
        await stack.enter_async_context(RelayServer(config(tmp_path / "b", port=first.port)))
        (node,) = await backbone.until_covered(1)
        await backbone.check(node, 3)
        assert len(backbone.delivered) == len(MODEL.by_id)


async def test_reloaded_tab_takes_over_from_itself(
    relay: RelayServer, backbone: FakeBackbone, browser: Browser
) -> None:
    tab = await Tab.open(browser, relay.url)
    (before,) = await backbone.until_covered(1)
    await tab.page.reload()
    (after,) = await backbone.until(
        lambda nodes: len(nodes) == 1 and nodes[0].peer != before.peer and len(nodes[0].experts) == 4,
        "the reloaded tab",
    )
    assert after.node_id == before.node_id
    await backbone.check(after, 5)
    assert len(backbone.delivered) == len(MODEL.by_id)


async def test_phone_on_the_lan_contributes_over_plain_http(tmp_path: Path, browser: Browser) -> None:
    async with RelayServer(config(tmp_path, host=own_address())) as relay, backbone_of(relay) as backbone:
        tab = await Tab.open(await phone(browser), relay.url)
        (node,) = await backbone.until_covered(1)
        for seed in range(10):
            await backbone.check(node, seed)
        await tab.wait_for(state="serving", secure="false")
        assert (await tab.data("kernel")).startswith("wasm-")
        assert "https://" in await tab.text("#missing")
        assert tab.complaints == []


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
async def test_screenshots_of_phone_and_desktop_have_nothing_cut_off(
    relay: RelayServer, backbone: FakeBackbone, browser: Browser, dark: bool
) -> None:
    """Writes e2e/screenshots for people to look at; what a machine can see is checked."""
    SCREENSHOTS.mkdir(exist_ok=True)
    scheme = "dark" if dark else "light"
    desktop = await browser.new_context(viewport={"width": 1280, "height": 800}, color_scheme=scheme)
    for name, context in (("phone", await phone(browser, dark=dark)), ("desktop", desktop)):
        tab = await Tab.open(context, relay.url, auto=False)
        await shoot(tab, f"{name}-{scheme}-1-start")
        await tab.page.get_by_role("button", name="Start contributing").click()
        (node,) = await backbone.until_covered(1)
        for seed in range(25):
            await backbone.check(node, seed)
        await tab.wait_for(calls="25")
        await shoot(tab, f"{name}-{scheme}-2-contributing")
        await tab.page.get_by_role("button", name="Stop and leave").click()
        await tab.wait_for(state="closed")
        await shoot(tab, f"{name}-{scheme}-3-left")
        await context.close()


async def shoot(tab: Tab, name: str) -> None:
    await tab.page.screenshot(path=SCREENSHOTS / f"{name}.png", full_page=True)
    wide = "document.documentElement.scrollWidth > document.documentElement.clientWidth"
    assert not await tab.page.evaluate(wide), f"{name}: the page scrolls sideways"
    small = """[...document.querySelectorAll('button, .choices label')]
        .filter((b) => b.offsetParent && b.getBoundingClientRect().height < 44).map((b) => b.textContent)"""
    assert await tab.page.evaluate(small) == [], f"{name}: too small for a thumb"
