"""A run around its generations: supervisors, excluded hosts, incidents that they explain, completion and launches."""

from dataclasses import replace

import pytest

from lighthouse.job import events
from lighthouse.job.generations import EVIDENCE_KEPT, LOST_KEPT, RESTARTS_KEPT
from lighthouse.job.records import Membership, RunConfig, RunRecord, dump_run, parse_run
from lighthouse.job.restarts import MAX_SUPERVISORS, RunMachine, Supervisors
from lighthouse_protocol.messages import run
from lighthouse_protocol.refusals import LighthouseError, Superseded, WrongState
from tests.lighthouse.run_stage import RunStage, running

WELCOME = run.SupervisorWelcome(1.0)

DUE = events.RecordDue(RunRecord())


def again(machine: RunMachine) -> RunMachine:
    """After a restart of the lighthouse."""
    return RunMachine(RunConfig(), record=parse_run(dump_run(machine.make_record(5.0))), now=5.0)


def joins(session: int, name: str = "g", incarnation: str = "1", host: str = "") -> events.SupervisorJoined:
    return events.SupervisorJoined(run.SupervisorHello(name, incarnation, host, (0, 1)), session)


def asks(session: int, reason: str, membership: Membership = Membership.OPEN) -> events.SupervisorAsked:
    """A stop."""
    return events.SupervisorAsked(session, run.StopAsked(reason), membership)


def told(effects: object, session: int) -> object:
    assert isinstance(effects, list)
    return next(e.message for e in effects if isinstance(e, events.SupervisorMessage) and e.session == session)


def refusal(message: object) -> LighthouseError:
    assert isinstance(message, run.HelloRejected)
    return message.error


class TestSupervisors:
    def test_a_newer_stream_of_it_takes_the_older_ones_place(self):
        machine = RunMachine()
        machine.handle(joins(1), 0.0)
        effects = machine.handle(joins(2), 1.0)
        assert isinstance(refusal(told(effects, 1)), Superseded)
        assert told(effects, 2) == WELCOME
        machine.handle(events.SupervisorEnded(1), 1.0)
        assert not machine.is_quiet

    def test_of_two_with_one_name_the_older_ends_for_good(self):
        """It comes again, and again: it never gets the name back."""
        machine = RunMachine()
        machine.handle(joins(1, incarnation="old", host="h1"), 0.0)
        effects = machine.handle(joins(2, incarnation="new", host="h2"), 1.0)
        error = refusal(told(effects, 1))
        assert isinstance(error, Superseded)
        assert "h1" in str(error)
        assert "h2" in str(error)
        for session, each in enumerate([machine, again(machine)], start=3):
            (effect,) = each.handle(joins(session, incarnation="old", host="h1"), 2.0)
            assert isinstance(effect, events.SupervisorMessage)
            assert isinstance(refusal(effect.message), Superseded)

    def test_a_stop_is_told_to_who_comes_later_and_outlives_the_lighthouse(self):
        machine = RunMachine()
        machine.handle(joins(1), 0.0)
        stop = run.RunStopped("exit code 130", "g", -1)
        assert machine.handle(asks(1, "exit code 130"), 1.0) == [DUE, events.Stopped(stop, (), is_new=True)]
        for each in (machine, again(machine)):
            assert each.handle(joins(2, "late"), 6.0) == [events.SupervisorMessage(2, stop)]
            assert each.handle(events.RankJoined(run.RankHello(run.RankId(0, "a"), run.RunTerms(2)), 3), 6.0) == [
                events.Stopped(stop, (run.RankId(0, "a"),))
            ]


