"""When ranks are started, stopped and started again."""

from collections.abc import Sequence

import pytest

from manager.supervisor.rules.events import (
    CheckFailed,
    Effect,
    EndAsked,
    Event,
    Halt,
    HostExcluded,
    HostLost,
    HostReady,
    KillAsked,
    Logged,
    MisfitReported,
    RankEnded,
    RankSilent,
    RunCompleted,
    RunStopAsked,
    RunStopped,
    Start,
    SupervisionEnded,
)
from manager.supervisor.rules.machine import Layout, SupervisorMachine
from manager.supervisor.rules.restart_policy import RANK_SCOPE, RestartPolicy

TWO = Layout(1, 2)
POLICY = RestartPolicy(max_startup_failures=0, delay_s=1.0)


def machine(layout: Layout = TWO, policy: RestartPolicy = POLICY) -> SupervisorMachine:
    return SupervisorMachine(layout, policy, lambda: 1.0, grace_s=5.0, host_timeout_s=100.0)


def running(layout: Layout = TWO, policy: RestartPolicy = POLICY) -> SupervisorMachine:
    m = machine(layout, policy)
    for host in range(layout.hosts):
        m.handle(HostReady(host), 0.0)
    return m


def plain(effects: Sequence[Effect]) -> list[Effect]:
    """Without what is only for the log."""
    return [effect for effect in effects if not isinstance(effect, Logged)]


class TestGroup:
    def test_it_starts_when_its_host_may(self) -> None:
        m = machine()
        assert m.deadline() is None
        assert m.handle(HostReady(0), 0.0) == [Start(0, (0, 1), 0)]

    def test_all_done(self) -> None:
        m = running()
        assert m.handle(RankEnded(0, 0, 0), 5.0) == []
        assert m.handle(RankEnded(1, 0, 0), 6.0) == [SupervisionEnded(0, "all ranks are done")]
        assert m.is_over

    def test_a_loss_stops_the_others_and_starts_all_again(self) -> None:
        m = running()
        said = "rank 1 has ended by exit code 1: boom; the group is started again in 1 s"
        assert m.handle(RankEnded(1, 0, 1, "boom"), 50.0) == [Logged(said), Halt(0, (0,), 5.0)]
        assert m.handle(RankEnded(0, 0, -15), 50.2) == []
        assert m.deadline() == 51.0
        assert m.tick(50.9) == []
        assert m.tick(51.0) == [Start(0, (0, 1), 1)]

    def test_it_waits_for_those_that_do_not_stop(self) -> None:
        m = running()
        m.handle(RankEnded(1, 0, 1), 50.0)
        assert m.deadline() is None
        assert m.tick(54.0) == []
        assert m.handle(RankEnded(0, 0, -9), 55.0) == [Start(0, (0, 1), 1)]

    def test_what_an_earlier_attempt_says_is_not_heard(self) -> None:
        m = running()
        m.handle(RankEnded(1, 0, 1), 50.0)
        m.handle(RankEnded(0, 0, -15), 50.0)
        m.tick(51.0)
        assert m.handle(RankEnded(0, 0, 130), 52.0) == []
        assert m.running == (0, 1)

    def test_a_second_loss_of_the_same_attempt_is_none(self) -> None:
        m = running(policy=RestartPolicy(max_restarts=1, max_startup_failures=0))
        m.handle(RankEnded(1, 0, 1), 50.0)
        assert m.handle(RankEnded(0, 0, 1), 50.0) == []
        assert m.tick(60.0) == [Start(0, (0, 1), 1)]

    def test_one_that_was_done_starts_again_with_the_others(self) -> None:
        m = running()
        m.handle(RankEnded(0, 0, 0), 40.0)
        assert plain(m.handle(RankEnded(1, 0, 1), 50.0)) == []
        assert m.tick(51.0) == [Start(0, (0, 1), 1)]

    def test_crashes_at_the_start_end_it_with_1(self) -> None:
        m = running(Layout(), RestartPolicy(max_startup_failures=2, delay_s=1.0))
        m.handle(RankEnded(0, 0, 1), 0.5)
        m.tick(5.0)
        over = m.handle(RankEnded(0, 1, 1, "no module"), 5.5)[-1]
        assert isinstance(over, SupervisionEnded)
        assert over.status == 1
        assert over.why.startswith("start-up failure: 2 deaths in a row")
        assert over.why.endswith("rank 0 has ended by exit code 1: no module")


