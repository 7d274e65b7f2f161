"""The graphics kernel in Chromium, on SwiftShader: in the page, in its worker, when the device is lost."""

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
from playwright.async_api import Browser

from backbone.experts.native import NativeKernel
from e2e.browser.tab import Tab, chromium
from relay.wire import messages
from tests.fakes.model import RandomModel
from tests.fakes.relay import FakeRelay, partial_of

MODEL = RandomModel.make(layers=3, experts=4, hidden_dim=96, expert_dim=64)
KERNEL = NativeKernel()
EVERYTHING = {layer: [0, 1, 2, 3] for layer in range(3)}
NO_ADAPTER = "this browser offers no graphics device"
OPEN = """
    const { WebGpuKernel, TOLERANCE } = await import('/src/kernels/webgpu.js');
    const { WasmKernel } = await import('/src/kernels/wasm.js');
    const exact = await WasmKernel.load(new URL('/kernels/kernel-plain.wasm', location.href));
    const wgsl = await (await fetch('/src/kernels/webgpu.wgsl')).text();
    const lost = [];
    const onLost = (experts) => lost.push(...experts);
    const open = (deadlineMs) => WebGpuKernel.open({ exact, wgsl, deadlineMs, onLost });
"""


@pytest.fixture
async def relay() -> AsyncIterator[FakeRelay]:
    async with FakeRelay(MODEL.by_id) as fake:
        yield fake


@pytest.fixture
async def browser() -> AsyncIterator[Browser]:
    async with chromium("--enable-unsafe-webgpu") as opened:
        yield opened


async def patient_offer(relay: FakeRelay) -> messages.Offer:
    """A device that is software compiles a dozen shaders before its first offer."""
    for _ in range(12):
        with contextlib.suppress(TimeoutError):
            return await relay.hear(messages.Offer)
    raise AssertionError("no offer came")


async def in_page(browser: Browser, relay: FakeRelay, script: str) -> Any:
    tab = await Tab.open(browser, relay.url, auto=False)
    found = await tab.page.evaluate(
        "async () => { try { " + OPEN + script + " } catch (error) { return String(error.message); } }"
    )
    if found == NO_ADAPTER:
        pytest.skip("Chromium gives no WebGPU adapter here, not even SwiftShader")
    return found


async def test_every_format_is_within_the_tolerance_of_the_exact_kernel(
    browser: Browser, relay: FakeRelay
) -> None:
    script = """
        const kernel = await open();
        await kernel.knownAnswerTest();
        const errors = {};
        for (const type of [0, 1, 8, 12, 14, 39]) {
          for (const rows of [1, 5, 9]) errors[`${type} ${rows}`] = await kernel.errorOf(type, rows, rows);
        }
        return { errors, TOLERANCE };
    """
    found = await in_page(browser, relay, script)
    assert isinstance(found, dict), found
    print(max(found["errors"].items(), key=lambda item: item[1]), found["errors"])
    assert max(found["errors"].values()) <= found["TOLERANCE"]


async def test_a_lost_device_fails_what_runs_within_a_second_and_is_replaced(
    browser: Browser, relay: FakeRelay
) -> None:
    script = """
        const kernel = await open();
        await kernel.errorOf(8);
        const started = performance.now();
        const running = kernel.errorOf(12, 60);
        await new Promise((resolve) => setTimeout(resolve, 1));
        kernel.device.destroy();
        const code = await running.then(() => 'answered', (error) => error.code);
        const ms = performance.now() - started;
        const again = await kernel.errorOf(8);
        return { code, ms, again, lost: lost.length };
    """
    found = await in_page(browser, relay, script)
    assert isinstance(found, dict), found
    assert found["code"] == "not_held" and found["ms"] < 1000 and found["again"] < 1e-3


async def test_a_device_that_does_not_answer_in_time_is_given_up_and_in_the_end_for_good(
    browser: Browser, relay: FakeRelay
) -> None:
    script = """
        const kernel = await open(1);
        const heard = [];
        for (let i = 0; i < 5; i++) {
          heard.push(await kernel.errorOf(12, 100).then(() => 'answered', (error) => error.code));
          await new Promise((resolve) => setTimeout(resolve, 50));
        }
        return heard;
    """
    heard = await in_page(browser, relay, script)
    assert heard[0] == "not_held" and heard[-1] == "kernel_fault"


async def test_a_tab_serves_with_its_graphics_device_when_asked_to(
    browser: Browser, relay: FakeRelay
) -> None:
    tab = Tab(await browser.new_page())
    await tab.page.goto(relay.url + "/?gpu=1#auto")
    offer = await patient_offer(relay)
    if offer.kernel != "webgpu":
        pytest.skip("Chromium's worker gives no WebGPU adapter here")
    await relay.say(lambda session: session.send_assign(MODEL.assign(EVERYTHING, 1)))
    await tab.wait_for(state="serving", layers="3", kernel="webgpu")
    for number in range(1, 7):
        dispatch = MODEL.dispatch(number % 3, [[0, 2], [3], [1, 2]][: 1 + number % 3], seed=number)
        await relay.dispatch(number, dispatch, 1)
        sums, exact = partial_of(await relay.hear_call()).sums(), MODEL.answer(KERNEL, dispatch)
        assert np.abs(sums - exact).max() <= 2.0**-10 * np.abs(exact).max()


async def test_a_tab_without_a_graphics_device_serves_with_wasm(relay: FakeRelay) -> None:
    async with chromium() as plain:
        tab = Tab(await plain.new_page())
        await tab.page.goto(relay.url + "/?gpu=1#auto")
        offer = await relay.hear(messages.Offer)
        assert offer.kernel.startswith("wasm-")
