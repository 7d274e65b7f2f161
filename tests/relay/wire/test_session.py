"""Sessions: two machines and a wire between them; time passes by hand."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay.wire.calls import Dispatch, Partial
from relay.wire.close import CloseCode, clip_reason, in_words, may_reconnect
from relay.wire.errors import LocalProtocolError
from relay.wire.frames import MAX_FRAME_BYTES, Frame, FrameType
from relay.wire.messages import (
    Assign,
    Drain,
    Failure,
    Hello,
    Manifest,
    ManifestLayer,
    Offer,
    Pause,
    Peers,
    Ping,
    Register,
    SliceReady,
    SliceWanted,
    Welcome,
)
from relay.wire.session import (
    BACKBONE_TABLE,
    HELLO_TIMEOUT_S,
    NODE_TABLE,
    PING_INTERVAL_S,
    RELAY_TABLES,
    BackboneSession,
    CancelReceived,
    ClientSession,
    Closed,
    CorruptReceived,
    DispatchReceived,
    FailureReceived,
    ForwardReceived,
    NodeSession,
    PartialReceived,
    RelaySession,
    State,
    Way,
)
from relay.wire.tensors import Grid, XEncoding

WELCOME = Welcome("5" * 32, "relay/0", PING_INTERVAL_S, MAX_FRAME_BYTES)
OFFER = Offer("wasm-plain", 1 << 30, 1.0, None, False, "phone")
FORMULA = {
    "hidden_dim": 4,
    "expert_dim": 2,
    "gate_type": None,
    "up_type": 8,
    "down_type": 8,
    "activation": "silu",
    "alpha": 0.0,
    "limit": 0.0,
    "weight_position": "after",
    "biased": False,
}
LAYER = ManifestLayer(0, FORMULA, {"x32": 0, "x16": None}, 10, ("a" * 64,))
REGISTER = Register("home", Manifest("0" * 64, "tiny", 1, 1, (LAYER,)))
DISPATCH = Dispatch(
    model_tag=1,
    layer=0,
    hidden_dim=4,
    x_encoding=XEncoding.F32,
    grid=Grid.X32,
    row_exponents=np.zeros(1, np.int16),
    counts=np.ones(1, np.uint16),
    experts=np.zeros(1, np.uint16),
    weights=np.ones(1, np.float32),
    x=bytes(16),
)
PARTIAL = Partial.from_sums(0, np.ones((1, 4), np.int64), Grid.X32, 5)


class SessionPair:
    """A client and the relay's end of it, and a wire that delivers at once."""

    def __init__(self, client: ClientSession | None = None, now: float = 100.0) -> None:
        self.now = now
        self.client: Any = client or NodeSession(now)
        self.relay = RelaySession(now)

    def deliver(self) -> tuple[list[Any], list[Any]]:
        """Carry everything both ways until both are silent; return what client and relay saw."""
        seen: tuple[list[Any], list[Any]] = ([], [])
        while True:
            up, down = self.client.data_to_send(), self.relay.data_to_send()
            for data in up:
                self.relay.receive_data(data, self.now)
            for data in down:
                self.client.receive_data(data, self.now)
            seen[0].extend(self.client.events())
            seen[1].extend(self.relay.events())
            if not up and not down:
                return seen

    def greet(self) -> "SessionPair":
        role = "node" if isinstance(self.client, NodeSession) else "backbone"
        self.client.send_hello(Hello(role, "1" * 32, "2" * 32))  # type: ignore[arg-type]
        assert [type(event) for event in self.deliver()[1]] == [Hello]
        self.relay.send_welcome(WELCOME, self.now)
        assert self.deliver()[0] == [WELCOME]
        return self

    def ready(self) -> "SessionPair":
        self.greet()
        if isinstance(self.client, NodeSession):
            self.client.send_offer(OFFER)
            assert self.deliver() == ([], [OFFER])
        else:
            self.client.send_register(REGISTER)
            assert self.deliver() == ([], [REGISTER])
        return self


def backbone_pair() -> SessionPair:
    return SessionPair(BackboneSession(100.0))


def test_node_is_greeted_offers_and_is_assigned() -> None:
    pair = SessionPair().ready()
    assign = Assign(7, 2, None, ())
    pair.relay.send_assign(assign)
    assert pair.deliver() == ([assign], [])
    pair.client.send_slice_ready(SliceReady(7, {0: (1,)}))
    pair.client.send_pause(True)
    assert pair.deliver() == ([], [SliceReady(7, {0: (1,)}), Pause(True)])
    assert pair.client.state is pair.relay.state is State.READY


def test_backbone_is_greeted_registers_and_learns_of_nodes() -> None:
    pair = backbone_pair().ready()
    pair.relay.send_peers(Peers(()))
    pair.relay.send_slice_wanted(SliceWanted("a" * 64))
    assert pair.deliver() == ([Peers(()), SliceWanted("a" * 64)], [])


