"""
Every setting of the relay: unit, default, environment variable, one line of help.

The table is the dataclass. cli.py makes the command line from it and reads it once; an option left out takes
`RELAY_<NAME>` from the environment, then its default. `RELAY_…` variables that are no setting are named in
the log and ignored; those that container platforms set are ignored without a word.
"""

import logging
import math
from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from relay.errors import ConfigError
from relay.program import values
from relay.program.environment import of_environment
from relay.program.values import BadValue, Reader

log = logging.getLogger(__name__)

ENVIRONMENT_PREFIX = "RELAY_"
DAY_S = 86_400.0


def setting(default: Any, read: Reader[Any], help: str, unit: str = "") -> Any:
    """Declare one setting; `read` turns what people type into its value, or says why it cannot."""
    return field(default=default, metadata={"help": help, "unit": unit, "read": read})


def _addresses(text: str) -> str:
    try:
        _address_pair(text)
    except ConfigError as exc:
        raise BadValue(str(exc).removeprefix("stun_addresses: ")) from exc
    return text


def _congestion(text: str) -> str:
    if text and not (text.isascii() and text.isalnum() and len(text) <= 15):
        raise BadValue(f"{text[:60]!r} is no name of a congestion control; write cubic")
    return text


@dataclass(frozen=True, slots=True)
class Config:
    """Settings of `relay serve`."""

    host: str = setting("0.0.0.0", values.host, "address to listen on")
    port: int = setting(8765, values.port, "port to listen on; 0 takes any free one")
    public_url: str | None = setting(
        None,
        values.url("https", "http"),
        "URL under which others reach this relay (QR code); default: LAN address",
    )
    backbone_token: str | None = setting(
        None, values.secret(8), "what a backbone must know to register; default: made once and kept"
    )
    backbone_token_file: Path | None = setting(
        None, values.present_file, "file with that token, so that it does not stand in `ps`"
    )
    state_dir: Path | None = setting(
        None, values.path, "folder for the backbone token; default: XDG state folder"
    )
    cache_dir: Path | None = setting(None, values.path, "folder for slices; default: XDG cache folder")
    pyodide_dir: Path | None = setting(
        None,
        values.present_folder,
        "folder with Pyodide (npm `pyodide`) for /verify; default: its makers' content network",
    )
    cache_bytes: int = setting(16 << 30, values.size(1 << 20), "how much disk slices may take", "bytes")
    max_sessions: int = setting(
        4096, values.whole(1, 1 << 20), "sessions at once, nodes and backbones together"
    )
    sessions_per_address: int = setting(
        1024, values.whole(1, 1 << 20), "sessions at once of one IPv4 address or IPv6 /64"
    )
    connections_per_address: int = setting(
        2048, values.whole(1, 1 << 20), "open connections of one IPv4 address or IPv6 /64"
    )
    request_s: float = setting(
        10.0, values.seconds(0.1, DAY_S), "how long a request may take to arrive, headers and all", "s"
    )
    memory_bytes: int = setting(
        1 << 30, values.size(1 << 20), "held for all peers: queues, unfinished messages", "bytes"
    )
    queue_bytes: int = setting(
        8 << 20, values.size(1 << 10, 1 << 40), "frames waiting for one receiver", "bytes"
    )
    queue_frames: int = setting(2048, values.whole(1, 1 << 24), "frames waiting for one receiver")
    backpressure_s: float = setting(
        0.25, values.seconds(most=DAY_S), "how long a sender waits for a full queue", "s"
    )
    stall_s: float = setting(
        30.0, values.seconds(0.1, DAY_S), "how long a receiver may take nothing before it is dropped", "s"
    )
    ping_interval_s: float = setting(10.0, values.seconds(0.01, DAY_S), "time between signs of life", "s")
    resume_s: float = setting(
        15.0, values.seconds(most=DAY_S), "how long a node whose connection broke keeps its place", "s"
    )
    resume_places: int = setting(
        1024,
        values.whole(0, 1 << 20),
        "places kept for such nodes at once; the oldest is given up first",
    )
    slice_wait_s: float = setting(
        10.0, values.seconds(0.1, DAY_S), "how long a GET waits for a slice the backbone must deliver", "s"
    )
    slice_waiters: int = setting(1024, values.whole(1, 1 << 20), "GETs that may wait for slices at once")
    drain_s: float = setting(
        0.8, values.seconds(most=DAY_S), "how long calls may finish when the relay stops", "s"
    )
    reconnect_after_s: float = setting(
        1.0, values.seconds(most=DAY_S), "when clients shall come back after the relay stopped", "s"
    )
    stun_port: int = setting(
        3478, values.port, "UDP port on which peers learn their public address; 0: no STUN"
    )
    stun_alt_port: int = setting(3479, values.port, "second STUN port, to tell how a NAT maps; 0: none")
    stun_addresses: str | None = setting(
        None,
        _addresses,
        "two local addresses, comma between: STUN on both tells how a NAT filters (RFC 5780)",
    )
    congestion_control: str = setting(
        "cubic",
        _congestion,
        "TCP congestion control of each socket (BBR paces small bursts); empty: leave the kernel's",
    )

    def __post_init__(self) -> None:
        for name in (f.name for f in fields(self)):
            value = getattr(self, name)
            if isinstance(value, int | float) and not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"{name}: {value} is negative, or no number")
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port: {self.port} is none")
        for name in ("stun_port", "stun_alt_port"):
            if getattr(self, name) > 65535:
                raise ConfigError(f"{name}: {getattr(self, name)} is none")
        if self.stun_alt_port and self.stun_alt_port == self.stun_port:
            raise ConfigError(f"stun_alt_port: {self.stun_alt_port} is stun_port already")
        if self.stun_addresses is not None:
            _address_pair(self.stun_addresses)
        if not 0.01 <= self.ping_interval_s <= 86_400:
            raise ConfigError(f"ping_interval_s: {self.ping_interval_s} is not between 0.01 and 86400")
        if self.backbone_token is not None and not 8 <= len(self.backbone_token) <= 200:
            raise ConfigError("backbone_token: 8 to 200 characters are needed")
        if self.public_url is not None and not self.public_url.startswith(("http://", "https://")):
            raise ConfigError(f"public_url: {self.public_url!r} does not start with http:// or https://")

    @property
    def stun_address_pair(self) -> tuple[str, ...]:
        """The two addresses of `stun_addresses`, or nothing."""
        return () if self.stun_addresses is None else _address_pair(self.stun_addresses)


def _address_pair(text: str) -> tuple[str, str]:
    try:
        first, second = (ip_address(part.strip()) for part in text.split(","))
    except ValueError as exc:
        raise ConfigError(f"stun_addresses: {text!r} is not two addresses with a comma between") from exc
    if first == second or first.version != second.version or first.is_unspecified or second.is_unspecified:
        raise ConfigError(f"stun_addresses: {text!r}: two different addresses of one family are needed")
    return str(first), str(second)


def settings() -> tuple[Field[Any], ...]:
    """Return the settings in order."""
    return fields(Config)


def from_sources(given: Mapping[str, object], environment: Mapping[str, str]) -> Config:
    """
    Put the settings together: what was `given`, then the environment, then defaults.

    Raises:
        ConfigError: an unknown key, or a value that cannot be.
    """
    readers = {each.name: each.metadata["read"] for each in settings()}
    unknown = sorted(set(given) - set(readers))
    if unknown:
        raise ConfigError(f"unknown setting: {', '.join(unknown)}")
    try:
        found, strange = of_environment(ENVIRONMENT_PREFIX, readers, environment)
    except BadValue as exc:
        raise ConfigError(str(exc)) from exc
    for each in strange:
        log.warning("%s", each)
    return Config(**(found | dict(given)))
