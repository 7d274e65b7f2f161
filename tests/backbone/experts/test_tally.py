"""What each node did, counted."""

from backbone.experts.tally import MOST_HOLDERS, MOST_REASON_CHARS, MOST_REASONS, Tally


def test_layers_are_written_as_spans() -> None:
    work = Tally().of("id", "phone", "wasm-plain", "relayed")
    for layer in (4, 0, 1, 2, 9):
        work.used(layer, rows=3, round_trip_s=0.01, compute_s=0.001)
    assert work.layers() == "0-2, 4, 9"
    assert (work.calls, sum(work.rows.values())) == (5, 15)


def test_percentiles_are_of_the_round_trips_seen() -> None:
    work = Tally().of("id", "phone", "wasm-plain", "relayed")
    assert work.round_trip_ms(0.5) == 0.0
    for i in range(100):
        work.used(0, 1, round_trip_s=(i + 1) / 1e3, compute_s=0)
    assert work.round_trip_ms(0.5) == 51.0
    assert work.round_trip_ms(0.95) == 96.0


def test_clearing_forgets_everything() -> None:
    tally = Tally()
    tally.of("id", "phone", "wasm-plain", "relayed").failed("compute: late")
    tally.retries = 3
    tally.called(4, 0.25)
    tally.clear()
    assert tally.work == {} and tally.calls_of_rows == {}
    assert (tally.retries, tally.layer_calls, tally.longest_call_s) == (0, 0, 0.0)


def test_reasons_are_the_peers_own_text_and_bounded() -> None:
    work = Tally().of("n", "node", "native", "relayed")
    for i in range(1000):
        work.failed(f"compute: {i} " + "x" * 1000)
    assert len(work.failures) <= MOST_REASONS + 1 and sum(work.failures.values()) == 1000
    assert max(map(len, work.failures)) <= MOST_REASON_CHARS


def test_holders_are_the_peers_own_names_and_bounded() -> None:
    tally = Tally()
    tally.of(Tally.LOCAL_NAME, Tally.LOCAL_NAME, "native", "local")
    for i in range(MOST_HOLDERS + 100):
        tally.of(f"n{i}", "node", "native", "relayed")
    assert len(tally.work) == MOST_HOLDERS and Tally.LOCAL_NAME in tally.work
