"""All ranks have asked: events in, the whole list of effects out; and drawn events against a witness."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lighthouse_protocol.messages.membership import CatchUp, Distrust, DistrustKind, Quorum, Tag
from lighthouse_protocol.refusals import (
    InternalError,
    InvalidRequest,
    LimitReached,
    Superseded,
    Unreachable,
    Unrecoverable,
    WrongState,
)
from manager.group.rules.assignment import assign
from manager.group.rules.gather import (
    Effect,
    GatherMachine,
    GroupJoined,
    JoinFailed,
    JoinTakenBack,
    QuorumReceived,
    RankAnswered,
    RankRefused,
    RoundAnswered,
    Withdrawn,
)
from manager.group.rules.request import QuorumRequest
from tests.manager.builders import ask, gathered, member, quorum, refused

TORN = Distrust(DistrustKind.NOT_APPLIED, "rank 1: step 5 was not applied")


def joined(round_number: int = 1, step: int = 0, size: int = 2, **fields: Any) -> GroupJoined:
    defaults: dict[str, Any] = {
        "incarnation": 0,
        "tag_quorum_id": None,
        "ranks_disagree": False,
        "shrink_only": False,
        "commit_failures": 0,
        "seen_quorum_id": 0,
        "deadline_at": 100.0,
        "handles": ("",) * size,
    }
    return GroupJoined(round=round_number, step=step, **(defaults | fields))


def answers(q: Quorum, *calls: int, name: str = "a") -> list[Effect]:
    """For the calls of rank 0, 1, ... of Agents."""
    assigned = [assign(q, name, rank, True) for rank in range(len(calls))]
    told = [RankAnswered(call, a, q) for call, a in zip(calls, assigned, strict=True) if a]
    return [RoundAnswered(q.quorum_id, max(p.step for p in q.participants)), *told]


class TestGathering:
    def test_joins_when_the_last_rank_has_asked(self):
        m = GatherMachine("a", 3)
        assert m.handle(ask(1, 2, 5)) == []
        assert m.handle(ask(2, 0, 5)) == []
        assert (m.waiting, m.is_joined) == ((0, 2), False)
        assert m.handle(ask(3, 1, 5)) == [joined(step=5, size=3)]
        assert (m.waiting, m.is_joined) == ((0, 1, 2), True)

    def test_one_rank_is_enough_for_a_group_of_one(self):
        assert GatherMachine("a", 1).handle(ask(1, 0, 5)) == [joined(step=5, size=1)]

    def test_carries_what_the_ranks_say(self):
        m = GatherMachine("a", 2)
        m.handle(ask(1, 1, 5, 30.0, tag_quorum_id=4, shrink_only=True, handle="h1"))
        assert m.handle(ask(2, 0, 5, 20.0, tag_quorum_id=4, commit_failures=2, handle="h0")) == [
            joined(step=5, tag_quorum_id=4, shrink_only=True, commit_failures=2, deadline_at=20.0, handles=("h0", "h1"))
        ]

    @pytest.mark.parametrize("says", [(True, True), (True, False), (False, False)])
    def test_compares_where_all_its_ranks_do(self, says: tuple[bool, ...]):
        m = GatherMachine("a", 2)
        m.handle(ask(1, 0, compares=says[0]))
        assert m.handle(ask(2, 1, compares=says[1])) == [joined(compares=all(says))]

    def test_a_rank_without_a_state_makes_it_a_group_that_disagrees(self):
        m, torn = GatherMachine("a", 2), Distrust(DistrustKind.DIVERGENCE, "rank 1: step 5")
        m.handle(ask(1, 0, 5, tag_quorum_id=4))
        [group] = m.handle(ask(2, 1, 5, distrust=torn))
        assert isinstance(group, GroupJoined)
        assert (group.ranks_disagree, group.tag_quorum_id, group.distrust) == (True, None, torn)

    def test_a_lone_rank_without_a_state_disagrees_too(self):
        """A lighthouse derives the tag of a member that sends none: it would count as up to date."""
        torn = Distrust(DistrustKind.NOT_APPLIED, "rank 0: step 5")
        [group] = GatherMachine("a", 1).handle(ask(1, 0, 5, distrust=torn))
        assert isinstance(group, GroupJoined)
        assert (group.ranks_disagree, group.tag_quorum_id, group.distrust) == (True, None, torn)

    @pytest.mark.parametrize("group_rank", [-1, 2, 99])
    def test_a_rank_out_of_range_is_refused_and_completes_nothing(self, group_rank: int):
        m = GatherMachine("a", 2)
        m.handle(ask(1, 0))
        assert m.handle(ask(2, group_rank)) == [refused(2, InvalidRequest, "rank:", str(group_rank), "0 to 1")]
        assert m.waiting == (0,)

    def test_a_negative_step_is_refused(self):
        assert GatherMachine("a", 1).handle(ask(1, 0, -1)) == [refused(1, InvalidRequest, "step:", "-1")]

    def test_a_rank_twice_completes_nothing(self):
        m = GatherMachine("a", 2)
        m.handle(ask(1, 0))
        assert m.handle(ask(2, 0)) == [refused(1, Superseded, "rank 0")]
        assert m.handle(ask(3, 1)) == [joined()]

    def test_a_rank_that_asks_again_takes_the_join_back_and_joins_anew(self):
        m = gathered(2, step=5)
        assert m.handle(ask(3, 0, 5)) == [JoinTakenBack(1), refused(1, Superseded, "rank 0"), joined(2, step=5)]

    def test_a_rank_that_withdraws_takes_the_join_back(self):
        m = gathered(2)
        assert m.handle(Withdrawn(2)) == [JoinTakenBack(1)]
        assert (m.waiting, m.is_joined) == ((0,), False)
        assert m.handle(Withdrawn(2)) == []
        assert m.handle(ask(3, 1)) == [joined(2)]

    def test_the_end_of_a_superseded_call_is_nothing(self):
        m = gathered(2)
        m.handle(ask(3, 0))
        assert m.handle(Withdrawn(1)) == []
        assert m.is_joined


class TestSteps:
    def test_callers_without_tags_whose_steps_differ_are_all_refused_with_both_numbers(self):
        m = GatherMachine("a", 3)
        m.handle(ask(1, 0, 5, worker=""))
        m.handle(ask(2, 1, 5, worker=""))
        assert m.handle(ask(3, 2, 6, worker="")) == [
            refused(call, Unrecoverable, "rank 2 is at step 6", "rank 0 at 5") for call in (1, 2, 3)
        ]
        assert (m.waiting, m.is_joined) == ((), False)

    @pytest.mark.parametrize(("one", "other"), [("", "w1"), ("w0", "")])
    def test_nor_can_one_with_a_tag_and_one_without_go_together(self, one: str, other: str):
        m = GatherMachine("a", 2)
        m.handle(ask(1, 0, 5, worker=one))
        assert [type(e) for e in m.handle(ask(2, 1, 6, worker=other))] == [RankRefused, RankRefused]

    def test_agents_whose_steps_differ_join_at_the_lowest_as_a_group_that_disagrees(self):
        m = GatherMachine("a", 2)
        m.handle(ask(1, 0, 6, tag_quorum_id=3))
        assert m.handle(ask(2, 1, 5, tag_quorum_id=3)) == [joined(step=5, ranks_disagree=True)]

    def test_agents_whose_tags_differ_join_as_a_group_that_disagrees(self):
        m = GatherMachine("a", 2)
        m.handle(ask(1, 0, 5, tag_quorum_id=3))
        assert m.handle(ask(2, 1, 5, tag_quorum_id=4)) == [joined(step=5, ranks_disagree=True)]

    def test_and_heal(self):
        m = GatherMachine("a", 2)
        m.handle(ask(1, 0, 6, tag_quorum_id=3))
        m.handle(ask(2, 1, 5, tag_quorum_id=3))
        q = quorum(member("a", 5), member("b", 6), quorum_id=4)
        effects = m.handle(QuorumReceived(1, q))
        assert effects == answers(q, 1, 2)
        assert [e.assignment.heal_from_rank for e in effects[1:]] == [1, 1]

    def test_alone_there_is_nobody_to_heal_from(self):
        """A group whose ranks are at steps 5 and 6 cannot go on by itself: rank 0 would train on another state."""
        m = GatherMachine("a", 2)
        m.handle(ask(1, 0, 6, tag_quorum_id=3))
        m.handle(ask(2, 1, 5, tag_quorum_id=3))
        effects = m.handle(QuorumReceived(1, quorum(member("a", 5, ranks_disagree=True), quorum_id=4)))
        assert [e for e in effects if isinstance(e, RankRefused)] == [
            refused(1, Unrecoverable, "5", "6"),
            refused(2, Unrecoverable, "5", "6"),
        ]
        assert not [e for e in effects if isinstance(e, RankAnswered | RoundAnswered)]

    def test_ranks_that_differ_by_a_heal_that_broke_off_are_not_given_up(self):
        """Rank 1 has the state of b, the transfer to rank 0 broke, and b is away for a moment."""
        m = gathered(2, 0)
        assert m.handle(QuorumReceived(1, quorum(member("a", 0), member("b", 5), quorum_id=4)))
        m.handle(ask(3, 0, 0, commit_failures=1))
        m.handle(ask(4, 1, 5, tag_quorum_id=3, commit_failures=1))
        alone = quorum(member("a", 0, ranks_disagree=True), quorum_id=5)
        refusals = [e for e in m.handle(QuorumReceived(2, alone)) if isinstance(e, RankRefused)]
        assert refusals == [refused(call, WrongState, "0", "5", "ask again") for call in (3, 4)]
        m.handle(ask(5, 0, 0, commit_failures=1))
        m.handle(ask(6, 1, 5, tag_quorum_id=3, commit_failures=1))
        both = quorum(member("a", 0), member("b", 5), quorum_id=6)
        assert m.handle(QuorumReceived(3, both)) == answers(both, 5, 6)

    def test_unless_other_groups_are_there_that_would_wait_for_its_state(self):
        """c is new: it would heal from a, of which no whole state is left."""
        m = gathered(2, 0)
        assert m.handle(QuorumReceived(1, quorum(member("a", 0), member("b", 5), quorum_id=4)))
        m.handle(ask(3, 0, 4, tag_quorum_id=3, commit_failures=1))
        m.handle(ask(4, 1, 5, tag_quorum_id=3, commit_failures=1))
        q = quorum(member("a", 4, ranks_disagree=True), member("c", 0), quorum_id=5)
        effects = m.handle(QuorumReceived(2, q))
        assert effects[1:] == [refused(call, Unrecoverable, "4", "5") for call in (3, 4)]

    def test_but_new_processes_are(self):
        m = gathered(2, 0)
        assert m.handle(QuorumReceived(1, quorum(member("a", 0), member("b", 5), quorum_id=4)))
        m.handle(ask(3, 0, 0, worker="x0"))
        m.handle(ask(4, 1, 5, tag_quorum_id=3, worker="x1"))
        effects = m.handle(QuorumReceived(2, quorum(member("a", 0, ranks_disagree=True), quorum_id=5)))
        assert effects[1:] == [refused(call, Unrecoverable, "0", "5") for call in (3, 4)]

    def test_one_that_is_told_to_heal_too_late_does_its_step_all_the_same(self):
        """Rank 1 has torn its state, rank 0 has begun to compute: b is there, and heals both in the next quorum."""
        m = GatherMachine("a", 2)
        m.handle(ask(1, 0, 6, tag_quorum_id=3, heals_first=False))
        m.handle(ask(2, 1, 6, distrust=TORN, heals_first=True))
        ours, theirs = member("a", 5, ranks_disagree=True, heals_first=False), member("b", 6, heals_first=False)
        q = quorum(ours, theirs, quorum_id=4)
        effects = m.handle(QuorumReceived(1, q))
        assert effects == answers(q, 1, 2)
        assert [(e.assignment.place, e.assignment.heals) for e in effects[1:]] == [(None, False)] * 2

    @pytest.mark.parametrize("size", [1, 2])
    def test_one_that_has_torn_its_state_waits_for_the_peers_that_it_had(self, size: int):
        m = gathered(size, 5, tag_quorum_id=3)
        m.handle(QuorumReceived(1, quorum(member("a", 5), member("b", 5), quorum_id=4)))
        for number in (2, 3):
            torn = self.asks_torn(m, 10 * number, size)
            effects = m.handle(
                QuorumReceived(number, quorum(member("a", 6, ranks_disagree=True), quorum_id=3 + number))
            )
            assert effects[1:] == [refused(call, WrongState, "step 5 was not applied", "ask again") for call in torn]
        torn = self.asks_torn(m, 40, size)
        both = quorum(member("a", 5, ranks_disagree=True), member("b", 6), quorum_id=7)
        assert m.handle(QuorumReceived(4, both)) == answers(both, *torn)

    @pytest.mark.parametrize("size", [1, 2])
    @pytest.mark.parametrize("others", [(), ("b",)])
    def test_where_it_was_alone_or_others_look_up_to_it_that_state_is_gone(self, size: int, others: tuple[str, ...]):
        m = gathered(size, 5, tag_quorum_id=3)
        before = [member("a", 5), *(member("b", 5) for _ in others)]
        m.handle(QuorumReceived(1, quorum(*before, quorum_id=4)))
        torn = self.asks_torn(m, 20, size)
        q = quorum(member("a", 6, ranks_disagree=True), *(member(name) for name in others), quorum_id=5)
        effects = m.handle(QuorumReceived(2, q))
        assert effects[1:] == [refused(call, Unrecoverable, "step 5 was not applied", "checkpoint") for call in torn]

    def asks_torn(self, m: GatherMachine, first_call: int, size: int) -> list[int]:
        calls = list(range(first_call, first_call + size))
        for group_rank, call in enumerate(calls):
            torn = {"distrust": TORN} if group_rank == size - 1 else {"tag_quorum_id": 4}
            m.handle(ask(call, group_rank, 6, commit_failures=1, **torn))
        assert m.is_joined
        return calls

    def test_one_that_catches_up_may_come_to_hold_what_it_was_told_some_quorums_ago(self):
        """Told to heal from step 11 to step 1, it gets there when the others are at 4."""
        m, step = GatherMachine("a", 1), 11
        catches_up = {"catch_up": CatchUp(True, Tag(11, 2), has_source=True), "tag_quorum_id": 2}
        for number, step in enumerate((1, 2, 4), start=1):
            m.handle(ask(number, 0, 11, **(catches_up if number > 1 else {"tag_quorum_id": 2})))
            q = quorum(member("a", 0, catch_up=True), member("b", step), quorum_id=number + 2)
            assert m.handle(QuorumReceived(number, q, stands=True))[0] == RoundAnswered(number + 2, step)
            assert m.step == 1
        held = CatchUp(True, Tag(1, 1), has_source=True)
        assert m.handle(ask(4, 0, 5, tag_quorum_id=5, catch_up=replace(held, held=Tag(0, 1)))) == [
            refused(4, InvalidRequest, "step:", "11", "0")
        ]
        [joined_again] = m.handle(ask(5, 0, 5, tag_quorum_id=5, catch_up=held))
        assert (joined_again.step, joined_again.works_at) == (1, 5)

    def test_a_rank_that_healed_to_an_older_state_goes_on_from_there(self):
        """Rank 0 was at step 6, took the state of step 5 and its step was discarded: it asks at 5 again."""
        m = GatherMachine("a", 2)
        m.handle(ask(1, 0, 6, tag_quorum_id=3))
        m.handle(ask(2, 1, 4, tag_quorum_id=2))
        m.handle(QuorumReceived(1, quorum(member("a", 4), member("b", 5), quorum_id=4)))
        assert m.handle(ask(3, 0, 5, tag_quorum_id=3)) == []
        assert m.handle(ask(4, 1, 5, tag_quorum_id=3)) == [joined(2, step=5, tag_quorum_id=3, seen_quorum_id=4)]

    def test_the_step_of_a_rank_does_not_go_back(self):
        m = gathered(1, step=5)
        m.handle(Withdrawn(1))
        assert m.handle(ask(2, 0, 4)) == [refused(2, InvalidRequest, "step:", "rank 0", "5", "4")]
        assert m.waiting == ()

    def test_unless_its_process_is_new(self):
        m = gathered(1, step=5)
        m.handle(Withdrawn(1))
        assert m.handle(ask(2, 0, 0, worker="w9")) == [joined(2, step=0, size=1, incarnation=1)]


class TestCatchingUp:
    """Ranks that work at step 7 and hold step 3."""

    HELD = CatchUp(True, Tag(3, 2), has_source=True)

    def test_joins_with_what_it_holds_and_says_where_it_works(self):
        m = GatherMachine("a", 2)
        m.handle(ask(1, 0, 7, tag_quorum_id=5, catch_up=self.HELD))
        [effect] = m.handle(ask(2, 1, 7, tag_quorum_id=5, catch_up=self.HELD))
        assert effect == joined(step=3, tag_quorum_id=2, works_at=7, catch_up=True, has_source=True, handles=("", ""))

    def test_one_rank_that_heals_plainly_or_has_no_source_is_enough(self):
        m = GatherMachine("a", 2)
        m.handle(ask(1, 0, 7, tag_quorum_id=5, catch_up=self.HELD))
        [effect] = m.handle(
            ask(2, 1, 7, tag_quorum_id=5, catch_up=replace(self.HELD, is_wanted=False, has_source=False))
        )
        assert (effect.catch_up, effect.has_source, effect.ranks_disagree) == (False, False, False)

    def test_ranks_that_hold_different_states_disagree_and_catch_up(self):
        m = GatherMachine("a", 2)
        m.handle(ask(1, 0, 7, tag_quorum_id=5, catch_up=self.HELD))
        [effect] = m.handle(ask(2, 1, 7, tag_quorum_id=5, catch_up=CatchUp(True)))
        assert (effect.step, effect.tag_quorum_id, effect.ranks_disagree, effect.works_at) == (3, None, True, 7)
        q = quorum(member("a", 3, catch_up=True, ranks_disagree=True), member("b", 7), quorum_id=6)
        effects = m.handle(QuorumReceived(1, q, stands=True))
        assert [effect.assignment.catches_up for effect in effects[1:]] == [True, True]

    def test_a_rank_that_leaves_off_catching_up_asks_at_the_step_that_it_holds(self):
        """In a quorum that does not stand it heals plainly, and that step is discarded."""
        m = GatherMachine("a", 1)
        m.handle(ask(1, 0, 160, tag_quorum_id=5, catch_up=CatchUp(True, Tag(0, 0))))
        m.handle(QuorumReceived(1, quorum(member("a", 0, catch_up=True), member("b", 160), quorum_id=6)))
        [effect] = m.handle(ask(2, 0, 0, tag_quorum_id=0, catch_up=CatchUp(True)))
        assert (type(effect), effect.step, effect.works_at) == (GroupJoined, 0, None)

    def test_what_it_holds_does_not_go_back_either(self):
        m = GatherMachine("a", 1)
        m.handle(ask(1, 0, 7, tag_quorum_id=5, catch_up=self.HELD))
        m.handle(Withdrawn(1))
        back = ask(2, 0, 7, tag_quorum_id=5, catch_up=replace(self.HELD, held=Tag(2, 2)))
        assert m.handle(back) == [refused(2, InvalidRequest, "step:", "rank 0", "3", "2")]

    def test_in_a_quorum_that_does_not_stand_it_heals_plainly(self):
        m = gathered(1, 0, catch_up=CatchUp(True))
        q = quorum(member("a", 0, catch_up=True), member("b", 7), quorum_id=6)
        [_, effect] = m.handle(QuorumReceived(1, q, stands=False))
        assert (effect.assignment.heals, effect.assignment.catches_up) == (True, False)


class TestIncarnation:
    def test_is_new_when_a_worker_is(self):
        m = gathered(2, step=5)
        m.handle(Withdrawn(2))
        assert m.handle(ask(3, 1, 5, worker="w9")) == [joined(2, step=5, incarnation=1)]
        m.handle(Withdrawn(1))
        m.handle(Withdrawn(3))
        m.handle(ask(4, 0, 5))
        assert m.handle(ask(5, 1, 5, worker="w9")) == [joined(3, step=5, incarnation=1)]

    def test_callers_that_do_not_say_are_always_the_same(self):
        m = gathered(1, step=5, worker="")
        m.handle(Withdrawn(1))
        assert m.handle(ask(2, 0, 6, worker="")) == [joined(2, step=6, size=1)]


class TestAnswers:
    def test_go_to_every_rank_with_its_own_assignment(self):
        m = gathered(2, step=7)
        q = quorum(member("a", 7), member("b", 7), member("c", 3), quorum_id=4)
        effects = m.handle(QuorumReceived(1, q))
        assert effects == answers(q, 1, 2)
        assert [e.assignment.serve_to for e in effects[1:]] == [(2,), ()]
        assert (m.waiting, m.is_joined, m.quorum_id) == ((), False, 4)

    def test_the_step_under_way_is_the_one_that_who_is_behind_heals_to(self):
        m = gathered(1, step=3)
        assert m.handle(QuorumReceived(1, quorum(member("a", 3), member("b", 7))))[0] == RoundAnswered(1, 7)

    def test_init_sync_is_each_ranks_own(self):
        m = GatherMachine("b", 1)
        m.handle(ask(1, 0, init_sync=False))
        q = quorum(member("a"), member("b"))
        assert m.handle(QuorumReceived(1, q))[1].assignment == assign(q, "b", 0, False)

    def test_of_an_earlier_round_never_reach_another(self):
        """torchft: with retries, a late answer of an old step is handed to the next round."""
        m = gathered(2, step=5)
        m.handle(Withdrawn(2))
        m.handle(ask(3, 1, 5))
        late = quorum(member("a", 5), quorum_id=4)
        assert m.handle(QuorumReceived(1, late)) == []
        assert m.handle(JoinFailed(1, Unreachable("gone"))) == []
        assert m.handle(QuorumReceived(2, late)) == answers(late, 1, 3)
        assert m.handle(QuorumReceived(2, late)) == []

    def test_after_a_round_that_was_taken_back_are_nothing(self):
        m = gathered(2)
        m.handle(Withdrawn(2))
        assert m.handle(QuorumReceived(1, quorum(member("a"), quorum_id=4))) == []
        assert (m.quorum_id, m.waiting) == (0, (0,))

    def test_name_the_highest_id_that_was_seen_in_the_next_join(self):
        m = gathered(1)
        m.handle(QuorumReceived(1, quorum(member("a"), quorum_id=4)))
        assert m.handle(ask(2, 0, 1)) == [joined(2, step=1, size=1, seen_quorum_id=4)]

    def test_with_a_lower_id_than_was_seen_are_refused_with_both(self):
        m = gathered(1)
        m.handle(QuorumReceived(1, quorum(member("a"), quorum_id=4)))
        m.handle(ask(2, 0, 1))
        assert m.handle(QuorumReceived(2, quorum(member("a"), quorum_id=3))) == [
            JoinTakenBack(2),
            refused(2, WrongState, "quorum_id:", "3", "4"),
        ]
        assert m.quorum_id == 4

    def test_without_us_in_them_are_an_error_for_every_rank(self):
        m = gathered(2)
        assert m.handle(QuorumReceived(1, quorum(member("b"), quorum_id=4))) == [
            JoinTakenBack(1),
            refused(1, InternalError, "4", "a"),
            refused(2, InternalError, "4", "a"),
        ]
        assert m.quorum_id == 0

    @pytest.mark.parametrize("worker", ["", "w"])
    @pytest.mark.parametrize("group_rank", [0, 1, 2])
    def test_agents_and_torchft_callers_of_one_quorum_agree_who_serves_whom(self, worker: str, group_rank: int):
        """Group a's ranks are Agents, group b's torchft's Managers, or the other way round; all are at step 0."""
        agents, others = {"tag_quorum_id": 0, "incarnation": "x.0"}, {}
        q = quorum(member("a", **(agents if worker else others)), member("b", **(others if worker else agents)))
        serves, takes = [], []
        for name, w in (("a", worker), ("b", "" if worker else "w")):
            m = gathered(3, name=name, worker=w)
            mine = m.handle(QuorumReceived(1, q))[1 + group_rank].assignment
            serves += [(target, mine.replica_rank) for target in mine.serve_to]
            takes += [(mine.replica_rank, mine.heal_from_rank)] if mine.heals else []
        assert len(takes) == 1, "one of the two takes the other's state"
        assert serves == takes


