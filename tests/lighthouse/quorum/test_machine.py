"""The rules of quorum/rules/machine.py and of quorum.md sections 2 and 6: events in, the whole list of effects out."""

import pytest

from lighthouse.quorum.rules.events import Withdrawn
from lighthouse.quorum.rules.numbering import LEFT_TO_ANOTHER
from lighthouse.quorum.rules.verdict import Verdict
from lighthouse_protocol.refusals import DuplicateReplica, InvalidRequest, LimitReached, Superseded, WrongState
from tests.lighthouse.builders import (
    FAR,
    beat,
    beating,
    formed,
    group,
    join,
    machine,
    on_loopback,
    refused,
    ticked,
    training,
)


class TestFirstQuorum:
    def test_one_alone_forms_at_once(self):
        m = machine(first_quorum_id=17)
        assert m.verdict() is Verdict.NO_JOINS
        assert m.handle(join(1, "a"), now=1) == [formed(17, (1,), group("a"))]
        assert m.verdict() is Verdict.FORMED

    def test_nobody_asks(self):
        m = machine()
        assert m.handle(beat("a"), now=1) == []
        assert m.tick(now=2) == []
        assert m.verdict() is Verdict.NO_JOINS

    def test_everybody_alive_has_joined(self):
        m = machine()
        for name in "abc":
            m.handle(beat(name), now=0)
        assert m.handle(join(1, "c"), now=1) == []
        assert m.handle(join(2, "a"), now=1) == []
        assert m.verdict() is Verdict.WAITING_FOR_STRAGGLERS
        assert m.stragglers() == ["b"]
        assert m.handle(join(3, "b"), now=2) == [formed(1, (2, 3, 1), *map(group, "abc"))]

    def test_participants_are_sorted_by_the_id_that_their_callers_write(self):
        m = machine()
        names = ["b", "B", "a-1", "a"]
        for name in names:
            m.handle(beat(name), now=0)
        effects = [m.handle(join(call, name), now=0) for call, name in enumerate(names)]
        assert [p.wire_id for p in effects[-1][0].quorum.participants] == ["B", "a", "a-1", "b"]

    def test_an_event_at_the_same_moment_says_nothing_twice(self):
        m = training("ab", now=1)
        assert m.tick(now=1) == []
        assert m.tick(now=1) == []


class TestMinReplicas:
    """Fewer candidates than min_replicas: no quorum, on no path."""

    def test_alone_among_nobody(self):
        m = machine(min_replicas=2)
        assert m.handle(join(1, "a"), now=0) == []
        assert m.verdict() is Verdict.TOO_FEW_PARTICIPANTS
        assert beating(m, "a", 0, 200) == []

    def test_enough_at_last(self):
        m = machine(min_replicas=2)
        m.handle(join(1, "a"), now=0)
        assert m.handle(join(2, "b"), now=3) == [formed(1, (1, 2), group("a"), group("b"))]

    def test_not_on_the_fast_path(self):
        """Everybody of the previous quorum is there, and it was smaller than this lighthouse's minimum."""
        m = training("ab", min_replicas=2)
        m.handle(join(3, "a", shrink_only=True), now=1)
        assert m.verdict() is Verdict.TOO_FEW_PARTICIPANTS
        assert m.handle(join(4, "b", step=1), now=1) == [
            formed(1, (3, 4), group("a", shrink_only=True), group("b", step=1), is_new=False)
        ]

    def test_not_by_shrinking(self):
        m = training("abc", min_replicas=2)
        assert beating(m, "a", 1, 10) == []
        for call, name in enumerate("dea", start=4):
            assert m.handle(join(call, name, shrink_only=name == "a"), now=10) == []
        assert m.verdict() is Verdict.TOO_FEW_PARTICIPANTS

    def test_not_at_the_join_timeout(self):
        m = machine(min_replicas=2)
        m.handle(beat("b"), now=0)
        m.handle(join(1, "a"), now=0)
        assert beating(m, "b", 1, 100) == []
        assert m.verdict() is Verdict.TOO_FEW_PARTICIPANTS

    def test_not_at_a_deadline(self):
        m = machine(min_replicas=2)
        m.handle(join(1, "a", deadline_at=10), now=0)
        assert beating(m, "", 0, 20) == []

    def test_too_few_do_not_make_the_others_miss_anything(self):
        m = machine(min_replicas=3)
        m.handle(beat("c"), now=0)
        for call, name in enumerate("ab", start=1):
            m.handle(join(call, name), now=0)
        beating(m, "c", 1, 100)
        assert not m.roster.get("c").has_missed

    def test_when_the_last_one_needed_comes_after_join_timeout_it_forms_at_once(self):
        m = machine(min_replicas=2)
        m.handle(beat("c"), now=0)
        m.handle(join(1, "a"), now=0)
        assert beating(m, "c", 1, 70) == []
        assert m.handle(join(2, "b"), now=70) == [formed(1, (1, 2), group("a"), group("b"))]


