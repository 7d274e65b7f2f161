"""The page in Chromium against a scripted relay: answers like the native kernel, survives what tabs do."""

from collections.abc import AsyncIterator

import numpy as np
import pytest
from playwright.async_api import Browser

from backbone.experts.native import NativeKernel
from e2e.browser.tab import Tab, chromium, own_address, phone
from relay.wire import messages
from relay.wire.frames import Frame, FrameType
from relay.wire.session import Closed
from tests.fakes.model import RandomModel
from tests.fakes.relay import FakeRelay, failure_of, partial_of

MODEL = RandomModel.make(layers=3, experts=4, hidden_dim=96, expert_dim=64)
KERNEL = NativeKernel()
EVERYTHING = {layer: [0, 1, 2, 3] for layer in range(3)}


@pytest.fixture
async def relay() -> AsyncIterator[FakeRelay]:
    async with FakeRelay(MODEL.by_id) as fake:
        yield fake


@pytest.fixture
async def browser() -> AsyncIterator[Browser]:
    async with chromium() as opened:
        yield opened


async def assign(relay: FakeRelay, epoch: int = 1) -> messages.Offer:
    """Wait for a tab's offer and assign it the whole model."""
    offer = await relay.hear(messages.Offer)
    await relay.say(lambda session: session.send_assign(MODEL.assign(EVERYTHING, epoch)))
    return offer


async def check_calls(relay: FakeRelay, first: int, count: int, epoch: int = 1) -> None:
    """Dispatch random rows and compare what comes back with the native kernel, bit for bit."""
    for number in range(first, first + count):
        dispatch = MODEL.dispatch(number % 3, [[0, 2], [3], [1, 2]][: 1 + number % 3], seed=number)
        await relay.dispatch(number, dispatch, epoch)
        frame = await relay.hear_call()
        assert frame.call_id == number
        assert np.array_equal(partial_of(frame).sums(), MODEL.answer(KERNEL, dispatch))


async def test_tab_joins_loads_its_slices_and_answers_with_the_bytes_of_the_native_kernel(
    relay: FakeRelay, browser: Browser
) -> None:
    tab = await Tab.open(await phone(browser), relay.url)
    offer = await assign(relay)
    assert offer.kernel.startswith("wasm-") and offer.memory_bytes == 256_000_000 and offer.gb_per_s > 0
    await tab.wait_for(state="serving", layers="3", kernel=offer.kernel, secure="true")
    await check_calls(relay, 1, 30)
    await tab.wait_for(calls="30")
    assert await tab.text("#headline") == "Contributing"
    assert tab.complaints == []


async def test_tab_starts_with_one_press_and_lends_what_was_chosen(
    relay: FakeRelay, browser: Browser
) -> None:
    tab = await Tab.open(await phone(browser), relay.url, auto=False)
    assert await tab.data("state") == "idle"
    await tab.page.get_by_label("64 MB").check()
    await tab.page.get_by_role("button", name="Start contributing").click()
    assert (await assign(relay)).memory_bytes == 64_000_000
    await tab.wait_for(state="serving")
    await tab.page.reload()
    assert await tab.page.get_by_label("64 MB").is_checked()
    assert tab.complaints == []


async def test_page_works_by_keyboard_alone(relay: FakeRelay, browser: Browser) -> None:
    tab = await Tab.open(browser, relay.url, auto=False)
    await tab.page.keyboard.press("Tab")  # the chosen amount
    await tab.page.keyboard.press("ArrowLeft")
    await tab.page.keyboard.press("Tab")
    await tab.page.keyboard.press("Enter")
    assert (await assign(relay)).memory_bytes == 256_000_000
    await tab.wait_for(state="serving")
    assert await tab.page.evaluate("document.activeElement.id") == "pause"
    await tab.page.keyboard.press("Enter")
    await tab.wait_for(state="paused")


async def test_paused_tab_takes_no_calls_and_resumes(relay: FakeRelay, browser: Browser) -> None:
    tab = await Tab.open(browser, relay.url)
    await assign(relay)
    await tab.wait_for(state="serving")
    await tab.page.get_by_role("button", name="Pause").click()
    assert (await relay.hear(messages.Pause)).paused
    await tab.wait_for(state="paused")
    await relay.dispatch(1, MODEL.dispatch(0, [[0]]))
    assert failure_of(await relay.hear_call()).code == "refused"
    await tab.page.get_by_role("button", name="Resume").click()
    assert not (await relay.hear(messages.Pause)).paused
    await check_calls(relay, 2, 3)


