"""Shared by all end-to-end tests: the demo model, a cache, and the reference that every swarm must equal."""

import asyncio
import os
from pathlib import Path

import pytest

from backbone.config import default_cache_dir
from backbone.gate.logits import Generation, greedy, tokenise
from backbone.model.demo_model import ensure_demo_model
from e2e.swarm import swarm

PROMPTS = (
    "<|im_start|>user\nWhy is the sky blue?<|im_end|>\n<|im_start|>assistant\n",
    "The capital of France is Paris, a city on the river",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
)
NUM_TOKENS = 48


@pytest.fixture(scope="session")
def cache_dir() -> Path:
    """The user's cache: the demo model is made once per machine."""
    return default_cache_dir(os.environ)


@pytest.fixture(scope="session")
def demo_model(cache_dir: Path) -> Path:
    return ensure_demo_model(cache_dir)


@pytest.fixture(scope="session")
def prompts(demo_model: Path) -> list[list[int]]:
    return asyncio.run(tokenise(demo_model, PROMPTS))


@pytest.fixture(scope="session")
def reference(demo_model: Path, cache_dir: Path, prompts: list[list[int]]) -> list[Generation]:
    """Greedy tokens and logits with all experts computed on the backbone."""

    async def run() -> list[Generation]:
        async with swarm(demo_model, cache_dir) as alone:
            return await greedy(demo_model, prompts, NUM_TOKENS, swarm=alone.backbone.dispatcher.call)

    return asyncio.run(run())
