"""
Keep one engine process running, and answer its device's calls.

The engine is llama.cpp in a process of its own (`child.py`): it may abort, and it holds the interpreter lock
while it loads. Its device talks to us over a Unix socket; each call goes to `on_call`, the dispatcher's.
When the process ends it is started again, with a growing pause, and `url` says why there is none meanwhile.
"""

import asyncio
import contextlib
import json
import logging
import os
import secrets
import signal
import socket
import sys
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import Any, Literal, Self

from backbone.engine import build, reason
from backbone.engine.child import KEY_VARIABLE
from backbone.engine.device import SeenLayer
from backbone.engine.link_server import LinkServer, OnCall
from backbone.errors import (
    BackboneError,
    EngineDown,
    EngineError,
    EngineRefused,
    FormulaUnsupported,
)
from backbone.model.formula import Formula
from backbone.model.graph import require_agreement, require_same

log = logging.getLogger(__name__)

PACKAGE_ROOT = Path(__file__).parents[2]
STDERR_TAIL_LINES = 200  # a backtrace is long, and the reason stands before it
RESTART_PAUSE_S = 0.5
RESTART_PAUSE_MAX_S = 30.0
STEADY_AFTER_S = 60.0  # an engine that ran this long starts anew with the shortest pause
STOP_TIMEOUT_S = 0.5  # for the last lines of its log
DESCRIBE_TIMEOUT_S = 2.0  # how long to wait for the reason after a connection to the engine broke
CHECK_S = 0.2
STALL_S = 30.0  # a step of llama.cpp between two layers takes a fraction of that


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How to run llama.cpp. `n_ctx` is shared by the slots: each gets n_ctx / n_parallel tokens."""

    model: Path
    alias: str | None = None  # the name clients see; the path otherwise
    swarm: bool = True  # False: plain llama.cpp, for comparison
    n_ctx: int = 4096
    n_parallel: int = 1
    n_threads: int = 2
    n_batch: int = 512  # between two of them requests may be cancelled and others' tokens come
    n_ubatch: int = 512
    prompt_cache_bytes: int = 1 << 30  # states of earlier prompts that llama.cpp may keep
    memory_bytes: int | None = None  # what it may use besides mapped files and what it has once loaded
    speculate: Literal["ngram"] | None = None
    call_timeout_s: float = 60.0  # how long the device waits for one layer
    ready_timeout_s: float = 600.0  # how long a model may load
    extra: Mapping[str, Any] = field(default_factory=dict)  # dotted fields of llama.cpp's common_params


class Engine:
    """
    One engine, kept alive. Async context manager: inside it, the model is loaded and `url` answers.

    Raises on entering:
        EngineRefused: llama.cpp uses the experts in a way the device does not know, or not as the GGUF said.
        FormulaUnsupported: it is known, but not supported yet.
        EngineError: it did not start; the message holds the last lines of its log.
    """

    def __init__(
        self, config: EngineConfig, on_call: OnCall, expected: Mapping[int, Formula] | None = None
    ) -> None:
        """`expected`: shapes and formats of each MoE layer as read from the GGUF; the graph's must agree."""
        self.config = config
        self.layers: list[SeenLayer] = []  # what the graph computes, by layer
        self.starts = 0
        self._expected = expected
        self._link = LinkServer(on_call)
        self._process: asyncio.subprocess.Process | None = None
        self._stderr: deque[str] = deque(maxlen=STDERR_TAIL_LINES)
        self._log_task: asyncio.Task[None] | None = None
        self._watch_task: asyncio.Task[None] | None = None
        self._url: str | None = None
        self._why_down = "it is not started"
        self._up = asyncio.Event()
        self._described = asyncio.Event()  # since it ended last, it is known why
        self._key = secrets.token_urlsafe(24)
        self._base_bytes = 0
        self.ends = 0
        self.on_end: Callable[[str], bool] = lambda why: False
        self.wanted: Callable[[], bool] = lambda: True
        self.runs: Callable[[], bool] = lambda: False  # whether requests run, and layer calls must come
        self._runs_since = 0.0
        self._link.wanted = lambda: self._url is None or self.wanted()  # a load asks, too

    def hear_failures(self, on_failure: Callable[[str], None]) -> None:
        """Let `on_failure` hear why a layer call failed, before the engine does."""
        self._link.on_failure = on_failure

    def abandon(self) -> None:
        """Nobody waits for what the engine computes: its calls under way end now."""
        if self._url is not None:
            self._link.abandon()

    @property
    def headers(self) -> dict[str, str]:
        """What a request to `url` needs: only we may ask the engine."""
        return {"authorization": f"Bearer {self._key}"}

    async def why_ended(self, ends_before: int) -> str | None:
        """After a connection broke: say why the engine ended, or None when it goes on."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DESCRIBE_TIMEOUT_S):
                while self.ends == ends_before and self._url is not None:
                    await asyncio.sleep(0.02)
                await self._described.wait()
        return self._why_down if self.ends != ends_before or self._url is None else None

    @property
    def url(self) -> str:
        """
        Where llama-server listens; it changes with every start.

        Raises:
            EngineDown: there is no engine now; says why the last one ended.
        """
        if self._url is None:
            raise EngineDown(f"the engine is not running: {self._why_down}")
        return self._url

    @property
    def running(self) -> bool:
        """True while there is an engine to ask."""
        return self._url is not None

    @property
    def last_failure(self) -> str | None:
        """Why the last failed call failed: the text that belongs to an HTTP 500 of the engine."""
        return self._link.last_failure

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def rss_bytes(self) -> int:
        """Resident memory of the engine process, mapped files included; 0 when it is not running."""
        return 0 if self._url is None or self.pid is None else resident_bytes(self.pid)

    async def wait_up(self) -> str:
        """Wait until the engine answers (again); returns its URL."""
        await self._up.wait()
        return self.url

    async def __aenter__(self) -> Self:
        await self._link.open()
        try:
            await self._start()
        except BaseException:
            await self._shut_down("it was stopped")
            raise
        self._watch_task = asyncio.create_task(self._watch())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop("it was stopped")

    async def stop(self, why: str) -> None:
        """End the engine now and for good; who asks it hears `why`."""
        if self._watch_task is not None:
            self._watch_task.cancel()
            await asyncio.gather(self._watch_task, return_exceptions=True)
        await self._shut_down(why)

    async def _start(self) -> None:
        library = await asyncio.to_thread(device_library) if self.config.swarm else None
        ours, theirs = socket.socketpair()  # no pipe: uvloop closes the descriptor of one twice
        try:
            self._stderr.clear()
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "backbone.engine.child",
                json.dumps(self._child_config(library)),
                str(theirs.fileno()),
                str(os.getpid()),
                cwd=PACKAGE_ROOT,  # `-m` finds the package there, installed or not
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE,
                pass_fds=(theirs.fileno(),),
                env=os.environ | {KEY_VARIABLE: self._key},
                start_new_session=True,  # a terminal's Ctrl-C is for us
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        assert self._process.stderr is not None
        self._log_task = asyncio.create_task(self._read_log(self._process.stderr))
        report = await self._read_report(ours)
        self._accept(report)
        self.starts += 1
        self._base_bytes = private_bytes(self._process.pid)
        self._described.clear()
        self._url = report["url"]
        self._up.set()

    def _child_config(self, library: Path | None) -> dict[str, Any]:
        config = self.config
        return {
            "model": str(config.model.absolute()),  # not resolved: siblings are called like the link
            "alias": config.alias,
            "swarm": config.swarm,
            "library": str(library),
            "socket": self._link.path,
            "call_timeout_s": config.call_timeout_s,
            "n_ctx": config.n_ctx,
            "n_parallel": config.n_parallel,
            "n_threads": config.n_threads,
            "n_batch": config.n_batch,
            "n_ubatch": config.n_ubatch,
            "speculate": config.speculate,
            "cache_mib": config.prompt_cache_bytes >> 20,
            "extra": dict(config.extra),
        }

    async def _read_report(self, ours: socket.socket) -> dict[str, Any]:
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        try:
            line = await asyncio.wait_for(reader.readline(), self.config.ready_timeout_s)
        except TimeoutError as exc:
            message = f"the model was not loaded within {self.config.ready_timeout_s:.0f} s"
            raise EngineError(f"{message}: {self._tail()}") from exc
        except ValueError as exc:  # a line beyond the reader's limit
            raise EngineError(f"the engine's report is malformed: {exc}") from exc
        finally:
            writer.close()
        if not line:
            raise EngineError(f"the engine ended while loading: {await self._describe_end()}")
        report: dict[str, Any] = json.loads(line)
        return report

    def _accept(self, report: dict[str, Any]) -> None:
        """Check what the child says of the model against what we know of it; a refusal names the file."""
        file = self.config.model.name
        match report:
            case {"code": EngineRefused.code}:
                raise EngineRefused(report["op"], report["layer"], report["tensor"], report["why"], file)
            case {"code": FormulaUnsupported.code}:
                raise FormulaUnsupported(f"{report['what']}, in {file}", report["layer"])
            case {"error": error}:
                raise EngineError(f"the engine did not start: {error}: {self._tail()}")
        layers = [SeenLayer.from_json(entry) for entry in report.get("layers", [])]
        try:
            if self._expected is not None and self.config.swarm:
                require_agreement(self._expected, layers)
            if self.layers:  # started again
                require_same(self.layers, layers)
        except EngineRefused as exc:
            raise EngineRefused(exc.op, exc.layer, exc.tensor, exc.why, file) from None
        self.layers = layers

    async def _watch(self) -> None:
        """Start the engine again whenever it ends."""
        loop = asyncio.get_running_loop()
        pause_s = RESTART_PAUSE_S
        while True:
            assert self._process is not None
            began = loop.time()
            code, unfit = await self._wait_end()
            self._url = None
            self._up.clear()
            self.ends += 1
            self._why_down = unfit or self._end_of(code)  # what it wrote last may still be on its way
            self._why_down = unfit or await self._describe_end()
            self._described.set()
            log.warning("the engine ended and is started again: %s", self._why_down)
            known = self.on_end(self._why_down)  # of what is known, the cause will not come again
            if known or loop.time() - began > STEADY_AFTER_S:
                pause_s = RESTART_PAUSE_S
            while self._url is None:
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, RESTART_PAUSE_MAX_S)
                try:
                    await self._start()
                except BackboneError as exc:
                    self._why_down = str(exc)
                    log.warning("the engine did not start again: %s", exc)
                    await self._kill()

    async def _wait_end(self) -> tuple[int, str | None]:
        """Wait for the process to end; end it when it cannot go on, and say so."""
        process, why = self._process, None
        assert process is not None
        ended = asyncio.ensure_future(process.wait())
        try:
            while not ended.done():
                await asyncio.wait((ended,), timeout=CHECK_S)
                if why is None and not ended.done() and (why := self._why_unfit(process.pid)) is not None:
                    with contextlib.suppress(ProcessLookupError):
                        process.kill()
            return ended.result(), why
        finally:
            ended.cancel()

    def _why_unfit(self, pid: int) -> str | None:
        """Say why the engine must not go on: it takes too much memory, or a request holds it up for all."""
        limit, now = self.config.memory_bytes, monotonic()
        grown = private_bytes(pid) - self._base_bytes
        if limit is not None and grown > limit:
            return f"it took {grown >> 20} MiB more than when it was loaded, it may {limit >> 20}"
        if not self.runs() or self._link.under_way:
            self._runs_since = now
        idle_s = now - max(self._runs_since, self._link.last_at)
        return f"it stood still for {idle_s:.0f} s while requests ran" if idle_s > STALL_S else None

    async def _shut_down(self, why: str) -> None:
        self._url = None
        self._up.clear()
        self._why_down = why
        self._described.set()
        await self._kill()
        await self._link.close()

    async def _kill(self) -> None:
        """End the process: it has nothing to tidy up, and while it loads it hears nothing else."""
        process = self._process
        if process is None:
            return
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        if self._log_task is not None:
            await asyncio.wait((self._log_task,), timeout=STOP_TIMEOUT_S)
            self._log_task.cancel()

    async def _read_log(self, stderr: asyncio.StreamReader) -> None:
        """Keep the last lines of the engine's log."""
        while True:
            try:
                line = await stderr.readline()
            except ValueError:
                continue  # longer than the reader's limit
            if not line:
                return
            self._stderr.append(line.decode("utf-8", "replace").rstrip())

    async def _describe_end(self) -> str:
        assert self._process is not None
        code = await self._process.wait()
        if self._log_task is not None:
            await asyncio.wait((self._log_task,), timeout=1.0)
        return self._end_of(code)

    def _end_of(self, code: int) -> str:
        how = f"exit status {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
        return f"{how}: {self._tail()}"

    def _tail(self) -> str:
        return reason.reason(self._stderr) or "it wrote nothing"


def device_library() -> Path:
    """
    Where the compiled device is: built now from a checkout, taken as packed from an installed package.

    Raises:
        EngineError: neither is possible.
    """
    if (build.HERE / build.SOURCES[0]).exists():
        try:
            return build.build_default()
        except build.BuildError as exc:
            raise EngineError(str(exc)) from exc
    library = build.BUILT / build.LIBRARY
    if not library.exists():
        raise EngineError(f"the package lacks {library.name}: install a wheel built for this platform")
    return library


def resident_bytes(pid: int) -> int:
    """Resident memory of a process, from /proc; 0 where there is none."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError, ValueError):
        return 0
    return pages * os.sysconf("SC_PAGESIZE")


def private_bytes(pid: int) -> int:
    """Memory of a process that belongs to it alone, mapped files left out; 0 where /proc does not say."""
    try:
        fields = Path(f"/proc/{pid}/statm").read_text().split()
        return (int(fields[1]) - int(fields[2])) * os.sysconf("SC_PAGESIZE")
    except (OSError, IndexError, ValueError):
        return 0
