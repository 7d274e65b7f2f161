"""What the page says is true, it asks before it costs anything, and it does not insist."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from time import monotonic

import pytest
from playwright.async_api import Browser, BrowserContext

from backbone.experts.native import NativeKernel
from e2e.browser.tab import Tab, chromium, phone
from e2e.browser.test_page import MODEL, assign, check_calls
from relay.config import Config
from relay.server import RelayServer
from relay.wire import messages
from relay.wire.session import Closed
from tests.fakes.linked import LinkedBackbone
from tests.fakes.relay import ROOT, FakeRelay

KERNEL = NativeKernel()
SOON_S = 3.0

# The edge of the browser that this machine has no hardware for: a battery, and a line that costs money.
EDGE = """
    window.edge = { battery: new EventTarget(), line: new EventTarget() };
    Object.assign(edge.battery, { level: LEVEL, charging: CHARGING });
    Object.assign(edge.line, { saveData: false, type: METERED ? 'cellular' : 'wifi' });
    navigator.getBattery = async () => edge.battery;
    Object.defineProperty(navigator, 'connection', { value: edge.line });
    edge.set = (what, values) => {
        Object.assign(edge[what], values);
        for (const sign of ['change', 'levelchange', 'chargingchange'])
            edge[what].dispatchEvent(new Event(sign));
    };
