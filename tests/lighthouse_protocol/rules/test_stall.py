"""The verdict, rule by rule, and its promises for drawn ranks."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lighthouse_protocol.messages.progress import OpenPhase, RankName, RankView
from lighthouse_protocol.rules.stall import Kind, Limits, furthest_behind, judge, time_left_s
from tests.lighthouse_protocol.views import after, all_reduce, rank

SECOND, THIRD = all_reduce(2), all_reduce(3)


def text(*ranks: RankView, is_complete: bool = True) -> str | None:
    verdict = judge(ranks, is_complete=is_complete)
    return None if verdict is None else verdict.text


class TestLimits:
    limits = Limits(floor_s=60, factor=5, first_s=600)

    @pytest.mark.parametrize(("longest_s", "limit_s"), [(1, 60), (12, 60), (12.5, 62.5), (100, 500)])
    def test_a_multiple_of_the_longest_and_a_floor(self, longest_s: float, limit_s: float):
        assert self.limits.limit_s(longest_s, is_first=False) == limit_s

    def test_what_was_never_seen_and_a_first_step_have_an_allowance(self):
        assert self.limits.limit_s(0, is_first=False) == 600
        assert self.limits.limit_s(1, is_first=True) == 600
        assert self.limits.limit_s(200, is_first=True) == 1000


class TestSomethingMoves:
    def test_one_that_runs_within_its_limit(self):
        ranks = [rank(0, still_s=61), rank(1, still_s=60), rank(2, inside=SECOND, still_s=1000)]
        assert judge(ranks) is None
        assert judge([replace(r, beat_age_s=0.1) for r in ranks]) is not None

    def test_each_by_the_limit_of_its_own_phase(self):
        assert judge([rank(0, still_s=100, limit_s=60), rank(1, "checkpoint", still_s=100, limit_s=500)]) is None
        assert judge([rank(0, still_s=501, limit_s=60), rank(1, "checkpoint", still_s=501, limit_s=500)]) is not None

    def test_one_that_has_just_begun_to_wait_is_no_movement(self):
        ranks = [rank(0, inside=THIRD, still_s=1), rank(1, left=after(SECOND), still_s=61)]
        assert text(*ranks) == "1 behind in step 1, 0 waiting in all_reduce"

    def test_who_waits_has_no_limit_of_its_own(self):
        assert judge([rank(n, "checkpoint", inside=SECOND, still_s=61, limit_s=600) for n in range(2)]) is not None

    def test_where_nobody_runs_one_that_came_within_the_floor(self):
        assert judge([rank(0, inside=SECOND, still_s=1000), rank(1, inside=SECOND, still_s=60)]) is None
        assert judge([rank(0, inside=SECOND, still_s=1000), rank(1, inside=SECOND, still_s=61)]) is not None

    def test_nobody_is_there(self):
        assert judge([]) is None

    def test_a_declared_wait_goes_by_the_clock_of_who_is_waited_for(self):
        waiting = [rank(n, waits_for="rank 0 validation", still_s=5000) for n in range(1, 8)]
        validating = rank(0, OpenPhase("validation", 20, 195), still_s=3)
        assert judge([validating, *waiting]) is None
        stuck = rank(0, OpenPhase("validation", 20, 195), still_s=61)
        assert text(stuck, *waiting) == "0 behind in validation 20/195, 1-7 waiting for rank 0 validation"


class TestBehind:
    def test_who_has_not_entered_the_collective(self):
        assert text(rank(0, inside=THIRD), rank(1, left=after(SECOND)), rank(2, inside=THIRD)) == (
            "1 behind in step 1, 0, 2 waiting in all_reduce"
        )

    def test_only_the_furthest(self):
        ranks = [rank(0, inside=all_reduce(4)), rank(1, left=after(THIRD)), rank(2, left=after(SECOND))]
        assert text(*ranks) == "2 behind in step 1, 0 waiting in all_reduce, 1 in step 1"

    def test_one_still_in_a_collective_that_the_others_have_left(self):
        assert text(rank(0, left=after(THIRD)), rank(1, inside=THIRD)) == "1 behind in all_reduce, 0 in step 1"

    def test_who_is_in_a_collective_that_a_declared_waiter_has_not_entered_is_no_suspect(self):
        ranks = [rank(0, inside=THIRD), rank(1, inside=all_reduce(4)), rank(2, left=after(SECOND), waits_for="rank 0")]
        assert text(*ranks) == "everybody waits: 0-1 waiting in all_reduce, 2 waiting for rank 0"

    def test_a_newer_quorum_counts_more_than_its_number_and_the_step(self):
        """The one in quorum 1 has not come into quorum 2, though it has done more steps than the one that heals."""
        assert text(rank(0, step=3, inside=all_reduce(1, quorum_id=2)), rank(1, step=7, left=after(THIRD))) == (
            "1 behind in step 7, 0 waiting in all_reduce"
        )

    def test_a_newer_quorum_counts_more_than_the_step_where_both_run(self):
        ranks = [rank(0, step=3, left=after(all_reduce(1, quorum_id=2))), rank(1, step=7, left=after(THIRD))]
        assert text(*ranks) == "1 behind in step 7, 0 in step 3"

    def test_by_steps(self):
        assert text(rank(0, step=3), rank(1, step=2)) == "1 behind in step 2, 0 in step 3"

    def test_by_a_phase_that_others_have_left(self):
        inside = [rank(n, OpenPhase("validation", 0, 25)) for n in (1, 2)]
        assert text(rank(0, entered={"validation": 1}), *inside) == "1-2 behind in validation 0/25, 0 in step 1"

    def test_by_a_phase_that_others_have_entered(self):
        assert text(rank(0, "validation"), rank(1, "validation"), rank(2)) == "2 behind in step 1, 0-1 in validation"

    def test_by_ticks(self):
        ranks = [rank(n, OpenPhase("validation", done, 25)) for n, done in enumerate((3, 4, 3))]
        assert text(*ranks) == "0, 2 behind in validation 3/25, 1 in validation 4/25"

    def test_only_the_furthest_by_ticks(self):
        ranks = [rank(n, OpenPhase("validation", done, 25), left=after(SECOND)) for n, done in enumerate((5, 3, 4))]
        assert text(*ranks) == "1 behind in validation 3/25, 0 in validation 5/25, 2 in validation 4/25"
        assert text(*ranks, rank(3, inside=THIRD)) == (
            "1 behind in validation 3/25, 0 in validation 5/25, 2 in validation 4/25, 3 waiting in all_reduce"
        )

    def test_a_phase_of_one_rank_alone_makes_nobody_behind(self):
        assert text(rank(0, entered={"checkpoint": 1}), rank(1), rank(2)) == "nobody behind: 0-2 in step 1"

    def test_contradicting_phases_order_nobody(self):
        ranks = [
            rank(0, entered={"a": 2, "b": 1}), rank(1, entered={"a": 1, "b": 2}), rank(2, entered={"a": 2, "b": 1})
        ]  # fmt: skip
        assert text(*ranks) == "nobody behind: 0-2 in step 1"

    def test_one_beside_those_that_are_behind_each_other_is_none(self):
        """Ranks 2 and 3 stand aside: only 0 is behind somebody."""
        counts = [{"a": 1, "b": 1}, {"a": 2, "b": 1}, {"a": 0, "b": 2}, {"a": 0, "b": 2}]
        assert [r.name.group_rank for r in furthest_behind([rank(n, entered=c) for n, c in enumerate(counts)])] == [0]

    def test_names_groups(self):
        ranks = [
            rank(0, inside=THIRD, group="a"),
            rank(1, left=after(SECOND), group="a"),
            rank(0, inside=THIRD, group="b"),
        ]
        verdict = judge(ranks)
        assert verdict is not None
        assert (verdict.kind, verdict.behind) == (Kind.BEHIND, (RankName("a", 1),))
        assert verdict.text == "a/1 behind in step 1, a/0, b/0 waiting in all_reduce"


class TestNobodyBehind:
    def test_all_in_one_collective(self):
        verdict = judge([rank(n, inside=THIRD, still_s=70 + n) for n in range(4)])
        assert verdict is not None
        assert (verdict.kind, verdict.behind, verdict.still_s) == (Kind.NETWORK, (), 70)
        assert verdict.text == "network or collective: 0-3 in all_reduce, nobody behind"

    def test_unless_some_give_no_sign_of_life(self):
        """What they said last is not where they are."""
        verdict = judge([rank(0, inside=THIRD), rank(1, inside=THIRD, beat_age_s=11)])
        assert verdict is not None
        assert (verdict.kind, verdict.behind) == (Kind.BEHIND, (RankName("", 1),))
        assert verdict.text == "1 behind, last seen waiting in all_reduce, 0 waiting in all_reduce; no beat from 1"
        assert text(rank(0, waits_for="peers"), rank(1, waits_for="vote", beat_age_s=11)) == (
            "1 behind, last seen waiting for vote, 0 waiting for peers; no beat from 1"
        )
        assert text(rank(0, inside=THIRD), rank(1, inside=THIRD, beat_age_s=11), is_complete=False) is not None

    def test_or_all_of_them(self):
        assert text(*(rank(n, inside=THIRD, beat_age_s=11) for n in (0, 1))) == (
            "network or collective: 0-1 in all_reduce, nobody behind; no beat from 0-1"
        )

    def test_all_in_one_phase(self):
        assert text(*(rank(n, OpenPhase("validation", 0, 25)) for n in range(8))) == (
            "nobody behind: 0-7 in validation 0/25"
        )

    def test_everybody_waits(self):
        ranks = [rank(0, inside=THIRD), *(rank(n, left=after(SECOND), waits_for="rank 0") for n in range(1, 4))]
        assert text(*ranks) == "everybody waits: 0 waiting in all_reduce, 1-3 waiting for rank 0"

    def test_ranks_that_wait_for_other_groups_have_no_verdict_of_their_own(self):
        assert text(rank(0, inside=THIRD), rank(1, inside=THIRD), is_complete=False) is None
        assert text(rank(0, inside=THIRD), rank(1, inside=SECOND), is_complete=False) is None
        assert text(rank(0, waits_for="a quorum"), is_complete=False) is None

    def test_unless_one_of_them_runs(self):
        assert text(rank(0, inside=THIRD), rank(1, left=after(SECOND)), is_complete=False) == (
            "1 behind in step 1, 0 waiting in all_reduce"
        )
        assert text(rank(0, inside=SECOND), rank(1, left=after(THIRD)), is_complete=False) == (
            "1 behind in step 1, 0 waiting in all_reduce"
        )


class TestDivergence:
    def test_of_operations(self):
        ranks = [rank(0, inside=THIRD), *(rank(n, inside=all_reduce(3, operation="broadcast")) for n in range(1, 8))]
        verdict = judge(ranks)
        assert verdict is not None
        assert (verdict.kind, verdict.text) == (Kind.DIVERGENCE, "divergence: rank 0 all_reduce, ranks 1-7 broadcast")

    def test_of_shapes(self):
        ranks = [rank(0, inside=all_reduce(3, shape="[4, 4]")), rank(1, inside=all_reduce(3, shape="[2, 4]"))]
        assert text(*ranks) == "divergence: rank 0 all_reduce [4, 4], rank 1 all_reduce [2, 4]"

    def test_is_of_one_number_only(self):
        ranks = [rank(0, inside=THIRD), rank(1, inside=all_reduce(2, operation="broadcast"))]
        assert text(*ranks) == "1 behind in broadcast, 0 waiting in all_reduce"


# -- drawn

collectives = st.builds(
    lambda quorum_id, number, is_inside: replace(all_reduce(number, quorum_id), is_inside=is_inside),
    st.integers(1, 2), st.integers(1, 3), st.booleans(),
)  # fmt: skip


@st.composite
def groups(draw: st.DrawFn) -> list[RankView]:
    def one(number: int) -> RankView:
        phases = draw(
            st.lists(st.builds(OpenPhase, st.sampled_from("xy"), st.integers(0, 2)), max_size=2, unique_by=str)
        )
        counts = draw(st.dictionaries(st.sampled_from("xyz"), st.integers(1, 2), max_size=3))
        view = rank(
            number,
            *phases,
            step=draw(st.integers(0, 2)),
            still_s=draw(st.floats(0, 200)),
            limit_s=draw(st.sampled_from([60.0, 120.0])),
            waits_for=draw(st.sampled_from(["", "", "rank 0"])),
            entered=counts,
        )
        return replace(view, sample=replace(view.sample, collective=draw(st.none() | collectives)))

    return [one(number) for number in range(draw(st.integers(1, 6)))]


def order(view: RankView) -> tuple[int, int]:
    return view.sample.collective.order if view.sample.collective else (0, 0)


@settings(max_examples=40)
@given(groups(), st.booleans())
def test_promises(ranks: list[RankView], is_complete: bool):
    verdict = judge(ranks, is_complete=is_complete)
    if any(r.is_running and r.progress_age_s <= r.limit_s for r in ranks) or all(r.progress_age_s <= 60 for r in ranks):
        assert verdict is None  # something may move
    if verdict is None:
        return
    assert time_left_s(ranks) < 0
    assert bool(verdict.behind) == (verdict.kind is Kind.BEHIND)
    for suspect in (r for r in ranks if r.name in verdict.behind):
        assert suspect.is_running or suspect.sample.is_inside  # who has declared to wait is none
        if suspect.sample.is_inside:  # nor who is in a collective that others have not entered
            assert is_complete
            assert all(order(other) >= order(suspect) for other in ranks)
    assert len(verdict.behind) < len(ranks)  # behind whom?
    judged = judge(ranks[::-1], is_complete=is_complete)
    assert judged is not None
    assert (judged.kind, judged.behind) == (verdict.kind, verdict.behind)


@settings(max_examples=40)
@given(groups())
def test_waiting_longer_brings_a_verdict_and_never_takes_it_away(ranks: list[RankView]):
    later = [r.aged(1000) for r in ranks]
    verdict = judge(later)
    assert verdict is not None
    before = judge(ranks)
    assert before is None or (before.kind, before.behind) == (verdict.kind, verdict.behind)
