"""Who falls silent, alone and with many; and a lighthouse that was itself paused."""

from collections.abc import Iterable

import pytest

from lighthouse.job.events import HeartbeatReceived, HostBusy, MemberLost, Ordered, ProcessPaused
from lighthouse.job.forming import QuorumMachine
from lighthouse.job.status import explain
from lighthouse_protocol.messages.session import QuorumOrder, QuorumPhase
from lighthouse_protocol.refusals import Unreachable
from tests.lighthouse.builders import refused, ticked
from tests.lighthouse.sessions import (
    ANOTHER,
    asks,
    closed,
    connected,
    echoed,
    ended,
    held,
    lose,
    native,
    opened,
    pulse,
    pulsing,
    standing,
    stands,
    told,
    welcomed,
)

HOLDS = {"held": held(1)}
STANDING = QuorumOrder(1, QuorumPhase.STANDING)


def beating(machine: QuorumMachine, sessions: range | tuple[int, ...], start: float, stop: float) -> list[object]:
    return pulsing(machine, dict.fromkeys(sessions, HOLDS), start, stop)


class TestSilence:
    def test_one_that_falls_silent_is_lost_after_heartbeat_timeout(self):
        m = standing("abc", heartbeat_timeout_s=5)
        assert beating(m, (1, 2, 3), 0, 2) == []
        assert beating(m, (2, 3), 2, 5.9) == []
        assert beating(m, (2, 3), 5.9, 6.1) == [
            told("revoked", (2, 3), "a", "silent"),
            closed(1, Unreachable, "no heartbeat from a for 5 s"),
        ]

    def test_a_heartbeat_without_a_session_keeps_none_alive(self):
        """Whoever sends it has not shown that it speaks for the group."""
        m = standing("ab")
        said: list[object] = []
        for now in range(6):
            said += m.handle(HeartbeatReceived("a", "i1"), now)
            m.handle(pulse(2, **HOLDS), now)
            said += ticked(m, now, now + 1)
        assert closed(1, Unreachable, "a") in said

    def test_a_waiting_join_keeps_no_session_alive(self):
        m = standing("abc", active=3)
        m.handle(opened(4, "d"), 0)
        m.handle(asks(9, 4, "d"), 0)
        assert closed(4, Unreachable, "d") in beating(m, (1, 2, 3), 0, 6)
        assert len(m.joins) == 0


class TestMassSilence:
    """More than half of the members at once: more likely the lighthouse's own network."""

    def test_and_may_be_held_again(self):
        m = standing("abcd")
        assert ticked(m, 0, 8) == []
        assert beating(m, range(1, 5), 8, 9) == []
        assert ticked(m, 9, 17.9) == []
        assert m.presence.silence.all_excused_until == 18
        assert ticked(m, 17.9, 18)[0] == told("revoked", (2, 3, 4), "silent")

    @pytest.mark.parametrize(("names", "silent"), [("ab", 1), ("abc", 1), ("abcd", 2), ("abcdef", 3)])
    def test_of_half_is_not_held(self, names: str, silent: int):
        m = standing(names)
        talking = range(silent + 1, len(names) + 1)
        [first, *_] = beating(m, talking, 0, 5.1)
        assert first == told("revoked", tuple(range(2, len(names) + 1)), "a", "silent")
        assert m.presence.silence.all_excused_until == 0

    @pytest.mark.parametrize(("names", "silent"), [("ab", 2), ("abc", 2), ("abcdef", 4)])
    def test_of_more_than_half_is(self, names: str, silent: int):
        assert beating(standing(names), range(silent + 1, len(names) + 1), 0, 9.9) == []

    def test_of_a_sole_member_is_a_loss(self):
        m = standing("a")
        assert ticked(m, 0, 5) == [told("revoked", (), "a"), closed(1, Unreachable)]

    def test_strangers_do_not_count(self):
        m = standing("abc")
        for n in range(4, 10):
            m.handle(opened(n, f"x{n}"), 0)
        effects = beating(m, (1, 2, 3), 0, 5.5)
        assert effects == [closed(n, Unreachable) for n in range(4, 10)]

    def test_a_burst_of_ends_is_held_where_nothing_was_heard_before(self):
        """The server's keepalive closes them after two seconds of silence."""
        m = standing("abc")
        assert [m.handle(ended(n), 2) for n in (1, 2, 3)] == [[], [], []]
        assert m.presence.silence.all_excused_until == 7
        assert ticked(m, 2, 6.99) == []
        assert ticked(m, 6.99, 7)[0] == told("revoked", (), "connection")

    @pytest.mark.parametrize(("ends_at", "is_held"), [(2.05, True), (2.2, False)])
    def test_what_is_found_holds_for_all_who_end_in_that_moment(self, ends_at: float, is_held: bool):
        m = standing("abcde")
        assert beating(m, (4, 5), 0, 2) == []
        assert m.handle(ended(1), 2) == []
        m.handle(pulse(2, **HOLDS), 2.01)
        assert m.handle(ended(3), ends_at) == []
        effects = ticked(m, ends_at, ends_at + 0.1)
        assert effects == ([] if is_held else [told("revoked", (2, 4, 5), "c", "connection")])

    def test_whose_new_sessions_take_their_places_without_a_change(self):
        m = standing("abc")
        for n in (1, 2, 3):
            m.handle(ended(n), 2)
        for n, name in enumerate("abc", start=4):
            assert m.handle(opened(n, name, **HOLDS), 6.5) == [welcomed(n, STANDING)]
        assert beating(m, (4, 5, 6), 6.5, 20) == []


