"""
Run a program until it is done or a signal ends it: at any moment, within `grace_s`, its children with it.

The main thread only waits for signals; the program runs in a second one. So no hash under way, no name that
does not resolve and no busy loop keeps a signal from being heard. The first SIGINT, SIGTERM or SIGHUP unwinds
the program: a coroutine is cancelled, a plain function gets `Stopped` raised in it; both run their `finally`.
Whoever is not through after `grace_s`, or gets a second signal, ends at once with status 128 + signal.
"""

import asyncio
import contextlib
import ctypes
import logging
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from time import monotonic
from typing import Any, NoReturn

log = logging.getLogger(__name__)

GRACE_S = 1.7  # a stop has two seconds: this for tidying up, the rest for the process to end
_DONE = b"\0"  # no signal has this number
_SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))


class Stopped(BaseException):
    """A signal asked the program to stop; raised inside it, so that it unwinds."""


def run_async(
    main: Callable[[], Coroutine[Any, Any, int]], grace_s: float = GRACE_S, stopped_status: int | None = None
) -> int:
    """
    Run a coroutine function to its end, or to a signal; returns its exit status.

    stopped_status: what to return when a signal cancelled it; None: 128 + signal. What the program raises is
    raised here. Threads it left behind are not waited for: end the process with `leave`.
    """
    return _Program(grace_s, stopped_status).run(lambda program: _loop(program, main))


def run_blocking(main: Callable[[], int], grace_s: float = GRACE_S) -> int:
    """Like `run_async`, for a plain function; a signal gives the status 128 + signal."""
    return _Program(grace_s, None).run(lambda program: _plain(program, main))


def leave(status: int) -> NoReturn:
    """End the process now, whatever its threads do; all there is to tidy up was tidied up."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


class _Program:
    """One run: the thread that works, and the main thread that listens."""

    def __init__(self, grace_s: float, stopped_status: int | None) -> None:
        self._grace_s = grace_s
        self._stopped_status = stopped_status
        self._lock = threading.Lock()
        self._stop: Callable[[], None] | None = None  # how to unwind what runs now; under _lock
        self._signal = 0  # the first that came; under _lock
        self._result: int | BaseException = 0

    def run(self, work: Callable[["_Program"], int]) -> int:
        with _listening() as (ours, theirs):
            threading.Thread(target=self._work, args=(work, theirs), daemon=True, name="program").start()
            self._listen(ours)
        if self._signal:
            kill_descendants()
        if not isinstance(self._result, BaseException):
            return self._result
        if not self._signal:
            raise self._result
        if not isinstance(self._result, Stopped | asyncio.CancelledError):
            log.debug("while stopping", exc_info=self._result)  # what was interrupted may call that an error
        return 128 + self._signal if self._stopped_status is None else self._stopped_status

    def unwinds_by(self, stop: Callable[[], None]) -> bool:
        """Say how the work is unwound from now on; False if it shall stop already."""
        with self._lock:
            self._stop = stop
            return not self._signal

    def _work(self, work: Callable[["_Program"], int], done: socket.socket) -> None:
        try:
            self._result = work(self)
        except BaseException as exc:
            self._result = exc
        with self._lock:
            self._stop = None
        done.send(_DONE)

    def _listen(self, ours: socket.socket) -> None:
        """Wait for the end of the work; unwind it at the first signal, end the process at the next."""
        until: float | None = None
        while True:
            left_s = None if until is None else max(0.0, until - monotonic())
            if not select.select([ours], [], [], left_s)[0]:
                _cut_short(self._signal)
            number = ours.recv(1)
            if number == _DONE:
                return
            if until is not None:
                _cut_short(number[0])
            until = monotonic() + self._grace_s
            with self._lock:
                self._signal = number[0]
                if self._stop is not None:
                    self._stop()


@contextlib.contextmanager
def _listening() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Let signals arrive as bytes in a socket, whatever the interpreter is doing."""
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    # A program started under nohup keeps its terminal's end to itself.
    numbers = [n for n in _SIGNALS if n.name != "SIGHUP" or signal.getsignal(n) is not signal.SIG_IGN]
    before = {number: signal.signal(number, lambda *_: None) for number in numbers}
    former = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
    try:
        yield ours, theirs
    finally:
        signal.set_wakeup_fd(former)
        for number, handler in before.items():
            signal.signal(number, handler)
        ours.close()
        theirs.close()


def _loop(program: _Program, main: Callable[[], Coroutine[Any, Any, int]]) -> int:
    loop = _new_loop()
    try:
        task = loop.create_task(main())
        if not program.unwinds_by(lambda: _cancel(loop, task)):
            task.cancel()
        return loop.run_until_complete(task)
    finally:
        _cancel_all(loop)
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


def _cancel(loop: asyncio.AbstractEventLoop, task: asyncio.Task[int]) -> None:
    with contextlib.suppress(RuntimeError):  # the loop was closed in this very moment
        loop.call_soon_threadsafe(task.cancel)


def _cancel_all(loop: asyncio.AbstractEventLoop) -> None:
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    if tasks:
        loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))


def _new_loop() -> asyncio.AbstractEventLoop:
    if sys.platform == "win32":
        return asyncio.new_event_loop()
    import uvloop  # does not exist on Windows

    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


def _plain(program: _Program, main: Callable[[], int]) -> int:
    thread = ctypes.c_ulong(threading.get_ident())

    def stop() -> None:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(Stopped))
        kill_descendants()  # what the function waits for

    if not program.unwinds_by(stop):
        raise Stopped
    return main()


def _cut_short(number: int) -> NoReturn:
    """End at once, without a word: a stream that nobody reads could hold us."""
    kill_descendants()
    os._exit(128 + number)


def kill_descendants() -> None:
    """End every process that descends from this one (Linux; elsewhere they end when their input closes)."""
    for pid in descendants(os.getpid()):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def descendants(root: int) -> list[int]:
    """Give the processes below `root`, children before their own; empty where there is no /proc."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            parent = int(path.read_text().rpartition(")")[2].split()[1])  # the name may hold blanks
            children.setdefault(parent, []).append(int(path.parent.name))
    found, todo = [], [root]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return found
