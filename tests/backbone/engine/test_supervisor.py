"""The real engine, with every way it can fail: an error for the requests concerned, then it goes on."""

import asyncio
import contextlib
import json
import os
import signal
import sys
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backbone.engine.link import LayerCall
from backbone.engine.supervisor import PACKAGE_ROOT, Engine, EngineConfig, resident_bytes
from backbone.errors import EngineDown, EngineError, EngineRefused, FormulaUnsupported, SwarmError
from backbone.model.formula import Formula
from backbone.model.gguf import Model, open_model
from backbone.model.random_model import Shape, make_random_moe
from tests.fakes.local_experts import LocalExperts

PROMPT = "The capital of France is"
NUM_TOKENS = 12


def config(model: Path, **changes: Any) -> EngineConfig:
    base = EngineConfig(model=model, n_ctx=1024, n_threads=1, ready_timeout_s=60.0, call_timeout_s=10.0)
    return replace(base, **changes)


def formulas(model: Model) -> dict[int, Formula]:
    return {layer: moe.formula for layer, moe in model.layers.items()}


def _post(url: str, body: dict[str, Any], headers: dict[str, str]) -> dict[str, Any]:
    headers = {"content-type": "application/json"} | headers
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as response:
        answer: dict[str, Any] = json.load(response)
        return answer


