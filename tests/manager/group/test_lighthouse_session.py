"""The manager's side of its session: what it says when, and when it gives the connection up."""

import pytest

from lighthouse_protocol.messages.session import (
    GroupReport,
    Heartbeat,
    HeartbeatAck,
    Hello,
    JoinAccepted,
    JoinRequest,
    Leave,
    QuorumChanged,
    ToLighthouse,
    Welcome,
    WithdrawRequest,
)
from lighthouse_protocol.rules.quorum_change import NamedQuorum, change_between
from manager.group.session import FIRST_LEASE_S, SessionMachine
from tests.manager.builders import member
from tests.manager.groups import formed, held

ME = member("a")


class Session(SessionMachine):
    """That is open. `levels`: what its group is like."""

    def __init__(self, now: float = 0.0, *, is_welcomed: bool = True) -> None:
        self.levels = GroupReport()
        super().__init__()
        assert self.open_session(ME, self.levels, now) == [Hello(ME, GroupReport()), Heartbeat(1, GroupReport())]
        if is_welcomed:
            self.handle_welcome(Welcome(1.0, 5.0), now)

    def tick(self, now: float) -> list[ToLighthouse]:
        return super().tick(self.levels, now)

    def echo(self, number: int, now: float, interval_s: float = 1.0) -> float | None:
        return self.handle_ack(HeartbeatAck(number, interval_s), now)


@pytest.fixture
def session() -> Session:
    return Session()


class TestBeats:
    def test_one_at_once_when_the_first_step_under_a_quorum_is_committed(self, session: Session):
        for quorum_id, began_with in ((1, 0), (2, 7)):
            session.levels = GroupReport(held("standing", began_with, quorum_id))
            assert session.tick(0.1) == []
            session.levels = GroupReport(held("standing", began_with + 1, quorum_id))
            assert session.tick(0.2) == [Heartbeat(quorum_id + 1, session.levels)]
            session.levels = GroupReport(held("standing", began_with + 2, quorum_id))
            assert session.tick(0.3) == [], "of the others with the next beat"

    def test_at_once_when_a_level_has_changed(self, session: Session):
        session.levels = GroupReport(held("recalled", 3))
        assert session.tick(0.1) == [Heartbeat(2, session.levels)]
        assert [session.tick(now) for now in (0.1, 1.09)] == [[], []], "the next interval begins with it"
        assert session.tick(1.1) == [Heartbeat(3, session.levels)]

    def test_one_per_interval_which_the_lighthouse_gives(self, session: Session):
        assert [session.tick(now) for now in (0.99, 1, 1)] == [[], [Heartbeat(2)], []]
        session.handle_welcome(Welcome(0.25, 5.0), 1)
        assert session.deadline() == 1.25
        assert session.tick(1.25) == [Heartbeat(3)]
        session.echo(3, 1.3, interval_s=2.0)
        assert [session.tick(now) for now in (1.5, 3.4, 3.5)] == [[Heartbeat(4)], [], [Heartbeat(5)]]

    def test_none_while_closed(self, session: Session):
        session.close_session()
        session.levels = GroupReport(drains=True)
        assert (session.tick(9), session.deadline(), session.is_given_up(100)) == ([], None, False)

    def test_the_deadline_is_the_next_beat_or_the_end_of_patience(self, session: Session):
        assert session.deadline() == 1
        session.tick(1)
        assert session.deadline() == 1.5, "one and a half intervals after the beat that has no answer"
        assert session.silence_change(1.5) is True
        for now in (2, 3, 4):
            session.tick(now)
            assert session.deadline() == now + 1
        session.echo(1, 4.2, interval_s=3.0)
        assert session.silence_change(4.2) is False
        session.tick(5)
        assert session.deadline() == 8
        session.tick(8)
        assert session.deadline() == 8.7, "one and a half of the new intervals after the echo"
        assert session.silence_change(8.7) is True
        assert session.deadline() == 9.2, "five seconds after the echo"


class TestEchoes:
    def test_says_once_when_the_echoed_beat_was_sent_and_outdates_the_older(self, session: Session):
        for now in (1, 2, 3):
            session.tick(now)
        assert [session.echo(number, 3.1) for number in (1, 1, 3, 2, 4, 77)] == [0, None, 2, None, 3, None]
        assert session._sent_at == {}

    def test_of_the_connection_before_is_none(self, session: Session):
        """A beat that was lost with its connection renewed nothing."""
        session.close_session()
        session.open_session(ME, session.levels, 2)
        assert [session.echo(number, 2.1) for number in (1, 2)] == [None, 2]

    def test_what_is_never_echoed_is_bounded_by_the_patience(self, session: Session):
        now = 0.0
        while not session.is_given_up(now):
            session.tick(now)
            session.silence_change(now)
            assert session.deadline() > now
            now = session.deadline()
        assert len(session._sent_at) <= 6