"""


@pytest.fixture
async def relay() -> AsyncIterator[FakeRelay]:
    async with FakeRelay(MODEL.by_id) as fake:
        yield fake


@pytest.fixture
async def browser() -> AsyncIterator[Browser]:
    async with chromium() as opened:
        yield opened


async def device(
    browser: Browser, *, level: float = 1.0, charging: bool = True, metered: bool = False
) -> BrowserContext:
    """A device with this battery on this line."""
    context = await browser.new_context()
    values = {"LEVEL": str(level), "CHARGING": str(charging).lower(), "METERED": str(metered).lower()}
    script = EDGE
    for name, value in values.items():
        script = script.replace(name, value)
    await context.add_init_script(script)
    return context


async def focus(tab: Tab) -> str:
    return str(await tab.page.evaluate("document.activeElement.id"))


async def heard_nothing(relay: FakeRelay) -> None:
    """No node came, for as long as one needs to come."""
    await asyncio.sleep(1.0)
    assert relay.heard.empty() and not relay.served


async def test_a_backbone_that_leaves_and_comes_back_shows_within_seconds(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        config = Config(host="127.0.0.1", port=0, cache_dir=tmp_path, drain_s=0.2)
        relay = await stack.enter_async_context(RelayServer(config))
        browser = await stack.enter_async_context(chromium())
        tab = await Tab.open(browser, relay.url)
        await tab.wait_for(activity="waiting", link="wait")
        for _ in range(2):
            backbone = LinkedBackbone(relay.url, relay.backbone_token, MODEL, KERNEL)
            async with backbone.running():
                await backbone.until_ready()
                await tab.wait_for(activity="idle", link="up")
                await backbone.ask(1)
                await tab.wait_for(activity="helping", link="up")
                assert await tab.text("#headline") == "Contributing"
                await tab.until_text("#facts", "The model is")
            left = monotonic()
            await tab.wait_for(activity="waiting", link="wait")
            assert monotonic() - left < SOON_S
            assert "What was loaded is kept" in await tab.text("#detail")
            assert "lane" not in await tab.text("#facts")
        assert tab.complaints == []


async def test_helping_becomes_idle_when_nobody_asks_any_more(relay: FakeRelay, browser: Browser) -> None:
    tab = await Tab.open(browser, relay.url)
    await assign(relay)
    await tab.wait_for(activity="idle")
    await check_calls(relay, 1, 6)
    await tab.wait_for(activity="helping", calls="6")
    await tab.page.wait_for_selector("body[data-activity=idle]", timeout=15_000, state="attached")
    assert "helps as soon as" in await tab.text("#detail")


async def test_a_line_that_costs_money_is_asked_about_with_the_size_before_anything_is_loaded(
    relay: FakeRelay, browser: Browser
) -> None:
    tab = await Tab.open(await device(browser, metered=True), relay.url, auto=False)
    await tab.wait_for(ready="true")
    await tab.page.get_by_label("128 MB").check()
    await tab.page.keyboard.press("Enter")
    assert "up to 128\u00a0MB" in await tab.page.inner_text("#ask-text")
    assert await focus(tab) == "ask-yes"
    await heard_nothing(relay)
    await tab.page.get_by_role("button", name="Not now").click()
    assert await focus(tab) == "start"
    await heard_nothing(relay)
    await tab.page.click("#start")
    await tab.page.click("#ask-yes")
    assert (await assign(relay)).metered
    await tab.wait_for(state="serving")
    assert await focus(tab) == "pause"
    await tab.page.reload()
    await assign(relay)
    await tab.wait_for(state="serving")


async def test_a_line_that_begins_to_cost_money_pauses_until_its_owner_agrees(
    relay: FakeRelay, browser: Browser
) -> None:
    tab = await Tab.open(await device(browser), relay.url)
    await assign(relay)
    await tab.wait_for(state="serving")
    for agree in (False, True):
        await tab.page.evaluate("edge.set('line', { type: 'cellular' })")
        assert (await relay.hear(messages.Pause)).paused
        await tab.wait_for(activity="metered", link="wait")
        if agree:
            await tab.page.get_by_role("button", name="Go on all the same").click()
        else:
            await tab.page.evaluate("edge.set('line', { type: 'wifi' })")
        assert not (await relay.hear(messages.Pause)).paused
        await tab.wait_for(activity="idle")


async def test_a_low_battery_pauses_and_a_charger_resumes(relay: FakeRelay, browser: Browser) -> None:
    tab = await Tab.open(await device(browser, level=0.5, charging=False), relay.url)
    await assign(relay)
    await tab.wait_for(state="serving")
    await tab.page.evaluate("edge.set('battery', { level: 0.04 })")
    assert (await relay.hear(messages.Pause)).paused
    await tab.wait_for(activity="battery", link="wait")
    assert "charging" in await tab.text("#detail")
    await tab.page.evaluate("edge.set('battery', { charging: true })")
    assert not (await relay.hear(messages.Pause)).paused
    await tab.wait_for(activity="idle")
    await check_calls(relay, 1, 3)


async def test_a_page_started_on_a_low_battery_loads_nothing_until_it_is_charged(
    relay: FakeRelay, browser: Browser
) -> None:
    tab = await Tab.open(await device(browser, level=0.04, charging=False), relay.url)
    await assign(relay)
    await tab.wait_for(activity="battery")
    await asyncio.sleep(1.0)
    assert not relay.served
    await tab.page.evaluate("edge.set('battery', { charging: true })")
    await tab.wait_for(state="serving")


async def test_a_page_that_crashed_lends_less_and_after_two_crashes_waits_for_its_owner(
    relay: FakeRelay, browser: Browser
) -> None:
    context = await browser.new_context()
    tab = await Tab.open(context, relay.url)
    for memory_mb in (512, 256):
        assert (await assign(relay)).memory_bytes == memory_mb * 1_000_000
        await tab.wait_for(state="serving")
        await tab.crash()
        await relay.hear(Closed)
        while not relay.heard.empty():
            relay.heard.get_nowait()
        tab = Tab(await context.new_page())
        await tab.page.goto(relay.url + "/#auto")
        await tab.wait_for(ready="true")
    for _ in range(3):
        assert await tab.data("state") == "idle"
        assert "only when you press Start" in await tab.text("#notice")
        assert await tab.page.get_by_role("radio", name="128 MB").is_checked(), "once less for each crash"
        await tab.page.reload()
        await tab.wait_for(ready="true")
    await asyncio.sleep(1.0)
    assert relay.heard.empty()
    await tab.page.click("#start")
    assert (await assign(relay)).memory_bytes == 128_000_000


async def test_a_reload_goes_on_and_a_stop_is_a_stop(relay: FakeRelay, browser: Browser) -> None:
    tab = await Tab.open(browser, relay.url)
    await assign(relay)
    await tab.wait_for(state="serving")
    await tab.page.reload()
    await assign(relay)
    await tab.wait_for(state="serving")
    assert await tab.page.is_hidden("#notice")
    await tab.page.get_by_role("button", name="Stop and leave").click()
    await tab.wait_for(activity="left")
    await tab.page.goto("about:blank")
    await tab.page.goto(relay.url + "/#auto")
    await tab.wait_for(ready="true")
    assert await tab.data("state") == "idle"


async def test_an_address_alone_begins_nothing(relay: FakeRelay, browser: Browser) -> None:
    for address in ("/#auto", "/?auto=1"):
        tab = Tab(await (await browser.new_context()).new_page())
        await tab.page.goto(relay.url + address)
        await tab.wait_for(ready="true")
        assert "once you have pressed Start" in await tab.text("#notice")
        await heard_nothing(relay)


async def test_kept_parts_can_be_deleted_whenever_there_are_any_and_what_is_gone_is_said(
    relay: FakeRelay, browser: Browser
) -> None:
    tab = await Tab.open(browser, relay.url)
    assert await tab.page.is_hidden("#forget")
    await assign(relay)
    await tab.wait_for(state="serving")
    await tab.until_text("#facts", "kept on this device")
    await tab.page.click("#leave")
    await tab.wait_for(activity="left")
    await tab.page.reload()
    await tab.page.wait_for_selector("#forget", state="visible")  # before any start
    label = await tab.text("#forget")
    await tab.page.focus("#forget")
    await tab.page.keyboard.press("Enter")
    await tab.page.wait_for_selector("#forget", state="hidden")
    size = label.partition("(")[2].rstrip(")")
    facts = await tab.text("#facts")
    assert f"{size} of model parts were deleted" in facts and "kept on this device" not in facts
    assert await focus(tab) == "start"
    await tab.page.reload()
    await tab.wait_for(ready="true")
    await asyncio.sleep(0.5)
    assert await tab.page.is_hidden("#forget")
    await tab.page.click("#start")
    assert (await assign(relay)).inventory == ()
    await tab.wait_for(state="serving")
    await tab.page.wait_for_selector("#forget", state="visible")  # and while it runs
    await tab.page.click("#forget")
    await tab.page.wait_for_selector("#forget", state="hidden")
    assert await focus(tab) == "pause"
    await check_calls(relay, 1, 3)


async def test_the_focus_is_never_lost(relay: FakeRelay, browser: Browser) -> None:
    tab = await Tab.open(browser, relay.url, auto=False)
    await tab.wait_for(ready="true")
    lost = """
        window.lost = [];
        new MutationObserver(() => {
            if (document.activeElement === document.body) lost.push(document.body.dataset.state);
        }).observe(document.body, { subtree: true, attributes: true, childList: true, characterData: true });
    """
    await tab.page.focus("#start")
    await tab.page.evaluate(lost)
    await tab.page.keyboard.press("Enter")
    await assign(relay)
    await tab.wait_for(state="serving")
    for state in ("paused", "serving"):
        await tab.page.keyboard.press("Enter")
        await tab.wait_for(state=state)
    await tab.page.keyboard.press("Tab")
    assert await focus(tab) == "leave"
    await tab.page.keyboard.press("Enter")
    await tab.wait_for(state="closed")
    assert await focus(tab) == "start"
    assert await tab.page.evaluate("lost") == []


async def test_without_javascript_there_is_a_notice_and_no_dead_button(
    relay: FakeRelay, browser: Browser
) -> None:
    page = await (await browser.new_context(java_script_enabled=False)).new_page()
    await page.goto(relay.url)
    # Playwright's switch leaves <noscript> out, so its place is read from the source.
    source = (ROOT / "node-web/index.html").read_text()
    assert source.index("please allow JavaScript") < source.index('id="headline"')
    assert await page.get_by_role("button").count() == 0
    assert await page.get_by_role("radio").count() == 0


async def test_without_webassembly_the_button_is_off_and_says_why(relay: FakeRelay, browser: Browser) -> None:
    context = await browser.new_context()
    await context.add_init_script("delete globalThis.WebAssembly")
    tab = await Tab.open(context, relay.url + "/#auto", auto=False)
    await tab.wait_for(ready="true")
    assert await tab.page.is_disabled("#start")
    assert "no WebAssembly" in await tab.text("#notice")
    await heard_nothing(relay)


async def test_half_a_gigabyte_is_not_asked_for_one(relay: FakeRelay, browser: Browser) -> None:
    context = await phone(browser)
    await context.add_init_script("Object.defineProperty(navigator, 'deviceMemory', { value: 0.5 })")
    await Tab.open(context, relay.url)
    assert (await relay.hear(messages.Offer)).memory_bytes == 64_000_000


EVERY_PAIR = (Path(__file__).parent / "every_pair.js").read_text()


async def test_every_fact_shown_follows_from_the_situation_alone(relay: FakeRelay, browser: Browser) -> None:
    tab = await Tab.open(browser, relay.url + "/?still", auto=False)
    await tab.wait_for(ready="true")
    found = await tab.page.evaluate(EVERY_PAIR)
    assert found == {"wrong": [], "same": []}


@pytest.mark.parametrize("width", [320, 390, 1280])
async def test_a_number_and_its_unit_stay_on_one_line(relay: FakeRelay, browser: Browser, width: int) -> None:
    context = await browser.new_context(viewport={"width": width, "height": 800})
    tab = await Tab.open(context, relay.url)
    await assign(relay)
    await tab.wait_for(state="serving")
    measured = """() => [...document.querySelectorAll('#big dd')].map((dd) => {
        dd.textContent = '84.6\\u00a0MB';
        const range = document.createRange();
        range.selectNodeContents(dd);
        return [range.getClientRects().length, dd.scrollWidth <= dd.clientWidth];
    })"""
    assert await tab.page.evaluate(measured) == [[1, True]] * 4
    cut = """() => [...document.querySelectorAll('#details dd')].filter((dd) => {
        dd.textContent = '84.6\\u00a0MB';
        const range = document.createRange();
        range.selectNodeContents(dd);
        return range.getClientRects().length !== 1;
    }).length"""
    assert await tab.page.evaluate(cut) == 0
    assert await tab.page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "nothing sticks out"
