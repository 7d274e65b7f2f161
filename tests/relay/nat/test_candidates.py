"""NAT classes from observations, and hopeless pairs against what ICE really did behind such NATs."""

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay.nat.candidates import (
    NO_UDP,
    Behaviour,
    NatClass,
    Observation,
    hopeless,
    nat_class,
    strictest_class,
)

EI, AD, APD, UNKNOWN = Behaviour
LOCAL, SEEN, ELSE = ("10.0.0.2", 4000), ("192.0.2.1", 4000), ("192.0.2.1", 4001)


def nat(name: str, public_ip: str) -> NatClass:
    mapping, filtering = {
        "open": (EI, EI),
        "fullcone": (EI, EI),
        "addrrestricted": (EI, AD),
        "portrestricted": (EI, APD),
        "symmetric": (APD, APD),
    }[name]
    return NatClass(True, name != "open", mapping, filtering, public_ip)


# libdatachannel and aiortc behind these NATs in network namespaces: does ICE connect?
MEASURED = {
    ("portrestricted", "portrestricted"): True,
    ("fullcone", "portrestricted"): True,
    ("fullcone", "symmetric"): True,
    ("addrrestricted", "symmetric"): True,
    ("portrestricted", "symmetric"): False,
    ("symmetric", "symmetric"): False,
}


@pytest.mark.parametrize(("pair", "connects"), MEASURED.items())
def test_hopeless_pairs_are_those_where_ice_failed(pair: tuple[str, str], connects: bool) -> None:
    a, b = nat(pair[0], "192.0.2.1"), nat(pair[1], "192.0.2.2")
    assert hopeless(a, b) is hopeless(b, a) is not connects


@pytest.mark.parametrize("name", ["fullcone", "addrrestricted", "portrestricted", "symmetric"])
def test_open_host_can_be_reached_from_behind_any_nat(name: str) -> None:
    assert not hopeless(nat("open", "192.0.2.1"), nat(name, "192.0.2.2"))


def test_without_udp_nothing_is_tried() -> None:
    assert hopeless(NO_UDP, nat("open", "192.0.2.2")) and hopeless(NO_UDP, NO_UDP)


def test_two_hard_nats_under_one_address_may_share_a_network() -> None:
    assert not hopeless(nat("symmetric", "192.0.2.1"), nat("symmetric", "192.0.2.1"))


def test_what_is_not_known_is_tried() -> None:
    unknown = NatClass(True, True, UNKNOWN, UNKNOWN, "192.0.2.1")
    assert not hopeless(None, nat("symmetric", "192.0.2.2"))
    assert not hopeless(unknown, nat("symmetric", "192.0.2.2"))


def test_hopeless_is_symmetric_and_a_friendlier_nat_never_makes_it_worse() -> None:
    order = (EI, AD, APD)
    kinds = list(itertools.product(order, order))
    for (ma, fa), (mb, fb) in itertools.product(kinds, kinds):
        a, b = NatClass(True, True, ma, fa, "192.0.2.1"), NatClass(True, True, mb, fb, "192.0.2.2")
        assert hopeless(a, b) == hopeless(b, a)
        if not hopeless(a, b):
            for friendlier in order[: order.index(fa)]:
                assert not hopeless(NatClass(True, True, ma, friendlier, "192.0.2.1"), b)
            assert not hopeless(NatClass(True, True, EI, fa, "192.0.2.1"), b)


@pytest.mark.parametrize(
    ("seen", "mapping", "filtering"),
    [
        (Observation(LOCAL, SEEN, SEEN, SEEN, True, True), EI, EI),
        (Observation(LOCAL, SEEN, SEEN, SEEN, False, True), EI, AD),
        (Observation(LOCAL, SEEN, SEEN, SEEN, False, False), EI, APD),
        (Observation(LOCAL, SEEN, SEEN, ELSE, False, False), AD, APD),
        (Observation(LOCAL, SEEN, ELSE, ELSE, False, False), APD, APD),
        (Observation(LOCAL, SEEN, SEEN, None, None, False), EI, APD),
        (Observation(LOCAL, SEEN, SEEN, None, None, True), EI, EI),
        (Observation(LOCAL, SEEN), UNKNOWN, UNKNOWN),
    ],
)
def test_class_follows_from_what_was_seen(
    seen: Observation, mapping: Behaviour, filtering: Behaviour
) -> None:
    found = nat_class(seen)
    assert (found.udp, found.translated, found.mapping, found.filtering) == (True, True, mapping, filtering)
    assert found.public_ip == "192.0.2.1"


FIELDS = (
    "mapped_other_port",
    "mapped_other_address",
    "answered_from_other_address",
    "answered_from_other_port",
)


@given(
    st.fixed_dictionaries(
        dict(
            zip(
                FIELDS,
                [*[st.sampled_from([None, SEEN, ELSE])] * 2, *[st.sampled_from([None, True, False])] * 2],
                strict=True,
            )
        )
    ),
    st.sets(st.sampled_from(FIELDS)),
    st.sampled_from(["open", "fullcone", "addrrestricted", "portrestricted", "symmetric"]),
)
def test_pair_that_is_worth_a_try_at_worst_is_worth_one_whatever_is_still_to_come(
    whole: dict[str, Any], waiting: set[str], other: str
) -> None:
    seen = Observation(LOCAL, SEEN, **{**whole, **dict.fromkeys(waiting)}, waiting=frozenset(waiting))
    there = nat(other, "192.0.2.2")
    if not hopeless(strictest_class(seen), there):
        assert not hopeless(nat_class(Observation(LOCAL, SEEN, **whole)), there)
    if not waiting:
        assert strictest_class(seen) == nat_class(seen)


def test_before_any_answer_all_is_possible() -> None:
    asked = Observation(LOCAL, None, waiting=frozenset({"mapped"}))
    assert hopeless(strictest_class(asked), nat("portrestricted", "192.0.2.2"))
    assert strictest_class(Observation(LOCAL, None)) == NO_UDP


def test_words_are_those_of_the_field() -> None:
    assert nat_class(Observation(LOCAL, None)).words == "no UDP"
    assert nat_class(Observation(LOCAL, LOCAL, LOCAL, LOCAL, True, True)).words == "no NAT"
    firewall = nat_class(Observation(LOCAL, LOCAL, LOCAL, LOCAL, False, False))
    assert firewall.words == "no NAT, address-and-port-dependent filtering"
    assert nat("symmetric", "x").words.startswith("hard NAT (address-and-port-dependent mapping")
    assert nat("fullcone", "x").words.startswith("easy NAT (endpoint-independent mapping")


@pytest.mark.parametrize("found", [NO_UDP, nat("symmetric", "192.0.2.1"), nat("open", "2001:db8::1")])
def test_class_survives_the_wire(found: NatClass) -> None:
    assert NatClass.from_json(found.to_json()) == found


@given(
    st.one_of(
        st.none(),
        st.lists(st.integers()),
        st.dictionaries(
            st.sampled_from(list(NO_UDP.to_json())),
            st.one_of(st.none(), st.booleans(), st.text(), st.sampled_from([b.value for b in Behaviour])),
        ),
    )
)
def test_whatever_a_peer_says_is_a_class_or_nothing(said: object) -> None:
    found = NatClass.from_json(said)
    assert found is None or found.to_json() == said or found.public_ip is not None
