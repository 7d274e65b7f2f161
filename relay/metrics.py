"""
Every metric of the relay: name, unit, labels, one line of help.

Each relay has a registry of its own, so that two in one process (tests) do not add up.
"""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest


class Metrics:
    """The metrics of one relay."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.sessions = Gauge("relay_sessions", "Open sessions", ["role"], registry=self.registry)
        self.sessions_closed = Counter(
            "relay_sessions_closed", "Sessions that ended, by close code", ["code"], registry=self.registry
        )
        self.sessions_resumed = Counter(
            "relay_sessions_resumed", "Nodes that came back to their place", registry=self.registry
        )
        self.frames = Counter(
            "relay_frames_forwarded", "Call frames passed on", ["type"], registry=self.registry
        )
        self.bytes = Counter(
            "relay_forwarded_bytes", "Bytes of call frames passed on", ["type"], registry=self.registry
        )
        self.dropped = Counter(
            "relay_frames_dropped",
            "Call frames not passed on: expired, cancelled, overloaded, gone",
            ["reason"],
            registry=self.registry,
        )
        self.floods = Counter(
            "relay_floods", "Sessions closed for what they sent: see rates.py", registry=self.registry
        )
        self.queued = Gauge(
            "relay_queued_bytes", "Bytes waiting for receivers, all together", registry=self.registry
        )
        self.slices_served = Counter(
            "relay_slices_served", "GETs of slices, by outcome", ["outcome"], registry=self.registry
        )
        self.slice_bytes = Counter(
            "relay_slice_bytes", "Bytes of slices, sent and stored", ["direction"], registry=self.registry
        )
        self.cache_bytes = Gauge("relay_slice_cache_bytes", "Disk taken by slices", registry=self.registry)
        self.stun = Counter(
            "relay_stun_datagrams",
            "STUN datagrams: answered, changed (from another address), refused, limited, ignored",
            ["outcome"],
            registry=self.registry,
        )
        self.lane = Gauge(
            "relay_node_lane",
            "1: this lane carries the node's calls",
            ["node", "lane"],
            registry=self.registry,
        )
        self.lane_age = Gauge(
            "relay_node_lane_evidence_age_seconds",
            "Since the lane in use was measured; missing: never",
            ["node", "lane"],
            registry=self.registry,
        )
        self.settle_seconds = Histogram(
            "relay_settle_seconds",
            "Time to work out pairing and placement",
            buckets=(0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0),
            registry=self.registry,
        )

    def text(self) -> bytes:
        """Return all of them in the text format of Prometheus."""
        return generate_latest(self.registry)
