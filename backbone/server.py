"""
One backbone, wired: model, engine, dispatcher, lane to the relay, gateway. The one place that chooses
classes.

Order of start: the model's head is read, the kernel proves itself, the engine loads and shows what its graph
does with the experts, those it uses are hashed, the grid is measured if this model was never seen, and only
then does the relay hear of us and the public port open.
"""

import asyncio
import logging
import os
import secrets
import socket
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from time import monotonic
from typing import Any, Self
from urllib.parse import urlsplit

import httpx
import numpy as np
import numpy.typing as npt
import uvicorn

from backbone.config import Config
from backbone.engine.link import LayerCall
from backbone.engine.link_server import OnCall
from backbone.engine.supervisor import Engine, EngineConfig
from backbone.errors import ConfigError, EngineError, EngineRefused, ModelError
from backbone.experts.client import Dispatcher, DispatchPolicy
from backbone.experts.local import LocalExperts
from backbone.experts.native import NativeKernel
from backbone.experts.nodes import nodes_of
from backbone.experts.plans import layer_plans, x_encoding
from backbone.experts.record import Recorder
from backbone.gateway.app import Door, create_gateway
from backbone.lanes.chooser import LaneChooser, Opener
from backbone.lanes.direct import LinkListener
from backbone.lanes.link import Link, accepting_session
from backbone.lanes.network import address_towards, watch
from backbone.lanes.openers import DIRECT, DirectOpener
from backbone.lanes.relayed import LaneHandlers, RelayedLane
from backbone.lanes.webrtc import WEBRTC, WebRtcOpener
from backbone.metrics import tally_registry
from backbone.model.calibrate import TEXTS, GridMeter
from backbone.model.gguf import Model, open_model
from backbone.model.grids import load_grids, save_grids
from backbone.model.progress import said_while_it_lasts
from backbone.model.slices import LayerGrid, Manifest, build_manifest, slice_hashes
from backbone.node.keys import fresh_identity, kept_identity
from relay import __version__
from relay.door import Places
from relay.door import door as http_door
from relay.program.ports import cannot_listen
from relay.program.text import clean
from relay.program.values import machine_bytes
from relay.wire.calls import model_tag
from relay.wire.fields import Fields
from relay.wire.manifest import Manifest as WireManifest
from relay.wire.messages import Hello, Peers, Register
from relay.wire.sealing import SealPolicy
from relay.wire.tensors import row_exponents

log = logging.getLogger(__name__)

AGENT = f"backbone {__version__}"
CALIBRATION_TIMEOUT_S = 600.0
PLACES, PLACES_OF_ONE = 4096, 1024  # connections of clients, and of one address among them
REQUEST_S = 30.0  # a request may take so long to arrive, and a body to go on
UNREAD_S = 120.0
GRACE_S = 1  # answers still under way at the end get so long


