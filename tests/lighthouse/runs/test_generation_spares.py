"""recovery.md, section 4, ranks of a wrapped job: six of eight train, two wait."""

import pytest

from lighthouse.runs.rules.events import RunVerdict
from tests.lighthouse.run_stage import RunStage, running

SUPERVISED = {"stride": 100}


def six_of_eight(**terms: object) -> RunStage:
    return running(8, active=6, **(SUPERVISED | terms))


class TestSixOfEight:
    def test_ranks_0_to_5_train_and_6_and_7_wait(self):
        stage = six_of_eight()
        assert stage.places() == {rank: rank for rank in range(6)}
        assert [stage.workers[slot].number for slot in (6, 7)] == [0, 0]

    @pytest.mark.parametrize("order", [(7, 6, 5, 4, 3, 2, 1, 0), (6, 0, 7, 1, 2, 3, 4, 5)])
    def test_whoever_comes_first(self, order: tuple[int, ...]):
        stage = RunStage(8, active=6)
        stage.start(*order)
        assert stage.places() == {rank: rank for rank in range(6)}

    def test_a_spare_that_never_comes_disturbs_nobody(self):
        stage = RunStage(8, active=6)
        stage.start(*range(6))
        assert (stage.now, stage.running()) == (0.0, set(range(6)))

    def test_a_spare_stands_in_for_a_rank_that_never_comes(self):
        stage = RunStage(8, active=6)
        stage.start(0, 1, 2, 4, 5, 6, 7)
        assert stage.number == -1
        stage.wait(61)
        assert stage.places() == {0: 0, 1: 1, 2: 2, 3: 4, 4: 5, 5: 6}

    def test_three_losses(self):
        stage = six_of_eight(min_active=5)
        stage.kill(1)
        assert stage.places() == {0: 0, 1: 6, 2: 2, 3: 3, 4: 4, 5: 5}
        stage.kill(4)
        assert stage.places() == {0: 0, 1: 6, 2: 2, 3: 3, 4: 7, 5: 5}
        stage.kill(0)
        assert stage.places() == {0: 5, 1: 6, 2: 2, 3: 3, 4: 7}
        assert stage.number == 3
        assert stage.table() == (0, 3, 3)

    def test_the_third_stops_the_run_where_five_are_too_few(self):
        stage = six_of_eight(min_active=6, return_timeout_s=60.0)
        stage.kill(1, 4, 0)
        assert stage.machine.verdict(stage.now) is RunVerdict.TOO_FEW
        stage.wait(59.9)
        assert stage.machine.stop is None
        stage.wait(0.2)
        assert stage.machine.stop is not None
        assert stage.machine.stop.reason == "min_active: 5 ranks are left, 6 are needed"
        assert {slot for slot, worker in stage.workers.items() if worker.stop is not None} == {2, 3, 5, 6, 7}

    def test_a_return_in_time_saves_it(self):
        stage = six_of_eight(min_active=6)
        stage.kill(1, 4, 0)
        stage.wait(59)
        stage.start(4)
        stage.wait(1000)
        assert stage.machine.stop is None
        assert len(stage.running()) == 6

    def test_a_dead_spare_disturbs_nobody(self):
        stage = six_of_eight()
        stage.kill(6)
        assert stage.machine.generations.current.stands
        stage.kill(2)
        assert stage.places() == {0: 0, 1: 1, 2: 7, 3: 3, 4: 4, 5: 5}

    def test_a_returning_member_becomes_a_spare_without_a_restart_of_the_others(self):
        stage = six_of_eight()
        stage.kill(1)
        stage.start(1)
        assert (stage.number, stage.running()) == (1, {0, 2, 3, 4, 5, 6})
        assert (stage.workers[1].number, stage.workers[1].place) == (1, None)

    def test_a_returning_member_is_taken_in_where_one_is_missing(self):
        stage = six_of_eight()
        stage.kill(1, 4, 0)
        assert len(stage.running()) == 5
        stage.start(4)
        assert (stage.number, len(stage.running())) == (100, 6)

    def test_the_longest_waiting_spare_is_first(self):
        """So that a flapping one comes last."""
        stage = six_of_eight()
        for _ in range(5):
            stage.wait(1)
            stage.kill(6)
            stage.start(6)
        assert stage.number == 0
        stage.kill(3)
        assert stage.places()[3] == 7

    def test_a_flapping_member_costs_a_generation_each_time_and_no_more(self):
        stage = running(2, **SUPERVISED)
        for _ in range(10):
            stage.kill(1)
            stage.start(1)
        assert stage.machine.generations.restarts.formed == 21
        assert (stage.number, stage.counters.job_restarts) == (1000, 10)


class TestOptions:
    def test_divisible_by(self):
        stage = running(8, divisible_by=4)
        stage.kill(7)
        assert stage.places() == {0: 0, 1: 1, 2: 2, 3: 3}
        stage.start(7)
        assert len(stage.running()) == 8

    def test_a_hosts_ranks_leave_together_and_come_back_together(self):
        stage = RunStage(8, hosts_together=True)
        for slot in range(8):
            stage.start(slot, host=f"node{slot // 4}")
        assert len(stage.running()) == 8
        stage.kill(6)
        assert stage.running() == {0, 1, 2, 3}
        stage.kill(5)
        stage.start(6, host="node1")
        assert stage.running() == {0, 1, 2, 3}
        stage.start(5, host="node1")
        assert stage.running() == set(range(8))