async def test_leaving_tab_says_bye_and_may_start_again(relay: FakeRelay, browser: Browser) -> None:
    tab = await Tab.open(browser, relay.url)
    await assign(relay)
    await tab.wait_for(state="serving")
    await check_calls(relay, 1, 2)
    await tab.page.get_by_role("button", name="Stop and leave").click()
    assert (await relay.hear(Closed)).reason == "the owner left"
    await tab.wait_for(state="closed", calls="2")
    assert await tab.text("#headline") == "Thank you"
    await tab.page.get_by_role("button", name="Start contributing").click()
    assert set((await assign(relay)).inventory) == set(MODEL.by_id)
    await tab.wait_for(state="serving")
    await check_calls(relay, 1, 1)
    await tab.wait_for(calls="3")


async def test_tab_joins_again_after_a_restart_of_the_relay_without_loading_anything_twice(
    relay: FakeRelay, browser: Browser
) -> None:
    tab = await Tab.open(browser, relay.url)
    hello = await relay.hear(messages.Hello)
    await assign(relay)
    await tab.wait_for(state="serving")
    await relay.close()
    await tab.wait_for(state="connecting")
    await relay.open()
    again = await relay.hear(messages.Hello)
    assert (again.id, again.secret, again.resume) == (hello.id, hello.secret, True)
    offer = await assign(relay, epoch=5)
    assert set(offer.inventory) == set(MODEL.by_id)
    await tab.wait_for(state="serving")
    await check_calls(relay, 1, 3, epoch=5)
    assert max(relay.served.values()) == 1


async def test_reloaded_tab_is_the_same_node_and_keeps_its_slices(relay: FakeRelay, browser: Browser) -> None:
    tab = await Tab.open(browser, relay.url)
    hello = await relay.hear(messages.Hello)
    await assign(relay)
    await tab.wait_for(state="serving")
    await tab.page.reload()
    assert (await relay.hear(messages.Hello)).id == hello.id
    assert set((await assign(relay)).inventory) == set(MODEL.by_id)
    await tab.wait_for(state="serving")
    await check_calls(relay, 1, 3)
    assert max(relay.served.values()) == 1


async def test_tab_that_crashed_comes_back_with_its_slices_checked_again(
    relay: FakeRelay, browser: Browser
) -> None:
    context = await browser.new_context()
    tab = await Tab.open(context, relay.url)
    hello = await relay.hear(messages.Hello)
    await assign(relay)
    await tab.wait_for(state="serving")
    await tab.crash()
    await relay.hear(Closed)
    reopened = await Tab.open(context, relay.url)
    assert (await relay.hear(messages.Hello)).id == hello.id
    await assign(relay)
    await reopened.wait_for(state="serving")
    await check_calls(relay, 1, 3)
    assert max(relay.served.values()) == 1


async def test_tab_that_crashes_while_loading_lends_less_next_time(
    relay: FakeRelay, browser: Browser
) -> None:
    context = await browser.new_context()
    relay.on_slice = lambda i: 503  # loading never ends
    tab = await Tab.open(context, relay.url)
    assert (await assign(relay)).memory_bytes == 512_000_000
    await tab.wait_for(state="assigned")
    await tab.until_text("#facts", "could not be loaded")
    assert "503" not in await tab.text("#facts"), "numbers are for machines"
    await tab.crash()
    again = await Tab.open(context, relay.url, auto=False)
    await again.wait_for(ready="true")
    assert "lack of memory" in await again.text("#notice")
    await again.start()
    assert (await relay.hear(messages.Offer)).memory_bytes == 256_000_000


async def test_page_on_a_plain_http_address_contributes_and_says_what_is_missing(browser: Browser) -> None:
    async with FakeRelay(MODEL.by_id, host=own_address()) as relay:
        tab = await Tab.open(await phone(browser), relay.url)
        await assign(relay)
        await tab.wait_for(state="serving", secure="false")
        assert (await tab.data("kernel")).startswith("wasm-")
        await check_calls(relay, 1, 6)
        text = await tab.text("#missing")
        for word in ("plain http", "WebGPU", "WebCrypto", "Wake lock", "Storage", "https://"):
            assert word in text
        assert "gone when the page closes" in await tab.text("#facts")
        assert tab.complaints == []