class Backbone:
    """
    An async context manager: entered, it serves. `url` is the public address, `dispatcher` its memory of the
    swarm.

    Raises on entry:
        ModelError, EngineError: say what is wrong with the model, or why llama.cpp would not start.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.model: Model
        self.manifest: Manifest
        self.engine: Engine
        self.dispatcher: Dispatcher
        self.lane: RelayedLane | None = None
        self.chooser: LaneChooser | None = None
        self.url = ""
        self.key: str | None = None  # fingerprint, if we seal
        self._joined: asyncio.Task[None] | None = None
        self._answer: OnCall = _nothing
        self._on_welcome: Callable[[], None] = lambda: None
        self._slice_place: dict[str, tuple[int, int]] = {}
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        try:
            await self._start()
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._stack.aclose()

    async def _start(self) -> None:
        config = self.config
        seal = SealPolicy() if config.relay is None else self._seal_policy()
        self.model = await asyncio.to_thread(open_model, config.model)
        threads = config.threads or os.cpu_count() or 1
        kernel = NativeKernel(threads=threads)
        kernel.known_answer_test()
        after_engine = self._stack.enter_context(ExitStack())  # closed once no call can come
        prompt_cache, engine_memory = engine_memory_of(config, machine_bytes() or 16 << 30)
        self.engine = Engine(
            EngineConfig(
                model=self.model.path,
                alias=self.model.name,
                n_ctx=config.context * config.parallel,
                n_parallel=config.parallel,
                n_threads=threads,
                speculate=config.speculate,
                call_timeout_s=config.call_timeout_s,
                prompt_cache_bytes=prompt_cache,
                memory_bytes=engine_memory,
            ),
            lambda call: self._answer(call),
            self.model.formulas,
        )
        try:
            with said_while_it_lasts(f"loading {clean(self.model.name)} into llama.cpp"):
                await self._stack.enter_async_context(self.engine)
        except EngineRefused as exc:  # the better reason, when there is one
            raise self.model.faults.get(exc.layer, exc) from None
        in_file = self.model.layers
        self.model = self.model.as_computed(self.engine.layers)
        if unused := sorted(in_file.keys() - self.model.layers.keys()):
            log.info("the graph does not use the experts of layers %s: left out", unused)
        hashes = await asyncio.to_thread(slice_hashes, self.model, config.cache_dir)
        local = LocalExperts(self.model, kernel, config.local_cache_bytes, threads)
        after_engine.callback(local.close)
        self._answer = self._local_answer(local)
        grids = load_grids(config.cache_dir, hashes)
        if grids is None:
            grids = await self._calibrate(local)
            save_grids(config.cache_dir, hashes, grids)
        self.manifest = build_manifest(self.model, hashes, grids)
        for layer, ids in hashes.items():
            self._slice_place.update((slice_id, (layer, expert)) for expert, slice_id in enumerate(ids))
        recorder = None
        if config.record is not None:
            model, name = self.manifest.model, self.model.name
            recorder = Recorder(config.record, model, name, self.model.slice_bytes)
            self._stack.callback(recorder.close)
        self.dispatcher = Dispatcher(
            layer_plans(self.model, grids, config.grid),
            config.grid,
            local,
            DispatchPolicy(
                config.deadlines,
                config.hedge,
                local_only=config.relay is None,
                allow_inexact=config.allow_inexact,
                offload=config.offload,
            ),
            model_tag(self.manifest.model),
            recorder=recorder,
        )
        self._answer = self.dispatcher.call
        if config.relay is not None:
            await self._join(config.relay, seal)
        await self._open_door()

    def _local_answer(self, local: LocalExperts, meter: GridMeter | None = None) -> OnCall:
        """Compute calls here in floats, before there is a grid; the meter sees how large the outputs are."""
        encodings = {layer: x_encoding(moe.formula) for layer, moe in self.model.layers.items()}

        async def answer(call: LayerCall) -> npt.NDArray[np.float32]:
            outputs = await asyncio.to_thread(local.outputs, call.layer, encodings[call.layer], call)
            if meter is not None:
                meter.note(call.layer, row_exponents(call.x), outputs)
            return outputs

        return answer

    async def _calibrate(self, local: LocalExperts) -> dict[int, LayerGrid]:
        """Run a few texts through the engine and note how large the experts' outputs are."""
        meter = GridMeter()
        self._answer = self._local_answer(local, meter)
        log.info("measuring the grid of %s (once per model)", self.model.name)
        ends = self.engine.ends
        async with httpx.AsyncClient(
            timeout=CALIBRATION_TIMEOUT_S, trust_env=False, headers=self.engine.headers
        ) as client:
            for number, text in enumerate(TEXTS, 1):
                log.info("measuring the grid: text %d of %d", number, len(TEXTS))
                body = {"prompt": text, "n_predict": 1, "temperature": 0.0, "cache_prompt": False}
                try:
                    reply = await client.post(f"{self.engine.url}/completion", json=body)
                except httpx.HTTPError as exc:
                    why = await self.engine.why_ended(ends) or f"{type(exc).__name__} {exc}"
                    raise EngineError(f"the engine ended while the grid was measured: {why}") from exc
                if reply.status_code != 200:
                    why = self.engine.last_failure or reply.text[:300]
                    raise ModelError(f"the grid could not be measured: {why}")
        return meter.exponents()

    async def _join(self, relay_url: str, seal: SealPolicy) -> None:
        manifest = WireManifest.from_fields(Fields("Manifest", self.manifest.to_json()))
        hello = Hello(
            "backbone", secrets.token_hex(16), secrets.token_hex(16), self.config.relay_token, AGENT
        )
        handlers = LaneHandlers(
            self._peers_changed,
            lambda answer: self._chooser.answer_received(answer),
            self._lane_lost,
            self._slice_bytes,
            lambda echo: self._chooser.echo_received(echo),
            lambda signal: self._chooser.signal_received(signal),
            lambda: self._on_welcome(),
        )
        register = Register(self.config.name, manifest, inexact=self.config.allow_inexact)
        self.lane = RelayedLane(relay_url, hello, register, handlers, seal)
        self.chooser = await self._lanes(relay_url, self.lane)
        self.dispatcher.lane = self.chooser
        self._joined = task = asyncio.create_task(self.lane.run())

        async def stop() -> None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

        self._stack.push_async_callback(stop)

    async def serving(self) -> None:
        """
        Wait for ever.

        Raises:
            RelayRefused: the relay does not take this backbone, and never did.
        """
        await asyncio.shield(self._joined or asyncio.get_running_loop().create_future())

    def _seal_policy(self) -> SealPolicy:
        """Say whether and as whom we seal; nodes may pin the fingerprint that is logged here."""
        config = self.config
        if not config.seal:
            log.warning("frames are not sealed: the relay can read what passes here")
            return SealPolicy()
        identity = fresh_identity() if config.key_file is None else kept_identity(config.key_file)
        self.key = identity.fingerprint
        log.info("this backbone's key: %s (for expert-node --backbone-key, or the page's #key=)", self.key)
        return SealPolicy(identity, config.require_sealed)

    async def _lanes(self, relay_url: str, relayed: RelayedLane) -> LaneChooser:
        """Put the lanes together: the relayed one, and whatever else this machine can open."""
        config = self.config
        openers: dict[str, Opener] = {}
        chooser = LaneChooser(
            relayed, openers, self.dispatcher.answer_received, self.dispatcher.path_changed, config.paths
        )
        self._stack.push_async_callback(chooser.close)
        if not config.links:
            return chooser
        listener = None
        if config.listen is not None:

            def make_link() -> Link:
                session = accepting_session("backbone", chooser.expected)
                return Link(session, chooser.link_ready, chooser.link_event, chooser.link_closed)

            listener = LinkListener(config.listen, make_link)
            await listener.open()
            self._stack.callback(listener.close)
        openers[DIRECT] = DirectOpener(relay_url, listener, config.seal, config.dial == "any")
        openers[WEBRTC] = webrtc = WebRtcOpener(lambda: relayed.stun)
        self._on_welcome = webrtc.prepare
        self._stack.callback(webrtc.close)

        def network_changed() -> None:
            log.info("this machine's network changed: all lanes are tried again")
            webrtc.network_changed()
            chooser.network_changed()

        relay = urlsplit(relay_url)
        look = partial(address_towards, relay.hostname or "", relay.port or 443)
        task = asyncio.create_task(watch(look, network_changed))
        self._stack.callback(task.cancel)
        return chooser

    @property
    def _chooser(self) -> LaneChooser:
        assert self.chooser is not None
        return self.chooser

    def _peers_changed(self, peers: Peers) -> None:
        self._chooser.peers_changed(peers)
        nodes = nodes_of(peers)
        self.dispatcher.nodes_changed([replace(n, path=self._chooser.lane_of(n.peer)) for n in nodes])

    def _lane_lost(self, why: str) -> None:
        self._chooser.relayed_lost()
        self.dispatcher.lane_lost()

    def _slice_bytes(self, slice_id: str) -> bytes | None:
        place = self._slice_place.get(slice_id)
        return None if place is None else self.model.slice_bytes(*place)

    async def _open_door(self) -> None:
        door = Door(
            engine=self.engine,
            context=self.config.context,
            parallel=self.config.parallel,
            status=self.status,
            metrics=tally_registry(
                self.dispatcher.tally,
                lambda: self.lane is not None and self.lane.connected,
                self.engine.rss_bytes,
                self._described,
            ),
        )
        try:
            listener = socket.create_server((self.config.host, self.config.port), backlog=1024)
        except OSError as exc:
            raise ConfigError(cannot_listen("API", self.config.host, self.config.port, exc)) from exc
        app = create_gateway(door, self.config.api_keys)
        server = _QuietServer(
            uvicorn.Config(
                app,
                http=http_door(Places(PLACES, PLACES_OF_ONE, REQUEST_S, UNREAD_S)),
                log_level="warning",
                access_log=False,
                timeout_graceful_shutdown=GRACE_S,
            )
        )
        task = asyncio.create_task(server.serve(sockets=[listener]))

        async def stop() -> None:
            # First: what is under way then ends with an error that says why, in the time the door leaves it.
            await self.engine.stop("the backbone is being stopped")
            server.should_exit = True
            await asyncio.gather(task, return_exceptions=True)

        self._stack.push_async_callback(stop)
        self.url = f"http://{self.config.host}:{listener.getsockname()[1]}"

    def _described(self) -> dict[str, dict[str, Any]]:
        """Say of each node which lane carries its calls, and whether the relay could read them."""
        if self.chooser is None or self.lane is None:
            return {}
        peers = {node.node_id: node.peer for node in self.dispatcher.nodes.by_id.values()}
        seal = self.lane.describe_seal
        return {
            node_id: path | {"sealed": seal(peers.get(node_id, 0))["sealed"]}
            for node_id, path in self.chooser.described().items()
        }

    def status(self) -> dict[str, Any]:
        """Say how things are, for people and scripts."""
        dispatcher, now = self.dispatcher, monotonic()
        nodes = dispatcher.nodes
        return {
            "model": {
                "name": self.model.name,
                "hash": self.manifest.model,
                "expert_bytes": self.model.expert_bytes,
            },
            "engine": {"url": self.engine.url, "resident_bytes": self.engine.rss_bytes()},
            "relay": None
            if self.lane is None
            else {
                "url": self.lane.relay_url,
                "connected": self.lane.connected,
                "why_down": None if self.lane.connected else self.lane.why_down,
                "key": self.key,
                "seal_faults": self.lane.seal_faults,
                "refused_unsealed": self.lane.unsealed_nodes,
            },
            "coverage": {
                str(layer): round(nodes.coverage(layer, self.model.num_experts), 3)
                for layer in self.model.layers
            },
            "nodes": [
                {
                    "id": node.node_id,
                    "name": node.name,
                    "kernel": node.kernel,
                    "path": node.path,
                    "paths": None if self.chooser is None else self.chooser.describe(node.peer),
                    "seal": None if self.lane is None else self.lane.describe_seal(node.peer),
                    "layers": len(node.experts),
                    "usable": dispatcher.usable(node.node_id, now),
                }
                for node in nodes.by_id.values()
            ],
            "work": [
                {
                    "name": work.name,
                    "kernel": work.kernel,
                    "path": work.path,
                    "layers": work.layers(),
                    "expert_rows": sum(work.rows.values()),
                    "calls": work.calls,
                    "bytes_out": work.bytes_out,
                    "bytes_in": work.bytes_in,
                    "round_trip_ms_p50": round(work.round_trip_ms(0.5), 3),
                    "round_trip_ms_p95": round(work.round_trip_ms(0.95), 3),
                    "failures": work.failures,
                }
                for work in dispatcher.tally.work.values()
            ],
            "last_failure": self.engine.last_failure,
        }


async def _nothing(call: LayerCall) -> npt.NDArray[np.float32]:
    """llama.cpp tries its graph while it loads and throws the outputs away; formulas are not known yet."""
    return np.zeros_like(call.x)


def engine_memory_of(config: Config, machine: int) -> tuple[int, int]:
    """Give the engine's prompt cache and its limit, in bytes, for a machine with so much memory."""
    cache = config.prompt_cache_bytes
    if cache is None:
        cache = min(2 << 30, machine // 8)
    limit = config.engine_memory_bytes
    return cache, limit if limit is not None else cache + max(4 << 30, machine // 4)


class _QuietServer(uvicorn.Server):
    """Signals belong to the program that runs us, not to one of its servers."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