class TestHealing:
    def test_what_a_member_was_told_to_heal_to_is_known_until_it_comes_with_another_state(self):
        """It may catch up from there for as long as it takes."""
        m = training("ab")
        for call, step, lowest in ((3, 7, 7), (5, 9, 7)):
            m.handle(join(call, "a", step=3, tag_quorum_id=0), now=call)
            m.handle(join(call + 1, "b", step=step, tag_quorum_id=0), now=call)
            assert m.roster.get("a").last_told.lowest == lowest
        m.handle(join(7, "a", step=7, tag_quorum_id=1), now=7)
        m.handle(join(8, "b", step=11, tag_quorum_id=1), now=7)
        assert m.roster.get("a").last_told.lowest == 11


class TestFastPath:
    def test_forms_without_the_newcomer_that_only_beats(self):
        m = training("ab")
        m.handle(beat("c"), now=1)
        assert m.handle(join(3, "b", step=1), now=1) == []
        assert m.handle(join(4, "a", step=1), now=2) == [
            formed(1, (4, 3), group("a", step=1), group("b", step=1), is_new=False)
        ]

    def test_takes_along_a_newcomer_that_has_joined(self):
        m = training("ab")
        assert m.handle(join(3, "c"), now=1) == []
        assert m.verdict() is Verdict.WAITING_FOR_MEMBERS
        m.handle(join(4, "a", step=1), now=2)
        assert m.handle(join(5, "b", step=1), now=2) == [
            formed(2, (4, 5, 3), group("a", step=1), group("b", step=1), group("c"))
        ]

    def test_not_while_a_member_is_missing(self):
        m = training("abc")
        m.handle(join(4, "a", step=1), now=1)
        assert m.handle(join(5, "b", step=1), now=1) == []
        assert m.verdict() is Verdict.WAITING_FOR_STRAGGLERS

    def test_a_member_that_withdrew_is_missing_again(self):
        m = training("ab")
        m.handle(beat("c"), now=1)
        m.handle(join(3, "a"), now=1)
        m.handle(Withdrawn(3), now=1)
        assert m.handle(join(4, "b"), now=1) == []
        assert m.handle(join(5, "a"), now=2) == [formed(1, (5, 4), group("a"), group("b"), is_new=False)]


