"""
What happens to phones and laptops: another network, a line that goes dead without a word, a closed lid.

Both ends notice, the calls are answered elsewhere meanwhile, and the node comes back to its place with its
slices. Real relay, backbone and node; no token changes.
"""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from backbone.model.random_model import Shape, make_random_moe
from e2e.natlab.lab import SIDES, Lab, why_not
from e2e.natlab.swarm import LabSwarm

REASON = why_not()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))

BEAT_S = 1.0
SLACK_S = 0.75  # the relay looks at its clocks four times a second, and two cores carry everything
HERE = SIDES["B"]
OTHER_ADDRESS = HERE.address.rpartition(".")[0] + ".77"
ANSWERED_S = 2.0
ASKED_AGAIN_S = 30.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random_moe(tmp_path_factory.mktemp("model") / "model.gguf", Shape())


@pytest.fixture
def swarm(model: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[LabSwarm]:
    """A swarm of one node, which holds everything; the relay's beat is the test's."""
    with Lab("open", "portrestricted") as lab:
        made = LabSwarm(lab, tmp_path)
        made.start_relay("--ping-interval-s", str(request.param))
        made.start_backbone(model)
        made.alone = made.complete(tokens=16)
        made.start_node()
        made.wait_ready()
        yield made
        made.close()


def same_tokens(swarm: LabSwarm) -> float:
    """Ask; gives the seconds it took."""
    started = time.monotonic()
    assert swarm.complete(tokens=16) == swarm.alone, "whoever computes, no token changes"
    return time.monotonic() - started


def came_back(swarm: LabSwarm, before: dict[str, object], loaded: float) -> None:
    """The node is the same one, at its place, by token, and nothing was loaded again."""
    after = swarm.wait_ready(unlike=int(str(before["peer"])))
    assert (after["id"], after["seal"]["identity"]) == (before["id"], before["seal"]["identity"])
    assert after["epoch"] != before["epoch"] and after["slices_assigned"] == before["slices_assigned"]
    assert swarm.metric("relay_sessions_resumed_total") == 1
    assert swarm.metric("relay_slices_served_total") == loaded
    give_up = time.monotonic() + ASKED_AGAIN_S
    while (node := swarm.node()) is None or node["seal"][
        "sealed"
    ] is None:  # after failures a node rests a while
        same_tokens(swarm)
        assert time.monotonic() < give_up, "it is not asked again"
    assert node["seal"]["sealed"] is True


@pytest.mark.parametrize("swarm", [10.0], indirect=True)
def test_node_that_changes_its_network_is_back_before_two_beats_have_passed(swarm: LabSwarm) -> None:
    before, loaded = swarm.node(), swarm.metric("relay_slices_served_total")
    assert before is not None
    lab, changed = swarm.lab, time.monotonic()
    lab.run("hB", "ip", "addr", "del", f"{HERE.address}/24", "dev", "eth0")
    lab.run("hB", "ip", "addr", "add", f"{OTHER_ADDRESS}/24", "dev", "eth0")
    lab.run("hB", "ip", "route", "replace", "default", "via", HERE.lan)
    same_tokens(swarm)
    swarm.wait_ready(unlike=before["peer"])
    assert time.monotonic() - changed < 10.0, "its own look at the network told it, not the silence"
    came_back(swarm, before, loaded)


@pytest.mark.parametrize("swarm", [BEAT_S], indirect=True)
def test_line_that_goes_dead_is_noticed_at_both_ends_within_two_beats(swarm: LabSwarm) -> None:
    before, loaded = swarm.node(), swarm.metric("relay_slices_served_total")
    assert before is not None
    cut = time.monotonic()
    swarm.lab.cut("B")
    same_tokens(swarm)
    swarm.wait(lambda: swarm.node() is None, "relay")
    assert time.monotonic() - cut < 2 * BEAT_S + SLACK_S
    assert swarm.status()["away"] == [before["id"]]
    swarm.wait(lambda: "last: nothing heard for" in swarm.log("node"), "node")
    assert time.monotonic() - cut < 2 * BEAT_S + 2 * SLACK_S  # it prints a line a little later
    assert same_tokens(swarm) < ANSWERED_S, "nobody waits for who is away"
    swarm.lab.set_nat("B", "portrestricted")  # other rules, and no memory of the old connection
    came_back(swarm, before, loaded)


@pytest.mark.parametrize("swarm", [BEAT_S], indirect=True)
def test_laptop_whose_lid_was_closed_is_back_as_soon_as_it_runs(swarm: LabSwarm) -> None:
    before, loaded = swarm.node(), swarm.metric("relay_slices_served_total")
    assert before is not None
    os.kill(swarm.process().pid, signal.SIGSTOP)
    closed = time.monotonic()
    swarm.wait(lambda: swarm.node() is None, "relay")
    assert time.monotonic() - closed < 2 * BEAT_S + SLACK_S
    same_tokens(swarm)
    time.sleep(max(0.0, 7.5 - (time.monotonic() - closed)))
    os.kill(swarm.process().pid, signal.SIGCONT)
    opened = time.monotonic()
    swarm.wait_ready(unlike=before["peer"])
    assert time.monotonic() - opened < 4.0
    came_back(swarm, before, loaded)
