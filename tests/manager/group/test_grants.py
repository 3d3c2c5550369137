"""When a manager lets its ranks into the next step by itself: conditions 1 to 3 of grants.py, one by one."""

from dataclasses import replace

import pytest

from lighthouse_protocol.messages.membership import PLAIN, CatchUp, Distrust, DistrustKind, Quorum, Tag
from lighthouse_protocol.messages.session import HeldQuorum, HoldState
from manager.group.rules.grants import LEASE_SHARE, Granted, GrantMachine, Join, Wait
from manager.group.rules.request import QuorumRequest
from tests.manager.builders import ask, member
from tests.manager.groups import formed, held, order

UNTIL = 4.0


def holds(step: int = 5, quorum: Quorum | None = None) -> GrantMachine:
    """Quorum 1, formed for `step`, whose lease is valid until UNTIL."""
    machine = GrantMachine("a")
    machine.take(quorum or formed(1, step), step)
    machine.renew(UNTIL)
    return machine


def past(step: int = 5) -> GrantMachine:
    """All ranks have committed that step."""
    machine = holds(step)
    machine.committed(1, step)
    return machine


def decided(machine: GrantMachine, what: QuorumRequest, now: float = 1.0) -> object:
    """True: granted first; False: granted again; or Wait, or Join."""
    decision = machine.decide(what, now)
    if not isinstance(decision, Granted):
        return type(decision)
    assert decision.assignment.max_step == machine.granted == what.step
    return decision.is_first


class TestHolding:
    def test_nothing_is_held_at_first(self):
        machine = GrantMachine("a")
        assert (machine.held, machine.grants, machine.give_up()) == (None, False, False)
        assert decided(machine, ask(1, 0, 5)) is Join
        assert not machine.offer(0)
        assert not machine.obey(order("revoked"))

    def test_the_step_it_was_formed_for_is_granted(self):
        machine = holds(5)
        assert machine.held == held("standing", 5)
        assert decided(machine, ask(1, 0, 5)) is False

    def test_one_that_does_not_stand_is_not_held(self):
        machine = past()
        machine.drop()
        assert machine.held is None
        assert decided(machine, ask(1, 0, 6)) is Join

    def test_one_whose_rank_holds_no_state_any_more_is_over(self):
        """It has voted for the step before, and that was not applied: the group heals under another quorum."""
        torn = Distrust(DistrustKind.NOT_APPLIED, "rank 0: step 5 was committed and not applied")
        machine = past(5)
        assert machine.decide(ask(1, 0, 6, distrust=torn), 1) == Join(gives_up=True)
        assert machine.mode is HoldState.REVOKED

    def test_a_new_one_forgets_the_old(self):
        machine = past(5)
        machine.obey(order("resumed", upto=9))
        machine.take(formed(2, 7), 7)
        assert machine.held == HeldQuorum(2, HoldState.STANDING, 7)
        assert decided(machine, ask(1, 0, 8)) is Join, "7 is not committed under it"


class TestCommitted:
    """Condition 2: all ranks have committed the step before."""

    def test_the_next_step_after_the_commit(self):
        machine = past(5)
        assert decided(machine, ask(1, 0, 6)) is True
        assert decided(machine, ask(2, 1, 6)) is False
        assert machine.held == held("standing", 6)

    def test_not_without_the_commit(self):
        machine = holds(5)
        assert decided(machine, ask(1, 0, 6)) is Join
        assert machine.mode is HoldState.REVOKED, "and never again under it"

    def test_not_by_the_commit_of_another_quorum(self):
        machine = holds(5)
        machine.committed(2, 5)
        assert not machine.offer(1)
        assert decided(machine, ask(1, 0, 6)) is Join

    @pytest.mark.parametrize("step", [3, 4, 7, 8])
    def test_not_another_than_the_next(self, step: int):
        machine = past(5)
        assert decided(machine, ask(1, 0, step)) is Join
        assert decided(machine, ask(2, 0, 6)) is Join

    def test_not_the_same_one_again_once_it_is_committed(self):
        machine = past(5)
        assert decided(machine, ask(1, 0, 5)) is Join

    def test_not_after_a_failure(self):
        machine = past(5)
        assert decided(machine, ask(1, 0, 6, commit_failures=1)) is Join
        assert machine.held == held("revoked", 5)

    def test_nor_the_same_step_after_a_failure(self):
        machine = holds(5)
        assert decided(machine, ask(1, 0, 5, commit_failures=1)) is Join


