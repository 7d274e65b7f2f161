"""What a punch has to wait for: as much of our NAT's class as decides, no more."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from backbone.lanes import nat as module
from backbone.lanes.nat import NatWatch, why_hopeless
from relay.nat.candidates import Behaviour, NatClass, Observation, nat_class
from relay.nat.classify import ALL, OnSeen

STRICT = Behaviour.ADDRESS_AND_PORT_DEPENDENT
HARD = NatClass(True, True, STRICT, STRICT, "192.0.2.1")
EASY = NatClass(True, True, Behaviour.ENDPOINT_INDEPENDENT, STRICT, "192.0.2.2")
OTHER_HARD = replace(HARD, public_ip="192.0.2.3")
OTHER_EASY = replace(EASY, public_ip="192.0.2.4")
STUN = "192.0.2.9:3478"
LOCAL, SEEN, ELSE = ("10.0.0.2", 4000), ("192.0.2.2", 4000), ("192.0.2.2", 4001)
FILTERING = frozenset({"answered_from_other_address", "answered_from_other_port"})


def said(nat: NatClass) -> str:
    return json.dumps(nat.to_json())


@pytest.mark.parametrize(
    ("ours", "theirs", "tried"),
    [
        (HARD, said(OTHER_HARD), False),
        (EASY, said(OTHER_EASY), True),
        (None, said(HARD), True),
        (HARD, None, True),
        (HARD, "nonsense", True),
        (HARD, "{}", True),
        (replace(HARD, udp=False), said(OTHER_HARD), True),  # or STUN alone is unreachable
    ],
)
def test_punch_is_not_tried_where_no_packet_can_come_through(
    ours: NatClass | None, theirs: str | None, tried: bool
) -> None:
    assert (why_hopeless(ours, theirs) is None) == tried


class Asked:
    """A STUN server that is being asked, and says what the test says."""

    def __init__(self) -> None:
        self.watch = NatWatch()
        self.asked: list[tuple[str, int]] = []
        self._on_seen: OnSeen
        self._whole: asyncio.Future[NatClass]

    async def classify(self, host: str, port: int, *, on_seen: OnSeen) -> NatClass:
        self.asked.append((host, port))
        self._on_seen, self._whole = on_seen, asyncio.get_running_loop().create_future()
        return await self._whole

    def sees(self, seen: Observation) -> None:
        if seen.waiting:
            self._on_seen(seen)
        else:
            self._whole.set_result(nat_class(seen))


@pytest.fixture
async def asked(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Asked]:
    made = Asked()
    monkeypatch.setattr(module, "classify", made.classify)
    yield made
    made.watch.close()


async def decision(asked: Asked, theirs: NatClass) -> "asyncio.Task[str | None]":
    task = asyncio.create_task(asked.watch.why_hopeless(STUN, said(theirs)))
    await settled()
    return task


async def settled() -> None:
    for _ in range(6):
        await asyncio.sleep(0)


async def test_easy_nat_waits_for_its_mapping_alone_when_the_other_one_is_easy(asked: Asked) -> None:
    task = await decision(asked, OTHER_EASY)
    assert not task.done(), "a hard NAT here would make it hopeless"
    asked.sees(Observation(LOCAL, SEEN, waiting=ALL - {"mapped"}))
    asked.sees(Observation(LOCAL, SEEN, SEEN, waiting=FILTERING | {"mapped_other_address"}))
    await settled()
    assert not task.done(), "it may still be another port towards another address"
    asked.sees(Observation(LOCAL, SEEN, SEEN, SEEN, waiting=FILTERING))
    await settled()
    assert task.done() and task.result() is None


async def test_hard_nat_on_the_other_side_needs_to_know_our_filter(asked: Asked) -> None:
    task = await decision(asked, OTHER_HARD)
    asked.sees(Observation(LOCAL, SEEN, SEEN, SEEN, waiting=FILTERING))
    await settled()
    assert not task.done()
    asked.sees(Observation(LOCAL, SEEN, SEEN, SEEN, None, True, FILTERING - {"answered_from_other_port"}))
    await settled()
    assert task.done() and task.result() is None, "that answer came: the filter looks at addresses at most"


async def test_hopeless_pair_waits_for_all_of_it_and_is_not_tried(asked: Asked) -> None:
    task = await decision(asked, OTHER_HARD)
    asked.sees(Observation(LOCAL, SEEN, SEEN, SEEN, None, False, FILTERING - {"answered_from_other_port"}))
    await settled()
    assert not task.done()
    asked.sees(Observation(LOCAL, SEEN, SEEN, SEEN, False, False))
    await settled()
    assert "no way through" in (task.result() or "")


async def test_friendly_backbone_is_answered_before_anything_is_known(asked: Asked) -> None:
    task = await decision(asked, NatClass(True, False, *2 * [Behaviour.ENDPOINT_INDEPENDENT], "192.0.2.5"))
    assert task.done() and task.result() is None


async def test_another_network_is_asked_about_while_somebody_waits(asked: Asked) -> None:
    waits, task = asyncio.create_task(asked.watch.look(STUN)), await decision(asked, OTHER_HARD)
    asked.watch.forget()
    asked.watch.prepare(STUN)
    await settled()
    assert len(asked.asked) == 2 and not task.done() and not waits.done()
    asked.sees(Observation(LOCAL, SEEN, SEEN, SEEN, True, True))
    await settled()
    found = waits.result()
    assert task.result() is None and found is not None and found.words.startswith("easy NAT")
    assert await asked.watch.look(STUN) is found and len(asked.asked) == 2, "known and fresh"


async def test_nobody_waits_for_a_watch_that_is_closed(asked: Asked) -> None:
    task = await decision(asked, OTHER_HARD)
    asked.watch.close()
    await settled()
    assert task.done() and task.result() is None
