"""
The local holder: any expert of the model, computed here from the GGUF on disk. The driver around the native
kernel.

It is what a node's failure costs at worst, so it is always ready: packed experts are kept while they fit the
cache and packed again from the file when they do not.
"""

import asyncio
from bisect import bisect_right
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from threading import Lock
from time import monotonic

import numpy as np
import numpy.typing as npt

from backbone.engine.link import LayerCall
from backbone.experts.dispatch import Picks
from backbone.experts.native import NativeKernel, PackedExpert
from backbone.experts.pace import Pace
from backbone.experts.planner import LocalCost
from backbone.model.gguf import Model
from relay.wire.tensors import Grid, XEncoding, encode_x

SPLIT_PICKS = 16  # from so many picks on, the threads pay for their hand-over
AT_ONCE_BYTES = 8 << 20  # weights times rows that a core reads in less time than two hand-overs take


@dataclass(frozen=True, slots=True, eq=False)
class LocalRows:
    """The rows of one layer call, encoded as they travel, and the grid their sums are on."""

    x: bytes
    encoding: XEncoding
    row_exponents: npt.NDArray[np.int16]
    grid: Grid
    layer_exponents: int | npt.NDArray[np.int32]

    def take(self, rows: npt.NDArray[np.intp]) -> "LocalRows":
        """Give some of the rows; every encoding keeps a row's bytes together."""
        x = np.frombuffer(self.x, np.uint8).reshape(len(self.row_exponents), -1)[rows].tobytes()
        return LocalRows(x, self.encoding, self.row_exponents[rows], self.grid, self.layer_exponents)


