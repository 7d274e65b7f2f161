"""
What of this machine slows or breaks a backbone, and the command that mends it: `backbone doctor`.

As in relay/doctor.py: pure checks over facts, and a reader that collects the facts and changes nothing.
"""

import asyncio
import json
import platform
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import TextIO
from urllib.parse import urlsplit

from backbone.engine import build as device
from backbone.experts.native import BUILT, NATIVE_BUILDS, KernelFault, NativeKernel
from relay.doctor import (
    Finding,
    Network,
    State,
    check_modules,
    check_network,
    has_module,
    read_network,
    report,
)
from relay.nat.candidates import NatClass
from relay.nat.classify import classify

FILES_NEEDED = 1024
CLOCK_TOLERANCE_S = 5.0  # an HTTP date has seconds; certificates and tokens have minutes
ANSWER_TIMEOUT_S = 5.0
MODEL_SHARE = 0.25  # of the file: what is not routed experts, and the caches; a guess for a first look
REQUIRED = ("xllamacpp", "gguf", "httpx", "uvicorn", "websockets")
WEBRTC = "aiolibdatachannel"


@dataclass(frozen=True, slots=True)
class RelaySeen:
    """
    The relay as seen from here. version: None if it does not answer, then `why` says why.

    stun_ports: as its status says; empty: it has no STUN. clock_off_s: its clock minus ours.
    """

    url: str
    version: str | None
    why: str = ""
    stun_ports: tuple[int, ...] = ()
    nat: NatClass | None = None
    clock_off_s: float | None = None


@dataclass(frozen=True, slots=True)
class BackboneFacts:
    """
    Everything `backbone doctor` looks at.

    kernel: the build that runs here, or why none does (kernel_fault). device: the ggml device is compiled.
    model: path and size of the GGUF, size None if it is not there.
    """

    network: Network
    machine: str = "x86_64"
    kernel: str | None = None
    kernel_fault: str = ""
    kernels_built: tuple[str, ...] = ()
    device: bool = True
    modules: Mapping[str, bool] = field(default_factory=dict)
    relay: RelaySeen | None = None
    model: tuple[str, int | None] | None = None


def check_backbone(facts: BackboneFacts) -> list[Finding]:
    """All of `backbone doctor`'s findings."""
    found = check_network(facts.network, FILES_NEEDED)
    found.append(_kernel(facts))
    found.append(
        Finding(State.OK, "ggml device", "compiled")
        if facts.device
        else Finding(State.BROKEN, "ggml device", "not compiled", "make setup")
    )
    found += check_modules({name: there for name, there in facts.modules.items() if name != WEBRTC})
    if not facts.modules.get(WEBRTC, True):
        found.append(
            Finding(State.SLOW, "WebRTC", f"{WEBRTC} is missing: no punched paths", f"pip install {WEBRTC}")
        )
    if facts.model is not None:
        found.append(_model(*facts.model, facts.network.free_bytes))
    if facts.relay is not None:
        found += _relay(facts.relay)
    return found


def _kernel(facts: BackboneFacts) -> Finding:
    if facts.kernel is None:
        return Finding(State.BROKEN, "expert kernel", facts.kernel_fault, "make setup")
    best = NATIVE_BUILDS[-1]
    if facts.kernel == f"native-{best}":
        return Finding(State.OK, "expert kernel", f"{facts.kernel}, passes its known answers")
    if best not in facts.kernels_built:
        return Finding(State.SLOW, "expert kernel", f"{facts.kernel}; {best} is not built", "make setup")
    return Finding(
        State.SLOW,
        "expert kernel",
        f"{facts.kernel}: this processor ({facts.machine}) has no {best}",
        "take a processor that has it; the answers are the same, only later",
    )