def test_a_call_goes_from_backbone_to_node_and_back() -> None:
    backbone, node = backbone_pair().ready(), SessionPair().ready()

    def forward(source: SessionPair, target: SessionPair, sender: int) -> None:
        (event,) = source.deliver()[1]
        assert isinstance(event, ForwardReceived)
        target.client.receive_data(target.relay.forward(event.header, event.data, sender), 100.0)

    backbone.client.send_dispatch(22, 77, 5, 1500, DISPATCH)
    forward(backbone, node, sender=11)
    (call,) = node.client.events()
    assert isinstance(call, DispatchReceived)
    assert (call.peer, call.call_id, call.epoch, call.deadline_ms) == (11, 77, 5, 1500)
    assert call.dispatch.to_payload() == DISPATCH.to_payload()

    node.client.send_partial(call.peer, call.call_id, call.epoch, PARTIAL)
    forward(node, backbone, sender=22)
    assert backbone.client.events() == [PartialReceived(22, 77, 5, PARTIAL)]

    node.client.send_failure(11, 78, 5, Failure("not_held", "no", "compute"))
    forward(node, backbone, sender=22)
    assert backbone.client.events() == [FailureReceived(22, 78, 5, Failure("not_held", "no", "compute"))]

    backbone.client.send_cancel(22, 79, 5)
    forward(backbone, node, sender=11)
    assert node.client.events() == [CancelReceived(11, 79, 5)]


def test_relay_answers_for_a_peer_that_is_gone() -> None:
    pair = backbone_pair().ready()
    failure = Failure("gone", "node left", "send")
    pair.relay.send_failure(22, 77, 5, failure)
    assert pair.deliver()[0] == [FailureReceived(22, 77, 5, failure)]


@pytest.mark.parametrize("kind", [FrameType.PARTIAL, FrameType.FAILURE])
def test_backbone_survives_a_corrupt_answer_and_names_the_call(kind: FrameType) -> None:
    pair = backbone_pair().ready()
    pair.client.receive_data(Frame(kind, b"garbage", 22, 77, 5).encode(), pair.now)
    (event,) = pair.client.events()
    assert isinstance(event, CorruptReceived)
    assert (event.type, event.peer, event.call_id, event.epoch) == (kind, 22, 77, 5)
    assert pair.client.state is State.READY


def test_node_survives_a_corrupt_dispatch() -> None:
    pair = SessionPair().ready()
    pair.client.receive_data(Frame(FrameType.DISPATCH, b"", 11, 77, 5).encode(), pair.now)
    assert isinstance(pair.client.events()[0], CorruptReceived)


def test_text_message_closes_the_session() -> None:
    pair = SessionPair()
    pair.relay.receive_data("hello", pair.now)
    assert pair.relay.events() == [
        Closed(CloseCode.PROTOCOL, "a text message; frames are binary messages", by_peer=False)
    ]


def test_oversized_message_closes_with_its_own_code() -> None:
    pair = SessionPair().ready()
    pair.relay.receive_data(bytes(MAX_FRAME_BYTES + 1), pair.now)
    (closed,) = pair.relay.events()
    assert isinstance(closed, Closed) and closed.code == CloseCode.TOO_LARGE


def test_other_version_closes_with_its_own_code() -> None:
    pair = SessionPair()
    pair.client.send_hello(Hello("node", "1" * 32, "2" * 32))
    (data,) = pair.client.data_to_send()
    pair.relay.receive_data(data[:2] + b"\x09" + data[3:], pair.now)
    (closed,) = pair.relay.events()
    assert isinstance(closed, Closed) and closed.code == CloseCode.VERSION


def test_peer_learns_why_it_was_closed() -> None:
    pair = SessionPair().greet()
    pair.relay.close(CloseCode.REPLACED, "a newer session of the same id")
    client_events, relay_events = pair.deliver()
    assert client_events == [Closed(CloseCode.REPLACED, "a newer session of the same id", by_peer=True)]
    assert relay_events == [Closed(CloseCode.REPLACED, "a newer session of the same id", by_peer=False)]


def test_what_follows_the_end_is_discarded() -> None:
    pair = SessionPair().ready()
    pair.client.send_bye("tab closed")
    assert pair.deliver()[1] == [Closed(CloseCode.NORMAL, "tab closed", by_peer=True)]
    pair.relay.receive_data(Frame(FrameType.PAUSE, Pause(True).to_payload()).encode(), pair.now)
    pair.relay.receive_close(1006)
    pair.relay.close(CloseCode.PROTOCOL, "again")
    pair.relay.handle_timer(pair.now + 1000)
    assert pair.relay.events() == [] and pair.relay.data_to_send() == []
    assert pair.relay.next_timer() is None


