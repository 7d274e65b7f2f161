"""`relay doctor`: from facts to findings, and the sockets for which it vouches."""

import io
import socket
from dataclasses import replace

import pytest

from relay import cli, doctor
from relay.config import Config
from relay.doctor import Finding, Network, RelayFacts, State, check_network, check_relay
from relay.nat.candidates import NO_UDP, Behaviour, NatClass
from relay.server import listen

TUNED = Network(
    congestion="cubic",
    available_congestion="reno bbr cubic",
    sysctls={
        "net.ipv4.tcp_slow_start_after_idle": "0",
        "net.ipv4.tcp_allowed_congestion_control": "reno bbr",
        "net.ipv4.tcp_rmem": "4096\t1048576\t33554432",
        "net.core.somaxconn": "4096",
        "net.ipv4.tcp_max_syn_backlog": "8192",
    },
    route="default via 192.0.2.1 dev eth0 initcwnd 80 initrwnd 80",
    open_files=65_536,
    open_files_hard=65_536,
    clock_synchronised=True,
    free_bytes=4 << 30,
)
CONFIG = Config()
STUN_OK = NatClass(True, False, Behaviour.ENDPOINT_INDEPENDENT, Behaviour.UNKNOWN, "192.0.2.2")


def of(found: list[Finding], what: str) -> Finding:
    (one,) = [each for each in found if each.what == what]
    return one


def with_sysctl(name: str, value: str) -> Network:
    return replace(TUNED, sysctls={**TUNED.sysctls, name: value})


def test_tuned_machine_has_nothing_to_mend() -> None:
    found = check_relay(RelayFacts(TUNED, modules={"uvicorn": True}), CONFIG)
    assert len(found) == 14 and all(each.state is State.OK and not each.mend for each in found)


@pytest.mark.parametrize(
    ("network", "what", "state", "mend"),
    [
        (
            replace(TUNED, congestion="bbr"),
            "congestion control",
            State.SLOW,
            'sysctl -w net.ipv4.tcp_allowed_congestion_control="reno bbr cubic"',
        ),
        (
            replace(TUNED, congestion="bbr", available_congestion="reno bbr"),
            "congestion control",
            State.SLOW,
            "modprobe tcp_cubic",
        ),
        (
            with_sysctl("net.ipv4.tcp_slow_start_after_idle", "1"),
            "net.ipv4.tcp_slow_start_after_idle",
            State.SLOW,
            "sysctl -w net.ipv4.tcp_slow_start_after_idle=0",
        ),
        (
            with_sysctl("net.ipv4.tcp_rmem", "4096\t131072\t6291456"),
            "net.ipv4.tcp_rmem",
            State.SLOW,
            'sysctl -w net.ipv4.tcp_rmem="4096 1048576 6291456"',
        ),
        (
            with_sysctl("net.core.somaxconn", "128"),
            "net.core.somaxconn",
            State.SLOW,
            "sysctl -w net.core.somaxconn=4096",
        ),
        (
            replace(TUNED, route="default via 192.0.2.1 dev eth0 proto dhcp metric 100"),
            "initcwnd of the default route",
            State.SLOW,
            "ip route change default via 192.0.2.1 dev eth0 proto dhcp metric 100 initcwnd 80 initrwnd 80",
        ),
        (
            replace(TUNED, route="default via 192.0.2.1 dev eth0 initcwnd 20 initrwnd 20 metric 100"),
            "initcwnd of the default route",
            State.SLOW,
            "ip route change default via 192.0.2.1 dev eth0 metric 100 initcwnd 80 initrwnd 80",
        ),
        (replace(TUNED, open_files=1024), "open files", State.BROKEN, "ulimit -n 4352"),
        (replace(TUNED, clock_synchronised=False), "clock", State.SLOW, "timedatectl set-ntp true"),
    ],
)
def test_what_slows_or_breaks_is_named_with_the_command_that_mends_it(
    network: Network, what: str, state: State, mend: str
) -> None:
    found = check_relay(RelayFacts(network), CONFIG)
    finding = of(found, what)
    assert (finding.state, finding.mend) == (state, mend)
    assert [each for each in found if each.state is not State.OK] == [finding], "and nothing else is"


