"""One rank's life, event by event: each test compares the whole list of effects."""

import pytest

from agent_client.restart.rules.config import RankConfig, RankPhase
from agent_client.restart.rules.events import (
    Connect,
    Disconnect,
    Ended,
    Interrupt,
    Kill,
    LighthouseBack,
    LighthouseLost,
    MessageReceived,
    Raised,
    RankEffect,
    RankEvent,
    Returned,
    Run,
    Send,
    StandBy,
    StepDone,
    StreamClosed,
    Waiting,
)
from agent_client.restart.rules.machine import RankMachine
from lighthouse_protocol.messages.run import (
    Counters,
    Done,
    Failure,
    Finish,
    FromRunRank,
    Over,
    RankHeartbeat,
    RankHello,
    RankId,
    Ready,
    Refusal,
    Stop,
    Terms,
    Told,
    ToRunRank,
    Welcome,
)
from lighthouse_protocol.refusals import DuplicateReplica, InvalidRequest, Superseded, UnknownName, Unreachable

ENTRY = RankHello(RankId(1, "i"), Terms(3), attempt=2, host="h", pid=7)
CONFIG = RankConfig(
    beat_interval_s=1000.0, interrupt_interval_s=1.0, hard_timeout_s=5.0, lighthouse_timeout_s=60.0, soft_timeout_s=None
)
TOLD_0 = Told(Counters(0), (0, 1, 2))
TOLD_1 = Told(Counters(1), (0, 1))
DOWN = Unreachable("down")


class Life:
    """A machine and its stream number. `said` is what it sends."""

    def __init__(self, config: RankConfig = CONFIG) -> None:
        self.machine = RankMachine(ENTRY, config)
        self.now = 0.0
        self.session = 1
        assert self.machine.start(self.now) == [Connect(1), Send(1, ENTRY)]

    def do(self, event: RankEvent) -> list[RankEffect]:
        return self._checked(list(self.machine.handle(event, self.now)))

    def hear(self, message: ToRunRank) -> list[RankEffect]:
        return self.do(MessageReceived(self.session, message))

    def close(self, error: Exception | None = DOWN) -> list[RankEffect]:
        return self.do(StreamClosed(self.session, error, jitter=0.5))  # type: ignore[arg-type]

    def later(self, by_s: float) -> list[RankEffect]:
        """Time passes, deadline by deadline."""
        effects: list[RankEffect] = []
        until = self.now + by_s
        while (at := self.machine.deadline(self.now)) is not None and at <= until:
            self.now = at
            effects += self._checked(list(self.machine.tick(self.now)))
        self.now = until
        return effects

    def _checked(self, effects: list[RankEffect]) -> list[RankEffect]:
        deadline = self.machine.deadline(self.now)
        assert deadline is None or deadline > self.now
        self.session = max([self.session, *(effect.session for effect in effects if isinstance(effect, Connect))])
        return effects

    def sends(self, *messages: FromRunRank) -> list[RankEffect]:
        return [Send(self.session, message) for message in messages]


@pytest.fixture
def ready() -> Life:
    life = Life()
    assert life.do(Waiting()) == life.sends(Ready())
    return life


@pytest.fixture
def running(ready: Life) -> Life:
    assert ready.hear(TOLD_0) == [Run(TOLD_0.counters, 1, 3)]
    return ready


def reconnect(life: Life) -> list[FromRunRank]:
    """The stream breaks and is opened again: what is said on the new one."""
    assert life.close()[0] == LighthouseLost("down")
    effects = life.later(1.0)
    assert effects[0] == Connect(life.session)
    return [effect.message for effect in effects[1:] if isinstance(effect, Send) and effect.session == life.session]


def test_is_told_a_generation_and_runs_it_once(running: Life) -> None:
    assert running.hear(TOLD_0) == []
    assert running.machine.phase is RankPhase.RUNNING


def test_who_is_not_in_it_is_a_spare_until_it_is(ready: Life) -> None:
    without = Told(Counters(0), (0, 2))
    assert ready.hear(without) == [StandBy(without.counters)]
    assert ready.hear(without) == []
    assert ready.hear(TOLD_1) == [Run(TOLD_1.counters, 1, 2)]


def test_a_spare_of_a_generation_is_not_active_in_it(ready: Life) -> None:
    ready.hear(Told(Counters(0), (0, 2)))
    assert ready.machine.generation is None
    assert reconnect(ready)[0] == RankHello(ENTRY.rank, ENTRY.terms, 2, "h", 7, is_ready=True, seen=0)


