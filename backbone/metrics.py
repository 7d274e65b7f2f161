"""
Every metric of the backbone, read from the tally when it is asked for: counting costs the hot path nothing.

| name | unit | labels |
|---|---|---|
| swarm_layer_calls_total | calls of the engine | |
| swarm_rows_total | token rows through a layer | |
| swarm_node_calls_total, swarm_node_expert_rows_total | answers used, expert rows in them | node, kernel |
| swarm_node_sent_bytes_total, swarm_node_received_bytes_total | bytes of frames | node, kernel |
| swarm_node_failures_total | calls computed elsewhere in the end | node, kernel |
| swarm_node_round_trip_seconds | seconds, of the newest calls | node, kernel, quantile |
| swarm_node_lane_calls_total | answers by the lane that brought them | node, lane |
| swarm_node_lane_in_use | 1: this lane carries the node's calls now | node, lane |
| swarm_node_sealed | 1: the relay cannot read its frames; 0: it can | node |
| swarm_node_lane_evidence_age_seconds | since the lane in use was measured; missing: never | node, lane |
| swarm_retries_total, swarm_hedges_total, swarm_failed_calls_total | events | |
| swarm_relay_connected | 0 or 1 | |
| engine_resident_bytes | bytes | |
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from backbone.experts.tally import Tally

NODE_LABELS = ("node", "kernel")
LANE_LABELS = ("node", "lane")

type Lanes = Callable[[], Mapping[str, Mapping[str, Any]]]
"""node id -> what `LaneChooser.describe` says of it"""


class _TallyCollector(Collector):
    def __init__(
        self,
        tally: Tally,
        connected: Callable[[], bool],
        engine_rss_bytes: Callable[[], int],
        lanes: Lanes,
    ) -> None:
        self._tally = tally
        self._connected = connected
        self._engine_rss_bytes = engine_rss_bytes
        self._lanes = lanes

    def collect(self) -> Iterable[Metric]:
        tally = self._tally
        totals = {
            "swarm_layer_calls": ("layer calls of the engine", tally.layer_calls),
            "swarm_rows": ("token rows through a layer", tally.tokens),
            "swarm_retries": ("attempts that were repeated elsewhere", tally.retries),
            "swarm_hedges": ("calls asked twice because the first holder was late", tally.hedges),
            "swarm_failed_calls": ("layer calls that nobody could compute", tally.failed_calls),
        }
        for name, (text, value) in totals.items():
            yield CounterMetricFamily(name, text, value=value)
        yield GaugeMetricFamily(
            "swarm_relay_connected", "1 while the relay is reachable", int(self._connected())
        )
        yield GaugeMetricFamily(
            "engine_resident_bytes", "memory of llama.cpp's process", self._engine_rss_bytes()
        )
        calls = CounterMetricFamily("swarm_node_calls", "answers used", labels=NODE_LABELS)
        rows = CounterMetricFamily("swarm_node_expert_rows", "expert rows computed", labels=NODE_LABELS)
        sent = CounterMetricFamily("swarm_node_sent_bytes", "bytes sent to the node", labels=NODE_LABELS)
        received = CounterMetricFamily("swarm_node_received_bytes", "bytes it answered", labels=NODE_LABELS)
        failures = CounterMetricFamily(
            "swarm_node_failures", "calls it did not answer well", labels=NODE_LABELS
        )
        round_trip = GaugeMetricFamily(
            "swarm_node_round_trip_seconds", "of its newest calls", labels=(*NODE_LABELS, "quantile")
        )
        for node_id, work in tally.work.items():
            labels = (node_id, work.kernel)
            calls.add_metric(labels, work.calls)
            rows.add_metric(labels, sum(work.rows.values()))
            sent.add_metric(labels, work.bytes_out)
            received.add_metric(labels, work.bytes_in)
            failures.add_metric(labels, sum(work.failures.values()))
            for share in (0.5, 0.95):
                round_trip.add_metric((*labels, str(share)), work.round_trip_ms(share) / 1e3)
        yield from (calls, rows, sent, received, failures, round_trip)
        yield from self._lane_metrics()

    def _lane_metrics(self) -> Iterable[Metric]:
        calls = CounterMetricFamily("swarm_node_lane_calls", "answers by lane", labels=LANE_LABELS)
        in_use = GaugeMetricFamily("swarm_node_lane_in_use", "1: it carries the calls", labels=LANE_LABELS)
        age = GaugeMetricFamily(
            "swarm_node_lane_evidence_age_seconds", "since the lane in use was measured", labels=LANE_LABELS
        )
        sealed = GaugeMetricFamily(
            "swarm_node_sealed", "1: the relay cannot read its frames", labels=("node",)
        )
        for node_id, path in self._lanes().items():
            if "sealed" in path:
                sealed.add_metric((node_id,), int(path["sealed"]))
            in_use.add_metric((node_id, path["lane"]), 1)
            if path["evidence_age_s"] is not None:
                age.add_metric((node_id, path["lane"]), path["evidence_age_s"])
            for lane, number in path["calls"].items():
                calls.add_metric((node_id, lane), number)
        yield from (calls, in_use, age, sealed)


def tally_registry(
    tally: Tally, connected: Callable[[], bool], engine_rss_bytes: Callable[[], int], lanes: Lanes = dict
) -> Callable[[], bytes]:
    """Give a function that writes all metrics in Prometheus' text format."""
    registry = CollectorRegistry()
    registry.register(_TallyCollector(tally, connected, engine_rss_bytes, lanes))
    return lambda: generate_latest(registry)
