"""recovery.md, section 1: advance, who is alive, numbers; line by line."""

import itertools

import pytest

from lighthouse.runs.rules.events import (
    GenerationFormed,
    IncidentChanged,
    Interrupted,
    RankJoined,
    RankSaid,
    RecordDue,
    RunVerdict,
    SessionEnded,
    WasLate,
)
from lighthouse.runs.rules.machine import RunMachine
from lighthouse.runs.rules.record import RestartRecord, RunRecord
from lighthouse_protocol.messages.run import Counters, Generation, RankHeartbeat, RankHello, RankId, Ready, Terms
from tests.lighthouse.run_stage import RunStage, running

SUPERVISED = {"stride": 100}
DUE = RecordDue(RunRecord())


class TestAdvance:
    def test_when_all_are_ready_all_are_told_at_once(self):
        machine = RunMachine()
        terms = Terms(world_size=2)
        a, b = RankId(0, "a"), RankId(1, "b")
        assert machine.handle(RankJoined(RankHello(a, terms), 1), 0.0) == []
        assert machine.handle(RankJoined(RankHello(b, terms), 2), 0.0) == []
        assert machine.handle(RankSaid(a, Ready()), 1.0) == []
        formed = Generation((a, b), Counters(number=0))
        assert machine.handle(RankSaid(b, Ready()), 2.0) == [DUE, GenerationFormed(formed)]
        assert machine.handle(RankSaid(a, Ready(0)), 3.0) == []
        again = Generation((a, b), Counters(number=1, global_iteration=1))
        assert machine.handle(RankSaid(b, Ready(0)), 4.0) == [DUE, GenerationFormed(again)]

    def test_a_loss_interrupts_the_others_at_once(self):
        stage = running(3, obedient=False)
        effects = stage.machine.handle(SessionEnded(stage.workers[1].session or 0), stage.now)
        others = (stage.workers[0].rank, stage.workers[2].rank)
        reason = f"{stage.workers[1].rank}: its connection has ended"
        (restart,) = stage.machine.generations.restarts.restarts
        assert restart == RestartRecord(0, reason, 0.0, "0.0", (stage.workers[1].rank,))
        assert effects == [DUE, IncidentChanged(restart), Interrupted(0, reason, others, is_new=True)]

    def test_who_is_lost_while_others_wait_is_left_out_at_once(self):
        stage = running(4, obedient=False)
        stage.ready(0, 1, 2)
        assert stage.number == 0
        stage.kill(3)
        assert (stage.number, stage.running()) == (1, {0, 1, 2})

    def test_who_is_alive_and_not_ready_is_waited_for_until_join_timeout(self):
        stage = running(4, obedient=False, join_timeout_s=60.0)
        stage.ready(0, 1, 2)
        stage.wait(59.9)
        assert stage.machine.verdict(stage.now) is RunVerdict.WAITING_FOR_RANKS
        assert stage.number == 0
        stage.wait(0.2)
        assert (stage.number, stage.running()) == (1, {0, 1, 2})

    def test_who_was_left_out_is_told_so(self):
        stage = running(4, obedient=False)
        stage.ready(0, 1, 2)
        stage.wait(61)
        assert not stage.workers[3].runs

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

    def test_a_majority_of_the_last_generation_and_not_of_those_who_are_left(self):
        """Of 5, 2 are dead, 1 hangs, 2 are ready: 2 of 3 living, and 2 of 5 of the generation."""
        stage = running(5, obedient=False)
        stage.kill(3, 4)
        stage.ready(0, 1)
        stage.wait(100)
        assert stage.machine.verdict(stage.now) is RunVerdict.NO_MAJORITY
        stage.kill(2)
        assert (stage.number, stage.running()) == (1, {0, 1})

    def test_not_fewer_than_min_active(self):
        stage = running(4, min_active=3, return_timeout_s=1000.0)
        stage.kill(3)
        assert stage.running() == {0, 1, 2}
        stage.kill(2)
        assert stage.machine.verdict(stage.now) is RunVerdict.TOO_FEW
        stage.start(3)
        assert stage.running() == {0, 1, 3}

    def test_the_first_waits_for_all_then_for_a_majority(self):
        stage = RunStage(4)
        stage.start(0, 1)
        stage.wait(100)
        assert stage.machine.verdict(stage.now) is RunVerdict.NO_MAJORITY
        stage.start(2)
        assert (stage.number, stage.running()) == (0, {0, 1, 2})

    def test_after_the_loss_of_all_the_world_is_waited_for_again(self):
        stage = running(4, **SUPERVISED)
        stage.kill(0, 1, 2, 3)
        for slot in (3, 1, 0):
            stage.start(slot)
            assert stage.running() == set()
        stage.start(2)
        assert (stage.number, stage.running()) == (100, {0, 1, 2, 3})

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

    def test_rank_0_first(self):
        stage = running(4)
        stage.kill(0)
        assert (stage.number, stage.places()) == (1, {0: 3, 1: 1, 2: 2})

    def test_what_fails_in_a_broken_generation_is_no_second_incident(self):
        stage = running(4, obedient=False)
        stage.fail(0)
        stage.fail(1)
        assert stage.counters.job_restarts == 1
        stage.ready(0, 1, 2, 3)
        assert stage.number == 1

    def test_all_have_finished(self):
        stage = running(3)
        stage.finish(0, 1)
        stage.kill(0)  # its process has ended
        assert stage.completed == []
        stage.finish(2)
        assert stage.completed == [0]
        assert stage.table() == (0, 0, 0)

    def test_who_has_finished_begins_again_with_the_others(self):
        stage = running(3, obedient=False)
        stage.finish(0)
        stage.kill(1)
        assert not stage.workers[0].runs
        stage.ready(0, 2)
        assert (stage.number, stage.running()) == (1, {0, 2})


