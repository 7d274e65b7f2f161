"""The pool: what peers say goes in, what they must be told comes out; nothing is told twice."""

from dataclasses import replace
from typing import Any

from relay.pool.pool import UNPAIRED, Pool, Told
from relay.wire.manifest import Manifest, ManifestLayer
from relay.wire.messages import Assign, Offer, Peers, Register, SliceReady

FORMULA: dict[str, Any] = {"hidden_dim": 32}
GRID: dict[str, Any] = {"x32": 1, "x16": None}


def slice_id(model: str, layer: int, expert: int) -> str:
    return f"{model}{layer:02}{expert:02}".ljust(64, "0")


def register(model: str = "aa", layers: int = 2, experts: int = 2, size: int = 10) -> Register:
    manifest_layers = tuple(
        ManifestLayer(n, FORMULA, GRID, size, tuple(slice_id(model, n, e) for e in range(experts)))
        for n in range(layers)
    )
    return Register(model, Manifest(model.ljust(64, "0"), model, experts, 1, manifest_layers))


def offer(memory: int = 100, inventory: tuple[str, ...] = ()) -> Offer:
    return Offer("wasm", memory, 1.0, None, False, "phone", inventory)


def assigns(told: list[Told]) -> dict[int, Assign]:
    return {t.handle: t.message for t in told if isinstance(t.message, Assign)}


def peers(told: list[Told]) -> dict[int, Peers]:
    return {t.handle: t.message for t in told if isinstance(t.message, Peers)}


def held(assign: Assign) -> set[tuple[int, int]]:
    return {(layer.layer, expert) for layer in assign.layers for expert in layer.experts}


def ready(assign: Assign) -> SliceReady:
    return SliceReady(assign.epoch, {layer.layer: tuple(layer.experts) for layer in assign.layers})


def joined(pool: Pool, memory: int = 100) -> Assign:
    pool.register(1, "b1", register())
    pool.offer(2, "n1", offer(memory))
    return assigns(pool.settle())[2]


def test_node_is_assigned_and_the_backbone_learns_when_it_is_ready() -> None:
    pool = Pool()
    assign = joined(pool)
    assert held(assign) == {(0, 0), (0, 1), (1, 0), (1, 1)} and assign.peer == 1 and assign.epoch == 1
    pool.slices_ready(2, SliceReady(assign.epoch, {0: (0,)}))
    (node,) = peers(pool.settle())[1].nodes
    assert (node.peer, node.epoch, dict(node.experts)) == (2, assign.epoch, {0: (0,)})
    pool.slices_ready(2, ready(assign))
    (node,) = peers(pool.settle())[1].nodes
    assert dict(node.experts) == {0: (0, 1), 1: (0, 1)}


def test_nothing_is_told_twice() -> None:
    pool = Pool()
    assign = joined(pool)
    pool.slices_ready(2, ready(assign))
    pool.settle()
    assert not pool.unsettled
    pool.slices_ready(2, ready(assign))
    pool.pause(2, False)
    pool.offer(2, "n1", offer(inventory=tuple(slice_id("aa", n, e) for n in (0, 1) for e in (0, 1))))
    assert pool.unsettled and pool.settle() == []


def test_node_without_a_backbone_is_told_nothing_and_keeps_what_it_holds() -> None:
    pool = Pool()
    pool.offer(2, "n1", offer())
    assert pool.settle() == []


def test_paused_node_is_left_out_and_comes_back() -> None:
    pool = Pool()
    pool.slices_ready(2, ready(joined(pool)))
    assert len(peers(pool.settle())[1].nodes) == 1
    pool.pause(2, True)
    assert peers(pool.settle())[1] == Peers(())
    pool.pause(2, False)
    assert len(peers(pool.settle())[1].nodes) == 1


