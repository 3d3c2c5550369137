"""By how much others look older than they are to somebody who was held up."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lighthouse_protocol.rules.stall import MAX_TIMES, PauseLog, find_stall
from tests.lighthouse_protocol.views import rank


def held_up(*times: tuple[float, float]) -> PauseLog:
    """Each: from when until when."""
    found = PauseLog()
    for began_at, ended_at in times:
        found.add_pause(ended_at - began_at, ended_at)
    return found


@pytest.mark.parametrize(
    ("age_s", "within_s"),
    [(0, 0), (5, 0), (10, 0), (15, 5), (30, 20), (35, 20), (40, 20), (45, 25), (1000, 30)],
)
def test_what_of_an_age_it_was(age_s: float, within_s: float):
    """From 50 to 60 and from 70 to 90; it is 100."""
    assert held_up((50, 60), (70, 90)).paused_s(age_s, 100) == within_s


def test_a_rank_has_moved_as_long_ago_as_somebody_was_there_to_see():
    """A beat from before the pause, and a sample that was taken in it."""
    told_before = rank(0, still_s=1.0).aged(26.0)
    told_after = rank(1, still_s=15.0).aged(5.0)
    found = [held_up((75, 95)).without_pauses(each, 100) for each in (told_before, told_after)]
    assert [(each.beat_age_s, each.sample.still_s) for each in found] == [(6.0, 1.0), (5.0, 0.0)]
    assert held_up((10, 20)).without_pauses(told_after, 100) is told_after


def test_nobody_stalls_by_a_pause_and_who_stalled_before_still_does():
    """It is 200, and from 100 to 190 nobody looked."""
    paused = held_up((100, 190))
    moves = [rank(n, still_s=1.0).aged(100.0) for n in range(2)]
    stalls = [rank(n, still_s=170.0) for n in range(2)]
    assert [find_stall([paused.without_pauses(each, 200) for each in ranks]) is None for ranks in (moves, stalls)] == [
        True,
        False,
    ]


TIMES = st.lists(st.tuples(st.floats(0.01, 50), st.floats(0.75, 100)), min_size=1, max_size=3 * MAX_TIMES)
"""How long it ran, and was held up then."""


@given(TIMES, st.floats(0, 1e4))
def test_of_many_times_the_newest_are_known_exactly_and_of_all_no_more_than_they_were(
    times: list[tuple[float, float]], age_s: float
):
    found, now, spans = PauseLog(), 0.0, list[tuple[float, float]]()
    for ran_s, length_s in times:
        spans.append((now + ran_s, now + ran_s + length_s))
        now += ran_s + length_s
        found.add_pause(length_s, now)
    exact = sum(max(0.0, ended_at - max(began_at, now - age_s)) for began_at, ended_at in spans)
    within = found.paused_s(age_s, now)
    assert 0 <= within <= min(age_s, sum(length_s for _, length_s in times)) + 1e-6
    if len(times) <= MAX_TIMES or now - age_s >= spans[-MAX_TIMES + 1][0]:
        assert within == pytest.approx(exact, abs=1e-6)
    assert within >= exact - 1e-6, "nobody looks older than they are"