class TestLease:
    """Condition 3, looked at for every grant."""

    def test_the_next_quorum_is_held_under_the_newest_echo_s(self):
        """An earlier lighthouse may have given a longer one, which the present one does not count."""
        machine = holds()
        machine.renew(2.0)
        assert machine.lease_until == UNTIL
        machine.take(formed(2, 6), 6)
        machine.committed(2, 6)
        assert machine.lease_until == 2.0
        assert decided(machine, ask(1, 0, 7), now=2.0) is Wait

    def test_until_it_runs_out(self):
        assert decided(past(), ask(1, 0, 6), UNTIL - 0.01) is True
        assert decided(past(), ask(1, 0, 6), UNTIL) is Wait

    def test_then_the_ranks_wait_and_go_on_when_it_is_renewed(self):
        machine = past()
        assert decided(machine, ask(1, 0, 6), 9) is Wait
        assert machine.held == held("standing", 5)
        machine.renew(10)
        assert decided(machine, ask(1, 0, 6), 9) is True

    def test_an_older_echo_shortens_nothing(self):
        machine = past()
        machine.renew(2)
        assert machine.lease_until == UNTIL

    def test_the_other_ranks_follow_the_first_without_one(self):
        """Else they would leave it alone in a collective."""
        machine = past()
        assert decided(machine, ask(1, 0, 6), 3.9) is True
        assert decided(machine, ask(2, 1, 6), 9) is False

    def test_under_a_resume_too(self):
        machine = past()
        machine.obey(order("resumed", upto=9))
        assert decided(machine, ask(1, 0, 6), UNTIL) is Wait
        assert decided(machine, ask(1, 0, 6), 3) is True

    def test_an_offer_needs_one(self):
        assert past().offer(UNTIL - 0.01)
        assert not past().offer(UNTIL)

    def test_clocks_may_differ_by_a_tenth(self):
        assert LEASE_SHARE / 0.9 < 0.9, "a manager's slow clock against the lighthouse's fast one"


class TestRecall:
    """Condition 1."""

    def test_frozen_ranks_wait_with_the_highest_grant_kept(self):
        machine = past()
        assert not machine.obey(order("recalled"))
        assert machine.held == held("frozen", 5)
        assert decided(machine, ask(1, 0, 6)) is Wait
        assert not machine.offer(1)

    def test_a_step_that_was_granted_is_granted_to_the_other_ranks(self):
        machine = past()
        machine.decide(ask(1, 0, 6), 1)
        machine.obey(order("recalled"))
        assert decided(machine, ask(2, 1, 6)) is False

    def test_resumed_up_to_the_last_step_and_not_beyond(self):
        machine = past(5)
        machine.obey(order("recalled"))
        assert not machine.obey(order("resumed", upto=6))
        assert decided(machine, ask(1, 0, 6)) is True
        machine.committed(1, 6)
        assert not machine.offer(1)
        assert decided(machine, ask(2, 0, 7)) is Join
        assert machine.held == held("joining", 6)

    def test_an_offer_goes_up_to_the_last_step_too(self):
        machine = past(5)
        machine.obey(order("resumed", upto=6))
        assert machine.offer(1)
        assert machine.held == held("resumed", 6)
        machine.committed(1, 6)
        assert not machine.offer(1)

    def test_after_the_join_it_never_grants_again(self):
        """Whatever becomes of the join, and whatever is said then."""
        machine = past(5)
        machine.obey(order("resumed", upto=5))
        assert decided(machine, ask(1, 0, 6)) is Join
        for phase in ("standing", "recalled", "resumed", "returning"):
            assert not machine.obey(order(phase, upto=9))
            assert decided(machine, ask(2, 0, 6)) is Join
            assert not machine.offer(1)
        assert machine.held == held("joining", 5)

    def test_a_second_recall_freezes_again(self):
        """Of a lighthouse that has restarted in the middle of the first."""
        machine = past(5)
        machine.obey(order("resumed", upto=9))
        machine.obey(order("recalled"))
        assert decided(machine, ask(1, 0, 6)) is Wait

    @pytest.mark.parametrize("phase", ["none", "standing", "returning"])
    def test_other_orders_change_nothing(self, phase: str):
        machine = past(5)
        assert not machine.obey(order(phase))
        assert decided(machine, ask(1, 0, 6)) is True

    @pytest.mark.parametrize("phase", ["recalled", "resumed", "revoked"])
    def test_orders_about_another_quorum_change_nothing(self, phase: str):
        machine = past(5)
        assert not machine.obey(order(phase, quorum_id=2))
        assert machine.held == held("standing", 5)