class TestErrors:
    def test_reach_every_waiting_rank_at_once(self):
        m = gathered(2)
        error = LimitReached("full")
        assert m.handle(JoinFailed(1, error)) == [JoinTakenBack(1), RankRefused(1, error), RankRefused(2, error)]
        assert (m.waiting, m.is_joined) == ((), False)


class TestCheckpointAddress:
    def test_of_the_ranks_last_ask(self):
        m = gathered(2, step=5)
        assert m.checkpoint_address(1, 5) == "ckpt1"
        assert m.checkpoint_address(1, None) == "ckpt1"

    @pytest.mark.parametrize("step", [4, 6])
    def test_another_step_is_refused_with_both_numbers(self, step: int):
        with pytest.raises(WrongState, match=f"at step 5, not at {step}"):
            gathered(2, step=5).checkpoint_address(1, step)

    def test_an_unknown_rank_is_refused(self):
        with pytest.raises(InvalidRequest, match="rank: is 2"):
            gathered(2).checkpoint_address(2, None)
        with pytest.raises(WrongState, match="rank 1 has not asked"):
            GatherMachine("a", 2).checkpoint_address(1, None)


# -- drawn events

SIZE = 3
happenings = st.lists(
    st.one_of(
        st.tuples(st.just("all ask"), st.permutations(range(SIZE))),
        st.tuples(
            st.just("ask"),
            st.integers(0, SIZE - 1),
            st.sampled_from([0, 0, 0, 0, 1]),  # steps ahead
            st.sampled_from(["", "w", "w", "w", "v"]),
            st.sampled_from([None, 1, 2]),
            st.sampled_from([None, None, None, 0, 1]),  # steps that the state held is behind
        ),
        st.tuples(st.just("withdraw"), st.integers(0, 5)),
        st.tuples(st.just("answer"), st.integers(0, 2), st.integers(-1, 2)),
        st.tuples(st.just("fail"), st.integers(0, 1)),
    ),
    max_size=60,
)