class TestAlive:
    def test_30_seconds_without_a_stream(self):
        stage = RunStage(2)
        stage.start(0)
        stage.start(1, stream=False)
        assert stage.number == 0
        stage.wait(5)
        stage.beat(1)
        stage.wait(29.9)
        assert (stage.number, stage.running()) == (0, {0, 1})
        stage.wait(0.2)
        assert (stage.number, stage.members()) == (1, {0})

    def test_an_open_stream_needs_no_beat(self):
        stage = running(2)
        stage.wait(10_000)
        assert stage.number == 0

    def test_a_killed_process_is_known_at_once(self):
        """By its stream, or by its supervisor."""
        stage = running(3)
        stage.kill(1)
        stage.report_dead(2)
        assert (stage.now, stage.number, stage.running()) == (0.0, 2, {0})

    def test_moments_are_the_lighthouses_own(self):
        """Nothing that a rank says can be a moment: no event has a field for one."""
        fields = {name for event in (RankHeartbeat, Ready, RankHello) for name in event.__dataclass_fields__}
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

    def test_a_lighthouse_that_was_paused_loses_nobody_by_it(self):
        stage = running(3)
        stage.wait(40)
        stage.feed(WasLate(40))
        stage.feed(SessionEnded(stage.workers[1].session or 0))
        stage.wait(1)
        stage.enter(1)
        stage.wait(100)
        assert (stage.number, stage.running()) == (0, {0, 1, 2})

    def test_no_timeout_runs_while_it_is_paused(self):
        stage = RunStage(4, obedient=False)
        stage.start(0, 1, 2)
        stage.start(3, stream=False)
        stage.ready(0, 1, 2)
        stage.wait(10)
        stage.beat(3)
        stage.wait(10)
        stage.now += 50  # nobody ticked
        stage.feed(WasLate(50))
        stage.wait(19.9)
        assert stage.machine.generations.ranks.get(stage.workers[3].rank) is not None
        stage.beat(3)
        stage.wait(20)
        assert stage.number == 0
        stage.wait(0.2)
        assert stage.number == 1

    def test_who_does_not_come_back_after_the_pause_is_lost(self):
        stage = running(3)
        stage.feed(WasLate(4))
        stage.kill(1)
        assert stage.number == 0
        stage.wait(5.9)
        assert stage.number == 0
        stage.wait(0.2)
        assert (stage.number, stage.running()) == (1, {0, 2})


class TestNumbers:
    def test_in_process_restart_and_exclusion(self):
        stage = running(4, **SUPERVISED)
        stage.fail(2)
        assert (stage.number, stage.running()) == (1, {0, 1, 2, 3})
        stage.kill(2)
        assert (stage.number, stage.running()) == (2, {0, 1, 3})

    def test_promotion_of_a_spare_and_rejoin(self):
        stage = running(4, active=3, **SUPERVISED)
        stage.kill(1)
        assert (stage.number, stage.running()) == (1, {0, 2, 3})
        stage.start(1, attempt=0)  # not by a supervisor
        stage.kill(0)
        assert (stage.number, stage.running()) == (2, {1, 2, 3})
        stage.kill(1)
        stage.start(1, attempt=0)
        assert (stage.number, stage.running()) == (4, {1, 2, 3})

    def test_0_100_200(self):
        stage = running(4, **SUPERVISED)
        told = [stage.number]
        for slot in (1, 3):
            stage.obedient = False
            stage.kill(slot)
            stage.start(slot)
            stage.obedient = True
            stage.obey()
            told.append(stage.number)
        assert told == [0, 100, 200]

    def test_a_restarted_process_counts_once(self):
        stage = running(2, **SUPERVISED)
        stage.kill(1)
        stage.start(1)
        assert stage.number == 100
        stage.fail(1)
        assert stage.number == 101

    def test_200_after_105_in_process_restarts_from_0(self):
        stage = running(2, **SUPERVISED)
        for _ in range(105):
            stage.fail(0)
        assert (stage.number, stage.counters.global_iteration) == (105, 0)
        stage.obedient = False
        stage.kill(1)
        stage.start(1)
        stage.ready(0)
        assert (stage.number, stage.counters.global_iteration) == (200, 200)

    def test_3_4_5_with_rank_3_as_hot_spare(self):
        """Document 000's scenario: without a supervisor the stride is 1."""
        stage = running(4, active=3)
        for _ in range(3):
            stage.fail(0)
        assert (stage.number, stage.running()) == (3, {0, 1, 2})
        stage.kill(1)
        assert (stage.number, stage.places()) == (4, {0: 0, 1: 3, 2: 2})
        stage.start(1)
        assert stage.workers[1].number == 4  # it has caught up: a spare of 4
        assert stage.workers[1].place is None
        stage.fail(2)
        assert {worker.number for worker in stage.workers.values()} == {5}

    def test_a_restarted_process_without_a_supervisor_is_one_more(self):
        stage = running(3)
        stage.kill(1)
        assert (stage.number, stage.running()) == (1, {0, 2})
        stage.start(1)
        assert (stage.number, stage.running()) == (2, {0, 1, 2})

    def test_the_number_is_above_what_any_rank_was_told(self):
        """The journal was lost with number 57 in it."""
        stage = RunStage(2)
        stage.spawn(0).numbers.append(57)
        stage.enter(0)
        stage.ready(0)
        stage.start(1)
        assert stage.number == 58