def _model(path: str, size_bytes: int | None, free_bytes: int | None) -> Finding:
    if size_bytes is None:
        return Finding(State.BROKEN, "model", f"{path} is not there", "give --model the path of a GGUF file")
    said = f"{size_bytes / 1e9:.1f} GB"
    if free_bytes is not None and free_bytes < size_bytes * MODEL_SHARE:
        short = f"{said}, {free_bytes / 1e9:.1f} GB of memory available; what is not experts may not fit"
        return Finding(State.SLOW, "model", short, "take a smaller quantisation, or a shorter --context")
    return Finding(State.OK, "model", said)


def _relay(relay: RelaySeen) -> list[Finding]:
    if relay.version is None:
        address = urlsplit(relay.url)
        return [
            Finding(
                State.BROKEN, "relay", f"{relay.url}: {relay.why}",
                f"curl -v {relay.url}/healthz   (is `relay serve` up, is {address.netloc} the right place?)",
            )
        ]  # fmt: skip
    found = [Finding(State.OK, "relay", f"{relay.version} at {relay.url}")]
    if relay.clock_off_s is not None and abs(relay.clock_off_s) > CLOCK_TOLERANCE_S:
        off = (
            f"{abs(relay.clock_off_s):.0f} s {'behind' if relay.clock_off_s > 0 else 'ahead of'} the relay's"
        )
        found.append(Finding(State.SLOW, "clock", off, "timedatectl set-ntp true   (on both machines)"))
    if not relay.stun_ports:
        found.append(
            Finding(
                State.SLOW, "STUN", "the relay has none: no punched paths", "relay doctor   (on the relay)"
            )
        )
    elif relay.nat is not None:
        found.append(
            Finding(State.OK, "way to the relay", relay.nat.words)
            if relay.nat.udp
            else Finding(
                State.SLOW,
                "way to the relay",
                f"UDP {relay.stun_ports[0]} gets no answer: calls go through the relay",
                f"let UDP out to the relay, and in there: nft add rule inet filter input udp dport "
                f"{relay.stun_ports[0]} accept",
            )
        )
    return found


# --- facts, read from this machine


def read_facts(relay_url: str | None, model: Path | None) -> BackboneFacts:
    """Look at this machine, and at the relay if one is named."""
    kernel, fault = None, ""
    try:
        native = NativeKernel()
        native.known_answer_test(every=True)
        kernel = native.build
    except KernelFault as exc:
        fault = str(exc)
    return BackboneFacts(
        network=read_network(),
        machine=platform.machine(),
        kernel=kernel,
        kernel_fault=fault,
        kernels_built=tuple(name for name in NATIVE_BUILDS if list(BUILT.glob(f"libexpert-{name}.*"))),
        device=(device.BUILT / device.LIBRARY).exists(),
        modules={name: has_module(name) for name in (*REQUIRED, WEBRTC)},
        relay=None if relay_url is None else see_relay(relay_url),
        model=None if model is None else (str(model), model.stat().st_size if model.is_file() else None),
    )


def see_relay(url: str) -> RelaySeen:
    """Ask a relay who it is and what time it has, and its STUN what is between."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"{url.rstrip('/')}/status.json", timeout=ANSWER_TIMEOUT_S) as answer:
            date, status = answer.headers.get("date"), json.load(answer)
        version, stun = str(status["relay"]), status.get("stun") or {}
        ports = tuple(int(port) for port in stun.get("ports", ()))
    except (OSError, ValueError, KeyError, TypeError) as exc:
        return RelaySeen(url, None, str(getattr(exc, "reason", exc)) or type(exc).__name__)
    off_s = None
    if date is not None:
        off_s = (parsedate_to_datetime(date) - datetime.now(UTC)).total_seconds()
    nat = None
    if ports:
        host = urlsplit(url).hostname or ""
        nat = asyncio.run(classify(host, ports[0], ports[1] if len(ports) > 1 else None))
    return RelaySeen(url, version, "", ports, nat, off_s)


type Reader = Callable[[str | None, Path | None], BackboneFacts]


def run(relay_url: str | None, model: Path | None, out: TextIO, read: Reader = read_facts) -> int:
    """Examine this machine and print what was found; returns the exit status."""
    return report(check_backbone(read(relay_url, model)), out)
