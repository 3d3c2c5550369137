"""Progress of a job: groups behind in a collective, and sums of the groups' reports."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lighthouse.job.incident_driver import JobAccount
from lighthouse.job.progress import MAX_KNOWN, NOTHING, JobProgress, RankQuota, RunRank, difference
from lighthouse.job.records import Group
from lighthouse_protocol.messages.progress import (
    OTHER,
    DataUse,
    GroupCalls,
    GroupView,
    HealTotals,
    OpenPhase,
    RankName,
    RankPlace,
    RankState,
    RankView,
)
from lighthouse_protocol.messages.session import Discards, GroupCounts, GroupReport, HeldQuorum, HoldState
from lighthouse_protocol.rules.stall import Kind, StallVerdict
from tests.lighthouse_protocol.views import after, all_reduce, rank

COLLECTIVE = all_reduce(9)


def view(name: str, *ranks: RankView, incarnation: str = "i1", **seconds: float) -> GroupView:
    return GroupView(name, incarnation, ranks, tuple(seconds.items()))


def waiting(name: str, size: int = 2, **fields: object) -> GroupView:
    return view(name, *(rank(n, inside=COLLECTIVE, group=name, still_s=0, **fields) for n in range(size)))


class Job:
    """Progress of groups that are alive and outside the quorum unless a call names the members or the live ones."""

    def __init__(self, kept: RankQuota | None = None) -> None:
        self.groups: dict[str, Group] = {}
        self.progress = JobProgress(self.groups, kept=kept)

    def group(self, name: str) -> Group:
        return self.groups.setdefault(name, Group(name, "i1", 0.0))

    def take(self, view: GroupView, now: float) -> bool:
        return self.progress.add_view(self.group(view.replica_id).reports, view, now)

    def drop(self, name: str) -> None:
        self.progress.drop_view(self.group(name).reports)

    def form(self, members: Iterable[str]) -> JobProgress:
        for group in [*self.groups.values(), *map(self.group, members)]:
            group.is_participant = group.replica_id in members
        return self.progress

    def verdict(self, members: Iterable[str], now: float, runs: Sequence[list[RunRank]] = ()) -> StallVerdict | None:
        return self.form(members).verdict(now, runs)

    def left_s(self, members: Iterable[str], now: float, runs: Sequence[list[RunRank]] = ()) -> float | None:
        return self.form(members).verdict_in_s(now, runs)

    def places(
        self, members: Iterable[str], alive: Iterable[str], now: float, runs: Sequence[list[RunRank]] = ()
    ) -> tuple[RankPlace, ...]:
        for group in self.groups.values():
            group.is_alive = group.replica_id in alive
        return self.form(members).places(now, runs)

    def ages(self, now: float) -> list[tuple[str, int, float]]:
        return [(place.replica_id, place.group_rank, place.beat_age_s) for place in self.progress.places(now)]

    @property
    def names(self) -> list[str]:
        return [name for name, group in self.groups.items() if (view := group.reports.view) is not None and view.ranks]


@pytest.fixture
def job() -> Job:
    """Group b's rank 1 has not come into the collective in which all others wait."""
    job = Job()
    job.take(waiting("a"), 100)
    late = rank(1, OpenPhase("loader", 3), left=after(all_reduce(8)), group="b", still_s=0)
    job.take(view("b", rank(0, inside=COLLECTIVE, group="b", still_s=0), late), 101)
    return job


def test_views_age(job: Job):
    assert sorted(job.ages(103)) == [("a", 0, 3), ("a", 1, 3), ("b", 0, 2), ("b", 1, 2)]


def test_the_rank_that_is_furthest_says_what_was_used_of_the_data_and_all_whether_exactly():
    job = Job()
    job.take(waiting("a"), 100)
    assert job.progress.data is None

    def using(name: str, *uses: DataUse) -> None:
        ranks = (
            replace(each, sample=replace(each.sample, data=use))
            for each, use in zip(waiting(name).ranks, uses, strict=False)
        )
        job.take(view(name, *ranks), 101)

    using("a", DataUse(100, 240), DataUse(100, 248))
    assert job.progress.data == DataUse(100, 248)
    using("b", DataUse(100, 240, 3, is_exact=False))
    assert job.progress.data == DataUse(100, 248, 3, is_exact=False)
    job.drop("b")
    assert job.progress.data == DataUse(100, 248)


