"""A restart of the lighthouse: its quorum's members go on, and come back; first the phases, then the whole machine."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from lighthouse.job.events import HeartbeatReceived, JournalOutdated, QuorumEffect, QuorumFormed, QuorumResent
from lighthouse.job.forming import QuorumMachine
from lighthouse.job.lineage import EARLIER_COUNTS_FOR_S
from lighthouse.job.log import log_quorum
from lighthouse.job.records import QuorumRecord, Verdict
from lighthouse.job.standing import Standing
from lighthouse.job.status import explain, job_status
from lighthouse_protocol.messages.membership import Quorum
from lighthouse_protocol.messages.session import QuorumOrder, QuorumPhase
from lighthouse_protocol.refusals import DuplicateReplica, Unreachable
from tests.lighthouse.builders import join, refused, ticked
from tests.lighthouse.job.test_standing import ENTRY, QUORUM_ID, holds, phase_of, quorum, says
from tests.lighthouse.sessions import (
    ANOTHER,
    asks,
    closed,
    ended,
    held,
    lose,
    may_form,
    native,
    opened,
    pulse,
    pulsing,
    record_of,
    restarted,
    standing,
    stands,
    told,
    welcomed,
)


def returning(names: str = "abc", until: float = 5.0, at_most: float | None = None, *, stands: bool = True) -> Standing:
    standing = Standing()
    standing.restore_standing(
        QuorumRecord(QUORUM_ID, quorum(names), stands, dict.fromkeys(names, ENTRY)), until, at_most
    )
    return standing


class TestPhases:
    """After a restart of the lighthouse; the ways to come back."""

    def test_stands_again_when_all_are_back_with_it(self):
        standing = returning()
        assert standing.current_order().phase is QuorumPhase.RETURNING
        assert [says(standing, name, "standing", 4) for name in "ab"] == [None, None]
        assert says(standing, "c", "standing", 5) == QuorumOrder(QUORUM_ID, QuorumPhase.STANDING)

    @pytest.mark.parametrize("odd", range(3), ids=["first", "second", "last"])
    @pytest.mark.parametrize("mode", ["recalled", "resumed", "joining"])
    def test_one_in_the_middle_of_a_recall_makes_it_a_recall_when_all_are_back(self, mode: str, odd: int):
        standing = returning()
        orders = [says(standing, name, mode if n == odd else "standing", 4) for n, name in enumerate("abc")]
        assert [phase_of(order) for order in orders] == [None, None, QuorumPhase.RECALLED]
        assert [says(standing, name, "recalled", 4) for name in "ab"] == [None, None]
        assert says(standing, "c", "recalled", 6) == QuorumOrder(QUORUM_ID, QuorumPhase.RESUMED, 6, standing.reason)

    def test_one_that_joins_past_it_makes_it_a_recall_and_has_answered_it(self):
        standing = returning("ab")
        assert standing.handle_member_join(holds("a", 6), 0.0) is None
        assert phase_of(says(standing, "b", "standing", 5)) is QuorumPhase.RECALLED
        assert standing.blocks_forming
        assert phase_of(says(standing, "b", "recalled", 5)) is QuorumPhase.RESUMED
        assert standing.upto == 5

    @pytest.mark.parametrize("number", [0, 2])
    def test_one_that_comes_back_revoked_revokes_it_at_once(self, number: int):
        standing = returning()
        for name in "abc"[:number]:
            says(standing, name, "standing")
        assert phase_of(says(standing, "c", "revoked", 4)) is QuorumPhase.REVOKED

    def test_one_that_has_discarded_its_step_revokes_it(self):
        assert phase_of(returning().handle_member_join(holds("a", 6, commit_failures=1), 0.0)) is QuorumPhase.REVOKED

    def test_who_is_not_back_within_the_lease_revokes_it(self):
        standing = returning(until=5)
        says(standing, "b", "standing")
        assert standing.end_overdue_wait(4.99) is None
        order = standing.end_overdue_wait(5)
        assert order is not None
        assert (order.phase, order.reason) == (QuorumPhase.REVOKED, "not reconnected within the lease: a, c")
        assert standing.end_overdue_wait(6) is None

    def test_while_some_still_come_back_the_others_are_waited_for(self):
        """A lighthouse on a slow host takes longer than a lease to welcome a thousand."""
        standing = returning("abcd", until=5, at_most=10)
        says(standing, "a", "standing", now=3.9)
        assert standing.returns_until() == 5, "nobody has come for a second then"
        says(standing, "b", "standing", now=4.5)
        assert (standing.end_overdue_wait(5.4), standing.returns_until()) == (None, 5.5)
        says(standing, "b", "standing", now=5.4)
        assert standing.returns_until() == 5.5, "it is back already"
        says(standing, "c", "standing", now=5.4)
        assert standing.end_overdue_wait(6.3) is None
        assert phase_of(says(standing, "d", "standing", now=6.3)) is QuorumPhase.STANDING

    def test_they_are_waited_for_a_lease_more_at_most(self):
        standing = returning("abc", until=5, at_most=10)
        says(standing, "a", "standing", now=5.9)
        assert standing.returns_until() == 6.9
        standing.postpone_waits(2)
        assert standing.returns_until() == 8.9, "nobody could come while it was paused"
        says(standing, "b", "standing", now=11.5)
        assert standing.returns_until() == 12
        assert phase_of(standing.end_overdue_wait(12)) is QuorumPhase.REVOKED

    def test_a_loss_before_it_came_back_is_none_and_afterwards_is_one(self):
        standing = returning("ab")
        assert standing.handle_member_loss("a", "i1", "x") is None
        says(standing, "a", "standing")
        assert phase_of(standing.handle_member_loss("a", "i1", "x")) is QuorumPhase.REVOKED

    def test_one_that_comes_with_another_quorum_is_not_back(self):
        standing = returning("ab")
        says(standing, "a", "standing", quorum_id=6)
        assert says(standing, "b", "standing") is None
        assert standing.phase is QuorumPhase.RETURNING

    def test_after_it_is_revoked_nothing_forms_before_all_are_heard_of(self):
        """The journal may be older than what was told: then one that is away holds a later quorum."""
        standing = returning(until=5)
        assert phase_of(says(standing, "c", "revoked", 4)) is QuorumPhase.REVOKED
        assert standing.leases_free_at([native("c")]) == 5
        assert [standing.unreported_members(now) for now in (4.9, 5)] == [["a", "b"], []]
        says(standing, "a", "standing")
        assert (may_form(standing, [native("c")], 4.9), standing.unreported_members(4.9)) == (False, ["b"])
        standing.handle_member_join(holds("b", 6), 0.0)
        assert may_form(standing, [native("c")], 4.9)
        assert not may_form(standing, [native("x")], 4.9)

    def test_a_lease_that_is_over_is_no_lease_of_a_later_quorum(self):
        standing = returning(until=5)
        says(standing, "c", "revoked", 4)
        assert [may_form(standing, [native("c")], now) for now in (4.99, 5)] == [False, True]

    def test_a_journal_that_remembers_an_id_alone_is_as_one_that_is_lost(self):
        standing = Standing()
        standing.restore_standing(QuorumRecord(QUORUM_ID), 5)
        assert (standing.phase, standing.returns_until()) == (QuorumPhase.RETURNING, 5)

    def test_a_lost_journal_holds_back_for_the_lease_and_is_forgotten(self):
        standing = Standing()
        standing.restore_standing(None, 5)
        assert standing.blocks_forming
        assert standing.returns_until() == 5
        assert standing.handle_member_join(holds("a"), 0.0) is None
        assert standing.end_overdue_wait(4.9) is None
        assert standing.blocks_forming
        assert standing.end_overdue_wait(5) is None
        assert (standing.phase, may_form(standing, [native("x")], now=5)) == (QuorumPhase.NONE, True)

    def test_what_did_not_stand_is_held_by_nobody(self):
        standing = returning(stands=False)
        assert (standing.is_unheld, standing.leases_free_at(), standing.returns_until()) == (True, 0.0, 5.0)
        assert standing.end_overdue_wait(5.0) is None
        assert standing.phase is QuorumPhase.NONE


RETURNING, STANDING = QuorumOrder(1, QuorumPhase.RETURNING), QuorumOrder(1, QuorumPhase.STANDING)
RECORD = record_of(standing("ab"))


class TestMachine:
    def test_nor_while_one_that_came_back_has_a_lease(self):
        m = restarted(RECORD, until=5)
        m.handle(opened(1, "x"), 0)
        m.handle(opened(2, "a", held=held(1)), 4.5)
        m.handle(asks(1, 1, "x"), 4.5)
        assert ticked(m, 4.5, 5.49) == []
        assert ticked(m, 5.49, 5.5) == [told("revoked", (2,), "not reconnected", "b")]
        m.handle(pulse(1), 5.5)
        lose(m, 2, 5.5)
        assert m.decision.verdict is Verdict.WAITING_FOR_LEASES
        assert ticked(m, 5.5, 9.49) == []
        assert ticked(m, 9.49, 9.5) == [stands(2, (1,), native("x"))]

    def test_nor_while_one_is_away_that_may_hold_a_later_one(self):
        """The journal is older than what was told: b is alone in quorum 2, of which a does not know."""
        m = restarted(RECORD, until=5)
        m.handle(opened(1, "a", held=held(1, "revoked")), 1)
        m.handle(asks(1, 1, "a", seen_quorum_id=1, commit_failures=1), 1)
        assert m.decision.verdict is Verdict.WAITING_FOR_LEASES
        assert "waiting for b to return after a restart, 4.0 s more at most" in explain(m, 1)
        effects = m.handle(opened(2, native("b", seen_quorum_id=2), held=held(2)), 1.5)
        assert JournalOutdated("b", 2, 1, 3.5) in effects
        assert m.decision.verdict is Verdict.WAITING_FOR_RECONNECT

    def test_one_that_stays_away_is_waited_for_until_its_lease_is_over(self):
        m = restarted(RECORD, until=5)
        m.handle(opened(1, "a", held=held(1, "revoked")), 1)
        a = native("a", seen_quorum_id=1, commit_failures=1)
        m.handle(asks(1, 1, a), 1)
        assert pulsing(m, {1: {}}, 2, 4.9) == []
        assert ticked(m, 4.9, 5) == [stands(2, (1,), a)]

    def test_one_that_has_come_back_with_it_is_not_waited_for(self):
        m = restarted(RECORD, until=5)
        m.handle(opened(2, "b", held=held(1)), 1)
        m.handle(opened(1, "a", held=held(1, "revoked")), 1)
        lose(m, 2, 1)
        a = native("a", seen_quorum_id=1, commit_failures=1)
        assert m.handle(asks(1, 1, a), 1) == [stands(2, (1,), a)]

    def test_also_both(self):
        m = restarted(RECORD)
        for session, name in enumerate("ab", start=1):
            m.handle(opened(session, name), 1)
            assert QuorumResent(RECORD.quorum, session) in m.handle(asks(session, session, name), 1)
        assert m.standing.phase is QuorumPhase.STANDING

    def test_without_a_restart_too(self):
        """Its connection broke before it was told, and was replaced at once."""
        m = standing("ab")
        m.handle(opened(7, "a"), 0.1)
        assert m.handle(asks(7, 7, "a"), 0.1) == [QuorumResent(RECORD.quorum, 7)]
        assert m.standing.phase is QuorumPhase.STANDING

    def test_and_told_that_it_is_recalled(self):
        m = standing("ab")
        m.handle(opened(3, "x"), 0.1)
        m.handle(asks(3, 3, "x"), 0.1)
        m.handle(opened(7, "a"), 0.1)
        assert m.handle(asks(7, 7, "a"), 0.1) == [QuorumResent(RECORD.quorum, 7), told("recalled", (7,))]


def steps_of(effects: Sequence[QuorumEffect]) -> list[int]:
    """The steps of the quorum that forms."""
    [formed] = [effect for effect in effects if isinstance(effect, QuorumFormed)]
    return [participant.step for participant in formed.quorum.participants]


class TestNotStanding:
    """The last quorum did not stand, because the watch of one of its ranks was not open yet: nobody has a lease."""

    RECORD = replace(record_of(standing("abc")), stands=False, entries={})

    def test_a_group_that_comes_first_does_not_form_the_next_one_alone(self):
        m = restarted(self.RECORD, until=5)
        m.handle(opened(1, "a"), 1)
        assert m.handle(asks(1, 1, "a"), 1) == []
        assert "waiting for the quorum to reconnect after a restart, 4.0 s more at most; 1 joined" in explain(m, 1)
        assert pulsing(m, {1: {}}, 1, 4.9) == []
        assert [type(effect) for effect in ticked(m, 4.9, 5.1)] == [QuorumFormed]

    def test_it_forms_as_soon_as_all_have_joined(self):
        m = restarted(self.RECORD, until=5)
        for session, name in enumerate("abc", start=1):
            m.handle(opened(session, name), 1)
            effects = m.handle(asks(session, session, name, seen_quorum_id=1), 1)
        assert [p.replica_id for p in effects[0].quorum.participants] == ["a", "b", "c"]


class TestBranch:
    """Groups that have trained for long are away. One without a state forms a quorum, and has done a step when they
    come back."""

    def trained(self) -> QuorumMachine:
        m = restarted(None, until=0)
        for session, name in enumerate("abc", start=1):
            m.handle(opened(session, name), 0)
            m.handle(asks(session, session, native(name, 70, tag_quorum_id=7, seen_quorum_id=7)), 0)
        return m

    def branch(self, m: QuorumMachine, now: float) -> None:
        a = native("a", incarnation="new")
        effects = [*m.handle(opened(11, a), now), *m.handle(asks(11, 11, a), now), *pulsing(m, {11: {}}, now, now + 15)]
        assert [effect.is_branch for effect in effects if isinstance(effect, QuorumFormed)] == [True]
        assert [p.step for p in m.job.quorum.participants] == [0]
        assert m.job.branch_id == m.job.numbering.quorum_id

    def steps_when_back(self, m: QuorumMachine, now: float, tag: int) -> list[int]:
        branch_id = m.job.numbering.quorum_id
        for session, name in ((12, "b"), (13, "c")):
            back = native(name, 71, tag_quorum_id=tag, seen_quorum_id=tag)
            m.handle(opened(session, back), now)
            m.handle(asks(session, session, back), now)
        m.handle(pulse(11, held=held(branch_id, "recalled", 0)), now)
        a = native("a", 1, "new", tag_quorum_id=branch_id, seen_quorum_id=branch_id)
        return steps_of(m.handle(asks(14, 11, a), now))

    @pytest.mark.parametrize("stands", [True, False])
    def test_after_a_restart_it_does_not_win(self, stands: bool):
        before = self.trained()
        record = before._make_record(stands)
        m = restarted(record if stands else replace(record, entries={}), until=5)
        self.branch(m, 6)
        assert self.steps_when_back(m, 21, before.job.numbering.quorum_id) == [1, 71, 71]

    def test_nor_after_its_peers_were_cut_off(self):
        m = self.trained()
        tag = m.job.numbering.quorum_id
        for session in (1, 2, 3):
            m.handle(ended(session), 1)
        ticked(m, 1, 20)
        self.branch(m, 20)
        assert self.steps_when_back(m, 35, tag) == [1, 71, 71]

    def test_nor_after_another_restart(self):
        before = self.trained()
        m = restarted(record_of(before), until=5)
        self.branch(m, 6)
        branch_id = m.job.numbering.quorum_id
        again = restarted(record_of(m), until=5)
        again.handle(opened(11, native("a", 0, "new", seen_quorum_id=branch_id), held=held(branch_id)), 1)
        assert self.steps_when_back(again, 2, before.job.numbering.quorum_id) == [1, 71, 71]

    @pytest.mark.parametrize(("later_s", "steps"), [(-1, [1, 71, 71]), (1, [1, 0, 0])])
    def test_it_is_the_job_after_ten_minutes(self, later_s: float, steps: list[int]):
        before = self.trained()
        m = restarted(record_of(before), until=5)
        self.branch(m, 6)
        assert m.job.branch_at is not None
        back_at = m.job.branch_at + EARLIER_COUNTS_FOR_S + later_s
        pulsing(m, {11: {"held": held(m.job.branch_id)}}, 21, back_at)
        assert self.steps_when_back(m, back_at, before.job.numbering.quorum_id) == steps

    def test_a_warning_says_who_may_still_win(self, caplog: pytest.LogCaptureFixture):
        log_quorum("job", Quorum(5, (native("a"),)), is_new=True, is_branch=True)
        assert "quorum 5 goes back to step 0" in caplog.text
        assert "within 10 minutes" in caplog.text

    def test_a_run_after_the_end_of_the_job_is_no_branch(self):
        before = replace(record_of(self.trained()), ended=70, absent=("b",))
        m = restarted(before, until=5)
        a = native("a", incarnation="new")
        m.handle(opened(11, a), 6)
        m.handle(asks(11, 11, a), 6)
        pulsing(m, {11: {}}, 6, 21)
        assert self.steps_when_back(m, 21, before.quorum_id) == [1, 0, 0]


class TestLostJournal:
    def test_what_is_held_is_over_and_the_wait_is_the_same(self):
        m = restarted(None, until=5, first_quorum_id=1000)
        order = m.handle(opened(1, "a", held=held(1)), 1)[0].welcome.order
        assert (order.quorum_id, order.phase) == (1, QuorumPhase.REVOKED)
        a = native("a", 3, seen_quorum_id=1, tag_quorum_id=1)
        assert m.handle(asks(1, 1, a), 1) == []
        assert m.decision.verdict is Verdict.WAITING_FOR_RECONNECT
        assert pulsing(m, {1: {}}, 1, 6) == [stands(1000, (1,), a)]

    @pytest.mark.parametrize(("knows", "steps"), [("a", [1, 70, 70]), ("bc", [1, 70, 70]), ("", [1, 0, 0])])
    def test_one_that_comes_first_and_empty_does_not_win_over_those_who_have_trained(
        self, knows: str, steps: list[int]
    ):
        """a has lost its state; it forms a quorum alone, and has done a step when the others are back. If nobody was
        told of their quorum here, they are strangers, whose checkpoint is another job's: they heal."""
        m = restarted(None, until=0, first_quorum_id=5000)
        seen = {name: 2000 if name in knows else 0 for name in "abc"}
        m.handle(opened(1, "a"), 1)
        m.handle(asks(1, 1, "a", seen_quorum_id=seen["a"]), 1)
        for session, name in enumerate("bc", start=2):
            m.handle(opened(session, name), 2)
            m.handle(asks(session, session, native(name, 70, tag_quorum_id=2000, seen_quorum_id=seen[name])), 2)
        m.handle(pulse(1, held=held(5000, "recalled", 0)), 3)
        assert steps_of(m.handle(asks(4, 1, native("a", 1, tag_quorum_id=5000, seen_quorum_id=5000)), 3)) == steps

    @pytest.mark.parametrize(("after_s", "steps"), [(1, [2, 70]), (EARLIER_COUNTS_FOR_S + 1, [2, 1])])
    def test_the_word_of_one_that_comes_late_does_not_count(self, after_s: float, steps: list[int]):
        """Nobody else can confirm that it was ever told of that quorum."""
        m = restarted(None, until=0, first_quorum_id=5000)
        m.handle(opened(1, "a"), 1)
        m.handle(asks(1, 1, "a"), 1)
        now = 1 + after_s
        m.handle(opened(1, "a", held=held(5000)), now)
        m.handle(opened(2, "b"), now)
        m.handle(asks(2, 2, native("b", 70, tag_quorum_id=2000, seen_quorum_id=2000)), now)
        m.handle(pulse(1, held=held(5000, "recalled", 2)), now)
        assert steps_of(m.handle(asks(4, 1, native("a", 2, tag_quorum_id=5000, seen_quorum_id=5000)), now)) == steps

    def test_nor_has_it_more_time_by_another_quorum(self):
        m = restarted(None, until=0, first_quorum_id=5000)
        m.handle(opened(1, "a"), 1)
        m.handle(asks(1, 1, "a"), 1)
        m.handle(opened(1, "a", held=held(5000)), 300)
        m.handle(asks(2, 1, native("a", 1, tag_quorum_id=5000, seen_quorum_id=5000, commit_failures=1)), 300)
        now = 2 + EARLIER_COUNTS_FOR_S
        m.handle(opened(1, "a", held=held(5001)), now)
        m.handle(opened(2, "b"), now)
        m.handle(asks(3, 2, native("b", 70, tag_quorum_id=2000, seen_quorum_id=2000)), now)
        m.handle(pulse(1, held=held(5001, "recalled", 2)), now)
        assert steps_of(m.handle(asks(4, 1, native("a", 2, tag_quorum_id=5001, seen_quorum_id=5001)), now)) == [2, 1]


