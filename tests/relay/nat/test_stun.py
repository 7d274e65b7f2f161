"""STUN: the bytes of RFC 8489, the behaviour of RFC 5780, and what a stranger can make it do: little."""

import random
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay.nat.stun import (
    BURST,
    CHANGE_IP,
    CHANGE_PORT,
    MAX_GROWTH,
    PORT_BURST,
    PORT_RATE_PER_S,
    RATE_PER_S,
    Attribute,
    Budget,
    Kind,
    Message,
    Server,
    Transaction,
    binding_request,
    decode,
)

ID = bytes(range(12))
PEER = ("192.0.2.1", 32853)
PEER6 = ("2001:db8:1234:5678:11:2233:4455:6677", 32853)
A1, A2, P1, P2 = "203.0.113.1", "203.0.113.2", 3478, 3479

# RFC 5769 §2.2 and §2.3: sample responses. MESSAGE-INTEGRITY is read over, FINGERPRINT is checked.
RFC5769_IPV4 = bytes.fromhex(
    "0101003c2112a442b7e7a701bc34d686fa87dfae"
    "8022000b7465737420766563746f7220"
    "002000080001a147e112a643"
    "000800142b91f599fd9e90c38c7489f92af9ba53f06be7d7"
    "80280004c07d4c96"
)
RFC5769_IPV6 = bytes.fromhex(
    "010100482112a442b7e7a701bc34d686fa87dfae"
    "8022000b7465737420766563746f7220"
    "002000140002a1470113a9faa5d3f179bc25f4b5bed2b9d9"
    "00080014a382954e4be67bf11784c97c8292c275bfe3ed41"
    "80280004c8fb0b4c"
)


def full() -> Server:
    return Server((P1, P2), (A1, A2))


def ask(server: Server, request: bytes, source: tuple[str, int] = PEER, now: float = 0.0) -> Message:
    reply = server.receive_datagram(request, source, (A1, P1), now)
    assert reply is not None
    answer = decode(reply.data)
    assert answer is not None and answer.transaction_id == ID
    return answer


@pytest.mark.parametrize(("data", "mapped"), [(RFC5769_IPV4, PEER), (RFC5769_IPV6, PEER6)])
def test_sample_responses_of_the_rfc_are_read(data: bytes, mapped: tuple[str, int]) -> None:
    message = decode(data)
    assert message is not None and message.kind is Kind.SUCCESS and message.mapped == mapped


@pytest.mark.parametrize("source", [PEER, PEER6])
def test_answer_says_where_the_request_came_from_and_who_we_are(source: tuple[str, int]) -> None:
    answer = ask(full(), binding_request(ID), source)
    assert answer.kind is Kind.SUCCESS and answer.mapped == source
    if source is PEER:
        assert answer.get(Attribute.SOFTWARE) == b"expertswarm" and answer.other == (A2, P2)


def test_smallest_request_is_answered_by_what_matters_most() -> None:
    """A browser's request is the bare header."""
    answer = ask(full(), binding_request(ID)[:2] + b"\0\0" + binding_request(ID)[4:20])
    assert answer.mapped == PEER and answer.other == (A2, P2) and answer.get(Attribute.SOFTWARE) is None


@pytest.mark.parametrize(
    ("change", "origin"),
    [
        (0, (A1, P1)),
        (CHANGE_PORT, (A1, P2)),
        (CHANGE_IP, (A2, P1)),
        (CHANGE_IP | CHANGE_PORT, (A2, P2)),
    ],
)
def test_change_request_is_answered_from_there(change: int, origin: tuple[str, int]) -> None:
    reply = full().receive_datagram(binding_request(ID, change), PEER, (A1, P1), 0.0)
    assert reply is not None and reply.origin == origin and reply.destination == PEER


@pytest.mark.parametrize(
    ("server", "change"),
    [
        (Server((P1,)), CHANGE_PORT),
        (Server((P1, P2)), CHANGE_IP),
        (Server((P1,), (A1, A2)), CHANGE_IP | CHANGE_PORT),
    ],
)
def test_change_we_cannot_make_is_refused_and_not_promised(server: Server, change: int) -> None:
    answer = ask(server, binding_request(ID, change))
    assert answer.kind is Kind.ERROR and answer.error_code == 420
    assert answer.get(Attribute.UNKNOWN_ATTRIBUTES) == struct.pack("!H", Attribute.CHANGE_REQUEST)
    assert ask(server, binding_request(ID)).other is None