class TestStragglers:
    def test_waits_join_timeout_from_the_first_join_then_goes_without(self):
        m = training("abc", join_timeout_s=60)
        beating(m, "abc", 0, 10)
        m.handle(join(4, "a", step=1), now=10)
        beating(m, "abc", 10, 40)
        m.handle(join(5, "b", step=1), now=40)
        assert m.missed_at() == 70
        assert beating(m, "abc", 40, 69) == []
        m.handle(beat("c"), now=69.5)
        assert ticked(m, 69.5, 69.99) == []
        assert ticked(m, 69.99, 70) == [formed(2, (4, 5), group("a", step=1), group("b", step=1))]

    def test_who_missed_it_is_not_waited_for_and_not_counted_until_it_joins(self):
        m = training("abc", join_timeout_s=60)
        m.handle(join(4, "a"), now=0)
        m.handle(join(5, "b"), now=0)
        assert len(beating(m, "abc", 0, 61)) == 1
        assert m.stragglers() == ["a", "b"]
        assert m.roster.get("c").is_alive
        m.handle(join(6, "a"), now=61)
        assert m.handle(join(7, "b"), now=61) == [formed(2, (6, 7), group("a"), group("b"), is_new=False)]
        assert m.handle(join(8, "c"), now=62) == []
        m.handle(join(9, "a"), now=62)
        assert m.handle(join(10, "b"), now=62) == [formed(3, (9, 10, 8), *map(group, "abc"))]
        m.handle(join(11, "a"), now=63)
        assert m.stragglers() == ["b", "c"]

    def test_two_of_four_wait_join_timeout_and_then_form(self):
        """torchft: at half of the ids no quorum, ever."""
        m = training("abcd", join_timeout_s=60)
        m.handle(join(5, "a"), now=1)
        m.handle(join(6, "b"), now=1)
        assert beating(m, "abcd", 1, 61) == [formed(2, (5, 6), group("a"), group("b"))]

    def test_one_of_many_forms_alone_after_join_timeout(self):
        m = training("abcde", join_timeout_s=60)
        m.handle(join(6, "c"), now=1)
        assert beating(m, "abcde", 1, 62) == [formed(2, (6,), group("c"))]

    def test_a_straggler_that_lapses_is_not_waited_for(self):
        m = training("abc", heartbeat_timeout_s=5)
        m.handle(beat("c"), now=2)
        m.handle(join(4, "a"), now=3)
        m.handle(join(5, "b"), now=3)
        assert ticked(m, 3, 6.99) == []
        assert ticked(m, 6.99, 7) == [formed(2, (4, 5), group("a"), group("b"))]

    def test_an_answer_is_a_sign_of_life(self):
        m = machine(heartbeat_timeout_s=5)
        m.handle(beat("b"), now=0)
        m.handle(join(1, "a"), now=0)
        beating(m, "b", 0, 32)
        assert len(m.handle(join(2, "b"), now=32)) == 1
        ticked(m, 32, 36.9)
        assert m.roster.get("a").is_alive
        ticked(m, 36.9, 37)
        assert not m.roster.get("a").is_alive

    def test_a_straggler_that_joins_at_the_last_moment_is_in(self):
        m = training("ab", join_timeout_s=60)
        m.handle(join(3, "a"), now=0)
        beating(m, "b", 0, 59)
        assert m.handle(join(4, "b"), now=59.999) == [formed(1, (3, 4), group("a"), group("b"), is_new=False)]

    def test_nobody_waits_for_one_that_lapsed_once_came_back_and_died(self):
        m = machine(heartbeat_timeout_s=5)
        m.handle(beat("c"), now=0)
        assert ticked(m, 0, 6) == []
        m.handle(beat("c"), now=6)
        assert m.handle(join(1, "a"), now=7) == []
        assert ticked(m, 7, 11) == [formed(1, (1,), group("a"))]

    def test_a_member_of_a_long_step_is_not_a_straggler_to_a_newcomer(self):
        m = training("ab", join_timeout_s=60)
        assert m.handle(join(3, "n", deadline_at=5000), now=1) == []
        assert beating(m, "ab", 1, 1000) == []
        assert m.verdict() is Verdict.WAITING_FOR_MEMBERS
        assert m.missed_at() is None
        m.handle(join(4, "a", step=1), now=1000)
        assert m.missed_at() == 1060
        assert m.handle(join(5, "b", step=1), now=1001) == [
            formed(2, (4, 5, 3), group("a", step=1), group("b", step=1), group("n"))
        ]

    def test_a_members_new_incarnation_that_does_not_join_is_in_no_step(self):
        """It beats, and loads, or hangs: newcomers wait join_timeout for it, not for ever."""
        m = training("ab", join_timeout_s=60)
        m.handle(join(3, "n", deadline_at=FAR), now=1)
        ticked(m, 1, 4.5)
        m.handle(beat("n"), now=4.5)
        for now in range(5, 70):
            m.handle(beat("b", "i2"), now=now)
        assert m.handle(beat("b", "i2"), now=70) == []
        assert m.quorum.participants == (group("n"),)

    def test_newcomers_go_on_once_all_members_have_died(self):
        m = training("ab", heartbeat_timeout_s=5)
        m.handle(join(3, "n"), now=1)
        assert ticked(m, 1, 4.99) == []
        assert ticked(m, 4.99, 5) == [formed(2, (3,), group("n"))]

    def test_newcomers_wait_for_each_other_once_all_members_have_died(self):
        m = training("ab", join_timeout_s=60)
        assert beating(m, "o", 0, 10) == []
        m.handle(join(3, "n"), now=10)
        assert beating(m, "o", 10, 69.5) == []
        assert m.verdict() is Verdict.WAITING_FOR_STRAGGLERS
        assert ticked(m, 69.5, 70) == [formed(2, (3,), group("n"))]

    def test_a_members_join_that_was_taken_back_does_not_start_the_clock_for_a_later_newcomer(self):
        """a asks, withdraws and dies; b is in a long step. 100 s later a newcomer asks: b has missed nothing."""
        m = training("ab", join_timeout_s=60)
        m.handle(join(3, "a", step=1), now=1)
        m.handle(Withdrawn(3), now=2)
        beating(m, "b", 2, 100)
        assert m.handle(join(4, "n"), now=100) == []
        assert m.handle(beat("b"), now=100.5) == []
        assert m.verdict() is Verdict.WAITING_FOR_MEMBERS

    def test_a_short_gap_between_retries_keeps_the_clock(self):
        m = training("ab", join_timeout_s=60, heartbeat_timeout_s=5)
        beating(m, "ab", 0, 10)
        m.handle(join(3, "a"), now=10)
        beating(m, "ab", 10, 30)
        m.handle(Withdrawn(3), now=30)
        beating(m, "ab", 30, 34)
        m.handle(join(4, "a"), now=34.5)
        assert m.missed_at() == 70
        assert beating(m, "ab", 35, 71) == [formed(2, (4,), group("a"))]

    def test_a_long_gap_starts_it_anew(self):
        m = training("ab", join_timeout_s=60, heartbeat_timeout_s=5)
        beating(m, "ab", 0, 10)
        m.handle(join(3, "a"), now=10)
        m.handle(Withdrawn(3), now=11)
        beating(m, "ab", 11, 17)
        m.handle(join(4, "a"), now=16.5)
        assert m.missed_at() == 76.5

    def test_who_was_left_out_begins_to_wait_anew(self):
        m = training("ab", active=2, join_timeout_s=60)
        m.handle(join(3, "c"), now=1)
        beating(m, "abd", 1, 50)
        m.handle(join(4, "a"), now=50)
        assert m.handle(join(5, "b"), now=50) == [formed(1, (4, 5), group("a"), group("b"), is_new=False)]
        assert beating(m, "d", 50, 58) == []
        assert m.verdict() is Verdict.WAITING_FOR_STRAGGLERS, "a and b have died"
        assert m.missed_at() == 110