class TestCompleted:
    """The run is: nothing starts again for a process that would be told just that."""

    def test_one_that_has_not_started_is_over(self) -> None:
        assert machine().handle(RunCompleted("done by 7"), 0.0) == [SupervisionEnded(0, "done by 7")]

    def test_one_that_waits_out_a_delay_is_over(self) -> None:
        m = running(Layout())
        m.handle(RankEnded(0, 0, 1), 50.0)
        assert m.deadline() == 51.0
        assert m.handle(RunCompleted("done by 7"), 50.5) == [SupervisionEnded(0, "done by 7")]

    def test_ranks_that_run_end_by_themselves(self) -> None:
        m = running()
        assert m.handle(RunCompleted("done by 7"), 50.0) == []
        assert m.handle(RankEnded(0, 0, 0), 50.1) == []
        assert m.handle(RankEnded(1, 0, 0), 50.2) == [SupervisionEnded(0, "done by 7")]

    def test_one_that_is_lost_then_is_not_started_again_and_its_mates_are_not_disturbed(self) -> None:
        m = running()
        m.handle(RunCompleted("done by 7"), 50.0)
        assert m.handle(RankEnded(0, 0, -9), 50.1) == [
            Logged("rank 0 has ended by SIGKILL (kill -9, or the kernel was out of memory); done by 7")
        ]
        assert m.tick(60.0) == []
        assert m.handle(RankEnded(1, 0, 0), 60.1) == [SupervisionEnded(0, "done by 7")]

    def test_ranks_that_are_stopped_for_a_restart_are_not_started_again(self) -> None:
        m = running()
        m.handle(RankEnded(0, 0, 1), 50.0)
        assert m.handle(RunCompleted("done by 7"), 50.1) == []
        assert m.handle(RankEnded(1, 0, -15), 50.2) == [SupervisionEnded(0, "done by 7")]


class TestRanks:
    POLICY = RestartPolicy(max_startup_failures=0, delay_s=1.0, scope=RANK_SCOPE)

    def test_each_starts_by_itself(self) -> None:
        m = machine(policy=self.POLICY)
        assert m.handle(HostReady(0), 0.0) == [Start(0, (0,), 0), Start(0, (1,), 0)]

    def test_a_loss_disturbs_nobody(self) -> None:
        m = running(policy=self.POLICY)
        assert plain(m.handle(RankEnded(1, 0, -9), 50.0)) == []
        assert m.running == (0,)
        assert m.tick(51.0) == [Start(0, (1,), 1)]

    def test_a_budget_for_each(self) -> None:
        m = running(Layout(1, 3), RestartPolicy(max_restarts=1, max_startup_failures=0, scope=RANK_SCOPE))
        for rank in (0, 1, 2):
            assert plain(m.handle(RankEnded(rank, 0, 1), 50.0)) == []
        m.tick(60.0)
        assert m.running == (0, 1, 2)
        assert isinstance(plain(m.handle(RankEnded(1, 1, 1), 61.0))[0], RunStopAsked)

    def test_one_that_is_done_stays_so(self) -> None:
        m = running(policy=self.POLICY)
        m.handle(RankEnded(0, 0, 0), 50.0)
        m.handle(RankEnded(1, 0, 1), 50.0)
        assert m.tick(51.0) == [Start(0, (1,), 1)]
        assert m.handle(RankEnded(1, 1, 0), 52.0) == [SupervisionEnded(0, "all ranks are done")]


