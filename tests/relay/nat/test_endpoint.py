"""STUN on real sockets: coturn's clients and a browser as strangers that know only the RFCs."""

import asyncio
import ipaddress
import shutil
import socket
import sys
from dataclasses import replace

import httpx
import pytest

from relay.config import Config
from relay.metrics import Metrics
from relay.nat.endpoint import StunEndpoint
from relay.nat.stun import CHANGE_IP, CHANGE_PORT, binding_request, decode
from relay.server import RelayServer, stun_server
from relay.wire.messages import Welcome
from tests.fakes.peers import Node, run

ID = bytes(12)
LINUX_ONLY = pytest.mark.skipif(sys.platform != "linux", reason="all of 127.0.0.0/8 is local on Linux only")


def free_udp_ports(count: int) -> list[int]:
    """Ports that were free a moment ago."""
    sockets = [socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


def config(host: str = "127.0.0.1", addresses: str | None = None) -> Config:
    port, alternate = free_udp_ports(2)
    return Config(
        host=host, port=0, drain_s=0.1, stun_port=port, stun_alt_port=alternate, stun_addresses=addresses
    )


def tool(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed (apt-get install coturn)")
    return found


async def output(*command: str) -> str:
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    try:
        out, _ = await asyncio.wait_for(process.communicate(), 20)
        return out.decode(errors="replace")
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def exchange(request: bytes, to: tuple[str, int], source: str) -> tuple[bytes, tuple[str, int]]:
    """Send a datagram and return the first that comes back; not connected, so from wherever it comes."""

    def talk() -> tuple[bytes, tuple[str, int]]:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as mine:
            mine.settimeout(5)
            mine.bind((source, 0))
            mine.sendto(request, to)
            return mine.recvfrom(2000)

    return await asyncio.to_thread(talk)


@LINUX_ONLY
def test_answer_leaves_from_the_address_that_was_asked_on_a_socket_for_all() -> None:
    async def test() -> None:
        settings = config(host="0.0.0.0")
        async with RelayServer(settings):
            for asked in ("127.0.0.1", "127.0.0.77"):
                data, source = await exchange(binding_request(ID), (asked, settings.stun_port), "127.0.0.5")
                assert source == (asked, settings.stun_port)
            request = binding_request(ID, CHANGE_PORT)
            data, source = await exchange(request, ("127.0.0.77", settings.stun_port), "127.0.0.5")
            answer = decode(data)
            assert source == ("127.0.0.77", settings.stun_alt_port)
            assert answer is not None and answer.mapped is not None and answer.mapped[0] == "127.0.0.5"

    run(test)


@LINUX_ONLY
def test_two_addresses_answer_for_each_other() -> None:
    async def test() -> None:
        settings = config(addresses="127.0.0.1,127.0.0.2")
        async with RelayServer(settings):
            request = binding_request(ID, CHANGE_IP | CHANGE_PORT)
            _, source = await exchange(request, ("127.0.0.1", settings.stun_port), "127.0.0.5")
            assert source == ("127.0.0.2", settings.stun_alt_port)

    run(test)


def test_datagrams_are_counted_by_what_became_of_them() -> None:
    async def test() -> None:
        settings = config()
        async with RelayServer(settings) as relay, httpx.AsyncClient(base_url=relay.url) as http:
            to = ("127.0.0.1", settings.stun_port)
            await exchange(binding_request(ID), to, "127.0.0.1")
            await exchange(binding_request(ID, CHANGE_IP), to, "127.0.0.1")
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
                stranger.sendto(b"GET / HTTP/1.1", to)
            await exchange(binding_request(ID, CHANGE_PORT), to, "127.0.0.1")
            metrics = (await http.get("/metrics")).text
            for outcome in ("answered", "refused", "changed", "ignored"):
                assert f'relay_stun_datagrams_total{{outcome="{outcome}"}} 1.0' in metrics
            status = (await http.get("/status.json")).json()["stun"]
            assert status == {"ports": [settings.stun_port, settings.stun_alt_port], "why_off": ""}

    run(test)


def test_port_in_use_leaves_a_relay_without_stun_that_says_so() -> None:
    async def test() -> None:
        settings = config()
        async with RelayServer(settings), RelayServer(settings) as second:
            assert second.app.state.stun.status()["ports"] == []
            assert f"UDP 127.0.0.1:{settings.stun_port}" in second.app.state.stun.why_off

    run(test)


@pytest.mark.parametrize(
    "given", ["10.0.0.1", "10.0.0.1,10.0.0.1", "10.0.0.1,::1", "0.0.0.0,10.0.0.1", "a,b"]
)
def test_stun_addresses_must_be_two(given: str) -> None:
    with pytest.raises(Exception, match="stun_addresses"):
        Config(stun_addresses=given)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (Config(host="192.0.2.9"), "192.0.2.9:3478"),
        (Config(public_url="https://relay.example/x", stun_port=9), "relay.example:9"),
        (Config(public_url="https://[2001:db8::1]:444"), "[2001:db8::1]:3478"),
        (Config(stun_addresses="192.0.2.1,192.0.2.2"), "192.0.2.1:3478"),
    ],
)
def test_peers_are_told_the_stun_server_where_they_know_the_relay(settings: Config, told: str) -> None:
    assert stun_server(settings) == told