class TestDeadlines:
    """One straggler must not let everybody's call expire."""

    def test_forms_before_the_first_deadline_with_a_majority(self):
        m = training("abc", join_timeout_s=60)
        m.handle(join(4, "a", deadline_at=31), now=1)
        m.handle(join(5, "b", deadline_at=40), now=1)
        assert beating(m, "abc", 1, 29.5) == []
        assert ticked(m, 29.5, 29.99) == []
        assert ticked(m, 29.99, 30) == [formed(2, (4, 5), group("a"), group("b"))]

    def test_the_straggler_of_an_early_quorum_has_missed_nothing(self):
        m = training("abc")
        m.handle(join(4, "a", deadline_at=11), now=1)
        m.handle(join(5, "b", deadline_at=11), now=1)
        beating(m, "c", 1, 11)
        assert not m.roster.get("c").has_missed
        m.handle(join(6, "a"), now=11)
        assert m.handle(join(7, "b"), now=11) == [formed(2, (6, 7), group("a"), group("b"), is_new=False)]

    @pytest.mark.parametrize("alive", ["abcd", "abcde"])
    def test_half_is_no_majority(self, alive: str):
        m = training(alive)
        m.handle(join(8, "a", deadline_at=10), now=1)
        m.handle(join(9, "b", deadline_at=10), now=1)
        assert beating(m, alive, 1, 30) == []

    def test_a_majority_that_comes_after_the_first_deadline_forms_at_once(self):
        m = training("abcde")
        m.handle(join(8, "a", deadline_at=10), now=1)
        m.handle(join(9, "b", deadline_at=10), now=1)
        beating(m, "abcde", 1, 9.5)
        assert m.handle(join(10, "c"), now=9.5) == [formed(2, (8, 9, 10), *map(group, "abc"))]

    def test_deaths_make_a_majority(self):
        m = training("abcd", heartbeat_timeout_s=5)
        m.handle(beat("c"), now=4)
        m.handle(join(8, "a", deadline_at=5), now=1)
        m.handle(join(9, "b", deadline_at=6), now=1)
        assert ticked(m, 4, 4.99) == []
        assert ticked(m, 4.99, 5) == [formed(2, (8, 9), group("a"), group("b"))]

    def test_the_deadline_of_a_withdrawn_call_does_not_count(self):
        m = training("abc")
        m.handle(join(4, "a", deadline_at=11), now=1)
        m.handle(join(5, "b", deadline_at=40), now=1)
        m.handle(Withdrawn(4), now=2)
        m.handle(join(6, "a", deadline_at=50), now=3)
        assert beating(m, "c", 3, 38.5) == []
        assert beating(m, "c", 38.5, 40) == [formed(2, (6, 5), group("a"), group("b"))]

    def test_a_newcomers_deadline_alone_does_not_leave_the_members_out(self):
        m = training("a")
        m.handle(join(2, "n", deadline_at=10), now=1)
        m.handle(join(3, "o", deadline_at=10), now=1)
        assert beating(m, "a", 1, 30) == []

    def test_a_newcomers_deadline_counts_once_a_member_waits(self):
        m = training("ab")
        m.handle(join(3, "n", deadline_at=10), now=1)
        m.handle(join(4, "a"), now=2)
        assert beating(m, "b", 2, 10) == [formed(2, (4, 3), group("a"), group("n"))]

    def test_a_deadline_within_the_margin_forms_at_once_with_a_majority(self):
        m = training("abc")
        m.handle(join(4, "a"), now=1)
        assert m.handle(join(5, "b", deadline_at=1.5), now=1) == [formed(2, (4, 5), group("a"), group("b"))]

    def test_the_margin_is_configured(self):
        m = training("abc", deadline_margin_s=4)
        m.handle(join(4, "a", deadline_at=10), now=1)
        m.handle(join(5, "b", deadline_at=10), now=1)
        m.handle(beat("c"), now=4)
        assert ticked(m, 4, 5.99) == []
        assert len(ticked(m, 5.99, 6)) == 1


