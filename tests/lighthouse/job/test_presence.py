"""Sessions at the lighthouse: who is there, who is lost, and what each means for the standing quorum."""

import pytest

from lighthouse.job.events import HeartbeatReceived, ProcessPaused
from lighthouse.job.forming import QuorumMachine
from lighthouse.job.records import Kind, QuorumConfig, Verdict
from lighthouse_protocol.messages.session import STARTING, QuorumOrder, QuorumPhase
from lighthouse_protocol.refusals import (
    Drained,
    DuplicateReplica,
    InvalidRequest,
    LimitReached,
    Superseded,
    WrongState,
)
from tests.lighthouse.builders import answers, join, refused
from tests.lighthouse.sessions import (
    ANOTHER,
    asks,
    closed,
    connected,
    echoed,
    ended,
    held,
    left,
    lose,
    native,
    opened,
    pulse,
    resumed,
    secret_of,
    standing,
    stands,
    told,
    welcomed,
)


def alive(machine: QuorumMachine) -> str:
    return "".join(sorted(m.replica_id for m in machine.job.groups.values() if m.is_alive))


HOLDS = {"held": held(1)}


class TestSessions:
    def test_a_hello_is_welcomed_with_the_intervals(self):
        m = connected("")
        assert m.handle(opened(1, "a"), 0) == [welcomed(1)]
        assert alive(m) == "a"

    def test_a_beat_of_a_session_that_is_not_there_is_not(self):
        m = connected("a")
        m.handle(ended(1), 1)
        assert m.handle(pulse(1), 1) == []
        assert m.handle(pulse(5), 1) == []
        assert alive(m) == ""

    @pytest.mark.parametrize("why", ["unwatched", "no session", "held closing", "switched off"])
    def test_one_without_does_not(self, why: str):
        m = connected("ab", stands=why != "switched off", min_replicas=2)
        if why == "held closing":
            m.handle(ProcessPaused(1), 0)
        m.handle(asks(1, 1, "a", watched=why != "unwatched"), 0)
        if why in ("no session", "held closing"):  # that incarnation is its session's
            m.handle(ended(2), 0)
            [*_, effect] = m.handle(asks(2, None, "b", incarnation="i2"), 0)
        else:
            [effect] = m.handle(asks(2, 2, "b"), 0)
        assert (effect.quorum.quorum_id, effect.stands) == (1, False)
        assert m.standing.phase is QuorumPhase.NONE

    def test_what_stands_asks_nobody_and_has_a_new_id_every_time(self):
        m = standing("a")
        for n in range(2, 5):
            quorum_id = n - 1
            again = native("a", n, seen_quorum_id=quorum_id)
            effects = m.handle(asks(n, 1, again), 1)
            assert effects[0] == told("resumed", (1,), quorum_id=quorum_id, upto=n - 1)
            assert effects[1:] == [stands(n, (n,), again)]

    def test_the_same_incarnations_new_session_takes_the_olds_place(self):
        m = standing("ab")
        order = QuorumOrder(1, QuorumPhase.STANDING)
        assert m.handle(opened(7, "a", **HOLDS), 1) == [closed(1, Superseded, "newer session"), welcomed(7, order)]
        assert m.handle(pulse(1), 1) == []
        assert m.handle(ended(1), 1) == []
        assert m.handle(left(1), 1) == []
        assert m.handle(pulse(7, **HOLDS), 1) == [echoed(7, order=order)]
        assert lose(m, 7, 1) == [told("revoked", (2,), "a", "connection")]

    def test_its_waiting_join_goes_with_the_old_session(self):
        m = connected("ab", min_replicas=2)
        m.handle(asks(1, 1, "a"), 0)
        assert m.handle(opened(7, "a"), 1) == [
            refused(1, Superseded, "a"),
            closed(1, Superseded),
            welcomed(7),
        ]
        m.handle(asks(2, 2, "b"), 1)
        assert len(m.joins) == 1
        [effect] = m.handle(asks(3, 7, "a"), 1)
        assert effect.calls == (3, 2)

    @pytest.mark.parametrize(("lease_s", "timeout_s"), [(8, 10), (10, 8)])
    def test_more_sessions_beat_more_rarely_as_far_as_lease_and_timeout_allow(self, lease_s: int, timeout_s: int):
        m = QuorumMachine(QuorumConfig(max_replicas=2000, lease_s=lease_s, heartbeat_timeout_s=timeout_s))
        for n in range(1900):
            [effect] = answers(m.handle(opened(n, f"g{n}"), 0))
            assert effect.welcome.heartbeat_interval_s == min(0.4 * 8, max(1.0, (n + 1) / 500))
        assert effect.welcome.lease_s == lease_s

    def test_a_short_lease_is_for_frequent_heartbeats(self):
        m = QuorumMachine(QuorumConfig(max_replicas=2000, lease_s=1, heartbeat_timeout_s=1))
        intervals = [answers(m.handle(opened(n, f"g{n}"), 0))[0].welcome.heartbeat_interval_s for n in range(300)]
        assert intervals == [max(0.25, min(0.4, n / 500)) for n in range(1, 301)]


