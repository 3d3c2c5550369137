"""How a manager's quorum ends: recalled, revoked, a rank lost, the manager restarted, the group drained."""

import pytest

from lighthouse_protocol.messages.membership import Quorum
from lighthouse_protocol.messages.session import (
    LEFT,
    DrainRequest,
    Goodbye,
    JoinRejected,
    KillRequest,
    Leave,
    RankGone,
    Released,
    Revoked,
    Welcome,
    WithdrawRequest,
)
from lighthouse_protocol.refusals import Drained, InternalError, InvalidRequest, Superseded, Unrecoverable, WrongState
from manager.group.rules.commit import Decided, Voted
from manager.group.rules.events import (
    CallEnded,
    CallRefused,
    DrainAsked,
    Event,
    GroupGivenUp,
    HasLeft,
    Killed,
    Pushed,
    RankFailed,
    RankGivenUp,
    RankLeaves,
    Sent,
    SessionClosed,
    SessionOpened,
    WatchEnded,
    WatchOpened,
)
from manager.group.rules.machine import GroupMachine
from tests.manager.builders import ask, member
from tests.manager.groups import (
    beat,
    committed,
    done,
    echo,
    formed,
    granted,
    handed,
    held,
    holding,
    joined,
    order,
    refused,
    request,
    revoked,
    said,
    steps_of,
    told,
    unwatched,
    vote,
    watched,
)


class TestRecall:
    def test_from_the_recall_to_the_join(self):
        m = holding(2)
        committed(m, 0, 0.1)
        m.handle(ask(10, 0, 1), 0.2)
        m.handle(ask(11, 1, 1), 0.2)
        assert done(m, told(order("recalled")), 0.3) == [beat(4, held("frozen", 1))]
        committed(m, 1, 0.4)
        assert done(m, ask(12, 0, 2), 0.5) == []
        assert done(m, told(order("resumed", upto=2)), 0.6) == [granted(12, 2)]
        assert done(m, ask(13, 1, 2), 0.6) == [granted(13, 2)]
        committed(m, 2, 0.7)
        assert done(m, ask(14, 0, 3), 0.8) == []
        assert done(m, ask(15, 1, 3), 0.8) == [request(m, 2, 99.2, step=3, seen_quorum_id=1, watched=True)]
        assert m.held == held("joining", 2)

    def test_one_that_has_reached_the_last_step_joins_at_the_resume(self):
        m = holding(1)
        m.handle(told(order("recalled")), 0.1)
        committed(m, 0, 0.2)
        m.handle(ask(10, 0, 1), 0.3)
        assert said(m, told(order("resumed", upto=0)), 0.4) == [
            request(m, 2, 99.6, step=1, seen_quorum_id=1, watched=True)
        ]

    def test_an_echo_says_it_as_well_as_an_order(self):
        m = holding(1)
        assert done(m, echo(2, order("recalled")), 0.1) == [beat(3, held("frozen", 0))]
        m.handle(SessionClosed(), 1)
        m.handle(SessionOpened(), 2)
        m.handle(told(Welcome(1.0, 5.0, order("resumed", upto=3))), 2)
        assert m.held == held("resumed", 0)


