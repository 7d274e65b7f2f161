"""When the network counts as changed."""

import asyncio

import pytest

from backbone.lanes.network import address_towards, watch


async def test_change_of_address_is_told_and_an_outage_alone_is_not() -> None:
    seen = iter(["10.0.0.5", "10.0.0.5", None, "10.0.0.5", None, "192.168.1.9", "192.168.1.9", "10.0.0.5"])
    changes = []
    looks = 0

    async def look() -> str | None:
        nonlocal looks
        looks += 1
        return next(seen)

    with pytest.raises(RuntimeError, match="StopIteration"):
        await watch(look, lambda: changes.append(looks), every_s=0)
    assert changes == [6, 8]


async def test_first_way_is_no_change() -> None:
    seen: list[str | None] = [None, "10.0.0.5", "10.0.0.5"]

    async def look() -> str | None:
        if not seen:
            raise asyncio.CancelledError
        return seen.pop(0)

    with pytest.raises(asyncio.CancelledError):
        await watch(look, lambda: pytest.fail("nothing changed"), every_s=0)


async def test_loopback_is_reached_from_loopback_and_nonsense_from_nowhere() -> None:
    assert await address_towards("127.0.0.1", 9) == "127.0.0.1"
    assert await address_towards("no-such-host.invalid", 9) is None
