"""How often something may be done."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lighthouse.job.run_driver import RateLimit
from lighthouse_protocol.refusals import LimitReached


def taken(limit: RateLimit, now: float) -> bool:
    try:
        limit.take(now)
    except LimitReached:
        return False
    return True


def test_a_refusal_names_what_and_how_many() -> None:
    limit = RateLimit("keys", 2.0, 1)
    limit.take(0.0)
    with pytest.raises(LimitReached, match="keys: at most 1 at once and 2 a second are taken"):
        limit.take(0.4)
    limit.take(0.5)


@given(st.floats(0.5, 50), st.integers(1, 20), st.lists(st.floats(0, 2), min_size=1, max_size=200))
def test_never_more_than_at_once_and_per_second(per_s: float, at_once: int, gaps: list[float]) -> None:
    limit, now, count = RateLimit("x", per_s, at_once), 100.0, 0
    for gap in gaps:
        now += gap
        count += taken(limit, now)
        assert count <= at_once + per_s * (now - 100.0) + 1e-6
    assert taken(limit, now + at_once / per_s + 1)