class TestRevoke:
    def test_is_to_be_told_to_the_ranks_once(self):
        machine = past()
        assert machine.obey(order("revoked"))
        assert not machine.obey(order("revoked"))
        assert not machine.give_up()
        assert machine.held == held("revoked", 5)

    @pytest.mark.parametrize("before", ["recalled", "resumed"])
    def test_in_the_middle_of_a_recall(self, before: str):
        machine = past()
        machine.obey(order(before, upto=9))
        assert machine.obey(order("revoked"))
        assert decided(machine, ask(1, 0, 6)) is Join

    def test_by_itself(self):
        machine = past()
        assert machine.give_up()
        assert not machine.grants
        assert decided(machine, ask(1, 0, 6)) is Join
        assert not machine.offer(1)

    def test_a_rank_late_for_the_running_step_runs_it_and_votes_no(self):
        """The first rank is in it: it must not be left alone."""
        machine = past(5)
        machine.decide(ask(1, 0, 6), 1)
        machine.obey(order("revoked"))
        late = machine.decide(ask(2, 1, 6), 1)
        assert isinstance(late, Granted)
        assert (late.is_first, late.assignment.revoked, late.assignment.max_step) == (False, True, 6)

    def test_no_order_brings_it_back(self):
        machine = past()
        machine.give_up()
        for phase in ("standing", "resumed", "recalled"):
            machine.obey(order(phase, upto=9))
            assert decided(machine, ask(1, 0, 6)) is Join


class TestLastStep:
    """It has done the last step that it may: it says so, whether or not a rank asks for another."""

    @pytest.mark.parametrize("is_told_first", [True, False])
    def test_with_its_commit(self, is_told_first: bool):
        machine = holds(5) if is_told_first else past(5)
        machine.obey(order("resumed", upto=5))
        if is_told_first:
            assert machine.held == held("resumed", 5)
            machine.committed(1, 5)
        assert machine.held == held("joining", 5)
        assert not machine.offer(1)

    def test_not_while_a_rank_is_in_a_later_one(self):
        """A member that has left cannot do that; the other ranks are let into it all the same."""
        machine = past(5)
        assert decided(machine, ask(1, 0, 6)) is True
        machine.obey(order("resumed", upto=5))
        assert machine.held == held("resumed", 6)
        assert decided(machine, ask(2, 1, 6)) is False


class TestLeaving:
    """A rank ends in good order."""

    def test_with_all_that_was_committed_the_group_leaves(self):
        machine = past(5)
        machine.leave(6)
        assert (machine.held, machine.is_leaving, machine.grants) == (held("leaving", 5), True, False)

    def test_the_step_that_came_with_the_decision_is_given_back(self):
        machine = past(5)
        assert machine.offer(1)
        machine.leave(6)
        assert machine.held == held("leaving", 5)

    @pytest.mark.parametrize("phase", ["recalled", "resumed"])
    def test_in_the_middle_of_a_recall(self, phase: str):
        machine = past(5)
        machine.obey(order(phase, upto=5))
        machine.leave(6)
        assert machine.is_leaving

    def test_where_it_has_asked_for_the_next_quorum(self):
        machine = past(5)
        machine.obey(order("resumed", upto=5))
        assert decided(machine, ask(1, 0, 6)) is Join
        machine.leave(6)
        assert machine.is_leaving

    @pytest.mark.parametrize("step", [None, 5, 7])
    def test_not_in_the_middle_of_a_step(self, step: int | None):
        machine = past(5)
        machine.leave(step)
        assert machine.held == held("standing", 5)

    def test_not_where_another_rank_has_not_committed_it(self):
        machine = holds(5)
        machine.leave(6)
        assert machine.held == held("standing", 5)

    def test_not_where_nothing_was_committed_under_it(self):
        machine = GrantMachine("a")
        machine.take(formed(1, 0), 0)
        machine.leave(0)
        assert machine.held == held("standing", 0)

    def test_not_under_one_that_is_over_or_none(self):
        GrantMachine("a").leave(0)
        machine = past(5)
        machine.give_up()
        machine.leave(6)
        assert machine.held == held("revoked", 5)

    def test_nothing_is_granted_then(self):
        machine = past(5)
        machine.leave(6)
        assert decided(machine, ask(1, 1, 6)) is Join
        assert not machine.offer(1)
        assert not machine.give_up()

    def test_its_end_is_news_once(self):
        """Other ranks may wait for this one."""
        machine = past(5)
        machine.leave(6)
        assert not machine.obey(order("resumed", upto=5))
        assert machine.obey(order("revoked"))
        assert not machine.obey(order("revoked"))
        assert (machine.held, machine.is_leaving) == (held("revoked", 5), False)