def test_attribute_that_must_be_understood_and_is_not_is_named() -> None:
    priority, optional = 0x0024, 0x8029
    request = Message(Kind.REQUEST, ID, ((priority, bytes(4)), (optional, bytes(8)))).encode()
    answer = ask(full(), request)
    assert answer.kind is Kind.ERROR and answer.error_code == 420
    assert answer.get(Attribute.UNKNOWN_ATTRIBUTES) == struct.pack("!H", priority)


def test_response_port_is_another_port_of_the_same_asker() -> None:
    request = Message(Kind.REQUEST, ID, ((Attribute.RESPONSE_PORT, b"\x04\xd2\0\0"),)).encode()
    reply = full().receive_datagram(request, PEER, (A1, P1), 0.0)
    assert reply is not None and reply.destination == (PEER[0], 1234)
    answer = decode(reply.data)
    assert answer is not None and answer.mapped == PEER


@pytest.mark.parametrize("kind", [Kind.SUCCESS, Kind.ERROR, Kind.INDICATION])
def test_only_requests_are_answered_so_two_servers_cannot_be_set_on_each_other(kind: Kind) -> None:
    data = Message(kind, ID).encode()
    assert full().receive_datagram(data, PEER, (A1, P1), 0.0) is None


@pytest.mark.parametrize(
    "source", [("192.0.2.1", 0), ("224.0.0.1", 5), ("255.255.255.255", 5), ("ff02::1", 5)]
)
def test_addresses_that_are_no_peer_get_no_answer(source: tuple[str, int]) -> None:
    assert full().receive_datagram(binding_request(ID), source, (A1, P1), 0.0) is None


def test_damaged_fingerprint_is_dropped() -> None:
    request = bytearray(binding_request(ID))
    request[-1] ^= 1
    assert decode(bytes(request)) is None


def test_flood_of_one_socket_leaves_others_behind_its_address_their_share() -> None:
    server, request = full(), binding_request(ID)

    def answers(port: int, now: float, count: int) -> int:
        sent = (server.receive_datagram(request, (PEER[0], port), (A1, P1), now) for _ in range(count))
        return sum(reply is not None for reply in sent)

    assert answers(1, 0.0, 10_000) == PORT_BURST
    assert [answers(port, 0.0, 10) for port in range(2, 18)] == [10] * 16
    assert answers(1, 1.0, 10_000) == PORT_RATE_PER_S


def test_each_source_has_its_own_budget_and_earns_it_back() -> None:
    server, request = full(), binding_request(ID)

    def answers(source: tuple[str, int], now: float, count: int) -> int:
        """Each from another port of that address."""
        sources = ((source[0], 1000 + n) for n in range(count))
        replies = (server.receive_datagram(request, each, (A1, P1), now) for each in sources)
        return sum(reply is not None for reply in replies)

    assert answers(PEER, 0.0, 1000) == BURST and server.limited == 1000 - BURST
    assert answers(("192.0.2.1", 9), 0.0, 5) == 0, "another port is the same source"
    assert answers(("192.0.2.2", 9), 0.0, 5) == 5
    assert answers(PEER, 0.5, 1000) == RATE_PER_S / 2
    assert answers(PEER6, 0.0, 1000) == BURST
    assert answers(("2001:db8:1234:5678::1", 9), 0.0, 5) == 0, "a /64 is one source"


def test_budget_remembers_a_bounded_number_of_sources() -> None:
    budget = Budget(1.0, 1.0, max_sources=8)
    for number in range(100):
        assert budget.take(str(number), 0.0)
    assert len(budget) == 8


requests = st.builds(
    lambda kind, attributes: Message(kind, ID, tuple(attributes)).encode(),
    st.sampled_from(Kind),
    st.lists(
        st.tuples(st.sampled_from([*Attribute, 0x0024, 0x7FFF, 0x8029]), st.binary(max_size=40)), max_size=6
    ),
)


