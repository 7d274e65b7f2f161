"""
Every setting of the backbone: unit, default, environment variable, one line of help.

Read once in cli.py and passed down; no other module looks at the environment. A setting's environment
variable is `BACKBONE_` and its name in capitals.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from backbone.experts.deadlines import DeadlinePolicy
from backbone.experts.standing import Offload
from backbone.lanes.direct import ListenAt
from relay.nat.evidence import PathPolicy
from relay.wire.tensors import Grid


@dataclass(frozen=True, slots=True)
class Config:
    """
    model: the GGUF. relay, relay_token: whom to join; without a relay all experts are computed here.
    host, port: the public port (0: any free one). api_keys: who may ask; empty: everybody who reaches the
    port. context: tokens per slot. parallel: slots. threads: 0 = all cores. speculate: None or "ngram".
    grid: how exact partials travel, see CONTRACT.md "Grid". offload: how eagerly nodes are given work that
    this machine would do as quickly. hedge: ask a second holder as soon as the first is later than usual.
    allow_inexact: also ask nodes that compute within a tolerance only. listen: where nodes may reach this
    backbone directly. links: whether calls may leave the relayed lane. paths: when they do.
    dial: which nodes that listen are dialled, those that are where the relay saw them or any.
    key_file: this backbone's key, None: a fresh one. seal: whether frames through the relay are sealed.
    require_sealed: leave out nodes that cannot.
    prompt_cache_bytes, engine_memory_bytes: what llama.cpp may keep of earlier prompts, and take altogether
    besides the loaded model; None: by the machine's memory.
    local_cache_bytes: packed experts kept in memory for what no node holds. call_timeout_s: longest layer
    call. record: a folder for the first answer of each node, to be verified by others.
    """

    model: Path
    cache_dir: Path
    name: str = "backbone"
    relay: str | None = None
    relay_token: str | None = None
    host: str = "127.0.0.1"
    port: int = 8080
    api_keys: tuple[str, ...] = ()
    context: int = 4096
    parallel: int = 1
    threads: int = 0
    speculate: Literal["ngram"] | None = None
    grid: Grid = Grid.X32
    offload: Offload = Offload.AUTO
    hedge: bool = False
    allow_inexact: bool = False
    local_cache_bytes: int = 1 << 30
    prompt_cache_bytes: int | None = None
    engine_memory_bytes: int | None = None
    call_timeout_s: float = 120.0
    record: Path | None = None
    listen: ListenAt | None = None
    dial: Literal["proved", "any"] = "proved"
    links: bool = True
    key_file: Path | None = None
    seal: bool = True
    require_sealed: bool = False
    paths: PathPolicy = field(default_factory=PathPolicy)
    deadlines: DeadlinePolicy = field(default_factory=DeadlinePolicy)


def default_cache_dir(environment: Mapping[str, str]) -> Path:
    """Give the folder for models, hashes and grids: the XDG cache of this user."""
    base = environment.get("XDG_CACHE_HOME") or Path(environment.get("HOME", ".")) / ".cache"
    return Path(base) / "expertswarm"
