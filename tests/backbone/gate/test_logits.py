"""llama.cpp through its C API, with its own experts and with a swarm's, on a small random model."""

import ctypes
from pathlib import Path

import numpy as np
import pytest

from backbone.engine.link import LayerCall
from backbone.errors import EngineError, SwarmError
from backbone.gate.compare import compare_logits
from backbone.gate.llama_api import MODEL_DEFAULTS, ModelParams, Settings, _require_defaults
from backbone.gate.logits import greedy, teacher_forced_logits, tokenise
from backbone.gate.run import VARIANTS, compare_with_llama_cpp
from backbone.model.gguf import Model, open_model
from backbone.model.random_model import NUM_TOKENS, Shape, make_random_moe
from tests.fakes.local_experts import LocalExperts

TEXT = "The quick brown fox jumps over the lazy dog."


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return open_model(make_random_moe(tmp_path_factory.mktemp("model") / "small.gguf", Shape(num_layers=2)))


async def test_tokens_of_a_text_include_its_control_tokens(model: Model) -> None:
    [tokens] = await tokenise(model.path, ["<|im_start|>ab"])
    assert tokens == [1, 4 + ord("a"), 4 + ord("b")]


async def test_every_position_has_logits_and_two_runs_are_identical(model: Model) -> None:
    sequences = await tokenise(model.path, [TEXT, TEXT[:7]])
    first = await teacher_forced_logits(model.path, sequences)
    assert [run.shape for run in first] == [(len(s), NUM_TOKENS) for s in sequences]
    second = await teacher_forced_logits(model.path, sequences, settings=Settings(n_batch=16, n_ubatch=16))
    assert compare_logits(first, second).cosine_worst > 0.98
    assert compare_logits(first, await teacher_forced_logits(model.path, sequences)).identical


async def test_greedy_follows_the_teacher(model: Model) -> None:
    """Forcing the generated tokens gives, at each of them, the logits it was chosen from."""
    [prompt] = await tokenise(model.path, [TEXT])
    [generation] = await greedy(model.path, [prompt], 6)
    assert generation.logits.shape == (6, NUM_TOKENS)
    assert generation.logits.argmax(axis=1).tolist() == generation.tokens
    one_by_one = Settings(n_ubatch=1)
    [generation] = await greedy(model.path, [prompt], 6, settings=one_by_one)
    [forced] = await teacher_forced_logits(model.path, [prompt + generation.tokens[:-1]], settings=one_by_one)
    assert np.array_equal(forced[len(prompt) - 1 :], generation.logits)


async def test_swarm_is_no_further_from_llama_cpp_than_its_own_settings(model: Model) -> None:
    result = await compare_with_llama_cpp(model.path, LocalExperts(model), texts=[TEXT, TEXT[::-1]])
    assert result.swarm.cosine_mean > 0.99
    assert set(result.floor) == set(VARIANTS)
    assert "the swarm" in result.table()
    assert result.passed


async def test_swarm_that_fails_is_named_in_the_error(model: Model) -> None:
    async def fail(call: LayerCall) -> np.ndarray:
        raise SwarmError(f"layer {call.layer}: no holder left")

    with pytest.raises(EngineError, match="layer 0: no holder left"):
        await teacher_forced_logits(model.path, [[5, 6, 7]], swarm=fail)


async def test_missing_model_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"does not load .*nothing\.gguf"):
        await tokenise(tmp_path / "nothing.gguf", ["a"])


def test_other_defaults_mean_another_library() -> None:
    """One field moved by four bytes must not pass."""
    params = ModelParams()
    for name, value in MODEL_DEFAULTS.items():
        setattr(params, name, value)
    _require_defaults(params, MODEL_DEFAULTS)
    data = bytes(params)
    moved = ModelParams.from_buffer_copy(data[:16] + bytes(4) + data[16:-4])
    assert ctypes.sizeof(moved) == len(data)
    with pytest.raises(EngineError, match="not the known one: n_gpu_layers is 0"):
        _require_defaults(moved, MODEL_DEFAULTS)