async def complete(engine: Engine, prompt: str = PROMPT, **options: Any) -> str:
    body = {"prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0, "cache_prompt": False} | options
    answer = await asyncio.to_thread(_post, f"{engine.url}/v1/completions", body, engine.headers)
    text: str = answer["choices"][0]["text"]
    return text


async def fails_with_500(engine: Engine) -> None:
    with pytest.raises(urllib.error.HTTPError) as caught:
        await complete(engine)
    assert caught.value.code == 500
    caught.value.close()


@contextlib.contextmanager
def _answers(engine: Engine, spoilt: Callable[[LayerCall], Awaitable[bytes]]) -> Iterator[None]:
    """Write other bytes than the link server would, then hang up."""
    link = engine._link

    async def answer(call: LayerCall) -> bytes:
        for connection in link.connections:
            asyncio.get_running_loop().call_later(0.05, connection.hang_up)
        return await spoilt(call)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(link, "answer", answer)
        yield


class Switch:
    """Answers well, until told to misbehave once the engine is up."""

    def __init__(self, experts: LocalExperts) -> None:
        self.experts = experts
        self.fault: Callable[[LayerCall], Awaitable[Any]] | None = None

    async def __call__(self, call: LayerCall) -> Any:
        return self.experts.answer(call) if self.fault is None else await self.fault(call)


async def test_engine_generates_the_text_of_plain_llama_cpp(small_model: Model) -> None:
    experts = LocalExperts(small_model)
    async with Engine(config(small_model.path), experts, formulas(small_model)) as engine:
        ours = await complete(engine, max_tokens=4)
        assert [seen.layer for seen in engine.layers] == list(small_model.layers)
        assert engine.layers[0].formula == small_model.layers[0].formula
    async with Engine(config(small_model.path, swarm=False), experts) as plain:
        assert await complete(plain, max_tokens=4) == ours
    assert experts.calls >= 4 * len(small_model.layers)
    assert experts.most_rows == len(PROMPT)  # byte tokens: the prompt is one call per layer


async def test_engine_splits_a_long_prompt_into_micro_batches(small_model: Model) -> None:
    experts = LocalExperts(small_model)
    async with Engine(config(small_model.path, n_batch=32, n_ubatch=16), experts) as engine:
        split = await complete(engine, "x" * 50, max_tokens=1)
        assert experts.most_rows == 16
    async with Engine(config(small_model.path), experts) as engine:
        assert await complete(engine, "x" * 50, max_tokens=1) == split
        assert experts.most_rows == 50


async def test_parallel_slots_share_a_step(small_model: Model) -> None:
    experts = LocalExperts(small_model)
    async with Engine(config(small_model.path, n_parallel=3), experts) as engine:
        alone = await complete(engine, "a")
        experts.most_rows = 0
        texts = await asyncio.gather(*(complete(engine, "a", max_tokens=40) for _ in range(3)))
    assert experts.most_rows == 3
    assert all(text.startswith(alone[:2]) for text in texts)


async def test_speculation_verifies_several_tokens_in_one_step(small_model: Model) -> None:
    """A repeated pattern lets the n-gram draft guess; the guesses arrive as rows of one call."""
    experts = LocalExperts(small_model)
    async with Engine(config(small_model.path, speculate="ngram"), experts) as engine:
        await complete(engine, "abcdefgh" * 8, max_tokens=1, cache_prompt=True)
        experts.calls = experts.rows = 0
        forced = {"grammar": 'root ::= "abcdefgh" root'}
        text = await complete(engine, "abcdefgh" * 8, max_tokens=64, cache_prompt=True, **forced)
    assert text == "abcdefgh" * 8
    assert experts.calls < 64 * len(small_model.layers) / 2
    assert experts.rows >= 64 * len(small_model.layers)


@pytest.mark.parametrize("kind", ["raises", "wrong shape", "not finite", "bug"])
async def test_failed_call_is_an_http_error_and_the_next_request_succeeds(
    small_model: Model, kind: str
) -> None:
    async def fault(call: LayerCall) -> Any:
        match kind:
            case "raises":
                raise SwarmError("node 7, layer 1, phase compute: kernel_fault")
            case "wrong shape":
                return call.x[:, :-1]
            case "not finite":
                return np.full_like(call.x, np.nan)
            case _:
                return [][0]

    switch = Switch(LocalExperts(small_model))
    async with Engine(config(small_model.path), switch) as engine:
        good = await complete(engine)
        switch.fault = fault
        await fails_with_500(engine)
        assert engine.last_failure is not None
        if kind == "raises":
            assert "node 7" in engine.last_failure
        switch.fault = None
        assert await complete(engine) == good
        assert engine.starts == 1


async def test_failure_in_the_middle_leaves_the_prompt_cache_sound(small_model: Model) -> None:
    """The slot that failed is used again with its cached prompt, and says the same."""
    switch = Switch(LocalExperts(small_model))
    async with Engine(config(small_model.path), switch) as engine:
        good = await complete(engine, cache_prompt=True)
        fail_after = 5 * len(small_model.layers)

        async def fault(call: LayerCall) -> Any:
            nonlocal fail_after
            fail_after -= 1
            if fail_after == 0:
                raise SwarmError("the only node is gone")
            return switch.experts.answer(call)

        switch.fault = fault
        with pytest.raises(urllib.error.HTTPError) as caught:
            await complete(engine, cache_prompt=True)
        caught.value.close()
        assert await complete(engine, cache_prompt=True) == good
        assert await complete(engine, cache_prompt=True) == good


async def test_silent_dispatcher_ends_as_an_http_error_after_the_call_timeout(small_model: Model) -> None:
    cancelled = asyncio.Event()

    async def fault(_call: LayerCall) -> Any:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    switch = Switch(LocalExperts(small_model))
    async with Engine(config(small_model.path, call_timeout_s=0.3), switch) as engine:
        good = await complete(engine)
        switch.fault = fault
        await fails_with_500(engine)
        await asyncio.wait_for(cancelled.wait(), 5)  # the abandoned call does not go on
        switch.fault = None
        assert await complete(engine) == good


REPLIES: dict[str, Callable[[bytes], bytes]] = {
    "garbage": lambda _good: b"HTTP/1.1 200 OK\r\n\r\n" + bytes(64),
    "another call's number": lambda good: good[:8] + b"\xff" + good[9:],
    "wrong length": lambda good: good[:4] + b"\x20\x00\x00\x00" + good[8:],
    "huge length": lambda good: good[:4] + b"\xff\xff\xff\xff" + good[8:],
    "unknown status without text": lambda good: good[:16] + b"\x07\x00\x00\x00" + good[20:],
    "half of it": lambda good: good[: len(good) // 2],
    "nothing": lambda _good: b"",
}


@pytest.mark.parametrize("kind", REPLIES)
async def test_malformed_reply_is_an_http_error_and_the_device_dials_again(
    small_model: Model, kind: str
) -> None:
    """What the dispatcher itself never writes; the device must not trust it all the same."""
    async with Engine(config(small_model.path), LocalExperts(small_model)) as engine:
        good = await complete(engine)
        answer = engine._link.answer

        async def spoilt(call: LayerCall) -> bytes:
            return REPLIES[kind](await answer(call))

        with _answers(engine, spoilt):
            await fails_with_500(engine)
        assert await complete(engine) == good
        assert engine.starts == 1


async def test_killed_engine_is_started_again_and_says_why(small_model: Model) -> None:
    async with Engine(config(small_model.path), LocalExperts(small_model)) as engine:
        good = await complete(engine)
        assert engine.pid is not None
        os.kill(engine.pid, signal.SIGKILL)
        while True:
            try:
                _ = engine.url
            except EngineDown as exc:
                assert "SIGKILL" in str(exc)
                break
            await asyncio.sleep(0.01)
        await asyncio.wait_for(engine.wait_up(), 60)
        assert engine.starts == 2
        assert await complete(engine) == good
    with pytest.raises(EngineDown, match="stopped"):
        _ = engine.url


BACKBONE_THAT_IS_KILLED = """
import asyncio, os, sys
from pathlib import Path
from backbone.engine.supervisor import PACKAGE_ROOT, Engine, EngineConfig, resident_bytes
from backbone.model.gguf import open_model
from tests.fakes.local_experts import LocalExperts

async def main(path):
    async with Engine(EngineConfig(model=path, n_ctx=256), LocalExperts(open_model(path))) as engine:
        print(engine.pid, flush=True)
        await asyncio.Event().wait()

asyncio.run(main(Path(sys.argv[1])))
"""


async def test_engine_ends_when_its_backbone_is_killed(small_model: Model) -> None:
    backbone = await asyncio.create_subprocess_exec(
        sys.executable, "-c", BACKBONE_THAT_IS_KILLED, str(small_model.path),
        cwd=PACKAGE_ROOT, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert backbone.stdout is not None
    pid = int(await asyncio.wait_for(backbone.stdout.readline(), 60))
    assert resident_bytes(pid) > 0
    backbone.kill()
    await backbone.wait()
    async with asyncio.timeout(30):
        while resident_bytes(pid):  # gone, or a zombie that nobody has reaped: it holds nothing
            await asyncio.sleep(0.01)


async def test_engine_holds_no_expert_weights(tmp_path: Path) -> None:
    shape = Shape(num_layers=4, num_experts=32, expert_dim=512)
    model = open_model(make_random_moe(tmp_path / "wide.gguf", shape))
    experts = LocalExperts(model)
    async with Engine(config(model.path), experts) as engine:
        await complete(engine, "a", max_tokens=1)
        with_swarm = engine.rss_bytes()
    async with Engine(config(model.path, swarm=False), experts) as engine:
        await complete(engine, "a", max_tokens=1)
        plain = engine.rss_bytes()
    assert model.expert_bytes > 50e6
    assert plain - with_swarm > 0.9 * model.expert_bytes


async def test_formula_that_is_not_supported_is_refused_by_name(tmp_path: Path) -> None:
    """The experts of layer 0 are said to be integers."""
    path = make_random_moe(tmp_path / "odd.gguf", Shape(gate_up_type=0))
    data = path.read_bytes()
    name = b"blk.0.ffn_up_exps.weight"
    type_at = data.index(name) + len(name) + 4 + 3 * 8  # number of dimensions, three dimensions
    path.write_bytes(data[:type_at] + (26).to_bytes(4, "little") + data[type_at + 4 :])

    async def answer(call: LayerCall) -> Any:
        return np.zeros_like(call.x)

    with pytest.raises(FormulaUnsupported, match="weight format 26"):
        async with Engine(config(path), answer):
            pass


async def test_gguf_and_graph_that_disagree_are_refused(small_model: Model) -> None:
    expected = formulas(small_model)
    expected[1] = replace(expected[1], up_type=12)
    with pytest.raises(EngineRefused, match=r"refuses small.gguf: .*up_type 12, in the graph 8.*layer 1"):
        async with Engine(config(small_model.path), LocalExperts(small_model), expected):
            pass


async def test_unreadable_model_says_so(tmp_path: Path) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(EngineError, match="did not start|ended while loading"):
        async with Engine(config(path), LocalExperts.__new__(LocalExperts)):
            pass


async def test_unknown_setting_of_llama_cpp_is_refused(small_model: Model) -> None:
    with pytest.raises(EngineError, match="no_such_setting"):
        async with Engine(config(small_model.path, extra={"no_such_setting": 1}), LocalExperts(small_model)):
            pass


async def test_the_engine_answers_only_who_has_its_key(small_model: Model) -> None:
    async with Engine(config(small_model.path), LocalExperts(small_model)) as engine:
        for headers in ({}, {"authorization": "Bearer guess"}):
            with pytest.raises(urllib.error.HTTPError) as caught:
                await asyncio.to_thread(_post, f"{engine.url}/completion", {"prompt": "a"}, headers)
            assert caught.value.code == 401
            caught.value.close()
        assert engine.pid is not None
        arguments = Path(f"/proc/{engine.pid}/cmdline").read_bytes().decode()
        assert engine.headers["authorization"].removeprefix("Bearer ") not in arguments
        preflight = urllib.request.Request(
            f"{engine.url}/completion", method="OPTIONS", headers={"Origin": "http://evil.example"}
        )
        with urllib.request.urlopen(preflight, timeout=10) as response:
            assert "evil" not in str(response.headers)


async def test_calls_that_nobody_waits_for_end_and_the_engine_goes_on(small_model: Model) -> None:
    switch = Switch(LocalExperts(small_model))
    waiting, cancelled = asyncio.Event(), asyncio.Event()

    async def stuck(call: LayerCall) -> Any:
        waiting.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    async with Engine(config(small_model.path), switch) as engine:
        good = await complete(engine)
        switch.fault = stuck
        failing = asyncio.create_task(fails_with_500(engine))
        await asyncio.wait_for(waiting.wait(), 10)
        engine.abandon()
        await asyncio.wait_for(cancelled.wait(), 1)
        await asyncio.wait_for(failing, 5)
        engine.wanted = lambda: False
        await fails_with_500(engine)
        engine.wanted = lambda: True
        switch.fault = None
        assert await complete(engine) == good
        assert engine.starts == 1 and engine.last_failure is None


async def test_a_device_that_hangs_up_ends_its_call(small_model: Model) -> None:
    """What it asked is no longer awaited by anybody: the dispatcher must not go on with it."""
    switch = Switch(LocalExperts(small_model))
    waiting, cancelled = asyncio.Event(), asyncio.Event()

    async def stuck(call: LayerCall) -> Any:
        waiting.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    async with Engine(config(small_model.path), switch) as engine:
        switch.fault = stuck
        asking = asyncio.create_task(complete(engine))
        await asyncio.wait_for(waiting.wait(), 10)
        assert engine.pid is not None
        os.kill(engine.pid, signal.SIGKILL)
        await asyncio.wait_for(cancelled.wait(), 2)
        with pytest.raises(OSError):
            await asking


async def test_an_engine_that_takes_too_much_memory_is_started_again_by_name(small_model: Model) -> None:
    experts = LocalExperts(small_model)
    async with Engine(config(small_model.path, memory_bytes=64 << 20), experts) as engine:
        asking = asyncio.create_task(complete(engine, repeat_last_n=1 << 28, repeat_penalty=1.1))
        with pytest.raises(OSError):
            await asking
        assert "MiB more than when it was loaded" in (await engine.why_ended(0) or "")
        await asyncio.wait_for(engine.wait_up(), 60)
        assert await complete(engine, max_tokens=2)


@pytest.mark.parametrize("attributed", [True, False])
async def test_the_pause_grows_only_where_the_cause_may_come_again(
    small_model: Model, attributed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    sleep = asyncio.sleep

    async def noted(delay_s: float) -> None:
        if delay_s >= 0.5:
            pauses.append(delay_s)
        await sleep(min(delay_s, 0.01))

    async with Engine(config(small_model.path), LocalExperts(small_model)) as engine:
        monkeypatch.setattr("backbone.engine.supervisor.asyncio.sleep", noted)
        engine.on_end = lambda why: attributed
        for starts in (2, 3, 4):
            assert engine.pid is not None
            os.kill(engine.pid, signal.SIGSEGV)
            async with asyncio.timeout(60):
                while engine.starts < starts:
                    await sleep(0.01)
    assert pauses == ([0.5, 0.5, 0.5] if attributed else [0.5, 1.0, 2.0])


async def test_an_engine_that_a_request_holds_up_is_started_again(
    small_model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It cannot be asked to stop: some grammars keep it in one step for ever; here it is halted."""
    monkeypatch.setattr("backbone.engine.supervisor.STALL_S", 1.0)
    async with Engine(config(small_model.path), LocalExperts(small_model)) as engine:
        assert engine.pid is not None
        os.kill(engine.pid, signal.SIGSTOP)
        asking = asyncio.create_task(complete(engine))
        engine.runs = lambda: not asking.done()
        with pytest.raises(OSError):
            await asyncio.wait_for(asking, 30)
        assert "stood still" in (await engine.why_ended(0) or "")
        await asyncio.wait_for(engine.wait_up(), 60)
        assert await complete(engine, max_tokens=2)
