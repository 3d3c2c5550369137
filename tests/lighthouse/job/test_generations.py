"""recovery.md, section 1, line by line: advance, who is alive, catch-up, identity, records, the stop."""

import itertools

import pytest

from lighthouse.job import events
from lighthouse.job.records import SPACES_KEPT, RestartRecord, RunRecord
from lighthouse.job.restarts import RunMachine
from lighthouse_protocol.messages import run
from lighthouse_protocol.refusals import DuplicateReplica, InvalidRequest, Superseded, UnknownName, WrongState
from tests.lighthouse.run_stage import RunStage, refusal, running

SUPERVISED = {"stride": 100}
DUE = events.RecordDue(RunRecord())


class TestAdvance:
    def test_when_all_are_ready_all_are_told_at_once(self):
        machine = RunMachine()
        terms = run.RunTerms(world_size=2)
        a, b = run.RankId(0, "a"), run.RankId(1, "b")
        assert machine.handle(events.RankJoined(run.RankHello(a, terms), 1), 0.0) == []
        assert machine.handle(events.RankJoined(run.RankHello(b, terms), 2), 0.0) == []
        assert machine.handle(events.RankReported(a, run.ReadyReport()), 1.0) == []
        formed = run.Generation((a, b), run.RunCounters(number=0))
        assert machine.handle(events.RankReported(b, run.ReadyReport()), 2.0) == [DUE, events.GenerationFormed(formed)]
        assert machine.handle(events.RankReported(a, run.ReadyReport(0)), 3.0) == []
        again = run.Generation((a, b), run.RunCounters(number=1, global_iteration=1))
        assert machine.handle(events.RankReported(b, run.ReadyReport(0)), 4.0) == [DUE, events.GenerationFormed(again)]

    def test_a_loss_interrupts_the_others_at_once(self):
        stage = running(3, obedient=False)
        effects = stage.machine.handle(events.SessionEnded(stage.workers[1].session or 0), stage.now)
        others = (stage.workers[0].rank, stage.workers[2].rank)
        reason = f"{stage.workers[1].rank}: its connection was lost"
        (restart,) = stage.machine.generations.restarts.restarts
        lost = stage.workers[1].rank
        assert restart == RestartRecord(0, reason, 0.0, "0.0", (lost,), caused_by=lost)
        assert effects == [DUE, events.IncidentChanged(restart), events.Interrupted(0, reason, others, is_new=True)]

    @pytest.mark.parametrize("n", range(1, 10))
    def test_floor_half_plus_one(self, n: int):
        """One below waits for ever; exactly so many go on."""
        needed = n // 2 + 1
        for ready in (needed - 1, needed):
            if ready in (0, n):
                continue
            stage = running(n, obedient=False)
            stage.ready(*range(ready))
            stage.wait(1000)
            assert stage.number == (1 if ready == needed else 0), ready

    @pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
    def test_all_kill_orders(self, order: tuple[int, ...]):
        stage = running(4)
        alive = set(range(4))
        for number, slot in enumerate(order[:-1], start=1):
            stage.kill(slot)
            alive.remove(slot)
            assert (stage.number, stage.running()) == (number, alive)
            assert sorted(stage.places()) == list(range(len(alive)))
        stage.kill(order[-1])
        assert stage.running() == set()


class TestAlive:
    def test_moments_are_the_lighthouses_own(self):
        """Nothing that a rank says can be a moment: no event has a field for one."""
        fields = {
            name for event in (run.RankHeartbeat, run.ReadyReport, run.RankHello) for name in event.__dataclass_fields__
        }
        assert not {name for name in fields if name.endswith(("_at", "time", "clock"))}

    @pytest.mark.parametrize("skew_s", [-31.0, 31.0])
    def test_a_wall_clock_that_is_off_changes_nothing(self, skew_s: float):
        stories: list[list[object]] = []
        for offset_s in (0.0, skew_s):
            stage = running(3, wall_offset_s=offset_s)
            stage.kill(1)
            stage.kill_lighthouse()
            stage.wait(1)
            stage.start_lighthouse()
            stage.wait(29.9)
            stage.start(1)
            stories.append([stage.named, stage.places(), stage.table()])
        assert stories[0] == stories[1]