class TestMembersAreKnown:
    """A lighthouse that has read its journal knows whom the quorum was of."""

    def test_its_members_go_before_spares(self):
        """c and d are spares, at step 0. Were they taken, the state would be lost."""
        record = record_of(standing("ab", active=2))
        m = restarted(record, active=2)
        for n, name in enumerate("cd", start=3):
            m.handle(opened(n, name), 1)
            m.handle(asks(n, n, name), 1)
        for n, name in enumerate("ab", start=1):
            m.handle(opened(n, name, held=held(1, granted=12)), 1)
        lose(m, 2, 2)
        effects = m.handle(asks(7, 1, native("a", 12, seen_quorum_id=1, tag_quorum_id=1)), 2)
        effects += pulsing(m, {1: {}, 3: {}, 4: {}}, 2, 12)
        assert [p.replica_id for p in effects[0].quorum.participants] == ["a", "c"]

    def test_the_status_names_the_quorum(self):
        m = restarted(RECORD)
        for n, name in enumerate("ab", start=1):
            m.handle(opened(n, name, held=held(1)), 1)
        status = job_status("j", m, 2)
        assert (status.quorum_id, status.verdict) == (1, "formed")
        assert [member.is_participant for member in status.members] == [True, True]


HOLDS = {"held": held(1, granted=3)}