def test_node_that_leaves_is_taken_from_the_list_and_its_slices_move() -> None:
    pool = Pool()
    pool.register(1, "b1", register())
    pool.offer(2, "n1", offer(20))
    pool.offer(3, "n2", offer(40))
    first = assigns(pool.settle())
    assert held(first[2]) | held(first[3]) == {(0, 0), (0, 1), (1, 0), (1, 1)}
    pool.slices_ready(2, ready(first[2]))
    pool.slices_ready(3, ready(first[3]))
    pool.settle()
    pool.remove(2)
    told = pool.settle()
    assert [node.peer for node in peers(told)[1].nodes] == [3]


def test_backbone_that_reconnects_finds_its_nodes_as_they_were() -> None:
    pool = Pool()
    assign = joined(pool)
    pool.slices_ready(2, ready(assign))
    pool.settle()
    pool.remove(1)
    assert assigns(pool.settle()) == {2: UNPAIRED}
    assert pool.settle() == []
    pool.slices_ready(2, ready(assign))  # late, of the pairing that is over
    pool.register(9, "b1", register())
    again = assigns(pool.settle())[2]
    assert again.peer == 9 and again.epoch != assign.epoch and held(again) == held(assign)


def test_after_a_restart_inventories_decide() -> None:
    pool = Pool()
    pool.offer(2, "n1", offer(20, (slice_id("aa", 1, 0), slice_id("aa", 1, 1))))
    pool.offer(3, "n0", offer(20, (slice_id("aa", 0, 0), slice_id("aa", 0, 1))))
    assert pool.settle() == []
    pool.register(4, "b1", register())
    told = assigns(pool.settle())
    assert held(told[2]) == {(1, 0), (1, 1)} and held(told[3]) == {(0, 0), (0, 1)}


def test_stale_or_foreign_ready_is_ignored() -> None:
    pool = Pool()
    assign = joined(pool)
    pool.slices_ready(2, replace(ready(assign), epoch=assign.epoch + 1))
    pool.slices_ready(77, ready(assign))
    assert peers(pool.settle()) == {}
    pool.slices_ready(2, SliceReady(assign.epoch, {0: (0, 99), 50: (1,)}))
    (node,) = peers(pool.settle())[1].nodes
    assert dict(node.experts) == {0: (0,)}


def test_only_paired_peers_may_talk() -> None:
    pool = Pool()
    joined(pool)
    pool.register(5, "b2", register("bb"))
    assert pool.paired(1, 2) and pool.paired(2, 1)
    assert not pool.paired(5, 2) and not pool.paired(1, 5) and not pool.paired(1, 77)


def test_second_backbone_gets_a_share_of_the_nodes() -> None:
    pool = Pool()
    pool.register(1, "b1", register("aa"))
    for handle in (2, 3):
        pool.offer(handle, f"n{handle}", offer())
    pool.settle()
    pool.register(4, "b2", register("bb"))
    (moved,) = assigns(pool.settle()).values()
    assert moved.peer == 4 and moved.model == "bb".ljust(64, "0")


def test_backbones_are_found_by_slice() -> None:
    pool = Pool()
    pool.register(1, "b1", register("aa"))
    assert [b.handle for b in pool.backbones_with(slice_id("aa", 1, 1))] == [1]
    assert pool.backbones_with("f" * 64) == []


def test_backbone_that_registers_another_model_has_its_nodes_assigned_anew() -> None:
    pool = Pool()
    first = joined(pool)
    pool.register(1, "b1", register("bb"))
    again = assigns(pool.settle())[2]
    assert again.model == "bb".ljust(64, "0") and again.epoch != first.epoch


def halves(pool: Pool) -> dict[int, Assign]:
    """Two nodes that hold a half each, ready."""
    pool.register(1, "b1", register())
    pool.offer(2, "n1", offer(20))
    pool.offer(3, "n2", offer(40))
    told = assigns(pool.settle())
    for handle, assign in told.items():
        pool.slices_ready(handle, ready(assign))
    pool.settle()
    return told