def alive(machine: QuorumMachine) -> str:
    return "".join(sorted(m.replica_id for m in machine.job.groups.values() if m.is_alive))


def cut(machine: QuorumMachine, sessions: Iterable[int], now: float, apart_s: float = 0.0) -> list[object]:
    """The connections of `sessions` end, one after the other, and are judged."""
    effects: list[object] = []
    for session in sessions:
        effects += machine.handle(ended(session), now)
        effects += ticked(machine, now, now + apart_s)
        now += apart_s
    return effects + ticked(machine, now, now + 0.2)


def on_a_busy_host(machine: QuorumMachine, now: float, until: float) -> list[object]:
    """What is said after `now`."""
    effects: list[object] = []
    while now < until:
        now += 0.007
        if machine.presence.silence.is_judging(now):
            effects += machine.handle(HostBusy(), now)
        effects += machine.tick(now)
    return effects


class TestClosedTogether:
    """More than half of the members' connections end at once: more likely the network than the processes."""

    @pytest.mark.parametrize(("names", "closed"), [("ab", 1), ("abc", 1), ("abcd", 2), ("abcdef", 3)])
    def test_half_of_them_are_lost_seven_milliseconds_later(self, names: str, closed: int):
        m = standing(names)
        for session in range(1, closed + 1):
            assert m.handle(ended(session), 0.5) == []
        assert ticked(m, 0.5, 0.506) == []
        rest = tuple(range(closed + 1, len(names) + 1))
        assert ticked(m, 0.506, 0.508)[0] == told("revoked", rest, "a", "connection")
        assert (alive(m), m.presence.silence.all_excused_until) == (names[closed:], 0)

    @pytest.mark.parametrize(("names", "closed"), [("ab", 2), ("abc", 2), ("abcd", 3), ("abcdef", 4)])
    def test_more_than_half_are_held_for_a_lease(self, names: str, closed: int):
        m = standing(names, lease_s=3)
        assert cut(m, range(1, closed + 1), 0.5) == []
        assert m.presence.silence.all_excused_until == pytest.approx(3.507)
        assert "the connections of most members ended together" in explain(m, 3)
        rest = range(closed + 1, len(names) + 1)
        assert beating(m, rest, 1, 3.5) == []
        assert beating(m, rest, 3.5, 3.6)[0] == told("revoked", tuple(rest), "connection")

    @pytest.mark.parametrize("names", ["ab", "abcde"])
    def test_whose_new_sessions_take_their_places_without_a_change(self, names: str):
        m = standing(names)
        sessions = len(names)
        for round_ in range(1, 4):  # cut again and again
            first = sessions * (round_ - 1) + 1
            assert cut(m, range(first, first + sessions), 4.0 * round_ - 3) == []
            for session, name in enumerate(names, start=first + sessions):
                assert m.handle(opened(session, name, **HOLDS), 4.0 * round_ - 0.1) == [welcomed(session, STANDING)]
            assert beating(m, range(first + sessions, first + 2 * sessions), 4.0 * round_ - 0.1, 4.0 * round_) == []
        assert alive(m) == names

    def test_one_that_is_back_at_once_shows_the_cut_too(self):
        m = standing("ab")
        assert m.handle(ended(1), 0.5) == []
        assert m.handle(opened(3, "a", **HOLDS), 0.503) == [welcomed(3, STANDING)]
        assert cut(m, [2], 0.506) == []
        assert alive(m) == "ab"

    def test_and_no_later_one(self):
        """Both connections of a's break alone, and a second lies between."""
        m = standing("ab")
        m.handle(ended(1), 0.5)
        m.handle(opened(3, "a", **HOLDS), 0.503)
        assert cut(m, [2], 1.5) == [told("revoked", (3,), "b", "connection")]

    def test_nor_does_a_busy_host_prolong_a_burst_whose_members_are_all_back(self):
        m = standing("abcde")
        for session, name in ((1, "a"), (2, "b")):
            m.handle(ended(session), 0.5)
            m.handle(opened(session + 5, name, **HOLDS), 0.503)
        beating(m, range(3, 8), 0.5, 4.9)
        assert on_a_busy_host(m, 4.9, 5.01) == []
        assert lose(m, 3, 5.02) == [told("revoked", (4, 5, 6, 7), "c", "connection")]

    def test_a_burst_may_last_a_tenth_of_a_second(self):
        assert cut(standing("abcdefgh"), range(1, 9), 0.5, apart_s=0.006) == []
        drip = [*range(1, 23)]  # of 40; the seventeenth is the last one within that time
        first = cut(standing([f"g{n:02}" for n in range(40)]), drip, 0.5, apart_s=0.006)[0]
        assert (first.order.phase, len(first.sessions)) == (QuorumPhase.REVOKED, 40 - 17)

    def test_the_wait_on_a_busy_host_has_an_end(self):
        m = standing("abcd")
        for session in (1, 2, 3):
            m.handle(ended(session), 0.5)
        assert on_a_busy_host(m, 0.5, 1) == []
        for session, name in ((5, "a"), (6, "b"), (7, "c")):
            m.handle(opened(session, name, **HOLDS), 1)
        m.handle(ended(5), 1.5)
        assert on_a_busy_host(m, 1.5, 1.775) == []
        assert on_a_busy_host(m, 1.785, 1.8)[0] == told("revoked", (4, 6, 7), "a", "connection")

    def test_a_busy_host_waits_for_no_more_ends_than_there_are(self):
        m = standing("abc")
        for session in (1, 2, 3):
            m.handle(ended(session), 0.5)
        assert on_a_busy_host(m, 0.5, 0.505) == []
        assert m.presence.silence.all_excused_until == pytest.approx(5.507)

    def test_a_host_that_is_busy_long_before_changes_nothing(self):
        m = standing("abc")
        assert m.handle(HostBusy(), 0.4) == []
        m.handle(ended(1), 0.5)
        assert not m.presence.silence.is_judging(0.506)
        assert ticked(m, 0.5, 0.508)[0] == told("revoked", (2, 3), "a", "connection")

    def test_a_failed_step_shows_a_loss_at_once(self):
        """A busy host would have waited for more closings."""
        m = standing("abc")
        m.handle(ended(1), 0.5)
        m.handle(HostBusy(), 0.507)
        [order] = m.handle(asks(9, 2, native("b", 5, seen_quorum_id=1, commit_failures=1)), 0.51)
        assert order == told("revoked", (2, 3), "a", "connection")
        assert alive(m) == "bc"

    def test_those_that_a_failed_step_shows_as_lost_are_lost_in_the_order_in_which_they_joined(self):
        """The first of them is named as the reason, so it must not depend on where the records lie in memory."""
        m = standing("abcdefghi", kind=QuorumMachine)
        for session in (4, 2, 3, 1):
            m.handle(ended(session), 0.5)
        effects = m.handle(asks(99, 9, native("i", 5, seen_quorum_id=1, commit_failures=1)), 0.503)
        assert [e.replica_id for e in effects if isinstance(e, MemberLost)] == ["a", "b", "c", "d"]
        [order] = {e.order for e in effects if isinstance(e, Ordered)}
        assert order.lost == "a"

    def test_one_that_comes_a_little_later_finds_the_others_held(self):
        m = standing("abc")
        assert cut(m, (1, 2), 0.5) == []
        assert cut(m, [3], 1.5) == []
        assert alive(m) == "abc"

    def test_a_lighthouse_that_was_held_up_reads_the_rest_first(self):
        m = standing("abc")
        m.handle(ended(1), 0.5)
        assert m.tick(0.53) == []
        m.handle(ended(2), 0.534)
        assert ticked(m, 0.535, 2) == []
        m = standing("abc")
        m.handle(ended(1), 0.5)
        for now in (0.53, 0.56, 0.6):
            assert m.tick(now) == []
        assert m.tick(0.608)[0] == told("revoked", (2, 3), "a", "connection")

    def test_also_when_it_is_held_up_again(self):
        m = standing("abc")
        m.handle(ended(1), 0.5)
        assert m.tick(0.53) == []
        assert m.handle(opened(4, "a", **HOLDS), 0.533) == [welcomed(4, STANDING)]
        m.handle(ended(4), 1.5)
        assert m.tick(1.53) == []
        m.handle(ended(2), 1.534)
        assert ticked(m, 1.535, 3) == []

    def test_a_failed_step_shortens_the_wait_for_the_others(self):
        """Two processes of three have died together: the third one's collectives have broken as well."""
        m = standing("abc")
        assert cut(m, (1, 2), 0.5) == []
        [order] = m.handle(asks(9, 3, native("c", 5, seen_quorum_id=1, commit_failures=1)), 1)
        assert order == told("revoked", (3,), "c has discarded")
        assert pulsing(m, {3: {}}, 1, 2.9) == []
        *_, formed = pulsing(m, {3: {}}, 2.9, 3.1)
        assert [p.replica_id for p in formed.quorum.participants] == ["c"]

    def test_a_sole_member_and_strangers_are_lost_at_once(self):
        m = standing("a")
        for session in range(2, 5):
            m.handle(opened(session, f"x{session}"), 0)
        assert m.handle(ended(1), 0.5) == [told("revoked", (), "a", "connection")]
        m.handle(ended(2), 0.5)
        assert alive(m) == "x3x4"

    def test_its_name_waits_for_the_manager_that_has_it(self):
        """Until it counts as lost, or a failed step shows that processes have died."""
        m = standing("abc")
        assert cut(m, (1, 2), 0.5) == []
        another = opened(4, native("a", incarnation="i2"), ANOTHER)
        assert m.handle(another, 1) == [closed(4, Unreachable, "connection of a was cut")]
        assert m.handle(HeartbeatReceived("a", "i2"), 1) == []
        assert m.handle(asks(8, None, "b", incarnation="i2"), 1) == [refused(8, Unreachable, "connection of b was cut")]
        assert m.handle(opened(5, "b", **HOLDS), 1) == [welcomed(5, STANDING)]
        m.handle(asks(9, 3, native("c", 5, seen_quorum_id=1, commit_failures=1)), 2)
        assert m.handle(another, 2)[-1] == welcomed(4)

    def test_another_incarnation_is_the_loss_of_the_old_one_at_once(self):
        m = standing("abc")
        assert cut(m, (1, 2), 0.5) == []
        assert m.handle(opened(4, native("a", incarnation="i2")), 1)[0] == told("revoked", (3,), "a", "restarted")


