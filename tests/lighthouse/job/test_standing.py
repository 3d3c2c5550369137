"""The standing quorum's phases, one by one: what its members say, and what follows."""

from dataclasses import replace

import pytest

from lighthouse.job.records import JoinState, Lease, QuorumRecord
from lighthouse.job.standing import Standing, entry_of
from lighthouse_protocol.messages.membership import Participant, Quorum
from lighthouse_protocol.messages.session import QuorumOrder, QuorumPhase
from lighthouse_protocol.wire.streams import SESSION_RESPONSES
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

    def test_of_which_all_members_ask_for_step_0_again_is_an_order_that_a_manager_can_read(self):
        standing = formed("ab")
        assert standing.handle_member_join(holds("a", 0), 0.0) == standing.current_order()
        order = standing.handle_member_join(holds("b", 0), 0.0)
        assert SESSION_RESPONSES.read(SESSION_RESPONSES.write(order)) == order
        assert order == QuorumOrder(QUORUM_ID, QuorumPhase.REVOKED, reason="a cannot do step 0 any more")

    def test_who_grants_no_more_stays_so(self):
        standing = formed("ab")
        standing.recall_quorum("x")
        for mode in ("joining", "recalled"):
            assert says(standing, "a", mode, 5) is None
        assert phase_of(says(standing, "b", "recalled", 6)) is QuorumPhase.REVOKED

    def test_is_said_once(self):
        standing = formed()
        standing.recall_quorum("x")
        assert standing.recall_quorum("y") is None
        for name in "abc":
            says(standing, name, "recalled", 3)
        assert standing.recall_quorum("y") is None
        assert standing.revoke_quorum("z") is not None
        assert standing.recall_quorum("y") is None


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

    def test_its_join_counts_by_the_step_that_it_works_at(self):
        standing = formed("ab")
        assert phase_of(standing.handle_member_join(holds("a", 2, works_at=6), 0.0)) is QuorumPhase.RECALLED
        assert says(standing, "b", "recalled", 5) == QuorumOrder(QUORUM_ID, QuorumPhase.RESUMED, 5, standing.reason)
        assert standing.handle_member_join(holds("a", 2, works_at=6), 0.0) is None
        assert phase_of(standing.handle_member_join(holds("a", 2, works_at=5), 0.0)) is QuorumPhase.REVOKED


class TestRevoke:
    def test_a_join_at_or_below_the_last_step(self):
        standing = formed("ab")
        standing.recall_quorum("x")
        for name in "ab":
            says(standing, name, "recalled", 5)
        assert standing.handle_member_join(holds("a", 6), 0.0) is None
        assert phase_of(standing.handle_member_join(holds("b", 5), 0.0)) is QuorumPhase.REVOKED

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

    def test_it_comes_back_with_it_to_a_lighthouse_that_has_restarted(self):
        standing = unsettled(QuorumPhase.RETURNING)
        assert says(standing, "c", "leaving", 5) is None
        assert standing.handle_member_leave("c", "i1") is None
        says(standing, "a", "standing", 5)
        assert phase_of(says(standing, "b", "standing", 5)) is QuorumPhase.RECALLED
        says(standing, "a", "recalled", 5)
        assert phase_of(says(standing, "b", "recalled", 5)) is QuorumPhase.RESUMED
        assert standing.upto == 5


class TestLeases:
    """When the next quorum may form."""

    @pytest.mark.parametrize("phase", [QuorumPhase.STANDING, QuorumPhase.RECALLED, QuorumPhase.RETURNING])
    def test_never_while_it_stands_or_is_asked_back(self, phase: QuorumPhase):
        standing = unsettled(phase)
        if phase is QuorumPhase.RECALLED:
            standing.recall_quorum("x")
        assert standing.phase is phase
        assert not may_form(standing, [holds("a")], now=1e6)

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


def test_an_entry_is_what_the_lighthouse_compares_a_repeated_join_by():
    assert entry_of(native("a", 3, tag_quorum_id=5, commit_failures=2)) == JoinState(3, 5, 2)