class TestRevoke:
    def test_is_pushed_to_the_ranks_and_those_that_wait_join(self):
        m = holding(2)
        m.handle(told(order("recalled")), 0.1)
        committed(m, 0, 0.2)
        m.handle(ask(10, 0, 1), 0.3)
        m.handle(ask(11, 1, 1), 0.3)
        assert done(m, told(order("revoked", reason="b: gone")), 0.4) == [
            revoked("b: gone", 1, 2),
            request(m, 2, 99.6, step=1, seen_quorum_id=1, watched=True),
            beat(4, held("revoked", 0)),
        ]
        assert done(m, told(order("revoked")), 0.5) == []

    def test_a_rank_late_for_the_running_step_is_told_so_with_it(self):
        m = holding(2)
        committed(m, 0, 0.1)
        m.handle(ask(10, 0, 1), 0.2)
        m.handle(told(order("revoked")), 0.3)
        assert said(m, ask(11, 1, 1), 0.4) == [granted(11, 1, revoked=True)]

    def test_a_completed_step_still_commits(self):
        m = holding(2)
        m.handle(vote(10, 0, 0), 0.1)
        m.handle(told(order("revoked")), 0.2)
        assert said(m, vote(11, 1, 0), 0.3) == [Decided(10, True), Decided(11, True)]

    def test_a_discard_ends_the_quorum_and_the_lighthouse_is_told_at_once(self):
        m = holding(2)
        m.handle(vote(10, 0, 0), 0.1)
        assert done(m, vote(11, 1, 0, yes=False), 0.2) == [
            revoked("a step was discarded", 1, 2),
            Decided(10, False),
            Decided(11, False),
            beat(3, held("revoked", 0)),
        ]
        assert said(m, vote(12, 0, 0), 0.3) == [Decided(12, False)]

    def test_of_another_quorum_it_ends_nothing(self):
        m = holding(1)
        assert said(m, vote(10, 0, 9, yes=False, quorum_id=7), 0.1) == [refused(10, WrongState, "7", "1")]
        assert m.held == held("standing", 0)

    def test_votes_out_of_range_are_refused(self):
        m = holding(2)
        assert said(m, Voted(10, 2, 0, True, 1), 0.1) == [refused(10, InvalidRequest, "rank")]


class TestToldTooLate:
    """a, of two ranks, holds step 3; quorum 1 was formed for step 5, and its ranks have begun to compute."""

    Q = Quorum(
        1, (member("a", 3, tag_quorum_id=0, heals_first=False), member("b", 5, tag_quorum_id=4, heals_first=False))
    )

    def late(self) -> GroupMachine:
        m = joined(2, 3, heals_first=False)
        m.handle(handed(1, self.Q), 0)
        assert m.held == held("resumed", 5)
        return m

    def test_its_no_ends_no_peer_s_step_and_the_lighthouse_hears_of_no_failure(self):
        m = self.late()
        assert said(m, vote(10, 1, 5, yes=False), 0.1) == [Decided(10, False)]
        assert said(m, ask(11, 1, 3, tag_quorum_id=0, commit_failures=1, heals_first=True), 0.2) == []
        assert m.held == held("resumed", 5)
        assert said(m, vote(12, 0, 5, yes=False), 0.3) == [Decided(12, False)]
        assert said(m, ask(13, 0, 3, tag_quorum_id=0, commit_failures=1, heals_first=True), 0.4) == [
            request(m, 2, 99.6, step=3, tag_quorum_id=0, works_at=6, seen_quorum_id=1, watched=True, heals_first=True)
        ]
        assert m.held == held("joining", 5)

    def test_where_it_drains_it_stays_to_the_end_of_that_step(self):
        m = self.late()
        m.handle(DrainAsked("enough"), 0.1)
        m.handle(vote(10, 1, 5, yes=False), 0.1)
        assert said(m, ask(11, 1, 3, tag_quorum_id=0, commit_failures=1), 0.2) == []
        assert said(m, vote(12, 0, 5, yes=False), 0.3) == [
            Decided(12, False),
            refused(11, Drained, "enough"),
            Sent(Leave("enough")),
        ]

    def test_a_rank_of_it_that_is_lost_ends_the_quorum(self):
        m = self.late()
        m.handle(vote(10, 1, 5, yes=False), 0.1)
        m.handle(WatchEnded(1), 0.2)
        assert m.held == held("revoked", 5)