def test_node_whose_session_broke_keeps_its_place_and_costs_nobody_a_download() -> None:
    pool = Pool()
    before = halves(pool)
    assert pool.park(2)
    told = pool.settle()
    assert assigns(told) == {}, "the other one is left in peace"
    assert [node.peer for node in peers(told)[1].nodes] == [3], "and is the only one to be asked"
    inventory = tuple(i for layer in before[2].layers for i in layer.experts.values())
    pool.offer(7, "n1", offer(20, inventory))
    again = assigns(pool.settle())
    assert set(again) == {7} and held(again[7]) == held(before[2])
    assert again[7].epoch != before[2].epoch, "frames of the former session are fenced off"
    assert not pool.away


def test_place_of_a_node_that_does_not_come_back_goes_to_others() -> None:
    pool = Pool()
    pool.register(1, "b1", register())
    pool.offer(2, "n1", offer(20))
    first = assigns(pool.settle())
    pool.park(2)
    pool.offer(3, "n2", offer(20))
    second = assigns(pool.settle())
    assert held(first[2]) | held(second[3]) == {(0, 0), (0, 1), (1, 0), (1, 1)}
    pool.expire("n1")
    pool.expire("n1")
    pool.offer(4, "n3", offer(20))
    third = assigns(pool.settle())
    assert held(second[3]) | held(third[4]) == {(0, 0), (0, 1), (1, 0), (1, 1)}


def test_of_a_node_that_is_away_only_what_somebody_serves_is_remembered() -> None:
    pool = Pool()
    told = halves(pool)
    held_here = tuple(i for layer in told[2].layers for i in layer.experts.values())
    pool.offer(2, "n1", offer(20, held_here + tuple(f"{number:064x}" for number in range(1000))))
    pool.settle()
    assert pool.park(2)
    kept = pool.away["n1"]
    assert kept.inventory == set(held_here) and kept.offer.inventory == ()


def test_node_that_was_never_given_anything_has_no_place_to_keep() -> None:
    pool = Pool()
    pool.offer(2, "n1", offer())
    assert not pool.park(2) and not pool.park(99)


def test_node_that_is_away_while_its_backbone_leaves_comes_back_to_another() -> None:
    pool = Pool()
    halves(pool)
    pool.park(2)
    pool.remove(1)
    pool.settle()
    pool.register(8, "b2", register("bb"))
    pool.offer(7, "n1", offer(20))
    told = assigns(pool.settle())
    assert told[7].peer == told[3].peer == 8


def test_node_that_is_away_counts_for_its_backbone_when_nodes_are_shared_out() -> None:
    pool = Pool()
    pool.register(1, "b1", register("aa"))
    pool.register(2, "b2", register("bb"))
    for handle, node in ((3, "n1"), (4, "n2")):
        pool.offer(handle, node, offer())
    first = {handle: assign.peer for handle, assign in assigns(pool.settle()).items()}
    assert set(first.values()) == {1, 2}
    pool.park(3)
    assert assigns(pool.settle()) == {}
    pool.offer(9, "n1", offer())
    assert {h: a.peer for h, a in assigns(pool.settle()).items()} == {9: first[3]}


def test_what_a_node_refuses_goes_to_others_at_once_and_to_it_never_again() -> None:
    pool = Pool()
    pool.register(1, "b1", register())
    pool.offer(2, "n1", offer(20))
    pool.offer(3, "n2", offer(20))
    told = assigns(pool.settle())
    mine = held(told[2])
    ((layer, _), *_) = mine
    pool.slices_ready(2, SliceReady(told[2].epoch, {}, {layer: (0, 1)}, "weight format 99"))
    told = assigns(pool.settle())
    assert held(told[3]) == mine and not held(told[2]) & mine
    assert pool.nodes[2].why == "weight format 99"
    pool.offer(4, "n3", offer(999))
    pool.settle()
    assert not pool.nodes[2].desired & pool.nodes[2].refused