@given(
    st.one_of(st.binary(max_size=200), requests, requests.map(lambda data: data[:-1])),
    st.sampled_from([PEER, PEER6]),
    st.sampled_from([(A1, P1), (A2, P2), ("198.51.100.7", P1), (A1, 1)]),
)
def test_any_datagram_gives_a_small_reply_to_its_sender_or_nothing(
    data: bytes, source: tuple[str, int], local: tuple[str, int]
) -> None:
    reply = full().receive_datagram(data, source, local, 0.0)
    if reply is None:
        return
    answer = decode(reply.data)
    assert answer is not None and answer.kind in (Kind.SUCCESS, Kind.ERROR)
    assert answer.transaction_id == data[8:20] and reply.destination[0] == source[0]
    assert answer.mapped == source or answer.error_code == 420
    headers = 28 if source is PEER else 48
    assert len(reply.data) + headers <= MAX_GROWTH * (len(data) + headers)
    if answer.kind is Kind.ERROR:
        assert answer.get(Attribute.UNKNOWN_ATTRIBUTES)


@given(st.binary(max_size=100))
def test_any_bytes_are_a_message_that_encodes_again_or_nothing(data: bytes) -> None:
    message = decode(data)
    assert message is None or decode(message.encode()) is not None


def test_transaction_repeats_with_growing_pauses_and_gives_up() -> None:
    transaction = Transaction(ID, now=10.0)
    sent, now = [], 10.0
    while (due := transaction.next_timer()) is not None:
        now = due
        if transaction.handle_timer(now) is not None:
            sent.append(now)
    assert sent == [10.0, 10.25, 10.75, 11.75] and now == 12.25 and transaction.over


def test_transaction_keeps_the_pace_of_the_round_trip_once_that_is_known() -> None:
    transaction = Transaction(ID, now=0.0)
    assert transaction.handle_timer(0.0) is not None and transaction.next_timer() == 0.25
    transaction.round_trip(0.06)
    assert transaction.next_timer() == 0.12
    sent = [0.0]
    while (due := transaction.next_timer()) is not None:
        if transaction.handle_timer(due) is not None:
            sent.append(due)
    assert sent == pytest.approx([0.0, 0.12, 0.36, 0.84]) and due is None
    for took_s, rto_s in ((0.0001, 0.1), (3.0, 0.5)):
        slow = Transaction(ID, now=0.0)
        slow.round_trip(took_s)
        slow.handle_timer(0.0)
        assert slow.next_timer() == rto_s


@pytest.mark.parametrize("round_trip_s", [0.001, 0.06, 0.2])
def test_lossy_line_is_hardly_ever_taken_for_a_filter(round_trip_s: float) -> None:
    """Each twentieth packet is lost either way; and an outage of a third of a second hides no answer."""
    chance = random.Random(5)

    def lost(outage: tuple[float, float]) -> bool:
        transaction = Transaction(ID, now=0.0)
        transaction.round_trip(round_trip_s)
        while (due := transaction.next_timer()) is not None:
            request = transaction.handle_timer(due)
            arrives = chance.random() > 0.05 and chance.random() > 0.05 and not outage[0] <= due < outage[1]
            if request is not None and arrives:
                return False
        return True

    assert sum(lost((0, 0)) for _ in range(20_000)) < 8  # two are expected
    assert sum(lost((-0.1, 0.25)) for _ in range(2000)) < 2000 * 0.02


def test_transaction_takes_its_own_answer_only() -> None:
    transaction = Transaction(ID, now=0.0)
    request = transaction.handle_timer(0.0)
    assert request is not None and transaction.handle_timer(0.1) is None
    assert not transaction.receive_datagram(request)
    assert not transaction.receive_datagram(Message(Kind.SUCCESS, bytes(12)).encode())
    reply = full().receive_datagram(request, PEER, (A1, P1), 0.0)
    assert reply is not None and transaction.receive_datagram(reply.data)
    assert transaction.answer is not None and transaction.answer.mapped == PEER and transaction.over
