"""The manager's side of its session: what it says when, and when it gives the connection up."""

from dataclasses import replace

import pytest

from lighthouse_protocol.messages.session import (
    GroupReport,
    Heartbeat,
    HeartbeatAck,
    HeldQuorum,
    Hello,
    HoldState,
    JoinRequest,
    Leave,
    Welcome,
    WithdrawRequest,
)
from manager.group.rules.lighthouse_session import FIRST_LEASE_S, SessionMachine
from tests.manager.builders import member

ME = member("a")


class Fixture:
    def __init__(self) -> None:
        self.levels = GroupReport()
        self.session = SessionMachine(lambda: self.levels)


@pytest.fixture
def made() -> Fixture:
    return Fixture()


def opened(now: float = 0.0) -> Fixture:
    made = Fixture()
    assert made.session.opened(ME, now) == [
        Hello(ME, GroupReport()),
        Heartbeat(1, GroupReport()),
    ]
    made.session.welcomed(Welcome(1.0, 5.0), now)
    return made


class TestBeats:
    def test_the_hello_comes_first_then_a_beat(self, made: Fixture):
        made.levels = GroupReport(drains=True, down="x")
        assert made.session.opened(ME, 0) == [
            Hello(ME, made.levels),
            Heartbeat(1, made.levels),
        ]
        assert made.session.is_open

    def test_one_at_once_when_the_first_step_under_a_quorum_is_committed(self):
        m = opened()
        for quorum_id, began_with in ((1, 0), (2, 7)):
            m.levels = GroupReport(HeldQuorum(quorum_id, HoldState.STANDING, began_with))
            assert m.session.tick(0.1) == []
            m.levels = GroupReport(HeldQuorum(quorum_id, HoldState.STANDING, began_with + 1))
            assert m.session.tick(0.2) == [Heartbeat(quorum_id + 1, m.levels)]
            m.levels = GroupReport(HeldQuorum(quorum_id, HoldState.STANDING, began_with + 2))
            assert m.session.tick(0.3) == [], "of the others with the next beat"

    def test_one_per_interval(self):
        m = opened().session
        assert m.tick(0.99) == []
        assert m.tick(1) == [Heartbeat(2)]
        assert m.tick(1) == []
        assert m.tick(1.99) == []
        assert m.tick(2) == [Heartbeat(3)]

    def test_at_once_when_a_level_has_changed(self):
        made = opened()
        made.levels = GroupReport(held=HeldQuorum(1, HoldState.RECALLED, 3))
        assert made.session.tick(0.1) == [Heartbeat(2, made.levels)]
        assert made.session.tick(0.1) == []
        assert made.session.tick(1.09) == [], "the next interval begins with it"
        assert made.session.tick(1.1) == [Heartbeat(3, made.levels)]

    def test_the_lighthouse_says_how_often(self):
        m = opened().session
        m.welcomed(Welcome(0.25, 5.0), 0)
        assert m.deadline() == 0.25
        assert m.tick(0.25) == [Heartbeat(2)]
        m.acknowledged(HeartbeatAck(2, 2.0), 0.3)
        assert m.tick(0.5) == [Heartbeat(3)]
        assert m.tick(2.4) == []
        assert m.tick(2.5) == [Heartbeat(4)]

    def test_none_while_closed(self):
        made = opened()
        made.session.closed()
        made.levels = GroupReport(drains=True)
        assert made.session.tick(9) == []
        assert made.session.deadline() is None

    def test_the_deadline_is_the_next_beat_or_the_end_of_patience(self):
        m = opened().session
        assert m.deadline() == 1
        m.tick(1)
        assert m.deadline() == 1.5, "one and a half intervals after the beat that has no answer"
        assert m.news_of_silence(1.5) is True
        for now in (2, 3, 4):
            m.tick(now)
            assert m.deadline() == now + 1
        m.acknowledged(HeartbeatAck(1, 3.0), 4.2)
        assert m.news_of_silence(4.2) is False
        m.tick(5)
        assert m.deadline() == 8
        m.tick(8)
        assert m.deadline() == 8.7, "one and a half of the new intervals after the echo"
        assert m.news_of_silence(8.7) is True
        assert m.deadline() == 9.2, "five seconds after the echo"


class TestEchoes:
    def test_says_when_the_echoed_beat_was_sent(self):
        m = opened(3).session
        m.tick(4)
        assert m.acknowledged(HeartbeatAck(1, 1.0), 4.5) == 3
        assert m.acknowledged(HeartbeatAck(2, 1.0), 4.6) == 4

    def test_once(self):
        m = opened().session
        assert m.acknowledged(HeartbeatAck(1, 1.0), 0.5) == 0
        assert m.acknowledged(HeartbeatAck(1, 1.0), 0.6) is None

    def test_a_newer_one_outdates_the_older(self):
        m = opened().session
        for now in (1, 2):
            m.tick(now)
        assert m.acknowledged(HeartbeatAck(2, 1.0), 2.1) == 1
        assert m.acknowledged(HeartbeatAck(1, 1.0), 2.2) is None
        assert m.acknowledged(HeartbeatAck(3, 1.0), 2.3) == 2
        assert m._sent_at == {}

    def test_of_the_connection_before_is_none(self):
        """A beat that was lost with its connection renewed nothing."""
        m = opened().session
        m.closed()
        m.opened(ME, 2)
        assert m.acknowledged(HeartbeatAck(1, 1.0), 2.1) is None
        assert m.acknowledged(HeartbeatAck(2, 1.0), 2.2) == 2

    def test_of_nothing_that_was_sent_is_none(self):
        assert opened().session.acknowledged(HeartbeatAck(77, 1.0), 0.5) is None

    def test_what_is_never_echoed_is_bounded_by_the_patience(self):
        m = opened().session
        now = 0.0
        while not m.is_given_up(now):
            m.tick(now)
            m.news_of_silence(now)
            assert m.deadline() > now
            now = m.deadline()
        assert len(m._sent_at) <= 6


