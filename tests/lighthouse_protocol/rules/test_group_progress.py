"""What is made of the samples of a group's ranks: ages, limits that are learned, sums, ranks that go."""

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
from lighthouse_protocol.rules.stall import MAX_KNOWN, SOON_S, GroupProgress, Limits, Process

W = Process("w", "host", 77)


def at(name: str = STEP, still_s: float = 0.0, is_first: bool = False, **longest_s: float) -> ProgressSample:
    times = tuple(PhaseTime(phase, 1, 10.0, longest) for phase, longest in longest_s.items())
    return ProgressSample(phases=(OpenPhase(STEP), OpenPhase(name)), still_s=still_s, is_first=is_first, times=times)


@pytest.fixture
def group() -> GroupProgress:
    return GroupProgress("a", Limits(floor_s=60, factor=5, first_s=600))


def test_ages_of_beat_and_progress_are_apart_in_a_view_of_all_ranks(group: GroupProgress):
    group.add_sample(1, W, at(still_s=5, v=1), 10)
    group.add_sample(0, W, at(still_s=0, v=1), 12)
    view = group.view("i1", 13)
    assert (view.replica_id, view.incarnation, view.seconds) == ("a", "i1", (("v", 20),))
    first, second = view.ranks
    assert (first.name, first.beat_age_s, first.progress_age_s) == (RankName("a", 0), 1, 1)
    assert (second.name, second.beat_age_s, second.progress_age_s) == (RankName("a", 1), 3, 8)
    assert (first.rank_incarnation, first.host, first.pid, first.sample) == ("w", "host", 77, at())


class TestLimits:
    def test_are_learned_from_all_ranks_and_not_from_a_first_step(self, group: GroupProgress):
        group.add_sample(0, W, at(validation=200, is_first=True), 0)
        assert group.limit_s(at("validation")) == 600
        group.add_sample(0, W, at(validation=20), 0)
        group.add_sample(1, W, at(validation=10), 0)
        assert [group.limit_s(at("validation", is_first=is_first)) for is_first in (False, True)] == [100, 600]
        assert group.ranks(0)[0].limit_s == 600  # it is in its step, of which nothing is known

    def test_nothing_from_a_time_that_was_over_the_limit(self, group: GroupProgress):
        for longest_s, limit_s in ((10, 60), (60, 300), (301, 300), (300, 1500)):
            group.add_sample(0, W, at(validation=longest_s), 0)
            assert group.limit_s(at("validation")) == limit_s

    def test_names_are_bounded(self, group: GroupProgress):
        for number in range(2 * MAX_KNOWN):
            group.add_sample(0, W, at(**{f"n{number}": 20}), 0)
        group.add_sample(0, W, at(n0=30), 0)
        assert [group.limit_s(at(f"n{number}")) for number in (0, MAX_KNOWN - 1, MAX_KNOWN)] == [150, 100, 600]


class TestSums:
    def test_never_go_back_when_ranks_go(self, group: GroupProgress):
        group.add_sample(0, W, at("validation", v=1), 0)
        group.add_sample(1, W, at(v=1), 0)
        for sample, seconds in ((at(), 20), (at(v=1), 30)):
            group.add_sample(0, Process("w2"), sample, 1)
            assert group.seconds == {"v": seconds}
        group.remove_rank(0)
        group.remove_rank(7)
        assert group.seconds == {"v": 30}
        assert [rank.name.group_rank for rank in group.ranks(1)] == [1]

    def test_of_too_many_phases_are_of_some_together(self, group: GroupProgress):
        for number in range(MAX_KNOWN + 5):
            group.add_sample(0, Process(f"w{number}"), at(**{f"n{number}": 1}), number)
        assert len(group.seconds) == MAX_KNOWN + 1
        assert group.seconds[OTHER] == 50


class TestVerdict:
    def test_so_long_is_left_until_there_may_be_one(self, group: GroupProgress):
        assert group.left_s(0) is None
        group.add_sample(0, W, at(still_s=1, step=1, n=1), 0)
        group.add_sample(1, W, ProgressSample(collective=Collective(1, 1, "all_reduce")), 0)
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
        group.add_sample(0, W, ProgressSample(collective=Collective(1, 1, "all_reduce")), 0)
        verdicts = [group.verdict(1000, is_complete=is_complete) for is_complete in (False, True)]
        assert [verdict is None for verdict in verdicts] == [True, False]
