"""The groups of a job together: who is behind in a collective that goes over groups."""

import pytest

from lighthouse.progress_view import JobProgress, RankState
from protos.progress import GroupView, OpenPhase, RankName, RankView
from protos.stall import Kind
from tests.protos.views import after, all_reduce, rank

COLLECTIVE = all_reduce(9)


def view(name: str, *ranks: RankView, incarnation: str = "i1", **seconds: float) -> GroupView:
    return GroupView(name, incarnation, ranks, tuple(seconds.items()))


def waiting(name: str, size: int = 2, **fields: object) -> GroupView:
    return view(name, *(rank(n, inside=COLLECTIVE, group=name, still_s=0, **fields) for n in range(size)))


@pytest.fixture
def job() -> JobProgress:
    """Group b's rank 1 has not come into the collective in which all others wait."""
    job = JobProgress()
    job.take(waiting("a"), 100)
    late = rank(1, OpenPhase("loader", 3), left=after(all_reduce(8)), group="b", still_s=0)
    job.take(view("b", rank(0, inside=COLLECTIVE, group="b", still_s=0), late), 101)
    return job


def test_views_age(job: JobProgress):
    assert [(str(r.name), r.beat_age_s) for r in job.ranks(103)] == [("a/0", 3), ("a/1", 3), ("b/0", 2), ("b/1", 2)]


def test_who_is_behind_over_groups(job: JobProgress):
    assert job.verdict("ab", 161) is None
    verdict = job.verdict("ab", 162)
    assert verdict is not None
    assert verdict.behind == (RankName("b", 1),)
    assert verdict.text.startswith("b/1 behind in loader 3, a/0-1, b/0 waiting in all_reduce")
    states = job.states("ab", 162)
    assert states[RankName("b", 1)] is RankState.BEHIND
    assert states[RankName("a", 0)] is RankState.WAITING
    assert job.states("ab", 103)[RankName("b", 1)] is RankState.RUNNING


def test_only_members_are_judged(job: JobProgress):
    assert job.verdict("a", 162).kind is Kind.NETWORK
    assert job.verdict((), 162) is None


def test_one_that_tells_nothing_may_be_the_one_that_is_waited_for(job: JobProgress):
    job.drop("b")
    assert job.verdict("ab", 1000) is None
    job.take(waiting("b"), 1000)
    verdict = job.verdict("ab", 1061)
    assert verdict is not None
    assert verdict.kind is Kind.NETWORK


def test_sums_outlive_managers_and_groups():
    job = JobProgress()
    job.take(view("a", validation=4, step=96), 0)
    job.take(view("b", validation=1), 0)
    assert job.seconds == {"validation": 5, "step": 96}
    job.take(view("a", validation=6, step=196), 1)
    assert job.seconds["validation"] == 7
    job.take(view("a", incarnation="i2", validation=1), 2)
    assert job.seconds == {"validation": 8, "step": 196}
    job.drop("b")
    job.drop("nobody")
    assert job.seconds == {"validation": 8, "step": 196}
    assert job.ranks(3) == []
