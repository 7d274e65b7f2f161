"""
Whole swarms, seeded: nodes of any size that come in any order, are slow, lie, cannot hold, refuse, leave.

What must hold for each: soon after, no slice of the model is without a node that serves it, as long as honest
nodes have room; and nobody was made to fetch much more than that takes.
"""

import random
from dataclasses import dataclass, field

import pytest

from relay.pool.pool import Pool, Told
from relay.wire.manifest import Manifest, ManifestLayer
from relay.wire.messages import Assign, Offer, Register, SliceReady

STEP_S = 0.5
LONG_S = 12.0  # to fill holes after the last thing that happened; loading takes up to 8 s of it
CASES = 360


@dataclass
class Device:
    """A node as the relay meets it. `bytes_per_s` 0: it never loads. `real_bytes`: what it can hold."""

    handle: int
    pledge: int
    real_bytes: int
    bytes_per_s: float
    tells: bool = True  # that it cannot hold so much
    refuses: frozenset[int] = frozenset()  # layers
    joins_at: float = 0.0
    leaves_at: float = 1e9
    pauses_at: float = 1e9
    here: bool = False
    paused: bool = False
    assign: Assign | None = None
    held: dict[str, int] = field(default_factory=dict)
    loading_bytes: float = 0.0
    fetched_bytes: int = 0

    @property
    def name(self) -> str:
        return f"node{self.handle:03}"

    @property
    def honest(self) -> bool:
        return self.bytes_per_s > 1.0 and self.leaves_at == self.pauses_at == 1e9

    def wanted(self) -> list[tuple[int, int, str, int]]:
        """Layer, expert, slice, bytes in the order of fetching."""
        layers = self.assign.layers if self.assign else ()
        return [(n.layer, e, s, n.slice_bytes) for n in layers for e, s in n.experts.items()]


def manifest(model: str, layers: list[tuple[int, int]]) -> Manifest:
    slices = [
        ManifestLayer(
            n,
            {"hidden_dim": 32},
            {"x32": 1, "x16": None},
            size,
            tuple(f"{model}{n:02}{e:03}".ljust(64, "0") for e in range(experts)),
        )
        for n, (experts, size) in enumerate(layers)
    ]
    return Manifest(model.ljust(64, "0"), model, max(e for e, _ in layers), 1, tuple(slices))


class Swarm:
    """A relay's pool, a backbone and devices, on a clock of their own."""

    def __init__(
        self, layers: list[tuple[int, int]], devices: list[Device], backbone_at: float, models: int = 1
    ) -> None:
        self.pool, self.now = Pool(), 0.0
        self.devices = {device.handle: device for device in devices}
        self.backbone_at = backbone_at
        self.manifests = [manifest(f"{model:02x}", layers) for model in range(models)]
        self.everything = {s for made in self.manifests for layer in made.layers for s in layer.slices}

    def run(self, until: float) -> None:
        while self.now < until:
            self.step()

    def step(self) -> None:
        self.now += STEP_S
        if self.now - STEP_S <= self.backbone_at < self.now:
            for number, made in enumerate(self.manifests):
                self.pool.register(1000 + number, f"b{number}", Register("b", made))
        for device in self.devices.values():
            self._live(device)
        self.pool.tick(self.now)
        if self.pool.unsettled:
            self.deliver(self.pool.settle(self.now))

    def deliver(self, told: list[Told]) -> None:
        for item in told:
            device = self.devices.get(item.handle)
            if device is None or not isinstance(item.message, Assign):
                continue
            device.assign = item.message
            wanted = {s for _, _, s, _ in device.wanted()}
            device.held = {s: size for s, size in device.held.items() if s in wanted}
            if device.bytes_per_s:
                self._say(device)

    def _live(self, device: Device) -> None:
        if not device.here and device.joins_at <= self.now < device.leaves_at:
            device.here = True
            self.offer(device)
        if device.here and self.now >= device.leaves_at:
            device.here = False
            self.pool.remove(device.handle)
        if device.here and self.now >= device.pauses_at and not device.paused:
            device.paused = True
            self.pool.pause(device.handle, True, self.now)
        if device.here and device.bytes_per_s:
            self._load(device)

    def offer(self, device: Device) -> None:
        offer = Offer("k", device.pledge, 1.0, None, False, device.name, tuple(device.held))
        self.pool.offer(device.handle, device.name, offer)

    def _load(self, device: Device) -> None:
        device.loading_bytes += device.bytes_per_s * STEP_S
        more = False
        for layer, _, slice_id, size in device.wanted():
            if slice_id in device.held or layer in device.refuses:
                continue
            if size > device.loading_bytes:
                break
            if sum(device.held.values()) + size > device.real_bytes:  # it sees that before it fetches
                if device.tells:
                    device.pledge = sum(device.held.values())
                    self.offer(device)
                device.loading_bytes = 0.0
                break
            device.loading_bytes -= size
            device.held[slice_id] = size
            device.fetched_bytes += size
            more = True
        else:
            device.loading_bytes = 0.0
        if more:
            self._say(device)

    def _say(self, device: Device) -> None:
        assert device.assign is not None
        ready: dict[int, tuple[int, ...]] = {}
        refused: dict[int, tuple[int, ...]] = {}
        for layer, expert, slice_id, _ in device.wanted():
            if slice_id in device.held:
                ready[layer] = (*ready.get(layer, ()), expert)
            elif layer in device.refuses:
                refused[layer] = (*refused.get(layer, ()), expert)
        self.pool.slices_ready(device.handle, SliceReady(device.assign.epoch, ready, refused, "no"), self.now)

    def served(self) -> set[str]:
        serving = [d for d in self.devices.values() if d.here and not d.paused]
        return {s for device in serving for s in device.held}