class TestLostRank:
    def test_takes_the_group_down_in_the_same_moment(self):
        m = holding(2)
        assert done(m, WatchEnded(2), 0.1) == [
            revoked("rank 1 has ended", 1),
            beat(3, held("revoked", 0), down="rank 1 has ended", missing={1}),
        ]

    def test_the_end_of_its_old_watch_is_nothing(self):
        m = holding(2)
        assert said(m, WatchOpened(3, 1, "w1"), 0.1) == []
        assert said(m, WatchEnded(2), 0.2) == []
        assert m.held == held("standing", 0)

    def test_another_process_of_it_is_a_loss_too(self):
        m = holding(2)
        assert said(m, WatchOpened(3, 1, "w1-again"), 0.1) == [revoked("rank 1 has restarted", 1, 2, 3)]
        assert m.ranks.down == ""

    def test_its_waiting_request_goes_with_it(self):
        """Else it would stand for a rank that is not there."""
        m = holding(2)
        committed(m, 0, 0.1)
        m.handle(told(order("recalled")), 0.2)
        m.handle(ask(10, 1, 1), 0.3)
        m.handle(ask(11, 0, 1), 0.3)
        assert done(m, WatchEnded(2), 0.4) == [
            refused(10, WrongState, "rank 1"),
            revoked("rank 1 has ended", 1),
            beat(4, held("revoked", 0), down="rank 1 has ended", missing={1}),
        ]
        assert m.ranks.gather.waiting == (0,)

    def test_its_join_too(self):
        m = joined(2)
        assert done(m, WatchEnded(2), 0.1) == [
            Sent(WithdrawRequest(1)),
            refused(2, WrongState, "rank 1"),
            beat(3, down="rank 1 has ended", missing={1}),
        ]
        assert said(m, ask(3, 0), 0.2) == [refused(1, Superseded)]

    def test_back_again_it_joins_as_another_incarnation(self):
        m = holding(2)
        m.handle(WatchEnded(2), 0.1)
        assert done(m, WatchOpened(3, 1, "w1-again"), 0.2) == [beat(4, held("revoked", 0))]
        m.handle(ask(10, 1, 7, worker="w1-again"), 0.3)
        [join] = said(m, ask(11, 0, 1, commit_failures=1), 0.3)
        fields = {"step": 1, "ranks_disagree": True, "commit_failures": 1, "incarnation": "L.1", "seen_quorum_id": 1}
        assert join == request(m, 2, 99.7, watched=True, **fields)

    def test_one_that_has_not_voted_has_voted_no(self):
        """The others are bound by their yes, and wait for the decision."""
        m = holding(2)
        m.handle(vote(10, 0, 0), 0.1)
        assert Decided(10, False) in m.handle(WatchEnded(2), 0.2)

    def test_one_that_has_voted_yes_is_counted(self):
        m = holding(2)
        m.handle(vote(10, 1, 0), 0.1)
        m.handle(CallEnded(10), 0.1)
        assert Decided(11, True) not in m.handle(WatchEnded(2), 0.2)
        assert Decided(11, True) in m.handle(vote(11, 0, 0), 0.3)


class TestSentAway:
    """It has no place beside the others: its quorum is over, and its ranks hear why."""

    def test_its_ranks_are_told_and_ask_again(self):
        m = holding(2)
        why = WrongState("address: a advertises a loopback (127.0.0.1:1) beside b")
        assert said(m, told(JoinRejected(0, why)), 0.1) == [revoked(str(why), 1, 2)]
        assert m.held == held("revoked", 0)
        m.handle(SessionClosed(), 0.1)
        for rank in range(2):
            m.handle(ask(10 + rank, rank, 0, tag_quorum_id=0, commit_failures=1), 0.2)
        assert m.ranks.gather.is_joined
        assert said(m, told(JoinRejected(0, why)), 0.3) == [
            refused(10, WrongState, "beside b"),
            refused(11, WrongState),
        ]

    def test_what_may_pass_ends_nothing(self):
        m = holding(2)
        assert said(m, told(JoinRejected(0, InternalError("a defect"))), 0.1) == []
        assert m.held == held("standing", 0)


class TestRestartedManager:
    """Its ranks repeat their votes: nobody else knows what was decided."""

    def test_all_repeat_their_yes(self):
        m = watched(2)
        assert said(m, vote(1, 0, 5, quorum_id=3), 0) == []
        assert said(m, vote(2, 1, 5, quorum_id=3), 0) == [Decided(1, True), Decided(2, True)]

    @pytest.mark.parametrize("is_first", [True, False])
    def test_one_holds_the_next_step_of_that_quorum(self, is_first: bool):
        m = watched(2)
        events = [vote(1, 1, 5, quorum_id=3), ask(2, 0, 6, tag_quorum_id=3)]
        effects = [effect for event in (events if is_first else events[::-1]) for effect in said(m, event, 0)]
        assert Decided(1, True) in effects

    @pytest.mark.parametrize("is_first", [True, False])
    def test_one_has_discarded(self, is_first: bool):
        m = watched(2)
        events = [vote(1, 1, 5, quorum_id=3), ask(2, 0, 5, tag_quorum_id=2, commit_failures=1)]
        effects = [effect for event in (events if is_first else events[::-1]) for effect in said(m, event, 0)]
        assert Decided(1, False) in effects