class TestWithdrawn:
    def test_is_not_a_candidate_any_more(self):
        m = machine(min_replicas=2)
        m.handle(join(1, "a"), now=0)
        assert m.handle(Withdrawn(1), now=1) == []
        assert m.handle(join(2, "b"), now=1) == []
        assert m.verdict() is Verdict.TOO_FEW_PARTICIPANTS

    def test_is_waited_for_while_it_is_alive(self):
        m = machine()
        m.handle(beat("b"), now=0)
        m.handle(join(1, "a"), now=0)
        m.handle(Withdrawn(1), now=1)
        assert m.handle(join(2, "b"), now=1) == []
        assert m.stragglers() == ["a"]

    def test_an_answered_or_unknown_call_changes_nothing(self):
        m = training("ab")
        before = m.joins.members.started_at, len(m.joins), m.verdict()
        assert m.handle(Withdrawn(1), now=1) == []
        assert m.handle(Withdrawn(99), now=1) == []
        assert (m.joins.members.started_at, len(m.joins), m.verdict()) == before

    def test_the_end_of_a_superseded_call_does_not_touch_the_newer_one(self):
        m = machine(min_replicas=2)
        m.handle(join(1, "a"), now=0)
        assert m.handle(join(2, "a"), now=1) == [refused(1, Superseded, "a", "asked again")]
        assert m.handle(Withdrawn(1), now=1) == []
        assert m.handle(join(3, "b"), now=2) == [formed(1, (2, 3), group("a"), group("b"))]


class TestAskingAgain:
    def test_the_newer_call_takes_the_place_of_the_older(self):
        m = machine(min_replicas=2)
        m.handle(join(1, "a", step=3), now=0)
        m.handle(join(2, "a", step=4), now=1)
        assert m.handle(join(3, "b"), now=1) == [formed(1, (2, 3), group("a", step=4), group("b"))]

    def test_and_can_complete_the_quorum(self):
        """The answer to the newer call follows the refusal of the older one."""
        m = training("ab", min_replicas=1)
        m.handle(beat("b"), now=2)
        m.handle(join(3, "a", deadline_at=30), now=2)
        assert m.handle(join(4, "a", deadline_at=30), now=3) == [refused(3, Superseded)]
        assert m.handle(join(5, "b"), now=3) == [formed(1, (4, 5), group("a"), group("b"), is_new=False)]

    def test_another_incarnation_while_the_call_waits_is_a_duplicate(self):
        m = machine(min_replicas=2)
        m.handle(join(1, "a", incarnation="i1"), now=0)
        other = group("a", incarnation="i2", address="elsewhere.example:1")
        assert m.handle(join(2, other), now=1) == [
            refused(2, DuplicateReplica, "replica_id", "a.example:29512", "elsewhere.example:1")
        ]
        assert m.handle(join(3, "b"), now=1) == [formed(1, (1, 3), group("a"), group("b"))]

    def test_without_incarnations_another_address_is_a_duplicate(self):
        m = machine(min_replicas=2)
        m.handle(join(1, "a", incarnation=""), now=0)
        m.handle(join(2, "a", incarnation="", address="elsewhere.example:1"), now=1)
        assert m.joins._calls.keys() == {1}
        assert m.handle(join(3, "a", incarnation=""), now=1) == [refused(1, Superseded)]

    def test_another_incarnation_replaces_one_whose_call_has_ended(self):
        m = training("ab")
        m.handle(join(3, "a", incarnation="i2"), now=1)
        assert m.handle(join(4, "b", step=1), now=1) == [
            formed(2, (3, 4), group("a", incarnation="i2"), group("b", step=1))
        ]

    def test_the_step_of_an_incarnation_does_not_go_back(self):
        m = machine(min_replicas=2)
        m.handle(join(1, "a", step=7), now=0)
        m.handle(Withdrawn(1), now=1)
        assert m.handle(join(2, "a", step=6), now=1) == [refused(2, InvalidRequest, "step:", "a", "7", "6")]
        assert m.handle(join(3, "b"), now=1) == []

    def test_a_caller_without_incarnation_whose_step_goes_back_is_a_new_one(self):
        m = machine()
        m.handle(join(1, "a", incarnation="", step=7), now=0)
        birth = m.roster.get("a").birth
        assert m.handle(join(2, "a", incarnation="", step=0), now=1) == [
            formed(2, (2,), group("a", incarnation="", step=0))
        ]
        assert m.roster.get("a").birth > birth


