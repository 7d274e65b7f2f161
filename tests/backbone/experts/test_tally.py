"""What each node did, counted."""

from backbone.experts.tally import Tally


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