class TestSilence:
    def test_is_a_beat_without_an_answer_for_one_and_a_half_intervals(self):
        m = opened().session
        m.acknowledged(HeartbeatAck(1, 1.0), 0.1)
        m.tick(1)
        assert m.news_of_silence(2.49) is None
        assert m.news_of_silence(2.5) is True
        assert m.news_of_silence(2.5) is None, "it is said once"

    def test_is_none_where_nothing_was_asked(self):
        m = opened().session
        m.acknowledged(HeartbeatAck(1, 1.0), 0.1)
        assert m.news_of_silence(50) is None

    def test_follows_the_interval_that_the_lighthouse_gives(self):
        m = opened().session
        m.welcomed(Welcome(0.25, 1.0), 0)
        assert m.news_of_silence(0.37) is None
        assert m.news_of_silence(0.375) is True

    def test_ends_with_any_answer(self):
        m = opened().session
        m.tick(1)
        m.tick(2)
        assert m.news_of_silence(2) is True
        m.acknowledged(HeartbeatAck(1, 1.0), 2.1)
        assert m.news_of_silence(2.1) is False
        assert m.news_of_silence(3.59) is None, "the answer itself is a sign that the connection carries"
        assert m.news_of_silence(3.6) is True

    def test_leaves_time_to_move_within_every_lease(self):
        """At the worst the way is gone just after an echo: 2.5 intervals, each a quarter of the lease at most."""
        for lease_s in (1.0, 5.0, 40.0):
            interval_s = min(1.0, lease_s / 4)
            m = opened().session
            m.welcomed(Welcome(interval_s, lease_s), 0)
            m.acknowledged(HeartbeatAck(1, interval_s), 0)
            m.tick(interval_s)
            assert m._silent_at < 0.65 * lease_s

    def test_a_lighthouse_that_answers_on_no_connection_is_given_longer_each_time(self):
        m, now = opened(0).session, 10.0
        waited: list[float] = []
        for _ in range(4):
            m.opened(ME, now)
            waited.append(m._silent_at - now)
            now = m._silent_at
            assert m.news_of_silence(now) is True
        assert waited == [1.5, 3, 6, 12]
        m.welcomed(Welcome(1.0, 5.0), now)
        m.opened(ME, now)
        assert m._silent_at == now + 1.5


class TestGivingUp:
    def test_without_an_echo_for_a_whole_lease(self):
        m = opened().session
        m.acknowledged(HeartbeatAck(1, 1.0), 2)
        assert not m.is_given_up(6.99)
        assert m.is_given_up(7)

    def test_by_the_lease_that_the_lighthouse_named(self):
        m = opened().session
        m.welcomed(Welcome(1.0, 30.0), 1)
        assert not m.is_given_up(30.9)
        assert m.is_given_up(31)

    def test_also_without_a_welcome(self, made: Fixture):
        made.session.opened(ME, 10)
        assert not made.session.is_given_up(10 + FIRST_LEASE_S - 0.01)
        assert made.session.is_given_up(10 + FIRST_LEASE_S)

    def test_a_closed_one_is_not_given_up_again_and_a_new_one_begins_anew(self):
        m = opened().session
        m.closed()
        assert not m.is_given_up(100)
        m.opened(ME, 100)
        assert not m.is_given_up(104)


class TestJoins:
    def test_is_asked_with_the_time_that_is_left(self):
        m = opened().session
        assert m.join(ME, deadline_at=30, now=2) == [JoinRequest(1, ME, 28)]

    def test_numbers_grow_and_only_the_newest_is_answered(self):
        m = opened().session
        m.join(ME, 30, 0)
        assert m.join(replace(ME, step=1), 30, 1) == [JoinRequest(2, replace(ME, step=1), 29)]
        assert not m.answered(1)
        assert m.answered(2)
        assert not m.answered(2), "once"

    def test_is_asked_again_on_the_next_connection_with_the_same_number(self):
        m = opened().session
        m.join(ME, 30, 0)
        m.closed()
        hello, beat, again = m.opened(ME, 4)
        assert (hello, beat, again) == (
            Hello(ME),
            Heartbeat(2),
            JoinRequest(1, ME, 26),
        )
        assert m.answered(1)

    def test_asked_while_away_waits_for_the_connection(self, made: Fixture):
        assert made.session.join(ME, 30, 0) == []
        assert made.session.opened(ME, 1)[2:] == [JoinRequest(1, ME, 29)]

    def test_one_whose_time_is_over_still_has_some(self, made: Fixture):
        made.session.join(ME, 3, 0)
        [request] = made.session.opened(ME, 5)[2:]
        assert request.time_left_s > 0

    def test_taken_back(self):
        m = opened().session
        m.join(ME, 30, 0)
        assert m.withdraw() == [WithdrawRequest(1)]
        assert m.withdraw() == []
        assert not m.answered(1)
        m.closed()
        assert m.opened(ME, 1)[2:] == []

    @pytest.mark.parametrize("is_away", [True, False])
    def test_an_answered_one_is_not_asked_again(self, is_away: bool):
        m = opened().session
        m.join(ME, 30, 0)
        if is_away:
            m.closed()
            assert m.withdraw() == [], "nobody is there to be told"
        else:
            m.answered(1)
            assert m.withdraw() == []
        assert m.opened(ME, 1)[2:] == []

    def test_a_leave_is_said_where_somebody_hears_it(self):
        m = opened().session
        assert m.leave("done") == [Leave("done")]
        m.closed()
        assert m.leave("done") == []
