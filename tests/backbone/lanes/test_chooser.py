"""When the chooser measures, and what it makes of calls: relay and link answer at once, the clock by hand."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

from backbone.lanes.chooser import REPORT_S, WARM_KB, Attempt, LaneChooser
from backbone.lanes.link import Link
from relay.forwarding.rates import MESSAGES
from relay.nat.evidence import PathPolicy
from relay.wire.calls import Probe
from relay.wire.frames import HEADER_BYTES, FrameType
from relay.wire.messages import Dispatch, PathReport, PeerNode, Peers, Signal
from relay.wire.session import EchoReceived, PartialReceived
from tests.fakes.peers import PARTIAL, dispatch

NODE = PeerNode(7, "a" * 32, "node", "native", 1.0, 3, {0: (0,)}, lanes=("direct",))


class Swarm:
    """`took_s` is what a message takes by lane; `sent` are the sizes of probes in KB, by lane, in order."""

    def __init__(self, probes: int = 2) -> None:
        self.now = 100.0
        self.took_s = {"relayed": 0.08, "direct": 0.04}
        self.sent: list[tuple[str, int]] = []
        self.carried: list[str] = []  # lanes of calls, in order
        self.reports: list[PathReport] = []
        policy = PathPolicy(probes=probes, retry_s=1e6, recheck_s=1e6)
        self.chooser = LaneChooser(
            cast(Any, self), {"direct": cast(Any, self)}, lambda answer: None, policy=policy,
            clock=lambda: self.now,
        )  # fmt: skip
        self.link: Link | None = None

    # -- as the relayed lane

    def send_probe(self, peer: int, call_id: int, epoch: int, deadline_ms: int, probe: Probe) -> None:
        self._echo("relayed", call_id, probe)

    def send_dispatch(self, peer: int, call_id: int, epoch: int, deadline_ms: int, call: Dispatch) -> int:
        return self._carry("relayed", call)

    def _carry(self, lane: str, call: Dispatch) -> int:
        self.carried.append(lane)
        return max(12 << 10, len(call.x))

    def send_cancel(self, peer: int, call_id: int, epoch: int) -> None: ...

    def send_signal(self, peer: int, epoch: int, signal: Signal) -> None: ...

    def send_path_report(self, report: PathReport) -> None:
        self.reports.append(report)

    # -- as the opener

    def offers(self, node: PeerNode) -> bool:
        return True

    async def open(self, attempt: Attempt) -> None:
        self.link = cast(
            Link,
            SimpleNamespace(
                session=SimpleNamespace(link=attempt.id),
                ready=True,
                send_probe=lambda call_id, probe: self._echo("direct", call_id, probe),
                send_dispatch=lambda call_id, deadline_ms, call: self._carry("direct", call),
                close=lambda code, reason: None,
            ),
        )
        self.chooser.link_ready(self.link)

    def _echo(self, lane: str, call_id: int, probe: Probe) -> None:
        self.sent.append((lane, (probe.size_bytes + HEADER_BYTES) >> 10))
        due = self.now + self.took_s[lane]

        def back() -> None:
            self.now = due
            self.chooser.echo_received(EchoReceived(7, call_id, 3))

        asyncio.get_running_loop().call_later(self.took_s[lane] / 10, back)

    async def joined(self) -> None:
        self.chooser.peers_changed(Peers((NODE,)))
        async with asyncio.timeout(5):
            while self.chooser.lane_of(7) != "direct":
                await asyncio.sleep(0.001)

    def call(self, call_id: int, took_s: float) -> None:
        """Ask the node on the lane in use and have it answer."""
        lane = self.chooser.lane_of(7)
        self.chooser.send_dispatch(7, call_id, 3, 10_000, dispatch())
        self.now += took_s
        answer = PartialReceived(7, call_id, 3, PARTIAL)
        if lane == "relayed":
            self.chooser.answer_received(answer)
        else:
            assert self.link is not None
            self.chooser.link_event(self.link, answer)


async def test_link_is_warmed_before_it_is_raced() -> None:
    swarm = Swarm()
    await swarm.joined()
    assert swarm.sent[0] == ("direct", WARM_KB)
    assert [size for _, size in swarm.sent[1:]] == [6, 6, 12, 12] * 2
    await swarm.chooser.close()


async def test_race_that_is_clear_ends_early() -> None:
    swarm = Swarm(probes=8)
    await swarm.joined()
    assert len(swarm.sent) == 1 + 4 * PathPolicy().clear_probes
    await swarm.chooser.close()


async def test_calls_leave_a_lane_on_which_they_got_slower_than_on_the_relay() -> None:
    swarm = Swarm()
    swarm.chooser.peers_changed(Peers((NODE,)))
    for call_id in range(16):
        swarm.call(call_id, 0.085)  # over the relay: nothing else is open yet
    await swarm.joined()
    for call_id in range(100, 116):
        swarm.call(call_id, 0.045)
    assert swarm.chooser.lane_of(7) == "direct"
    for call_id in range(200, 216):
        swarm.call(call_id, 0.12)
    assert swarm.chooser.lane_of(7) == "relayed"
    assert "calls were slower on the direct lane" in swarm.chooser.describe(7)["why"]
    assert swarm.reports[-1].paths[0].lane == "relayed", "the relay is told"
    await swarm.chooser.close()


async def test_reports_leave_no_faster_than_the_relay_takes_them() -> None:
    """However often lists and lanes change; the last word is told, too."""
    rate, _ = MESSAGES[FrameType.PATH_REPORT]
    assert rate >= 1 / REPORT_S
    swarm = Swarm()
    await swarm.joined()
    swarm.now += REPORT_S
    swarm.reports.clear()
    for _ in range(50):
        swarm.chooser.peers_changed(Peers((NODE,)))
    assert len(swarm.reports) <= 1
    swarm.reports.clear()
    async with asyncio.timeout(5):
        while not swarm.reports:
            await asyncio.sleep(0.01)
    await swarm.chooser.close()


async def test_long_calls_leave_a_lane_that_is_slower_with_them_alone() -> None:
    """A piece of a prompt takes 231 ms on the lane and 70 on the relay, whatever probes said."""
    swarm = Swarm()
    await swarm.joined()
    piece = replace(dispatch(), x=bytes(300 << 10))
    for call_id in range(1, 30):
        swarm.chooser.send_dispatch(7, call_id, 3, 10_000, piece)
        lane, answer = swarm.carried[-1], PartialReceived(7, call_id, 3, PARTIAL)
        swarm.now += {"direct": 0.231, "relayed": 0.07}[lane]
        if lane == "relayed":
            swarm.chooser.answer_received(answer)
        else:
            assert swarm.link is not None
            swarm.chooser.link_event(swarm.link, answer)
    assert swarm.carried.count("direct") <= 2 and set(swarm.carried[4:]) == {"relayed"}
    swarm.chooser.send_dispatch(7, 30, 3, 10_000, dispatch())
    assert swarm.carried[-1] == "direct"
    assert swarm.chooser.describe(7)["lane_of_long_calls"] == "relayed"
    await swarm.chooser.close()