@pytest.mark.parametrize(
    ("settings", "reached_at", "told"),
    [
        (Config(host="0.0.0.0"), "10.0.0.7", "10.0.0.7:3478"),
        (Config(host="::"), "::ffff:10.0.0.7", "10.0.0.7:3478"),
        (Config(host="::"), "fe80::7%eth0", "[fe80::7]:3478"),
        (Config(host="0.0.0.0"), "127.0.0.1", "named:1"),  # a proxy on this machine
        (Config(host="0.0.0.0", public_url="https://relay.example"), "10.0.0.7", "named:1"),
        (Config(host="192.0.2.5"), "192.0.2.5", "named:1"),
        (Config(host="0.0.0.0"), "", "named:1"),
    ],
)
def test_relay_on_all_addresses_tells_the_one_a_peer_reached(
    settings: Config, reached_at: str, told: str
) -> None:
    endpoint = StunEndpoint(settings, Metrics())
    endpoint.address, endpoint.why_off = "named:1", ""
    assert endpoint.told(reached_at) == told
    endpoint.why_off = "off"
    assert endpoint.told(reached_at) is None


def test_welcome_names_the_stun_server_and_none_when_there_is_none() -> None:
    async def test() -> None:
        settings = config()
        async with RelayServer(settings) as relay, Node(relay) as node:
            assert (await node.expect(Welcome)).stun == f"127.0.0.1:{settings.stun_port}"
        async with RelayServer(replace(settings, stun_port=0)) as relay, Node(relay) as node:
            assert (await node.expect(Welcome)).stun is None

    run(test)


@LINUX_ONLY
def test_coturns_stunclient_learns_its_address() -> None:
    async def test() -> None:
        command = tool("turnutils_stunclient")
        settings = config(addresses="127.0.0.1,127.0.0.2")
        async with RelayServer(settings):
            said = await output(command, "-p", str(settings.stun_port), "127.0.0.1")
            assert "UDP reflexive addr: 127.0.0.1:" in said, said

    run(test)


@LINUX_ONLY
def test_coturns_natdiscovery_finds_no_nat_on_loopback() -> None:
    async def test() -> None:
        command = tool("turnutils_natdiscovery")
        settings = config(addresses="127.0.0.1,127.0.0.2")
        async with RelayServer(settings):
            said = await output(command, "-m", "-f", "-p", str(settings.stun_port), "127.0.0.1")
            assert "NAT with Endpoint Independent Mapping" in said or "No NAT" in said, said
            assert "Endpoint Independent Filtering" in said, said

    run(test)


def test_browser_gets_a_server_reflexive_candidate() -> None:
    """Chromium hides host addresses, so the address in an srflx candidate can only be what we told it."""
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        pytest.skip("no Chromium is installed")
    playwright = pytest.importorskip("playwright.async_api")
    own = _own_address()
    if own is None:
        pytest.skip("this machine has no address but loopback, and Chromium gathers none there")

    async def test() -> None:
        settings = config(host="0.0.0.0")
        async with RelayServer(settings), playwright.async_playwright() as started:
            browser = await started.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
            try:
                page = await browser.new_page()
                found = await page.evaluate(_GATHER, f"stun:{own}:{settings.stun_port}")
            finally:
                await browser.close()
            assert any(candidate.split()[4] == own for candidate in found), found

    run(test)


_GATHER = """async url => {
    const pc = new RTCPeerConnection({iceServers: [{urls: url}]});
    pc.createDataChannel("x");
    const found = [];
    const done = new Promise(resolve => {
        pc.onicecandidate = e => e.candidate ? found.push(e.candidate.candidate) : resolve();
        setTimeout(resolve, 8000);
    });
    await pc.setLocalDescription(await pc.createOffer());
    await done;
    return found.map(String).filter(c => c.includes(" typ srflx") || !c.includes(".local"));
}"""


def _own_address() -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return None
        address = str(probe.getsockname()[0])
    return None if ipaddress.ip_address(address).is_loopback else address
