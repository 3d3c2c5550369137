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
    SessionEnded,
)
from lighthouse.runs.rules.machine import RunMachine
from lighthouse.runs.rules.record import RestartRecord, RunRecord
from lighthouse_protocol.messages.run import (
    Generation,
    RankHeartbeat,
    RankHello,
    RankId,
    ReadyReport,
    RunCounters,
    RunTerms,
)
from tests.lighthouse.run_stage import RunStage, running

SUPERVISED = {"stride": 100}
DUE = RecordDue(RunRecord())


class TestAdvance:
    def test_when_all_are_ready_all_are_told_at_once(self):
        machine = RunMachine()
        terms = RunTerms(world_size=2)
        a, b = RankId(0, "a"), RankId(1, "b")
        assert machine.handle(RankJoined(RankHello(a, terms), 1), 0.0) == []
        assert machine.handle(RankJoined(RankHello(b, terms), 2), 0.0) == []
        assert machine.handle(RankSaid(a, ReadyReport()), 1.0) == []
        formed = Generation((a, b), RunCounters(number=0))
        assert machine.handle(RankSaid(b, ReadyReport()), 2.0) == [DUE, GenerationFormed(formed)]
        assert machine.handle(RankSaid(a, ReadyReport(0)), 3.0) == []
        again = Generation((a, b), RunCounters(number=1, global_iteration=1))
        assert machine.handle(RankSaid(b, ReadyReport(0)), 4.0) == [DUE, GenerationFormed(again)]

    def test_a_loss_interrupts_the_others_at_once(self):
        stage = running(3, obedient=False)
        effects = stage.machine.handle(SessionEnded(stage.workers[1].session or 0), stage.now)
        others = (stage.workers[0].rank, stage.workers[2].rank)
        reason = f"{stage.workers[1].rank}: its connection has ended"
        (restart,) = stage.machine.generations.restarts.restarts
        assert restart == RestartRecord(0, reason, 0.0, "0.0", (stage.workers[1].rank,))
        assert effects == [DUE, IncidentChanged(restart), Interrupted(0, reason, others, is_new=True)]

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
        fields = {name for event in (RankHeartbeat, ReadyReport, RankHello) for name in event.__dataclass_fields__}
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


class TestNumbers:
    def test_the_number_is_above_what_any_rank_was_told(self):
        """The journal was lost with number 57 in it."""
        stage = RunStage(2)
        stage.spawn(0).numbers.append(57)
        stage.enter(0)
        stage.ready(0)
        stage.start(1)
        assert stage.number == 58