def test_malformed_bye_still_ends_the_session() -> None:
    pair = SessionPair().ready()
    pair.relay.receive_data(Frame(FrameType.BYE, b"?").encode(), pair.now)
    (closed,) = pair.relay.events()
    assert isinstance(closed, Closed) and closed.code == CloseCode.PROTOCOL


def test_lost_transport_ends_the_session() -> None:
    pair = SessionPair().ready()
    pair.client.receive_close(1006, "gone")
    assert pair.client.events() == [Closed(1006, "gone", by_peer=True)]


def test_relay_gives_up_on_a_silent_stranger() -> None:
    pair = SessionPair()
    assert pair.relay.next_timer() == pair.now + HELLO_TIMEOUT_S
    pair.relay.handle_timer(pair.now + HELLO_TIMEOUT_S)
    (closed,) = pair.relay.events()
    assert isinstance(closed, Closed)
    assert (closed.code, closed.reason) == (CloseCode.TIMEOUT, "no greeting within 10 s")


def test_client_gives_up_on_a_relay_that_does_not_answer() -> None:
    pair = SessionPair()
    pair.client.send_hello(Hello("node", "1" * 32, "2" * 32))
    pair.client.handle_timer(pair.now + HELLO_TIMEOUT_S)
    assert pair.client.closed.code == CloseCode.TIMEOUT


def test_ping_is_answered_and_measured() -> None:
    pair = SessionPair().ready()
    pair.now += PING_INTERVAL_S
    assert pair.client.next_timer() == pair.now
    pair.client.handle_timer(pair.now)
    (ping,) = pair.client.data_to_send()
    pair.relay.receive_data(ping, pair.now + 0.02)
    (pong,) = pair.relay.data_to_send()
    pair.client.receive_data(pong, pair.now + 0.05)
    assert pair.client.rtt_ms == pytest.approx(50.0)
    assert pair.relay.events() == pair.client.events() == []


@pytest.mark.parametrize(("bytes_per_beat", "lives"), [(1, False), (20_000, True)])
def test_bytes_that_move_are_a_sign_of_life_but_no_trickle(bytes_per_beat: int, lives: bool) -> None:
    pair = SessionPair().ready()
    for beat in range(1, 20):
        at = pair.relay.next_timer()
        if at is None:
            break
        pair.relay.handle_timer(at, moved_bytes=beat * bytes_per_beat)
    assert (pair.relay.closed is None) is lives
    if not lives:
        assert at is None and beat == 3
    else:  # and once they stop it is as silent as any
        for _ in range(2):
            pair.relay.handle_timer(pair.relay.next_timer() or 0.0, moved_bytes=beat * bytes_per_beat)
        assert pair.relay.closed is not None


def test_what_moved_before_the_network_changed_says_nothing() -> None:
    pair = SessionPair().ready()
    pair.client.check_alive(pair.now + 9.0, 3.0, moved_bytes=10**9)
    pair.client.handle_timer(pair.now + 12.0, moved_bytes=10**9)
    assert pair.client.closed is not None


def test_silence_is_noticed_within_two_beats() -> None:
    pair = SessionPair().ready()
    cut = pair.now
    pair.relay.handle_timer(pair.relay.next_timer() or 0.0)
    assert pair.relay.closed is None and len(pair.relay.data_to_send()) == 1
    pair.now = pair.relay.next_timer() or 0.0
    pair.relay.handle_timer(pair.now)
    (closed,) = pair.relay.events()
    assert isinstance(closed, Closed)
    assert (closed.code, closed.reason) == (CloseCode.TIMEOUT, "nothing heard for 20.0 s")
    assert pair.now - cut <= 2 * PING_INTERVAL_S


def test_a_session_asked_whether_it_lives_is_given_up_sooner_or_goes_on() -> None:
    for answered in (False, True):
        pair = SessionPair().ready()
        pair.client.check_alive(pair.now, 3.0)
        (ping,) = pair.client.data_to_send()
        if answered:
            pair.relay.receive_data(ping, pair.now)
            (pong,) = pair.relay.data_to_send()
            pair.client.receive_data(pong, pair.now + 0.1)
        assert pair.client.next_timer() == pair.now + 3.0
        pair.client.handle_timer(pair.now + 3.0)
        assert (pair.client.closed is None) is answered


def test_who_is_not_welcomed_or_is_gone_is_not_asked() -> None:
    pair = SessionPair()
    pair.client.check_alive(pair.now, 3.0)
    assert pair.client.data_to_send() == []
    pair.ready()
    pair.client.receive_close(1006)
    pair.client.check_alive(pair.now, 3.0)
    assert pair.client.data_to_send() == []