def test_who_is_behind_over_groups(job: Job):
    assert job.verdict("ab", 161) is None
    verdict = job.verdict("ab", 162)
    assert verdict is not None
    assert verdict.behind == (RankName("b", 1),)
    assert verdict.text.startswith("b/1 behind in loader 3, a/0-1, b/0 waiting in all_reduce")
    places = {(place.replica_id, place.group_rank): place for place in job.places("ab", "ab", 162)}
    assert places["b", 1].state is RankState.BEHIND
    assert places["a", 0].state is RankState.WAITING
    late = places["b", 1]
    assert (late.phase, late.done, late.is_inside, late.progress_age_s) == ("loader", 3, False, 61)


def test_the_worst_come_first(job: Job):
    def shown(now: float, alive: str = "ab") -> list[tuple[str, int, str]]:
        return [(p.replica_id, p.group_rank, p.state.value) for p in job.places("ab", alive, now)]

    others = [("a", 0, "waiting"), ("a", 1, "waiting"), ("b", 0, "waiting")]
    assert shown(103) == [*others, ("b", 1, "running")]
    assert shown(162) == [("b", 1, "behind"), *others]
    assert [state for *_, state in shown(162, alive="b")] == ["behind", "lost", "lost", "waiting"]
    assert [name for name, *_ in shown(162, alive="a")] == ["b", "b", "a", "a"]


def test_so_long_is_left_until_there_may_be_a_verdict(job: Job):
    assert Job().left_s("ab", 0) is None
    left_s = job.left_s("ab", 110)
    assert left_s is not None
    assert job.verdict("ab", 110 + left_s) is None
    assert job.verdict("ab", 110 + left_s + 0.01) is not None
    assert job.left_s("", 110) == 60


def test_only_members_are_judged(job: Job):
    assert job.verdict("a", 162).kind is Kind.NETWORK
    assert job.verdict((), 162) is None


def test_a_group_that_is_observed_is_judged_by_itself():
    def observed(number: int, entered: int, **fields: Any) -> RankView:
        made = rank(number, group="o", still_s=0, **fields)
        return replace(made, sample=replace(made.sample, at="train.py:7", calls=(GroupCalls("0", entered),)))

    job = Job()
    job.take(waiting("a"), 100)
    job.take(replace(view("o", observed(0, 5), observed(1, 4)), group_world_size=2), 100)
    assert job.progress.observed == ["o"]
    assert job.left_s("a", 110) == 50
    verdict = job.verdict((), 161)
    assert verdict is not None
    assert verdict.text.startswith("o/1 behind in train.py:7, o/0 in train.py:7")
    [first, *_] = job.places((), "o", 161)
    assert (first.group_rank, first.state, first.at) == (1, RankState.BEHIND, "train.py:7")
    job.take(replace(view("o", observed(0, 5, waits_for="recv")), group_world_size=2), 200)
    assert job.verdict((), 300) is None  # it may wait for the one that has not come


def test_one_that_tells_nothing_may_be_the_one_that_is_waited_for(job: Job):
    job.drop("b")
    assert job.verdict("ab", 1000) is None
    job.take(waiting("b"), 1000)
    verdict = job.verdict("ab", 1061)
    assert verdict is not None
    assert verdict.kind is Kind.NETWORK


def test_sums_outlive_managers_and_groups():
    job = Job()
    job.take(view("a", validation=4, step=96), 0)
    job.take(view("b", validation=1), 0)
    assert job.progress.phase_seconds == {"validation": 5, "step": 96}
    job.take(view("a", validation=6, step=196), 1)
    assert job.progress.phase_seconds["validation"] == 7
    job.take(view("a", incarnation="i2", validation=1), 2)
    assert job.progress.phase_seconds == {"validation": 8, "step": 196}
    job.drop("b")
    job.drop("nobody")
    assert job.progress.phase_seconds == {"validation": 8, "step": 196}
    assert job.ages(3) == []


def test_of_names_without_end_the_first_are_kept_apart():
    job = Job()
    for number in range(3 * MAX_KNOWN):
        job.take(view("a", incarnation=f"i{number}", **{f"phase {number}": 1.0}), number)
    assert len(job.progress.phase_seconds) == MAX_KNOWN + 1
    assert job.progress.phase_seconds[OTHER] == 2 * MAX_KNOWN
    assert job.progress.phase_seconds["phase 0"] == 1.0