async def test_slice_with_wrong_bytes_is_loaded_again(relay: FakeRelay, browser: Browser) -> None:
    bad = MODEL.ids[1][2]
    wrong = bytes(MODEL.formula.slice_bytes)
    relay.on_slice = lambda i: wrong if i == bad and relay.served[i] == 1 else None
    tab = await Tab.open(browser, relay.url)
    await assign(relay)
    await tab.wait_for(state="serving")
    assert relay.served[bad] == 2
    await check_calls(relay, 1, 3)


async def test_full_storage_leaves_slices_in_memory_and_says_so(relay: FakeRelay, browser: Browser) -> None:
    context = await browser.new_context()
    tab = await Tab.open(context, relay.url, auto=False)
    cdp = await context.new_cdp_session(tab.page)
    await cdp.send("Storage.overrideQuotaForOrigin", {"origin": relay.url, "quotaSize": 60_000})
    await tab.page.get_by_role("button", name="Start contributing").click()
    await assign(relay)
    await tab.wait_for(state="serving")
    await check_calls(relay, 1, 3)
    await tab.until_text("#facts", "Storage is full")


async def test_kept_slices_can_be_deleted(relay: FakeRelay, browser: Browser) -> None:
    tab = await Tab.open(browser, relay.url)
    await assign(relay)
    await tab.wait_for(state="serving")
    await tab.page.get_by_role("button", name="Stop and leave").click()
    await tab.page.get_by_role("button", name="Delete kept model parts").click()
    await tab.page.wait_for_selector("#forget", state="hidden")
    await tab.page.get_by_role("button", name="Start contributing").click()
    assert (await assign(relay)).inventory == ()


async def test_tab_without_a_working_kernel_refuses_to_serve_and_says_why(
    relay: FakeRelay, browser: Browser
) -> None:
    tab = Tab(await browser.new_page())
    await tab.page.route(
        "**/*.wasm", lambda route: route.fulfill(body=b"\0asm\1\0\0\0", content_type="application/wasm")
    )
    await tab.page.goto(relay.url)
    await tab.start()
    await tab.wait_for(state="closed", kernel="failed")
    assert await tab.text("#headline") == "Stopped"
    assert "known-answer test" in await tab.text("#detail")
    while not relay.heard.empty():
        assert not isinstance(relay.heard.get_nowait(), messages.Offer)


async def test_tab_answers_pings_and_drops_garbage_without_falling_over(
    relay: FakeRelay, browser: Browser
) -> None:
    tab = await Tab.open(browser, relay.url)
    await assign(relay)
    await tab.wait_for(state="serving")
    await relay.send(Frame(FrameType.DISPATCH, b"garbage", 9, 1, 1))
    assert failure_of(await relay.hear_call()).code == "bad_frame"
    await check_calls(relay, 2, 2)
    assert relay.connection is not None
    await relay.connection.send(b"this is no frame")
    await tab.wait_for(state="closed")
    assert "could not read" in (await tab.text("#detail")) or "Stopped" in await tab.text("#headline")


async def test_second_tab_of_the_same_browser_is_told_apart_when_the_relay_replaces_the_first(
    relay: FakeRelay, browser: Browser
) -> None:
    tab = await Tab.open(browser, relay.url)
    await relay.hear(messages.Offer)
    await relay.say(lambda session: session.close(4409, "replaced"))
    await tab.wait_for(state="closed")
    assert "joined again elsewhere" in await tab.text("#detail")


async def test_a_tab_with_several_workers_answers_with_the_same_bytes(
    relay: FakeRelay, browser: Browser
) -> None:
    tab = Tab(await browser.new_page())
    await tab.page.goto(relay.url + "/?workers=3")
    await tab.start()
    await assign(relay)
    await tab.wait_for(state="serving", layers="3")
    assert len(tab.page.workers) == 4, "one that speaks, three that compute"
    await check_calls(relay, 1, 12)
    assert tab.complaints == []
