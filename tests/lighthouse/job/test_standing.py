"""The standing quorum's phases, one by one: what its members say, and what follows."""

from dataclasses import replace

import pytest

from lighthouse.job.records import JoinState, Lease, QuorumRecord
from lighthouse.job.standing import Standing, entry_of
from lighthouse_protocol.messages.membership import Participant, Quorum
from lighthouse_protocol.messages.session import QuorumOrder, QuorumPhase
from tests.lighthouse.sessions import held, may_form, native

QUORUM_ID = 7
ENTRY = JoinState(step=3, tag_quorum_id=5, commit_failures=0)


def member(name: str, **fields: object) -> Participant:
    return native(name, 3, **({"tag_quorum_id": 5} | fields))


def holds(name: str, step: int = 6, **fields: object) -> Participant:
    """A member that was handed the quorum asks for the next one."""
    return native(name, step, **({"tag_quorum_id": QUORUM_ID, "seen_quorum_id": QUORUM_ID} | fields))


def quorum(names: str = "abc", **fields: object) -> Quorum:
    return Quorum(QUORUM_ID, tuple(member(name, **fields) for name in names))


def formed(names: str = "abc", lease_until: float = 5.0, **fields: object) -> Standing:
    standing = Standing()
    standing.begin_standing(quorum(names, **fields), {name: Lease("i1", lease_until, ENTRY) for name in names})
    return standing


def unsettled(phase: QuorumPhase) -> Standing:
    """In RETURNING, or else formed and standing."""
    standing = formed()
    if phase is QuorumPhase.RETURNING:
        standing.restore_standing(QuorumRecord(QUORUM_ID, quorum(), True, dict.fromkeys("abc", ENTRY)), until=5)
    return standing


def says(
    standing: Standing, name: str, mode: str, granted: int = 0, quorum_id: int = QUORUM_ID, now: float = 0.0
) -> QuorumOrder | None:
    return standing.handle_held_quorum(name, "i1", held(quorum_id, mode, granted), now)


def phase_of(order: QuorumOrder | None) -> QuorumPhase | None:
    if order is not None:
        assert order.quorum_id == QUORUM_ID
    return order.phase if order is not None else None


class TestRecall:
    def test_who_still_grants_has_not_answered(self):
        standing = formed("ab")
        standing.recall_quorum("x")
        says(standing, "a", "recalled", 8)
        assert says(standing, "b", "standing", 8) is None
        assert says(standing, "b", "resumed", 8) is None
        assert standing.phase is QuorumPhase.RECALLED
        assert phase_of(says(standing, "b", "recalled", 9)) is QuorumPhase.RESUMED

    def test_a_join_says_it_too(self):
        standing = formed("ab")
        assert phase_of(standing.handle_member_join(holds("a", 6), 0.0)) is QuorumPhase.RECALLED
        assert says(standing, "b", "recalled", 5) == QuorumOrder(
            QUORUM_ID, QuorumPhase.RESUMED, 5, "a asks for a quorum"
        )

    @pytest.mark.parametrize("is_last", [True, False])
    def test_one_who_joined_below_the_highest_cannot_do_that_step_any_more(self, is_last: bool):
        standing = formed("ab")
        standing.recall_quorum("x")
        if is_last:
            says(standing, "b", "recalled", 6)
            order = standing.handle_member_join(holds("a", 6), 0.0)
        else:
            standing.handle_member_join(holds("a", 6), 0.0)
            order = says(standing, "b", "recalled", 6)
        assert order is not None
        assert (order.phase, "a cannot do step 6" in order.reason) == (QuorumPhase.REVOKED, True)

    def test_who_grants_no_more_stays_so(self):
        standing = formed("ab")
        standing.recall_quorum("x")
        for mode in ("joining", "recalled"):
            assert says(standing, "a", mode, 5) is None
        assert phase_of(says(standing, "b", "recalled", 6)) is QuorumPhase.REVOKED

    @pytest.mark.parametrize("mode", ["recalled", "resumed", "joining"])
    def test_a_member_that_has_stopped_granting_is_a_recall(self, mode: str):
        """Levels, not edges: whatever brought it there, the others must not wait for it."""
        standing = formed()
        assert phase_of(says(standing, "a", mode, 5)) is QuorumPhase.RECALLED

    def test_is_said_once(self):
        standing = formed()
        standing.recall_quorum("x")
        assert standing.recall_quorum("y") is None
        for name in "abc":
            says(standing, name, "recalled", 3)
        assert standing.recall_quorum("y") is None
        assert standing.revoke_quorum("z") is not None
        assert standing.recall_quorum("y") is None

    def test_of_another_quorum_says_nothing_about_this_one(self):
        standing = formed("a")
        standing.recall_quorum("x")
        assert says(standing, "a", "recalled", 5, quorum_id=6) is None
        assert says(standing, "a", "revoked", 5, quorum_id=6) is None
        assert standing.handle_held_quorum("a", "i1", None, 0.0) is None
        assert standing.handle_held_quorum("a", "i2", held(QUORUM_ID, "revoked"), 0.0) is None
        assert standing.handle_held_quorum("x", "i1", held(QUORUM_ID, "revoked"), 0.0) is None
        assert standing.phase is QuorumPhase.RECALLED


