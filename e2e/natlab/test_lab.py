"""The laboratory itself: what it promises is so, and the doctors' commands really mend, in a box apart."""

import shlex
import sys
import time

import pytest

from e2e.natlab.lab import RELAY, Lab, Leg, why_not

REASON = why_not()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))
NO_DELAY = why_not(delay=True)
LISTEN = f"import socket, time; s = socket.create_server(({RELAY!r}, 9)); print(flush=True); time.sleep(60)"


@pytest.mark.skipif(NO_DELAY is not None, reason=str(NO_DELAY))
def test_round_trip_takes_the_delay_of_both_legs_twice() -> None:
    with Lab("open", "portrestricted", leg_b=Leg(delay_ms=30), leg_relay=Leg(delay_ms=20)) as lab:
        lab.start("relay", sys.executable, "-c", LISTEN)
        took_s = []
        give_up = time.monotonic() + 30
        while len(took_s) < 5:
            assert time.monotonic() < give_up
            start = time.monotonic()
            try:
                lab.connect("hB", (RELAY, 9)).close()
            except OSError:
                continue  # not listening yet
            took_s.append(time.monotonic() - start)
        assert 0.1 <= min(took_s) < 0.15


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
        wanted = [
            mend for mend in mends if mend.startswith(("sysctl -w net.ipv4.tcp_slow", "ip route change"))
        ]
        assert len(wanted) == 2, before
        for command in wanted:
            lab.run("hA", *shlex.split(command))
        after = lab.run("hA", *examine)
        for what in ("net.ipv4.tcp_slow_start_after_idle", "initcwnd of the default route"):
            assert any(line.startswith("ok") and what in line for line in after.splitlines()), after
