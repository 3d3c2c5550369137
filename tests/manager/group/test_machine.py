"""One replica group's manager: events in, the whole list of what follows; time is a number."""

import pytest

from lighthouse_protocol.messages.membership import Participant, Quorum, World
from lighthouse_protocol.messages.session import (
    RESTARTING,
    STARTING,
    GroupReport,
    Heartbeat,
    Hello,
    JoinRejected,
    JoinRequest,
    Welcome,
    WithdrawRequest,
)
from lighthouse_protocol.refusals import LimitReached, Superseded, WrongState
from manager.group.rules.commit import Decided
from manager.group.rules.events import (
    CallEnded,
    DrainAsked,
    RanksStarted,
    Received,
    Sent,
    SessionClosed,
    SessionGivenUp,
    SessionOpened,
    WatchEnded,
    WatchOpened,
    WorldChanged,
)
from manager.group.rules.machine import GroupMachine
from manager.group.rules.status import say_missing
from tests.manager.builders import ask, member
from tests.manager.groups import (
    LEASE_UNTIL,
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
    next_of,
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


class TestStarting:
    def test_the_hello_says_who_it_is_and_that_its_ranks_have_not_come(self):
        me = Participant("a", address="a:1", group_world_size=2)
        m = GroupMachine(me, "life")
        levels = GroupReport(down=STARTING, missing=frozenset({0, 1}))
        hello = Hello(Participant("a", "life.0", address="a:1", group_world_size=2), levels)
        assert done(m, SessionOpened(), 0) == [Sent(hello), Sent(Heartbeat(1, levels))]

    def test_the_hello_names_no_state_that_it_has_been_told_to_leave(self):
        """It joined with step 9 and was told to heal to 5: what it comes with next is lower than what it had."""
        m = joined(1, 9)
        q = Quorum(1, (member("a", 4, tag_quorum_id=0), member("b", 5, tag_quorum_id=0)))
        m.handle(handed(1, q), 0)
        hello = next(e.message for e in m.handle(SessionOpened(), 1) if isinstance(e, Sent))
        assert isinstance(hello, Hello)
        assert hello.participant.step == 5

    def test_when_all_are_watched_it_is_up(self):
        m = unwatched()
        assert done(m, WatchOpened(1, 0, "w0"), 0) == []
        assert done(m, WatchOpened(2, 1, "w1"), 0) == [beat(2)]

    def test_it_says_which_ranks_are_missing(self):
        m = unwatched(size=8)
        assert say_missing(m.me, m.ranks.watches.missing) == "", "none has come"
        for rank in range(4):
            m.handle(WatchOpened(rank + 1, rank, f"w{rank}"), 0)
        assert say_missing(m.me, m.ranks.watches.missing) == "a has ranks 0-3 of 8; missing: 4-7"
        assert m.tick(1) == [beat(2, down=STARTING, missing=range(4, 8))]
        for rank in range(4, 8):
            m.handle(WatchOpened(rank + 1, rank, f"w{rank}"), 1)
        assert say_missing(m.me, m.ranks.watches.missing) == ""
        assert m.report == GroupReport()

    def test_ranks_that_its_supervisor_starts_again_are_said_to_start(self):
        m = watched()
        m.handle(RanksStarted(), 0)
        assert m.report == GroupReport()
        m.handle(WatchEnded(2), 1)
        assert m.report.down == "rank 1 has ended"
        assert done(m, RanksStarted(), 1) == [beat(4, down=RESTARTING, missing={1})]
        m.handle(WatchOpened(3, 1, "w1'"), 3)
        assert m.report == GroupReport()

    def test_half_of_its_ranks_never_join(self):
        """Also where each of them has asked, and another group's half would fill the count."""
        m = unwatched(size=8)
        for rank in range(4):
            assert said(m, ask(rank + 1, rank), 0) == []
        assert not m.ranks.gather.is_joined

    def test_the_world_is_passed_on_with_the_groups_own_size(self):
        m = unwatched(size=8)
        told_world = World(12, 2, ranks_pending=4, peers_pending=1, pending=("c",))
        assert done(m, told(told_world), 0) == [WorldChanged(World(12, 2, 4, 8, 1, ("c",)))]

    def test_the_group_joins_when_every_rank_has_asked(self):
        m = watched()
        assert said(m, ask(1, 1, 3, deadline_at=30, tag_quorum_id=9), 1) == []
        assert said(m, ask(2, 0, 3, deadline_at=20, tag_quorum_id=9), 2) == [
            request(m, 1, 18, step=3, tag_quorum_id=9, watched=True)
        ]

    def test_a_group_without_watches_joins_as_one_that_cannot_be_aborted(self):
        m = unwatched(size=1)
        join, said_up = done(m, ask(1, 0), 0)
        assert join == request(m, 1, 100)
        assert said_up == beat(2)

    def test_asked_while_the_lighthouse_is_away_it_joins_when_it_is_back(self):
        m = GroupMachine(Participant("a", address="a:1", store_address="a:2"), "L")
        assert done(m, ask(1, 0, deadline_at=30), 0) == []
        assert m.handle(SessionOpened(), 4)[2:] == [request(m, 1, 26)]


class TestWaitingFor:
    """What ranks that have asked for a quorum wait for."""

    def test_ranks_that_are_not_here_and_ranks_that_do_not_ask(self):
        m = unwatched(size=8)
        for rank in range(6):
            m.handle(WatchOpened(rank + 1, rank, f"w{rank}"), 0)
        m.handle(ask(1, 0), 0)
        m.handle(ask(2, 1), 0)
        gone, late = "ranks 6-7 of 8 of a, not here yet", "ranks 2-5 of 8 of a, here and not asking"
        assert m.status().waiting_for("") == f"{gone}; {late}"
        assert (
            m.status().waiting_for("nothing listens there") == f"{gone}; {late}; the lighthouse: nothing listens there"
        )

    def test_what_the_lighthouse_says_until_its_session_ends(self):
        m = joined()
        assert m.status().waiting_for("") == "the lighthouse to answer"
        m.handle(told(World(2, 1, waiting_for="2 more replica groups")), 1)
        assert m.status().waiting_for("") == "2 more replica groups"
        m.handle(SessionClosed(), 2)
        assert m.status().waiting_for("it is unreachable") == "the lighthouse: it is unreachable"
        assert m.status().waiting_for("") == "the lighthouse to answer"

    def test_the_lease(self):
        m = holding()
        committed(m, 0, LEASE_UNTIL)
        m.handle(ask(3, 0, 1, tag_quorum_id=1), LEASE_UNTIL)
        assert m.status().waiting_for("it is unreachable") == "the lighthouse: it is unreachable"


class TestQuorum:
    def test_its_ranks_are_answered_and_it_says_that_it_holds_it(self):
        m = joined(2)
        quorum = formed(1)
        answers = done(m, handed(1, quorum), 0.5)
        assert [(e.call, e.quorum, e.assignment.heals) for e in answers] == [(1, quorum, False), (2, quorum, False)]
        assert m.tick(1) == [beat(3, held("standing", 0))], "soon enough: no step costs the lighthouse a message"

    def test_one_that_does_not_stand_is_not_held(self):
        m = joined(2)
        assert len(done(m, handed(1, formed(1), stands=False), 0.5)) == 2
        assert m.held is None
        committed(m, 0, 1)
        m.handle(ask(10, 0, 1, deadline_at=30, tag_quorum_id=1), 1)
        join = done(m, ask(11, 1, 1, deadline_at=30, tag_quorum_id=1), 1)
        assert join == [request(m, 2, 29, step=1, tag_quorum_id=1, seen_quorum_id=1, watched=True)]

    def test_one_that_does_not_stand_takes_the_place_of_one_that_stood(self):
        m = joined(1)
        m.handle(handed(1, formed(1)), 0.5)
        m.handle(told(order("revoked", reason="b: gone")), 0.6)
        m.handle(ask(10, 0, commit_failures=1), 1)
        m.handle(handed(2, formed(2), stands=False), 1.5)
        assert m.held is None

    def test_an_answer_to_an_older_join_is_nothing(self):
        m = joined(1)
        assert said(m, ask(2, 0), 0.1) == [
            Sent(WithdrawRequest(1)),
            refused(1, Superseded, "rank 0"),
            request(m, 2, 99.9, watched=True, tag_quorum_id=None),
        ]
        assert done(m, handed(1, formed(1)), 0.2) == []
        assert steps_of(m.handle(handed(2, formed(1)), 0.3)) == [(2, 0, False)]

    def test_the_lighthouses_refusal_reaches_every_waiting_rank(self):
        m = joined(2)
        full = LimitReached("full")
        assert done(m, told(JoinRejected(1, full)), 0.5) == [
            refused(1, LimitReached, "full"),
            refused(2, LimitReached),
        ]
        assert done(m, told(JoinRejected(1, full)), 0.5) == []
        assert m.ranks.waiting == ()

    def test_also_that_of_the_hello(self):
        m = joined(2)
        effects = said(m, told(JoinRejected(0, LimitReached("full"))), 1)
        assert effects[1:] == [refused(1, LimitReached, "full"), refused(2, LimitReached, "full")]
        m.handle(SessionClosed(), 1)
        assert not any(isinstance(e.message, JoinRequest) for e in m.handle(SessionOpened(), 2))

    def test_a_join_is_asked_again_after_a_broken_connection(self):
        m = joined(1)
        m.handle(SessionClosed(), 1)
        hello, first_beat, again = done(m, SessionOpened(), 5)
        assert isinstance(hello.message, Hello)
        assert first_beat == beat(3)
        assert again == request(m, 1, 95, watched=True, tag_quorum_id=0)

    def test_a_call_that_ends_takes_the_join_back(self):
        m = joined(2)
        assert done(m, CallEnded(2), 0.5) == [Sent(WithdrawRequest(1))]
        assert done(m, CallEnded(2), 0.5) == []
        assert said(m, ask(3, 1, tag_quorum_id=0), 2) == [request(m, 2, 98, watched=True, tag_quorum_id=0)]

    def test_the_lease_counts_at_formation_too(self):
        """The answer was read late: meanwhile another quorum may have formed without this group."""
        m = joined(1)
        assert steps_of(m.handle(handed(1, formed(1, names="a")), 20)) == []
        assert m.ranks.waiting == (0,)
        assert steps_of(m.handle(echo(m.session._beats), 20.1)) == [(1, 0, False)]

    @pytest.mark.parametrize("what", [echo(5), told(order("revoked"))], ids=["the lease is valid", "it is revoked"])
    def test_one_that_waits_for_the_lease_is_not_for_a_later_request(self, what: Received):
        """Else a rank that has lost its state would be told that it is up to date."""
        m = joined(1)
        m.handle(handed(1, formed(1, names="a")), 20)
        m.handle(WatchEnded(1), 20.1)
        m.handle(WatchOpened(2, 0, "w0-again"), 20.2)
        m.handle(ask(2, 0, worker="w0-again"), 20.3)
        assert said(m, what, 20.4) == []
        assert m.ranks.waiting == (0,)
        assert steps_of(m.handle(handed(2, formed(2, names="a")), 20.5)) == ([(2, 0, False)] if what == echo(5) else [])

    def test_an_answer_to_an_older_join_does_not_take_its_place(self):
        m = joined(1)
        said(m, ask(2, 0), 0.1)
        assert steps_of(m.handle(handed(2, formed(2, names="a")), 20)) == []
        assert done(m, handed(1, formed(1, names="a")), 20.1) == []
        assert steps_of(m.handle(echo(m.session._beats), 20.2)) == [(2, 0, False)]

    def test_one_that_is_revoked_before_it_is_let_in_is_not_let_in(self):
        """g13: the order came while the quorum waited for the lease; its ranks ask again."""
        m = joined(1)
        assert steps_of(m.handle(handed(1, formed(1, names="a")), 20)) == []
        assert said(m, told(order("revoked", reason="b: gone")), 20.1) == [refused(1, WrongState, "revoked", "b: gone")]
        assert steps_of(m.handle(echo(m.session._beats), 20.2)) == []
        assert (m.ranks.waiting, m.held) == ((), None)

    def test_one_that_is_not_let_in_yet_ends_with_its_session(self):
        """g14: the next session asks again; what was handed on the last one may be over."""
        m = joined(1)
        m.handle(handed(1, formed(1, names="a")), 20)
        m.handle(SessionClosed(), 20.1)
        m.handle(SessionOpened(), 20.2)
        m.handle(told(Welcome(1.0, 5.0)), 20.2)
        assert steps_of(m.handle(echo(m.session._beats), 20.3)) == []
        assert m.ranks.waiting == (0,)
        assert steps_of(m.handle(handed(1, formed(2, names="a")), 20.4)) == [(1, 0, False)]


class TestGrants:
    def test_the_next_step_is_granted_by_itself(self):
        m = holding(2)
        committed(m, 0, 0.5)
        first_commit = beat(3, held("standing", 1))
        assert done(m, ask(10, 1, 1), 0.5) == [granted(10, 1, contributors=2, heal_from_rank=None), first_commit]
        assert done(m, ask(11, 0, 1), 0.5) == [granted(11, 1)]

    def test_when_the_lease_has_run_out_ranks_wait_for_the_echo(self):
        m = holding(2)
        committed(m, 0, 1)
        m.tick(1)
        assert said(m, ask(10, 0, 1), LEASE_UNTIL) == []
        assert said(m, ask(11, 1, 1), LEASE_UNTIL) == []
        assert m.ranks.waiting == (0, 1)
        assert said(m, echo(2), 4.5) == [], "sent at 0: it renews nothing"
        assert said(m, echo(3), 4.6) == [granted(10, 1), granted(11, 1)]

    def test_the_lease_is_counted_from_when_the_beat_was_sent(self):
        m = holding(1)
        m.tick(1)
        m.handle(echo(3), 3)
        assert m.ranks.grants.lease_until == 5

    def test_an_echo_that_says_revoked_lets_nobody_on_and_counts_for_the_next_quorum(self):
        m = holding(1)
        committed(m, 0, 0.5)
        m.tick(1)
        m.handle(echo(3, order("revoked")), 1.1)
        assert done(m, ask(10, 0, 1), 1.2) == [request(m, 2, 98.8, step=1, seen_quorum_id=1, watched=True)]
        assert steps_of(m.handle(handed(2, formed(2, 1)), 4.9)) == [(10, 1, False)]

    def test_a_rank_that_asks_again_while_it_waits_supersedes_itself(self):
        m = holding(1)
        m.handle(told(order("recalled")), 0.1)
        committed(m, 0, 0.2)
        assert said(m, ask(10, 0, 1), 0.3) == []
        assert said(m, ask(11, 0, 1), 0.4) == [refused(10, Superseded, "rank 0")]
        assert said(m, CallEnded(11), 0.5) == []
        assert m.ranks.waiting == ()
        assert said(m, told(order("resumed", upto=5)), 0.6) == []

    def test_an_odd_request_ends_the_quorum_for_all_ranks(self):
        m = holding(2)
        assert revoked("", 1, 2).watches == said(m, ask(10, 1, 5), 1)[0].watches


class TestNextWithTheVote:
    def test_a_decision_carries_the_grant_where_all_ranks_want_it(self):
        m = holding(2)
        assert done(m, vote(10, 0, 0, wants=True), 0.5) == []
        effects = said(m, vote(11, 1, 0, wants=True), 0.5)
        assert [(e.call, e.commit, e.next.max_step) for e in effects] == [(10, True, 1), (11, True, 1)]
        assert done(m, ask(12, 0, 1), 0.5) == [granted(12, 1)], "and who did not get it may ask"

    def test_and_the_next_decision_the_next(self):
        m = holding(1)
        for step in range(5):
            assert [n.max_step for n in next_of(said(m, vote(10 + step, 0, step, wants=True), 1))] == [step + 1]

    @pytest.mark.parametrize("wants", [(True, False), (False, True), (False, False)])
    def test_and_not_where_one_does_not(self, wants: tuple[bool, bool]):
        m = holding(2)
        m.handle(vote(10, 0, 0, wants=wants[0]), 1)
        assert said(m, vote(11, 1, 0, wants=wants[1]), 1) == [Decided(10, True), Decided(11, True)]
        assert m.held == held("standing", 0)

    @pytest.mark.parametrize("why", ["lease", "recalled", "draining", "no quorum"])
    def test_nor_where_it_may_not_grant(self, why: str):
        m = holding(1)
        if why == "recalled":
            m.handle(told(order("recalled")), 0.5)
        if why == "draining":
            m.handle(DrainAsked("x"), 0.5)
        if why == "no quorum":
            m = joined(1)
            m.handle(handed(1, formed(1), stands=False), 0)
        now = LEASE_UNTIL if why == "lease" else 1
        assert said(m, vote(10, 0, 0, wants=True), now) == [Decided(10, True)]

    def test_under_a_resume_up_to_its_last_step(self):
        m = holding(1)
        m.handle(told(order("resumed", upto=1)), 0.5)
        assert [n.max_step for n in next_of(said(m, vote(10, 0, 0, wants=True), 1))] == [1]
        assert said(m, vote(11, 0, 1, wants=True), 1) == [Decided(11, True)]

    def test_who_wanted_it_for_an_earlier_step_has_not_said_so_for_this(self):
        m = holding(2)
        for rank in (0, 1):
            m.handle(vote(10 + rank, rank, 0, wants=True), 1)
        m.handle(vote(12, 0, 1, wants=True), 1)
        assert next_of(said(m, vote(13, 1, 1, wants=False), 1)) == [None, None]


class TestSession:
    def test_beats_are_due_at_its_deadline(self):
        m = unwatched()
        assert m.deadline() == 1
        assert m.tick(1) == [Sent(Heartbeat(2, GroupReport(down=STARTING, missing=frozenset({0, 1}))))]
        assert m.deadline() == 2

    def test_without_an_echo_it_is_given_up_once(self):
        m = unwatched()
        for now in (1, 2, 3, 4):
            m.tick(now)
        assert m.tick(5) == [SessionGivenUp("the lighthouse has answered no heartbeat for 5 s")]
        assert m.deadline() is None

    def test_the_quorum_is_held_through_it(self):
        m = holding(1)
        m.handle(SessionClosed(), 1)
        committed(m, 0, 2)
        assert done(m, ask(10, 0, 1), 3) == [granted(10, 1)]
        committed(m, 1, 3, first_call=60)
        assert done(m, ask(11, 0, 2), LEASE_UNTIL) == []
        hello, *_ = done(m, SessionOpened(), 5)
        assert hello.message.levels.held == held("standing", 1)
