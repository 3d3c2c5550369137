"""recovery.md, section 1, Stop: durable, for everybody, until it is lifted."""

import pytest

from lighthouse.runs.rules.events import (
    RankJoined,
    RankMessage,
    RankSaid,
    RecordDue,
    ResumeAsked,
    Resumed,
    RunVerdict,
    StopAsked,
    Stopped,
)
from lighthouse.runs.rules.machine import RunMachine
from lighthouse_protocol.messages.run import Failure, Finish, RankHeartbeat, RankHello, RankId, Ready, Stop
from tests.lighthouse.run_stage import RunStage, running


def stopped() -> RunStage:
    stage = running(3)
    stage.fail(0)
    stage.feed(StopAsked("exit code 130", "slot 1"))
    return stage


def test_all_are_told_at_once_and_it_is_written_down():
    stage = stopped()
    stop = Stop("exit code 130", "slot 1", generation=1)
    assert {worker.stop for worker in stage.workers.values()} == {stop}
    assert stage.record.stop == stop
    assert stage.running() == set()


def test_the_first_reason_stays():
    stage = stopped()
    assert stage.machine.handle(StopAsked("another", "operator"), stage.now) == []
    assert stage.machine.stop is not None
    assert stage.machine.stop.reason == "exit code 130"


def test_nothing_restarts():
    stage = stopped()
    stop = stage.machine.stop
    stage.kill(0)
    stage.start(0)
    stage.wait(1000)
    assert stage.workers[0].stop == stop
    assert (stage.number, stage.running()) == (1, set())
    assert stage.machine.verdict(stage.now) is RunVerdict.STOPPED


def test_what_dies_after_it_is_no_incident():
    stage = stopped()
    before = stage.counters
    stage.kill(0, 1, 2)
    assert stage.counters == before


@pytest.mark.parametrize("message", [RankHeartbeat(), Ready(), Failure(1, "x"), Finish(1)])
def test_whoever_says_something_is_told_again(message: RankMessage):
    stage = stopped()
    rank = stage.workers[2].rank
    assert stage.machine.stop is not None
    assert stage.machine.handle(RankSaid(rank, message), stage.now) == [Stopped(stage.machine.stop, (rank,))]


def test_it_outlives_the_lighthouse():
    stage = stopped()
    stage.kill_lighthouse()
    stage.kill(0, 1, 2)
    stage.wait(25)
    stage.start_lighthouse()
    stage.start(0, 1, 2)
    stage.wait(1000)
    assert {worker.stop for worker in stage.workers.values()} == {stage.machine.stop}
    assert stage.number == 1


def test_it_holds_for_its_run_only():
    """The next run has a machine of its own."""
    stage = stopped()
    other = RunMachine()
    rank = RankId(0, "x")
    assert other.handle(RankJoined(RankHello(rank, stage.terms), 1), 0.0) == []


def test_resume_lifts_it_and_numbers_go_on():
    stage = stopped()
    stage.kill(0, 1, 2)
    effects = stage.machine.handle(ResumeAsked(), stage.now)
    assert effects == [RecordDue(stage.record), Resumed()]
    assert isinstance(effects[0], RecordDue)
    assert effects[0].record.stop is None
    assert stage.machine.handle(ResumeAsked(), stage.now) == []
    stage.start(0, 1, 2)
    assert (stage.number, stage.running()) == (2, {0, 1, 2})


def test_who_still_waits_begins_to_wait_when_it_is_lifted():
    stage = running(2, min_active=2, return_timeout_s=60.0)
    stage.kill(1)
    stage.wait(61)
    assert stage.machine.stop is not None
    stage.feed(ResumeAsked())
    stage.wait(59.9)
    assert stage.machine.stop is None
    stage.wait(0.2)
    assert stage.machine.stop is not None


def test_max_iterations():
    stage = running(2, max_iterations=3)
    stage.fail(0)
    stage.fail(0)
    assert (stage.number, stage.machine.stop) == (2, None)
    stage.fail(0)
    assert stage.number == 2
    assert stage.machine.stop is not None
    assert "max_iterations: 3" in stage.machine.stop.reason


def test_nobody_is_left_so_nobody_is_stopped():
    stage = running(2)
    stage.kill(0, 1)
    stage.wait(10_000)
    assert stage.machine.stop is None


def test_before_the_first_generation():
    stage = RunStage(2)
    stage.start(0)
    stage.feed(StopAsked("enough", "operator"))
    stage.start(1)
    assert stage.record.stop == Stop("enough", "operator", -1)
    assert stage.number == -1
