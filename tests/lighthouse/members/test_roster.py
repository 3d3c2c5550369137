"""Who is alive: against its rules one by one, and against a dumb version under drawn events."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lighthouse.job.records import Group, Kind, QuorumConfig, QuorumRecord
from lighthouse.job.roster import Job, Roster, is_reborn
from lighthouse_protocol.messages.membership import Quorum
from tests.lighthouse.builders import group


def roster_of(timeout: float = 5, record: QuorumRecord | None = None) -> Roster:
    return Roster(Job(QuorumConfig(heartbeat_timeout_s=timeout), record))


def alive(roster: Roster) -> str:
    return "".join(sorted(m.replica_id for m in roster if m.is_alive))


def known(roster: Roster) -> str:
    return "".join(sorted(m.replica_id for m in roster))


def healthy(roster: Roster) -> set[str]:
    return {m.replica_id for m in roster if m.is_healthy}


class TestLapse:
    @pytest.mark.parametrize("sign", ["beat", "admit"])
    def test_who_comes_back_lapses_again_as_soon_as_before(self, sign: str):
        roster = roster_of()
        roster.beat("a", "i1", 0)
        roster.expire(5)
        roster.beat("a", "i1", 20) if sign == "beat" else roster.admit(group("a"), 20)
        assert alive(roster) == "a"
        assert roster.next_at() <= 25
        assert [m.replica_id for m in roster.expire(25)] == ["a"]

    def test_coming_and_going_leaves_nothing_behind(self):
        roster = roster_of()
        for n in range(200):
            roster.beat("a", "i1", 6 * n)
            roster.expire(6 * n + 5)
        assert len(roster._due) <= 14, "at most those of the last minute"

    @pytest.mark.parametrize(("timeout", "forgotten_after"), [(0.5, 60), (5, 60), (10, 120)])
    def test_is_forgotten_after_twelve_timeouts_or_a_minute(self, timeout: float, forgotten_after: float):
        roster = roster_of(timeout)
        roster.beat("a", "", 0)
        roster.expire(timeout)
        roster.expire(timeout + forgotten_after - 0.01)
        assert known(roster) == "a"
        roster.expire(timeout + forgotten_after)
        assert (known(roster), roster.next_at()) == ("", None)

    def test_next_at_is_at_or_before_the_next_lapse_and_after_now(self):
        roster = roster_of()
        assert roster.next_at() is None
        roster.beat("a", "", 3)
        roster.beat("b", "", 1)
        assert roster.next_at() == 6
        roster.beat("b", "", 4)
        roster.expire(6)
        assert roster.next_at() == 8


class TestIncarnations:
    def test_a_beat_of_another_incarnation_is_nothing_while_one_is_alive(self):
        roster = roster_of()
        roster.beat("a", "i1", 0)
        assert roster.beat("a", "i2", 3) is None
        assert [m.incarnation for m in roster.expire(5)] == ["i1"]

    @pytest.mark.parametrize(
        ("before", "after", "reborn"),
        [
            (("i1", 5), ("i1", 0), False),
            (("i1", 5), ("i2", 5), True),
            (("i1", 5), ("", 5), True),
            (("", 5), ("i1", 5), True),
            (("", 5), ("", 5), False),
            (("", 5), ("", 6), False),
            (("", 5), ("", 4), True),
        ],
    )
    def test_is_reborn(self, before: tuple[str, int], after: tuple[str, int], reborn: bool):
        old = Group("a", before[0], 0, participant=group("a", before[1], before[0]))
        assert is_reborn(group("a", after[1], after[0]), old) is reborn

    def test_a_join_says_which_step_it_holds_now(self):
        roster = roster_of()
        assert [roster.admit(group("a", step), 0).step for step in (7, 5)] == [7, 5]

    def test_one_that_only_beat_has_no_step_to_go_back_from(self):
        assert not is_reborn(group("a", 0, ""), Group("a", "", 0))


class TestHealth:
    def test_who_missed_is_alive_and_not_healthy_until_it_joins(self):
        roster = roster_of()
        member = roster.beat("a", "i1", 0)
        roster.miss(member)
        roster.beat("a", "i1", 1)
        assert (alive(roster), healthy(roster)) == ("a", set())
        roster.admit(group("a"), 2)
        assert healthy(roster) == {"a"}


class TestReported:
    """Members of which only heartbeats without a session have come: anyone can send these, under any name."""

    def test_they_are_counted_apart_until_they_join(self):
        roster = roster_of()
        for name in "abc":
            roster.beat(name, "i1", 0)
        assert (len(roster), roster.present, roster.reported) == (3, 0, 3)
        roster.admit(group("a"), 1)
        roster.greet(group("b"), 7, 1)
        assert (roster.present, roster.reported, roster.job.counts[Kind.CONNECTED]) == (2, 1, 1)
        roster.remove(roster.get("c"))
        assert roster.reported == 0

    def test_where_others_hold_sessions_only_the_first_quorum_waits_for_them(self):
        roster = roster_of()
        roster.beat("stranger", "i1", 0)
        members = [roster.greet(group("a"), 1, 0)]
        assert healthy(roster) == {"a", "stranger"}, "there was no quorum yet"
        roster.job.form(Quorum(1, (group("a"),)), members, 1, is_new=True)
        roster.form()
        roster.beat("another", "i1", 1)
        assert healthy(roster) == {"a"}
        roster.lose(members[0], 2, "it fell silent")
        assert healthy(roster) == {"stranger", "another"}, "as for groups that all come without a session"

    def test_a_member_of_the_quorum_is_waited_for_by_its_heartbeats_alone(self):
        """As after a restart of the lighthouse."""
        roster = roster_of(record=QuorumRecord(1, Quorum(1, (group("a"), group("t")))))
        roster.greet(group("a"), 1, 0)
        roster.beat("t", "i1", 0)
        roster.beat("stranger", "i1", 0)
        assert healthy(roster) == {"a", "t"}


signs = st.tuples(
    st.sampled_from(["beat", "join", "call ends", "nothing"]),
    st.sampled_from("abc"),
    st.sampled_from([0, 1, 2, 4, 5, 9, 70]),
)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from([0.5, 2, 5, 30]), st.lists(signs, max_size=40))
def test_alive_is_who_gave_a_sign(timeout: float, happenings: list[tuple[str, str, int]]):
    """Alive for sure: an open call, or a sign younger than the timeout. Dead for sure: neither, for that long."""
    roster, now = roster_of(timeout), 0
    signed: dict[str, float] = {}
    ended: dict[str, float] = {}
    for what, who, wait in happenings:
        now += wait
        roster.expire(now)
        member = roster.get(who)
        if what == "beat":
            assert roster.beat(who, "i1", now) is not None
            signed[who] = now
        elif what == "join":
            roster.admit(group(who), now).call = 1
            signed[who] = now
        elif what == "call ends" and member is not None and member.call is not None:
            member.call = None
            ended[who] = now
        for name in signed:
            member = roster.get(name)
            is_open = member is not None and member.call is not None
            if is_open or now - signed[name] < timeout:
                assert name in alive(roster)
            elif now - max(signed[name], ended.get(name, 0)) >= timeout:
                assert name not in alive(roster)
        assert roster.next_at() is None or roster.next_at() > now
        assert {m.replica_id for m in roster if m.is_alive} == healthy(roster)