class TestCatchingUp:
    """A member that works at another step than it holds."""

    def wants(self, standing: Standing, quorum_id: int = QUORUM_ID) -> QuorumOrder | None:
        return standing.handle_held_quorum("a", "i1", replace(held(quorum_id, granted=6), wants_next=True), 0.0)

    def test_one_that_has_got_there_is_a_recall(self):
        standing = formed()
        assert phase_of(self.wants(standing)) is QuorumPhase.RECALLED
        assert "a has caught up" in standing.reason
        assert self.wants(standing) is None, "once"
        assert (standing.recalls, standing.revokes) == (1, 0)

    def test_it_comes_back_with_it_to_a_lighthouse_that_has_restarted(self):
        standing = unsettled(QuorumPhase.RETURNING)
        self.wants(standing)
        for name in "bc":
            says(standing, name, "standing", 6)
        assert standing.phase is QuorumPhase.STANDING
        assert phase_of(self.wants(standing)) is QuorumPhase.RECALLED

    def test_its_join_counts_by_the_step_that_it_works_at(self):
        standing = formed("ab")
        assert phase_of(standing.handle_member_join(holds("a", 2, works_at=6), 0.0)) is QuorumPhase.RECALLED
        assert says(standing, "b", "recalled", 5) == QuorumOrder(QUORUM_ID, QuorumPhase.RESUMED, 5, standing.reason)
        assert standing.handle_member_join(holds("a", 2, works_at=6), 0.0) is None
        assert phase_of(standing.handle_member_join(holds("a", 2, works_at=5), 0.0)) is QuorumPhase.REVOKED


class TestRevoke:
    @pytest.mark.parametrize("before", ["standing", "recalled", "resumed"])
    @pytest.mark.parametrize("why", ["lost", "given up", "failed"])
    def test_in_every_phase(self, before: str, why: str):
        standing = formed()
        if before != "standing":
            standing.recall_quorum("x")
        if before == "resumed":
            for name in "abc":
                says(standing, name, "recalled", 5)
        assert standing.phase == before
        match why:
            case "lost":
                order = standing.handle_member_loss("a", "i1", "its connection was lost")
            case "given up":
                order = says(standing, "a", "revoked", 5)
            case _:
                order = standing.handle_member_join(holds("a", 6, commit_failures=1), 0.0)
        assert order is not None
        assert (order.phase, order.reason[0]) == (QuorumPhase.REVOKED, "a")
        assert not standing.blocks_forming

    def test_a_join_at_or_below_the_last_step(self):
        standing = formed("ab")
        standing.recall_quorum("x")
        for name in "ab":
            says(standing, name, "recalled", 5)
        assert standing.handle_member_join(holds("a", 6), 0.0) is None
        assert phase_of(standing.handle_member_join(holds("b", 5), 0.0)) is QuorumPhase.REVOKED

    def test_a_member_that_has_lost_it(self):
        """It does not know the quorum and does not come with the join that it was formed from."""
        standing = formed()
        assert phase_of(standing.handle_member_join(native("a", 4, tag_quorum_id=5), 0.0)) is QuorumPhase.REVOKED

    def test_the_loss_of_another_incarnation_or_of_a_stranger_is_nothing(self):
        standing = formed()
        assert standing.handle_member_loss("a", "i2", "x") is None
        assert standing.handle_member_loss("x", "i1", "x") is None
        assert standing.phase is QuorumPhase.STANDING

    def test_is_said_once_and_stays(self):
        standing = formed()
        assert standing.handle_member_loss("a", "i1", "first") is not None
        assert standing.handle_member_loss("b", "i1", "x") is None
        assert standing.revoke_quorum("x") is None
        assert standing.handle_member_join(holds("b", 6, commit_failures=1), 0.0) is None
        assert says(standing, "b", "recalled", 5) is None
        assert standing.current_order() == QuorumOrder(QUORUM_ID, QuorumPhase.REVOKED, reason="a: first", lost="a")

    def test_names_the_group_also_where_its_peers_gave_up_before(self):
        """Their collectives end with its connections, and what they say may come first."""
        standing = formed()
        order = says(standing, "b", "revoked", 5)
        assert order == QuorumOrder(QUORUM_ID, QuorumPhase.REVOKED, reason="b left it")
        assert standing.handle_member_loss("a", "i1", "ended") == QuorumOrder(
            QUORUM_ID, QuorumPhase.REVOKED, reason="a: ended", lost="a"
        )
        assert standing.handle_member_loss("c", "i1", "later") is None

    def test_of_the_next_quorum_names_nobody_that_was_lost_before(self):
        standing = formed()
        standing.handle_member_loss("a", "i1", "ended")
        standing.begin_standing(quorum(), {name: Lease("i1", 5.0, ENTRY) for name in "abc"})
        order = says(standing, "b", "revoked", 5)
        assert order == QuorumOrder(QUORUM_ID, QuorumPhase.REVOKED, reason="b left it")

    def test_a_leave_after_the_resume_is_none(self):
        standing = formed("ab")
        standing.recall_quorum("b drains")
        for name in "ab":
            says(standing, name, "recalled", 5)
        assert standing.handle_member_leave("b", "i1") is None
        assert standing.phase is QuorumPhase.RESUMED

    @pytest.mark.parametrize("before", ["standing", "recalled"])
    def test_a_leave_before_the_resume_is_one(self, before: str):
        standing = formed("ab")
        if before == "recalled":
            standing.recall_quorum("b drains")
        assert phase_of(standing.handle_member_leave("b", "i1")) is QuorumPhase.REVOKED


