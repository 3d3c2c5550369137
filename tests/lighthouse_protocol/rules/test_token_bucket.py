"""No more is taken than was there, in any stretch of time."""

from hypothesis import given
from hypothesis import strategies as st

from lighthouse_protocol.rules.rate_limits import TokenBucket

TAKES = st.lists(st.tuples(st.floats(0, 10), st.floats(0, 5)), max_size=30)  # after so long, so much


def test_so_much_at_once_and_then_as_time_passes():
    bucket = TokenBucket(per_s=2, at_once=3)
    assert [bucket.try_take(10.0) for _ in range(4)] == [True, True, True, False]
    assert not bucket.is_full(10.5)
    assert [bucket.try_take(10.5), bucket.try_take(10.5)] == [True, False]
    assert bucket.is_full(12.0)
    assert not bucket.try_take(1000.0, 3.1), "it never holds more"
    assert bucket.try_take(1000.0, 3.0)


@given(st.floats(0.1, 5), st.floats(1, 10), TAKES)
def test_no_stretch_of_time_gets_more_than_its_share(per_s: float, at_once: float, takes: list[tuple[float, float]]):
    bucket, now = TokenBucket(per_s, at_once), 100.0
    taken: list[tuple[float, float]] = []
    for after, amount in takes:
        now += after
        if bucket.try_take(now, amount):
            taken.append((now, amount))
    for begin in range(len(taken)):
        for end in range(begin, len(taken)):
            total = sum(amount for _, amount in taken[begin : end + 1])
            assert total <= at_once + per_s * (taken[end][0] - taken[begin][0]) + 1e-6


@given(st.floats(0.1, 5), st.floats(1, 10), TAKES)
def test_what_is_refused_takes_nothing(per_s: float, at_once: float, takes: list[tuple[float, float]]):
    one, other, now = TokenBucket(per_s, at_once), TokenBucket(per_s, at_once), 100.0
    for after, amount in takes:
        now += after
        one.try_take(now, at_once + 1)
        assert one.try_take(now, amount) == other.try_take(now, amount)
