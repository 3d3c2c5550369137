"""When a manager tells the lighthouse where its ranks are: what is new, and seldom what is not."""

import pytest

from lighthouse_protocol.messages.progress import HealProgress, ProgressSample
from lighthouse_protocol.rules.stall import GroupProgress, Process
from manager.group.session import MIN_INTERVAL_S, REPEATED_S, ProgressReporter

W = Process("w", "host", 77)


@pytest.fixture
def group() -> GroupProgress:
    return GroupProgress("a")


@pytest.fixture
def telling(group: GroupProgress) -> ProgressReporter:
    """Its group is there and was told."""
    reporter = ProgressReporter(lambda now: group.view("i", now))
    assert [reporter.next_view(now) for now in (-100, -1)] == [None, None], "of nobody there is no news"
    group.add_sample(0, W, ProgressSample(), 0)
    assert reporter.next_view(0) is not None
    return reporter


def test_a_thousand_steps_in_a_second_are_told_once(telling: ProgressReporter, group: GroupProgress):
    told = 0
    for step in range(1, 1001):
        group.add_sample(0, W, ProgressSample(step=step), step / 1000)
        told += telling.next_view(step / 1000) is not None
    assert told == int(1 / MIN_INTERVAL_S)


def test_who_stands_still_is_told_seldom(telling: ProgressReporter, group: GroupProgress):
    for now in range(1, int(REPEATED_S)):
        group.add_sample(0, W, ProgressSample(still_s=now), now)
        assert telling.next_view(now) is None
    again = telling.next_view(REPEATED_S)
    assert again is not None
    assert again.ranks[0].beat_age_s == 1


def test_a_new_lighthouse_is_told_at_once(telling: ProgressReporter):
    assert telling.next_view(0.1) is None
    telling.begin()
    assert telling.next_view(0.2) is not None


def test_that_all_have_gone_is_told_once(telling: ProgressReporter, group: GroupProgress):
    group.remove_rank(0)
    view = telling.next_view(1)
    assert view is not None
    assert view.ranks == ()
    assert [telling.next_view(now) for now in (2, 50)] == [None, None]


def test_the_bytes_of_a_heal_are_news_and_its_seconds_are_not(telling: ProgressReporter, group: GroupProgress):
    heals = [HealProgress(1, "a", 17, received, 1000, seconds) for received, seconds in ((0, 1.0), (0, 2.0), (9, 3.0))]
    told: list[int | None] = []
    for now, heal in enumerate(heals, start=1):
        group.add_sample(0, W, ProgressSample(heal=heal), now)
        view = telling.next_view(now)
        told.append(view and view.ranks[0].sample.heal and view.ranks[0].sample.heal.received)
    assert told == [0, None, 9]
