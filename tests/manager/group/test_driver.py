"""What a manager's driver does with calls, watches and sessions, over ports that only keep what they are given."""

from typing import Any

import pytest

from lighthouse.cli import check_history
from lighthouse_protocol.messages import session
from lighthouse_protocol.messages.membership import Decision, Participant, Quorum, World
from lighthouse_protocol.messages.progress import ProgressSample
from lighthouse_protocol.refusals import DeadlinePassed, InvalidRequest, NotPermitted, Unreachable
from lighthouse_protocol.rules.access import ADDRESS_WORD, prove
from lighthouse_runtime.timing.timers import LoopLag
from manager.group import driver, events
from manager.group.driver import GroupDriver
from tests.manager.groups import formed
from tests.manager.recorders import Heard, Link, NoEvidence, Outcome
from tests.virtual_loop import VirtualLoop


class Lag(LoopLag):
    """Finds `late_s` by its next check."""

    def check(self) -> None:
        by_s, self.late_s = self.late_s, 0.0
        for listener in self._listeners if by_s else ():
            listener(by_s)


class PausedLoop(VirtualLoop):
    """Stands still for five seconds before reading number `pause_at` of its clock, counted from 0."""

    pause_at = -1

    def time(self) -> float:
        self.now += 5.0 if self.pause_at == 0 else 0.0
        self.pause_at -= 1
        return self.now


class Group:
    """Of two ranks. `outcomes`: what the daemon was told."""

    def __init__(self) -> None:
        self.loop, self.link, self.evidence = VirtualLoop(), Link(), NoEvidence()
        self.outcomes: list[driver.Outcome] = []
        self.lag = Lag(self.loop)
        me, told = Participant("a", group_world_size=2), self.outcomes.append
        self.driver = GroupDriver(me, "L", self.loop, self.link, self.evidence, told, lag=self.lag)

    def open_session(self) -> None:
        """With a valid lease."""
        self.driver.begin_session()
        self.hear(session.Welcome(1.0, 60.0), session.HeartbeatAck(1, 1.0))

    def hear(self, *messages: session.ToManager) -> None:
        for message in messages:
            self.driver.handle_message(message)

    def ask(self, rank: int, step: int = 0, within_s: float = 1000.0, **fields: Any) -> Outcome:
        outcome = Outcome()
        fields = {"rank_incarnation": f"w{rank}", "tag_quorum_id": step} | fields
        self.driver.ask(outcome, within_s, group_rank=rank, step=step, **fields)
        return outcome

    def vote(self, rank: int, step: int = 0, within_s: float = 1000.0) -> Outcome:
        outcome = Outcome()
        self.driver.vote(outcome, within_s, group_rank=rank, step=step, vote=True, quorum_id=1)
        return outcome

    def watch(self, rank: int, **fields: Any) -> tuple[int, Heard]:
        heard = Heard()
        return self.driver.open_watch(session.WatchHello(rank, f"w{rank}", **fields), heard, is_local=False), heard


@pytest.fixture
def group(caplog: pytest.LogCaptureFixture) -> Group:
    caplog.set_level("INFO", "manager.group")
    return Group()