def test_what_fails_says_so_then_waits(running: Life) -> None:
    assert running.do(Raised("boom")) == running.sends(Failure(0, "boom"))
    assert running.do(Waiting()) == running.sends(Ready(0))
    assert running.hear(Over(0, "boom")) == []
    assert running.hear(TOLD_1) == [Run(TOLD_1.counters, 1, 2)]


def test_what_is_over_is_interrupted_until_it_leaves(running: Life) -> None:
    assert running.hear(Over(0, "slot 2 is lost")) == [Interrupt("slot 2 is lost")]
    assert running.later(2.5) == [Interrupt("slot 2 is lost")] * 2
    assert running.do(Raised("interrupted")) == []
    assert running.later(30) == []
    assert running.do(Waiting()) == running.sends(Ready(0))


def test_what_was_interrupted_has_not_failed_and_not_finished(running: Life) -> None:
    """It had returned already; it waits, and says nothing more by itself."""
    running.hear(Over(0))
    assert Ready(0) in [effect.message for effect in running.do(Returned()) if isinstance(effect, Send)]
    assert running.machine.phase is RankPhase.READY


def test_what_cannot_be_interrupted_is_killed_once(running: Life) -> None:
    running.hear(Over(0, "why"))
    effects = running.later(20)
    assert [effect for effect in effects if isinstance(effect, Kill)] == [
        Kill("still runs 5 s after its interruption: why")
    ]
    assert effects[-1] == Kill("still runs 5 s after its interruption: why")


def test_another_generations_end_is_not_ours(running: Life) -> None:
    assert running.hear(Over(7)) == []


def test_a_generation_that_runs_without_us_ends_ours(running: Life) -> None:
    assert running.hear(Told(Counters(4), (0,))) == [Interrupt("generation 4 runs")]
    running.do(Raised(""))
    assert running.do(Waiting()) == running.sends(Ready(0))


def test_has_finished_and_all_have(running: Life) -> None:
    assert running.do(Returned()) == running.sends(Finish(0))
    assert running.hear(Done(0)) == [Disconnect(1), Ended(Done(0))]
    assert running.machine.deadline(running.now) is None


def test_who_has_finished_runs_again_when_another_fails(running: Life) -> None:
    running.do(Returned())
    assert running.hear(Over(0, "another")) == running.sends(Ready(0))
    assert running.hear(TOLD_1) == [Run(TOLD_1.counters, 1, 2)]


def test_asks_for_the_next_by_itself(running: Life) -> None:
    assert running.do(Waiting()) == running.sends(Ready(0))
    assert running.hear(TOLD_1) == [Run(TOLD_1.counters, 1, 2)]


def test_a_stop_ends_what_runs_and_is_the_end(running: Life) -> None:
    stop = Stop("enough", "me", 0)
    assert running.hear(stop) == [Disconnect(1), Ended(stop), Interrupt("enough")]
    assert running.hear(TOLD_1) == []
    assert running.do(Raised("")) == []
    assert running.machine.deadline(running.now) is None


def test_who_does_not_leave_after_a_stop_is_killed(running: Life) -> None:
    running.hear(Stop("enough", "me", 0))
    assert any(isinstance(effect, Kill) for effect in running.later(10))


# -- the stream


def test_what_was_heard_of_an_older_stream_is_nothing(running: Life) -> None:
    reconnect(running)
    assert running.do(MessageReceived(1, Over(0))) == []
    assert running.do(StreamClosed(1, Superseded("by the newer one"))) == []


def test_who_runs_says_which(running: Life) -> None:
    running.do(StepDone(12))
    running.later(1.0)
    assert reconnect(running) == [RankHello(ENTRY.rank, ENTRY.terms, 2, "h", 7, generation=0, seen=0, step=12)]
    assert running.machine.phase is RankPhase.RUNNING


def test_who_is_ready_says_so(ready: Life) -> None:
    assert reconnect(ready) == [RankHello(ENTRY.rank, ENTRY.terms, 2, "h", 7, is_ready=True)]


def test_who_has_finished_says_so(running: Life) -> None:
    running.do(Returned())
    assert reconnect(running)[1:] == [Finish(0)]


def test_a_failure_is_said_again_until_it_is_known(running: Life) -> None:
    running.do(Raised("boom"))
    assert reconnect(running)[1:] == [Failure(0, "boom")]
    running.do(Waiting())
    running.hear(Welcome())
    assert reconnect(running) == [
        RankHello(ENTRY.rank, ENTRY.terms, 2, "h", 7, generation=0, seen=0),
        Failure(0, "boom"),
        Ready(0),
    ]
    running.hear(Over(0))
    assert reconnect(running) == [RankHello(ENTRY.rank, ENTRY.terms, 2, "h", 7, generation=0, is_ready=True, seen=0)]