def test_hard_limit_below_the_need_asks_for_root() -> None:
    network = replace(TUNED, open_files=1024, open_files_hard=4096)
    assert "LimitNOFILE=4352" in of(check_network(network, 4352), "open files").mend


def test_what_cannot_be_read_is_not_judged() -> None:
    assert [each.state for each in check_network(Network(), 100)] == [State.OK]


def test_port_of_another_program_breaks_and_a_running_relay_does_not() -> None:
    busy = RelayFacts(
        TUNED, busy={"tcp 8765": "another program has it", "udp 3478": "another program has it"}
    )
    found = check_relay(busy, CONFIG)
    assert of(found, "tcp 8765").state is State.BROKEN and of(found, "udp 3478").state is State.SLOW
    assert "sport = 8765" in of(found, "tcp 8765").mend
    found = check_relay(RelayFacts(TUNED, running="0.1.0", stun=STUN_OK), CONFIG)
    assert of(found, "tcp 8765").found == "a relay 0.1.0 answers here"
    assert of(found, "udp 3478").state is State.OK
    found = check_relay(RelayFacts(TUNED, running="0.1.0", stun=NO_UDP), CONFIG)
    assert of(found, "udp 3478").state is State.SLOW


def test_missing_kernels_and_libraries_break() -> None:
    facts = RelayFacts(TUNED, missing=("kernel-plain.wasm",), modules={"uvicorn": True, "segno": False})
    found = check_relay(facts, CONFIG)
    assert of(found, "page and kernels").state is of(found, "libraries").state is State.BROKEN
    assert of(found, "libraries").found == "missing: segno"


def test_exit_status_says_broken_and_not_slow(capsys: pytest.CaptureFixture[str]) -> None:
    slow = RelayFacts(replace(TUNED, clock_synchronised=False))
    broken = RelayFacts(replace(TUNED, open_files=10))
    out = io.StringIO()
    assert doctor.run(CONFIG, out, lambda _: RelayFacts(TUNED)) == 0 and "mend" not in out.getvalue()
    assert doctor.run(CONFIG, out, lambda _: slow) == 0
    assert doctor.run(CONFIG, out, lambda _: broken) == 1
    assert out.getvalue().rstrip().endswith("mend: ulimit -n 4352")


def test_relay_doctor_reads_this_machine_with_the_settings_given(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        assert cli.main(["doctor", "--host", "127.0.0.1", "--port", port, "--stun-port", "0"]) == 1
    said = capsys.readouterr().out
    assert f"broken  tcp {port}" in said and "another program has it" in said
    assert "switched off" in said


@pytest.mark.skipif(not hasattr(socket, "TCP_CONGESTION"), reason="this system does not let one choose")
def test_each_accepted_socket_has_the_tuning_of_the_listener() -> None:
    wanted = doctor.read_network("reno").congestion  # reno is in every kernel
    with listen(Config(host="127.0.0.1", port=0, congestion_control="reno")) as listener:
        with socket.create_connection(listener.getsockname()) as client:
            accepted, _ = listener.accept()
            with accepted:
                found = accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
                assert found.rstrip(b"\0").decode() == wanted == "reno"
                assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1
                assert client.fileno() >= 0


@pytest.mark.parametrize(("port", "said"), [(0, "none"), (4000, "4000, peers ask 3479")])
def test_second_stun_port_is_where_peers_look_for_it(port: int, said: str) -> None:
    found = of(check_relay(RelayFacts(TUNED), Config(stun_alt_port=port)), "second STUN port")
    assert found.state is State.SLOW and found.found.startswith(said)
    assert found.mend == "relay serve --stun-alt-port 3479"
    tells = Config(
        stun_alt_port=port, stun_addresses="192.0.2.1,192.0.2.2"
    )  # the answers name the other port
    assert not [each for each in check_relay(RelayFacts(TUNED), tells) if each.what == "second STUN port"]
