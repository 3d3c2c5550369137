"""recovery.md, section 1, Stop: durable, for everybody, until it is lifted."""

import pytest

from lighthouse.runs.rules.events import (
    RankMessage,
    RankSaid,
    RecordDue,
    ResumeAsked,
    Resumed,
    StopAsked,
    Stopped,
)
from lighthouse_protocol.messages.run import FailureReport, FinishReport, RankHeartbeat, ReadyReport, RunStopped
from tests.lighthouse.run_stage import RunStage, running


def stopped() -> RunStage:
    stage = running(3)
    stage.fail(0)
    stage.feed(StopAsked("exit code 130", "slot 1"))
    return stage


def test_all_are_told_at_once_and_it_is_written_down():
    stage = stopped()
    stop = RunStopped("exit code 130", "slot 1", generation=1)
    assert {worker.stop for worker in stage.workers.values()} == {stop}
    assert stage.record.stop == stop
    assert stage.running() == set()


def test_the_first_reason_stays():
    stage = stopped()
    assert stage.machine.handle(StopAsked("another", "operator"), stage.now) == []
    assert stage.machine.stop is not None
    assert stage.machine.stop.reason == "exit code 130"


@pytest.mark.parametrize("message", [RankHeartbeat(), ReadyReport(), FailureReport(1, "x"), FinishReport(1)])
def test_whoever_says_something_is_told_again(message: RankMessage):
    stage = stopped()
    rank = stage.workers[2].rank
    assert stage.machine.stop is not None
    assert stage.machine.handle(RankSaid(rank, message), stage.now) == [Stopped(stage.machine.stop, (rank,))]


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
