"""The classifier against the relay's own STUN on loopback; behind real NATs it is tested in e2e/natlab."""

import sys
from dataclasses import replace

import pytest

from relay.nat.candidates import Behaviour
from relay.nat.classify import classify, observe
from relay.server import RelayServer
from tests.fakes.peers import run
from tests.relay.nat.test_endpoint import config, free_udp_ports


@pytest.mark.skipif(sys.platform != "linux", reason="all of 127.0.0.0/8 is local on Linux only")
def test_two_addresses_tell_everything() -> None:
    async def test() -> None:
        settings = config(addresses="127.0.0.1,127.0.0.2")
        async with RelayServer(settings):
            found = await classify("127.0.0.1", settings.stun_port)
            assert (found.udp, found.translated) == (True, False) and found.words == "no NAT"
            assert found.mapping is found.filtering is Behaviour.ENDPOINT_INDEPENDENT

    run(test)


def test_one_address_and_two_ports_tell_how_ports_are_treated() -> None:
    async def test() -> None:
        settings = config()
        async with RelayServer(settings):
            seen = await observe("127.0.0.1", settings.stun_port, settings.stun_alt_port)
            assert seen.mapped == seen.mapped_other_port is not None and seen.mapped_other_address is None
            assert seen.answered_from_other_port is True and seen.answered_from_other_address is None

    run(test)


def test_one_port_tells_only_that_there_is_udp() -> None:
    async def test() -> None:
        settings = replace(config(), stun_alt_port=0)
        async with RelayServer(settings):
            found = await classify("127.0.0.1", settings.stun_port)
            assert found.udp and found.mapping is found.filtering is Behaviour.UNKNOWN

    run(test)


@pytest.mark.parametrize("host", ["127.0.0.1", "no-such-host.invalid"])
def test_silence_is_no_udp(host: str) -> None:
    async def test() -> None:
        (port,) = free_udp_ports(1)
        assert not (await classify(host, port)).udp

    run(test)
