"""Which ICE candidates of the other end are tried; the page reads the same vectors."""

import json
from ipaddress import ip_address
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backbone.lanes.ice import MAX_CANDIDATES, MAX_PER_ADDRESS, Candidates, special

VECTORS = Path(__file__).parents[2] / "vectors" / "candidates.json"
CASES = json.loads(VECTORS.read_text("utf-8"))["cases"]


def line(address: str, port: int = 5000) -> str:
    return f"candidate:1 1 UDP 2122 {address} {port} typ host"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["about"])
def test_candidates_are_few_and_lead_to_peers_only(case: dict[str, list[object]]) -> None:
    candidates = Candidates()
    assert [candidates.take(str(each)) for each in case["candidates"]] == case["taken"]


def test_description_keeps_all_but_what_is_not_tried() -> None:
    mdns = "a=candidate:1 1 UDP 2122 0b5ae3a4-92b1-4d4e-8a2f-0a8d1f9c7f11.local 51234 typ host\r\n"
    real = "a=candidate:2 1 UDP 1685 192.0.2.7 51234 typ srflx raddr 0.0.0.0 rport 0\r\n"
    candidates = Candidates()
    assert candidates.of("v=0\r\n" + mdns + real + "a=end\r\n") == "v=0\r\n" + real + "a=end\r\n"
    assert not candidates.take(real), "what came in the description counts with what comes later"


@given(st.lists(st.tuples(st.ip_addresses() | st.text(), st.integers(0, 65535))))
def test_whatever_is_offered_is_bounded(offered: list[tuple[object, int]]) -> None:
    candidates = Candidates()
    taken = [str(address) for address, port in offered if candidates.take(line(str(address), port))]
    assert len(taken) <= MAX_CANDIDATES
    for address in taken:
        assert not special(address) and not ip_address(address).is_loopback
        assert taken.count(address) <= MAX_PER_ADDRESS


@given(st.text())
def test_any_text_is_a_description(text: str) -> None:
    assert Candidates().of(text) == text or "a=candidate:" in text