def swarm(seed: int) -> Swarm:
    """A swarm whose honest nodes have room for 130 % of the model, and some who are not honest."""
    rng = random.Random(seed)
    mixed = rng.random() < 0.4
    layers = [
        (rng.randint(2, 8), rng.choice([40, 100, 250]) if mixed else 100) for _ in range(rng.randint(2, 8))
    ]
    model_bytes = sum(experts * size for experts, size in layers)
    largest = max(size for _, size in layers)
    devices: list[Device] = []

    def add(**fields: float | frozenset[int]) -> None:
        pledge = max(largest, int(model_bytes * rng.choice([0.1, 0.2, 0.35, 0.65, 1.5])))
        made = {"pledge": pledge, "real_bytes": pledge, "bytes_per_s": model_bytes / 4}
        joins_at = rng.uniform(0, 20)
        devices.append(Device(handle=len(devices) + 2, joins_at=joins_at, **(made | fields)))  # type: ignore[arg-type]

    wanted = 1.3 * model_bytes + 8 * largest if mixed else 1.3 * model_bytes
    while sum(d.real_bytes // largest * largest for d in devices if d.honest and not d.refuses) < wanted:
        add(bytes_per_s=model_bytes / rng.choice([1, 4, 8]))
        if rng.random() < 0.5:
            add(bytes_per_s=0.0, pledge=rng.choice([model_bytes // 3, model_bytes, 1 << 50]))
        if rng.random() < 0.3:
            real_bytes = rng.choice([0, model_bytes // 7])
            add(real_bytes=real_bytes, pledge=model_bytes * 2, tells=rng.random() < 0.5)
        if rng.random() < 0.2:
            add(leaves_at=rng.uniform(10, 30))
        if rng.random() < 0.2:
            add(pauses_at=rng.uniform(10, 30))
        if rng.random() < 0.2:
            add(refuses=frozenset({rng.randrange(len(layers))}))
        if rng.random() < 0.1:
            add(bytes_per_s=0.9)  # a slice takes minutes
    return Swarm(layers, devices, rng.choice([0.0, 10.0, 25.0]))


def last_event(whole: Swarm) -> float:
    times = [whole.backbone_at]
    for device in whole.devices.values():
        times += [t for t in (device.joins_at, device.leaves_at, device.pauses_at) if t < 1e9]
    return max(times)


@pytest.mark.parametrize("block", range(12))
def test_no_slice_stays_without_a_holder_while_others_have_room(block: int) -> None:
    for seed in range(block * CASES // 12, (block + 1) * CASES // 12):
        whole = swarm(seed)
        whole.run(last_event(whole) + LONG_S)
        holes = whole.everything - whole.served()
        assert not holes, (seed, sorted(holes), whole.devices.values())
        loading = [device for device in whole.devices.values() if device.bytes_per_s > 1.0]
        fetched = sum(device.fetched_bytes for device in loading)
        assert fetched <= 1.5 * sum(device.real_bytes for device in loading), (seed, fetched)


def test_no_model_has_holes_while_nodes_of_another_have_room_to_spare() -> None:
    for seed in range(120):
        rng = random.Random(1000 + seed)
        models = rng.choice([2, 3])
        layers = [(rng.randint(2, 6), 100) for _ in range(rng.randint(2, 5))]
        model_bytes = sum(experts * size for experts, size in layers)
        devices: list[Device] = []
        while sum(d.real_bytes for d in devices if d.honest) < (1.3 * models + 0.5) * model_bytes:
            honest = rng.random() < 0.7
            pledge = rng.randint(1, max(1, model_bytes // 300)) * 100
            real, rate = (pledge, model_bytes / 4) if honest else (0, 0.0)
            devices.append(
                Device(
                    2 + len(devices), pledge if honest else 1 << 50, real, rate, joins_at=rng.uniform(0, 20)
                )
            )
        whole = Swarm(layers, devices, rng.choice([0.0, 10.0, 25.0]), models)
        whole.run(25.0 + 25.0)
        holes = whole.everything - whole.served()
        assert not holes, (seed, sorted(holes), devices)
