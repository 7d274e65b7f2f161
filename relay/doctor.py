"""
What of this machine slows or breaks a relay, and the command that mends it: `relay doctor`.

Each check is a pure function from facts to one Finding; `read_facts` collects the facts and changes nothing.
"broken" is what keeps a relay from doing its work; "slow" is what costs latency or capacity; the exit status
is 1 only for the first.
"""

import asyncio
import ctypes
import errno
import importlib.util
import json
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import TextIO

from relay import assets
from relay.config import Config
from relay.nat.candidates import NatClass
from relay.nat.classify import classify

INITIAL_WINDOW = 80  # segments: 100 KB in one flight instead of three on a new connection
RECEIVE_BYTES = 1 << 20  # half of it is offered to the sender; with Linux' 128 KB, 64 KB in a first flight
BACKLOG = 4096
SPARE_FILES = 256  # besides one per session: log, cache, libraries
MIN_FREE_BYTES = 512 << 20
ANSWER_TIMEOUT_S = 3.0


class State(Enum):
    OK = "ok"
    SLOW = "slow"
    BROKEN = "broken"


@dataclass(frozen=True, slots=True)
class Finding:
    """One check's outcome; `mend` is a command, or else a sentence."""

    state: State
    what: str
    found: str
    mend: str = ""


@dataclass(frozen=True, slots=True)
class Network:
    """
    What the kernel does to TCP here. Empty strings and None: could not be read.

    congestion: what a new socket has after asking for `wanted_congestion`. route: the default route's line.
    """

    wanted_congestion: str = "cubic"
    congestion: str = ""
    available_congestion: str = ""
    sysctls: Mapping[str, str] = field(default_factory=dict)
    route: str = ""
    open_files: int | None = None
    open_files_hard: int | None = None
    clock_synchronised: bool | None = None
    free_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class RelayFacts:
    """
    Everything `relay doctor` looks at.

    busy: ports of ours that another program has, as "tcp 8765" -> why. running: the version of a relay that
    answers on our port. stun: what this machine's STUN said to us; None when no relay runs. missing: files of
    the page and the kernels that are not there.
    """

    network: Network
    busy: Mapping[str, str] = field(default_factory=dict)
    running: str | None = None
    stun: NatClass | None = None
    missing: Sequence[str] = ()
    modules: Mapping[str, bool] = field(default_factory=dict)


# --- checks, pure


def check_network(network: Network, files_needed: int) -> list[Finding]:
    """What matters to every machine that sends messages over TCP."""
    found = [
        _congestion(network),
        _sysctl(
            network, "net.ipv4.tcp_slow_start_after_idle", 0, "after a pause 100 KB take six times as long"
        ),
        _initial_window(network),
        _receive_buffer(network),
        _files(network, files_needed),
    ]
    if network.clock_synchronised is not None:
        found.append(
            Finding(State.OK, "clock", "synchronised")
            if network.clock_synchronised
            else Finding(State.SLOW, "clock", "not synchronised", "timedatectl set-ntp true")
        )
    if network.free_bytes is not None:
        enough = network.free_bytes >= MIN_FREE_BYTES
        free = f"{network.free_bytes / 1e9:.1f} GB available"
        found.append(
            Finding(State.OK, "memory", free)
            if enough
            else Finding(State.SLOW, "memory", free, "stop other programs, or take a larger machine")
        )
    return [each for each in found if each is not None]


def _congestion(network: Network) -> Finding:
    wanted = network.wanted_congestion
    if not wanted or not network.congestion:
        return Finding(
            State.OK, "congestion control", network.congestion or "not to be chosen on this system"
        )
    if network.congestion == wanted:
        return Finding(State.OK, "congestion control", f"{wanted}, per socket")
    if wanted in network.available_congestion.split():
        allowed = network.sysctls.get("net.ipv4.tcp_allowed_congestion_control", "reno")
        mend = f'sysctl -w net.ipv4.tcp_allowed_congestion_control="{allowed} {wanted}"'
    else:
        mend = f"modprobe tcp_{wanted}"
    said = f"{network.congestion}; {wanted} is refused, and small messages are paced"
    return Finding(State.SLOW, "congestion control", said, mend)


def _sysctl(network: Network, name: str, wanted: int, cost: str, at_least: bool = False) -> Finding | None:
    text = network.sysctls.get(name)
    if text is None:
        return None
    value = int(text)
    if value == wanted or (at_least and value >= wanted):
        return Finding(State.OK, name, text)
    return Finding(State.SLOW, name, f"{value}: {cost}", f"sysctl -w {name}={wanted}")


def _initial_window(network: Network) -> Finding | None:
    if not network.route:
        return None
    words = network.route.split()
    windows = {
        key: int(value) for key, value in zip(words, words[1:], strict=False) if key.startswith("init")
    }
    if windows.get("initcwnd", 10) >= INITIAL_WINDOW:
        return Finding(State.OK, "initcwnd of the default route", str(windows["initcwnd"]))
    plain = " ".join(_without(words, ("initcwnd", "initrwnd")))
    return Finding(
        State.SLOW,
        "initcwnd of the default route",
        f"{windows.get('initcwnd', 10)}: the first 100 KB of a connection take three round trips",
        f"ip route change {plain} initcwnd {INITIAL_WINDOW} initrwnd {INITIAL_WINDOW}",
    )


