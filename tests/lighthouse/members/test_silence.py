"""Who falls silent, alone and with many; and a lighthouse that was itself paused."""

import pytest

from lighthouse.quorum.rules.events import HeartbeatReceived, WasLate
from lighthouse.quorum.rules.machine import QuorumMachine
from lighthouse_protocol.messages.session import QuorumOrder, QuorumPhase
from lighthouse_protocol.refusals import Unreachable
from tests.lighthouse.builders import ticked
from tests.lighthouse.sessions import (
    asks,
    closed,
    ended,
    held,
    native,
    opened,
    pulse,
    pulsing,
    standing,
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
            closed(1, Unreachable, "nothing of a for 5 s"),
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
        assert m.braked_until == 18
        assert ticked(m, 17.9, 18)[0] == told("revoked", (2, 3, 4), "silent")

    @pytest.mark.parametrize(("names", "silent"), [("ab", 1), ("abc", 1), ("abcd", 2), ("abcdef", 3)])
    def test_of_half_is_not_held(self, names: str, silent: int):
        m = standing(names)
        talking = range(silent + 1, len(names) + 1)
        [first, *_] = beating(m, talking, 0, 5.1)
        assert first == told("revoked", tuple(range(2, len(names) + 1)), "a", "silent")
        assert m.braked_until == 0

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
        assert m.braked_until == 7
        assert ticked(m, 2, 6.99) == []
        assert ticked(m, 6.99, 7)[0] == told("revoked", (), "silent")

    @pytest.mark.parametrize(("ends_at", "is_held"), [(2.05, True), (2.2, False)])
    def test_what_is_found_holds_for_all_who_end_in_that_moment(self, ends_at: float, is_held: bool):
        m = standing("abcde")
        assert beating(m, (4, 5), 0, 2) == []
        assert m.handle(ended(1), 2) == []
        m.handle(pulse(2, **HOLDS), 2.01)
        effects = m.handle(ended(3), ends_at)
        assert effects == ([] if is_held else [told("revoked", (2, 4, 5), "c", "connection")])

    def test_whose_new_sessions_take_their_places_without_a_change(self):
        m = standing("abc")
        for n in (1, 2, 3):
            m.handle(ended(n), 2)
        for n, name in enumerate("abc", start=4):
            assert m.handle(opened(n, name, **HOLDS), 6.5) == [welcomed(n, STANDING)]
        assert beating(m, (4, 5, 6), 6.5, 20) == []

    def test_a_burst_of_ends_of_those_who_were_just_heard_of_is_deaths(self):
        """A process that is killed was heard of within an interval."""
        m = standing("abcd")
        assert beating(m, range(1, 5), 0, 2) == []
        assert m.handle(ended(1), 2.2) == [told("revoked", (2, 3, 4), "a", "connection")]


class TestLateness:
    """The lighthouse was paused: it could hear nobody, and reads now what came meanwhile."""

    def test_moves_every_lapse(self):
        m = standing("abc")
        assert m.handle(WasLate(10), 10.5) == []
        assert ticked(m, 10.5, 14.9) == []
        assert beating(m, (2, 3), 14.9, 15.1)[0] == told("revoked", (2, 3), "a")

    def test_holds_the_closings_that_it_reads_then_for_the_lateness_and_two_seconds(self):
        m = standing("abc")
        beating(m, (1, 2, 3), 0, 1)
        m.handle(WasLate(10), 11)
        assert m.handle(ended(1), 11.5) == []
        assert beating(m, (2, 3), 11.5, 22.9) == []
        assert beating(m, (2, 3), 22.9, 23.1) == [told("revoked", (2, 3), "a")]

    def test_and_not_those_afterwards(self):
        m = standing("abc")
        m.handle(WasLate(1), 1)
        assert beating(m, (1, 2, 3), 1, 4.5) == []
        assert m.handle(ended(1), 4.5) == [told("revoked", (2, 3), "a")]

    def test_another_incarnation_is_the_loss_of_the_old_one_at_once(self):
        m = standing("ab")
        m.handle(WasLate(3), 3)
        m.handle(ended(1), 3)
        assert m.handle(opened(3, native("a", incarnation="i2")), 4) == [
            told("revoked", (2,), "a", "restarted"),
            welcomed(3),
        ]

    def test_one_that_is_held_does_not_stand_with_anybody(self):
        m = standing("ab")
        m.handle(WasLate(3), 3)
        m.handle(ended(1), 3)
        assert m.handle(pulse(2, drains=True, **HOLDS), 3)[1:] == [told("recalled", (2,), "b drains")]

    def test_does_not_lengthen_a_lease(self):
        """Leases are counted from beats: the managers were not paused."""
        m = standing("a")
        m.handle(WasLate(10), 3)
        assert m.standing.free_at() == 5
