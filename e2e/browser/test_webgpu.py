"""The graphics kernel in Chromium, on SwiftShader: in the page, in its worker, when the device is lost."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
from playwright.async_api import Browser

from backbone.experts.native import NativeKernel
from backbone.experts.webgpu import TOLERANCE
from e2e.browser.tab import Tab, chromium
from relay.wire import messages
from relay.wire.frames import FrameType
from tests.fakes.model import RandomModel
from tests.fakes.relay import FakeRelay, partial_of

MODEL = RandomModel.make(layers=3, experts=4, hidden_dim=96, expert_dim=64)
LARGE = RandomModel.make(layers=1, experts=4, hidden_dim=1024, expert_dim=512)
KERNEL = NativeKernel()
EVERYTHING = {layer: [0, 1, 2, 3] for layer in range(3)}
NO_ADAPTER = "this browser offers no graphics device"
OPEN = """
    const { WebGpuKernel, TOLERANCE } = await import('/src/kernels/webgpu.js');
    const { FORMATS } = await import('/src/kernels/webgpu/formats.js');
    const { WasmKernel } = await import('/src/kernels/wasm.js');
    const exact = await WasmKernel.load(new URL('/kernels/kernel-plain.wasm', location.href));
    const read = async (name) => (await fetch(`/src/kernels/webgpu/${name}.wgsl`)).text();
    const lost = [];
    const onLost = (experts) => lost.push(...experts);
    const open = (options) => WebGpuKernel.open({ exact, read, onLost, ...options });
    const of = (gate, up = gate, down = up, changes = {}) => ({
      hidden_dim: 0, expert_dim: 0, gate_type: gate, up_type: up, down_type: down, activation: 'silu',
      alpha: 0, limit: 0, weight_position: 'after', biased: false, scaled: false, ...changes,
    });
"""
# Every format as gate, up or down, mixed so that gate and up want x differently, too; every formula.
MIXED = """
    const before = { weight_position: 'before' };
    const extras = { biased: true, scaled: true };
    const mixed = [
      of(0, 1, 2),
      of(3, 6, 7, { activation: 'gelu' }),
      of(8, 10, 11, { activation: 'relu', ...before }),
      of(null, 12, 13, { activation: 'relu2' }),
      of(14, 20, 23, { activation: 'swiglu_oai', alpha: 1.702, limit: 0.5, biased: true }),
      of(30, 34, 35, { activation: 'swiglu_clamp', limit: 0.5 }),
      of(39, 40, 8, { activation: 'situ', alpha: 0.5, limit: 0.25 }),
      of(12, 12, 14, { limit: 0.5, ...before, ...extras }),
      of(null, 8, 1, { activation: 'gelu', ...extras }),
      of(16, 17, 18),
      of(19, 8, 21, { activation: 'relu' }),
      of(22, 29, 0, { biased: true }),
    ];
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


async def test_every_format_and_formula_is_within_the_tolerance_with_the_least_a_device_has(
    browser: Browser, relay: FakeRelay
) -> None:
    """Devices are asked for no more than the defaults of the specification; matrices in parts of 4 KB."""
    script = (
        MIXED
        + """
        const seen = new Set(mixed.flatMap((f) => [f.gate_type, f.up_type, f.down_type]));
        const missing = Object.keys(FORMATS).map(Number).filter((type) => !seen.has(type));
        const kernel = await open({ bindingBytes: 4096 });
        const { limits } = kernel.device;
        const buffers = limits.maxStorageBuffersPerShaderStage;
        const shared = limits.maxComputeWorkgroupStorageSize;
        const errors = [];
        for (const [i, formula] of mixed.entries()) {
          errors.push(await kernel.errorOf(formula, 1 + 4 * (i % 3), i));
        }
        const refused = kernel.refusal({ ...of(0), hidden_dim: 2048, expert_dim: 8 });
        return { errors, missing, buffers, shared, refused, TOLERANCE };
    """
    )
    found = await in_page(browser, relay, script)
    assert isinstance(found, dict), found
    assert found["missing"] == [] and (found["buffers"], found["shared"]) == (8, 16384)
    assert max(found["errors"]) <= found["TOLERANCE"]
    assert "one binding holds 4096" in found["refused"]