class TestRuns:
    """Ranks 0 and 1 of run r wait in a collective that rank 2 has not entered; slot 3 is a spare."""

    @pytest.fixture
    def run(self) -> list[RunRank]:
        late = rank(2, left=after(all_reduce(8)), group="r")
        views = (rank(0, inside=COLLECTIVE, group="r"), rank(1, inside=COLLECTIVE, group="r"), late)
        spare = RunRank(rank(3, step=0, group="r"), state=RankState.SPARE)
        return [
            *(RunRank(replace(view, host="h", pid=pid), 7, is_judged=True) for pid, view in enumerate(views, 1)),
            spare,
        ]

    def test_are_judged_and_shown_as_groups_are(self, run: list[RunRank]):
        job = Job()
        assert job.left_s((), 0, [run]) == -40
        verdict = job.verdict((), 0, [run])
        assert verdict is not None
        assert verdict.text == "r/2 behind in step 1, r/0-1 waiting in all_reduce"
        shown = [(p.group_rank, p.state.value, p.generation) for p in job.places((), (), 0, [run])]
        assert shown == [(2, "behind", 7), (0, "waiting", 7), (1, "waiting", 7), (3, "spare", None)]

    def test_without_a_generation_that_goes_on_have_no_verdict(self, run: list[RunRank]):
        broken = [replace(each, is_judged=False) for each in run]
        assert Job().verdict((), 0, [broken]) is None

    def test_a_process_is_one_rank_of_its_quorum_or_else_of_its_run(self, run: list[RunRank]):
        job = Job()
        agents = [replace(rank(n, "loader", group="a", still_s=0), host="h", pid=n + 1) for n in range(3)]
        job.take(view("a", *agents), 0)

        def shown(members: str) -> list[tuple[str, int | None]]:
            places = job.places(members, "a", 0, [run])
            return sorted(((p.replica_id, p.generation) for p in places), key=str)

        assert shown("a") == [("a", 7)] * 3 + [("r", None)]
        assert job.verdict("a", 0, [run]) is None
        assert shown("") == [("r", 7)] * 3 + [("r", None)]
        assert job.verdict("", 0, [run]) is not None


def test_of_all_jobs_together_so_many_ranks_are_kept():
    kept = RankQuota(limit=5)
    one, other = Job(kept), Job(kept)
    assert one.take(waiting("a", size=2), 100)
    assert other.take(waiting("b", size=2), 100)
    assert not other.take(waiting("c", size=2), 100)
    assert (one.names, other.names, kept.count) == (["a"], ["b"], 4), "c is not shown"
    other.take(waiting("b", size=3), 101)
    assert not one.take(waiting("a", size=3), 101)
    assert (len(other.ages(101)), one.names, kept.count) == (3, [], 3), "older ranks of a would look stalled"
    one.take(waiting("a", size=2), 101)
    assert (len(other.ages(101)), len(one.ages(101)), kept.count) == (3, 2, 5)
    other.take(view("b", *waiting("b", size=1).ranks, incarnation="i2"), 102)
    one.drop("a")
    other.take(waiting("c", size=4), 102)
    assert (other.names, kept.count) == (["b", "c"], 5)


def test_a_view_that_does_not_fit_is_neither_stalled_nor_counted_twice():
    job = Job(RankQuota(limit=3))
    job.take(replace(waiting("a"), seconds=(("load", 5.0),)), 0)
    job.take(waiting("b", size=1), 0)
    job.take(replace(waiting("a", size=3), seconds=(("load", 6.0),)), 100)
    assert job.verdict("ab", 200) is None, "b may wait for a"
    assert job.progress.phase_seconds["load"] == 6.0
    job.take(replace(waiting("a"), seconds=(("load", 7.0),)), 201)
    assert (job.names, job.progress.phase_seconds["load"]) == (["a", "b"], 7.0)


def holds(counts: GroupCounts | None = NOTHING, mode: str = "standing") -> GroupReport:
    return GroupReport(HeldQuorum(1, HoldState(mode), 3), counts=counts)


def account_of(names: str = "ab") -> JobAccount:
    return JobAccount({name: Group(name, "i1", 0.0) for name in names})


def totals(account: JobAccount) -> tuple[float, ...]:
    """Commits, steps discarded for a lost rank, seconds in steps, heals, and bytes of heals."""
    heals = account.heals
    return account.commits, account.discards["rank_lost"], account.step_s, heals.count, heals.total, account.heal_bytes


FULL = GroupCounts(9, Discards(1, 2, 3, 4), 90.0, HealTotals(2, 5.0, 1000))


