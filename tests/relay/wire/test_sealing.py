"""Who seals with whom: hellos lost, repeated, stale or forged; nodes that wait; ends that insist."""

from dataclasses import replace

import pytest

from relay.wire import sealing
from relay.wire.errors import SealFault
from relay.wire.messages import Assign, PeerNode, Peers, SealAnswer, SealHello
from relay.wire.seal import SealIdentity
from relay.wire.sealing import RESEND_S, BackboneSealing, NodeSealing, SealPolicy

NODE, BACKBONE, OTHER = (SealIdentity.from_seed(bytes([number]) * 32) for number in (1, 2, 3))
BACKBONE_AT, NODE_AT, EPOCH = 2, 5, 7
ASSIGN = Assign(EPOCH, BACKBONE_AT, "0" * 64, (), BACKBONE.public.hex())
LISTED = PeerNode(NODE_AT, "1" * 32, "phone", "wasm", 1.0, EPOCH, {}, seal=NODE.public.hex())


def fresh(number: int) -> bytes:
    return bytes([number]) * 32


def ends() -> tuple[NodeSealing, BackboneSealing, SealHello]:
    node = NodeSealing(SealPolicy(NODE))
    hello = node.assigned(ASSIGN, fresh(10), 100.0)
    assert hello is not None
    return node, BackboneSealing(SealPolicy(BACKBONE)), hello


def answer_of(
    backbone: BackboneSealing, hello: SealHello, ephemeral: int = 20, epoch: int = EPOCH
) -> SealAnswer:
    answer = backbone.hello_received(NODE_AT, epoch, hello, fresh(ephemeral))
    assert answer is not None
    return answer


def test_node_waits_for_keys_before_it_is_asked() -> None:
    node, backbone, hello = ends()
    assert backbone.admitted(Peers((LISTED,))).nodes == () and backbone.waiting == (LISTED,)
    answer = answer_of(backbone, hello)
    assert backbone.admitted(Peers((LISTED,))).nodes == (LISTED,) and backbone.waiting == ()
    assert node.state == "agreeing" and node.answered(BACKBONE_AT, EPOCH, answer)
    assert node.state == "sealed" and node.next_timer() is None
    assert (
        backbone.describe(NODE_AT)["identity"] == NODE.fingerprint and node.backbone == BACKBONE.fingerprint
    )


def test_hello_is_said_again_until_it_is_answered_and_either_answer_will_do() -> None:
    node, backbone, hello = ends()
    assert node.handle_timer(100.0 + RESEND_S - 0.1) is None
    assert node.handle_timer(100.0 + RESEND_S) == (BACKBONE_AT, EPOCH, hello)
    first, second = answer_of(backbone, hello, 20), answer_of(backbone, hello, 21)
    assert first == second, "keys do not change under frames that are on their way"
    assert node.answered(BACKBONE_AT, EPOCH, first) and not node.answered(BACKBONE_AT, EPOCH, second)


def test_same_assignment_again_changes_nothing_and_another_pairing_has_other_keys() -> None:
    node, backbone, hello = ends()
    node.answered(BACKBONE_AT, EPOCH, answer_of(backbone, hello))
    seal = node.book.get(BACKBONE_AT, EPOCH)
    assert node.assigned(ASSIGN, fresh(11), 200.0) is None and node.book.get(BACKBONE_AT, EPOCH) is seal
    again = node.assigned(replace(ASSIGN, epoch=EPOCH + 1), fresh(11), 200.0)
    assert again is not None and again.ephemeral != hello.ephemeral
    assert node.state == "agreeing" and node.book.get(BACKBONE_AT, EPOCH) is None
    assert not node.answered(BACKBONE_AT, EPOCH, answer_of(backbone, hello)), "of the pairing that is over"