class TestDuplicates:
    """One id, one manager, where a session is open or a call waits."""

    @pytest.mark.parametrize("incarnation", ["i1", "i2"])
    @pytest.mark.parametrize("secret", ["", ANOTHER, secret_of("b")])
    def test_another_manager_beside_an_open_session_is_refused_and_changes_nothing(self, incarnation: str, secret: str):
        m = standing("ab")
        thief = native("a", incarnation=incarnation, address="thief.example:1")
        words = ("a.example:29512 holds a session", "thief.example:1", "as soon as the lighthouse has detected")
        assert m.handle(opened(7, thief, secret), 1) == [closed(7, DuplicateReplica, *words)]
        assert m.handle(asks(7, 7, thief), 1) == [refused(7, Superseded, "session has ended")]
        assert m.handle(join(8, thief), 1) == [refused(8, DuplicateReplica, *words)]
        assert m.handle(pulse(7), 1) == []
        assert m.handle(ended(7), 1) == []
        assert m.handle(pulse(1, **HOLDS), 1) == [echoed(1, order=QuorumOrder(1, QuorumPhase.STANDING))]

    def test_its_manager_may_take_another_incarnation_to_another_connection(self):
        """The first connection carries nothing any more, and its ranks have restarted meanwhile."""
        m = standing("ab")
        effects = m.handle(opened(7, native("a", incarnation="i2")), 1)
        assert effects == [closed(1, Superseded, "newer"), told("revoked", (2,), "a", "has restarted"), welcomed(7)]

    def test_the_secret_goes_on_with_the_incarnation_that_its_session_takes(self):
        m = standing("ab")
        m.handle(asks(7, 1, "a", incarnation="i2"), 1)
        again = native("a", incarnation="i2")
        assert m.handle(opened(8, again, ANOTHER), 1) == [closed(8, DuplicateReplica, "holds a session")]
        assert m.handle(opened(9, again), 1)[-1] == welcomed(9)

    def test_a_session_speaks_for_no_other_group(self):
        m = standing("abc")
        for name, incarnation in (("a", "i1"), ("a", "i2"), ("d", "i1")):
            asked = m.handle(asks(7, 2, name, incarnation=incarnation), 1)
            assert asked == [refused(7, InvalidRequest, "replica_id", name, "session is that of b")]
        assert m.standing.phase is QuorumPhase.STANDING

    def test_nor_does_a_heartbeat_without_a_session(self):
        m = standing("ab")
        for incarnation in ("i1", "i2", ""):
            assert m.handle(HeartbeatReceived("a", incarnation), 1) == []
        assert m.job.groups.get("a").seen_at == 0
        lose(m, 1, 1)
        assert m.handle(HeartbeatReceived("a", "i1"), 1) == []
        assert alive(m) == "b"

    @pytest.mark.parametrize("is_held", [False, True])
    def test_an_incarnation_stays_its_managers_when_its_session_has_ended(self, is_held: bool):
        m = connected("ab")
        if is_held:  # the lighthouse was late, and the end counts only later
            m.handle(ProcessPaused(1), 0)
        m.handle(ended(1), 0)
        thief = native("a", address="thief.example:1")
        for secret in ("", ANOTHER):
            assert m.handle(opened(7, thief, secret), 0) == [closed(7, DuplicateReplica, "i1 is another manager")]
        assert m.handle(join(8, thief), 0) == [refused(8, DuplicateReplica, "i1 is another manager")]
        assert m.handle(opened(9, "a"), 0) == [welcomed(9)]

    def test_the_name_is_free_for_another_incarnation_as_soon_as_the_session_has_ended(self):
        m = connected("ab")
        m.handle(ended(1), 0)
        assert m.handle(opened(7, native("a", incarnation="i2"), ANOTHER), 0) == [welcomed(7)]
        assert m.handle(opened(8, "a"), 0) == [closed(8, DuplicateReplica, "holds a session")]

    def test_its_own_session_may_take_another_incarnation(self):
        """The ranks have restarted under a manager that lives on: that is the loss of the old ones."""
        m = standing("ab")
        assert m.handle(asks(7, 1, "a", incarnation="i2"), 1) == [told("revoked", (1, 2), "a", "ranks have restarted")]
        b = native("b", 3, seen_quorum_id=1)
        assert m.handle(asks(8, 2, b), 1) == [stands(2, (7, 8), native("a", 0, "i2"), b)]

    def test_that_ends_the_lease_that_its_manager_held(self):
        m = standing("a")
        assert m.handle(asks(7, 1, "a", incarnation="i2"), 1)[-1] == stands(2, (7,), native("a", 0, "i2"))

    @pytest.mark.parametrize("session", [7, None])
    def test_on_no_other_session(self, session: int | None):
        m = standing("a")
        m.handle(ended(1), 1)
        if session is not None:
            m.handle(opened(session, native("a", incarnation="i2"), ANOTHER), 1)
        assert m.handle(asks(8, session, "a", incarnation="i2"), 1) == []
        assert m.decision.verdict is Verdict.WAITING_FOR_LEASES

    def test_a_hello_beyond_the_limit_is_refused(self):
        m = connected("ab", max_replicas=2)
        assert m.handle(opened(3, "c"), 0) == [closed(3, LimitReached, "max-members")]
        assert alive(m) == "ab"

    def test_a_hello_that_misfits_is_refused(self):
        m = connected("a")
        assert m.handle(opened(3, native("c", group_world_size=2)), 0) == [closed(3, WrongState, "world_size")]

    def test_a_loopback_that_came_first_is_sent_away_with_its_session(self):
        m = connected("")
        m.handle(opened(1, native("a", address="127.0.0.1:1", store_address="127.0.0.1:2")), 0)
        m.handle(opened(2, native("b", address="127.0.0.1:1", store_address="127.0.0.1:2")), 0)
        m.handle(asks(1, 1, native("a", address="127.0.0.1:1", store_address="127.0.0.1:2")), 0)
        assert m.handle(opened(3, "c"), 0) == [
            refused(1, WrongState, "loopback"),
            closed(1, WrongState, "loopback"),
            closed(2, WrongState, "loopback"),
            welcomed(3),
        ]
        assert m.handle(pulse(1), 0) == []
        assert alive(m) == "c"


