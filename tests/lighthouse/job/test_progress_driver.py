"""A job's progress on the lighthouse's loop: whose view counts, which ranks are judged, heals and log lines."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from lighthouse.job.incident_driver import MAX_HEALS_TOLD, JobAccount, ProgressDriver
from lighthouse.job.progress import RankQuota
from lighthouse.job.records import Group
from lighthouse.job.run_driver import Ports, RunDriver
from lighthouse_protocol.limits import MAX_COUNT
from lighthouse_protocol.messages.progress import GroupView, HealProgress, HealTotals
from lighthouse_protocol.messages.session import Discards, GroupCounts, GroupReport, ToManager
from lighthouse_protocol.messages.status import TimelineKind
from lighthouse_protocol.rules.stall import StallVerdict
from tests.lighthouse_protocol.views import after, all_reduce, rank
from tests.virtual_loop import VirtualLoop


def groups_of(names: str, **fields: bool) -> dict[str, Group]:
    return {name: Group(name, "i", 0.0, **fields) for name in names}


class NoRuns:
    """The driver of a job without runs."""

    def list_runs(self) -> list[RunDriver]:
        return []

    def send_to_member(self, member: Group, message: ToManager) -> bool:
        return False

    def handle_verdict(self, verdict: StallVerdict | None) -> None: ...

    def add_timeline_entry(self, kind: TimelineKind, replica_ids: Sequence[str], text: str) -> None: ...


class Job:
    """Rank b/1 has not come into the collective in which all others wait."""

    def __init__(self, loop: VirtualLoop, check_lag: Callable[[], object] = lambda: None) -> None:
        self.loop, self.groups = loop, groups_of("ab", is_participant=True)
        self.places = ProgressDriver("j", self.groups, Ports(loop, loop.time, check_lag), NoRuns())
        inside = all_reduce(9)
        self.a = GroupView("a", "i", tuple(rank(n, inside=inside, group="a", still_s=0) for n in range(2)))
        late = rank(1, "loader", left=after(all_reduce(8)), group="b", still_s=0)
        self.b = GroupView("b", "i", (rank(0, inside=inside, group="b", still_s=0), late))

    def shown(self) -> list[tuple[str, int, str]]:
        return [(place.replica_id, place.group_rank, place.state.value) for place in self.places.ranks()]


@pytest.fixture
def job(loop: VirtualLoop, caplog: pytest.LogCaptureFixture) -> Job:
    caplog.set_level(logging.INFO)
    return Job(loop)


def test_the_log_says_who_is_behind_over_groups(job: Job, caplog: pytest.LogCaptureFixture):
    job.places.add_view("a", job.a)
    job.places.add_view("b", job.b)
    job.loop.go(59)
    assert (caplog.messages, job.places.verdict()) == ([], None)
    job.loop.go(3)
    [said] = caplog.messages
    assert said.startswith("nothing has moved for 6")
    assert ": b/1 behind in loader, a/0-1, b/0 waiting in all_reduce; no heartbeat from a/0-1, b/0-1" in said
    assert job.shown()[0] == ("b", 1, "behind")
    job.places.add_view("b", job.b)
    job.loop.go(2)
    assert caplog.messages[1:] == ["progress resumed"]


def test_a_group_that_is_left_out_is_logged_once(job: Job, caplog: pytest.LogCaptureFixture, loop: VirtualLoop):
    ports = Ports(loop, loop.time, ranks_kept=RankQuota(3))
    places = ProgressDriver("j", job.groups, ports, NoRuns())
    for view in (job.a, job.b, job.a, job.b):
        places.add_view(view.replica_id, view)
    told = "the progress of b's ranks is not shown or checked for stalls: the lighthouse keeps that of 2 ranks already"
    assert caplog.messages == [told]
    places.close()


def test_a_lighthouse_that_was_held_up_judges_nobody_for_that_time(job: Job, caplog: pytest.LogCaptureFixture):
    """What the ranks have said meanwhile is read after the timer has fired."""
    job.places.add_view("a", job.a)
    job.places.add_view("b", job.b)
    job.loop.go(30)
    job.loop.now += 1000
    job.places.handle_pause(1000)
    job.loop.go(0)
    assert (caplog.messages, job.places.verdict()) == ([], None)
    job.loop.go(29)
    assert caplog.messages == []
    job.loop.go(3)
    assert ": b/1 behind in loader" in caplog.text, "it hangs all the same"


def test_it_asks_whether_it_was_before_it_judges(loop: VirtualLoop, caplog: pytest.LogCaptureFixture):
    job = Job(loop, lambda: job.places.handle_pause(1000) if loop.now > 2000 and not late.append(1) else None)
    late: list[int] = []
    job.places.add_view("a", job.a)
    job.places.add_view("b", job.b)
    job.loop.now += 1010
    job.loop.go(0)
    assert late
    assert "nothing has moved" not in caplog.text


def test_a_session_speaks_for_its_own_group(job: Job):
    job.places.add_view("a", job.b)
    assert job.shown() == []


def test_a_lost_group_is_shown_until_it_is_forgotten(job: Job):
    job.places.add_view("a", job.a)
    job.places.add_view("b", job.b)
    job.groups["b"].is_alive = job.groups["b"].is_participant = False
    assert [state for *_, state in job.shown()] == ["lost", "lost", "waiting", "waiting"]
    del job.groups["b"]
    assert [name for name, *_ in job.shown()] == ["a", "a"]
    job.groups.clear()
    job.loop.go(100)
    assert job.loop.timers == 0


def test_close_leaves_no_timer(job: Job):
    job.places.add_view("a", job.a)
    assert job.loop.timers == 1
    job.places.close()
    assert job.loop.timers == 0


MIB = 2**20


class HealingJob:
    def __init__(self, loop: VirtualLoop) -> None:
        self.loop, self.groups = loop, groups_of("bc")
        self.driver = ProgressDriver("j", self.groups, Ports(loop, loop.time), NoRuns())

    def report(self, *ranks: HealProgress | None, name: str = "b", age_s: float = 0.0) -> None:
        """What the manager of that group sends."""
        views = [rank(n, group=name, still_s=0) for n in range(len(ranks))]
        told = [
            replace(view, sample=replace(view.sample, heal=heal), beat_age_s=age_s)
            for view, heal in zip(views, ranks, strict=True)
        ]
        self.driver.add_view(name, GroupView(name, "i", tuple(told)))

    def shown(self) -> dict[str, str]:
        return {name: status.text for name, status in self.driver.heals.items()}


def heal(received: int, seconds: float, *, is_over: bool = False) -> HealProgress:
    return HealProgress(1, "a", 17, received * MIB, 100 * MIB, seconds, is_over)


@pytest.fixture
def healing_job(loop: VirtualLoop, caplog: pytest.LogCaptureFixture) -> HealingJob:
    caplog.set_level(logging.INFO)
    return HealingJob(loop)


def test_a_heal_has_a_status_and_lines(healing_job: HealingJob, caplog: pytest.LogCaptureFixture):
    for second in range(1, 26):
        healing_job.loop.go(1)
        healing_job.report(heal(2 * second, second), heal(2 * second, second))
    assert healing_job.shown() == {"b": "healing from a: 100 of 200 MiB, 4.0 MiB/s, 25 s left"}
    healing_job.loop.go(1)
    healing_job.report(*[heal(100, 25.5, is_over=True)] * 2)
    assert healing_job.shown() == {}
    healing_job.loop.go(2)
    assert caplog.messages == [
        "b: healing from a at step 17",
        "b: healing from a: 44 of 200 MiB, 4.0 MiB/s, 39 s left",
        "b: healing from a: 84 of 200 MiB, 4.0 MiB/s, 29 s left",
        "b: healed from a at step 17: 200 MiB in 26 s (7.8 MiB/s)",
    ]
    assert {record.event for record in caplog.records} == {"heal"}  # type: ignore[attr-defined]
    assert caplog.records[0].fields == {"job": "j", "replica_group": "b"}  # type: ignore[attr-defined]


def test_one_that_stands_still_is_told_though_no_view_comes(healing_job: HealingJob, caplog: pytest.LogCaptureFixture):
    healing_job.loop.go(5)
    healing_job.report(heal(50, 5))
    healing_job.loop.go(21)
    assert caplog.messages[1:] == [
        "b: healing from a: 50 of 100 MiB, nothing for 10 s",
        "b: healing from a: 50 of 100 MiB, nothing for 20 s",
    ]


def test_a_view_is_as_old_as_it_says(healing_job: HealingJob):
    healing_job.loop.go(30)
    healing_job.report(heal(50, 5), age_s=8)
    assert healing_job.driver.heals["b"].still_s == 8


def test_a_group_that_is_lost_heals_no_more(healing_job: HealingJob, caplog: pytest.LogCaptureFixture):
    healing_job.report(heal(50, 5))
    healing_job.report(heal(50, 5), name="c")
    del healing_job.groups["b"]
    healing_job.loop.go(10.5)
    assert set(healing_job.shown()) == {"c"}
    assert [line.split(":")[0] for line in caplog.messages] == ["b", "c", "c"]


def test_nothing_is_kept_of_groups_that_do_not_heal(healing_job: HealingJob, caplog: pytest.LogCaptureFixture):
    healing_job.report(None, None)
    assert healing_job.groups["b"].reports.heal is None
    healing_job.report(heal(100, 3, is_over=True), None)
    healing_job.loop.go(2)
    healing_job.report(None, None)
    assert healing_job.groups["b"].reports.heal is None
    assert len(caplog.messages) == 1
    healing_job.driver.close()


def test_what_all_groups_report_is_added_up():
    account = JobAccount(groups_of("ab"))
    for name in "ab":
        account.add_report(name, GroupReport(counts=GroupCounts()), 0.0)
        account.add_report(
            name, GroupReport(counts=GroupCounts(3, Discards(voted_no=1), 9.0, HealTotals(2, 4.0, 50))), 1.0
        )
    assert (account.commits, account.heal_bytes, account.step_s) == (6, 100, 18.0)
    assert account.discards == {"group_lost": 0, "rank_lost": 0, "revoked": 0, "voted_no": 2}
    assert (account.heals.count, account.heals.total) == (4, 8.0)
    assert dict(account.heals.buckets())["2.5"] == 4


def test_discards_that_cannot_be_right_fit_into_a_message():
    """A broken manager begins again at every report."""
    account = JobAccount(groups_of("a"))
    for voted_no in (0, MAX_COUNT) * 1100:
        account.add_report("a", GroupReport(counts=GroupCounts(discards=Discards(voted_no=voted_no))), 0.0)
    assert sum(account.discards.values()) > 2**63
    assert account.all_discards == MAX_COUNT


def test_a_number_of_heals_that_cannot_be_right_does_not_hold_up_the_loop():
    account = JobAccount(groups_of("a"))
    account.add_report("a", GroupReport(counts=GroupCounts()), 0.0)
    account.add_report("a", GroupReport(counts=GroupCounts(healed=HealTotals(2**60, 1.0, 1))), 1.0)
    assert account.heals.count == MAX_HEALS_TOLD
