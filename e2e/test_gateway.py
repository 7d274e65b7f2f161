"""The public endpoint over a real swarm: streaming, keys, speculation, slots, an engine that dies."""

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

import httpx

from e2e.swarm import swarm, until

QUESTION = [{"role": "user", "content": "Why is the sky blue? Answer in one sentence."}]


def chat(max_tokens: int = 24, content: str | None = None, **more: Any) -> dict[str, Any]:
    messages = QUESTION if content is None else [{"role": "user", "content": content}]
    return {"messages": messages, "max_tokens": max_tokens, "temperature": 0, "cache_prompt": False, **more}


async def test_chat_streams_token_by_token_and_equals_the_whole_answer(
    demo_model: Path, cache_dir: Path
) -> None:
    async with swarm(demo_model, cache_dir, nodes=1) as s, httpx.AsyncClient(timeout=60) as client:
        url = f"{s.backbone.url}/v1/chat/completions"
        whole = (await client.post(url, json=chat())).json()["choices"][0]["message"]["content"]
        pieces = []
        async with client.stream("POST", url, json=chat(stream=True)) as reply:
            async for line in reply.aiter_lines():
                if line.startswith("data: {"):
                    pieces.append(json.loads(line[6:])["choices"][0]["delta"].get("content") or "")
        assert "".join(pieces) == whole
        assert len([piece for piece in pieces if piece]) > 10
        models = (await client.get(f"{s.backbone.url}/v1/models")).json()
        assert models["data"][0]["id"] == "SmolLM2-135M-Instruct-8x"
        metrics = (await client.get(f"{s.backbone.url}/metrics")).text
        assert 'kernel="native-' in metrics and "swarm_node_calls_total" in metrics


async def test_a_key_is_needed_where_keys_are_set(demo_model: Path, cache_dir: Path) -> None:
    async with (
        swarm(demo_model, cache_dir, api_keys=("secret",)) as s,
        httpx.AsyncClient(timeout=60) as client,
    ):
        url = f"{s.backbone.url}/v1/chat/completions"
        assert (await client.post(url, json=chat(2))).status_code == 401
        good = await client.post(url, json=chat(2), headers={"authorization": "Bearer secret"})
        assert good.status_code == 200


async def test_speculation_sends_several_tokens_in_one_round(demo_model: Path, cache_dir: Path) -> None:
    """Text that repeats itself is drafted from itself: fewer rounds than tokens, the same answer."""
    body = {"prompt": "The quick brown fox jumps over the lazy dog. " * 8, "max_tokens": 96, "temperature": 0}
    answers, rounds = [], []
    for speculate in (None, "ngram"):
        async with swarm(demo_model, cache_dir, nodes=1, speculate=speculate) as s:
            tally, layers = s.backbone.dispatcher.tally, len(s.backbone.model.layers)
            async with httpx.AsyncClient(timeout=120) as client:
                reply = await client.post(f"{s.backbone.url}/v1/completions", json=body)
            answers.append(reply.json()["choices"][0]["text"])
            rounds.append(tally.layer_calls / layers)
            sizes = {rows for rows in s.backbone.dispatcher.tally.calls_of_rows if 1 < rows < 32}
            assert bool(sizes) == (speculate == "ngram")
    assert rounds[1] < 0.5 * rounds[0]
    assert answers[0][:200] == answers[1][:200]


async def test_parallel_requests_share_rounds(demo_model: Path, cache_dir: Path) -> None:
    async with swarm(demo_model, cache_dir, nodes=1, parallel=4, context=512) as s:
        async with httpx.AsyncClient(timeout=120) as client:
            url = f"{s.backbone.url}/v1/chat/completions"
            replies = await asyncio.gather(
                *(client.post(url, json=chat(32, f"Tell me about the number {n}.")) for n in range(4))
            )
        assert all(reply.status_code == 200 for reply in replies)
        assert (
            4 in s.backbone.dispatcher.tally.calls_of_rows
        )  # four slots' tokens travelled as four rows of one call


async def test_an_engine_that_is_killed_comes_back_and_says_why_meanwhile(
    demo_model: Path, cache_dir: Path
) -> None:
    async with swarm(demo_model, cache_dir, nodes=1) as s, httpx.AsyncClient(timeout=60) as client:
        url = f"{s.backbone.url}/v1/chat/completions"
        before = (await client.post(url, json=chat(8))).json()["choices"][0]["message"]["content"]
        assert s.backbone.engine.pid is not None
        os.kill(s.backbone.engine.pid, signal.SIGKILL)
        await until(lambda: not s.backbone.engine.running, "the engine's end to be noticed")
        down = await client.post(url, json=chat(8))
        assert down.status_code == 503 and "SIGKILL" in down.json()["error"]["message"]
        await asyncio.wait_for(s.backbone.engine.wait_up(), 60)
        again = await client.post(url, json=chat(8))
        assert again.json()["choices"][0]["message"]["content"] == before


async def test_the_engine_does_not_hold_the_experts(demo_model: Path, cache_dir: Path) -> None:
    """Resident memory beside plain llama.cpp's, after the same request."""
    from backbone.engine.supervisor import Engine, EngineConfig

    resident = []
    async with httpx.AsyncClient(timeout=60) as client:
        async with swarm(demo_model, cache_dir, nodes=1) as s:
            await client.post(f"{s.backbone.url}/v1/chat/completions", json=chat(4))
            resident.append(s.backbone.engine.rss_bytes())
            experts = s.backbone.model.expert_bytes
            calls = s.backbone.dispatcher.call
            async with Engine(EngineConfig(model=demo_model, swarm=False), calls) as plain:
                await client.post(f"{plain.url}/v1/chat/completions", json=chat(4), headers=plain.headers)
                resident.append(plain.rss_bytes())
    assert resident[1] - resident[0] > 0.8 * experts


async def test_prompts_whose_clients_left_together_are_not_computed(
    demo_model: Path, cache_dir: Path
) -> None:
    """Also when the next request comes in that moment: it must not count as wanting what they asked."""
    async with swarm(demo_model, cache_dir, context=2048) as s, httpx.AsyncClient(timeout=60) as client:
        url, tally = f"{s.backbone.url}/v1/completions", s.backbone.dispatcher.tally
        for number in range(3):
            body = {"prompt": f"{number} " + "word " * 1500, "max_tokens": 400}
            asked = [asyncio.create_task(client.post(url, json=body)) for _ in range(4)]
            before = tally.layer_calls
            await until(lambda: tally.layer_calls > before, "the first prompt to be under way")  # noqa: B023
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
            before = sum(rows * calls for rows, calls in tally.calls_of_rows.items())
            reply = await client.post(url, json={"prompt": "Hi", "max_tokens": 1})
            assert reply.status_code == 200
            rows = sum(rows * calls for rows, calls in tally.calls_of_rows.items()) - before
            assert rows < 512 * len(s.backbone.model.layers), (
                "a whole piece of a prompt was computed for nobody"
            )