class TestLoss:
    def test_of_one_that_is_no_member_is_nothing(self):
        m = standing("ab")
        m.handle(opened(3, "c"), 1)
        assert m.handle(ended(3), 1) == []

    def test_a_leave_is_a_loss_too_while_it_stands(self):
        m = standing("ab")
        assert m.handle(left(1), 1) == [told("revoked", (1, 2), "a", "left"), closed(1)]
        assert (alive(m), len(m.job.groups)) == ("b", 1)

    def test_one_that_left_and_then_ended_is_not_said_goodbye(self):
        m = resumed("ab")
        m.handle(left(1), 1)
        assert m.handle(ended(1), 1) == []
        assert m.presence._leaving == []

    def test_nor_is_one_left_waiting_where_all_leave(self):
        m = standing("ab")
        for session in (1, 2):
            m.handle(pulse(session, drains=True, held=held(1, granted=3)), 1)
        for session in (1, 2):
            m.handle(pulse(session, drains=True, held=held(1, "recalled", granted=3)), 1)
        goodbyes = [*m.handle(left(1), 1), *m.handle(left(2), 1)]
        assert goodbyes in ([closed(1), closed(2)], [closed(2), closed(1)])


class TestDown:
    def test_it_is_said_once(self):
        m = standing("ab")
        m.handle(pulse(1, down="x"), 1)
        assert m.handle(pulse(1, down="x"), 1) == [echoed(1)]

    def test_its_waiting_join_is_dropped_and_the_next_heals_it(self):
        m = connected("ab", min_replicas=2)
        m.handle(asks(1, 1, "a"), 0)
        m.handle(opened(9, "x", down="x"), 0)
        m.handle(ended(9), 0)
        m.handle(pulse(1, down="rank 0 has ended"), 0)
        assert (len(m.joins), m.job.counts[Kind.HEALTHY]) == (0, 1)
        m.handle(asks(2, 2, "b"), 0)
        [effect] = m.handle(asks(3, 1, "a"), 0)
        assert effect.calls == (3, 2)

    def test_one_that_starts_is_waited_for_by_the_first_quorum_only(self):
        m = connected("a")
        m.handle(opened(2, "b", down=STARTING), 0)
        assert m.handle(asks(1, 1, "a"), 0) == []
        assert m.decision.verdict is Verdict.WAITING_FOR_STRAGGLERS
        m.handle(asks(2, 2, "b"), 1)
        m.handle(opened(3, "c", down=STARTING), 2)
        m.handle(ended(2), 2)
        assert len(m.handle(asks(3, 1, native("a", 1, seen_quorum_id=1)), 2)) == 1


class TestDrain:
    def test_of_one_outside_the_quorum_recalls_nothing(self):
        m = standing("ab")
        m.handle(opened(3, "c", drains=True), 1)
        assert m.standing.phase is QuorumPhase.STANDING

    def test_that_was_said_before_the_quorum_formed_keeps_it_out(self):
        m = connected("ab")
        m.handle(asks(1, 1, "a"), 0)
        assert m.handle(pulse(1, drains=True), 0.1) == [refused(1, Drained, "a drains"), echoed(1)]
        assert m.handle(asks(2, 1, "a"), 0.2) == [refused(2, Drained, "a drains")]
        m.handle(left(1), 0.3)
        assert m.handle(asks(3, 2, "b"), 0.4) == [stands(1, (3,), native("b"))]
