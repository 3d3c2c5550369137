"""Heal assignment: by example, and against the dumb version."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lighthouse_protocol.messages.membership import Assignment, Participant, Quorum
from manager.group.rules.assignment import assign, is_for_one_step
from tests.manager.builders import member, quorum
from tests.manager.plain_assignment import plan


def test_the_whole_answer_of_one_up_to_date():
    q = quorum(member("a", 7), member("b", 7, commit_failures=2), member("c", 3), member("d", 5), quorum_id=9)
    assert assign(q, "a", 0, init_sync=True) == Assignment(
        quorum_id=9,
        replica_rank=0,
        replica_world_size=4,
        replica_ids=("a", "b", "c", "d"),
        store_address="a:2",
        max_step=7,
        max_rank=0,
        max_world_size=2,
        contributors=2,
        primary_address="a:1",
        serve_to=(2,),
        commit_failures=2,
        place=0,
        healing=(2, 3),
    )


def test_the_whole_answer_of_one_that_heals():
    q = quorum(member("a", 7), member("b", 7), member("c", 3), member("d", 5))
    answer = assign(q, "c", 1, init_sync=True)
    assert answer == Assignment(
        quorum_id=1,
        replica_rank=2,
        replica_world_size=4,
        replica_ids=("a", "b", "c", "d"),
        store_address="b:2",
        max_step=7,
        max_rank=None,
        max_world_size=2,
        contributors=2,
        primary_address="b:1",
        heal_from_rank=1,
        heal_from_address="b:1",
        other_sources=("a:1",),
        healing=(2, 3),
    )
    assert answer.heals


@pytest.mark.parametrize("group_rank", [0, 1, 2, 3])
def test_group_ranks_take_from_and_meet_at_different_groups(group_rank: int):
    q = quorum(member("a", 7), member("b", 7), member("c", 3), member("d", 5))
    source = [0, 1][group_rank % 2]
    assert assign(q, "c", group_rank, init_sync=True).heal_from_rank == source
    assert assign(q, "d", group_rank, init_sync=True).heal_from_rank == 1 - source
    assert assign(q, "a", group_rank, init_sync=True).store_address == ["a:2", "b:2"][source]


class TestFirstStep:
    def test_everybody_but_the_primary_takes_its_state(self):
        q = quorum(member("a"), member("b"), member("c"))
        assert [assign(q, name, 1, init_sync=True).heal_from_rank for name in "abc"] == [1, None, 1]
        assert assign(q, "b", 1, init_sync=True).serve_to == (0, 2)
        assert assign(q, "b", 1, init_sync=True).contributors == 1

    def test_where_all_send_tags_all_ranks_of_a_group_take_from_one_group(self):
        q = quorum(*(member(name, tag_quorum_id=0) for name in "abc"))
        for group_rank in range(3):
            answers = [assign(q, name, group_rank, init_sync=True) for name in "abc"]
            assert [answer.heal_from_rank for answer in answers] == [None, 0, 0]

    def test_without_init_sync_nobody(self):
        q = quorum(member("a"), member("b"))
        assert [assign(q, name, 0, init_sync=False).heals for name in "ab"] == [False, False]

    def test_after_it_init_sync_means_nothing(self):
        q = quorum(member("a", 1), member("b", 1))
        assert [assign(q, name, 0, init_sync=True).heals for name in "ab"] == [False, False]


class TestHealsFirst:
    """What contributes in the step in which it heals."""

    def answers(self, *said: bool | None, step: int = 3) -> list[Assignment]:
        members = [member(name, 7, heals_first=heals_first) for name, heals_first in zip("ab", said, strict=False)]
        q = quorum(*members, member("c", step, heals_first=said[2]))
        found = [assign(q, name, 0, init_sync=True, stands=True) for name in "abc"]
        return [answer for answer in found if answer is not None]

    def test_where_all_say_whether_they_do_one_that_does_counts_in_that_step(self):
        answers = self.answers(False, True, True)
        assert [(a.contributors, a.place) for a in answers] == [(3, 0), (3, 1), (3, 2)]
        assert [(a.heals, a.max_rank, a.has_healing) for a in answers] == [
            (False, 0, True),
            (False, 1, True),
            (True, None, True),
        ]

    def test_beside_one_that_does_not_say_it_adds_zeros(self):
        """Such a one divides by those at max_step, as torchft does."""
        answers = self.answers(None, False, True)
        assert [(a.contributors, a.place) for a in answers] == [(2, 0), (2, 1), (2, None)]
        assert answers[2].heals

    def test_one_that_is_told_too_late_adds_zeros_and_is_dealt_no_source(self):
        answers = self.answers(False, False, False)
        assert [(a.contributors, a.place, a.has_healing) for a in answers] == [
            (2, 0, False),
            (2, 1, False),
            (2, None, False),
        ]
        assert (answers[2].heals, [a.serve_to for a in answers]) == (False, [(), (), ()])

    @pytest.mark.parametrize(
        ("says", "is_one"),
        [((False, False, False), True), ((False, False, True), False), ((None, False, False), False)],
    )
    def test_after_one_that_is_told_too_late_there_is_another_quorum(self, says: tuple[bool | None, ...], is_one: bool):
        members = (member("a", 7, heals_first=says[0]), member("b", 7, heals_first=says[1]))
        q = quorum(*members, member("c", 3, heals_first=says[2]))
        assert is_for_one_step(q, init_sync=True, group_world_size=2) == is_one
        assert not is_for_one_step(quorum(*members), init_sync=True, group_world_size=2)

    def test_at_the_first_step_too_where_all_take_one_s_state(self):
        q = quorum(*(member(name, tag_quorum_id=0, heals_first=False) for name in "ab"))
        assert [is_for_one_step(q, init_sync, group_world_size=1) for init_sync in (True, False)] == [True, False]

    def test_one_that_catches_up_is_not_late(self):
        q = quorum(member("a", 7, heals_first=False), member("b", 3, catch_up=True, heals_first=False))
        assert not is_for_one_step(q, init_sync=True, group_world_size=1)

    def test_at_the_first_step_a_group_whose_ranks_disagree_has_no_state_to_start_from(self):
        """Its rank 0 has healed, and its rank 1 has not: nobody takes the one's state, and none the other's."""
        a, b = member("a", ranks_disagree=True, heals_first=True), member("b", tag_quorum_id=0, heals_first=True)
        for group_rank in (0, 1):
            answers = [assign(quorum(a, b), name, group_rank, init_sync=True, stands=True) for name in "ab"]
            assert [answer.heal_from_rank for answer in answers if answer] == [1, None]
        alone = assign(quorum(a, replace(b, ranks_disagree=True)), "b", 1, init_sync=True)
        assert alone is not None
        assert alone.heal_from_rank == 0, "where all disagree one is as good as the other, and it says so"

    def test_at_the_first_step_all_contribute_the_primary_s_state(self):
        q = quorum(*(member(name, tag_quorum_id=0, heals_first=True) for name in "abc"))
        answers = [assign(q, name, 1, init_sync=True, stands=True) for name in "abc"]
        assert [(a.heal_from_rank, a.place, a.contributors) for a in answers if a] == [
            (None, 0, 3),
            (0, 1, 3),
            (0, 2, 3),
        ]

    def test_one_that_catches_up_counts_for_nothing_whatever_it_says(self):
        q = quorum(member("a", 7, heals_first=False), member("b", 3, catch_up=True, heals_first=True))
        answer = assign(q, "b", 0, init_sync=True, stands=True)
        assert answer is not None
        assert (answer.catches_up, answer.place, answer.contributors) == (True, None, 1)


class TestCatchingUp:
    Q = quorum(member("a", 7), member("b", 3, catch_up=True), member("c", 7), member("d", 5))

    def test_one_that_is_behind_and_says_so_contributes_nothing_and_is_dealt_a_source(self):
        answer = assign(self.Q, "b", 0, init_sync=True, stands=True)
        assert (answer.catches_up, answer.heal_from_rank, answer.max_rank, answer.contributors) == (True, 0, None, 2)
        assert assign(self.Q, "a", 0, init_sync=True, stands=True).serve_to == (1,)
        assert assign(self.Q, "d", 0, init_sync=True, stands=True).catching_up == (1,), "d heals plainly"

    def test_who_has_a_source_is_dealt_none_and_serves_nobody(self):
        q = quorum(member("a", 7), member("b", 3, catch_up=True, has_source=True), member("c", 5))
        answers = [assign(q, name, 0, init_sync=True, stands=True) for name in "abc"]
        assert [a.heal_from_rank for a in answers] == [None, None, 0]
        assert [a.contributors for a in answers] == [1, 1, 1]
        assert [a.serve_to for a in answers] == [(2,), (), ()]

    def test_nobody_does_in_a_quorum_that_does_not_stand(self):
        answer = assign(self.Q, "b", 0, init_sync=True)
        assert (answer.catching_up, answer.heal_from_rank) == ((), 0)

    def test_nobody_does_at_the_first_step(self):
        q = quorum(member("a", catch_up=True), member("b", catch_up=True))
        assert [assign(q, name, 0, init_sync=True, stands=True).catching_up for name in "ab"] == [(), ()]

    def test_others_are_waited_for_only_where_one_heals_plainly(self):
        plain = assign(self.Q, "a", 0, init_sync=True, stands=True)
        beside = assign(quorum(*self.Q.participants[:3]), "a", 0, init_sync=True, stands=True)
        assert (plain.has_healing, beside.has_healing) == (True, False)

    def test_the_state_that_the_step_begins_with_is_named(self):
        q = quorum(member("a", 7, tag_quorum_id=4), member("b", 3, tag_quorum_id=2, catch_up=True))
        assert assign(q, "b", 0, init_sync=True, stands=True).tag_quorum_id == 4


def test_one_that_is_not_in_it():
    assert assign(quorum(member("a")), "b", 0, init_sync=True) is None


def test_is_known_by_the_id_that_it_writes():
    uuid = "11111111-2222-3333-4444-555555555555"
    q = quorum(member("a", incarnation=uuid, wire_id=f"a:{uuid}"))
    assert assign(q, f"a:{uuid}", 0, init_sync=True).replica_ids == (f"a:{uuid}",)
    assert assign(q, "a", 0, init_sync=True) is None


quorums = st.lists(
    st.builds(
        lambda name, step, failures, catch_up, has_source, compares, heals_first, ranks_disagree: member(
            name,
            step,
            commit_failures=failures,
            catch_up=catch_up,
            has_source=has_source,
            compares=compares,
            heals_first=heals_first,
            ranks_disagree=ranks_disagree,
        ),
        st.text("abcd", min_size=1, max_size=3),
        st.sampled_from([0, 0, 1, 2, 5]),
        st.integers(0, 2),
        st.booleans(),
        st.booleans(),
        st.sampled_from([True, True, True, False]),
        st.sampled_from([False, True, True, True, None]),
        st.sampled_from([False, False, False, True]),
    ),
    min_size=1,
    max_size=8,
    unique_by=lambda p: p.wire_id,
).map(lambda members: Quorum(4, tuple(sorted(members, key=lambda p: p.wire_id))))


def tagged(q: Quorum) -> Quorum:
    """The same, of Agents."""
    tags = (None if p.ranks_disagree else p.step and 3 for p in q.participants)
    return Quorum(
        q.quorum_id, tuple(replace(p, tag_quorum_id=tag) for p, tag in zip(q.participants, tags, strict=True))
    )


@settings(max_examples=300, deadline=None)
@given(quorums, st.integers(0, 5), st.booleans(), st.booleans(), st.booleans())
def test_like_the_dumb_version(q: Quorum, group_rank: int, init_sync: bool, all_tagged: bool, stands: bool):
    q = tagged(q) if all_tagged else q
    expected = plan(q, group_rank, init_sync, stands)
    for place, participant in enumerate(q.participants):
        answer = assign(q, participant.wire_id, group_rank, init_sync, stands=stands)
        source = expected.takes_from.get(participant.wire_id)
        assert answer == Assignment(
            quorum_id=4,
            replica_rank=place,
            replica_world_size=len(q.participants),
            replica_ids=tuple(p.wire_id for p in expected.members),
            store_address=expected.primary.store_address,
            max_step=expected.max_step,
            max_rank=expected.at_max.index(participant) if participant in expected.at_max else None,
            max_world_size=len(expected.at_max),
            contributors=len(expected.contributors),
            primary_address=expected.primary.address,
            heal_from_rank=q.participants.index(source) if source else None,
            heal_from_address=source.address if source else "",
            serve_to=tuple(
                i
                for i, other in enumerate(q.participants)
                if expected.takes_from.get(other.wire_id, other) is participant and other is not participant
            ),
            commit_failures=max(p.commit_failures for p in q.participants),
            other_sources=stand_ins([p for p in q.participants if p.wire_id in expected.sources], source),
            catching_up=tuple(i for i, p in enumerate(q.participants) if p in expected.catching_up),
            tag_quorum_id=expected.at_max[0].tag_quorum_id,
            compares=expected.compares,
            place=expected.contributors.index(participant.wire_id)
            if participant.wire_id in expected.contributors
            else None,
            healing=tuple(i for i, p in enumerate(q.participants) if p in expected.healing),
        )


def stand_ins(sources: list[Participant], first: Participant | None) -> tuple[str, ...]:
    """The four that follow `first` in the round."""
    if first is None:
        return ()
    at = sources.index(first)
    return tuple(source.address for source in (sources[at + 1 :] + sources[:at])[:4])


@settings(max_examples=200, deadline=None)
@given(quorums, st.integers(0, 5), st.booleans(), st.booleans(), st.booleans())
def test_all_managers_of_a_quorum_agree(q: Quorum, group_rank: int, init_sync: bool, all_tagged: bool, stands: bool):
    q = tagged(q) if all_tagged else q
    answers = [assign(q, p.wire_id, group_rank, init_sync, stands=stands) for p in q.participants]
    assert len({(a.catching_up, a.tag_quorum_id) for a in answers}) == 1
    assert len({(a.store_address, a.max_step, a.contributors, a.primary_address, a.replica_ids) for a in answers}) == 1
    served = [(target, a.replica_rank) for a in answers for target in a.serve_to]
    taken = [(a.replica_rank, a.heal_from_rank) for a in answers if a.heals]
    assert sorted(served) == taken
    assert not {source for _, source in taken} & {target for target, _ in taken}, "nobody heals from one that heals"
    assert [a.place for a in answers if a.place is not None] == list(range(answers[0].contributors))
    assert {a.healing for a in answers} == {answers[0].healing}
    all_say = all(p.heals_first is not None for p in q.participants)
    for p, a in zip(q.participants, answers, strict=True):
        is_behind = p.step < a.max_step or a.heals
        is_late = init_sync and a.max_step == 0 and all_say and not p.heals_first  # dealt no source, and not counted
        counts = not is_behind or (all_say and p.heals_first and not a.catches_up)
        assert is_late or (a.place is not None) == counts
        assert a.catches_up or a.heals == (a.replica_rank in a.healing)
    assert [a.max_rank for a in answers if a.max_rank is not None] == list(range(answers[0].max_world_size))
    load = [
        len(a.serve_to)
        for p, a in zip(q.participants, answers, strict=True)
        if p.step == a.max_step and not a.heals and a.place is not None
    ]
    assert max(load) - min(load) <= 1, "dealt round-robin"


@settings(max_examples=200, deadline=None)
@given(quorums, st.integers(1, 3), st.booleans(), st.booleans())
def test_a_quorum_is_for_one_step_where_any_rank_of_a_group_adds_zeros_and_has_no_source(
    q: Quorum, size: int, init_sync: bool, all_tagged: bool
):
    q = tagged(q) if all_tagged else q
    answers = [
        assign(q, p.wire_id, group_rank, init_sync, stands=True) for p in q.participants for group_rank in range(size)
    ]
    late = [a for a in answers if a is not None and a.place is None and not (a.heals or a.catches_up)]
    assert is_for_one_step(q, init_sync, size) == bool(late)


@given(quorums, st.integers(0, 3))
def test_nothing_but_steps_and_ids_decides(q: Quorum, group_rank: int):
    """torchft's managers see less of a participant than ours: they must come to the same answer. One is theirs."""
    theirs = replace(q.participants[0], heals_first=None, ranks_disagree=False)
    q = Quorum(4, (theirs, *q.participants[1:]))
    poor = Quorum(4, tuple(Participant(p.wire_id, step=p.step, address=p.address) for p in q.participants))
    for p in q.participants:
        rich, less = (assign(which, p.wire_id, group_rank, init_sync=True) for which in (q, poor))
        beside = {"store_address": "", "commit_failures": 0, "compares": False}
        assert replace(rich, **beside) == replace(less, **beside)
