"""Lineage: which groups are up to date, which ids were assigned, and which candidates a quorum takes."""

from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lighthouse.job.lineage import (
    RANGES_KEPT,
    Claim,
    History,
    Numbering,
    assign_steps,
    choose,
    foreign,
    size_for,
    tag_of,
)
from lighthouse.job.records import LastAssignment, QuorumRecord
from lighthouse_protocol.messages.membership import Participant, Quorum
from tests.lighthouse.builders import group


def test_nothing_but_steps_is_changed():
    candidates = [group("a", 5, data="x", tag_quorum_id=1), group("b", 5, data="y", tag_quorum_id=2)]
    lineage = assign_steps(candidates, [1, 2])
    assert lineage.participants == (replace(candidates[0], step=4), candidates[1])
    assert (lineage.max_step, lineage.tag_quorum_id) == (5, 2)


class TestTagOf:
    """The tag of a member that sends none is (its step, the quorum last handed to that incarnation)."""

    @pytest.mark.parametrize(
        ("step", "sent", "told", "tag"),
        [
            (5, 7, None, 7),
            (5, 7, LastAssignment(9, 4, 8), 7),
            (0, None, None, 0),
            (0, 7, None, 0),
            (5, None, None, None),
            (5, None, LastAssignment(9, 4, 8), 9),
            (6, None, LastAssignment(9, 4, 8), 9),
            (4, None, LastAssignment(9, 4, 8), 8),
            (4, None, LastAssignment(9, 4, None), None),
            (3, None, LastAssignment(9, 4, 8), None),
            (99, None, LastAssignment(9, 4, None, was_at=99), None),
            (100, None, LastAssignment(9, 4, None, was_at=99), None),
            (5, None, LastAssignment(9, 4, None, was_at=99), 9),
        ],
    )
    def test_by_table(self, step: int, sent: int | None, told: LastAssignment | None, tag: int | None):
        assert tag_of(group("a", step, tag_quorum_id=sent), told) == tag


states = st.tuples(st.integers(0, 3), st.none() | st.integers(1, 3), st.booleans())


@settings(max_examples=300)
@given(st.lists(states, min_size=1, max_size=7))
@example([(3, None, True), (0, None, False)])
def test_those_handed_out_at_the_highest_step_hold_one_state(drawn: list[tuple[int, int | None, bool]]):
    """S3: who trains without healing holds the same state."""
    candidates = [group(f"g{i}", step, ranks_disagree=odd) for i, (step, _, odd) in enumerate(drawn)]
    tags = [0 if step == 0 else tag for step, tag, _ in drawn]
    lineage = assign_steps(candidates, tags)
    top = max(p.step for p in lineage.participants)
    up_to_date = [i for i, p in enumerate(lineage.participants) if p.step == top]
    assert top == lineage.max_step
    assert len({(candidates[i].step, tags[i]) for i in up_to_date}) == 1
    assert {tags[i] for i in up_to_date} == {lineage.tag_quorum_id}
    assert all(p.step <= c.step for c, p in zip(candidates, lineage.participants, strict=True))
    sound = [c for c in candidates if not c.ranks_disagree and c.step]
    assert not sound or not any(candidates[i].ranks_disagree for i in up_to_date)
    assert up_to_date == plainly_up_to_date(candidates, tags)


def plainly_up_to_date(candidates: list[Participant], tags: list[int | None]) -> list[int]:
    """The largest set of equal known tags at the highest step of those who may be healed from."""
    all_of_them = range(len(candidates))
    sources = [i for i in all_of_them if candidates[i].step > 0 and not candidates[i].ranks_disagree] or all_of_them
    top = max(candidates[i].step for i in sources)
    at_top = [i for i in sources if candidates[i].step == top]
    sets = [[i for i in at_top if tags[i] == tag] for tag in {tags[i] for i in at_top} if tag is not None]
    one = at_top if candidates[at_top[0]].ranks_disagree else at_top[:1]
    return max(sets, key=lambda same: (len(same), tags[same[0]]), default=one)


# -- a running job's history wins


class TestHistory:
    def test_ranges_are_bounded_and_keep_the_newest(self):
        history = History()
        for quorum_id in [1, 2, 3, *range(10, 10 + 4 * RANGES_KEPT, 2)]:
            history.add_quorum(quorum_id)
        assert len(history.ranges) == RANGES_KEPT
        assert 8 + 4 * RANGES_KEPT in history
        assert 9 + 4 * RANGES_KEPT not in history
        assert 2 not in history
        consecutive = History()
        for quorum_id in range(5, 5000):
            consecutive.add_quorum(quorum_id)
        assert consecutive.ranges == ((5, 4999),)


drawn_claims = st.builds(
    Claim,
    st.integers(0, 4),
    st.none() | st.integers(1, 4),
    st.booleans(),
    st.none() | st.integers(0, 1),
    st.booleans(),
    st.none() | st.integers(0, 4),
)


