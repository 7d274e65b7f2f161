"""
The engine process: llama.cpp with its in-process server, and the ggml device "Swarm" in it.

Started by `supervisor.py`, which passes the configuration as JSON and a socket. On it goes one line of JSON:
{"ready": true, "url": …, …}, or {"error": …} and the process ends. It also ends when the backbone is gone:
Linux ends it then; elsewhere it notices that its standard input closed, once it has loaded.
"""

import ctypes
import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from backbone.engine.device import DEVICE_NAME, WEIGHTS_PATTERN, Device
from backbone.errors import BackboneError, EngineRefused, FormulaUnsupported

# Threads of llama.cpp that wait for the next piece of graph must sleep, not spin: the swarm's answer is a
# network away, and the local kernel wants the cores. Read by the OpenMP runtime when the library is loaded.
ENVIRONMENT = {"OMP_WAIT_POLICY": "passive", "CUDA_VISIBLE_DEVICES": "", "LLAMA_LOG_COLORS": "off"}

# llama.cpp's own (12 and 48) draft only once 60 tokens repeat; a round trip saved is worth an earlier guess.
NGRAM_LOOKUP_TOKENS = 5
NGRAM_DRAFT_TOKENS = 12

# The server is never let go: its end would wait, under the interpreter lock, for threads that do not end.
_kept: list[object] = []

KEY_VARIABLE = "SWARM_ENGINE_KEY"  # in the environment: arguments can be read by everybody on this machine
HTTP_THREADS_SPARE = 8  # requests that take no slot never wait behind those that do

PR_SET_PDEATHSIG = 1  # linux/prctl.h

LOG_WARNINGS = 2  # llama.cpp's verbosity: 1 errors, 2 warnings, 3 information


def main() -> None:
    config = json.loads(sys.argv[1])
    supervisor = os.fdopen(int(sys.argv[2]), "w")
    _end_with(int(sys.argv[3]))
    os.environ.update(ENVIRONMENT)
    try:
        report = _start(config)
    except BackboneError as exc:
        report = {"error": str(exc), "code": exc.code}
        if isinstance(exc, EngineRefused):
            report |= {"op": exc.op, "layer": exc.layer, "tensor": exc.tensor, "why": exc.why}
        if isinstance(exc, FormulaUnsupported):
            report |= {"what": exc.what, "layer": exc.layer}
    except Exception as exc:
        report = {"error": f"{type(exc).__name__}: {exc}", "code": "engine"}
    json.dump(report, supervisor)
    supervisor.write("\n")
    supervisor.close()
    if "error" not in report:
        _wait_for_the_end()
    # The server's threads do not end by themselves; nothing is left to tidy up.
    sys.stderr.flush()
    os._exit(1 if "error" in report else 0)


def _end_with(parent: int) -> None:
    """Let the backbone alone decide when we end: signals for all of its processes are for it."""
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    if sys.platform == "linux":  # llama.cpp holds the interpreter's lock while it loads: only the kernel can
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if hasattr(os, "getppid") and os.getppid() != parent:
        os._exit(1)  # it ended before that was set


def _start(config: dict[str, Any]) -> dict[str, Any]:
    import xllamacpp
    from xllamacpp import xllamacpp as extension

    device = None
    if config["swarm"]:
        llama_library = Path(extension.__file__)
        device = Device(
            Path(config["library"]), llama_library, config["socket"], float(config["call_timeout_s"])
        )
    params = _params(xllamacpp, config)
    try:
        server = xllamacpp.Server(params)
    except Exception:
        if device is not None:
            _require_known_experts(device)  # the better reason, when there is one
        raise
    _kept.append(server)
    report: dict[str, Any] = {"ready": True, "url": server.listening_address, "pid": os.getpid()}
    if device is not None:
        _require_known_experts(device)
        report["layers"] = [seen.to_json() for seen in device.seen_layers()]
        report["stats"] = device.stats()
    return report


def _require_known_experts(device: Device) -> None:
    device.require_accepted()
    for seen in device.seen_layers():
        seen.formula.require_supported(seen.layer)


def _params(xllamacpp: Any, config: dict[str, Any]) -> Any:
    params = xllamacpp.CommonParams()
    params.model.path = config["model"]
    if config["alias"]:
        params.model_alias = {config["alias"]}
    params.n_ctx = config["n_ctx"]
    params.n_parallel = config["n_parallel"]
    params.n_batch = config["n_batch"]
    params.n_ubatch = config["n_ubatch"]
    params.cpuparams.n_threads = config["n_threads"]
    params.cpuparams_batch.n_threads = config["n_threads"]
    params.n_gpu_layers = 0
    params.hostnames = ["127.0.0.1"]
    params.port = 0
    params.ui = False
    params.api_keys = [os.environ.pop(KEY_VARIABLE)]
    params.cors_origins = "null"  # no page may ask this port, not even one that is open on this machine
    params.n_threads_http = config["n_parallel"] + HTTP_THREADS_SPARE
    params.cache_ram_mib = config["cache_mib"]
    params.verbosity = LOG_WARNINGS
    params.load_mode = xllamacpp.llama_load_mode.LLAMA_LOAD_MODE_MMAP  # pages.c gives those of experts back
    params.warmup = False  # it would run all experts of all layers
    params.fit_params = False
    params.no_extra_bufts = True  # no repacking: weights stay as they are mapped from the file
    if config["speculate"] == "ngram":
        params.speculative.types = [xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE]
        params.speculative.ngram_simple.size_n = NGRAM_LOOKUP_TOKENS
        params.speculative.ngram_simple.size_m = NGRAM_DRAFT_TOKENS
    if config["swarm"]:
        params.tensor_buft_overrides = f"{WEIGHTS_PATTERN}={DEVICE_NAME}"
    for name, value in config["extra"].items():
        _set(params, name, value)
    return params


def _set(params: Any, name: str, value: object) -> None:
    """Set a field of CommonParams by its dotted name; an unknown one is an error, not a silent extra."""
    *path, last = name.split(".")
    for part in path:
        params = getattr(params, part)
    getattr(params, last)
    setattr(params, last, value)


def _wait_for_the_end() -> None:
    thread = threading.Thread(target=sys.stdin.buffer.read, daemon=True)
    thread.start()
    thread.join()


if __name__ == "__main__":
    main()