def test_the_first_report_adds_nothing_and_a_later_one_what_is_new():
    account = account_of()
    account.add_report("a", holds(FULL), 0.0)
    assert totals(account) == (0, 0, 0, 0, 0, 0)
    later = GroupCounts(10, Discards(1, 3, 3, 4), 95.0, HealTotals(3, 7.0, 1500))
    for now in (5.0, 6.0):
        account.add_report("a", holds(later), now)
        assert totals(account) == (1, 1, 5.0, 1, 2.0, 500)


def test_a_manager_that_has_restarted_counts_from_zero_and_nothing_goes_back():
    account = account_of()
    account.add_report("a", holds(FULL), 0.0)
    account.add_report("a", GroupReport(counts=NOTHING), 1.0)
    assert totals(account) == (0, 0, 0, 0, 0, 0)
    account.add_report("a", holds(GroupCounts(commits=2)), 2.0)
    assert totals(account) == (2, 0, 0, 0, 0, 0)


def test_a_manager_that_does_not_count_changes_nothing():
    account = account_of()
    account.add_report("a", holds(None), 0.0)
    assert totals(account) == (0, 0, 0, 0, 0, 0)
    assert account.goodput(10.0) is None


class TestGoodput:
    def test_begins_with_the_first_quorum_and_counts_committed_steps_only(self):
        account = account_of()
        account.add_report("a", GroupReport(counts=NOTHING), 0.0)
        assert account.goodput(50.0) is None
        account.add_report("a", holds(), 100.0)
        account.add_report("a", holds(GroupCounts(3, step_s=30.0)), 140.0)
        assert (account.group_s(140.0), account.goodput(140.0)) == (40.0, 0.75)

    def test_a_group_that_is_lost_still_has_time(self):
        account = account_of()
        for name in "ab":
            account.add_report(name, holds(), 0.0)
        account.add_report("a", holds(GroupCounts(1, step_s=100.0)), 100.0)  # b is silent
        assert account.goodput(100.0) == 0.5

    def test_a_group_that_leaves_in_good_order_has_none_from_then_on(self):
        groups = {name: Group(name, "i1", 0.0) for name in "ab"}
        account = JobAccount(groups)
        for name in "ab":
            account.add_report(name, holds(), 0.0)
        account.add_report("b", holds(GroupCounts(1, step_s=50.0), mode="leaving"), 50.0)
        account.add_report("a", holds(GroupCounts(2, step_s=100.0)), 100.0)
        assert (account.group_s(100.0), account.goodput(100.0)) == (150.0, 1.0)
        account.stop_time(groups["b"].reports, 100.0)
        assert account.group_s(100.0) == 150.0

    def test_a_group_that_is_forgotten_keeps_the_time_that_it_had(self):
        groups = {"a": Group("a", "i1", 0.0)}
        account = JobAccount(groups)
        account.add_report("a", holds(), 0.0)
        account.stop_time(groups.pop("a").reports, 10.0)
        assert account.group_s(30.0) == 10.0

    def test_it_is_never_above_one(self):
        """A step that began before the lighthouse has restarted is told in whole."""
        account = account_of()
        account.add_report("a", holds(), 0.0)
        account.add_report("a", holds(GroupCounts(1, step_s=30.0)), 1.0)
        assert account.goodput(1.0) == 1.0


numbers = st.integers(0, 5)
drawn_counts = st.builds(
    GroupCounts,
    numbers,
    st.builds(Discards, numbers, numbers, numbers, numbers),
    st.floats(0, 9),
    st.builds(HealTotals, numbers, st.floats(0, 9), numbers),
)


@given(drawn_counts, drawn_counts)
def test_a_difference_is_never_below_zero(before: GroupCounts, now: GroupCounts):
    new = difference(before, now)
    told = new.discards
    assert min(new.commits, new.step_s, new.healed.heals, new.healed.seconds, new.healed.bytes) >= 0
    assert min(told.group_lost, told.rank_lost, told.revoked, told.voted_no) >= 0


@given(st.lists(st.tuples(st.sampled_from("ab"), drawn_counts, st.booleans()), max_size=12))
def test_the_time_of_groups_never_goes_back(reports: list[tuple[str, GroupCounts, bool]]):
    account, before = account_of(), 0.0
    for now, (name, counts, leaves) in enumerate(reports):
        account.add_report(name, holds(counts, "leaving" if leaves else "standing"), float(now))
        assert account.group_s(float(now)) >= before
        before = account.group_s(float(now))
