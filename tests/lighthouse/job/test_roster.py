"""The roster: which groups are alive, which ask for a quorum, and which are refused."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_client.step.config import AgentConfig
from lighthouse.job.events import QuorumFormed
from lighthouse.job.records import Group, Kind, LastAssignment, QuorumConfig, QuorumRecord
from lighthouse.job.roster import Job, is_reborn, refusal, unreachable_groups
from lighthouse_protocol.limits import ANSWER_MARGIN_S, JOIN_TIMEOUT_S, QUORUM_TIMEOUT_S
from lighthouse_protocol.messages.membership import Participant, Quorum, Tag
from lighthouse_protocol.messages.session import RESTARTING
from lighthouse_protocol.refusals import DuplicateReplica, InvalidRequest, LighthouseError, LimitReached, WrongState
from tests.lighthouse.builders import beat, beating, group, join, machine, on_loopback


def empty_roster(timeout: float = 5, record: QuorumRecord | None = None) -> Job:
    return Job(QuorumConfig(heartbeat_timeout_s=timeout), record)


def alive(roster: Job) -> str:
    return "".join(sorted(m.replica_id for m in roster.groups.values() if m.is_alive))


def known(roster: Job) -> str:
    return "".join(sorted(m.replica_id for m in roster.groups.values()))


def healthy(roster: Job) -> set[str]:
    return {m.replica_id for m in roster.groups.values() if m.is_healthy}


class TestLapse:
    @pytest.mark.parametrize("sign", ["beat", "admit"])
    def test_who_comes_back_lapses_again_as_soon_as_before(self, sign: str):
        roster = empty_roster()
        roster.record_heartbeat("a", "i1", 0)
        roster.lapse_due_groups(5)
        roster.record_heartbeat("a", "i1", 20) if sign == "beat" else roster.record_join(group("a"), 20)
        assert alive(roster) == "a"
        assert roster.next_timeout_at() <= 25
        assert [m.replica_id for m in roster.lapse_due_groups(25)] == ["a"]

    def test_coming_and_going_leaves_nothing_behind(self):
        roster = empty_roster()
        for n in range(200):
            roster.record_heartbeat("a", "i1", 6 * n)
            roster.lapse_due_groups(6 * n + 5)
        assert len(roster._due) <= 14, "at most those of the last minute"

    @pytest.mark.parametrize(("timeout", "forgotten_after"), [(0.5, 60), (5, 60), (10, 120)])
    def test_is_forgotten_after_twelve_timeouts_or_a_minute(self, timeout: float, forgotten_after: float):
        roster = empty_roster(timeout)
        roster.record_heartbeat("a", "", 0)
        roster.lapse_due_groups(timeout)
        roster.lapse_due_groups(timeout + forgotten_after - 0.01)
        assert known(roster) == "a"
        roster.lapse_due_groups(timeout + forgotten_after)
        assert (known(roster), roster.next_timeout_at()) == ("", None)

    def test_next_at_is_at_or_before_the_next_lapse_and_after_now(self):
        roster = empty_roster()
        assert roster.next_timeout_at() is None
        roster.record_heartbeat("a", "", 3)
        roster.record_heartbeat("b", "", 1)
        assert roster.next_timeout_at() == 6
        roster.record_heartbeat("b", "", 4)
        roster.lapse_due_groups(6)
        assert roster.next_timeout_at() == 8


class TestIncarnations:
    def test_a_beat_of_another_incarnation_is_nothing_while_one_is_alive(self):
        roster = empty_roster()
        roster.record_heartbeat("a", "i1", 0)
        assert roster.record_heartbeat("a", "i2", 3) is None
        assert [m.incarnation for m in roster.lapse_due_groups(5)] == ["i1"]

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
        roster = empty_roster()
        assert [roster.record_join(group("a", step), 0).step for step in (7, 5)] == [7, 5]

    def test_one_that_only_beat_has_no_step_to_go_back_from(self):
        assert not is_reborn(group("a", 0, ""), Group("a", "", 0))


class TestHealth:
    def test_who_missed_is_alive_and_not_healthy_until_it_joins(self):
        roster = empty_roster()
        member = roster.record_heartbeat("a", "i1", 0)
        roster.mark_missed_timeout(member)
        roster.record_heartbeat("a", "i1", 1)
        assert (alive(roster), healthy(roster)) == ("a", set())
        roster.record_join(group("a"), 2)
        assert healthy(roster) == {"a"}


class TestReported:
    """Members of which only heartbeats without a session have come: anyone can send these, under any name."""

    def test_they_are_counted_apart_until_they_join(self):
        roster = empty_roster()
        for name in "abc":
            roster.record_heartbeat(name, "i1", 0)
        assert (len(roster.groups), roster.present_count, roster.counts[Kind.REPORTED]) == (3, 0, 3)
        roster.record_join(group("a"), 1)
        roster.add_session(group("b"), 7, 1)
        assert (roster.present_count, roster.counts[Kind.REPORTED], roster.counts[Kind.CONNECTED]) == (2, 1, 1)
        roster.remove_group(roster.groups.get("c"))
        assert roster.counts[Kind.REPORTED] == 0

    def test_where_others_hold_sessions_only_the_first_quorum_waits_for_them(self):
        roster = empty_roster()
        roster.record_heartbeat("stranger", "i1", 0)
        members = [roster.add_session(group("a"), 1, 0)]
        assert healthy(roster) == {"a", "stranger"}, "there was no quorum yet"
        roster.replace_quorum(Quorum(1, (group("a"),)), members, 1, is_new=True)
        roster.record_heartbeat("another", "i1", 1)
        assert healthy(roster) == {"a"}
        roster.mark_lost(members[0], 2, "it fell silent")
        assert healthy(roster) == {"stranger", "another"}, "as for groups that all come without a session"

    def test_a_member_of_the_quorum_is_waited_for_by_its_heartbeats_alone(self):
        """As after a restart of the lighthouse."""
        roster = empty_roster(record=QuorumRecord(1, Quorum(1, (group("a"), group("t")))))
        roster.add_session(group("a"), 1, 0)
        roster.record_heartbeat("t", "i1", 0)
        roster.record_heartbeat("stranger", "i1", 0)
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
    roster, now = empty_roster(timeout), 0
    signed: dict[str, float] = {}
    ended: dict[str, float] = {}
    for what, who, wait in happenings:
        now += wait
        roster.lapse_due_groups(now)
        member = roster.groups.get(who)
        if what == "beat":
            assert roster.record_heartbeat(who, "i1", now) is not None
            signed[who] = now
        elif what == "join":
            roster.record_join(group(who), now).call = 1
            signed[who] = now
        elif what == "call ends" and member is not None and member.call is not None:
            member.call = None
            ended[who] = now
        for name in signed:
            member = roster.groups.get(name)
            is_open = member is not None and member.call is not None
            if is_open or now - signed[name] < timeout:
                assert name in alive(roster)
            elif now - max(signed[name], ended.get(name, 0)) >= timeout:
                assert name not in alive(roster)
        assert roster.next_timeout_at() is None or roster.next_timeout_at() > now
        assert {m.replica_id for m in roster.groups.values() if m.is_alive} == healthy(roster)


MEMBERS = ("g0", "g1", "g2")


def member(name: str, **fields: object) -> Group:
    return Group(name, "i1", 0, participant=group(name, **fields), is_participant=name in MEMBERS)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5), st.integers(0, 50)), max_size=30))
def test_the_earliest_deadline_is_the_earliest(events: list[tuple[bool, int, int]]):
    job = Job(QuorumConfig(), QuorumRecord(1, Quorum(1, tuple(map(group, MEMBERS)))))
    job.groups = {f"g{number}": member(f"g{number}") for number in range(6)}
    joins = job.joins
    waiting: dict[int, int] = {}
    for joined, call, deadline_at in events:
        if joined and call not in waiting:
            joins.add_join(job.groups[f"g{call}"], call, deadline_at, 0)
            waiting[call] = deadline_at
        elif not joined:
            joins.withdraw_join(f"g{call}", call, 0)
            waiting.pop(call, None)
        assert joins.anyone.deadline_at == min(waiting.values(), default=None)
        of_members = (until for number, until in waiting.items() if f"g{number}" in MEMBERS)
        assert joins.members.deadline_at == min(of_members, default=None)


class TestTimeouts:
    def test_by_default_a_call_outlives_the_wait_for_a_straggler(self) -> None:
        default = AgentConfig().quorum_timeout_s
        assert default >= QuorumConfig().join_timeout_s + QuorumConfig().lease_s + ANSWER_MARGIN_S

    @given(
        join_timeout_s=st.floats(1, 60),
        asked_after_s=st.floats(0, 4),
        slack_s=st.floats(QUORUM_TIMEOUT_S - JOIN_TIMEOUT_S, 90),
    )
    def test_a_straggler_costs_no_caller_its_call(
        self, join_timeout_s: float, asked_after_s: float, slack_s: float
    ) -> None:
        m = machine(join_timeout_s=join_timeout_s)
        beating(m, "ab", 0.0, asked_after_s)
        m.handle(beat("b"), asked_after_s)
        deadline_at = asked_after_s + join_timeout_s + slack_s
        effects = [*m.handle(join(1, "a", deadline_at), asked_after_s)]
        effects += beating(m, "ab", asked_after_s, deadline_at - slack_s / 2)
        assert [e.calls for e in effects if isinstance(e, QuorumFormed)] == [(1,)]


def roster_of(*participants: Participant) -> Job:
    roster = empty_roster()
    for participant in participants:
        roster.record_join(participant, 0)
    return roster


def why(participant: Participant, roster: Job, **options: object) -> LighthouseError | None:
    settings = {name: options.pop(name) for name in ("max_replicas", "allow_heterogeneous") if name in options}
    roster.config = replace(roster.config, **({"max_replicas": 100} | settings))
    return refusal(participant, roster, **options)


def test_admits_the_first_the_second_and_itself():
    roster = roster_of(group("a"))
    assert [why(group(name), roster) for name in "ab"] == [None, None]


class TestLimit:
    def test_of_ids(self):
        error = why(group("c"), roster_of(group("a"), group("b")), max_replicas=2)
        assert isinstance(error, LimitReached)
        assert all(word in str(error) for word in ("replica_id:", "c", "number 3", "2 (--max-members)"))

    def test_does_not_stop_who_is_in(self):
        assert why(group("a", incarnation="i2"), roster_of(group("a"), group("b")), max_replicas=2) is None


class TestDuplicates:
    def waiting(self, participant: Participant) -> Job:
        roster = roster_of(participant)
        roster.groups.get(participant.replica_id).call = 1
        return roster

    @pytest.mark.parametrize(
        ("before", "after"),
        [
            (group("a"), group("a", incarnation="i2", address="there:1")),
            (group("a", incarnation=""), group("a", address="there:1")),
            (group("a", incarnation=""), group("a", incarnation="", address="there:1")),
            (group("a", incarnation="", address="here:1"), group("a", incarnation="", address="")),
            (group("a"), group("a", incarnation="")),
        ],
    )
    def test_of_a_waiting_call(self, before: Participant, after: Participant):
        error = why(after, self.waiting(before))
        assert isinstance(error, DuplicateReplica)
        assert before.address in str(error)
        assert (after.address or "no address") in str(error)

    @pytest.mark.parametrize(
        "again", [group("a", step=3), group("a", address="moved:1"), group("a", commit_failures=1)]
    )
    def test_the_same_incarnation_is_none(self, again: Participant):
        assert why(again, self.waiting(group("a"))) is None

    def test_the_same_addresses_without_incarnation_are_none(self):
        assert why(group("a", 3, ""), self.waiting(group("a", 5, ""))) is None

    def test_nor_another_incarnation_once_the_call_has_ended(self):
        assert why(group("a", incarnation="i2"), roster_of(group("a"))) is None


class TestBackwards:
    def test_the_step_of_an_incarnation(self):
        error = why(group("a", 6), roster_of(group("a", 7)))
        assert isinstance(error, InvalidRequest)
        assert str(error).startswith("step: ")
        assert all(word in str(error) for word in ("a", "7", "6", "incarnation"))

    def test_not_at_the_same_step_nor_of_another_nor_of_none(self):
        roster = roster_of(group("a", 7), group("b", 7, ""))
        for again in (group("a", 7), group("a", 0, "i2"), group("b", 0, "")):
            assert why(again, roster) is None

    def test_not_for_one_that_was_told_to_heal_to_an_older_state(self):
        """Its ranks disagreed at step 7, the others were at 5: it took their state, and goes on from there."""
        roster = roster_of(group("a", 7, ranks_disagree=True))
        roster.groups.get("a").last_assignment = LastAssignment(quorum_id=3, max_step=5, tag_quorum_id=2)
        assert why(group("a", 5), roster) is None
        assert why(group("a", 6), roster) is None
        assert isinstance(why(group("a", 4), roster), InvalidRequest)

    def test_not_for_one_whose_ranks_disagree(self):
        """One of them started anew, and took the group to another incarnation; its mate still gets an older state."""
        assert why(group("a", 1, ranks_disagree=True), roster_of(group("a", 9))) is None

    def test_nor_for_one_that_catches_up_from_what_it_was_told_some_quorums_ago(self):
        roster = roster_of(group("a", 11))
        held, handed = Tag(11, 2), None
        for quorum_id, max_step in ((3, 1), (4, 2), (5, 4)):
            lowest = max_step if handed is None else handed.lowest_with(held, max_step)
            handed = roster.groups.get("a").last_assignment = LastAssignment(
                quorum_id, max_step, None, held=held, lowest=lowest
            )
        assert why(group("a", 1), roster) is None
        assert isinstance(why(group("a", 0), roster), InvalidRequest)
        assert handed is not None
        assert handed.lowest_with(Tag(4, 5), 6) == 6, "it has got there"
        assert handed.lowest_with(Tag(4, None), 6) == 1, "some of its ranks have"


class TestSizes:
    def test_a_misfit_names_both_groups_and_sizes(self):
        error = why(group("b", group_world_size=8), roster_of(group("a", group_world_size=4)))
        assert isinstance(error, WrongState)
        words = ("world_size:", "b has 8", "a has 4", "one rank each that gathers", "--allow-heterogeneous")
        assert all(word in str(error) for word in words)

    def test_one_that_changes_its_own_size_is_told_of_another(self):
        roster = roster_of(group("a", group_world_size=4), group("b", group_world_size=4))
        error = why(group("a", incarnation="i2", group_world_size=8), roster)
        assert "a has 8" in str(error)
        assert "b has 4" in str(error)

    def test_none_where_no_agent_has_come(self):
        """Runs of wrapped functions have no peers, and may have any size."""
        roster = roster_of(group("a", group_world_size=4))
        roster.groups.get("a").is_starting = True
        assert why(group("b", group_world_size=8), roster) is None
        roster.groups.get("a").down = RESTARTING
        assert "its own --job" in str(why(group("b", group_world_size=8), roster))
        assert why(group("b", group_world_size=8), roster, is_hello=True, is_starting=True) is None

    def test_may_differ_where_allowed_or_not_told_or_alone_or_dead(self):
        roster = roster_of(group("a", group_world_size=4))
        assert why(group("b", group_world_size=8), roster, allow_heterogeneous=True) is None
        assert why(group("b", group_world_size=0), roster) is None
        assert why(group("a", incarnation="i2", group_world_size=8), roster) is None
        roster.lapse_due_groups(100)
        assert why(group("b", group_world_size=8), roster) is None


class TestLoopback:
    @pytest.mark.parametrize("names", ["ab", "abc", "abcd"])
    def test_one_that_moves_onto_a_loopback_is_told_of_another(self, names: str):
        error = why(on_loopback("a", incarnation="i2"), roster_of(*map(group, names)))
        assert "a advertises a loopback (127.0.0.1:29512) beside b (b.example:29512)" in str(error)

    def test_alone_or_among_its_like_or_without_addresses(self):
        assert why(on_loopback("a", incarnation="i2"), roster_of(group("a"))) is None
        assert why(on_loopback("b"), roster_of(on_loopback("a"))) is None
        assert why(Participant("b"), roster_of(group("a"))) is None

    @pytest.mark.parametrize("newcomer", [on_loopback("b"), Participant("b")])
    def test_another_does_not(self, newcomer: Participant):
        assert unreachable_groups(newcomer, roster_of(on_loopback("a"))) == []
