"""What a manager makes of its ranks' samples: ages, limits that are learned, sums, ranks that go."""

from dataclasses import replace

import pytest

from lighthouse_protocol.messages.progress import (
    OTHER,
    STEP,
    Collective,
    OpenPhase,
    PhaseTime,
    ProgressSample,
    RankName,
)
from lighthouse_protocol.rules.stall import Limits
from manager.group.rules.progress import MAX_KNOWN, REPEATED_S, SOON_S, TOLD_S, GroupProgress, Process, ProgressReporter

W = Process("w", "host", 77)


def at(name: str = STEP, still_s: float = 0.0, is_first: bool = False, **longest_s: float) -> ProgressSample:
    times = tuple(PhaseTime(phase, 1, 10.0, longest) for phase, longest in longest_s.items())
    return ProgressSample(phases=(OpenPhase(STEP), OpenPhase(name)), still_s=still_s, is_first=is_first, times=times)


@pytest.fixture
def group() -> GroupProgress:
    return GroupProgress("a", Limits(floor_s=60, factor=5, first_s=600))


class TestAges:
    def test_of_beat_and_progress_are_apart(self, group: GroupProgress):
        group.take(1, W, at(still_s=5), 10)
        group.take(0, W, at(still_s=0), 12)
        first, second = group.ranks(13)
        assert (first.name, first.beat_age_s, first.progress_age_s) == (RankName("a", 0), 1, 1)
        assert (second.name, second.beat_age_s, second.progress_age_s) == (RankName("a", 1), 3, 8)
        assert (first.rank_incarnation, first.host, first.pid) == ("w", "host", 77)

    def test_view_is_of_all_ranks(self, group: GroupProgress):
        group.take(0, W, at(v=1), 10)
        group.take(1, W, at(v=1), 10)
        view = group.view("i1", 11)
        assert (view.replica_id, view.incarnation, view.seconds) == ("a", "i1", (("v", 20),))
        assert view.ranks == tuple(replace(rank, sample=at()) for rank in group.ranks(11))


class TestLimits:
    def test_are_learned_from_all_ranks(self, group: GroupProgress):
        group.take(0, W, at(), 0)
        assert group.limit_s(at("validation")) == 600
        group.take(0, W, at(validation=20), 0)
        group.take(1, W, at(validation=10), 0)
        assert group.limit_s(at("validation")) == 100
        assert group.ranks(0)[0].limit_s == 600  # it is in its step, of which nothing is known

    def test_nothing_from_a_first_step(self, group: GroupProgress):
        group.take(0, W, at(validation=200, is_first=True), 0)
        assert group.limit_s(at("validation")) == 600
        group.take(0, W, at(validation=1), 0)
        assert group.limit_s(at("validation")) == 60
        assert group.limit_s(at("validation", is_first=True)) == 600

    def test_nothing_from_a_time_that_was_over_the_limit(self, group: GroupProgress):
        for longest_s, limit_s in ((10, 60), (60, 300), (301, 300), (300, 1500)):
            group.take(0, W, at(validation=longest_s), 0)
            assert group.limit_s(at("validation")) == limit_s

    def test_names_are_bounded(self, group: GroupProgress):
        for number in range(2 * MAX_KNOWN):
            group.take(0, W, at(**{f"n{number}": 20}), 0)
        assert group.limit_s(at(f"n{MAX_KNOWN - 1}")) == 100
        assert group.limit_s(at(f"n{MAX_KNOWN}")) == 600
        group.take(0, W, at(n0=30), 0)
        assert group.limit_s(at("n0")) == 150


class TestRanksThatGo:
    def test_are_dropped_with_their_phases(self, group: GroupProgress):
        group.take(0, W, at("validation"), 0)
        group.take(1, W, at(), 0)
        group.lose(0)
        group.lose(7)
        assert [rank.name.group_rank for rank in group.ranks(1)] == [1]

    def test_sums_never_go_back(self, group: GroupProgress):
        group.take(0, W, at(v=1), 0)
        group.take(1, W, at(v=1), 0)
        assert group.seconds == {"v": 20}
        group.take(0, Process("w2"), at(), 1)
        assert group.seconds == {"v": 20}
        group.take(0, Process("w2"), at(v=1), 2)
        assert group.seconds == {"v": 30}
        group.lose(0)
        assert group.seconds == {"v": 30}

    def test_of_too_many_phases_are_of_some_together(self, group: GroupProgress):
        for number in range(MAX_KNOWN + 5):
            group.take(0, Process(f"w{number}"), at(**{f"n{number}": 1}), number)
        assert len(group.seconds) == MAX_KNOWN + 1
        assert group.seconds[OTHER] == 50


class TestVerdict:
    def test_so_long_is_left_until_there_may_be_one(self, group: GroupProgress):
        assert group.left_s(0) is None
        group.take(0, W, at(still_s=1, step=1, n=1), 0)
        group.take(1, W, ProgressSample(collective=Collective(1, 1, "all_reduce")), 0)
        due = group.left_s(0)
        assert due is not None
        assert group.verdict(due - 0.01, is_complete=True) is None
        verdict = group.verdict(due, is_complete=True)
        assert verdict is not None
        assert verdict.behind == (RankName("a", 0),)
        left_s = group.left_s(due)
        assert left_s is not None
        assert left_s <= SOON_S

    def test_ranks_that_wait_for_other_groups_have_none(self, group: GroupProgress):
        group.take(0, W, ProgressSample(collective=Collective(1, 1, "all_reduce")), 0)
        assert group.verdict(1000, is_complete=False) is None
        assert group.verdict(1000, is_complete=True) is not None


class TestTelling:
    @pytest.fixture
    def telling(self, group: GroupProgress) -> ProgressReporter:
        return ProgressReporter(lambda now: group.view("i", now))

    def test_of_nobody_there_is_no_news(self, telling: ProgressReporter):
        assert [telling.news(now) for now in (0, 1, 100)] == [None] * 3

    def test_a_thousand_steps_in_a_second_are_told_once(self, telling: ProgressReporter, group: GroupProgress):
        told = 0
        for step in range(1000):
            group.take(0, W, ProgressSample(step=step), step / 1000)
            told += telling.news(step / 1000) is not None
        assert told == 1 + int(1 / TOLD_S)

    def test_who_stands_still_is_told_seldom(self, telling: ProgressReporter, group: GroupProgress):
        group.take(0, W, at(), 0)
        assert telling.news(0) is not None
        for now in range(1, int(REPEATED_S)):
            group.take(0, W, at(still_s=now), now)
            assert telling.news(now) is None
        again = telling.news(REPEATED_S)
        assert again is not None
        assert again.ranks[0].beat_age_s == 1

    def test_a_new_lighthouse_is_told_at_once(self, telling: ProgressReporter, group: GroupProgress):
        group.take(0, W, at(), 0)
        assert telling.news(0) is not None
        assert telling.news(0.1) is None
        telling.begin()
        assert telling.news(0.2) is not None

    def test_that_all_have_gone_is_told_once(self, telling: ProgressReporter, group: GroupProgress):
        group.take(0, W, at(), 0)
        telling.news(0)
        group.lose(0)
        view = telling.news(1)
        assert view is not None
        assert view.ranks == ()
        assert [telling.news(now) for now in (2, 50)] == [None, None]