DELAYS = (0, 0.5, 5, 29, 31, 120)


class TestCatchUp:
    @pytest.mark.parametrize("delay", DELAYS)
    @pytest.mark.parametrize("others_after", [0, 1, 35, 130])
    @pytest.mark.parametrize("stream", [True, False])
    def test_a_rank_that_comes_back_is_in_a_generation_with_all(self, delay: float, others_after: float, stream: bool):
        """On both sides of the advance. `others_after`: how long the others take to stop."""
        stage = RunStage(4, obedient=False, join_timeout_s=300.0, **SUPERVISED)
        stage.start(0, 2, 3)
        stage.start(1, stream=stream)
        stage.kill(1)
        for at, act in sorted([(others_after, "others"), (delay, "restart")]):
            stage.wait(at - stage.now)
            if act == "others":
                stage.ready(*(slot for slot in (0, 2, 3) if not stage.workers[slot].runs))
            else:
                stage.start(1)
        stage.obedient = True
        stage.obey()
        stage.ready(*(slot for slot in (0, 2, 3) if stage.number == 0))
        assert stage.running() == {0, 1, 2, 3}
        assert {worker.number for worker in stage.workers.values()} == {100}

    def test_who_has_not_heard_is_handed_it_again(self):
        stage = running(2)
        rank = stage.workers[0].rank
        assert stage.named[0].active[0] == rank
        assert stage.machine.handle(events.RankReported(rank, run.ReadyReport()), 1.0) == [
            events.GenerationSent(rank, stage.named[0])
        ]
        assert stage.machine.generations.current.is_standing

    def test_a_predecessors_messages_are_refused(self):
        stage = running(2, **SUPERVISED)
        old = stage.workers[1].rank
        stage.start(1)
        for event in (events.RankReported(old, run.RankHeartbeat()), events.RankReported(old, run.ReadyReport(0))):
            assert isinstance(refusal(stage.machine.handle(event, stage.now)), Superseded)

    def test_a_lost_journal_is_learned_again_from_who_runs(self):
        stage = RunStage(2)
        for slot in (0, 1):
            stage.spawn(slot).generation = 57
            stage.enter(slot)
        assert not stage.workers[0].runs
        stage.ready(0, 1)
        assert stage.number == 58

    def test_who_is_gone_must_enter_again(self):
        stage = running(2)
        stage.kill(1)
        effects = stage.machine.handle(events.RankReported(stage.workers[1].rank, run.RankHeartbeat()), stage.now)
        assert isinstance(refusal(effects), UnknownName)

    def test_an_older_generation_is_over(self):
        stage = running(2, obedient=False)
        stage.ready(0)
        stage.wait(1)
        stage.ready(1)
        assert stage.number == 1
        worker = stage.workers[0]
        entry = run.RankHello(worker.rank, stage.terms, generation=0)
        effects = stage.machine.handle(events.RankJoined(entry, 99), stage.now)
        assert effects == [events.Interrupted(0, "this generation has ended", (worker.rank,))]