def _receive_buffer(network: Network) -> Finding | None:
    name = "net.ipv4.tcp_rmem"
    text = network.sysctls.get(name)
    if text is None:
        return None
    least, first, most = map(int, text.split())
    if first >= RECEIVE_BYTES:
        return Finding(State.OK, name, " ".join(text.split()))
    return Finding(
        State.SLOW,
        name,
        f"{first} at first: a new connection offers half of it, 100 KB take a round trip more",
        f'sysctl -w {name}="{least} {RECEIVE_BYTES} {max(most, RECEIVE_BYTES)}"',
    )


def _without(words: Sequence[str], keys: Sequence[str]) -> list[str]:
    """Take keys and the value after each off a list of words."""
    return [
        word for at, word in enumerate(words) if word not in keys and (at == 0 or words[at - 1] not in keys)
    ]


def _files(network: Network, needed: int) -> Finding | None:
    if network.open_files is None:
        return None
    if network.open_files >= needed:
        return Finding(State.OK, "open files", str(network.open_files))
    hard = network.open_files_hard
    mend = f"ulimit -n {needed}"
    if hard is not None and hard < needed:
        mend = f"ulimit -Hn {needed} && ulimit -n {needed}   (as root; in a unit: LimitNOFILE={needed})"
    return Finding(State.BROKEN, "open files", f"{network.open_files}, {needed} are needed", mend)


def check_relay(facts: RelayFacts, config: Config) -> list[Finding]:
    """All of `relay doctor`'s findings."""
    network = facts.network
    found = check_network(network, config.max_sessions + SPARE_FILES)
    for name in ("net.core.somaxconn", "net.ipv4.tcp_max_syn_backlog"):
        each = _sysctl(network, name, BACKLOG, "a swarm that reconnects at once waits for SYN retries", True)
        if each is not None:
            found.append(each)
    found += _ports(facts, config)
    next_port = config.stun_port + 1
    if config.stun_port and config.stun_alt_port != next_port and config.stun_addresses is None:
        said = "none" if not config.stun_alt_port else f"{config.stun_alt_port}, peers ask {next_port}"
        mend = f"relay serve --stun-alt-port {next_port}"
        found.append(
            Finding(
                State.SLOW,
                "second STUN port",
                f"{said}: nobody learns how a NAT maps, all punches are tried",
                mend,
            )
        )
    if facts.missing:
        found.append(
            Finding(State.BROKEN, "page and kernels", f"missing: {', '.join(facts.missing)}", "make setup")
        )
    else:
        found.append(Finding(State.OK, "page and kernels", "present"))
    return found + check_modules(facts.modules)


def _ports(facts: RelayFacts, config: Config) -> list[Finding]:
    if facts.running is not None:
        found = [Finding(State.OK, f"tcp {config.port}", f"a relay {facts.running} answers here")]
        if config.stun_port and facts.stun is not None:
            found.append(
                Finding(State.OK, f"udp {config.stun_port}", "STUN answers")
                if facts.stun.udp
                else Finding(
                    State.SLOW,
                    f"udp {config.stun_port}",
                    "STUN does not answer: no direct paths",
                    f"nft add rule inet filter input udp dport {config.stun_port} accept   "
                    "(and look at the relay's first lines of log)",
                )
            )
        return found
    found = []
    for name in ports_of(config):
        why = facts.busy.get(name)
        if why is None:
            found.append(Finding(State.OK, name, "free"))
        else:
            kind, _, port = name.partition(" ")
            state = State.BROKEN if kind == "tcp" else State.SLOW
            found.append(Finding(state, name, why, f"ss -l{kind[0]}np 'sport = {port}'   (who has it)"))
    if not config.stun_port:
        found.append(
            Finding(State.SLOW, "STUN", "switched off: no direct paths", "relay serve --stun-port 3478")
        )
    return found


def ports_of(config: Config) -> list[str]:
    """The ports a relay with these settings takes."""
    ports = [f"tcp {config.port}"] if config.port else []
    if config.stun_port:
        ports += [f"udp {port}" for port in (config.stun_port, config.stun_alt_port) if port]
    return ports


def check_modules(modules: Mapping[str, bool]) -> list[Finding]:
    """Libraries that must be importable."""
    gone = [name for name, there in modules.items() if not there]
    if gone:
        return [Finding(State.BROKEN, "libraries", f"missing: {', '.join(gone)}", "pip install expertswarm")]
    return [Finding(State.OK, "libraries", ", ".join(modules))] if modules else []


