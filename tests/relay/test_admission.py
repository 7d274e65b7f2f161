"""Who may come in."""

from hypothesis import given
from hypothesis import strategies as st

from relay.admission import FLOOD_COSTS, STARTS, Blocks, Waiting, address_of, block_of


def test_block_is_an_address_or_what_one_customer_has() -> None:
    assert block_of("192.0.2.7") == block_of("::ffff:192.0.2.7") == "192.0.2.7"
    assert block_of("2001:db8:1:2:3::4") == block_of("2001:db8:1:2::9%eth0") == "2001:db8:1:2::/64"
    assert block_of("127.0.0.1") == block_of("::1") == block_of("") == block_of("nonsense") == ""


@given(st.text(max_size=60))
def test_any_text_is_a_block_or_none(text: str) -> None:
    assert isinstance(block_of(text), str)


def test_only_a_proxy_on_this_machine_says_for_whom_it_speaks() -> None:
    said = {"X-Forwarded-For": "198.51.100.1, 203.0.113.9"}
    assert address_of("127.0.0.1", said) == "203.0.113.9"
    assert address_of("192.0.2.7", said) == "192.0.2.7"
    assert address_of("127.0.0.1", {}) == "127.0.0.1"


def test_three_hundred_nodes_behind_one_address_come_back_at_once_twice() -> None:
    blocks = Blocks(1024)
    for now in (0.0, 1.0):
        assert all(blocks.enter("192.0.2.7", now) is None for _ in range(300))
        for _ in range(300):
            blocks.leave("192.0.2.7")


def test_one_address_has_so_many_sessions_and_others_have_theirs() -> None:
    blocks = Blocks(2)
    assert blocks.enter("a", 0.0) is None and blocks.enter("a", 0.0) is None
    assert blocks.enter("a", 0.0) == "a has 2 sessions, more are not taken from one address"
    assert blocks.enter("b", 0.0) is None
    blocks.leave("a")
    assert blocks.enter("a", 0.0) is None


def test_address_that_floods_comes_back_more_slowly() -> None:
    blocks = Blocks(1 << 20)
    for _ in range(int(STARTS[1] / FLOOD_COSTS)):
        blocks.flooded("a", 0.0)
    assert "flooding" in (blocks.enter("a", 0.0) or "")
    assert blocks.enter("a", 1.0) is None and blocks.enter("b", 0.0) is None


def test_this_machine_and_its_proxy_have_no_limit_of_their_own() -> None:
    blocks = Blocks(1)
    blocks.flooded("", 0.0)
    assert all(blocks.enter("", 0.0) is None for _ in range(5000))


def test_who_waits_longest_in_the_largest_block_makes_way() -> None:
    waiting: Waiting[int] = Waiting()
    waiting.add(1, "honest", 10.0)
    for key in (2, 3, 4):
        waiting.add(key, "crowd", 10.0)
    assert waiting.victim() == 2
    waiting.remove(3)
    assert waiting.victim() == 1, "the oldest of all where no block has more"
    assert waiting.victim() == 4 and waiting.victim() is None


def test_who_does_not_complete_its_request_in_time_is_overdue_once() -> None:
    waiting: Waiting[int] = Waiting()
    waiting.add(1, "a", 10.0)
    waiting.add(2, "b", 11.0)
    waiting.add(3, "a", 12.0)
    waiting.remove(2)
    assert waiting.overdue(9.9) == [] and waiting.overdue(11.5) == [1] and waiting.overdue(11.5) == []
    assert len(waiting) == 1 and waiting.overdue(12.0) == [3]


@given(st.lists(st.tuples(st.sampled_from("arv"), st.integers(0, 5), st.sampled_from("xyz")), max_size=200))
def test_any_order_of_comings_and_goings_keeps_the_books(steps: list[tuple[str, int, str]]) -> None:
    waiting: Waiting[int] = Waiting()
    here: set[int] = set()
    for now, (step, key, block) in enumerate(steps):
        if step == "a":
            waiting.add(key, block, float(now))
            here.add(key)
        elif step == "r":
            waiting.remove(key)
            here.discard(key)
        elif (victim := waiting.victim()) is not None:
            here.remove(victim)
        assert len(waiting) == len(here)
    assert set(waiting.overdue(1e9)) == here