class TestIdentity:
    def test_a_slot_of_its_own(self):
        stage = running(2)
        for attempt in (0, -1):
            stage.machine.handle(events.RankJoined(run.RankHello(stage.workers[1].rank, stage.terms), 77), stage.now)
            entry = run.RankHello(run.RankId(1, "thief"), stage.terms, attempt=attempt, host="h2", pid=7)
            error = refusal(stage.machine.handle(events.RankJoined(entry, 50), stage.now))
            assert isinstance(error, DuplicateReplica)
            assert "h2" in str(error)
        assert stage.machine.generations.current.is_standing

    def test_over_subscription(self):
        """A ninth rank for 6 of 8."""
        stage = running(8, active=6)
        stage.start(8)
        assert isinstance(stage.workers[8].refusals[0], InvalidRequest)
        assert stage.running() == set(range(6))

    def test_all_have_the_same_terms(self):
        stage = running(2)
        entry = run.RankHello(run.RankId(1, "other"), run.RunTerms(world_size=2, active=1), attempt=1)
        assert isinstance(refusal(stage.machine.handle(events.RankJoined(entry, 50), stage.now)), WrongState)

    def test_other_terms_when_nobody_is_here(self):
        stage = running(4)
        stage.kill(0, 1, 2, 3)
        stage.terms = run.RunTerms(world_size=2)
        stage.workers.clear()
        stage.start(0, 1)
        assert stage.running() == {0, 1}
        assert [rank.rank.slot for rank in stage.machine.generations.ranks] == [0, 1]
        assert stage.number > 0


class TestRecords:
    def test_a_ranks_record_outlives_its_crash_and_the_lighthouse(self):
        stage = RunStage(2, wall_offset_s=1e9)
        stage.start(0)
        stage.start(1, host="node7")
        stage.wait(3)
        stage.feed(events.RankReported(stage.workers[1].rank, run.RankHeartbeat(41, "forward")))
        stage.kill(1)
        stage.kill_lighthouse()
        stage.start_lighthouse()
        (record,) = [r for r in stage.machine.make_record(stage.now).ranks if r.rank.slot == 1]
        assert (record.rank, record.attempt, record.host) == (stage.workers[1].rank, 0, "node7")
        assert (record.generation, record.step, record.phase, record.is_here) == (0, 41, "forward", False)

    @pytest.mark.slow
    def test_memory_is_flat_over_10000_restarts(self):
        stage = running(2)
        size = 0
        for restart in range(10_000):
            stage.machine.keys.put_row(stage.number, run.KeyKind.ITERATION, "step", b"1")
            stage.fail(restart % 2)
            if restart == 1000:
                size = len(stage.machine.make_record(stage.now).restarts)
        assert len(stage.machine.make_record(stage.now).restarts) == size == 16
        assert len(stage.machine.keys.generations) == SPACES_KEPT
        assert len(list(stage.machine.generations.ranks)) == 2


class TestLighthouseGone:
    def test_written_down_and_not_told(self):
        """It died between the journal and the telling: those who wait are handed what was written."""
        stage = running(3, obedient=False)
        stage.fail(0)
        stage.ready(0, 1)
        effects = list(stage.machine.handle(events.RankReported(stage.workers[2].rank, run.ReadyReport(0)), stage.now))
        assert isinstance(effects[0], events.RecordDue)
        stage.workers[2].runs, stage.workers[2].is_ready = False, True
        stage.record = effects[0].record
        stage.kill_lighthouse()
        stage.start_lighthouse()
        assert (stage.number, stage.running()) == (1, {0, 1, 2})


# -- the stop: durable, for everybody, until it is lifted


def stopped() -> RunStage:
    stage = running(3)
    stage.fail(0)
    stage.feed(events.StopAsked("exit code 130", "slot 1"))
    return stage


def test_the_first_reason_stays():
    stage = stopped()
    assert stage.machine.handle(events.StopAsked("another", "operator"), stage.now) == []
    assert stage.machine.stop is not None
    assert stage.machine.stop.reason == "exit code 130"


@pytest.mark.parametrize(
    "message", [run.RankHeartbeat(), run.ReadyReport(), run.FailureReport(1, "x"), run.FinishReport(1)]
)
def test_whoever_says_something_is_told_again(message: events.RankMessage):
    stage = stopped()
    rank = stage.workers[2].rank
    assert stage.machine.stop is not None
    assert stage.machine.handle(events.RankReported(rank, message), stage.now) == [
        events.Stopped(stage.machine.stop, (rank,))
    ]
