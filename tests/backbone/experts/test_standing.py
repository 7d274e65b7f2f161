"""Which nodes may be asked, and who is measured: strangers cost little, however many there are."""

from backbone.experts.deadlines import DeadlinePolicy, Size
from backbone.experts.standing import (
    PROBE_SHARE,
    PROBES_AT_ONCE,
    RECORDS_KEPT,
    DispatchPolicy,
    Offload,
    Standing,
)

ROW = 5_000
ONE = Size(ROW, 8)


def standing(offload: Offload = Offload.AUTO, *names: str) -> Standing:
    made = Standing(DispatchPolicy(DeadlinePolicy(), offload=offload))
    made.met(((name, i + 1) for i, name in enumerate(names)), set(names))
    return made


def test_a_stranger_is_measured_first_or_where_that_is_wanted_asked_at_once() -> None:
    assert standing(Offload.AUTO, "a").candidates(["a"], ONE, 10.0) == []
    assert [c.name for c in standing(Offload.ALWAYS, "a").candidates(["a"], ONE, 10.0)] == ["a"]
    assert standing(Offload.AUTO, "a").to_probe(["a"], ROW, ROW, 10.0, 11.0) == "a"
    assert standing(Offload.ALWAYS, "a").to_probe(["a"], ROW, ROW, 10.0, 11.0) is None


def test_probes_take_a_share_of_our_time_and_few_are_under_way() -> None:
    names = [f"s{i}" for i in range(30)]
    made, now, sent = standing(Offload.AUTO, *names), 10.0, []
    for _ in range(1000):  # 10 s of calls
        now += 0.01
        if made.probe_due(now) and (name := made.to_probe(names, ROW, ROW, now, now + 1)) is not None:
            made.records[name].asked(ONE)
            made.probe_sent(name, ONE, now, now + 0.001)
            sent.append(name)
    assert len(sent) == PROBES_AT_ONCE == len(set(sent))  # nobody answered
    for name in sent:
        made.records[name].closed(ONE, late=False)
        made.probe_over()
    made.probe_sent("s20", ONE, now, now + 0.001)
    assert not made.probe_due(now + 0.99 * 0.001 * (1 + PROBE_SHARE))
    assert made.probe_due(now + 1.01 * 0.001 * (1 + PROBE_SHARE))


def test_a_probe_grows_while_a_node_is_quick_and_not_while_it_is_slow() -> None:
    made = standing(Offload.AUTO, "quick", "slow")
    for _ in range(3):
        made.answered("quick", ONE, 0.01, 0.0, 10.0, late=False)
        made.answered("slow", ONE, 0.5, 0.0, 10.0, late=False)
    call = 500 * ROW
    quick, slow = made.records["quick"], made.records["slow"]
    assert made.grows(quick, call, ROW, 10.0, 10.1) and quick.probe_bytes(ROW) == 8 * ROW
    assert not made.grows(slow, call, ROW, 10.0, 10.1)
    assert made.to_probe(["slow"], call, ROW, 10.5, 10.6) is None
    assert made.to_probe(["slow"], call, ROW, 12.5, 12.6) == "slow"  # it may have become better
    made.probe_sent("slow", ONE, 12.5, 12.5)
    assert made.records["slow"].probe_at == 14.5


def test_strangers_that_are_late_shorten_the_patience_with_the_next() -> None:
    made = standing(Offload.ALWAYS, "a", "b", "c")
    waits = []
    for name in "abc":
        waits.append(made.patience_s(name, ONE))
        made.missed(name)
    assert waits == [0.25, 0.125, 0.0625]
    made.met([("d", 9)], {"d"})
    made.answered("d", ONE, 0.01, 0.0, 10.0, late=False)
    made.met([("e", 10)], {"e"})
    assert made.patience_s("e", ONE) == 0.0625


def test_a_known_node_s_patience_follows_what_it_showed() -> None:
    made = standing(Offload.AUTO, "a")
    for _ in range(4):
        made.answered("a", ONE, 0.08, 0.0, 10.0, late=False)
    assert 0.11 < made.patience_s("a", ONE) < 0.13  # 80 ms away: no storm of duplicates after 5 ms


def test_records_outlive_sessions_and_are_bounded() -> None:
    made = standing(Offload.AUTO, "flapping")
    made.records["flapping"].failed(10.0)
    made.met([], set())
    made.met([("flapping", 77)], {"flapping"})
    assert made.records["flapping"].failures == 1
    forgotten = []
    for i in range(RECORDS_KEPT + 50):
        forgotten += made.met([(f"n{i}", i + 100)], {"flapping", f"n{i}"})
    assert len(made.records) == RECORDS_KEPT and "flapping" in made.records
    assert len(forgotten) == 51
