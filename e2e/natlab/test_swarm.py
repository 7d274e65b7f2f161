"""Which pairs of NATs end how: served over the relay within two seconds, then direct where it can be."""

import shutil
import time
from pathlib import Path

import pytest

from backbone.model.random_model import Shape, make_random_moe
from e2e.natlab.lab import Lab, Leg, why_not
from e2e.natlab.swarm import Joined, LabSwarm

REASON = why_not(delay=True)
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))

FIRST_ANSWER_MS, TRIES = 2000.0, 3
WATCH_S = {
    "direct": 30.0,
    "relayed": 8.0,
}  # a direct lane that loses its first race is tried again after 15 s
AWAY = Leg(delay_ms=15)  # the relay's leg: a direct path is taken only because it is faster

# backbone's NAT, node's NAT, the path on which the pair ends
PAIRS = [
    ("open", "open", "direct"),
    ("open", "symmetric", "direct"),
    ("fullcone", "symmetric", "direct"),
    ("portrestricted", "portrestricted", "direct"),
    ("symmetric", "addrrestricted", "direct"),
    ("portrestricted", "symmetric", "relayed"),
    ("udpblock", "udpblock", "relayed"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random_moe(tmp_path_factory.mktemp("model") / "model.gguf", Shape())


def join(swarm: LabSwarm, watch_s: float = 0.0) -> Joined:
    """
    Join until an answer came in time, three times at most: what else the machine does is not the swarm's
    time, and a swarm that is too slow is so each time.
    """
    for number in range(TRIES):
        joined = swarm.join(watch_s, until="direct", name=f"node-{number}")
        if joined.first_answer_ms < FIRST_ANSWER_MS or number == TRIES - 1:
            break
        swarm.leave(f"node-{number}")
    assert joined.first_answer_ms < FIRST_ANSWER_MS
    return joined


@pytest.mark.parametrize(("nat_a", "nat_b", "ends"), PAIRS)
def test_first_answer_comes_at_once_and_the_pair_ends_on_its_path(
    model: Path, tmp_path: Path, nat_a: str, nat_b: str, ends: str
) -> None:
    with Lab(nat_a, nat_b, leg_relay=AWAY) as lab:
        swarm = LabSwarm(lab, tmp_path)
        swarm.start_relay()
        swarm.start_backbone(model)
        alone = swarm.complete(tokens=16)
        joined = join(swarm, WATCH_S[ends])
        assert joined.ended == ends, swarm.status()["nodes"]
        if ends == "direct":
            assert joined.direct_after_ms is not None
            assert joined.direct_after_ms >= joined.first_answer_ms, "the relay serves until then"
        assert swarm.complete(tokens=16) == alone, "another path or place never changes a token"
        swarm.close()


def test_node_far_away_is_served_over_the_relay_within_two_seconds(model: Path, tmp_path: Path) -> None:
    with Lab("portrestricted", "symmetric", leg_b=Leg(delay_ms=40)) as lab:
        swarm = LabSwarm(lab, tmp_path)
        swarm.start_relay()
        swarm.start_backbone(model)
        join(swarm)
        swarm.close()


@pytest.mark.skipif(shutil.which("chromium") is None, reason="no chromium in PATH: apt-get install chromium")
def test_tab_behind_a_nat_answers_over_the_relay_then_over_a_data_channel(
    model: Path, tmp_path: Path
) -> None:
    with Lab("portrestricted", "portrestricted", leg_relay=AWAY) as lab:
        swarm = LabSwarm(lab, tmp_path)
        swarm.start_relay()
        swarm.start_backbone(model)
        alone = swarm.complete(tokens=16)
        with swarm.traffic():
            lab.start("hB", "chromium", "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run",
                      "--disable-background-networking", "--user-agent=Chrome swarm-agreed",
                      f"--user-data-dir={tmp_path}/profile",
                      f"{swarm.relay_url}/?workers=1#auto", log=tmp_path / "tab.log",
                      environment={"HOME": str(tmp_path)})  # fmt: skip
            lanes, give_up = [], time.monotonic() + WATCH_S["direct"]
            while "webrtc" not in lanes and time.monotonic() < give_up:
                lanes += [node["path"]["lane"] for node in swarm.status()["nodes"]]
                time.sleep(0.05)
        assert lanes[0] == "relayed" and lanes[-1] == "webrtc", (
            lanes[-1:],
            (tmp_path / "tab.log").read_text(),
        )
        answered = swarm.answered()
        assert swarm.complete(tokens=16) == alone, "another path or place never changes a token"
        assert swarm.answered() == answered, "the relay carried no call"
        swarm.close()


def test_node_on_a_slow_and_lossy_line_changes_no_token(model: Path, tmp_path: Path) -> None:
    line = Leg(delay_ms=15, loss_pct=1, rate_mbit=20)
    with Lab("open", "addrrestricted", leg_b=line) as lab:
        swarm = LabSwarm(lab, tmp_path)
        swarm.start_relay()
        swarm.start_backbone(model)
        alone = swarm.complete(tokens=16)
        join(swarm)
        assert swarm.complete(tokens=16) == alone
        swarm.close()
