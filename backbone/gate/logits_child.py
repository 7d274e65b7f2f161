"""
The gate's process: runs llama.cpp for `logits.py` and writes logits to a file.

The job comes as JSON on standard input, the answer goes as one line of JSON to standard output; logits are
float32 rows, one after another, in the file named by the job.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any, BinaryIO

from backbone.engine.child import ENVIRONMENT
from backbone.engine.device import Device
from backbone.errors import BackboneError, EngineError


def main() -> None:
    job = json.load(sys.stdin)
    os.environ.update(ENVIRONMENT)
    try:
        answer = _run(job)
    except BackboneError as exc:
        answer = {"error": str(exc)}
    json.dump(answer, sys.stdout)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1 if "error" in answer else 0)


def _run(job: dict[str, Any]) -> dict[str, Any]:
    from backbone.gate.llama_api import Llama, Settings, library_path

    device = None
    if job["socket"]:
        device = Device(Path(job["library"]), library_path(), job["socket"], job["call_timeout_s"])
    try:
        with Llama(Path(job["model"]), Settings(**job["settings"]), swarm=device is not None) as llama:
            if device is not None:
                device.require_accepted()
            match job["what"]:
                case "tokenise":
                    return {"tokens": [llama.tokenise(text) for text in job["texts"]]}
                case "teacher":
                    with open(job["out"], "wb") as out:
                        for tokens in job["sequences"]:
                            llama.forget()
                            llama.decode(tokens, 0).tofile(out)
                    return {"n_vocab": llama.n_vocab}
                case _:
                    with open(job["out"], "wb") as out:
                        generated = [_greedy(llama, p, job["num_tokens"], out) for p in job["sequences"]]
                    return {"n_vocab": llama.n_vocab, "tokens": generated}
    except BackboneError as exc:
        if device is not None and device.last_error():
            raise EngineError(f"{exc} ({device.last_error()})") from exc
        raise


def _greedy(llama: Any, prompt: list[int], num_tokens: int, out: BinaryIO) -> list[int]:
    llama.forget()
    row = llama.decode(prompt, 0)[-1]
    tokens: list[int] = []
    while True:
        row.tofile(out)
        tokens.append(int(row.argmax()))
        if len(tokens) == num_tokens:
            return tokens
        row = llama.decode(tokens[-1:], len(prompt) + len(tokens) - 1)[0]


if __name__ == "__main__":
    main()