class LocalExperts:
    """
    Compute picks on this machine's cores.

    cache_bytes bounds the packed experts kept in memory (one that is in use may exceed it for a moment).
    """

    def __init__(self, model: Model, kernel: NativeKernel, cache_bytes: int, threads: int) -> None:
        self.build = kernel.build
        self.pace = Pace()
        self._model = model
        self._kernel = kernel
        self._cache_bytes = cache_bytes
        self._threads = max(1, threads)
        self._pool = ThreadPoolExecutor(self._threads, "expert")
        self._lock = Lock()
        # The three below: under _lock.
        self._packed: OrderedDict[tuple[int, int], PackedExpert] = OrderedDict()
        self._packed_bytes = 0

    def compute_at_once(self, layer: int, rows: LocalRows, picks: Picks) -> npt.NDArray[np.int64] | None:
        """Like `compute`, in this very thread, when that is quicker than asking another; else None."""
        slice_bytes = self._model.layers[layer].formula.slice_bytes
        if len(picks.experts) * slice_bytes > AT_ONCE_BYTES:
            return None
        with self._lock:
            if not all((layer, expert) in self._packed for expert in picks.experts.tolist()):
                return None
        began, alone = monotonic(), self.pace.began(0.0, 0.0)
        try:
            sums = self._answer(layer, rows, picks)
        finally:
            self.pace.ended()
        if alone:
            self.pace.computed(len(picks.experts), slice_bytes, monotonic() - began)
        return sums

    def cost(self, layer: int, num_rows: int, now: float) -> LocalCost:
        """Say what computing about so many rows of a layer's experts costs here at the moment."""
        slice_bytes = self._model.layers[layer].formula.slice_bytes
        packed, load_s = self._packed, self.pace.load_s(slice_bytes)
        return LocalCost(
            self.pace.queue_s(now),
            self.pace.row_s(num_rows, slice_bytes),
            # One dictionary's answer needs no lock, and is a guess about the next moment anyway.
            lambda expert: 0.0 if (layer, expert) in packed else load_s,
        )

    async def compute(self, layer: int, rows: LocalRows, picks: Picks) -> npt.NDArray[np.int64]:
        """
        Give the integer sums of these picks, [num_tokens, hidden_dim].

        Raises:
            KernelError: the kernel refused (non-finite values, grid overflow); names what.
        """
        slice_bytes = self._model.layers[layer].formula.slice_bytes
        warm = all((layer, expert) in self._packed for expert in picks.experts.tolist())
        began = monotonic()
        alone = self.pace.began(self.cost(layer, len(picks.experts), began).whole(picks), began)
        try:
            sums = await self._compute(layer, rows, picks)
        finally:
            self.pace.ended()
        if alone and warm:
            self.pace.computed(len(picks.experts), slice_bytes, monotonic() - began)
        return sums

    async def _compute(self, layer: int, rows: LocalRows, picks: Picks) -> npt.NDArray[np.int64]:
        loop = asyncio.get_running_loop()
        experts = sorted(set(picks.experts.tolist()))
        if self._threads == 1 or len(picks.experts) < SPLIT_PICKS or len(experts) < 2:
            return await loop.run_in_executor(self._pool, self._answer, layer, rows, picks)
        thread_of_expert = np.zeros(experts[-1] + 1, np.intp)
        thread_of_expert[experts] = np.arange(len(experts)) % self._threads
        parts = picks.split(thread_of_expert, min(self._threads, len(experts)))
        jobs = [loop.run_in_executor(self._pool, self._answer, layer, rows, part) for part in parts]
        total, *others = await asyncio.gather(*jobs)
        for sums in others:
            total += sums
        return total

    def outputs(self, layer: int, encoding: XEncoding, call: LayerCall) -> npt.NDArray[np.float32]:
        """Give the weighted sums as floats, [num_tokens, hidden_dim], before there is a grid: for measuring
        one."""
        picks = Picks.of(call.ids, call.weights)
        used, pick_expert = picks.distinct()
        num_tokens, top_k = call.ids.shape
        formula, experts = self._model.layers[layer].formula, [self.expert(layer, each) for each in used]
        began = monotonic()
        outputs = self._kernel.outputs(
            formula,
            encode_x(call.x, encoding),
            int(encoding),
            num_tokens,
            picks.counts,
            experts,
            pick_expert,
            picks.weights,
        )
        self.pace.computed(len(picks.experts), formula.slice_bytes, monotonic() - began)
        return outputs.reshape(num_tokens, top_k, -1).sum(axis=1)

    def close(self) -> None:
        """Take no more work; what runs is not waited for."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def expert(self, layer: int, expert: int) -> PackedExpert:
        """Give one packed expert, from the cache or from the file; called from any thread."""
        key = (layer, expert)
        with self._lock:
            if (packed := self._packed.get(key)) is not None:
                self._packed.move_to_end(key)
                return packed
        began = monotonic()
        packed = self._pack(layer, expert)
        self.pace.loaded(self._model.layers[layer].formula.slice_bytes, monotonic() - began)
        with self._lock:
            if key not in self._packed:  # another thread may have been first
                self._packed[key] = packed
                self._packed_bytes += packed.size_bytes
            while self._packed_bytes > self._cache_bytes and len(self._packed) > 1:
                _, dropped = self._packed.popitem(last=False)
                self._packed_bytes -= dropped.size_bytes
        return packed

    def _pack(self, layer: int, expert: int) -> PackedExpert:
        """Pack straight from the file: no copy of the slice is made."""
        formula = self._model.layers[layer].formula
        parts = [part.cast("B") for part in self._model.slice_parts(layer, expert)]
        matrices = 2 if formula.gate_type is None else 3
        stretches = [*parts[:matrices], memoryview(b"".join(parts[matrices:]))]  # biases and scales are small
        ends = list(accumulate(map(len, stretches)))

        def read(at: int, size: int) -> memoryview:
            which = bisect_right(ends, at)
            at -= ends[which] - len(stretches[which])
            return stretches[which][at : at + size]

        return self._kernel.pack_pieces(formula, read)

    def _answer(self, layer: int, rows: LocalRows, picks: Picks) -> npt.NDArray[np.int64]:
        used, pick_expert = picks.distinct()
        return self._kernel.answer(
            self._model.layers[layer].formula,
            rows.x,
            int(rows.encoding),
            len(rows.row_exponents),
            rows.row_exponents,
            int(rows.grid),
            rows.layer_exponents,
            picks.counts,
            [self.expert(layer, expert) for expert in used],
            pick_expert,
            picks.weights,
        )
