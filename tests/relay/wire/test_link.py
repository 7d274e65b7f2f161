"""Two ends of a link: only who knows the key gets through, and a silent end is noticed."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay.wire.calls import Partial, Probe
from relay.wire.errors import LocalProtocolError
from relay.wire.frames import Frame, FrameType
from relay.wire.link import BEAT_S, LinkKey, LinkReady, LinkSession
from relay.wire.messages import Failure, LinkHello
from relay.wire.session import (
    Closed,
    EchoReceived,
    FailureReceived,
    PartialReceived,
    ProbeReceived,
)
from relay.wire.tensors import Grid

LINK = "ab" * 16
KEY = b"k" * 32
BACKBONE, NODE, EPOCH = 3, 5, 7  # handles at the relay


class Pair:
    """A backbone's end and a node's end, and a wire between them."""

    def __init__(self, *, backbone_opens: bool = True, node_key: bytes = KEY, known: bool = True) -> None:
        at_backbone, at_node = LinkKey(NODE, EPOCH, KEY), LinkKey(BACKBONE, EPOCH, node_key)
        nonces = ("11" * 16, "22" * 16)
        if backbone_opens:
            self.backbone = LinkSession("backbone", 0.0, nonces[0], link=LINK, known=at_backbone)
            find: Callable[[str], LinkKey | None] = {LINK: at_node}.get if known else {}.get
            self.node = LinkSession("node", 0.0, nonces[1], find=find)
            self.backbone.start()
        else:
            self.node = LinkSession("node", 0.0, nonces[1], link=LINK, known=at_node)
            self.backbone = LinkSession("backbone", 0.0, nonces[0], find={LINK: at_backbone}.get)
            self.node.start()

    def run(self, now: float = 0.0) -> None:
        """Carry what both say until nobody says anything."""
        while True:
            out, back = self.backbone.data_to_send(), self.node.data_to_send()
            if not out and not back:
                return
            for data in out:
                self.node.receive_data(data, now)
            for data in back:
                self.backbone.receive_data(data, now)


@pytest.mark.parametrize("backbone_opens", [True, False])
def test_ends_that_know_the_key_are_ready(backbone_opens: bool) -> None:
    pair = Pair(backbone_opens=backbone_opens)
    pair.run()
    assert pair.backbone.events() == [LinkReady(LINK, LinkKey(NODE, EPOCH, KEY))]
    assert pair.node.events() == [LinkReady(LINK, LinkKey(BACKBONE, EPOCH, KEY))]


@pytest.mark.parametrize("backbone_opens", [True, False])
def test_end_with_another_key_gets_nowhere(backbone_opens: bool) -> None:
    pair = Pair(backbone_opens=backbone_opens, node_key=b"x" * 32)
    pair.run()
    for end in (pair.backbone, pair.node):
        (closed,) = end.events()
        assert isinstance(closed, Closed) and closed.code == 4401


def test_link_that_nobody_expects_is_refused() -> None:
    pair = Pair(known=False)
    pair.run()
    assert pair.backbone.events() == [Closed(4401, "no such link is expected here", by_peer=True)]


def test_proof_cannot_be_played_back_to_its_maker() -> None:
    """A stranger that mirrors all it gets proves nothing: the two ends sign different words."""
    end = LinkSession("backbone", 0.0, "11" * 16, link=LINK, known=LinkKey(NODE, EPOCH, KEY))
    end.start()
    for data in end.data_to_send():
        end.receive_data(data, 0.0)
    (closed,) = end.events()
    assert isinstance(closed, Closed) and closed.code == 4400


def test_calls_pass_both_ways_and_come_from_the_peer_of_the_link() -> None:
    pair = Pair()
    pair.run()
    pair.backbone.events(), pair.node.events()
    pair.backbone.send_probe(9, Probe(100, 50))
    pair.run()
    assert pair.node.events() == [ProbeReceived(BACKBONE, 9, EPOCH, 50)]
    pair.node.send_echo(9, EPOCH, 50)
    partial = Partial.from_sums(1, np.ones((1, 4), np.int64), Grid.X32, 5)
    pair.node.send_partial(10, EPOCH, partial)
    pair.node.send_failure(11, EPOCH, Failure("not_held", "", "queue"))
    pair.run()
    echo, answer, failure = pair.backbone.events()
    assert echo == EchoReceived(NODE, 9, EPOCH)
    assert isinstance(answer, PartialReceived) and (answer.peer, answer.call_id) == (NODE, 10)
    assert isinstance(failure, FailureReceived) and (failure.peer, failure.call_id) == (NODE, 11)


def test_another_peer_in_the_header_changes_nothing() -> None:
    pair = Pair()
    pair.run()
    pair.backbone.events()
    pair.backbone.receive_data(Frame(FrameType.ECHO, b"", peer=99, call_id=4).encode(), 0.0)
    assert pair.backbone.events() == [EchoReceived(NODE, 4, 0)]


@pytest.mark.parametrize("kind", [FrameType.DISPATCH, FrameType.CANCEL, FrameType.PROBE])
def test_node_may_not_ask(kind: FrameType) -> None:
    pair = Pair()
    pair.run()
    pair.backbone.events()
    pair.backbone.receive_data(Frame(kind, b"", peer=1, call_id=1).encode(), 0.0)
    (closed,) = pair.backbone.events()
    assert isinstance(closed, Closed) and closed.code == 4400


def test_nothing_may_be_asked_before_both_have_proved() -> None:
    pair = Pair()
    with pytest.raises(LocalProtocolError):
        pair.backbone.send_cancel(1)
    pair.node.receive_data(Frame(FrameType.CANCEL, b"", peer=1, call_id=1).encode(), 0.0)
    (closed,) = pair.node.events()
    assert isinstance(closed, Closed) and closed.code == 4400


def test_silent_end_is_noticed_after_two_beats() -> None:
    pair = Pair()
    pair.run()
    pair.backbone.events()
    now = 0.0
    while pair.backbone.closed is None:
        at = pair.backbone.next_timer()
        assert at is not None
        now = at
        pair.backbone.handle_timer(now)
    assert pair.backbone.closed.code == 4408
    assert now <= 3 * BEAT_S


def test_end_that_answers_beats_stays() -> None:
    pair = Pair()
    pair.run()
    for beat in range(1, 20):
        for end in (pair.backbone, pair.node):
            end.handle_timer(beat * BEAT_S)
        pair.run(beat * BEAT_S)
    assert pair.backbone.ready and pair.node.ready


def test_stranger_that_says_nothing_is_given_up() -> None:
    pair = Pair()
    pair.node.handle_timer(10.0)
    (closed,) = pair.node.events()
    assert isinstance(closed, Closed) and closed.code == 4408


@given(st.lists(st.binary(max_size=80), max_size=4))
def test_any_bytes_end_in_events_only(messages: list[bytes]) -> None:
    pair = Pair()
    for data in messages:
        pair.node.receive_data(data, 0.0)
    assert not any(isinstance(event, LinkReady) for event in pair.node.events())


def test_second_hello_is_a_breach() -> None:
    pair = Pair()
    pair.run()
    pair.node.events()
    pair.node.receive_data(Frame(FrameType.LINK_HELLO, LinkHello(LINK, "33" * 16).to_payload()).encode(), 0.0)
    (closed,) = pair.node.events()
    assert isinstance(closed, Closed) and closed.code == 4400