def test_node_with_another_kernel_is_asked_again_for_what_it_refused() -> None:
    pool = Pool()
    assign = joined(pool)
    pool.slices_ready(2, SliceReady(assign.epoch, {}, {0: (0, 1), 1: (0, 1)}, "the graphics kernel: no"))
    assert held(assigns(pool.settle())[2]) == set()
    pool.offer(2, "n1", replace(offer(), kernel="native", gb_per_s=9.0))
    again = assigns(pool.settle())[2]
    assert held(again) == held(assign)
    pool.slices_ready(2, ready(again))
    (node,) = peers(pool.settle())[1].nodes
    assert (node.kernel, node.gb_per_s) == ("native", 9.0)


def test_node_that_holds_less_than_it_pledged_says_so_and_keeps_what_it_has() -> None:
    pool = Pool()
    assign = joined(pool)
    pool.slices_ready(2, SliceReady(assign.epoch, {0: (0, 1)}))
    pool.offer(2, "n1", offer(20))
    assert held(assigns(pool.settle())[2]) == {(0, 0), (0, 1)}


def test_assignment_never_grows_beyond_one_frame() -> None:
    pool = Pool()
    pool.register(1, "b1", register(layers=2, experts=4))
    catalogue = pool.backbones[1].catalogue
    assert catalogue.most_units > 40_000
    catalogue.most_units = 3
    pool.offer(2, "n1", offer(1 << 50))
    pool.offer(3, "n2", offer(1 << 50))
    pool.offer(4, "n3", offer(1 << 50))
    told = assigns(pool.settle())
    assert all(len(held(assign)) <= 3 for assign in told.values())
    assert set().union(*map(held, told.values())) == {(n, e) for n in (0, 1) for e in range(4)}


def test_what_a_node_holds_that_stays_paused_is_given_to_others_until_it_is_back() -> None:
    pool = Pool()
    pool.register(1, "b1", register())
    for handle in (2, 3, 4):
        pool.offer(handle, f"n{handle}", offer(20))
    told = assigns(pool.settle())
    for handle, assign in told.items():
        pool.slices_ready(handle, ready(assign))
    pool.settle()
    alone = next(h for h in told if not any(held(told[h]) & held(told[o]) for o in told if o != h))
    pool.pause(alone, True, 10.0)
    pool.tick(11.0)
    assert assigns(pool.settle(11.0)) == {}, "a short pause costs nobody a download"
    pool.tick(15.0)
    others = told | assigns(pool.settle(15.0))
    others.pop(alone)
    assert set().union(*map(held, others.values())) == {(0, 0), (0, 1), (1, 0), (1, 1)}
    pool.pause(alone, False, 20.0)
    assert assigns(pool.settle(20.0)) == {}


def settled_elsewhere(pool: Pool) -> tuple[Pool, Pool, list[Told]]:
    """What a driver does that settles in a thread: before, the settled copy, and what is told."""
    before = pool.copy()
    working = before.copy()
    return before, working, working.settle()


def test_settling_a_copy_and_adopting_it_is_settling() -> None:
    here, elsewhere = Pool(), Pool()
    for pool in (here, elsewhere):
        pool.register(1, "b1", register())
        pool.offer(2, "n1", offer(20))
        pool.offer(3, "n2", offer(40))
    told = here.settle()
    before, working, told_elsewhere = settled_elsewhere(elsewhere)
    assert elsewhere.nodes[2].backbone is None, "nothing is decided before it is adopted"
    elsewhere.adopt(working, before)
    assert told_elsewhere == told and elsewhere.nodes == here.nodes
    assert elsewhere.backbones[1].nodes == here.backbones[1].nodes == {2, 3}
    assert not elsewhere.unsettled and elsewhere.settle() == []