class TestShrinkOnly:
    def test_admits_no_newcomer(self):
        m = training("abc")
        m.handle(join(4, "d"), now=1)
        m.handle(join(5, "a", shrink_only=True), now=1)
        m.handle(join(6, "b"), now=1)
        assert m.handle(join(7, "c"), now=1) == [
            formed(1, (5, 6, 7), group("a", shrink_only=True), group("b"), group("c"), is_new=False)
        ]
        assert len(m.joins) == 1

    def test_loses_those_who_died(self):
        m = training("abc")
        m.handle(join(4, "d"), now=4)
        m.handle(join(5, "a", shrink_only=True), now=4)
        m.handle(join(6, "b"), now=4)
        assert ticked(m, 4, 5) == [formed(2, (5, 6), group("a", shrink_only=True), group("b"))]

    def test_counts_from_a_member_only(self):
        m = training("ab")
        m.handle(join(3, "c", shrink_only=True), now=1)
        m.handle(join(4, "a"), now=1)
        assert m.handle(join(5, "b"), now=1) == [
            formed(2, (4, 5, 3), group("a"), group("b"), group("c", shrink_only=True))
        ]

    def test_a_members_new_incarnation_is_a_newcomer(self):
        m = training("ab")
        m.handle(join(3, "b", incarnation="i2"), now=1)
        assert m.handle(join(4, "a", shrink_only=True), now=1) == [formed(2, (4,), group("a", shrink_only=True))]
        assert [member.replica_id for member in m.joins] == ["b"]

    def test_without_a_previous_quorum_means_nothing(self):
        m = machine()
        m.handle(beat("b"), now=0)
        m.handle(join(1, "a", shrink_only=True), now=0)
        assert m.handle(join(2, "b", shrink_only=True), now=0) == [
            formed(1, (1, 2), group("a", shrink_only=True), group("b", shrink_only=True))
        ]

    def test_by_a_withdrawn_call_means_nothing(self):
        m = training("ab")
        m.handle(join(3, "a", shrink_only=True), now=1)
        m.handle(join(4, "c"), now=1)
        m.handle(Withdrawn(3), now=1)
        m.handle(join(5, "a"), now=1)
        assert m.handle(join(6, "b"), now=1) == [formed(2, (5, 6, 4), *map(group, "abc"))]


class TestSizes:
    def test_only_allowed_sizes(self):
        m = machine(allowed_sizes=frozenset({2, 4}))
        for name in "abc":
            m.handle(beat(name), now=0)
        m.handle(join(1, "a"), now=0)
        m.handle(join(2, "b"), now=0)
        assert m.handle(join(3, "c"), now=0) == [formed(1, (1, 2), group("a"), group("b"))]
        assert [member.replica_id for member in m.joins] == ["c"]

    def test_too_few_for_the_smallest_size(self):
        m = machine(allowed_sizes=frozenset({2, 4}))
        assert m.handle(join(1, "a"), now=0) == []
        assert m.verdict() is Verdict.NO_ALLOWED_SIZE
        assert beating(m, "a", 0, 100) == []

    def test_an_allowed_size_below_min_replicas_is_none(self):
        m = machine(allowed_sizes=frozenset({1, 4}), min_replicas=2)
        m.handle(join(1, "a"), now=0)
        assert m.handle(join(2, "b"), now=0) == []
        assert m.verdict() is Verdict.NO_ALLOWED_SIZE

    def test_a_death_shrinks_to_the_next_size(self):
        m = training("abcd", allowed_sizes=frozenset({2, 4}))
        for call, name in enumerate("bcd", start=5):
            m.handle(join(call, name, step=1), now=3)
        assert ticked(m, 3, 5) == [formed(2, (5, 6), group("b", step=1), group("c", step=1))]
        assert [member.replica_id for member in m.joins] == ["d"]

    def test_the_rest_waits_as_spares(self):
        m = training("ab", active=2)
        m.handle(join(3, "c"), now=1)
        for call in (10, 20, 30):
            m.handle(join(call + 1, "a"), now=call / 10)
            assert m.handle(join(call + 2, "b"), now=call / 10) == [
                formed(1, (call + 1, call + 2), group("a"), group("b"), is_new=False)
            ]
        assert [member.replica_id for member in m.joins] == ["c"]

    def test_a_spare_steps_in_for_a_death(self):
        m = training("ab", active=2)
        m.handle(join(3, "c"), now=1)
        m.handle(join(4, "b", step=1), now=4)
        assert ticked(m, 4, 5) == [formed(2, (4, 3), group("b", step=1), group("c"))]

    def test_the_spare_that_waits_longest_comes_first(self):
        m = training("ab", active=2)
        for call, name in enumerate("edc", start=3):
            m.handle(join(call, name), now=1)
        m.handle(join(6, "a", step=1), now=4)
        assert ticked(m, 4, 5) == [formed(2, (6, 3), group("a", step=1), group("e"))]