def test_forged_halves_are_faults_and_the_node_goes_on_asking() -> None:
    node, backbone, hello = ends()
    forged = replace(hello, ephemeral="00" * 32)
    with pytest.raises(SealFault):
        backbone.hello_received(NODE_AT, EPOCH, forged, fresh(20))
    with pytest.raises(SealFault):
        node.answered(BACKBONE_AT, EPOCH, replace(answer_of(backbone, hello), signature="00" * 64))
    assert node.next_timer() is not None and node.answered(BACKBONE_AT, EPOCH, answer_of(backbone, hello))


def test_next_pairing_may_be_sealed_before_the_backbone_hears_of_it() -> None:
    node, backbone, hello = ends()
    answer_of(backbone, hello)
    again = node.assigned(replace(ASSIGN, epoch=EPOCH + 1), fresh(11), 200.0)
    assert again is not None
    answer_of(backbone, again, epoch=EPOCH + 1)
    assert backbone.admitted(Peers((LISTED,))).nodes == (), "the list is of the pairing that is over"
    assert backbone.admitted(Peers((replace(LISTED, epoch=EPOCH + 1),))).nodes != ()


def test_node_whose_identity_the_relay_swapped_is_not_asked() -> None:
    _, backbone, hello = ends()
    answer_of(backbone, hello)
    assert backbone.admitted(Peers((replace(LISTED, seal=OTHER.public.hex()),))).nodes == ()


def test_who_does_not_seal_is_asked_unless_that_is_required() -> None:
    bare = replace(LISTED, seal=None)
    assert BackboneSealing(SealPolicy(BACKBONE)).admitted(Peers((bare,))).nodes == (bare,)
    strict = BackboneSealing(SealPolicy(BACKBONE, required=True))
    assert strict.admitted(Peers((bare,))).nodes == () and strict.refused == (bare,)
    silent = BackboneSealing(SealPolicy())
    assert silent.admitted(Peers((LISTED,))).nodes == (LISTED,), "whoever could, we do not"
    assert silent.hello_received(NODE_AT, EPOCH, ends()[2], fresh(20)) is None


@pytest.mark.parametrize(
    ("policy", "assign", "why"),
    [
        (SealPolicy(NODE), ASSIGN, None),
        (SealPolicy(NODE), replace(ASSIGN, seal=None), None),
        (SealPolicy(NODE, required=True), replace(ASSIGN, seal=None), "does not seal"),
        (SealPolicy(NODE, backbone=BACKBONE.fingerprint), ASSIGN, None),
        (SealPolicy(NODE, backbone=OTHER.fingerprint), ASSIGN, "not the pinned"),
        (SealPolicy(NODE, backbone=BACKBONE.fingerprint), replace(ASSIGN, seal=None), "is missing"),
        (SealPolicy(None, required=True), ASSIGN, "wants it sealed"),
        (SealPolicy(NODE, required=True), Assign(0, 0, None, ()), None),
    ],
)
def test_node_refuses_a_backbone_by_name(policy: SealPolicy, assign: Assign, why: str | None) -> None:
    found = NodeSealing(policy).refusal(assign)
    assert found is None if why is None else found is not None and why in found


def test_node_says_why_it_is_unsealed() -> None:
    node = NodeSealing(SealPolicy(NODE))
    node.assigned(replace(ASSIGN, seal=None), fresh(10), 0.0)
    assert (node.state, node.why) == ("unsealed", "the backbone does not seal")
    node.assigned(Assign(0, 0, None, ()), fresh(10), 0.0)
    assert (node.state, node.why) == ("none", "")
    off = NodeSealing(SealPolicy())
    off.assigned(ASSIGN, fresh(10), 0.0)
    assert (off.state, off.why) == ("unsealed", "sealing is switched off here")


def test_keys_of_nodes_that_left_are_forgotten_in_time_and_never_those_of_nodes_that_serve(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sealing, "MAX_SEALS", 3)
    _, backbone, hello = ends()
    answer_of(backbone, hello)
    backbone.admitted(Peers((LISTED,)))
    for peer in range(100, 110):
        backbone.hello_received(peer, EPOCH, hello, fresh(peer))
    assert len(backbone._answers) == 4
    assert backbone.admitted(Peers((LISTED,))).nodes == (LISTED,)