def test_what_is_said_while_a_copy_settles_is_not_lost() -> None:
    pool = Pool()
    pool.slices_ready(2, ready(joined(pool)))
    pool.settle()
    pool.offer(3, "n2", offer(40))
    before, working, _ = settled_elsewhere(pool)
    pool.pause(2, True)  # meanwhile one pauses, one leaves, one comes, and one says what it has
    pool.remove(3)
    pool.offer(4, "n3", offer(40))
    pool.slices_ready(2, SliceReady(pool.nodes[2].epoch, {0: (0,)}))
    pool.adopt(working, before)
    assert set(pool.nodes) == {2, 4} and pool.backbones[1].nodes == {2} and pool.unsettled
    assert pool.nodes[2].paused and pool.nodes[2].ready == {0}
    told = pool.settle()
    assert set(assigns(told)) == {4} and peers(told)[1].nodes == ()
    pool.pause(2, False)
    assert [dict(node.experts) for node in peers(pool.settle())[1].nodes] == [{0: (0,)}]


def test_backbone_that_registers_anew_while_a_copy_settles_hears_everything_again() -> None:
    pool = Pool()
    pool.register(1, "b1", replace(register(), changes=True))
    pool.offer(2, "n1", offer())
    before, working, _ = settled_elsewhere(pool)
    pool.register(1, "b1", replace(register(experts=3), changes=True))
    pool.adopt(working, before)
    told = pool.settle()
    assert held(assigns(told)[2]) == {(layer, e) for layer in (0, 1) for e in (0, 1, 2)}
    assert not peers(told)[1].change


def test_backbone_that_takes_changes_hears_only_what_changed() -> None:
    pool = Pool()
    pool.register(1, "b1", replace(register(), changes=True))
    for handle in (2, 3, 4):
        pool.offer(handle, f"n{handle}", offer())
    told = pool.settle()
    known = peers(told)[1]
    assert known == Peers(())
    for handle, assign in assigns(told).items():
        pool.slices_ready(handle, ready(assign))
    change = peers(pool.settle())[1]
    assert change.change and [node.peer for node in change.nodes] == [2, 3, 4]
    known = change.after(known)
    pool.pause(3, True)
    change = peers(pool.settle())[1]
    assert change == Peers((), change=True, gone=(3,))
    known = change.after(known)
    pool.pause(3, False)
    known = peers(pool.settle())[1].after(known)
    assert {node.peer for node in known.nodes} == {2, 3, 4}


def test_long_list_of_peers_comes_in_pieces() -> None:
    big = replace(register(layers=60, experts=400, size=1), changes=True)
    pool = Pool()
    for handle in range(2, 8):
        pool.offer(handle, f"n{handle}", offer(60 * 400))
    pool.register(1, "b1", big)
    told = pool.settle()
    for handle, assign in assigns(told).items():
        pool.slices_ready(handle, ready(assign))
    pieces = [t.message for t in pool.settle() if isinstance(t.message, Peers)]
    assert len(pieces) == 3 and all(len(p.to_payload()) < 400_000 for p in pieces)
    known = peers(told)[1]
    for piece in pieces:
        known = piece.after(known)
    assert [len(node.experts) for node in known.nodes] == [60] * 6


def test_kernel_that_changes_while_a_copy_settles_is_asked_again() -> None:
    pool = Pool()
    assign = joined(pool)
    pool.slices_ready(2, SliceReady(assign.epoch, {}, {0: (0, 1), 1: (0, 1)}, "the graphics kernel: no"))
    before, working, _ = settled_elsewhere(pool)
    pool.offer(2, "n1", replace(offer(), kernel="native", gb_per_s=9.0))
    pool.adopt(working, before)
    assert held(assigns(pool.settle())[2]) == held(assign)


def test_backbone_learns_where_a_node_that_listens_was_seen_and_of_no_other() -> None:
    for listen, seen in (("ws://9.9.9.9:9", "9.9.9.9"), (None, None)):
        pool = Pool()
        pool.register(1, "b1", register())
        pool.offer(2, "n1", replace(offer(), listen=listen), "9.9.9.9")
        pool.slices_ready(2, ready(assigns(pool.settle())[2]))
        (node,) = peers(pool.settle())[1].nodes
        assert node.seen == seen
