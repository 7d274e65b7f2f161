"""
The laboratory: two hosts, each behind a NAT of a chosen kind, and a public relay host.

    hA 10.1.0.2 ─── natA 203.0.113.11 ─┐
                                       sw ─── relay 203.0.113.1, 203.0.113.2
    hB 10.2.0.2 ─── natB 203.0.113.12 ─┘

    with Lab("portrestricted", "symmetric", leg_b=Leg(delay_ms=40, loss_pct=1)) as lab:
        lab.start("relay", sys.executable, "-m", "relay.cli", "serve", …)
        lab.run("hB", "ping", "-c1", "203.0.113.1")

Each box is a network namespace; `sw` is a kernel bridge, or switch.c when a leg has delay, loss or a rate
(not every kernel has netem). Needs root, `ip` and `nft`; with delay `ethtool` too. Several labs may be up at
once; boxes and processes of one whose own process was killed go when the next one starts.
"""

import hashlib
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

NAT_TYPES = ("open", "fullcone", "addrrestricted", "portrestricted", "symmetric", "udpblock")
HOSTS = ("hA", "hB", "natA", "natB", "relay", "sw")
RELAY, RELAY_2 = "203.0.113.1", "203.0.113.2"  # RFC 5737: TEST-NET-3
ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Side:
    """One side of the lab."""

    nat: str
    host: str
    wan: str
    lan: str  # the NAT's own address there
    address: str  # the host's

    @property
    def network(self) -> str:
        return self.lan.rpartition(".")[0] + ".0/24"


SIDES = {
    "A": Side("natA", "hA", "203.0.113.11", "10.1.0.1", "10.1.0.2"),
    "B": Side("natB", "hB", "203.0.113.12", "10.2.0.1", "10.2.0.2"),
}


@dataclass(frozen=True, slots=True)
class Leg:
    """A box's line to the switch; delay one way, loss and rate each way."""

    delay_ms: float = 0.0
    loss_pct: float = 0.0
    rate_mbit: float = 0.0

    @property
    def plain(self) -> bool:
        return not (self.delay_ms or self.loss_pct or self.rate_mbit)


# Nothing that comes from outside may make an entry in the NAT box's own connection tracking: the host's later
# packet would clash with it and get another port, and "port-restricted" would silently turn symmetric.
_TABLES = """
flush ruleset
table ip nat {
  map learned { type inet_service : ipv4_addr . inet_service; flags dynamic, timeout;
    timeout 60s; size 65535; }
  set seen { type ipv4_addr . inet_service; flags dynamic, timeout; timeout 60s; size 65535; }
  chain pre { type nat hook prerouting priority dstnat; policy accept; }
  chain post { type nat hook postrouting priority srcnat; policy accept; }
}
table ip filt {
  chain in { type filter hook input priority 0; policy accept;
    iifname "wan" udp dport 1-65535 drop; iifname "wan" tcp flags syn drop; }
  chain passing { type filter hook forward priority 0; policy drop;
    ct state established,related accept; iifname "lan" accept; ct status dnat accept; }
}
"""
_LEARN = "oifname wan meta l4proto udp update @learned { udp sport : ip saddr . udp sport }"
_MASQUERADE = "add rule ip nat post oifname wan masquerade"
_RULES: dict[str, tuple[str, ...]] = {
    "open": ("flush chain ip filt passing", "add rule ip filt passing accept"),
    "portrestricted": (_MASQUERADE,),  # keeps the port where it can
    "symmetric": (_MASQUERADE + " fully-random",),  # a new port for each remote address and port
    "fullcone": (
        f"add rule ip nat post {_LEARN} masquerade",
        _MASQUERADE,
        "add rule ip nat pre iifname wan meta l4proto udp dnat ip to udp dport map @learned",
    ),
    "addrrestricted": (
        f"add rule ip nat post {_LEARN} update @seen {{ ip daddr . udp sport }} masquerade",
        _MASQUERADE,
        "add rule ip nat pre iifname wan ip saddr . udp dport @seen dnat ip to udp dport map @learned",
    ),
    "udpblock": ("insert rule ip filt passing meta l4proto udp drop", _MASQUERADE),
}


def why_not(delay: bool = False) -> str | None:
    """Say why no lab can be made here; None: it can."""
    if sys.platform != "linux":
        return "network namespaces are Linux's"
    if os.geteuid() != 0:
        return "network namespaces need root"
    for tool, package in (("ip", "iproute2"), ("nft", "nftables"), *((("ethtool",) * 2,) if delay else ())):
        if shutil.which(tool) is None:
            return f"{tool} is missing (apt-get install {package})"
    probe = f"es-probe-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True, check=False)
    if made.returncode:
        return f"no network namespaces here: {made.stderr.strip()}"
    try:
        done = subprocess.run(
            ["ip", "netns", "exec", probe, "nft", "-f", "-"],
            input=_TABLES, capture_output=True, text=True, check=False,
        )  # fmt: skip
        return f"nftables does not work here: {done.stderr.strip()}" if done.returncode else None
    finally:
        subprocess.run(["ip", "netns", "del", probe], check=False)