class TestStop:
    @pytest.mark.parametrize("status", [130, -2])
    def test_the_abort_code_stops_the_run_for_all(self, status: int) -> None:
        m = running()
        effects = plain(m.handle(RankEnded(1, 0, status, "diverged"), 50.0))
        assert effects == [RunStopAsked(f"rank 1 has ended by {NAMES[status]}: diverged"), Halt(0, (0,), 1.0)]
        assert m.handle(RunStopped("that"), 50.1) == []
        over = m.handle(RankEnded(0, 0, -15), 50.2)
        assert over == [SupervisionEnded(130, f"rank 1 has ended by {NAMES[status]}: diverged")]

    def test_an_exhausted_budget_does_so_too(self) -> None:
        m = running(policy=RestartPolicy(max_restarts=0, max_startup_failures=0))
        first, second = plain(m.handle(RankEnded(1, 0, 1), 50.0))
        assert isinstance(first, RunStopAsked)
        assert second == Halt(0, (0,), 1.0)
        assert m.handle(RankEnded(0, 0, 0), 50.2)[-1] == SupervisionEnded(130, first.reason)

    def test_a_budget_that_a_misfit_has_used_up_ends_this_group_only(self) -> None:
        m = running(policy=RestartPolicy(max_startup_failures=0, max_restarts=0))
        assert m.handle(MisfitReported("another model"), 1.0) == []
        effects = m.handle(RankEnded(0, 0, 1), 2.0)
        assert plain(effects) == [Halt(0, (1,), 5.0)], "no stop of the run"
        m.handle(RankEnded(1, 0, -15), 3.0)
        [noted] = [effect for effect in effects if isinstance(effect, Logged)]
        assert "because this group does not fit its peers; rank 0 has ended by exit code 1: another model" in noted.text
        assert m.is_over

    def test_a_misfit_of_the_start_before_this_one_is_over(self) -> None:
        m = running(policy=RestartPolicy(max_startup_failures=0, max_restarts=1, delay_s=1.0, window_s=5.0))
        m.handle(MisfitReported("another model"), 1.0)
        m.handle(RankEnded(0, 0, 1), 2.0)
        m.handle(MisfitReported("too late"), 2.5)
        m.handle(RankEnded(1, 0, -15), 3.0)
        for at, ends in ((10.0, RankEnded(0, 1, 1)), (11.0, RankEnded(1, 1, -15)), (13.0, RankEnded(0, 2, 1))):
            m.tick(at)
            effects = m.handle(ends, at)
        assert any(isinstance(effect, RunStopAsked) for effect in effects)

    def test_a_stop_that_is_heard(self) -> None:
        m = running()
        assert plain(m.handle(RunStopped("by ada"), 50.0)) == [Halt(0, (0, 1), 1.0)]
        m.handle(RankEnded(0, 0, -15), 50.1)
        assert m.handle(RankEnded(1, 0, -15), 50.1) == [SupervisionEnded(130, "the run is stopped: by ada")]

    def test_heard_before_the_start(self) -> None:
        assert plain(machine().handle(RunStopped("earlier"), 0.0)) == [
            SupervisionEnded(130, "the run is stopped: earlier")
        ]

    def test_heard_while_it_waits_to_restart(self) -> None:
        m = running(Layout())
        m.handle(RankEnded(0, 0, 1), 50.0)
        assert plain(m.handle(RunStopped("x"), 50.1)) == [SupervisionEnded(130, "the run is stopped: x")]
        assert (m.deadline(), m.tick(99.0)) == (None, [])

    def test_heard_while_the_others_have_their_grace(self) -> None:
        m = running()
        m.handle(RankEnded(1, 0, 1), 50.0)
        assert plain(m.handle(RunStopped("x"), 50.1)) == [Halt(0, (0,), 1.0)]


NAMES = {130: "exit code 130", -2: "SIGINT"}