class TestLeaving:
    """A member's script ends with the step that it has committed."""

    def test_one_that_has_done_it_and_asks_for_nothing_is_not_waited_for(self):
        """It writes its model down, say."""
        standing = formed("ab")
        says(standing, "b", "leaving", 5)
        says(standing, "a", "recalled", 5)
        assert standing.members_at_work == ["a"]
        assert phase_of(says(standing, "a", "joining", 5)) is QuorumPhase.REVOKED
        assert standing.members_at_work == []

    def test_all_that_were_granted_a_later_step_are_ended_at_once(self):
        standing = formed()
        says(standing, "c", "leaving", 5)
        says(standing, "a", "recalled", 6)
        order = says(standing, "b", "recalled", 6)
        assert order is not None
        assert (order.phase, order.lost) == (QuorumPhase.REVOKED, "c")

    @pytest.mark.parametrize("before", ["standing", "recalled", "resumed"])
    @pytest.mark.parametrize("how", ["lose", "left"])
    def test_what_becomes_of_it_then_is_nothing_to_the_quorum(self, before: str, how: str):
        standing = formed()
        says(standing, "c", "leaving", 5)
        if before == "resumed":
            says(standing, "a", "recalled", 5)
            says(standing, "b", "recalled", 5)
        assert standing.quorum_lost_with("c", "i1") is None
        order = (
            standing.handle_member_loss("c", "i1", "its connection was lost")
            if how == "lose"
            else standing.handle_member_leave("c", "i1")
        )
        assert order is None
        for name in "ab":
            says(standing, name, "recalled", 5)
        assert standing.phase is QuorumPhase.RESUMED

    def test_a_member_that_has_joined_below_the_last_step_cannot_do_it(self):
        standing = formed()
        standing.handle_member_join(holds("a", 5), 0.0)
        says(standing, "c", "leaving", 5)
        assert phase_of(says(standing, "b", "recalled", 5)) is QuorumPhase.REVOKED

    def test_while_it_leaves_a_loss_is_a_loss(self):
        standing = formed()
        says(standing, "c", "leaving", 5)
        assert phase_of(standing.handle_member_loss("a", "i1", "its connection was lost")) is QuorumPhase.REVOKED
        assert standing.lost == "a"

    def test_it_comes_back_with_it_to_a_lighthouse_that_has_restarted(self):
        standing = unsettled(QuorumPhase.RETURNING)
        assert says(standing, "c", "leaving", 5) is None
        assert standing.handle_member_leave("c", "i1") is None
        says(standing, "a", "standing", 5)
        assert phase_of(says(standing, "b", "standing", 5)) is QuorumPhase.RECALLED
        says(standing, "a", "recalled", 5)
        assert phase_of(says(standing, "b", "recalled", 5)) is QuorumPhase.RESUMED
        assert standing.upto == 5

    def test_the_next_quorum_forms_with_one_that_stays(self):
        standing = formed(lease_until=100)
        says(standing, "c", "leaving", 5)
        assert not may_form(standing, [holds("a")], now=0)
        for name in "ab":
            says(standing, name, "recalled", 5)
        for name in "ab":
            standing.handle_member_join(holds(name, 6), 0.0)
        assert may_form(standing, [holds("a"), holds("b")], now=0)


