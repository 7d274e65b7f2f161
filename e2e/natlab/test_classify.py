"""The classifier against the relay's STUN, from behind each kind of NAT."""

import json
import sys
from collections.abc import Iterator

import pytest

from e2e.natlab.lab import NAT_TYPES, RELAY, Lab, why_not
from e2e.natlab.swarm import LabSwarm

REASON = why_not()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))

# mapping, filtering; RFC 4787
CLASSES = {
    "open": (False, "endpoint-independent", "endpoint-independent"),
    "fullcone": (True, "endpoint-independent", "endpoint-independent"),
    "addrrestricted": (True, "endpoint-independent", "address-dependent"),
    "portrestricted": (True, "endpoint-independent", "address-and-port-dependent"),
    "symmetric": (True, "address-and-port-dependent", "address-and-port-dependent"),
}
CLASSIFY = (
    "import asyncio, json; from relay.nat.classify import classify;"
    f"print(json.dumps(asyncio.run(classify({RELAY!r}, 3478)).to_json()))"
)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """One lab whose NAT the tests change, with a relay."""
    home = tmp_path_factory.mktemp("home")
    with Lab() as made:
        LabSwarm(made, home).start_relay()
        yield made


@pytest.mark.parametrize("kind", NAT_TYPES)
def test_class_found_behind_a_nat_is_its_own(lab: Lab, kind: str) -> None:
    lab.set_nat("A", kind)
    found = json.loads(lab.run("hA", sys.executable, "-c", CLASSIFY))
    if kind == "udpblock":
        assert not found["udp"]
        return
    assert found["udp"]
    assert (found["translated"], found["mapping"], found["filtering"]) == CLASSES[kind]
    assert found["public_ip"] == ("10.1.0.2" if kind == "open" else "203.0.113.11")