class TestSilence:
    def test_is_a_beat_without_an_answer_for_one_and_a_half_intervals(self, session: Session):
        session.echo(1, 0.1)
        assert session.silence_change(50) is None, "nothing was asked"
        session.tick(1)
        assert [session.silence_change(now) for now in (2.49, 2.5, 2.5)] == [None, True, None], "it is said once"
        session.handle_welcome(Welcome(0.25, 1.0), 3)
        assert [session.silence_change(now) for now in (3, 3.37, 3.375)] == [False, None, True]

    def test_ends_with_any_answer(self, session: Session):
        session.tick(1)
        session.tick(2)
        assert session.silence_change(2) is True
        session.echo(1, 2.1)
        assert session.silence_change(2.1) is False
        assert session.silence_change(3.59) is None, "the answer itself is a sign that the connection carries"
        assert session.silence_change(3.6) is True

    @pytest.mark.parametrize("lease_s", [1.0, 5.0, 40.0])
    def test_leaves_time_to_move_within_every_lease(self, session: Session, lease_s: float):
        """At the worst the way is gone just after an echo: 2.5 intervals, each a quarter of the lease at most."""
        interval_s = min(1.0, lease_s / 4)
        session.handle_welcome(Welcome(interval_s, lease_s), 0)
        session.echo(1, 0, interval_s)
        session.tick(interval_s)
        assert session._silent_at < 0.65 * lease_s

    def test_a_lighthouse_that_answers_on_no_connection_is_given_longer_each_time(self, session: Session):
        now = 10.0
        for patience_s in (1.5, 3, 6, 12):
            session.open_session(ME, session.levels, now)
            now += patience_s
            assert session._silent_at == now
            assert session.silence_change(now) is True
        session.handle_welcome(Welcome(1.0, 5.0), now)
        session.open_session(ME, session.levels, now)
        assert session._silent_at == now + 1.5


@pytest.mark.parametrize("lease_s", [5.0, 30.0])
def test_it_is_given_up_without_an_echo_for_a_whole_lease(session: Session, lease_s: float):
    session.handle_welcome(Welcome(1.0, lease_s), 1)
    session.echo(1, 2)
    assert [session.is_given_up(now) for now in (1.99 + lease_s, 2 + lease_s)] == [False, True]
    session.close_session()
    session.open_session(ME, session.levels, 100)
    assert not session.is_given_up(104), "a new one begins anew"


def test_it_is_given_up_also_without_a_welcome():
    session = Session(10, is_welcomed=False)
    assert [session.is_given_up(10 + FIRST_LEASE_S - early_s) for early_s in (0.01, 0)] == [False, True]


class TestJoins:
    def test_only_the_newest_is_answered_and_once(self, session: Session):
        assert session.join(ME, deadline_at=30, now=2) == [JoinRequest(1, ME, 28)]
        assert session.join(ME, 30, 3) == [JoinRequest(2, ME, 27)]
        assert [session.end_join(number) for number in (1, 2, 2)] == [False, True, False]
        assert session.withdraw() == session.open_session(ME, session.levels, 1)[2:] == []

    def test_is_asked_again_on_the_next_connection_and_has_some_time_left(self, session: Session):
        session.close_session()
        assert session.join(ME, 3, 0) == []
        [request] = session.open_session(ME, session.levels, 5)[2:]
        assert (request.number, request.time_left_s > 0) == (1, True)

    @pytest.mark.parametrize("is_away", [True, False])
    def test_taken_back(self, session: Session, is_away: bool):
        session.join(ME, 30, 0)
        if is_away:
            session.close_session()
        assert session.withdraw() == ([] if is_away else [WithdrawRequest(1)]), "said where somebody hears it"
        assert not session.end_join(1)
        assert session.withdraw() == session.open_session(ME, session.levels, 1)[2:] == []

    def test_a_leave_is_said_where_somebody_hears_it(self, session: Session):
        assert session.leave("done") == [Leave("done")]
        session.close_session()
        assert session.leave("done") == []


class TestQuorumsByWhatHasChanged:
    ONE, TWO, THREE = (NamedQuorum.of(formed(at, at, names)) for at, names in ((1, "ab"), (2, "bc"), (3, "ab")))

    def change(self, join: int, old: NamedQuorum, new: NamedQuorum) -> QuorumChanged:
        change = change_between(old.quorum, new)
        assert change is not None
        return QuorumChanged(join, change, True, "a secret")

    def test_a_join_names_the_quorum_that_it_was_told_last_in_whatever_way(self, session: Session):
        assert session.join(ME, 30, 0) == [JoinRequest(1, ME, 30)]
        accepted = JoinAccepted(1, self.ONE.quorum, True)
        assert session.full_answer(accepted) is accepted
        assert session.join(ME, 30, 0) == [JoinRequest(2, ME, 30, self.ONE.digest)]
        told = JoinAccepted(2, self.TWO.quorum, True, "a secret")
        assert session.full_answer(self.change(2, self.ONE, self.TWO)) == told
        assert session.join(ME, 30, 0) == [JoinRequest(3, ME, 30, self.TWO.digest)]
        session.close_session()
        assert session.open_session(ME, session.levels, 5)[2:] == [JoinRequest(3, ME, 25, self.TWO.digest)], (
            "on the next session, too"
        )

    def test_a_change_of_another_quorum_is_none_and_the_whole_is_asked_for(self, session: Session):
        session.join(ME, 30, 0)
        session.full_answer(JoinAccepted(1, self.ONE.quorum, True))
        session.join(ME, 30, 0)
        assert session.full_answer(self.change(2, self.TWO, self.THREE)) is None
        assert session.request_full(10) == [JoinRequest(3, ME, 20)]
        assert [session.is_waiting(number) for number in (2, 3)] == [False, True]

    def test_so_is_one_to_a_manager_that_holds_none(self, session: Session):
        session.join(ME, 30, 0)
        assert session.full_answer(self.change(1, self.ONE, self.TWO)) is None
        assert session.request_full(10) == [JoinRequest(2, ME, 20)]

    def test_for_no_join_nothing_is_asked(self, session: Session):
        assert session.request_full(0) == []