class TestCalls:
    def test_requests_are_answered_by_the_quorum_and_the_world(self, group: Group):
        group.open_session()
        group.hear(World(2, 2))
        outcomes = [group.ask(rank) for rank in range(2)]
        group.hear(session.JoinAccepted(1, formed(1), True))
        for outcome in outcomes:
            assignment, quorum = outcome.value
            assert (assignment.quorum_id, assignment.world, quorum) == (1, World(2, 2, group_world_size=2), formed(1))
        assert group.driver.machine.waiting == ()

    @pytest.mark.parametrize("reading", range(6))
    def test_a_pause_at_any_moment_of_a_request_loses_neither_the_join_nor_the_pause(self, reading: int):
        loop, link, rank = PausedLoop(), Link(), Outcome()
        lag = LoopLag(loop)
        lag.watch()
        manager = GroupDriver(Participant("a"), "L", loop, link, NoEvidence(), lambda _: None, lag=lag)
        manager.begin_session()
        loop.pause_at = reading
        manager.ask(rank, 1000.0, group_rank=0, step=0, rank_incarnation="w0", tag_quorum_id=0)
        loop.pause_at = -1
        [join] = [message for message in link.sent if isinstance(message, session.JoinRequest)]
        manager.handle_message(session.JoinAccepted(join.number, Quorum(1, (join.participant,)), False))
        assert rank.value[0].quorum_id == 1
        assert lag.late_s == (0 if loop.now == 1000 else pytest.approx(4.75))

    def test_quorums_and_decisions_are_logged_as_check_history_reads_them(self, group: Group, caplog: Any):
        caplog.set_level("DEBUG", "manager.group")
        group.open_session()
        for rank in range(2):
            group.ask(rank)
        group.hear(session.JoinAccepted(1, formed(1), True))
        for rank in range(2):
            group.vote(rank)
        lines = [record.getMessage() for record in caplog.records]
        received = [found for line in lines if (found := check_history.RECEIVES.fullmatch(line))]
        assert [found.groups() for found in received] == [("1",)]
        answers = [found for line in lines if (found := check_history.ANSWERS.fullmatch(line))]
        assert [found.groups() for found in answers] == [("0", "1", str(rank), "yes", "commit") for rank in range(2)]

    def test_decisions_are_not_logged_at_info(self, group: Group, caplog: Any):
        group.open_session()
        for rank in range(2):
            group.ask(rank)
        group.hear(session.JoinAccepted(1, formed(1), True))
        before = len(caplog.records)
        for rank in range(2):
            group.vote(rank)
        assert len(caplog.records) == before

    def test_one_that_is_too_late_says_what_it_has_waited_for(self, group: Group):
        late, vote = group.ask(0, within_s=10), group.vote(0, within_s=10)
        group.loop.go(10)
        assert isinstance(late.value, DeadlinePassed)
        assert [str(outcome.value) for outcome in (late, vote)] == [
            "ranks [1] of 2 have not asked for a quorum within 9.88 s; a has rank 0 of 2; missing: 1",
            "the other ranks of the group have not voted within 9.88 s",
        ]

    @pytest.mark.parametrize("error", ["", "refused"])
    def test_so_does_one_that_waits_for_the_lighthouse(self, group: Group, error: str):
        outcomes = [group.ask(rank, within_s=10) for rank in range(2)]
        group.link.error = error
        group.loop.go(10)
        words = "lighthouse: refused; tried for 9.88 s" if error else "the lighthouse gave no quorum within 9.88 s"
        for outcome in outcomes:
            assert isinstance(outcome.value, Unreachable if error else DeadlinePassed)
            assert str(outcome.value) == words

    def test_a_caller_that_has_gone_leaves_neither_a_timer_nor_a_request(self, group: Group):
        group.driver.end_call(group.driver.ask(Outcome(), 60, group_rank=0, step=0))
        before = group.loop.timers  # rank 1 is missing
        gone = Outcome(), Outcome()
        group.driver.end_call(group.driver.vote(gone[0], 60, group_rank=0, step=1, vote=True))
        call = group.driver.ask(gone[1], 60, group_rank=0, step=0)
        assert group.driver.machine.waiting == (0,)
        for _ in range(2):
            group.driver.end_call(call)
        assert group.driver.machine.waiting == ()
        assert [outcome.value for outcome in gone] == [None, None]
        group.loop.go(0)
        assert group.loop.timers == before

    def test_close_refuses_those_that_wait_and_those_that_come(self, group: Group):
        waiting = [group.vote(0), group.ask(0)]
        group.driver.close("it stops")
        for outcome in (*waiting, group.ask(1)):
            assert isinstance(outcome.value, Unreachable)
            assert str(outcome.value) == "it stops"
        assert group.loop.timers == 0