class TestAssignment:
    def test_of_the_step_it_was_formed_for_is_the_quorums(self):
        quorum = Quorum(1, (member("a", 4), member("b", 5)))
        machine = holds(5, quorum)
        decision = machine.decide(ask(1, 0, 5), 0)
        assert isinstance(decision, Granted)
        assignment = decision.assignment
        assert (assignment.heals, assignment.heal_from_rank, assignment.contributors) == (True, 1, 1)
        assert (assignment.max_rank, assignment.max_world_size) == (None, 1)

    def test_after_it_nobody_heals_and_all_contribute(self):
        quorum = Quorum(1, (member("a", 4), member("b", 5, commit_failures=2), member("c", 5)))
        machine = holds(5, quorum)
        before = machine.assignment(0, True)
        machine.committed(1, 5)
        decision = machine.decide(ask(1, 0, 6), 0)
        assert isinstance(decision, Granted)
        after = decision.assignment
        assert (after.heals, after.heal_from_address, after.serve_to) == (False, "", ())
        assert (after.max_step, after.max_rank, after.max_world_size, after.contributors) == (6, 0, 3, 3)
        assert (after.commit_failures, before.commit_failures) == (0, 2)
        assert (after.store_address, after.primary_address) == (before.store_address, before.primary_address)
        assert (after.replica_rank, after.replica_ids) == (0, ("a", "b", "c"))

    def test_who_served_serves_no_more(self):
        machine = holds(5, Quorum(1, (member("a", 5), member("b", 4))))
        assert machine.assignment(0, True).serve_to == (1,)
        machine.committed(1, 5)
        assert machine.offer(0)
        assert machine.assignment(0, True).serve_to == ()


class TestToldTooLate:
    """c, of two ranks, is told to heal when they have begun to compute; quorum 1 was formed for step 5."""

    Q = Quorum(
        1, (member("a", 5, heals_first=False), member("b", 5, heals_first=True), member("c", 3, heals_first=False))
    )

    def of(self, name: str) -> GrantMachine:
        machine = GrantMachine(name, 2)
        machine.take(self.Q, 5)
        machine.renew(UNTIL)
        return machine

    @pytest.mark.parametrize("name", ["a", "b", "c"])
    def test_the_quorum_is_for_its_first_step_only(self, name: str):
        assert self.of(name).held == held("resumed", 5)

    def test_its_peers_commit_that_and_join(self):
        machine = self.of("a")
        machine.committed(1, 5)
        assert not machine.offer(1)
        assert [decided(machine, ask(call, call, 6)) for call in (0, 1)] == [Join, Join]
        assert (machine.mode, machine.has_done_late_step) == (HoldState.JOINING, False)
        assert machine.ends_by_discard(1)

    def test_its_own_discard_ends_nothing_and_it_joins_when_all_its_ranks_have_voted(self):
        """Rank 1 is through; rank 0 is still in the step with its peers, which must not be told to end that."""
        machine = self.of("c")
        assert not machine.ends_by_discard(1)
        assert not machine.voted(1, 1, 5)
        assert decided(machine, ask(1, 1, 3, commit_failures=1)) is Wait
        assert (machine.mode, machine.has_done_late_step) == (HoldState.RESUMED, False)
        assert machine.voted(0, 1, 5)
        for group_rank in (0, 1):
            assert machine.decide(ask(2, group_rank, 3, commit_failures=1), 1) == Join(gives_up=False)
        assert (machine.mode, machine.has_done_late_step) == (HoldState.JOINING, True)

    def test_also_while_the_quorum_is_recalled(self):
        machine = self.of("c")
        machine.obey(order("recalled"))
        assert [machine.voted(group_rank, 1, 5) for group_rank in (0, 1)] == [False, True]
        assert machine.decide(ask(1, 0, 3, commit_failures=1), 1) == Join(gives_up=False)
        assert machine.has_done_late_step

    @pytest.mark.parametrize("vote", [(0, 1, 4), (0, 7, 5), (0, None, 3)])
    def test_a_rank_of_it_that_asks_before_it_has_voted_ends_the_quorum(self, vote: tuple[int, int | None, int]):
        """Its answer was lost: it takes no part in the step, and its peers would wait for it. A vote for anything else
        is no part in it either."""
        machine = self.of("c")
        machine.voted(1, 1, 5)
        machine.voted(*vote)
        assert machine.decide(ask(1, 0, 3, commit_failures=1), 1) == Join(gives_up=True)
        assert (machine.mode, machine.has_done_late_step) == (HoldState.REVOKED, False)

    def test_the_next_quorum_knows_nothing_of_it(self):
        machine = self.of("c")
        machine.voted(0, 1, 5)
        machine.voted(1, 1, 5)
        machine.take(formed(2, 6, "abc"), 6)
        assert machine.held == held("standing", 6, quorum_id=2)
        assert machine.ends_by_discard(2)
        assert machine.decide(ask(1, 0, 6, commit_failures=1), 1) == Join(gives_up=True)