class TestLiftedStops:
    """Who was told a stop ends by it. What it asks for later is no second stop."""

    def stopped(self, *before: events.RunEvent) -> RunMachine:
        machine = RunMachine()
        for event in (*before, events.StopAsked("enough", "operator"), events.SupervisorEnded(1), events.ResumeAsked()):
            machine.handle(event, 0.0)
        return machine

    @pytest.mark.parametrize("restarts", [False, True])
    def test_a_supervisor_that_was_connected_is_told_it_again(self, restarts: bool):
        machine = self.stopped(joins(1))
        machine = again(machine) if restarts else machine
        stop = told(machine.handle(joins(2), 9.0), 2)
        assert isinstance(stop, run.RunStopped)
        assert stop.reason == "enough"
        assert machine.handle(asks(2, "a rank died: 130"), 9.0) == []
        assert machine.stop is None

    def test_one_of_which_a_rank_was_connected_is_told_it_also_without_having_been_here(self):
        machine = self.stopped(events.RankJoined(run.RankHello(run.RankId(0, "1.7"), run.RunTerms(2)), 7))
        assert isinstance(told(machine.handle(joins(2), 9.0), 2), run.RunStopped)

    @pytest.mark.parametrize(
        "came", [joins(1), events.RankJoined(run.RankHello(run.RankId(0, "1.7"), run.RunTerms(2)), 7)]
    )
    def test_who_comes_while_it_is_in_force_ends_by_it_and_that_is_written_down(self, came: events.RunEvent):
        machine = RunMachine()
        machine.handle(events.StopAsked("enough", "operator"), 0.0)
        assert machine.handle(came, 1.0)[-1] == events.RecordChanged()
        machine = again(machine)
        machine.handle(events.ResumeAsked(), 8.0)
        assert isinstance(told(machine.handle(joins(2), 9.0), 2), run.RunStopped)

    @pytest.mark.parametrize(
        ("before", "incarnation"), [((joins(1), events.SupervisorEnded(1)), "1"), ((joins(1),), "2")]
    )
    def test_one_that_was_away_with_all_its_ranks_and_a_successor_may_stop_the_run(
        self, before: tuple[events.RunEvent, ...], incarnation: str
    ):
        machine = self.stopped(*before)
        assert told(machine.handle(joins(2, incarnation=incarnation), 9.0), 2) == WELCOME
        machine.handle(asks(2, "again"), 9.0)
        assert machine.stop == run.RunStopped("again", "g", -1)

    def test_what_is_kept_of_them_is_bounded(self):
        supervisors = Supervisors()
        assert supervisors.record_stop("enough", map(str, range(MAX_SUPERVISORS + 5)))
        assert len(supervisors.ending) == MAX_SUPERVISORS

    def test_the_slots_of_all_of_them_are_those_of_a_run_at_most(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr("lighthouse.job.restarts.MAX_GROUP_WORLD_SIZE", 4)
        supervisors = Supervisors()
        supervisors.admit_supervisor(run.SupervisorHello("a", "a1", slots=(0, 1, 2)), 1)
        more = run.SupervisorHello("b", "b1", slots=(3, 4))
        assert str(supervisors.check_supervisor(more, 0.0)) == (
            "slots: with those of b the supervisors of this run start 5 ranks; at most 4"
        )
        assert supervisors.check_supervisor(run.SupervisorHello("a", "a2", slots=(0, 1, 2, 3)), 0.0) is None, (
            "it takes its own place"
        )
        supervisors.admit_supervisor(run.SupervisorHello("a", "a2", slots=(0, 1)), 2)
        assert supervisors.check_supervisor(more, 0.0) is None
        assert (
            Supervisors(supervisors.supervisor_records()).check_supervisor(
                run.SupervisorHello("c", "c1", slots=(3, 4, 5)), 0.0
            )
            is not None
        )


class TestGroups:
    """Replica groups that share a run, and bring the same slots."""

    @pytest.mark.parametrize("is_started_again", [False, True])
    def test_one_keeps_the_slot_that_it_has_from_another_whatever_the_attempt(self, is_started_again: bool):
        stage = RunStage(2)
        stage.feed(joins(70, "a", "s"))
        stage.feed(joins(71, "b", "t"))
        first = run.RankHello(run.RankId(0, "s.0"), stage.terms)
        stage.feed(events.RankJoined(first, 1))
        if is_started_again:
            stage.feed(joins(72, "a", "another"))
        second = run.RankHello(run.RankId(0, "t.0"), stage.terms, attempt=3)
        [refused] = [
            e for e in stage.machine.handle(events.RankJoined(second, 2), 9.0) if isinstance(e, events.RankRefused)
        ]
        assert "slot: 0 of this run is a rank of a, and also of b" in str(refused.error)
        assert 'restart_scope="group"' in str(refused.error)
        assert stage.machine.generations.ranks.find_live(first.rank) is not None

    def test_it_is_free_when_its_rank_has_gone(self):
        stage = RunStage(2)
        stage.feed(joins(70, "a", "s"))
        stage.feed(joins(71, "b", "t"))
        stage.feed(events.RankJoined(run.RankHello(run.RankId(0, "s.0"), stage.terms), 1))
        stage.feed(events.SessionEnded(1))
        second = run.RankHello(run.RankId(0, "t.0"), stage.terms, attempt=3)
        assert not [
            e for e in stage.machine.handle(events.RankJoined(second, 2), 9.0) if isinstance(e, events.RankRefused)
        ]


class TestHosts:
    def test_an_excluded_host_stays_out(self):
        stage = RunStage(3)
        stage.start(0, 1)
        stage.start(2, host="h7")
        stage.feed(joins(70, host="h7"))
        excludes = run.HostExcluded("GPU 3 has fallen off the bus")
        stage.feed(events.SupervisorAsked(70, excludes, Membership.MEMBER))
        stage.obey()
        assert stage.members() == {0, 1}
        assert "h7 is excluded" in stage.machine.generations.restarts.restarts[0].cause
        for machine in (stage.machine, again(stage.machine)):
            effects = list(machine.handle(joins(71, host="h7", incarnation="2"), 9.0))
            errors = [refusal(told(effects, 71))]
            for effect in machine.handle(
                events.RankJoined(run.RankHello(run.RankId(2, "n"), stage.terms, host="h7"), 72), 9.0
            ):
                assert isinstance(effect, events.RankRefused)
                errors.append(effect.error)
            assert len(errors) == 2
            for error in errors:
                assert isinstance(error, WrongState)
                assert "h7 is excluded from this run: GPU 3" in str(error)

    def test_it_is_said_once_until_resume_lets_it_in_again(self):
        machine = RunMachine()
        machine.handle(joins(7, host="h7"), 0.0)
        excludes = events.SupervisorAsked(7, run.HostExcluded("broken"), Membership.MEMBER)
        assert machine.handle(excludes, 0.0) == [events.RecordChanged()]
        again = events.SupervisorAsked(7, run.HostExcluded("again"), Membership.MEMBER)
        assert machine.handle(again, 1.0) == []
        assert [(each.host, each.reason) for each in machine.supervisors.excluded_hosts] == [("h7", "broken")]
        assert machine.handle(events.ResumeAsked(), 1.0) == [DUE, events.Resumed()]
        assert machine.make_record(1.0).excluded == ()
        effects = machine.handle(joins(1, host="h7"), 2.0)
        assert told(effects, 1) == WELCOME


class TestIncidents:
    def test_a_supervisors_word_explains_the_loss(self):
        """Its stream has ended before."""
        stage = running(3)
        lost = stage.workers[1].rank
        stage.kill(1)
        stage.feed(events.RankLost(lost, "SIGSEGV", ("line 1", "line 2"), "g"))
        (incident,) = stage.record.restarts
        assert incident.cause == f"{lost}: SIGSEGV"
        assert incident.evidence == (run.ProcessLost(lost, "SIGSEGV", ("line 1", "line 2")),)
        assert stage.machine.handle(events.RankLost(lost, "SIGSEGV", ("line 1", "line 2"), "g"), stage.now) == []

    def test_of_a_process_that_is_no_rank_it_is_one_of_its_own(self):
        machine = RunMachine(RunConfig(wall_offset_s=1000.0))
        rank = run.RankId(3, "a")
        effects = machine.handle(events.RankLost(rank, "exit code 1", ("oops",), "g/0"), 2.0)
        (incident,) = machine.make_record(2.0).restarts
        assert effects == [events.IncidentChanged(incident)]
        assert incident.cause == "slot 3 (a) of g/0: exit code 1"
        assert (incident.generation, incident.formed, incident.noticed_at) == (-1, None, 1002.0)
        assert machine.generations.restarts.counters.job_restarts == 0
        assert machine.handle(events.RankLost(rank, "exit code 1", ("oops",), "g/0"), 3.0) == []

    @pytest.mark.parametrize("crashes", [1, 100])
    def test_one_of_its_own_leaves_the_open_one_open(self, crashes: int):
        stage = running(3, obedient=False)
        stage.kill(1)
        for crash in range(crashes):
            stage.feed(events.RankLost(run.RankId(1, f"crashed at import {crash}"), "exit code 1", (), "g"))
        assert len(stage.record.restarts) == min(crashes + 1, RESTARTS_KEPT)
        stage.ready(0, 2)
        first, *others = stage.record.restarts
        assert (first.formed, {other.formed for other in others}) == (1, {None})
        assert stage.counters.ranks_restarts == 1

    def test_what_dies_after_a_stop_is_none(self):
        machine = RunMachine()
        machine.handle(events.StopAsked("enough", "operator"), 0.0)
        assert machine.handle(events.RankLost(run.RankId(0, "a"), "SIGTERM", ("bye",), "g"), 1.0) == []
        assert machine.make_record(1.0).restarts == ()

    def test_an_open_one_is_bounded(self):
        """Of two survivors one never stops; a third one comes and dies again and again."""
        stage = running(3, obedient=False, stride=100)
        stage.kill(1)
        for _ in range(200):
            stage.start(1)
            rank = stage.workers[1].rank
            stage.feed(events.SessionEnded(stage.workers[1].session or 0))
            stage.feed(events.RankLost(rank, "exit code 1", ("a", "b"), "g"))
        incident = stage.machine.generations.restarts.open_restart
        assert incident is not None
        assert len(incident.lost) <= LOST_KEPT
        assert len(incident.evidence) <= EVIDENCE_KEPT

    def test_of_many_ranks_it_keeps_those_that_were_lost_first(self):
        stage = running(LOST_KEPT + 2, obedient=False)
        stage.kill(*range(LOST_KEPT + 1))
        (incident,) = stage.machine.generations.restarts.restarts
        assert [rank.slot for rank in incident.lost] == list(range(LOST_KEPT))

    def test_a_rank_that_is_lost_twice_is_one(self):
        stage = running(3, obedient=False)
        stage.break_connection(1)
        stage.enter(1)
        stage.break_connection(1)
        (incident,) = stage.machine.generations.restarts.restarts
        assert incident.lost == (stage.workers[1].rank,)

    def test_the_first_step_after_it(self):
        stage = running(2, wall_offset_s=1000.0)
        stage.beat(0, step=7)
        stage.wait(1)
        stage.fail(1)
        stage.wait(1)
        stage.beat(0, 1, step=7)  # rank 1 was at 0
        assert stage.record.restarts[0].stepped_at == 1002.0
        stage.wait(1)
        for step in (8, 9):
            assert (
                stage.machine.handle(events.RankReported(stage.workers[0].rank, run.RankHeartbeat(step)), stage.now)
                == []
            )
        assert stage.record.restarts[0].stepped_at == 1002.0

    def test_a_step_that_is_no_higher_is_none(self):
        """It has gone back to a checkpoint."""
        stage = running(1, wall_offset_s=1000.0)
        stage.beat(0, step=57)
        stage.fail(0)
        stage.beat(0, step=50)
        assert stage.record.restarts[0].stepped_at is None
        stage.wait(3)
        stage.beat(0, step=51)
        assert stage.record.restarts[0].stepped_at == 1003.0

    def test_nor_is_one_that_it_had_done_before_it_came(self):
        stage = running(1, wall_offset_s=1000.0)
        stage.fail(0)
        rank = stage.workers[0].rank
        stage.feed(events.RankJoined(run.RankHello(rank, stage.terms, generation=1, step=57), 90))
        stage.beat(0, step=57)
        assert stage.record.restarts[0].stepped_at is None

    def test_a_step_while_nobody_may_step_is_none(self):
        stage = running(2, obedient=False)
        stage.fail(0)
        stage.beat(1, step=5)
        assert stage.machine.generations.restarts.restarts[0].stepped_at is None

    def test_it_is_awaited_after_a_restart_of_the_lighthouse_too(self):
        stage = running(2)
        stage.fail(0)
        stage.kill_lighthouse()
        stage.start_lighthouse()
        stage.wait(1)
        stage.beat(1, step=3)
        assert stage.record.restarts[0].stepped_at == 1.0
        stage.kill_lighthouse()
        stage.start_lighthouse()
        stage.wait(1)
        stage.beat(1, step=4)
        assert stage.machine.make_record(stage.now).restarts[0].stepped_at == 1.0


class TestCompletion:
    def completed(self, *before: events.RunEvent) -> RunStage:
        """Both ranks of a supervisor have finished, and have ended."""
        stage = running(2, stride=100)
        for event in (joins(70, incarnation="old"), *before):
            stage.feed(event)
        stage.finish(0, 1)
        assert stage.completed == [0]
        stage.read_ends()
        return stage

    @pytest.mark.parametrize("restarts", [False, True])
    def test_it_stays_completed_for_its_own(self, restarts: bool):
        stage = self.completed(events.SupervisorEnded(70))
        if restarts:
            stage.kill_lighthouse()
            stage.start_lighthouse()
        rank = stage.workers[0].rank
        late = [
            run.RankHello(rank, stage.terms, generation=0),
            run.RankHello(rank, stage.terms),
            run.RankHello(run.RankId(1, "restarted"), stage.terms, attempt=1),
            run.RankHello(run.RankId(1, "told"), stage.terms, seen=0),
        ]
        for session, entry in enumerate(late, start=90):
            for event in (events.RankJoined(entry, session), events.RankReported(entry.rank, run.ReadyReport(0))):
                assert stage.machine.handle(event, stage.now) == [events.Completed(0, (entry.rank,))]
        assert stage.machine.handle(joins(71, incarnation="old"), 9.0) == [
            events.SupervisorMessage(71, run.RunCompleted(0))
        ]
        assert stage.machine.handle(events.StopAsked("late", "g"), 9.0) == []
        stage.wait(1000)
        assert stage.number == 0

    def test_while_one_of_it_is_connected_nothing_begins(self):
        stage = self.completed()
        newer = joins(71, "other", "2")
        assert stage.machine.handle(newer, 9.0) == [events.SupervisorMessage(71, run.RunCompleted(0))]
        stage.feed(events.SupervisorEnded(70))
        assert told(stage.machine.handle(newer, 10.0), 71) == WELCOME

    def test_a_rank_whose_supervisor_was_told_so_begins_nothing(self):
        stage = self.completed()
        twin = joins(71, incarnation="twin")
        assert told(stage.machine.handle(twin, 9.0), 71) == run.RunCompleted(0)
        stage.feed(events.SupervisorEnded(70))
        rank = run.RankId(0, "twin.1")
        entry = run.RankHello(rank, stage.terms)
        assert stage.machine.handle(events.RankJoined(entry, 90), 10.0) == [events.Completed(0, (rank,))]

    @pytest.mark.parametrize("restarts", [False, True])
    @pytest.mark.parametrize("by_supervisor", [False, True])
    def test_a_new_launch_goes_on_with_the_numbers(self, restarts: bool, by_supervisor: bool):
        stage = self.completed(events.SupervisorEnded(70))
        former = [worker.rank for worker in stage.workers.values()]
        stage.workers.clear()
        if by_supervisor:
            stage.feed(joins(71, incarnation="new"))
        stage.start(0, 1)
        assert (stage.number, stage.running(), stage.table()) == (100, {0, 1}, (100, 0, 0))
        if restarts:
            stage.kill_lighthouse()
            stage.start_lighthouse()
        for rank in (*former, run.RankId(1, "told")):
            entry = run.RankHello(rank, stage.terms, generation=0, seen=0)
            assert stage.machine.handle(events.RankJoined(entry, 99), stage.now) == [events.Completed(0, (rank,))]
        if by_supervisor:
            late = joins(72, incarnation="old")
            assert stage.machine.handle(late, stage.now) == [events.SupervisorMessage(72, run.RunCompleted(0))]
        stage.wait(100)
        assert (stage.number, stage.running()) == (100, {0, 1})

    def test_a_new_launch_counts_its_own_generations_and_restarts(self):
        stage = running(2, max_iterations=2)
        stage.fail(0)
        stage.finish(0, 1)
        stage.read_ends()
        stage.workers.clear()
        stage.start(0, 1)
        stage.fail(0)
        assert (stage.table(), stage.running(), stage.machine.stop) == ((3, 1, 1), {0, 1}, None)

    def test_a_new_launch_gets_no_host_back(self):
        excludes = events.SupervisorAsked(70, run.HostExcluded("broken"), Membership.MEMBER)
        stage = self.completed(excludes, events.SupervisorEnded(70))
        error = refusal(told(stage.machine.handle(joins(71, incarnation="new"), 9.0), 71))
        assert "g is excluded from this run: broken" in str(error)
        assert stage.machine.completed is None

    @pytest.mark.parametrize("restarts", [False, True])
    def test_a_rank_of_a_supervisor_of_the_former_launch_is_done(self, restarts: bool):
        """It was cut off, has started its rank again, and neither was told a number."""
        stage = self.completed(events.SupervisorEnded(70))
        first = run.RankHello(run.RankId(0, "old.1"), stage.terms)
        restarted = run.RankHello(run.RankId(0, "old.2"), stage.terms, attempt=1)
        assert stage.machine.handle(events.RankJoined(first, 71), stage.now) == [events.Completed(0, (first.rank,))]
        stage.feed(joins(72, incarnation="new"))
        machine = again(stage.machine) if restarts else stage.machine
        for entry in (restarted, first):
            assert machine.handle(events.RankJoined(entry, 73), 9.0) == [events.Completed(0, (entry.rank,))]
        assert machine.handle(events.RankJoined(run.RankHello(run.RankId(0, "new.1"), stage.terms), 74), 9.0) == []

    def test_a_supervisor_of_which_only_a_rank_was_here_is_done(self):
        """The lighthouse has lost its journal, and the supervisor comes later than its ranks."""
        machine, rank = RunMachine(), run.RankId(0, "old.1")
        hello = events.RankJoined(run.RankHello(rank, run.RunTerms(1)), 70)
        for event in (
            hello,
            events.RankReported(rank, run.ReadyReport()),
            events.RankReported(rank, run.FinishReport(0)),
            events.SessionEnded(70),
        ):
            machine.handle(event, 0.0)
        assert machine.handle(joins(71, incarnation="old"), 1.0) == [events.SupervisorMessage(71, run.RunCompleted(0))]


def test_effects_of_time_come_first():
    """Who has lapsed meanwhile is lost before a supervisor is heard."""
    stage = running(2, stride=100)
    stage.kill_lighthouse()
    stage.workers[1].is_alive = False
    stage.start_lighthouse()
    stage.now += 31
    effects: list[events.RunEffect] = list(stage.machine.handle(joins(70), stage.now))
    assert isinstance(effects[-2], events.SupervisorMessage)
    assert len(effects) > 2


def test_a_first_process_takes_a_slot_that_nobody_holds_since_the_lighthouse_restarted():
    """Everything was down, the lighthouse included; supervisors begin with attempt 0 again."""
    stage = running(2, stride=100)
    stage.kill(1)
    stage.start(1)
    stage.kill_lighthouse()
    stage.workers.clear()
    stage.start_lighthouse()
    stage.start(0, 1)
    assert stage.running() == {0, 1}


@pytest.mark.parametrize("others_form", [False, True], ids=["at once", "after a generation of another process"])
@pytest.mark.parametrize("restarts", [False, True], ids=["", "the lighthouse restarts"])
def test_a_process_that_gets_its_slot_back_has_not_been_restarted(others_form: bool, restarts: bool):
    """It was active, but lost its connection before it received the number, and then its slot to a twin."""
    stage = running(2, stride=100)
    stage.kill(1)
    stage.start(1, attempt=0, unit="s")
    assert (stage.number, stage.table()) == (100, (100, 1, 0))
    process = stage.workers[1]
    process.generation, process.held, process.numbers = None, None, []
    stage.obedient = False
    stage.break_connection(1)
    stage.start(1, attempt=0, unit="twin")
    number, before = 101, (100, 2, 1)
    if others_form:
        stage.ready(0)
        assert (stage.number, stage.table()) == (200, (200, 2, 0))
        number, before = 201, (200, 3, 1)
    stage.break_connection(1)
    process.is_alive = True
    stage.workers[1] = process
    if restarts:
        stage.kill_lighthouse()
        stage.start_lighthouse()
    else:
        stage.enter(1)
    stage.ready(1, 0)
    assert stage.running() == {0, 1}
    assert (stage.number, stage.table()) == (number, before)


def test_failures_under_another_budget_do_not_count():
    """The run has returned with fewer restarts than it has had failures, long ago."""
    stage = running(2, max_restarts=5, restart_window_s=600.0)
    for _ in range(2):
        stage.wait(1000)
        stage.fail(0)
    stage.kill(0, 1)
    stage.terms = replace(stage.terms, max_restarts=0)
    stage.start(0, 1)
    assert (stage.number, stage.running(), stage.machine.stop) == (3, {0, 1}, None)
    stage.fail(0)
    assert stage.machine.stop is not None


def by_torchrun(stage: RunStage, *slots: int) -> None:
    """New processes. torchrun counts no restart when a node is lost, so they have the names of those before."""
    for slot in slots:
        worker = stage.spawn(slot, attempt=0)
        worker.rank = run.RankId(slot, f"{worker.rank.incarnation}.torchrun-0")
        stage.enter(slot)
        stage.ready(slot)


def test_processes_that_torchrun_has_started_again_do_not_wait_for_their_own_restart():
    stage = RunStage(4, stride=100, active=3, obedient=False)
    by_torchrun(stage, 0, 1, 2, 3)
    assert stage.running() == {0, 1, 2}
    stage.wait(1)
    stage.kill(2)
    stage.ready(0, 1)
    assert stage.machine.verdict(stage.now) is events.RunVerdict.WAITING_FOR_RANKS, "torchrun is about to kill them"
    stage.wait(1)
    stage.kill(0, 1, 3)
    stage.wait(1)
    by_torchrun(stage, 3, 0, 1, 2)
    assert (stage.number, stage.running()) == (100, {0, 1, 2})


def test_nor_do_those_by_which_the_lighthouse_learns_of_the_loss():
    """It was paused, and has not read the ends of the streams of those before."""
    stage = RunStage(2, stride=100)
    by_torchrun(stage, 0, 1)
    stage.feed(events.ProcessPaused(1.0))
    for slot in (0, 1):
        stage.break_connection(slot)
    by_torchrun(stage, 0, 1)
    assert (stage.number, stage.running()) == (100, {0, 1})


def test_a_world_of_another_size_knows_nothing_of_the_hosts_of_the_one_before():
    stage = RunStage(2, hosts_together=True)
    stage.start(0, 1, host="h")
    stage.kill(0, 1)
    stage.workers.clear()
    stage.terms = run.RunTerms(world_size=1, hosts_together=True)
    stage.start(0, host="h")
    assert stage.running() == {0}
