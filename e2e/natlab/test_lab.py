"""The laboratory itself: what it promises is so, and the doctors' commands really mend, in a box apart."""

import shlex
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

import pytest

from e2e.natlab.lab import HOSTS, RELAY, SIDES, Lab, Leg, sweep, why_not

REASON = why_not()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))
NO_DELAY = why_not(delay=True)
READ_ALL = (
    f"import socket; s = socket.create_server(({RELAY!r}, 9)).accept()[0]\n"
    "left = 500_000\n"
    "while left: left -= len(s.recv(left))\n"
    "s.send(b'.')"
)
delayed = pytest.mark.skipif(NO_DELAY is not None, reason=str(NO_DELAY))


@delayed
@pytest.mark.parametrize("rtt_ms", [30, 80, 100])
def test_round_trip_takes_what_the_legs_are_told(rtt_ms: int) -> None:
    leg = Leg(delay_ms=rtt_ms / 4)
    with Lab("open", "portrestricted", leg_a=leg, leg_b=leg) as lab:
        lab.round_trips_s("hB", SIDES["A"].address, count=3)  # who is where
        took_ms = [1e3 * took_s for took_s in lab.round_trips_s("hB", SIDES["A"].address)]
        assert rtt_ms <= min(took_ms) and median(took_ms) < rtt_ms + 3


@delayed
def test_leg_loses_its_share_each_way_and_passes_no_more_than_its_rate() -> None:
    with Lab(leg_b=Leg(loss_pct=5, rate_mbit=10)) as lab:
        came = len(lab.round_trips_s("hB", RELAY, count=300, gap_s=0.001))
        assert 0.80 < came / 300 < 0.97  # 0.95 squared; more than four standard deviations either way
        lab.start("relay", sys.executable, "-c", READ_ALL)
        while True:
            try:
                with lab.connect("hB", (RELAY, 9)) as sock:
                    start = time.monotonic()
                    sock.sendall(bytes(500_000))
                    sock.recv(1)
                    assert time.monotonic() - start > 0.35  # 0.4 s, less what the port holds at first
                    return
            except ConnectionRefusedError:
                time.sleep(0.05)  # not listening yet


def test_next_lab_takes_away_what_a_killed_one_left() -> None:
    make = "from e2e.natlab.lab import *; lab = Lab().__enter__(); lab.start('hA', 'sleep', '60')"
    kill = "import os; print(lab._prefix, flush=True); os.kill(os.getpid(), 9)"
    done = subprocess.run(
        [sys.executable, "-c", f"{make}; {kill}"], capture_output=True, text=True, check=False
    )
    prefix = done.stdout.strip()
    assert prefix.startswith("es"), done.stderr
    left = {f"{prefix}{box}" for box in HOSTS}
    sleeper = subprocess.check_output(["ip", "netns", "pids", f"{prefix}hA"], text=True).split()
    assert len(sleeper) == 1
    assert left <= set(sweep())
    assert not [box for box in left if Path("/run/netns", box).exists()]
    status = Path("/proc", sleeper[0], "stat")
    assert not status.exists() or status.read_text().rpartition(")")[2].split()[0] == "Z"


def test_cut_side_hears_nothing_and_gets_no_refusal() -> None:
    with Lab() as lab:
        lab.cut("B")
        with pytest.raises(TimeoutError):
            lab.connect("hB", (RELAY, 9), timeout_s=0.5)
        with pytest.raises(ConnectionRefusedError):
            lab.connect("hA", (RELAY, 9), timeout_s=0.5)


def test_what_the_doctor_prescribes_mends() -> None:
    """In a fresh namespace the kernel's defaults hold: slow start after idle, a small first window."""
    examine = (sys.executable, "-m", "backbone.cli", "doctor")
    with Lab() as lab:
        before = lab.run("hA", *examine)
        mends = [line.partition("mend: ")[2] for line in before.splitlines() if "mend: " in line]
        ours = ("sysctl -w net.ipv4.tcp_slow", "sysctl -w net.ipv4.tcp_rmem", "ip route change")
        wanted = [mend for mend in mends if mend.startswith(ours)]
        assert len(wanted) == 3, before
        for command in wanted:
            lab.run("hA", *shlex.split(command))
        after = lab.run("hA", *examine)
        for what in (
            "net.ipv4.tcp_slow_start_after_idle",
            "net.ipv4.tcp_rmem",
            "initcwnd of the default route",
        ):
            assert any(line.startswith("ok") and what in line for line in after.splitlines()), after
