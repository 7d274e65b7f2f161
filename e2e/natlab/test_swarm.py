"""Which pairs of NATs end how: served over the relay within two seconds, then direct where it can be."""

from pathlib import Path

import pytest

from backbone.model.random_model import Shape, make_random_moe
from e2e.natlab.lab import Lab, Leg, why_not
from e2e.natlab.swarm import LabSwarm

REASON = why_not()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))

FIRST_ANSWER_MS = 2000.0
WATCH_S = 0.0  # how long a pair is given to leave the relay; there is no direct lane yet

# backbone's NAT, node's NAT, the path on which the pair ends
PAIRS = [
    ("open", "open", "relayed"),
    ("open", "symmetric", "relayed"),
    ("fullcone", "symmetric", "relayed"),
    ("addrrestricted", "portrestricted", "relayed"),
    ("portrestricted", "symmetric", "relayed"),
    ("udpblock", "udpblock", "relayed"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random_moe(tmp_path_factory.mktemp("model") / "model.gguf", Shape())


@pytest.mark.parametrize(("nat_a", "nat_b", "ends"), PAIRS)
def test_first_answer_comes_at_once_and_the_pair_ends_on_its_path(
    model: Path, tmp_path: Path, nat_a: str, nat_b: str, ends: str
) -> None:
    with Lab(nat_a, nat_b) as lab:
        swarm = LabSwarm(lab, tmp_path)
        swarm.start_relay()
        swarm.start_backbone(model)
        alone = swarm.complete(tokens=16)
        joined = swarm.join(WATCH_S)
        assert joined.first_answer_ms < FIRST_ANSWER_MS
        assert joined.ended == ends and (joined.direct_after_ms is not None) == (ends == "direct")
        assert swarm.complete(tokens=16) == alone, "another path or place never changes a token"
        swarm.close()


@pytest.mark.skipif(why_not(delay=True) is not None, reason=str(why_not(delay=True)))
def test_node_far_away_is_served_over_the_relay_within_two_seconds(model: Path, tmp_path: Path) -> None:
    with Lab("portrestricted", "symmetric", leg_b=Leg(delay_ms=40)) as lab:
        swarm = LabSwarm(lab, tmp_path)
        swarm.start_relay()
        swarm.start_backbone(model)
        assert swarm.join(WATCH_S).first_answer_ms < FIRST_ANSWER_MS
        (node,) = swarm.status()["nodes"]
        assert node["rtt_ms"] is None or node["rtt_ms"] >= 80
        swarm.close()
