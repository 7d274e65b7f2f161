"""
The kernel of a node and the experts it holds: fetched, verified, packed, computed with. A driver; no session.

Computing and packing have threads; what comes of the work is told on the loop, as events of `machine.py`.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from time import monotonic

import httpx

from backbone.experts.native import KernelFault, NativeKernel
from backbone.experts.webgpu import WebGpuKernel
from backbone.experts.webgpu import refusal as graphics_refusal
from backbone.model.formula import Formula
from backbone.node import events as ev
from backbone.node.disk import SliceDisk
from backbone.node.store import FETCH_TIMEOUT_S, HeldSlice, SliceFault, download, matches, pack, reserve
from backbone.node.work import Kernel, LayerWork, Refused, answer, prove_and_time
from relay.program.complaints import Complaints
from relay.wire import session
from relay.wire.messages import Partial

log = logging.getLogger(__name__)

type Write = Callable[[str, bytes | bytearray], None]

# Weights one core streams in about half a millisecond. Computed on the loop, such a call is spared two thread
# switches, which cost 0.2 ms on a busy machine with two cores.
INLINE_BYTES = 4_000_000

PARTIALS = 8  # downloads that broke off, kept in memory
UNWRITTEN_BYTES = 64_000_000  # that wait for a slow disk, before fetching waits for it
WRITE_WAIT_S = 5.0
READ_WAIT_S = 5.0
CLOSE_WAIT_S = 0.5  # for what is being written: one signal ends a node within 2 s


class ExpertHost:
    """
    One kernel and its experts; `tell` hears on the event loop what came of the work.

    slices_url: where `/slices/<id>` is. threads: so many calls are computed side by side. disk: where slices
    outlive this run. Close it.
    """

    def __init__(
        self,
        kernel: Kernel,
        slices_url: str,
        threads: int,
        tell: Callable[[ev.Event], None],
        disk: SliceDisk | None = None,
    ) -> None:
        self.kernel = kernel
        self.bytes_in = 0
        self._tell = tell
        self._threads = threads
        self._compute = ThreadPoolExecutor(threads, thread_name_prefix="compute")
        self._pack = ThreadPoolExecutor(1, thread_name_prefix="pack")
        self._http = httpx.AsyncClient(base_url=slices_url, timeout=FETCH_TIMEOUT_S, trust_env=False)
        self._disk = disk
        self._disk_io = ThreadPoolExecutor(1, thread_name_prefix="disk")
        self._unwritten: dict[Future[None], int] = {}  # bytes that wait for the disk
        self._partials: dict[str, bytearray] = {}  # downloads that broke off
        self._held: dict[str, HeldSlice] = {}
        self._fetches: dict[str, asyncio.Task[None]] = {}
        self._test: asyncio.Task[None] | None = None
        self._complaints = Complaints(log)

    @property
    def held_bytes(self) -> int:
        """What the held slices weighed on the wire."""
        return sum(held.size_bytes for held in self._held.values())

    async def close(self) -> None:
        """Let go of everything; what is being computed is not waited for."""
        for task in (*self._fetches.values(), *([self._test] if self._test else [])):
            task.cancel()
        self._compute.shutdown(wait=False, cancel_futures=True)
        self._pack.shutdown(wait=False, cancel_futures=True)
        await asyncio.sleep(0)  # what was cancelled keeps its parts
        if self._unwritten:
            writes = [asyncio.wrap_future(write) for write in self._unwritten]
            await asyncio.wait(writes, timeout=CLOSE_WAIT_S)
        self._disk_io.shutdown(wait=False, cancel_futures=True)
        await self._http.aclose()

    # --- slices

    def inventory(self, most: int) -> tuple[str, ...]:
        """Slices that need not be fetched: those held, then those on disk."""
        kept = self._disk.inventory(most) if self._disk is not None else ()
        return tuple(sorted(list(dict.fromkeys((*sorted(self._held), *kept)))[:most]))

    def fetch(self, wanted: ev.FetchSlice, formula: Formula) -> None:
        """Get, verify and pack one slice; then SliceLoaded or SliceFailed is told."""
        self._fetches[wanted.slice] = asyncio.create_task(self._fetch(wanted, formula))

    def stop_fetch(self, slice_id: str) -> None:
        """Nobody wants it any more, and nothing is told of it."""
        self._fetches.pop(slice_id).cancel()

    def free(self, slice_id: str) -> None:
        """Forget a slice; a call that computes with it keeps it until its end."""
        self._held.pop(slice_id, None)

    async def _fetch(self, wanted: ev.FetchSlice, formula: Formula) -> None:
        kernel, slice_id = self.kernel, wanted.slice
        before = len(self._partials.get(slice_id, b""))
        try:
            into = await self._aside(reserve, kernel, formula, slice_id, wanted.size_bytes)
            found = None if self._disk is None else await self._on_disk(self._disk.read, slice_id)
            kept = found is not None and len(found) == wanted.size_bytes
            data = found if found and kept else await self._download(slice_id, wanted.size_bytes)
            held = await self._aside(pack, kernel, formula, slice_id, data, into)
            stale = isinstance(kernel, WebGpuKernel) and not kernel.holds(held.packed)
            if stale or kernel is not self.kernel:
                raise SliceFault(slice_id, "the kernel it was for is gone", "kernel")
        except SliceFault as exc:
            log.warning("%s", exc)
            self._fetches.pop(slice_id, None)
            progress = len(self._partials.get(slice_id, b"")) > before
            self._tell(ev.SliceFailed(slice_id, str(exc), exc.kind, progress))
            if isinstance(kernel, WebGpuKernel) and isinstance(exc.__cause__, KernelFault):
                self.test_kernel()  # while no calls come nothing else would notice
            return
        self._fetches.pop(slice_id, None)
        self._held[slice_id] = held
        self._tell(ev.SliceLoaded(slice_id, held.packed.size_bytes))
        if not kept:
            self._keep(slice_id, data)

    async def _download(self, slice_id: str, size_bytes: int) -> bytearray:
        """Get the bytes of a slice from where an earlier try broke off, and check them."""
        until = monotonic() + WRITE_WAIT_S
        while sum(self._unwritten.values()) > UNWRITTEN_BYTES and monotonic() < until:
            await asyncio.sleep(0.05)
        body = self._partials.pop(slice_id, None)
        if body is None:
            part = b"" if self._disk is None else await self._on_disk(self._disk.read_part, slice_id)
            body = bytearray(part or b"")
        for _ in range(2):
            continued = 0 < len(body) <= size_bytes
            try:
                if len(body) != size_bytes:
                    await download(self._http, slice_id, size_bytes, body, self._count)
            except (SliceFault, asyncio.CancelledError):
                self._keep_part(slice_id, body)
                raise
            if await self._aside(matches, slice_id, body):
                return body
            if not continued:
                break
            body = bytearray()  # what was kept may have been wrong: from the beginning, once
        raise SliceFault(slice_id, "the bytes that came do not hash to its name", "bytes")

    def _count(self, num_bytes: int) -> None:
        self.bytes_in += num_bytes

    def _keep_part(self, slice_id: str, body: bytearray) -> None:
        """Keep what came of a download that broke off, here for the next try and on disk for the next run."""
        if not body:
            return
        self._partials[slice_id] = body
        while len(self._partials) > PARTIALS:
            self._partials.pop(next(iter(self._partials)))
        if self._disk is not None:
            self._write(self._disk.write_part, slice_id, bytes(body))

    def _keep(self, slice_id: str, data: bytes | bytearray) -> None:
        if self._disk is not None:
            self._write(self._disk.write, slice_id, data)

    def _write(self, write: Write, slice_id: str, data: bytes | bytearray) -> None:
        """Write in the background: serving does not wait for a disk."""
        future = self._disk_io.submit(write, slice_id, data)
        self._unwritten[future] = len(data)
        loop = asyncio.get_running_loop()

        def written(done: "Future[None]") -> None:
            with contextlib.suppress(RuntimeError):  # the loop is gone
                loop.call_soon_threadsafe(self._unwritten.pop, done, None)

        future.add_done_callback(written)

    async def _aside[*P, T](self, work: Callable[[*P], T], *args: *P) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pack, work, *args)

    async def _on_disk[T](self, read: Callable[[str], T], slice_id: str) -> T | None:
        """Read from disk; one that does not answer in time is done without."""
        reading = asyncio.get_running_loop().run_in_executor(self._disk_io, read, slice_id)
        with contextlib.suppress(TimeoutError):
            return await asyncio.wait_for(reading, READ_WAIT_S)
        return None

    # --- kernel

    def slice_cost(self, formula: Formula) -> int:
        """Say what a slice will take in memory; 0 when that shows only later."""
        return 0 if isinstance(self.kernel, WebGpuKernel) else self.kernel.packed_bytes(formula)

    def refusal(self, formula: Formula) -> str | None:
        """Name the first thing this kernel cannot compute though others can, or None."""
        why = graphics_refusal(formula) if isinstance(self.kernel, WebGpuKernel) else None
        return None if why is None else f"the graphics kernel: {why}"

    def test_kernel(self) -> None:
        """Test the kernel; take a lost graphics device anew, or go on without. A test under way will do."""
        if self._test is None or self._test.done():
            self._test = asyncio.create_task(self._prove_kernel())
            self._test.add_done_callback(log_failure)

    async def _prove_kernel(self) -> None:
        kernel, loop = self.kernel, asyncio.get_running_loop()
        lost = isinstance(kernel, WebGpuKernel) and kernel.lost is not None
        try:
            if isinstance(kernel, WebGpuKernel) and lost:
                await loop.run_in_executor(self._compute, kernel.reopen)
            gb_per_s = await loop.run_in_executor(self._compute, prove_and_time, kernel)
        except Exception as exc:  # whatever it is: a kernel that cannot pass its test must not serve
            if isinstance(kernel, NativeKernel):
                self._tell(ev.KernelFault(str(exc)))
                return
            log.error("going on without the graphics device: %s", exc)
            self.kernel = NativeKernel(threads=self._threads)
            self._lose_slices()
            await self._prove_kernel()
            return
        if lost:
            self._lose_slices()
        self._tell(ev.KernelTested(kernel.build, gb_per_s))

    def _lose_slices(self) -> None:
        lost = tuple(sorted(self._held))
        self._held.clear()
        self._tell(ev.SlicesLost(lost))

    # --- calls

    def compute(self, wanted: ev.Compute, layer: ev.AssignedLayer, at_once: bool) -> None:
        """
        Compute a small call right here if `at_once`, hand any other to a thread; then tell of it.

        The slices go with it and thereby outlive a FreeSlice.
        """
        assert isinstance(wanted.call.body, session.DispatchReceived) and isinstance(layer.body, LayerWork)
        dispatch, work = wanted.call.body.dispatch, layer.body
        numbers = sorted(set(wanted.call.experts))
        held = [self._held.get(layer.experts[expert]) for expert in numbers]
        packed = [slice_.packed for slice_ in held if slice_ is not None]
        kernel, loop = self.kernel, asyncio.get_running_loop()

        def run() -> Partial | Refused:
            if len(packed) < len(numbers):
                return Refused("not_held", "an expert of this call is gone")
            try:
                return answer(kernel, work, dispatch, numbers, packed)
            except Exception as exc:
                log.exception("the kernel raised something it does not declare")
                return Refused("kernel_fault", f"{type(exc).__name__}: {exc}"[:500])

        def run_in_thread() -> None:
            result = run()
            with contextlib.suppress(RuntimeError):  # the loop is gone: the node was stopped meanwhile
                loop.call_soon_threadsafe(self._computed, wanted.ticket, result)

        read_bytes = len(dispatch.experts) * layer.slice_bytes
        if at_once and isinstance(kernel, NativeKernel) and read_bytes <= INLINE_BYTES:
            self._computed(wanted.ticket, run())
        else:
            self._compute.submit(run_in_thread)

    def _computed(self, ticket: int, result: Partial | Refused) -> None:
        if isinstance(result, Refused):
            self._tell(ev.CallFailed(ticket, result.code, result.message))
        else:
            self._tell(ev.CallComputed(ticket, result))


def log_failure(task: "asyncio.Task[None]") -> None:
    """For tasks that should not fail: say so when one did."""
    if not task.cancelled() and task.exception() is not None:
        log.error("a task of the node failed", exc_info=task.exception())