class TestEnd:
    def test_a_signal_leaves_first(self) -> None:
        m = running()
        assert plain(m.handle(EndAsked(143, "SIGTERM", is_leaving=True), 50.0)) == []
        assert m.handle(EndAsked(143, "SIGTERM"), 51.0) == [Halt(0, (0, 1), 5.0)]
        m.handle(RankEnded(0, 0, -15), 52.0)
        assert m.handle(RankEnded(1, 0, -15), 52.0) == [SupervisionEnded(143, "SIGTERM")]

    @pytest.mark.parametrize("status", [0, 1, 130, -15])
    def test_what_ends_meanwhile_is_not_mended_and_stops_nobody(self, status: int) -> None:
        m = running(Layout())
        m.handle(EndAsked(143, "SIGTERM", is_leaving=True), 50.0)
        assert m.handle(RankEnded(0, 0, status), 51.0) == [SupervisionEnded(143, "SIGTERM")]

    def test_a_cause_that_comes_twice_takes_nothing_from_the_grace(self) -> None:
        m = running()
        m.handle(EndAsked(143, "SIGTERM", is_leaving=True), 50.0)
        assert m.handle(EndAsked(0, "the group has left its quorum"), 51.0) == [Halt(0, (0, 1), 5.0)]
        assert m.handle(EndAsked(143, "SIGTERM"), 51.0) == []
        assert m.handle(EndAsked(1, "its store has ended"), 52.0) == []
        for rank in (0, 1):
            effects = m.handle(RankEnded(rank, 0, 0), 53.0)
        assert effects == [SupervisionEnded(143, "SIGTERM")]

    def test_a_person_who_asks_again_goes_one_step_further(self) -> None:
        m = running()
        again = EndAsked(143, "SIGTERM", is_urgent=True)
        m.handle(EndAsked(143, "SIGTERM", is_leaving=True), 50.0)
        assert m.handle(again, 51.0) == [Halt(0, (0, 1), 5.0)]
        assert m.handle(again, 52.0) == [Halt(0, (0, 1), 0.0)]

    @pytest.mark.parametrize(
        ("event", "grace_s"),
        [(RunStopped("by ada"), 1.0), (KillAsked("by ada"), 0.0), (EndAsked(1, "the guard"), None)],
    )
    def test_only_a_shorter_grace_takes_from_the_grace(self, event: Event, grace_s: float | None) -> None:
        m = running()
        m.handle(EndAsked(143, "SIGTERM"), 50.0)
        assert m.handle(event, 50.1) == ([] if grace_s is None else [Halt(0, (0, 1), grace_s)])
        assert m.handle(RunStopped("late"), 54.5) == []

    def test_the_first_reason_counts(self) -> None:
        m = running(Layout())
        m.handle(EndAsked(143, "SIGTERM", is_leaving=True), 50.0)
        assert m.handle(RunStopped("x"), 50.0) == [Halt(0, (0,), 1.0)]
        assert m.handle(RankEnded(0, 0, -15), 51.0) == [SupervisionEnded(143, "SIGTERM")]


class TestKill:
    def test_the_ranks_are_killed_and_come_back(self) -> None:
        m = running(policy=RestartPolicy(max_restarts=0, delay_s=1.0))
        assert plain(m.handle(KillAsked("x"), 50.0)) == [Halt(0, (0, 1), 0.0)]
        m.handle(RankEnded(0, 0, -9), 50.1)
        m.handle(RankEnded(1, 0, -9), 50.1)
        assert m.tick(51.0) == [Start(0, (0, 1), 1)]

    def test_or_not(self) -> None:
        m = running(Layout(), RestartPolicy(restart_after_kill=False))
        assert plain(m.handle(KillAsked("x"), 50.0)) == [Halt(0, (0,), 0.0)]
        assert m.handle(RankEnded(0, 0, -9), 50.1) == [SupervisionEnded(1, "killed: x")]