class TestScriptEnds:
    """Ranks close their Agents in good order."""

    def ended(self, size: int = 2) -> GroupMachine:
        """All ranks have committed step 0, and were granted the next one with that."""
        m = holding(size)
        for rank in range(size):
            m.handle(vote(50 + rank, rank, 0, wants=True), 0.1)
        assert m.held == held("standing", 1)
        return m

    def test_they_stay_until_the_quorum_is_over(self):
        m = self.ended()
        assert done(m, RankLeaves(1, 1), 0.2) == [beat(4, held("leaving", 0), down=LEFT)]
        assert done(m, RankLeaves(2, 1), 0.2) == []
        assert done(m, told(order("recalled")), 0.3) == []
        assert done(m, told(order("resumed", upto=0)), 0.4) == []
        released = said(m, told(order("revoked", reason="all have done step 0")), 0.5)
        assert released == [Pushed(Revoked(1, "all have done step 0"), ()), Pushed(Released(), (1, 2))]

    def test_one_that_stays_behind_is_told_that_the_quorum_is_over(self):
        m = self.ended()
        m.handle(RankLeaves(1, 1), 0.2)
        over = said(m, told(order("revoked", reason="x")), 0.5)
        assert over == [revoked("x", 2), Pushed(Released(), (1,))]
        assert said(m, RankLeaves(2, None), 0.6) == [Pushed(Released(), (2,))]

    def test_in_the_middle_of_a_step_nobody_waits_for_anything(self):
        m = self.ended(1)
        assert done(m, RankLeaves(1, None), 0.2) == [Pushed(Released(), (1,))]
        assert said(m, WatchEnded(1), 0.3) == [revoked("rank 0 has ended")]

    def test_without_a_quorum_neither(self):
        m = watched(1)
        assert said(m, RankLeaves(1, 0), 0.2) == [Pushed(Released(), (1,))]

    def test_an_older_process_of_a_rank_says_nothing_of_the_present_one(self):
        m = self.ended(1)
        m.handle(WatchOpened(7, 0, "another"), 0.2)
        m.handle(ask(9, 0, 0), 0.3)
        m.handle(handed(2, formed(2, 0)), 0.4)
        m.handle(vote(60, 0, 0, quorum_id=2), 0.5)
        assert said(m, RankLeaves(1, 1), 0.6) == [Pushed(Released(), (1,))]
        assert m.held == held("standing", 0, quorum_id=2)

    def test_its_end_is_no_loss(self):
        m = self.ended(1)
        m.handle(RankLeaves(1, 1), 0.2)
        assert said(m, WatchEnded(1), 0.3) == []
        assert m.held == held("leaving", 0)

    def test_started_again_it_joins(self):
        m = self.ended(1)
        m.handle(RankLeaves(1, 1), 0.2)
        m.handle(WatchEnded(1), 0.3)
        m.handle(WatchOpened(2, 0, "another"), 0.4)
        [join] = said(m, ask(9, 0, 0), 0.5)
        assert isinstance(join, Sent)
        m.handle(handed(2, formed(2, 0)), 0.6)
        assert m.held == held("standing", 0, quorum_id=2)

    def test_while_it_drains_it_leaves_with_its_last_rank(self):
        """They ask for nothing more."""
        m = self.ended(1)
        m.handle(DrainAsked("x"), 0.1)
        m.handle(RankLeaves(1, 1), 0.2)
        assert said(m, WatchEnded(1), 0.3) == [Sent(Leave("x"))]