class Witness:
    """Knows the calls that are open and the round that is asked; judges every effect by them."""

    def __init__(self) -> None:
        self.machine = GatherMachine("a", SIZE)
        self.open: dict[int, QuorumRequest] = {}
        self.round: dict[int, QuorumRequest] = {}  # the asks of the round that has joined, by call
        self.number = 0
        self.rounds = 0
        self.highest_id = 0

    def feed(self, event: Any) -> list[Effect]:
        effects = list(self.machine.handle(event))
        answered: dict[int, RankAnswered] = {}
        for effect in effects:
            match effect:
                case GroupJoined():
                    assert not self.round, "one join at a time"
                    self._check_joined(effect)
                case JoinTakenBack(number):
                    assert self.round
                    assert number == self.number
                    self.round = {}
                case RankRefused(call):
                    assert call in self.open
                    del self.open[call]
                case RankAnswered(call):
                    assert isinstance(event, QuorumReceived)
                    assert event.round == self.number
                    assert call in self.round, "an answer of one round never reaches another"
                    answered[call] = effect
                    del self.open[call]
                case RoundAnswered(quorum_id):
                    assert quorum_id >= self.highest_id
                    self.highest_id = quorum_id
        if answered:
            assert answered.keys() == self.round.keys(), "all ranks or none"
            self.round = {}
        ranks = [a.group_rank for a in self.open.values()]
        assert sorted(ranks) == sorted(set(ranks)) == list(self.machine.waiting)
        assert self.machine.is_joined == bool(self.round)
        assert len(ranks) < SIZE or self.round, "all are there and nothing happens"
        return effects

    def _check_joined(self, effect: GroupJoined) -> None:
        by_rank = {a.group_rank: a for a in self.open.values()}
        assert sorted(by_rank) == list(range(SIZE)), "all ranks are there"
        asks = [by_rank[rank] for rank in range(SIZE)]
        states = {a.catch_up.held or (a.step, a.tag_quorum_id) for a in asks}
        assert effect.step == min(step for step, _ in states)
        is_behind = any(a.catch_up.held for a in asks)
        assert effect.works_at == (max(a.step for a in asks) if is_behind else None)
        assert effect.ranks_disagree == (len(states) > 1)
        assert len({a.step for a in asks}) == 1 or all(a.worker for a in asks)
        assert effect.tag_quorum_id == (None if effect.ranks_disagree else states.pop()[1])
        assert effect.deadline_at == min(a.deadline_at for a in asks)
        assert effect.seen_quorum_id == self.highest_id
        assert effect.round > self.number
        self.number, self.round = effect.round, {a.call: a for a in asks}


