"""The token bucket."""

from relay.bucket import Bucket


def test_bucket_fills_with_time_and_never_beyond_its_burst() -> None:
    bucket = Bucket(2.0, 3.0, now=10.0)
    assert [bucket.take(10.0) for _ in range(4)] == [True, True, True, False]
    assert not bucket.take(10.4) and bucket.take(10.5)
    assert bucket.left(1000.0) == 3.0


def test_bucket_that_was_overdrawn_pays_back_and_owes_one_burst_at_most() -> None:
    bucket = Bucket(1.0, 2.0, now=0.0)
    bucket.spend(0.0, 100.0)
    assert bucket.left(0.0) == -2.0
    assert not bucket.take(2.5) and bucket.take(3.0)


def test_clock_that_goes_back_gives_nothing() -> None:
    bucket = Bucket(1.0, 2.0, now=10.0)
    bucket.spend(10.0, 2.0)
    assert bucket.left(5.0) == 0.0 and bucket.left(11.0) == 1.0