class TestLeaving:
    def test_it_does_the_steps_that_it_has_promised_and_leaves_where_it_would_join(self):
        m = holding(2)
        assert done(m, DrainAsked("maintenance"), 0.1) == [beat(3, held("standing", 0), drains=True)]
        committed(m, 0, 0.2)
        assert said(m, ask(10, 0, 1), 0.3) == [granted(10, 1)]
        assert said(m, ask(11, 1, 1), 0.3) == [granted(11, 1)]
        m.handle(told(order("recalled")), 0.4)
        m.handle(told(order("resumed", upto=1)), 0.5)
        committed(m, 1, 0.6)
        words = ("a leaves", "maintenance")
        assert said(m, ask(12, 0, 2), 0.7) == [refused(12, Drained, *words), Sent(Leave("maintenance"))]
        assert said(m, ask(13, 1, 2), 0.8) == [refused(13, Drained, *words)]
        assert done(m, told(Goodbye("the group has left")), 0.9) == [HasLeft("the group has left")]

    @pytest.mark.parametrize("last", [ask(13, 1, 1), WatchEnded(2)])
    def test_it_stays_until_its_slowest_rank_knows(self, last: Event):
        """Who asks a manager that has gone takes it for dead."""
        m = holding(2)
        m.handle(DrainAsked("x"), 0.1)
        m.handle(told(order("recalled")), 0.4)
        m.handle(told(order("resumed", upto=0)), 0.5)
        committed(m, 0, 0.6)
        m.handle(ask(12, 0, 1), 0.7)
        assert done(m, told(Goodbye("the group has left")), 0.8) == []
        assert done(m, last, 0.9)[-1] == HasLeft("the group has left")

    def test_the_lighthouse_may_ask_for_it_and_the_first_reason_stays(self):
        m = holding(1)
        assert done(m, told(DrainRequest("x")), 0.1) == [beat(3, held("standing", 0), drains=True)]
        assert done(m, told(DrainRequest("y")), 0.1) == []
        m.handle(told(order("revoked")), 0.2)
        assert refused(9, Drained, "x") in m.handle(ask(9, 0, 0, commit_failures=1), 0.3)

    def test_while_its_join_waits_the_lighthouse_says_which_was_first(self):
        m = joined(2)
        assert done(m, DrainAsked("x"), 0.5) == [beat(3, drains=True)]
        assert done(m, told(JoinRejected(1, Drained("a drains"))), 0.6) == [
            refused(1, Drained, "a drains"),
            refused(2, Drained, "a drains"),
            Sent(Leave("x")),
        ]

    def test_where_the_quorum_was_first_it_is_a_member(self):
        m = joined(2)
        m.handle(DrainAsked("x"), 0.5)
        assert steps_of(m.handle(handed(1, formed(1)), 0.6)) == [(1, 0, False), (2, 0, False)]
        committed(m, 0, 0.7)
        assert said(m, ask(10, 0, 1), 0.8) == [granted(10, 1)]

    def test_ranks_that_gather_are_told_at_once(self):
        m = watched(2)
        m.handle(ask(1, 0), 0.5)
        assert done(m, DrainAsked("x"), 1) == [refused(1, Drained, "x"), Sent(Leave("x"))]

    def test_a_group_that_no_rank_has_come_to_leaves_at_once(self):
        assert unwatched().handle(DrainAsked("x"), 1) == [Sent(Leave("x"))]

    def test_ranks_without_watches_end_their_step_first(self):
        m = unwatched(size=1)
        m.handle(ask(1, 0), 0)
        m.handle(handed(1, formed(1), stands=False), 0)
        assert said(m, DrainAsked("x"), 0.1) == []
        assert said(m, vote(2, 0, 0), 0.2) == [Decided(2, True)]
        assert said(m, ask(3, 0, 1), 0.3) == [refused(3, Drained, "x"), Sent(Leave("x"))]

    def test_while_the_lighthouse_is_away_nobody_is_waited_for(self):
        m = joined(1)
        m.handle(SessionClosed(), 1)
        assert done(m, DrainAsked("x"), 2)[-1] == HasLeft("it had no session to say so on")

    def test_nor_where_it_goes_after_the_leave(self):
        m = unwatched()
        m.handle(DrainAsked("x"), 1)
        [effect] = m.handle(SessionClosed(), 2)
        assert isinstance(effect, HasLeft)

    def test_after_the_leave_it_is_silent(self):
        m = unwatched()
        m.handle(DrainAsked("x"), 1)
        assert m.tick(2) == []
        assert done(m, WatchOpened(1, 0, "w0"), 3) == []

    def test_a_goodbye_without_a_leave_is_a_closed_session(self):
        assert holding(1).handle(told(Goodbye("it stops")), 0.5) == []

    def test_a_kill_ends_it(self):
        assert said(holding(1), told(KillRequest("x")), 0.5) == [Killed("x")]