def run(drawn: list[tuple[Any, ...]]) -> None:
    witness, step, calls = Witness(), 0, 0
    for what, *details in drawn:
        match what:
            case "all ask":
                for rank in details[0]:
                    calls += 1
                    witness.open[calls] = ask(calls, rank, step, worker="w")
                    witness.feed(witness.open[calls])
            case "ask":
                rank, ahead, worker, tag, lag = details
                calls += 1
                held = None if lag is None or not worker else Tag(max(0, step - lag), tag)
                catch_up = CatchUp(held is not None, held)
                event = ask(
                    calls, rank, step + ahead, 100.0 - calls, worker=worker, tag_quorum_id=tag, catch_up=catch_up
                )
                witness.open[calls] = event
                witness.feed(event)
            case "withdraw":
                call = sorted(witness.open)[details[0]] if details[0] < len(witness.open) else 10_000
                if witness.open.pop(call, None) is None or not witness.round:
                    witness.feed(Withdrawn(call))
                else:
                    assert witness.feed(Withdrawn(call)) == [JoinTakenBack(witness.number)]
            case "answer":
                older, higher = details
                known = witness.number - older
                members = (member("a", step), member("b", step + 1))
                effects = witness.feed(QuorumReceived(known, quorum(*members, quorum_id=witness.highest_id + higher)))
                step += any(isinstance(e, RoundAnswered) for e in effects)
            case "fail":
                witness.feed(JoinFailed(witness.number - details[0], Unreachable("x")))