class TestQuorumId:
    def test_stays_from_step_to_step(self):
        m = training("ab")
        for step in range(1, 5):
            m.handle(join(2 * step + 1, "a", step=step), now=step)
            assert m.handle(join(2 * step + 2, "b", step=step), now=step) == [
                formed(1, (2 * step + 1, 2 * step + 2), group("a", step), group("b", step), is_new=False)
            ]
        assert (m.current.rounds, m.current.changes, m.current.formed_at) == (5, 1, 0)

    @pytest.mark.parametrize("change", ["commit_failures", "address", "store_address", "incarnation"])
    def test_moves_when_a_member_is_another_or_failed(self, change: str):
        value = 1 if change == "commit_failures" else "new.example:1"
        m = training("ab")
        m.handle(join(3, "a", **{change: value}), now=1)
        assert m.handle(join(4, "b"), now=1) == [formed(2, (3, 4), group("a", **{change: value}), group("b"))]

    @pytest.mark.parametrize("change", [{"data": "x"}, {"step": 9}, {"init": 0}, {"ranks_disagree": True}])
    def test_stays_otherwise(self, change: dict):
        change.pop("init", None)
        m = training("ab")
        m.handle(join(3, "a", **change), now=1)
        [effect] = m.handle(join(4, "b"), now=1)
        assert (effect.quorum.quorum_id, effect.is_new) == (1, False)

    def test_moves_at_every_repeated_failure(self):
        m = training("ab")
        for n in (1, 2, 3):
            m.handle(join(2 * n + 1, "a", commit_failures=n), now=n)
            [effect] = m.handle(join(2 * n + 2, "b"), now=n)
            assert (effect.quorum.quorum_id, effect.is_new) == (n + 1, True)

    def test_moves_when_a_member_leaves_and_when_it_comes_back(self):
        m = training("ab")
        m.handle(join(3, "a"), now=4)
        assert ticked(m, 4, 5) == [formed(2, (3,), group("a"))]
        m.handle(join(4, "b"), now=6)
        assert m.handle(join(5, "a"), now=6) == [formed(3, (5, 4), group("a"), group("b"))]

    def test_moves_when_a_member_without_incarnation_lost_its_state(self):
        m = machine()
        m.handle(join(1, "a", incarnation="", step=5), now=0)
        assert m.handle(join(2, "a", incarnation="", step=0), now=1) == [formed(2, (2,), group("a", 0, ""))]

    def test_moves_when_a_forgotten_member_returns_just_as_it_was(self):
        m = training("a")
        ticked(m, 0, 100)
        assert m.is_quiet(100)
        assert m.handle(join(2, "a"), now=100) == [formed(2, (2,), group("a"))]

    @pytest.mark.parametrize("field", ["seen_quorum_id", "tag_quorum_id"])
    def test_is_above_what_any_member_was_ever_told(self, field: str):
        m = machine(first_quorum_id=5)
        first = 40 + LEFT_TO_ANOTHER
        assert m.handle(join(1, "a", **{field: 40}), now=0)[0].quorum.quorum_id == first
        assert m.handle(join(2, "a", seen_quorum_id=first), now=1) == [
            formed(first, (2,), group("a", seen_quorum_id=first), is_new=False)
        ]
        assert m.handle(join(3, "a", **{field: 5000}), now=2)[0].quorum.quorum_id == 5000 + LEFT_TO_ANOTHER

    def test_a_lower_claim_changes_nothing(self):
        m = machine(first_quorum_id=5)
        assert m.handle(join(1, "a", seen_quorum_id=4), now=0)[0].quorum.quorum_id == 5

    def test_thirty_deaths_are_one_change(self):
        names = [f"g{n:02}" for n in range(40)]
        m = machine()
        for name in names:
            m.handle(beat(name), now=0)
        for call, name in enumerate(names):
            m.handle(join(call, name), now=0)
        for call, name in enumerate(names[30:], start=100):
            m.handle(join(call, name, step=1), now=1)
        [effect] = ticked(m, 1, 50)
        assert (effect.quorum.quorum_id, len(effect.quorum.participants)) == (2, 10)