class TestCatchingUp:
    """a catches up in quorum 4, which was formed for step 5; its group has two ranks."""

    Q = Quorum(4, (member("a", 2, catch_up=True), member("b", 5), member("c", 5)))
    LAGS = CatchUp(True, Tag(2, 1), has_source=True)
    THERE = CatchUp(True, None, has_source=True)
    FAILED = CatchUp(True, Tag(2, 1), has_source=False)

    def machine(self, name: str = "a", size: int = 2) -> GrantMachine:
        machine = GrantMachine(name, size)
        machine.take(self.Q, 5)
        machine.renew(UNTIL)
        return machine

    def step(self, machine: GrantMachine, step: int, *words: CatchUp) -> None:
        machine.committed(4, step - 1)
        for rank, catch_up in enumerate(words):
            assert isinstance(machine.decide(ask(rank + 1, rank, step, catch_up=catch_up), 1), Granted)

    @pytest.mark.parametrize(("name", "place"), [("a", None), ("b", 0), ("c", 1)])
    def test_contributes_nothing_for_as_long_as_the_quorum_stands(self, name: str, place: int | None):
        machine = self.machine(name, 1)
        for step in (6, 7):
            self.step(machine, step, self.LAGS)
            assignment = machine.assignment(0, True)
            assert (assignment.contributors, assignment.max_world_size, assignment.max_rank) == (2, 2, place)
            assert (assignment.catches_up, assignment.heals, assignment.serve_to) == (name == "a", False, ())
            assert (assignment.max_step, assignment.tag_quorum_id, assignment.has_healing) == (step, 4, False)

    @pytest.mark.parametrize("words", [(LAGS, LAGS), (THERE, LAGS), (LAGS, THERE)])
    def test_wants_nothing_while_a_rank_is_on_its_way(self, words: tuple[CatchUp, ...]):
        machine = self.machine()
        self.step(machine, 6, *words)
        assert machine.held == held("standing", 6, quorum_id=4)

    @pytest.mark.parametrize("words", [(THERE, THERE), (FAILED, LAGS), (THERE, FAILED)])
    def test_wants_the_next_quorum_when_all_are_there_or_one_cannot_get_there(self, words: tuple[CatchUp, ...]):
        machine = self.machine()
        self.step(machine, 6, *words[:1])
        assert machine.held == held("standing", 6, quorum_id=4), "not all have asked"
        self.step(machine, 6, *words)
        wanted = replace(held("standing", 6, quorum_id=4), wants_next=True)
        assert machine.held == wanted
        self.step(machine, 7, self.LAGS)
        assert machine.held == replace(wanted, granted=7), "it says so until the quorum is over"
        machine.take(replace(self.Q, quorum_id=5), 8)
        assert machine.held == held("standing", 8, quorum_id=5)

    def test_not_by_what_was_asked_before_the_quorum(self):
        machine = self.machine()
        for rank in (0, 1):
            assert isinstance(machine.decide(ask(rank + 1, rank, 5, catch_up=PLAIN), 1), Granted)
        assert machine.held == held("standing", 5, quorum_id=4)

    def test_not_by_ranks_of_different_steps(self):
        machine = self.machine()
        self.step(machine, 6, self.THERE)
        machine.committed(4, 6)
        assert isinstance(machine.decide(ask(9, 1, 7, catch_up=self.THERE), 1), Granted)
        assert machine.held == held("standing", 7, quorum_id=4)

    def test_others_want_nothing(self):
        machine = self.machine("b", 1)
        self.step(machine, 6, PLAIN)
        assert machine.held == held("standing", 6, quorum_id=4)