@settings(max_examples=200, deadline=None)
@given(happenings)
@example([("all ask", [0, 1, 2]), ("ask", 0, 0, "", None, None), ("ask", 1, 1, "w", None, None)])
def test_rounds_never_mix(drawn: list[tuple[Any, ...]]):
    run(drawn)


def hands_a_late_answer_on(self: GatherMachine, event: Any, honest=GatherMachine.handle) -> Any:
    is_late = isinstance(event, QuorumReceived) and self._is_joined
    return self._receive(event.quorum, event.stands) if is_late else honest(self, event)


def keeps_the_join(self: GatherMachine, call: int) -> list[Effect]:
    self._asks = {rank: other for rank, other in self._asks.items() if other.call != call}
    return []


def answers_the_first_rank_only(
    self: GatherMachine, q: Quorum, stands: bool, honest=GatherMachine._receive
) -> list[Effect]:
    return honest(self, q, stands)[:2]


def joins_without_the_last(self: GatherMachine, event: QuorumRequest, honest=GatherMachine._ask) -> list[Effect]:
    effects = honest(self, event)
    return effects or (self._join() if len(self._asks) == self._size - 1 else [])


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("handle", hands_a_late_answer_on),
        ("_withdraw", keeps_the_join),
        ("_receive", answers_the_first_rank_only),
        ("_ask", joins_without_the_last),
    ],
)
def test_a_wrong_rule_is_noticed(monkeypatch: pytest.MonkeyPatch, name: str, wrong: object):
    @settings(max_examples=2000, deadline=None, database=None, derandomize=True, report_multiple_bugs=False)
    @given(happenings)
    def hunt(drawn: list[tuple[Any, ...]]):
        run(drawn)

    monkeypatch.setattr(GatherMachine, name, wrong)
    with pytest.raises((AssertionError, KeyError)):
        hunt()