class TestLeases:
    """When the next quorum may form."""

    @pytest.mark.parametrize("phase", [QuorumPhase.STANDING, QuorumPhase.RECALLED, QuorumPhase.RETURNING])
    def test_never_while_it_stands_or_is_asked_back(self, phase: QuorumPhase):
        standing = unsettled(phase)
        if phase is QuorumPhase.RECALLED:
            standing.recall_quorum("x")
        assert standing.phase is phase
        assert not may_form(standing, [holds("a")], now=1e6)

    def test_at_once_with_one_of_its_participants(self):
        standing = formed(lease_until=100)
        standing.revoke_quorum("x")
        assert may_form(standing, [native("x"), holds("a")], now=0)

    @pytest.mark.parametrize("names", ["x", "xy"])
    def test_without_any_of_them_when_the_leases_of_all_have_run_out(self, names: str):
        standing = formed(lease_until=5)
        standing.extend_lease("b", "i1", 9)
        standing.revoke_quorum("x")
        strangers = [native(name) for name in names] + [native("a", incarnation="i2")]
        assert not may_form(standing, strangers, now=8.99)
        assert may_form(standing, strangers, now=9)
        assert standing.leases_free_at() == 9

    def test_an_echo_renews_until_it_is_revoked(self):
        standing = formed(lease_until=5)
        standing.extend_lease("a", "i1", 7)
        standing.extend_lease("a", "i1", 6)
        assert standing.leases_free_at() == 7
        standing.recall_quorum("x")
        standing.extend_lease("a", "i1", 8)
        assert standing.leases_free_at() == 8
        standing.revoke_quorum("x")
        standing.extend_lease("a", "i1", 20)
        assert standing.leases_free_at() == 8

    def test_a_member_whose_manager_has_joined_with_new_ranks_has_none(self):
        standing = formed(lease_until=5)
        standing.extend_lease("b", "i1", 9)
        standing.revoke_quorum("x")
        standing.end_lease("b", "i2")
        assert standing.leases_free_at() == 9
        standing.end_lease("b", "i1")
        assert standing.leases_free_at() == 5
        for name in "ac":
            standing.end_lease(name, "i1")
        assert may_form(standing, [native("a", incarnation="i2")], now=1)

    def test_another_incarnation_renews_nothing(self):
        standing = formed(lease_until=5)
        standing.extend_lease("a", "i2", 9)
        standing.extend_lease("x", "i1", 9)
        assert standing.leases_free_at() == 5


class TestOrderFor:
    """What every welcome and every echo names."""

    def test_the_present_one(self):
        standing = formed()
        standing.recall_quorum("x")
        assert standing.order_for_held("a", "i1", held(QUORUM_ID)) == QuorumOrder(
            QUORUM_ID, QuorumPhase.RECALLED, reason="x"
        )

    def test_none_for_one_that_holds_none(self):
        assert formed().order_for_held("a", "i1", None) is None

    @pytest.mark.parametrize(
        ("name", "incarnation", "quorum_id"), [("a", "i1", 6), ("a", "i2", QUORUM_ID), ("x", "i1", QUORUM_ID)]
    )
    def test_any_other_is_over(self, name: str, incarnation: str, quorum_id: int):
        order = formed().order_for_held(name, incarnation, held(quorum_id))
        assert order is not None
        assert (order.quorum_id, order.phase) == (quorum_id, QuorumPhase.REVOKED)


def test_an_entry_is_what_the_lighthouse_compares_a_repeated_join_by():
    assert entry_of(native("a", 3, tag_quorum_id=5, commit_failures=2)) == JoinState(3, 5, 2)


def test_an_older_journal_frees_nobody_who_was_given_a_lease_since():
    """A member came back and was answered; then another one is met that was told a later quorum."""
    standing = Standing()
    standing.restore_standing(QuorumRecord(QUORUM_ID, quorum("a"), True, {"a": ENTRY}), until=5)
    says(standing, "a", "standing")
    standing.extend_lease("a", "i1", 9)
    standing.revoke_unknown_holders(5, "b was told quorum 8, which is not remembered")
    standing.end_overdue_wait(8.9)
    assert not may_form(standing, [member("b")], 8.9)
    standing.end_overdue_wait(9)
    assert may_form(standing, [member("b")], 9)