class TestARankThatEndsItsGroup:
    def test_its_mates_are_told_at_once_and_what_they_ask_for_is_void(self):
        m = holding(3)
        m.handle(SessionClosed(), 1.0)
        m.handle(ask(77, 2, 0, commit_failures=1), 1.0)
        effects = done(m, RankFailed(1, "w1", "another script", ends_group=True), 2.0)
        assert Pushed(RankGone(1, "another script"), (1, 3)) in effects
        [refusal] = [e for e in effects if isinstance(e, CallRefused)]
        assert (refusal.call, str(refusal.error)) == (77, "another script")
        assert not [e for e in effects if isinstance(e, RankGivenUp)], "its launcher sees it end"
        assert effects[-1] == GroupGivenUp("another script"), "and is told that a restart does not mend it"
        assert done(m, RankFailed(1, "w1", "again", ends_group=True), 2.1) == []

    def test_one_that_only_fails_leaves_them_alone(self):
        m = holding(3)
        effects = done(m, RankFailed(1, "w1", "an exception"), 2.0)
        assert not [e for e in effects if isinstance(e, GroupGivenUp)]
        assert not [e for e in effects if isinstance(e, Pushed) and isinstance(e.message, RankGone)]


class TestARankThatIsNotBack:
    def test_its_mates_are_told_and_what_they_ask_for_is_void(self):
        m = holding(3)
        m.handle(SessionClosed(), 1.0)
        m.handle(WatchEnded(2), 50.0)
        m.handle(ask(77, 2, 0, commit_failures=1), 51.0)
        m.handle(WatchEnded(1), 51.5)
        m.handle(WatchOpened(9, 0, "w0-again"), 52.0)
        m.handle(ask(78, 0, 0, worker="w0-again", commit_failures=1), 52.0)
        assert m.deadline() == 60.0
        reason = "rank 1 has ended, and is not back"
        told, refusal, given_up = (e for e in m.tick(60.0) if not isinstance(e, Sent))
        assert told == Pushed(RankGone(1, reason), (3,)), "who is new knows nothing of it"
        assert (refusal.call, str(refusal.error)) == (77, reason)
        assert given_up == RankGivenUp(1, reason, 50.0, has_left=False)
        assert m.ranks.waiting == (0,)

    def test_one_that_is_back_in_time_disturbs_nobody(self):
        m = holding()
        m.handle(SessionClosed(), 0.5)
        m.handle(WatchEnded(2), 1.0)
        m.handle(WatchOpened(3, 1, "w1"), 10.9)
        assert not [e for e in m.tick(11.0) if not isinstance(e, Sent)]

    def test_one_that_has_left_is_told_apart(self):
        m = holding()
        m.handle(SessionClosed(), 0.5)
        m.handle(RankLeaves(2), 1.0)
        m.handle(WatchEnded(2), 1.0)
        [given_up] = [e for e in m.tick(11.0) if isinstance(e, RankGivenUp)]
        assert given_up.has_left


class TestVotesOfAnEarlierManager:
    """This one has started since: whether the mate was told to commit is not known."""

    def test_a_mate_that_leaves_for_good_decides_nothing_and_the_bound_rank_ends(self):
        m = watched(2)
        m.handle(vote(50, 0, 5), 0.5)
        m.handle(RankLeaves(2), 1.0)
        assert not any(isinstance(effect, Decided | CallRefused) for effect in said(m, WatchEnded(2), 1.0))
        assert not any(isinstance(effect, CallRefused) for effect in m.tick(10.9))
        refusals = [effect for effect in m.tick(11.0) if isinstance(effect, CallRefused)]
        assert refusals == [refused(50, Unrecoverable, "step 5 of quorum 1", "has started since", "rank 1 has ended")]

    def test_so_does_one_that_repeats_its_yes_after_that(self):
        m = watched(2)
        m.handle(WatchEnded(2), 1.0)
        m.tick(11.0)
        assert said(m, vote(50, 0, 5), 12.0) == [refused(50, Unrecoverable, "rank 1 has ended")]

    def test_a_mate_that_is_back_in_time_speaks_for_itself(self):
        m = watched(2)
        m.handle(vote(50, 0, 5), 0.5)
        m.handle(WatchEnded(2), 1.0)
        m.handle(WatchOpened(3, 1, "w1.1"), 2.0)
        assert Decided(50, True) in m.handle(ask(60, 1, 6, tag_quorum_id=1, worker="w1.1"), 3.0)