class TestWatches:
    def test_votes_are_answered_on_the_watch(self, group: Group):
        (first, heard), (second, other) = group.watch(0), group.watch(1)
        group.driver.receive(first, session.Vote(7, 0, True, None, False, 60.0))
        assert heard.messages == [session.WatchOpened()]
        group.driver.receive(second, session.Vote(9, 0, True, None, False, 60.0))
        assert heard.messages[1:] == [session.VoteAnswer(7, Decision(True))]
        assert other.messages[1:] == [session.VoteAnswer(9, Decision(True))]

    def test_votes_end_with_it(self, group: Group):
        number, heard = group.watch(0)
        group.driver.receive(number, session.Vote(7, 0, True, None, False, 60.0))
        timers = group.loop.timers
        for _ in range(2):
            group.driver.end_watch(number)
        assert (len(heard.messages), heard.has_ended, group.loop.timers) == (1, True, timers - 1)
        assert not group.driver.machine.votes.is_voting
        group.driver.receive(number, session.Vote(8, 0, True, None, False, 60.0))
        assert not group.driver.machine.votes.is_voting

    def test_what_a_rank_says_shows_that_it_runs(self, group: Group):
        number, _ = group.watch(0)
        [watch] = group.driver._watches.values()
        for message in (ProgressSample(1), session.Leaving(1), None):
            group.loop.go(1)
            group.driver.receive(number, message)
            assert watch.heard_at == group.loop.now
        with pytest.raises(InvalidRequest, match="first message"):
            group.driver.receive(number, session.WatchHello(0, "w0"))

    def test_a_rank_that_the_group_does_not_have(self, group: Group):
        with pytest.raises(InvalidRequest, match="rank"):
            group.watch(2)
        with pytest.raises(InvalidRequest, match="rank"):
            group.driver.report_rank_failure(2, "w2", "why", ends_group=False)

    def test_a_report_by_a_stranger_is_no_error_of_the_rank(self, group: Group, caplog: pytest.LogCaptureFixture):
        group.driver.report_rank_failure(0, "a stranger", "the loss is odd", ends_group=False)
        [record] = caplog.records
        assert record.levelname == "INFO"
        assert "an unknown process reported that rank 0 failed: the loss is odd" in record.getMessage()

    def test_only_one_that_nobody_starts_again_is_said_to_be_given_up(
        self, group: Group, caplog: pytest.LogCaptureFixture
    ):
        for rank in range(2):
            number, _ = group.watch(rank)
            group.driver.end_watch(number)
        group.driver.ranks_started([1])
        caplog.clear()
        group.loop.go(30.0)
        assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
            ("ERROR", "lost rank 0: rank 0 has ended and has not reconnected"),
            ("INFO", "rank 1 has ended, was restarted and has not connected yet"),
        ]

    def test_nor_is_one_that_has_left_in_good_order(self, group: Group, caplog: pytest.LogCaptureFixture):
        number, _ = group.watch(0)
        group.driver.receive(number, session.Leaving())
        group.driver.end_watch(number)
        caplog.clear()
        group.loop.go(30.0)
        assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
            ("INFO", "rank 0 has ended and has not reconnected")
        ]

    def test_one_that_could_not_be_heard_since_the_manager_was_held_up_is_waited_for(
        self, group: Group, caplog: pytest.LogCaptureFixture
    ):
        number, _ = group.watch(0)
        group.driver.end_watch(number)
        caplog.clear()
        group.loop.go(5)
        group.loop.now += 3600
        group.lag.late_s = 3600
        group.loop.go(4.9)
        assert caplog.messages == []
        group.loop.go(0.2)
        assert caplog.messages == ["lost rank 0: rank 0 has ended and has not reconnected"]

    def test_an_observed_rank_is_no_rank_of_the_quorum(self, group: Group):
        group.ask(0), group.ask(1)
        before = group.driver.machine.waiting
        number, _ = group.watch(0, is_observer=True)
        group.driver.receive(number, ProgressSample(at="train.py:1"))
        group.driver.end_watch(number)  # as where its process is stopped
        group.loop.go(60)
        [view] = group.driver._progress.view(group.loop.now).ranks
        assert (view.sample.at, view.beat_age_s) == ("train.py:1", 60)
        number, _ = group.watch(0, is_observer=True)
        group.driver.receive(number, session.Leaving())
        assert not group.driver._progress.view(0).ranks
        assert (group.driver.machine.waiting, group.driver.machine.watches.losses) == (before, [])

    def test_only_peers_learn_addresses_also_while_a_rank_is_lost(self, group: Group):
        group.open_session()
        watches = [group.watch(rank)[0] for rank in range(2)]
        for rank in range(2):
            group.ask(rank, checkpoint_address=f"c{rank}")
        group.hear(session.JoinAccepted(1, formed(1), True, "the quorum's secret"))
        group.driver.end_watch(watches[1])
        for rank in range(2):
            with pytest.raises(NotPermitted, match="has not proved that it is a member"):
                group.driver.check_peer(rank, 1, "")
            group.driver.check_peer(rank, 1, prove("the quorum's secret", ADDRESS_WORD, 1, rank))

    def test_a_kill_reaches_the_ranks(self, group: Group):
        _, heard = group.watch(0)
        group.hear(session.KillRequest("why", frozenset({1})))
        assert heard.messages[1:] == [session.Killed("why")]
        assert group.outcomes == [events.Killed("why", frozenset({1}))]


class TestSessions:
    def test_a_silent_one_is_doubled_and_then_given_up(self, group: Group):
        group.open_session()
        assert isinstance(group.link.sent[0], session.Hello)
        group.loop.go(3)
        group.hear(session.HeartbeatAck(2, 1.0))
        assert group.link.done == ["connect beside: it has not answered the last heartbeat", "stay"]
        group.loop.go(61)
        assert group.link.done[-1] == "give up: the lighthouse has not answered a heartbeat for 60 s"

    def test_a_group_that_drains_leaves_when_the_lighthouse_has_let_it_go(self, group: Group):
        group.open_session()
        group.driver.drain("the night")
        assert group.outcomes == []
        group.driver.end_session()
        assert group.outcomes == [events.GroupLeft("its session has ended")]


def test_a_wait_for_a_quorum_ends_by_a_grant_and_not_by_a_step_of_a_revoked_one(
    group: Group, caplog: pytest.LogCaptureFixture
):
    group.open_session()
    for rank in range(2):
        group.ask(rank)
    group.loop.go(6)
    group.hear(session.JoinAccepted(1, formed(1), True))
    assert caplog.messages[-2:] == ["there is a quorum, after 6 s", "received quorum 1 of 2 groups: step 0"]
    for outcome in [group.vote(rank) for rank in range(2)]:
        assert outcome.value == Decision(True)
    group.loop.go(60)  # the lease has run out
    caplog.clear()
    group.ask(0, 1)
    group.loop.go(7)
    group.hear(session.HeartbeatAck(group.driver.machine.session._heartbeats, 1.0))
    assert [line.partition(":")[0] for line in caplog.messages] == ["no quorum for 5 s", "there is a quorum, after 7 s"]
    group.ask(0, 1, commit_failures=1)
    caplog.clear()
    group.loop.go(6)
    group.ask(1, 1)  # the other one comes to the step only now, in which rank 0 has failed
    assert [line.partition(":")[0] for line in caplog.messages] == ["no quorum for 5 s"]
