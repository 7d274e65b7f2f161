"""A timer of a state machine: woken in time, re-armed only for sooner, whatever is left until then."""

import asyncio
from time import monotonic

from backbone.lanes.wakeup import Wakeup


async def test_it_wakes_once_and_not_before_the_time_is_there() -> None:
    woken = asyncio.Event()
    wakeup = Wakeup(woken.set)
    at = monotonic() + 0.02
    wakeup.set(at)
    await asyncio.wait_for(woken.wait(), 1)
    assert monotonic() >= at - 0.002  # the loop's millisecond, and the clock's
    woken.clear()
    await asyncio.sleep(0.03)
    assert not woken.is_set()


async def test_what_is_due_already_may_be_set_again_before_it_wakes() -> None:
    woken = asyncio.Event()
    wakeup = Wakeup(woken.set)
    for _ in range(3):  # a message that comes while the timer is due: uvloop has no TimerHandle then
        wakeup.set(monotonic())
    await asyncio.wait_for(woken.wait(), 1)


async def test_sooner_replaces_later_and_later_leaves_sooner() -> None:
    woken: list[float] = []
    wakeup = Wakeup(lambda: woken.append(monotonic()))
    start = monotonic()
    wakeup.set(start + 60)
    wakeup.set(start + 0.02)
    wakeup.set(start + 60)
    await asyncio.sleep(0.06)
    assert len(woken) == 1


async def test_none_and_cancel_take_it_back() -> None:
    woken: list[bool] = []
    wakeup = Wakeup(lambda: woken.append(True))
    wakeup.set(monotonic() + 0.005)
    wakeup.set(None)
    await asyncio.sleep(0.02)
    wakeup.set(monotonic() + 0.005)
    wakeup.cancel()
    await asyncio.sleep(0.02)
    assert not woken