async def test_a_lost_device_fails_what_runs_within_a_second_and_is_replaced(
    browser: Browser, relay: FakeRelay
) -> None:
    script = """
        const kernel = await open();
        await kernel.errorOf(of(8));
        const started = performance.now();
        const running = kernel.errorOf(of(8), 200);
        await new Promise((resolve) => setTimeout(resolve, 1));
        kernel.device.destroy();
        const code = await running.then(() => 'answered', (error) => error.code);
        const ms = performance.now() - started;
        const formula = { ...of(8), hidden_dim: 64, expert_dim: 32 };
        const again = await kernel.pack(formula, new Uint8Array(3 * 64 * 34));
        return { code, ms, again: again.sizeBytes, lost: lost.length };
    """
    found = await in_page(browser, relay, script)
    assert isinstance(found, dict), found
    assert found["code"] == "not_held" and found["ms"] < 1000 and found["again"] > 0


async def test_a_device_that_does_not_answer_in_time_is_given_up_and_in_the_end_for_good(
    browser: Browser, relay: FakeRelay
) -> None:
    script = """
        const kernel = await open();
        await kernel.errorOf(of(8)); // the shaders are there: what is timed is the computation
        kernel.graphics.deadlineMs = 1;
        const heard = [];
        for (let i = 0; i < 5; i++) {
          heard.push(await kernel.errorOf(of(8), 300).then(() => 'answered', (error) => error.code));
          await new Promise((resolve) => setTimeout(resolve, 50));
        }
        return heard;
    """
    heard = await in_page(browser, relay, script)
    assert heard[0] == "not_held" and heard[-1] == "kernel_fault"


async def test_a_graphics_process_that_dies_in_mid_job_fails_it_within_a_second_and_serving_goes_on(
    browser: Browser,
) -> None:
    """The real thing: the browser's graphics process is killed, more often than a device is replaced."""
    async with FakeRelay(LARGE.by_id) as relay:
        tab = Tab(await browser.new_page())
        await tab.page.goto(relay.url + "/?gpu=1")
        await tab.start()
        offer = await patient_offer(relay)
        if offer.kernel != "webgpu":
            pytest.skip("Chromium's worker gives no WebGPU adapter here")
        process = await browser.new_browser_cdp_session()
        await relay.say(lambda session: session.send_assign(LARGE.assign({0: [0, 1, 2, 3]}, 1)))
        dispatch = LARGE.dispatch(0, [[0, 1], [2, 3]] * 60, seed=1)
        exact = LARGE.answer(KERNEL, dispatch)
        failures = 0
        await all_held(relay)
        for number in (1, 2):
            await relay.dispatch(number, dispatch, 1)
            await asyncio.sleep(0.15)
            killed = time.monotonic()
            await process.send("Browser.crashGpuProcess")
            heard = await relay.hear_call()
            assert time.monotonic() - killed < 1.0
            if heard.type is FrameType.FAILURE:  # a fast machine may have finished before
                failures += 1
                await all_held(relay)
        assert failures
        await relay.dispatch(3, dispatch, 1)
        sums = partial_of(await relay.hear_call()).sums()
        assert np.abs(sums - exact).max() <= TOLERANCE * np.abs(exact).max()


async def all_held(relay: FakeRelay) -> None:
    """Wait until the node says that it holds every expert, which it does again after a loss."""
    while (await relay.hear(messages.SliceReady)).experts.get(0) != (0, 1, 2, 3):
        pass


async def test_a_tab_serves_with_its_graphics_device_when_asked_to(
    browser: Browser, relay: FakeRelay
) -> None:
    tab = Tab(await browser.new_page())
    await tab.page.goto(relay.url + "/?gpu=1")
    await tab.start()
    offer = await patient_offer(relay)
    if offer.kernel != "webgpu":
        pytest.skip("Chromium's worker gives no WebGPU adapter here")
    await relay.say(lambda session: session.send_assign(MODEL.assign(EVERYTHING, 1)))
    await tab.wait_for(state="serving", layers="3", kernel="webgpu")
    for number in range(1, 7):
        dispatch = MODEL.dispatch(number % 3, [[0, 2], [3], [1, 2]][: 1 + number % 3], seed=number)
        await relay.dispatch(number, dispatch, 1)
        sums, exact = partial_of(await relay.hear_call()).sums(), MODEL.answer(KERNEL, dispatch)
        assert np.abs(sums - exact).max() <= TOLERANCE * np.abs(exact).max()


async def test_a_tab_without_a_graphics_device_serves_with_wasm(relay: FakeRelay) -> None:
    async with chromium() as plain:
        tab = Tab(await plain.new_page())
        await tab.page.goto(relay.url + "/?gpu=1")
        await tab.start()
        offer = await relay.hear(messages.Offer)
        assert offer.kernel.startswith("wasm-")