class TestLateness:
    """The lighthouse was paused: it could hear nobody, and reads now what came meanwhile."""

    def test_moves_every_lapse(self):
        m = standing("abc")
        assert m.handle(ProcessPaused(10), 10.5) == []
        assert ticked(m, 10.5, 14.9) == []
        assert beating(m, (2, 3), 14.9, 15.1)[0] == told("revoked", (2, 3), "a")

    def test_holds_the_closings_that_it_reads_then_for_the_lateness_and_two_seconds(self):
        m = standing("abc")
        beating(m, (1, 2, 3), 0, 1)
        m.handle(ProcessPaused(10), 11)
        assert m.handle(ended(1), 11.5) == []
        assert beating(m, (2, 3), 11.5, 22.9) == []
        assert beating(m, (2, 3), 22.9, 23.1) == [told("revoked", (2, 3), "a")]

    def test_and_not_those_afterwards(self):
        m = standing("abc")
        m.handle(ProcessPaused(1), 1)
        assert beating(m, (1, 2, 3), 1, 4.5) == []
        assert lose(m, 1, 4.5) == [told("revoked", (2, 3), "a")]

    def test_another_incarnation_is_the_loss_of_the_old_one_at_once(self):
        m = standing("ab")
        m.handle(ProcessPaused(3), 3)
        m.handle(ended(1), 3)
        assert m.handle(opened(3, native("a", incarnation="i2")), 4) == [
            told("revoked", (2,), "a", "restarted"),
            welcomed(3),
        ]

    def test_one_that_is_held_does_not_stand_with_anybody(self):
        m = standing("ab")
        m.handle(ProcessPaused(3), 3)
        m.handle(ended(1), 3)
        assert m.handle(pulse(2, drains=True, **HOLDS), 3)[1:] == [told("recalled", (2,), "b drains")]

    def test_lengthens_the_hold_of_closings_that_were_read_before(self):
        """The managers could not reconnect while it was paused."""
        m = standing("abc")
        beating(m, (1, 2, 3), 0, 1)
        assert cut(m, (1, 2), 1) == []
        assert m.handle(ProcessPaused(10), 12) == []
        another = opened(4, native("a", incarnation="i2"), ANOTHER)
        assert m.handle(another, 12) == [closed(4, Unreachable, "connection of a was cut")]
        assert m.handle(opened(5, "a", **HOLDS), 12) == [welcomed(5, STANDING)]
        assert beating(m, (3, 5), 12, 16) == []
        assert beating(m, (3, 5), 16, 16.1) == [told("revoked", (3, 5), "b", "connection")]

    def test_and_of_those_that_were_read_after_an_earlier_pause(self):
        m = standing("abc")
        m.handle(ProcessPaused(3), 3)
        m.handle(ended(1), 3)
        beating(m, (2, 3), 3, 4)
        assert m.handle(ProcessPaused(10), 14) == []
        m.handle(ended(2), 15)
        assert beating(m, (3,), 15, 17.9) == []
        assert beating(m, (3,), 17.9, 18.1) == [told("revoked", (3,), "a", "connection")]

    def test_a_short_pause_does_not_end_the_hold_after_a_long_one(self):
        m = standing("abc")
        beating(m, (1, 2, 3), 0, 1)
        m.handle(ProcessPaused(10), 11)
        m.handle(ProcessPaused(1), 12)
        m.handle(ended(1), 12.5)
        assert beating(m, (2, 3), 12.5, 23.9) == []
        assert beating(m, (2, 3), 23.9, 24.1) == [told("revoked", (2, 3), "a", "connection")]

    def test_lengthens_the_time_of_those_that_were_excused(self):
        m = standing("abc")
        beating(m, (1,), 0, 5)
        beating(m, (1, 2), 5.1, 8)
        assert m.presence.silence.all_excused_until > 9
        assert m.handle(ProcessPaused(10), 18) == []
        assert m.handle(pulse(3, **HOLDS), 18) == [echoed(3, order=STANDING)]

    @pytest.mark.parametrize("paused_s", [0, 10])
    def test_lengthens_the_wait_for_stragglers(self, paused_s: float):
        """Their joins may be among what it reads now."""
        m = connected("ab", join_timeout_s=5)
        assert m.handle(asks(8, 1, "a"), 1) == []
        now = 2 + paused_s
        assert m.handle(ProcessPaused(paused_s), now) == []
        for session in (1, 2):
            m.handle(pulse(session), now + 2)
        assert ticked(m, now, now + 3.9) == []
        assert ticked(m, now + 3.9, now + 4) == [stands(1, (8,), native("a"))]

    def test_lengthens_the_wait_for_a_lost_member_before_a_spare_replaces_it(self):
        m = connected("abc", active=2, last_call_s=3)
        for session, name in enumerate("abc", 1):
            m.handle(asks(session, session, name), 0)
        lose(m, 2, 1)
        m.handle(asks(8, 1, "a", seen_quorum_id=1), 1)
        assert m.handle(ProcessPaused(10), 12) == []
        assert m.handle(opened(4, native("b", incarnation="i2")), 13) == [welcomed(4)]
        [formed] = m.handle(asks(9, 4, native("b", incarnation="i2")), 13)
        assert formed == stands(2, (8, 9), native("a", seen_quorum_id=1), native("b", incarnation="i2"))

    def test_lengthens_the_time_for_which_a_lost_group_is_remembered(self):
        m = standing("abc")
        beating(m, (1, 2, 3), 0, 1)
        lose(m, 1, 1)
        m.handle(ProcessPaused(100), 102)
        assert "a" in m.job.groups
        beating(m, (2, 3), 102, 162)
        assert "a" not in m.job.groups

    def test_does_not_lengthen_a_lease(self):
        """Leases are counted from beats: the managers were not paused."""
        m = standing("a")
        m.handle(ProcessPaused(10), 3)
        assert m.standing.leases_free_at() == 5