def sweep() -> list[str]:
    """Take away the boxes of labs whose process is gone, and what still runs in them; gives their names."""
    gone = []
    for name in sorted(path.name for path in Path("/run/netns").glob("es*-*")):
        found = re.fullmatch(r"es(?:-probe-)?(\d+)(?:-.*)?", name)
        if found is None or Path("/proc", found[1]).exists():
            continue
        pids = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False)
        for pid in pids.stdout.split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        _ip("netns", "del", name, check=False)
        gone.append(name)
    return gone


def built_switch() -> Path:
    """Return the switch, compiled when its source changed."""
    source = Path(__file__).with_name("switch.c")
    built = source.parent / "_built" / f"switch-{hashlib.sha256(source.read_bytes()).hexdigest()[:16]}"
    if not built.exists():
        built.parent.mkdir(exist_ok=True)
        fresh = built.with_suffix(f".{os.getpid()}")
        compiler = (sys.executable, "-m", "ziglang", "cc", "-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror")
        subprocess.run([*compiler, str(source), "-o", str(fresh)], check=True)
        os.replace(fresh, built)
    return built


class Lab:
    """A context manager: entered, the boxes are up; left, processes are ended and boxes gone."""

    _number = 0

    def __init__(
        self,
        nat_a: str = "open",
        nat_b: str = "open",
        *,
        leg_a: Leg = Leg(),  # noqa: B008 (frozen)
        leg_b: Leg = Leg(),  # noqa: B008
        leg_relay: Leg = Leg(),  # noqa: B008
    ) -> None:
        Lab._number += 1
        self._prefix = f"es{os.getpid()}-{Lab._number}-"
        self._temporary = f"es{os.getpid() % 100_000}t"  # veth names have at most 15 characters
        self._nats = {"A": nat_a, "B": nat_b}
        self._legs = {"natA": leg_a, "natB": leg_b, "relay": leg_relay}
        self._processes: list[subprocess.Popen[str]] = []
        self._stack = ExitStack()

    # --- life

    def __enter__(self) -> Self:
        sweep()
        with ExitStack() as undo:
            for name in HOSTS:
                _ip("netns", "add", self._prefix + name)
                undo.callback(_ip, "netns", "del", self._prefix + name, check=False)
                self.run(name, "ip", "link", "set", "lo", "up")
                self.sysctl(name, "net.ipv6.conf.all.disable_ipv6", 1)
            undo.callback(self._end_processes)
            self._wire()
            for side, kind in self._nats.items():
                self.set_nat(side, kind)
            self._stack = undo.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def _end_processes(self) -> None:
        for process in reversed(self._processes):
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for process in reversed(self._processes):
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            for pipe in (process.stdin, process.stdout, process.stderr):
                if pipe is not None:
                    pipe.close()

    # --- what tests do with it

    def command(self, host: str, *argv: str) -> list[str]:
        """Return the command line that runs `argv` in a box."""
        return ["ip", "netns", "exec", self._prefix + host, *argv]

    def run(self, host: str, *argv: str, input: str | None = None, timeout_s: float = 30.0) -> str:
        """Run to its end and return what it printed; raises CalledProcessError if it fails."""
        try:
            return subprocess.run(
                self.command(host, *argv), input=input, capture_output=True, text=True, check=True,
                timeout=timeout_s, cwd=ROOT,
            ).stdout  # fmt: skip
        except subprocess.CalledProcessError as exc:
            exc.add_note(exc.stderr)
            raise

    def start(
        self, host: str, *argv: str, log: Path | None = None, environment: dict[str, str] | None = None
    ) -> subprocess.Popen[str]:
        """Start a process that ends with the lab; its output goes to `log`."""
        with open(log or os.devnull, "w") as out:
            process = subprocess.Popen(
                self.command(host, *argv), stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
                text=True, cwd=ROOT, env=os.environ | (environment or {}),
            )  # fmt: skip
        self._processes.append(process)
        return process

    def connect(self, host: str, address: tuple[str, int], timeout_s: float = 5.0) -> socket.socket:
        """Return a TCP socket of this process that lives in a box."""
        return self._inside(host, lambda: socket.create_connection(address, timeout_s))

    def round_trips_s(self, host: str, address: str, count: int = 40, gap_s: float = 0.01) -> list[float]:
        """Ping from a box: what the lines take, no program at the far end; lost ones are left out."""
        with self._inside(
            host, lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP)
        ) as sock:
            sock.connect((address, 0))
            sock.settimeout(1.0)
            sent: dict[int, float] = {}
            took: list[float] = []

            def read() -> None:
                with suppress(TimeoutError):
                    while len(took) < count:
                        packet = sock.recv(2048)
                        at = time.monotonic()
                        kind, _, _, number, sequence = struct.unpack_from(
                            "!BBHHH", packet, (packet[0] & 15) * 4
                        )
                        if kind == 0 and number == os.getpid() & 0xFFFF and sequence in sent:
                            took.append(at - sent.pop(sequence))

            reader = threading.Thread(target=read)
            reader.start()
            for sequence in range(count):
                head = struct.pack("!BBHHH", 8, 0, 0, os.getpid() & 0xFFFF, sequence)
                total = sum(struct.unpack("!4H", head))
                total = (total & 0xFFFF) + (total >> 16)
                echo = head[:2] + struct.pack("!H", ~((total & 0xFFFF) + (total >> 16)) & 0xFFFF) + head[4:]
                sent[sequence] = time.monotonic()
                sock.send(echo)
                time.sleep(gap_s)
            reader.join()
            return took

    def _inside[T](self, host: str, make: Callable[[], T]) -> T:
        """Make something in a box: a thread goes there."""
        made: list[T | OSError] = []

        def go() -> None:
            try:
                with open(f"/run/netns/{self._prefix + host}") as place:
                    os.setns(place.fileno(), os.CLONE_NEWNET)
                made.append(make())
            except OSError as exc:
                made.append(exc)

        thread = threading.Thread(target=go)
        thread.start()
        thread.join()
        if isinstance(made[0], OSError):
            raise made[0]
        return made[0]

    def sysctl(self, host: str, name: str, value: int | str) -> None:
        self.run(host, "sysctl", "-qw", f"{name}={value}")

    def set_nat(self, side: str, kind: str) -> None:
        """Make the NAT of side "A" or "B" one of NAT_TYPES; connections that are up stay."""
        if kind not in NAT_TYPES:
            raise ValueError(f"{kind!r} is none of {', '.join(NAT_TYPES)}")
        here = SIDES[side]
        self.run(here.nat, "nft", "-f", "-", input=_TABLES + "\n".join(_RULES[kind]) + "\n")
        other = SIDES["B" if side == "A" else "A"]
        for box in ("relay", other.nat):  # an open host's own address is known outside
            if kind == "open":
                self.run(box, "ip", "route", "replace", here.network, "via", here.wan)
            elif self._nats[side] == "open":
                subprocess.run(
                    self.command(box, "ip", "route", "del", here.network), capture_output=True, check=False
                )
        self._nats[side] = kind

    def cut(self, side: str) -> None:
        """Drop everything that side sends and receives, without a word to either end."""
        self.run(SIDES[side].nat, "nft", "insert rule ip filt passing drop")

    # --- wiring

    def _wire(self) -> None:
        delayed = any(not leg.plain for leg in self._legs.values())
        if not delayed:
            self.run("sw", "ip", "link", "add", "br0", "type", "bridge")
            self.run("sw", "ip", "link", "set", "br0", "up")
        for box in self._legs:
            port = f"p_{box}"
            self._cable(box, "wan", "sw", port)
            self.run("sw", "ip", "link", "set", port, "up")
            if not delayed:
                self.run("sw", "ip", "link", "set", port, "master", "br0")
        self._address("relay", "wan", RELAY, RELAY_2)
        for here in SIDES.values():
            self._address(here.nat, "wan", here.wan)
            self._cable(here.host, "eth0", here.nat, "lan")
            self._address(here.host, "eth0", here.address)
            self._address(here.nat, "lan", here.lan)
            self.run(here.host, "ip", "route", "add", "default", "via", here.lan)
            self.run(here.nat, "ip", "route", "add", "default", "via", RELAY)
            self.sysctl(here.nat, "net.ipv4.ip_forward", 1)
        if delayed:
            for box in ("natA", "natB", "hA", "hB", "relay", "sw"):
                for name in self.run(box, "ls", "/sys/class/net").split():
                    if name != "lo":  # the switch needs whole frames of at most the MTU, with checksums
                        self.run(
                            box, "ethtool", "-K", name, "tx", "off", "tso", "off", "gso", "off", "gro", "off"
                        )
            self._start_switch()

    def _cable(self, one: str, one_name: str, other: str, other_name: str) -> None:
        a, b = self._temporary + "0", self._temporary + "1"
        _ip("link", "add", a, "type", "veth", "peer", "name", b)
        _ip("link", "set", a, "netns", self._prefix + one, "name", one_name)
        _ip("link", "set", b, "netns", self._prefix + other, "name", other_name)

    def _address(self, box: str, name: str, *addresses: str) -> None:
        for address in addresses:
            self.run(box, "ip", "addr", "add", f"{address}/24", "dev", name)
        self.run(box, "ip", "link", "set", name, "up")

    def _start_switch(self) -> None:
        ports = [
            f"p_{box}:{leg.delay_ms:g}:{leg.loss_pct:g}:{leg.rate_mbit:g}" for box, leg in self._legs.items()
        ]
        process = subprocess.Popen(
            self.command("sw", str(built_switch()), *ports),
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self._processes.append(process)
        assert process.stdout is not None
        if not process.stdout.readline():
            raise RuntimeError("the delay switch did not start")


def _ip(*argv: str, check: bool = True) -> None:
    done: subprocess.CompletedProcess[str] = subprocess.run(
        ["ip", *argv], capture_output=True, text=True, check=False
    )
    if check and done.returncode:
        raise RuntimeError(f"ip {' '.join(argv)}: {done.stderr.strip()}")