def test_what_is_done_without_a_stream_is_held(running: Life) -> None:
    running.close()
    assert running.do(Raised("boom")) == []
    assert running.do(Waiting()) == []
    messages = [effect.message for effect in running.later(1.0) if isinstance(effect, Send)]
    assert messages[1:] == [Failure(0, "boom"), Ready(0)]


def test_lost_and_back_are_told_once(running: Life) -> None:
    running.hear(Welcome())
    assert running.close() == [LighthouseLost("down")]
    for _ in range(20):
        effects = running.later(4.0)
        assert not any(isinstance(effect, LighthouseLost | LighthouseBack) for effect in effects)
        assert running.close() == []
    running.later(4.0)
    assert running.hear(Welcome()) == [LighthouseBack()]
    assert running.hear(Welcome()) == []


def test_the_delay_doubles_up_to_a_limit_and_begins_anew(running: Life) -> None:
    def delay() -> float:
        running.close()
        at = running.machine.deadline(running.now)
        assert at is not None
        waited = at - running.now
        running.later(waited)
        return waited

    assert [pytest.approx(delay()) for _ in range(8)] == [0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0]
    running.hear(Welcome())
    assert delay() == pytest.approx(0.05)


def test_a_stream_that_nobody_answers_is_given_up() -> None:
    life = Life()
    effects = life.later(10.0)
    assert effects == [Disconnect(1), LighthouseLost("no answer within 10 s")]
    assert life.later(1.0)[0] == Connect(2)


def test_who_waits_gives_up_a_lighthouse_that_does_not_come_back(ready: Life) -> None:
    ready.close()
    effects = ready.later(120.0)
    assert isinstance(effects[-1], Ended)
    assert "not reached for 60 s" in str(effects[-1].outcome)


def test_who_runs_does_not_need_a_lighthouse(running: Life) -> None:
    running.hear(Welcome())
    running.close()
    for _ in range(100):
        running.later(4.0)
        running.close()
    assert running.machine.phase is RankPhase.RUNNING
    assert not running.machine.has_ended


@pytest.mark.parametrize("error", [InvalidRequest("slot: is 8"), Superseded("a successor")])
def test_a_refusal_that_is_final(running: Life, error: InvalidRequest | Superseded) -> None:
    assert running.hear(Refusal(error)) == [Disconnect(1), Ended(error), Interrupt(str(error))]


def test_a_refusal_that_is_not(running: Life) -> None:
    assert running.hear(Refusal(UnknownName("enter again"))) == [LighthouseLost("enter again")]
    assert running.later(1.0)[0] == Connect(2)


def test_a_slot_that_is_taken_is_asked_for_until_its_predecessor_must_be_missed() -> None:
    life = Life()
    taken = DuplicateReplica("slot: 1 is that of pid 3")
    for _ in range(200):
        effects = life.hear(Refusal(taken))
        if Ended(taken) in effects:
            break
        life.later(4.0)
    assert 45 <= life.now < 55


# -- signs of life


def test_beats_and_steps_are_told_and_not_too_often() -> None:
    life = Life(RankConfig(beat_interval_s=1.0, report_interval_s=0.25))
    assert life.later(2.0) == life.sends(RankHeartbeat(0, "idle"), RankHeartbeat(0, "idle"))
    life.now = 2.5
    assert life.do(StepDone(1)) == life.sends(RankHeartbeat(1, "idle"))
    assert life.do(StepDone(2)) == []
    assert life.do(StepDone(3)) == []
    assert life.later(0.25) == life.sends(RankHeartbeat(3, "idle"))
    assert life.later(0.5) == []


def test_a_function_that_makes_no_progress_has_failed() -> None:
    life = Life(RankConfig(beat_interval_s=1000.0, soft_timeout_s=3.0))
    life.do(Waiting())
    life.hear(TOLD_0)
    assert life.later(100.0) == []  # it has not made a step yet: it may be compiling
    life.do(StepDone(1))
    assert life.later(2.9) == []
    failure = Failure(0, "no progress for 3 s")
    assert life.later(0.2) == [*life.sends(failure), Interrupt(failure.reason)]
    assert life.do(Raised("interrupted")) == []
    assert life.do(Waiting()) == life.sends(Ready(0))
