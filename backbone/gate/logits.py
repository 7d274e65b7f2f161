"""
Ask llama.cpp for logits, with its own experts or with a swarm in their place.

Each call runs one process (`logits_child.py`) through the C API: no server, no sampling, no batching by
chance, so that two calls with the same settings give the same bits.
"""

import asyncio
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from backbone.engine.link import Floats
from backbone.engine.link_server import LinkServer, OnCall
from backbone.engine.supervisor import PACKAGE_ROOT, device_library
from backbone.errors import EngineError
from backbone.gate.llama_api import Settings

CALL_TIMEOUT_S = 60.0
STDERR_TAIL_BYTES = 2000


@dataclass(frozen=True, slots=True, eq=False)
class Generation:
    """Greedy tokens and the logits each was chosen from, [num_tokens, n_vocab]."""

    tokens: list[int]
    logits: Floats


async def tokenise(model: Path, texts: Sequence[str]) -> list[list[int]]:
    """Tokens of each text; control tokens written out are recognised, none is added."""
    answer = await _run({"what": "tokenise", "texts": list(texts)}, model, None, Settings())
    tokens: list[list[int]] = answer["tokens"]
    return tokens


async def teacher_forced_logits(
    model: Path,
    sequences: Sequence[Sequence[int]],
    *,
    swarm: OnCall | None = None,
    settings: Settings = Settings(),  # noqa: B008 (frozen)
) -> list[Floats]:
    """
    Logits at every position of each sequence, the true tokens given as context.

    Shapes: returns one [len(sequence), n_vocab] per sequence.

    Raises:
        EngineError: llama.cpp or the swarm failed.
    """
    with tempfile.TemporaryDirectory(prefix="swarm-gate-") as scratch:
        out = Path(scratch) / "logits"
        job = {"what": "teacher", "sequences": [list(s) for s in sequences], "out": str(out)}
        answer = await _run(job, model, swarm, settings)
        rows = np.fromfile(out, np.float32).reshape(-1, answer["n_vocab"])
    return np.split(rows, np.cumsum([len(s) for s in sequences])[:-1])


async def greedy(
    model: Path,
    prompts: Sequence[Sequence[int]],
    num_tokens: int,
    *,
    swarm: OnCall | None = None,
    settings: Settings = Settings(),  # noqa: B008 (frozen)
) -> list[Generation]:
    """
    Continue each prompt by its most likely tokens, one at a time; an end of text does not stop it.

    Raises:
        EngineError: llama.cpp or the swarm failed.
    """
    with tempfile.TemporaryDirectory(prefix="swarm-gate-") as scratch:
        out = Path(scratch) / "logits"
        job = {"what": "greedy", "sequences": [list(p) for p in prompts], "num_tokens": num_tokens}
        answer = await _run(job | {"out": str(out)}, model, swarm, settings)
        rows = np.fromfile(out, np.float32).reshape(len(prompts), num_tokens, answer["n_vocab"])
    return [Generation(tokens, logits) for tokens, logits in zip(answer["tokens"], rows, strict=True)]


async def _run(job: dict[str, Any], model: Path, swarm: OnCall | None, settings: Settings) -> dict[str, Any]:
    job |= {
        "model": str(model.absolute()),
        "settings": asdict(settings),
        "socket": None,
        "call_timeout_s": CALL_TIMEOUT_S,
    }
    if swarm is None:
        return await _run_child(job)
    link = LinkServer(swarm)
    await link.open()
    try:
        library = await asyncio.to_thread(device_library)
        return await _run_child(job | {"socket": link.path, "library": str(library)})
    except EngineError as exc:
        if link.last_failure is None:
            raise
        raise EngineError(f"{exc} ({link.last_failure})") from exc
    finally:
        await link.close()


async def _run_child(job: dict[str, Any]) -> dict[str, Any]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "backbone.gate.logits_child",
        cwd=PACKAGE_ROOT,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        stdout, stderr = await process.communicate(json.dumps(job).encode())
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if not stdout:
        tail = stderr[-STDERR_TAIL_BYTES:].decode("utf-8", "replace").strip()
        raise EngineError(f"the gate's llama.cpp ended with status {process.returncode}: {tail}")
    answer: dict[str, Any] = json.loads(stdout)
    if "error" in answer:
        raise EngineError(answer["error"])
    return answer
