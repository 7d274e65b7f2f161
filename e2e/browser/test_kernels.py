"""The wasm kernels in Chromium's workers: known answers, workers that end, builds that turn wrong."""

import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from playwright.async_api import Browser

from e2e.browser.tab import Tab, chromium
from e2e.browser.test_page import MODEL, assign, check_calls
from tests.fakes.relay import FakeRelay

ROOT = Path(__file__).resolve().parents[2]
WORKER = Path(__file__).with_name("known_answers.js").read_bytes()
POOL = Path(__file__).with_name("kernel_pool.js").read_bytes()
GOLDEN = re.findall(
    r'GOLDEN(?:_FORMULA)?\((\d+|\d+, \d+), (\d+), "(\w+)"\)', (ROOT / "wasm/hashes.txt").read_text()
)
DIGESTS = [
    line.split()
    for line in (ROOT / "tests/vectors/kernel_digests.txt").read_text().splitlines()
    if line.strip()
]
ISOLATION = {"Cross-Origin-Opener-Policy": "same-origin", "Cross-Origin-Embedder-Policy": "require-corp"}
BUILDS = ("plain", "relaxed16", "relaxed32")
RETEST = "this.guarded(build, () => kernel.knownAnswerTest())"


@pytest.fixture
async def relay() -> AsyncIterator[FakeRelay]:
    async with FakeRelay(MODEL.by_id) as fake:
        yield fake


@pytest.fixture
async def browser() -> AsyncIterator[Browser]:
    async with chromium() as opened:
        yield opened


@pytest.mark.parametrize("headers", [{}, ISOLATION], ids=["as it is", "isolated"])
async def test_every_known_answer_in_every_build(
    relay: FakeRelay, browser: Browser, headers: dict[str, str]
) -> None:
    relay.page_headers, relay.files["/src/known_answers.js"] = headers, WORKER
    tab = await Tab.open(browser, relay.url, auto=False)
    names = list(dict.fromkeys(name for name, _, _ in GOLDEN))
    tests = [[names.index(name), int(rows)] for name, rows, _ in GOLDEN]
    assert len(tests) == 3 * len(names) > 100
    formulas = [[int(word) for word in line[:3]] for line in DIGESTS]
    assert len(formulas) > 200
    script = """async ([build, tests, formulas]) => {
        const worker = new Worker('/src/known_answers.js', { type: 'module' });
        const heard = new Promise((resolve) => { worker.onmessage = ({ data }) => resolve(data); });
        worker.postMessage({ build, tests, formulas });
        return heard.finally(() => worker.terminate());
    }"""
    for build in BUILDS:
        found = await tab.page.evaluate(script, [build, tests, formulas])
        assert found.get("error") is None and found["build"] == f"wasm-{build}"
        assert found["isolated"] == (headers == ISOLATION)
        assert found["digests"] == [line[3] for line in DIGESTS]
        for digests in found["rounds"]:
            assert digests == [digest for _, _, digest in GOLDEN]
    assert tab.complaints == []


async def test_an_isolated_page_answers_with_the_same_bytes(relay: FakeRelay, browser: Browser) -> None:
    relay.page_headers = ISOLATION
    tab = Tab(await browser.new_page())
    await tab.page.goto(relay.url + "/?workers=2")
    await tab.start()
    await assign(relay)
    await tab.wait_for(state="serving", layers="3")
    assert await tab.page.evaluate("crossOriginIsolated")
    await check_calls(relay, 1, 12)
    assert tab.complaints == []


@pytest.mark.parametrize("split_bytes", [1 << 30, 1000], ids=["by expert", "by rows"])
async def test_a_worker_that_ends_is_replaced_and_what_it_held_can_be_packed_again(
    relay: FakeRelay, browser: Browser, split_bytes: int
) -> None:
    relay.files["/src/kernel_pool.js"] = POOL
    tab = await Tab.open(browser, relay.url, auto=False)
    assert await tab.page.evaluate("async (n) => (await import('/src/kernel_pool.js')).open(n)", split_bytes)
    assert len(tab.page.workers) == 2
    await tab.page.workers[0].evaluate("self.close()")  # as if the browser had ended it: no event tells
    after = await tab.page.evaluate("import('/src/kernel_pool.js').then((it) => it.goOn())")
    assert after == {"code": "not_held", "gone": after["lost"], "lost": after["lost"], "same": True}
    assert after["lost"] == (2 if split_bytes > 1000 else 4)


async def test_a_build_that_turns_wrong_is_found_when_the_page_is_looked_at_again(
    relay: FakeRelay, browser: Browser
) -> None:
    """The first build gives a wrong answer in its third test; the tab serves on with the next one."""
    chosen = (ROOT / "node-web/src/kernels/chosen.js").read_text()
    assert RETEST in chosen
    relay.files["/src/kernels/chosen.js"] = chosen.replace(
        RETEST,
        """this.guarded(build, () => {
            globalThis.tests = (globalThis.tests ?? 0) + (build === 'relaxed16' ? 1 : 0);
            if (globalThis.tests === 3 && build === 'relaxed16') throw new BuildFault(build, 'turned wrong');
            kernel.knownAnswerTest();
        })""",
    ).encode()
    tab = Tab(await browser.new_page())
    await tab.page.goto(relay.url + "/?workers=1")
    await tab.start()
    offer = await assign(relay)
    assert offer.kernel == "wasm-relaxed16"
    await tab.wait_for(state="serving", layers="3", kernel="wasm-relaxed16")
    await check_calls(relay, 1, 6)
    await tab.page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
    await tab.wait_for(state="serving", layers="3", kernel="wasm-relaxed32")
    await check_calls(relay, 7, 6)
    assert tab.complaints == []