class TestNames:
    """Members are going on, and come back: until then no other manager has their names."""

    def test_another_manager_of_that_name_is_to_ask_again_and_changes_nothing(self):
        m = restarted(record_of(standing("ab")))
        for incarnation in ("i1", "i2"):
            thief = native("a", incarnation=incarnation)
            assert m.handle(opened(1, thief, ANOTHER, **HOLDS), 1) == [closed(1, Unreachable, "ask again")]
            assert m.handle(join(5, thief), 1) == [refused(5, Unreachable, "ask again")]
        assert m.handle(HeartbeatReceived("a", "i1"), 1) == []
        m.handle(opened(2, "a", **HOLDS), 1)
        m.handle(opened(3, "b", **HOLDS), 1)
        assert m.standing.phase is QuorumPhase.STANDING

    def test_it_is_taken_when_the_quorum_has_returned_without_that_member(self):
        m = restarted(record_of(standing("ab")))
        m.handle(opened(2, "b", **HOLDS), 1)
        assert ticked(m, 1, 5) == [told("revoked", (2,), "not reconnected")]
        thief = native("a", incarnation="i2")
        assert m.handle(opened(3, thief, ANOTHER), 5)[-1] == welcomed(3)

    def test_a_member_that_has_come_back_is_known_by_its_session(self):
        m = restarted(record_of(standing("ab")))
        m.handle(opened(1, "a", **HOLDS), 1)
        assert m.handle(opened(2, "a", ANOTHER), 1) == [closed(2, DuplicateReplica, "holds a session")]

    def test_its_incarnation_stays_its_own_after_the_quorum_has_ended(self):
        m = restarted(record_of(standing("ab")))
        ticked(m, 0, 5)
        assert m.handle(opened(1, "a", ANOTHER), 6) == [closed(1, DuplicateReplica, "i1 is another manager")]
        assert m.handle(opened(2, "a"), 6)[-1] == welcomed(2)