@settings(max_examples=400)
@given(st.lists(drawn_claims, min_size=1, max_size=7), st.sets(st.integers(1, 4)), st.integers(0, 4))
def test_a_running_history_wins_against_a_dumb_version(drawn: list[Claim], named: set[int], formed_at: int):
    claims = [claim if claim.step else replace(claim, tag=0) for claim in drawn]
    candidates = [group(f"g{i}", c.step, ranks_disagree=c.ranks_disagree) for i, c in enumerate(claims)]
    tags = [claim.tag for claim in claims]
    lineage = assign_steps(candidates, tags, foreign(claims, History((i, i) for i in named), formed_at))
    top = max(p.step for p in lineage.participants)
    up_to_date = [i for i, p in enumerate(lineage.participants) if p.step == top]
    kin = [i for i, claim in enumerate(claims) if claim.step and claim.tag in named]
    members = [claims[i] for i in kin if claims[i].is_member and not claims[i].ranks_disagree]
    holders = [claim.step for claim in members]
    if not holders:
        assert up_to_date == plainly_up_to_date(candidates, tags)
        return
    reached = max([*holders, formed_at, *(claim.works_at for claim in members if claim.works_at is not None)])
    may_be = {None: 99, 0: max(holders), 1: reached + 1}
    kin = [i for i in kin if claims[i].is_member or claims[i].step <= may_be[claims[i].may_be_ahead]]
    expected = plainly_up_to_date([candidates[i] for i in kin], [tags[i] for i in kin])
    assert up_to_date == [kin[i] for i in expected]
    assert top >= max(holders)


class TestAheadOfTheMembers:
    """Members at steps 6 and 7 of quorum 3, whose id everybody can read."""

    MEMBERS = (Claim(6, 3, is_member=True, may_be_ahead=1), Claim(7, 3, is_member=True, may_be_ahead=1))

    def heals(self, claim: Claim) -> bool:
        *members, stranger = foreign([*self.MEMBERS, claim], History([(1, 3)]))
        assert members == [False, False]
        return stranger

    @pytest.mark.parametrize(("may_be_ahead", "furthest"), [(0, 7), (1, 8)])
    def test_one_from_outside_is_ahead_by_no_more_than_it_may_be(self, may_be_ahead: int, furthest: int):
        for step in (6, 7, 8, 9, 10**6):
            claim = Claim(step, 3, is_member=False, may_be_ahead=may_be_ahead)
            assert self.heals(claim) == (step > furthest)

    @pytest.mark.parametrize("may_be_ahead", [0, 1])
    def test_the_quorum_has_come_further_than_members_that_were_to_heal(self, may_be_ahead: int):
        """Only they ask: one at step 2, and one that catches up at step 8."""
        members = [Claim(2, 3, is_member=True), Claim(1, 3, is_member=True, works_at=8)]
        outside = [Claim(step, 3, is_member=False, may_be_ahead=may_be_ahead) for step in (2, 3, 9, 10)]
        expected = [False, True, True, True] if may_be_ahead == 0 else [False, False, False, True]
        assert foreign([*members, *outside], History([(1, 3)]), formed_at=7)[2:] == expected
        assert foreign([members[0], outside[3]], History([(1, 3)]), formed_at=9)[1] == (may_be_ahead == 0)

    def test_a_member_that_is_ahead_by_more_stays_one(self):
        """It may hold a state that the others have lost."""
        assert not self.heals(Claim(12, 3, is_member=True, may_be_ahead=1))


def test_an_id_that_was_told_is_known_if_it_was_written_down_or_given_out_here():
    numbering = Numbering(100, QuorumRecord(50, Quorum(50, (group("a"),))))
    assert numbering.is_unknown(51)
    assert numbering.choose_id(0, is_repeated=False)
    assert numbering.choose_id(0, is_repeated=False)
    assert numbering.quorum_id == 101
    known = {seen_id: not numbering.is_unknown(seen_id) for seen_id in (1, 50, 51, 99, 100, 101, 102)}
    assert known == {1: True, 50: True, 51: False, 99: False, 100: True, 101: True, 102: False}


@pytest.mark.parametrize(
    ("candidates", "allowed", "active", "size"),
    [
        (0, set(), None, 0),
        (3, set(), None, 3),
        (3, {2, 4, 8}, None, 2),
        (4, {2, 4, 8}, None, 4),
        (100, {2, 4, 8}, None, 8),
        (1, {2, 4, 8}, None, 0),
        (5, set(), 4, 4),
        (3, set(), 4, 3),
        (5, {2, 4, 8}, 3, 2),
        (5, {4}, 3, 0),
    ],
)
def test_size_for(candidates: int, allowed: set[int], active: int | None, size: int):
    assert size_for(candidates, allowed, active) == size


def names(chosen: list) -> str:
    return "".join(p.replica_id for p in chosen)


def test_a_member_of_another_history_is_not_at_their_head():
    """It is to heal, however high its step: a quorum of the foreign alone would end the running job's history."""
    members = [group("a", 9), group("b", 5), group("c", 4)]
    assert names(choose(members, set("abc"), 1, foreign={"a"})) == "b"
    assert names(choose(members, set("abc"), 2, foreign={"a", "b"})) == "ca"


@given(st.lists(st.tuples(st.sampled_from("abcdefgh"), st.integers(0, 3)), unique_by=lambda c: c[0]), st.data())
def test_never_a_newcomer_before_a_member(drawn: list[tuple[str, int]], data: st.DataObject):
    candidates = [group(name, step) for name, step in drawn]
    previous = data.draw(st.sets(st.sampled_from("abcdefgh")))
    size = data.draw(st.integers(0, len(candidates)))
    chosen, left = choose(candidates, previous, size), []
    assert len(chosen) == size
    assert all(c in candidates for c in chosen)
    left = [c for c in candidates if c not in chosen]
    if any(c.replica_id in previous for c in left):
        assert all(c.replica_id in previous for c in chosen)
    newcomers = [c for c in candidates if c.replica_id not in previous]
    taken = [c for c in newcomers if c in chosen]
    assert taken == newcomers[: len(taken)]
    members = [c.step for c in candidates if c.replica_id in previous]
    if size and members:
        assert max(members) in [c.step for c in chosen]