def report(found: Sequence[Finding], out: TextIO) -> int:
    """Print the findings, worst last; return the exit status."""
    width = max(len(each.what) for each in found)
    order = list(State)
    for each in sorted(found, key=lambda finding: order.index(finding.state)):
        print(f"{each.state.value:<7} {each.what:<{width}}  {each.found}", file=out)
        if each.mend:
            print(f"{'':<7} {'':<{width}}    mend: {each.mend}", file=out)
    return 1 if any(each.state is State.BROKEN for each in found) else 0


# --- facts, read from this machine


def read_network(wanted_congestion: str = "cubic") -> Network:
    """Look at this machine; what cannot be read here is left out."""
    names = (
        "net.ipv4.tcp_slow_start_after_idle",
        "net.ipv4.tcp_allowed_congestion_control",
        "net.ipv4.tcp_rmem",
        "net.core.somaxconn",
        "net.ipv4.tcp_max_syn_backlog",
    )
    sysctls = {name: text for name in names if (text := _read("/proc/sys/" + name.replace(".", "/")))}
    soft, hard = _open_files()
    return Network(
        wanted_congestion=wanted_congestion,
        congestion=_congestion_of_a_socket(wanted_congestion),
        available_congestion=_read("/proc/sys/net/ipv4/tcp_available_congestion_control"),
        sysctls=sysctls,
        route=_default_route(),
        open_files=soft,
        open_files_hard=hard,
        clock_synchronised=_clock_synchronised(),
        free_bytes=_free_bytes(),
    )


def read_facts(config: Config) -> RelayFacts:
    """Look at this machine with the eyes of a relay that has these settings."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(config.host, config.host)
    running = _running_version(host, config.port)
    stun = None
    if running is not None and config.stun_port:
        stun_host = config.stun_address_pair[0] if config.stun_addresses else host
        stun = asyncio.run(classify(stun_host, config.stun_port, config.stun_alt_port or None))
    return RelayFacts(
        network=read_network(config.congestion_control),
        busy={} if running is not None else _busy(config),
        running=running,
        stun=stun,
        missing=missing_files(),
        modules={name: has_module(name) for name in ("uvicorn", "websockets", "starlette", "segno")},
    )


def missing_files() -> list[str]:
    """Files that the page needs and that are not where the relay looks for them."""
    kernels = ("plain", "relaxed16", "relaxed32")
    missing = [f"kernel-{k}.wasm" for k in kernels if not (assets.BUILT / f"kernel-{k}.wasm").exists()]
    page = (assets.BUILT / "page" / "index.html", assets.CHECKOUT_PAGE / "index.html")
    return missing + ([] if any(path.exists() for path in page) else ["index.html"])


def has_module(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def _congestion_of_a_socket(wanted: str) -> str:
    if not hasattr(socket, "TCP_CONGESTION"):
        return ""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        if wanted:
            try:
                probe.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, wanted.encode())
            except OSError:
                pass  # what it has instead is the finding
        return probe.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0").decode()


def _default_route() -> str:
    try:
        done = subprocess.run(
            ["ip", "route", "show", "default"], capture_output=True, text=True, timeout=5, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.splitlines()[0].strip() if done.stdout.strip() else ""


def _open_files() -> tuple[int | None, int | None]:
    if sys.platform == "win32":
        return None, None
    import resource  # does not exist on Windows

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    endless = resource.RLIM_INFINITY
    return tuple(1 << 30 if limit == endless else limit for limit in (soft, hard))  # type: ignore[return-value]


def _clock_synchronised() -> bool | None:
    """Ask the kernel whether something keeps its clock right: adjtimex(2) returns TIME_ERROR (5) if not."""
    if sys.platform != "linux":
        return None
    try:
        state = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.create_string_buffer(512))
    except (OSError, AttributeError):
        return None
    return None if state < 0 else state != 5


def _free_bytes() -> int | None:
    for line in _read("/proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _running_version(host: str, port: int) -> str | None:
    """The version of the relay that answers there; None if nothing or something else does."""
    if not port:
        return None
    shown = f"[{host}]" if ":" in host else host
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"http://{shown}:{port}/healthz", timeout=ANSWER_TIMEOUT_S) as answer:
            return str(json.load(answer)["version"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _busy(config: Config) -> dict[str, str]:
    busy = {}
    for name in ports_of(config):
        kind, _, port = name.partition(" ")
        hosts = config.stun_address_pair if kind == "udp" and config.stun_addresses else (config.host,)
        for host in hosts:
            why = _why_not_bound(kind, host, int(port))
            if why:
                busy[name] = why
    return busy


def _why_not_bound(kind: str, host: str, port: int) -> str:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM if kind == "tcp" else socket.SOCK_DGRAM) as probe:
        if kind == "tcp":
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as exc:
            taken = exc.errno == errno.EADDRINUSE
            return "another program has it" if taken else f"cannot be had: {exc.strerror or exc}"
    return ""


type Reader = Callable[[Config], RelayFacts]


def run(config: Config, out: TextIO, read: Reader = read_facts) -> int:
    """Examine this machine and print what was found; returns the exit status."""
    return report(check_relay(read(config), config), out)
