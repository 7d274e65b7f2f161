"""
Decide which slices a node fetches, holds and gives up: pure, a part of `machine.py`, mirrored by
`node-web/src/holdings.js`.

| failed by | which means                          | and then                                               |
|-----------|--------------------------------------|--------------------------------------------------------|
| network   | the bytes did not come, or not all   | again after growing waits, and fewer side by side      |
| kernel    | the kernel it was for is gone        | again after growing waits                              |
| bytes     | what came does not hash to its name  | once more; then given up while this session lasts      |
| slice     | the kernel refuses these bytes       | given up until there is another kernel                 |
| formula   | the kernel cannot compute this layer | the whole layer is, likewise                           |
| memory    | there is no room for it              | the pledge falls to what is held; no more is fetched   |

What is given up is told to the relay, so that others hold it.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from backbone.node.events import (
    AssignedLayer,
    Effect,
    FetchSlice,
    FreeSlice,
    SliceFailed,
    StopFetch,
)

RETRY_BASE_S = 0.5
RETRY_CAP_S = 30.0
BYTES_TRIES = 2


def backoff_s(attempt: int, jitter: float, cap_s: float = RETRY_CAP_S) -> float:
    """Wait before try `attempt` (0 = first repetition): exponential, capped, the upper half random."""
    return min(cap_s, RETRY_BASE_S * 2.0 ** min(attempt, 10)) * (0.5 + 0.5 * jitter)


@dataclass(slots=True)
class _Retry:
    """Failures of one fetch in a row, those by wrong bytes among them, and when it may be tried again."""

    failures: int = 0
    wrong: int = 0
    at: float = 0.0


class Holdings:
    """The slices of one node. `pledge_bytes`: what may be offered, in bytes of slices."""

    __slots__ = (
        "_costs", "_given_up", "_layers", "_memory_bytes", "_model_tag", "_most_parallel", "_parallel",
        "_random", "_refused_layers", "_retries", "_room_bytes", "fetching", "held", "pledge_bytes",
        "skipped", "wanted",
    )  # fmt: skip

    def __init__(self, memory_bytes: int, parallel_fetches: int, random: Callable[[], float]) -> None:
        self._memory_bytes = memory_bytes
        self._most_parallel = parallel_fetches
        self._random = random
        self.held: set[str] = set()
        self.fetching: set[str] = set()
        self.wanted: dict[str, FetchSlice] = {}  # in the order of fetching
        self.skipped = 0  # assigned slices for which there is no room
        self._layers: dict[int, AssignedLayer] = {}
        self._retries: dict[str, _Retry] = {}
        self._refused_layers: dict[int, AssignedLayer] = {}
        self._model_tag = 0
        self.begin_anew()

    def begin_anew(self) -> None:
        """Another kernel, or another start: what did not fit or could not be computed may do so now."""
        self.pledge_bytes = self._room_bytes = self._memory_bytes
        self._costs: dict[int, int] = {}  # bytes of a slice -> bytes of memory it takes
        self._given_up: dict[str, tuple[str, str]] = {}  # slice -> kind of failure, why
        self._parallel = self._most_parallel

    def session_began(self) -> None:
        """Bytes that were wrong may be right now."""
        self._given_up = {s: given for s, given in self._given_up.items() if given[0] != "bytes"}

    def ready(self) -> dict[int, tuple[int, ...]]:
        """Layer -> experts that can be called now."""
        return self._experts(self._layers.values(), lambda s: s in self.held and s in self.wanted)

    def refused(self) -> dict[int, tuple[int, ...]]:
        """Layer -> assigned experts that will not be loaded."""
        given_up = self._experts(self._layers.values(), lambda s: s in self._given_up)
        whole = self._experts(self._refused_layers.values(), lambda s: True)
        return dict(sorted((given_up | whole).items()))

    def why(self) -> str:
        """Say why the first of them is not."""
        layers = [layer.refusal for layer in self._refused_layers.values()]
        slices = [why for s, (_, why) in self._given_up.items() if self._is_assigned(s)]
        return next(iter(layers + slices), "")

    def next_timer(self) -> float | None:
        """When `fetch_more` may have something to do by itself."""
        if len(self.fetching) >= self._parallel:
            return None
        waiting = (r.at for s, r in self._retries.items() if s in self.wanted and s not in self.fetching)
        return min(waiting, default=None)

    def assign(self, layers: Iterable[AssignedLayer], model_tag: int) -> list[Effect]:
        """Take the complete set; stop and free what is not in it."""
        layers = tuple(layers)
        self._layers = {layer.layer: layer for layer in layers if not layer.refusal}
        self._refused_layers = {layer.layer: layer for layer in layers if layer.refusal}
        for layer in self._layers.values():
            if layer.held_bytes > self._cost(layer.slice_bytes):
                self._costs[layer.slice_bytes] = layer.held_bytes
        if model_tag and model_tag != self._model_tag:
            self._model_tag = model_tag
            self.pledge_bytes = self._room_bytes
        return self._choose()

    def layer(self, number: int) -> AssignedLayer | None:
        """An assigned layer that is not refused."""
        return self._layers.get(number)

    def complete(self, slice_id: str) -> bool:
        """Whether a layer with this slice is held as far as it will be."""
        layers = [layer.experts.values() for layer in self._layers.values()]
        return any(
            slice_id in ids and all(s in self.held or s not in self.wanted for s in ids) for ids in layers
        )

    def fetch_more(self, now: float) -> list[Effect]:
        """Begin as many fetches as may run side by side."""
        effects: list[Effect] = []
        for slice_id, fetch in self.wanted.items():
            if len(self.fetching) >= self._parallel:
                break
            retry = self._retries.get(slice_id)
            due = retry is None or retry.at <= now
            if slice_id not in self.held and slice_id not in self.fetching and due:
                self.fetching.add(slice_id)
                effects.append(fetch)
        return effects

    def loaded(self, slice_id: str, held_bytes: int) -> list[Effect]:
        """A slice that was being fetched is held, and takes so much memory (0: as its bytes)."""
        self.fetching.discard(slice_id)
        self._retries.pop(slice_id, None)
        self._parallel = min(self._most_parallel, self._parallel + 1)
        self.held.add(slice_id)
        size_bytes = self.wanted[slice_id].size_bytes
        if held_bytes <= self._cost(size_bytes):
            return []
        self._costs[size_bytes] = held_bytes
        return self._choose()

    def failed(self, event: SliceFailed, now: float) -> list[Effect]:
        """A slice that was being fetched could not be had; the table above says what follows."""
        self.fetching.discard(event.slice)
        retry = self._retries.setdefault(event.slice, _Retry())
        if event.kind == "memory":
            self._room_bytes = self._used_bytes()
            return self._choose()
        if event.kind == "bytes":
            retry.wrong += 1
        if event.kind in ("slice", "formula") or retry.wrong >= BYTES_TRIES:
            layer = self._layers.get(self.wanted[event.slice].layer)
            whole = event.kind == "formula" and layer is not None
            for slice_id in layer.experts.values() if whole and layer is not None else (event.slice,):
                if slice_id not in self.held:
                    self._given_up[slice_id] = event.kind, event.reason
            return self._choose()
        if event.kind == "network":
            self._parallel = max(1, self._parallel // 2)
        if event.progress:
            retry.failures = 0
        retry.at = now + backoff_s(retry.failures, self._random())
        retry.failures += 1
        return []

    def stop(self) -> list[Effect]:
        """Fetch nothing for now."""
        effects: list[Effect] = [StopFetch(s) for s in sorted(self.fetching)]
        self.fetching.clear()
        return effects

    def lost(self, slices: Iterable[str]) -> None:
        """The kernel no longer holds these."""
        self.held.difference_update(slices)

    def clear(self) -> list[Effect]:
        """Let go of everything."""
        effects = self.stop() + [FreeSlice(s) for s in sorted(self.held)]
        self.held.clear()
        self._retries.clear()
        self.wanted, self._layers, self._refused_layers = {}, {}, {}
        return effects

    def _choose(self) -> list[Effect]:
        """Choose what there is room for, what is held first; each slice is counted once."""
        found: dict[str, FetchSlice] = {}
        for layer in self._layers.values():
            for _, s in sorted(layer.experts.items()):
                if s not in self._given_up:
                    found.setdefault(s, FetchSlice(s, layer.layer, layer.slice_bytes))
        used, chosen = 0, set()
        for slice_id in sorted(found, key=lambda s: s not in self.held):  # stable: else in their order
            cost = self._cost(found[slice_id].size_bytes)
            if used + cost <= self._room_bytes:
                used += cost
                chosen.add(slice_id)
        self.wanted = {s: fetch for s, fetch in found.items() if s in chosen}
        self.skipped = len(found) - len(chosen)
        if self.skipped:
            fits = sum(fetch.size_bytes for fetch in self.wanted.values())
            self.pledge_bytes = min(self.pledge_bytes, fits)
        self._retries = {s: r for s, r in self._retries.items() if s in self.wanted}
        effects: list[Effect] = [StopFetch(s) for s in sorted(self.fetching - self.wanted.keys())]
        effects += [FreeSlice(s) for s in sorted(self.held - self.wanted.keys())]
        self.fetching.intersection_update(self.wanted)
        self.held.intersection_update(self.wanted)
        return effects

    def _cost(self, size_bytes: int) -> int:
        return self._costs.get(size_bytes, size_bytes)

    def _used_bytes(self) -> int:
        return sum(self._cost(self.wanted[s].size_bytes) for s in self.held)

    def _is_assigned(self, slice_id: str) -> bool:
        return any(slice_id in layer.experts.values() for layer in self._layers.values())

    @staticmethod
    def _experts(
        layers: Iterable[AssignedLayer], condition: Callable[[str], bool]
    ) -> dict[int, tuple[int, ...]]:
        found: Mapping[int, tuple[int, ...]] = {
            layer.layer: tuple(sorted(e for e, s in layer.experts.items() if condition(s)))
            for layer in layers
        }
        return {layer: experts for layer, experts in found.items() if experts}
