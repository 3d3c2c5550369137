"""All the reasons to say no; both names in the message."""

import pytest

from lighthouse.job.records import LastAssignment, QuorumConfig
from lighthouse.job.roster import Job, Roster, refusal, sent_away
from lighthouse_protocol.messages.membership import Participant, Tag
from lighthouse_protocol.messages.session import RESTARTING
from lighthouse_protocol.refusals import DuplicateReplica, InvalidRequest, LighthouseError, LimitReached, WrongState
from tests.lighthouse.builders import group, on_loopback


def roster_of(*participants: Participant) -> Roster:
    roster = Roster(Job(QuorumConfig(heartbeat_timeout_s=5)))
    for participant in participants:
        roster.admit(participant, 0)
    return roster


def why(participant: Participant, roster: Roster, **options: object) -> LighthouseError | None:
    return refusal(participant, roster, **({"max_replicas": 100, "allow_heterogeneous": False} | options))


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
    def waiting(self, participant: Participant) -> Roster:
        roster = roster_of(participant)
        roster.get(participant.replica_id).call = 1
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
        roster.get("a").last_assignment = LastAssignment(quorum_id=3, max_step=5, tag_quorum_id=2)
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
            handed = roster.get("a").last_assignment = LastAssignment(
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
        roster.get("a").is_starting = True
        assert why(group("b", group_world_size=8), roster) is None
        roster.get("a").down = RESTARTING
        assert "its own --job" in str(why(group("b", group_world_size=8), roster))
        assert why(group("b", group_world_size=8), roster, is_hello=True, is_starting=True) is None

    def test_may_differ_where_allowed_or_not_told_or_alone_or_dead(self):
        roster = roster_of(group("a", group_world_size=4))
        assert why(group("b", group_world_size=8), roster, allow_heterogeneous=True) is None
        assert why(group("b", group_world_size=0), roster) is None
        assert why(group("a", incarnation="i2", group_world_size=8), roster) is None
        roster.expire(100)
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
        assert sent_away(newcomer, roster_of(on_loopback("a")).job) == []