def test_any_frame_is_a_sign_of_life() -> None:
    pair = SessionPair().ready()
    for _ in range(20):
        pair.now = pair.relay.next_timer() or 0.0
        pair.relay.handle_timer(pair.now)
        pair.relay.data_to_send()  # lost
        pair.client.send_pause(False)
        pair.deliver()
    assert pair.relay.closed is None


@pytest.mark.parametrize(
    "act",
    [
        lambda s: s.send_offer(OFFER),
        lambda s: s.send_pause(True),
        lambda s: s.send_partial(1, 1, 1, PARTIAL),
    ],
)
def test_node_may_not_speak_before_its_turn(act: Any) -> None:
    pair = SessionPair()
    with pytest.raises(LocalProtocolError, match="in state start"):
        act(pair.client)
    assert pair.client.data_to_send() == []


def test_node_may_not_speak_after_bye() -> None:
    pair = SessionPair().ready()
    pair.client.send_bye("done")
    with pytest.raises(LocalProtocolError, match="in state closed"):
        pair.client.send_pause(True)


def test_relay_refuses_a_call_from_a_node_that_has_not_offered() -> None:
    pair = SessionPair().greet()
    pair.relay.receive_data(Frame(FrameType.PARTIAL, b"", 1, 1).encode(), pair.now)
    (closed,) = pair.relay.events()
    assert isinstance(closed, Closed)
    assert closed.reason == "PARTIAL is not expected in state open"


def test_relay_refuses_a_dispatch_from_a_node() -> None:
    pair = SessionPair().ready()
    pair.relay.receive_data(Frame(FrameType.DISPATCH, b"", 1, 1).encode(), pair.now)
    assert pair.relay.state is State.CLOSED


def test_relay_refuses_a_second_hello() -> None:
    pair = SessionPair().ready()
    hello = Frame(FrameType.HELLO, Hello("node", "1" * 32, "2" * 32).to_payload()).encode()
    pair.relay.receive_data(hello, pair.now)
    assert pair.relay.state is State.CLOSED


def test_calls_still_flow_while_draining_and_a_late_offer_is_heard() -> None:
    pair = SessionPair().greet()
    pair.relay.send_drain(Drain("restart", 0.5))
    pair.client.send_offer(OFFER)  # they cross on the wire
    assert pair.deliver() == ([Drain("restart", 0.5)], [OFFER])
    pair.client.send_partial(1, 2, 3, PARTIAL)
    assert isinstance(pair.deliver()[1][0], ForwardReceived)
    assert pair.client.state is pair.relay.state is State.DRAINING


def test_the_relays_tables_mirror_the_clients() -> None:
    flip = {Way.SEND: Way.RECEIVE, Way.RECEIVE: Way.SEND}
    for client, relay in ((NODE_TABLE, RELAY_TABLES["node"]), (BACKBONE_TABLE, RELAY_TABLES["backbone"])):
        for state, row in client.items():
            assert {(flip[way], kind): to for (way, kind), to in row.items()} == relay[state]


def feed(session: Any, messages: Sequence[bytes | str]) -> None:
    for message in messages:
        session.receive_data(message, 100.0)
        session.handle_timer(100.0)
    events = session.events()
    closed = [event for event in events if isinstance(event, Closed)]
    assert len(closed) <= 1 and (not closed or events[-1] is closed[0])


MESSAGES = st.lists(
    st.one_of(
        st.binary(max_size=50),
        st.text(max_size=5),
        st.builds(
            lambda kind, payload, ids: Frame(kind, payload, *(ids if 16 <= kind < 32 else ())).encode(),
            st.sampled_from([k for k in FrameType if k < 48 and k != FrameType.CANCEL]),
            st.sampled_from([b"", b"{}", b'{"t":1}', b'{"paused":true}', Ping(1).to_payload(), b"xx"]),
            st.tuples(st.integers(1, 3), st.integers(1, 3)),
        ),
    ),
    max_size=6,
)


@given(MESSAGES, st.booleans())
def test_any_messages_give_events_and_never_an_exception(messages: list[Any], ready: bool) -> None:
    for pair in (SessionPair(), backbone_pair()):
        if ready:
            pair.ready()
        feed(pair.relay, messages)
        feed(pair.client, messages)


def test_close_codes_say_who_may_come_back() -> None:
    assert may_reconnect(1006) and may_reconnect(CloseCode.TIMEOUT) and may_reconnect(CloseCode.OVERLOADED)
    assert not may_reconnect(CloseCode.AUTH) and not may_reconnect(CloseCode.REPLACED)


def test_reason_is_clipped_between_characters() -> None:
    assert clip_reason("ü" * 100) == "ü" * 61


@pytest.mark.parametrize("code", [0, *CloseCode, 1006, 1011, 4999])
def test_why_a_session_ended_is_said_in_words(code: int) -> None:
    assert in_words(code, "as it said") == "as it said"
    assert in_words(code, "") and not any(letter.isdigit() for letter in in_words(code, ""))