class TestHosts:
    LAYOUT = Layout(2, 2)

    def test_all_hosts_are_waited_for(self) -> None:
        m = machine(self.LAYOUT)
        assert m.handle(HostReady(0), 0.0) == []
        assert m.deadline() == 100.0
        assert m.handle(HostReady(1), 9.0) == [Start(0, (0, 1), 0), Start(1, (2, 3), 0)]

    def test_but_not_for_ever(self) -> None:
        m = machine(self.LAYOUT)
        m.handle(HostReady(0), 0.0)
        assert plain(m.tick(100.0)) == [SupervisionEnded(1, "host 1 of the group was not there for 100 s")]

    def test_a_loss_on_one_restarts_both(self) -> None:
        m = running(self.LAYOUT)
        assert plain(m.handle(RankEnded(3, 0, -9), 50.0)) == [Halt(0, (0, 1), 5.0), Halt(1, (2,), 5.0)]
        for rank in (0, 1, 2):
            m.handle(RankEnded(rank, 0, -15), 50.5)
        assert m.tick(51.0) == [Start(0, (0, 1), 1), Start(1, (2, 3), 1)]

    def test_a_lost_host_has_lost_its_ranks_and_is_waited_for(self) -> None:
        m = running(self.LAYOUT)
        assert plain(m.handle(HostLost(1, "gone"), 50.0)) == [Halt(0, (0, 1), 5.0)]
        m.handle(RankEnded(0, 0, -15), 50.5)
        m.handle(RankEnded(1, 0, -15), 50.5)
        assert m.tick(60.0) == []
        assert m.deadline() == 150.0
        assert m.handle(HostReady(1), 70.0) == [Start(0, (0, 1), 1), Start(1, (2, 3), 1)]

    def test_a_process_that_is_silent_is_lost_and_its_host_is_to_blame(self) -> None:
        m = running(self.LAYOUT, RestartPolicy(max_startup_failures=0, delay_s=1.0, exclude_host_after=2))
        noted, *halts = m.handle(RankSilent(2, 40.0, "rank 2 has ended, and is not back"), 50.0)
        assert halts == [Halt(0, (0, 1), 5.0), Halt(1, (2, 3), 5.0)]
        assert "its process is still there" in noted.text
        started = [m.handle(RankEnded(rank, 0, -9), 55.0) for rank in range(4)][-1]
        assert started == [Start(0, (0, 1), 1), Start(1, (2, 3), 1)]
        assert HostExcluded(1, "it was the first to fail 2 times in a row") in m.handle(RankEnded(3, 1, 1), 70.0)

    def test_what_was_silent_before_the_start_was_another_process(self) -> None:
        m = running(self.LAYOUT)
        m.handle(RankEnded(2, 0, -9), 50.0)
        for rank in (0, 1, 3):
            m.handle(RankEnded(rank, 0, -15), 50.5)
        m.tick(51.0)
        assert m.handle(RankSilent(2, 50.0, "gone"), 60.0) == []

    def test_a_rank_that_is_none_of_ours_or_has_ended_is_nothing(self) -> None:
        m = running(self.LAYOUT)
        m.handle(RankEnded(1, 0, 0), 10.0)
        assert [*m.handle(RankSilent(1, 9.0, ""), 20.0), *m.handle(RankSilent(17, 9.0, ""), 20.0)] == []

    def test_a_failed_check_excludes_the_host_and_ends_the_group(self) -> None:
        m = running(self.LAYOUT)
        effects = plain(m.handle(CheckFailed(1, "no GPU"), 50.0))
        assert effects[0] == HostExcluded(1, "its health check failed: no GPU")
        assert effects[1:] == [Halt(0, (0, 1), 5.0), Halt(1, (2, 3), 5.0)]
        for rank in range(4):
            over = m.handle(RankEnded(rank, 0, -15), 51.0)
        assert over == [SupervisionEnded(1, "host 1 is excluded: its health check failed: no GPU")]

    def test_a_host_that_fails_in_a_row_is_named(self) -> None:
        m = running(self.LAYOUT, RestartPolicy(max_startup_failures=0, delay_s=1.0, exclude_host_after=2))
        m.handle(RankEnded(2, 0, 1), 50.0)
        for rank in (0, 1, 3):
            m.handle(RankEnded(rank, 0, -15), 50.5)
        m.tick(60.0)
        assert HostExcluded(1, "it was the first to fail 2 times in a row") in m.handle(RankEnded(3, 1, 1), 70.0)
