"""What /metrics says of lanes follows from what the chooser describes."""

from backbone.experts.tally import Tally
from backbone.metrics import tally_registry


def test_lanes_are_told_with_their_calls_and_the_age_of_their_evidence() -> None:
    tally = Tally()
    tally.of("n0", "box", "native", "relayed").used(0, 2, 0.1, 0.01)
    path = {"lane": "direct", "evidence_age_s": 3.5, "calls": {"relayed": 1, "direct": 41}, "sealed": True}
    never = {"lane": "relayed", "evidence_age_s": None, "calls": {}, "sealed": False}
    text = tally_registry(tally, lambda: True, lambda: 0, lambda: {"n0": path, "n1": never})().decode()
    assert 'swarm_node_calls_total{kernel="native",node="n0"} 1.0' in text
    assert 'swarm_node_lane_calls_total{lane="direct",node="n0"} 41.0' in text
    assert 'swarm_node_lane_in_use{lane="direct",node="n0"} 1.0' in text
    assert 'swarm_node_lane_evidence_age_seconds{lane="direct",node="n0"} 3.5' in text
    assert 'swarm_node_lane_in_use{lane="relayed",node="n1"} 1.0' in text
    assert 'swarm_node_sealed{node="n0"} 1.0' in text and 'swarm_node_sealed{node="n1"} 0.0' in text
    assert text.count("swarm_node_lane_evidence_age_seconds{") == 1