class TestEdges:
    def test_a_refused_join_changes_nothing(self):
        m = training("ab", max_replicas=2)
        before = m.deadline(1), len(m.roster), m.verdict()
        assert m.handle(join(3, "c"), now=1) == [refused(3, LimitReached, "replica_id", "c", "2", "--max-members")]
        assert (m.deadline(1), len(m.roster), m.verdict()) == before
        assert m.handle(Withdrawn(3), now=1) == []

    def test_heartbeats_of_new_ids_beyond_the_limit_are_not_remembered(self):
        m = machine(max_replicas=2)
        for n in range(100):
            m.handle(beat(f"g{n}"), now=0)
        assert len(m.roster) == 2

    def test_heartbeats_of_known_ids_count_at_the_limit_too(self):
        m = machine(max_replicas=2, heartbeat_timeout_s=5)
        for now in range(20):
            for name in "ab":
                m.handle(beat(name), now)
        assert m.roster.healthy == {"a", "b"}

    def test_a_misfit_is_refused_with_both_groups_and_sizes(self):
        m = machine()
        m.handle(join(1, "a", group_world_size=4), now=0)
        assert m.handle(join(2, "b", group_world_size=8), now=1) == [
            refused(2, WrongState, "world_size", "b has 8", "a has 4", "--allow-heterogeneous")
        ]

    def test_a_misfit_is_admitted_where_that_is_allowed(self):
        m = machine(allow_heterogeneous=True)
        m.handle(beat("b"), now=0)
        m.handle(join(1, "a", group_world_size=4), now=0)
        b = group("b", group_world_size=8)
        assert m.handle(join(2, b), now=0) == [formed(1, (1, 2), group("a", group_world_size=4), b)]

    def test_a_group_may_come_back_with_another_size_once_it_is_alone(self):
        m = machine()
        m.handle(join(1, "a", group_world_size=4), now=0)
        b = group("a", incarnation="i2", group_world_size=8)
        assert m.handle(join(2, b), now=1) == [formed(2, (2,), b)]

    def test_loopback_beside_a_routable_one_is_refused(self):
        m = machine(min_replicas=2)
        m.handle(join(1, "a"), now=0)
        assert m.handle(join(2, on_loopback("b")), now=1) == [
            refused(2, WrongState, "b advertises a loopback (127.0.0.1:29512)", "a (a.example:29512)", "--advertise")
        ]

    def test_loopback_that_came_first_is_sent_away(self):
        m = machine(min_replicas=3)
        m.handle(join(1, on_loopback("a")), now=0)
        m.handle(join(2, on_loopback("b")), now=0)
        assert m.handle(join(3, "c"), now=1) == [
            refused(1, WrongState, "a advertises a loopback (127.0.0.1:29512)", "c (c.example:29512)", "--advertise"),
            refused(2, WrongState, "b advertises a loopback (127.0.0.1:29512)", "c (c.example:29512)", "--advertise"),
        ]
        assert [member.replica_id for member in m.roster] == ["c"]

    def test_a_participant_on_a_loopback_is_sent_away_though_no_call_of_it_waits(self):
        m = machine()
        m.handle(join(1, on_loopback("a")), now=0)
        assert m.handle(join(2, "b"), now=1) == [formed(2, (2,), group("b"))]
        assert m.handle(join(3, on_loopback("a", step=1)), now=2) == [refused(3, WrongState, "a", "b")]

    def test_all_on_loopback_is_fine(self):
        m = machine()
        m.handle(beat("b"), now=0)
        m.handle(join(1, on_loopback("a")), now=0)
        assert m.handle(join(2, on_loopback("b")), now=0) == [formed(1, (1, 2), on_loopback("a"), on_loopback("b"))]

    def test_one_that_ran_ahead_is_up_to_date_and_one_that_diverged_heals(self):
        m = training("abc")
        m.handle(join(4, "a", step=5, tag_quorum_id=1), now=1)
        m.handle(join(5, "b", step=5, tag_quorum_id=9), now=1)
        [effect] = m.handle(join(6, "c", step=5, tag_quorum_id=1), now=1)
        assert [p.step for p in effect.quorum.participants] == [5, 4, 5]


class TestDeadline:
    """The moment when tick is to be called: always after now."""

    def test_none_without_members(self):
        assert machine().deadline(0) is None

    def test_the_next_lapse(self):
        m = machine(heartbeat_timeout_s=5)
        m.handle(beat("a"), now=3)
        assert m.deadline(3) == 8

    def test_the_join_timeout_and_the_cut(self):
        m = training("abc", heartbeat_timeout_s=100)
        m.handle(join(4, "a", deadline_at=FAR), now=1)
        assert m.deadline(1) == 61
        m.handle(join(5, "b", deadline_at=20), now=1)
        assert m.deadline(1) == 19

    def test_no_join_timeout_where_there_is_nobody_to_miss_it(self):
        m = machine(min_replicas=2, heartbeat_timeout_s=100)
        m.handle(join(1, "a", deadline_at=20), now=0)
        assert m.deadline(0) == 100

    def test_no_cut_without_a_majority(self):
        m = training("abc", heartbeat_timeout_s=100)
        m.handle(join(4, "a", deadline_at=20), now=1)
        assert m.deadline(1) == 61
