"""The comparison of a step's calls and samples: which participant is at fault, against a dumb version."""

from hypothesis import given
from hypothesis import strategies as st

from agent_client.step.rules.comparison import (
    Announced,
    DataChoice,
    DataUses,
    Flag,
    Kind,
    Row,
    Standing,
    announce_draw,
    explain,
    find_faulty,
    from_words,
    standing_of,
    to_words,
)

TRAINED, HOLDS_STATE, HEALS = Standing

WIDE = Announced(Kind.REDUCE, 3, 816, "float32", "generator, bucket 0")
NARROW = Announced(Kind.REDUCE, 3, 580, "float32", "discriminator, bucket 0")
END = Announced(Kind.END, 2)

FLAGGED = [(Flag.NOT_FINITE, (5, -6)), (Flag.SKIPS_BATCH, (0, 0))]

announcements = st.builds(
    Announced,
    st.sampled_from(list(Kind)),
    st.integers(1, 2**62),
    st.integers(0, 2**62),
    st.sampled_from(["", "float32", "bfloat16"]),
    st.text("abc. é", max_size=20).map(str.strip),
    st.integers(0, 2**62),
)


def rows(*said: tuple[Announced, Standing]) -> list[Row]:
    return [from_words(to_words(announced, standing)) for announced, standing in said]


def faulty(*said: tuple[Announced, Standing]) -> set[int]:
    return set(find_faulty(rows(*said)))


def test_names_count_though_the_size_is_the_same_and_beyond_what_is_told():
    other = WIDE._replace(name="discriminator, bucket 0")
    assert faulty((WIDE, TRAINED), (other, HEALS)) == {1}
    one, another = (WIDE._replace(name="x" * 200 + end) for end in "ab")
    assert faulty((one, TRAINED), (another, HEALS)) == {1}


def test_of_two_the_one_that_joined_later_is_at_fault():
    """Both have trained; the one with more committed steps was there before."""
    said = [from_words(to_words(told, TRAINED, commits)) for told, commits in ((NARROW, 3), (WIDE, 9))]
    assert find_faulty(said) == {0}
    said.append(from_words(to_words(NARROW, TRAINED, 1)))
    assert find_faulty(said) == {1}, "most of those that decide come first"


def test_steps_count_and_are_told_where_they_differ():
    early, late = WIDE._replace(step=7), WIDE._replace(step=8, number=1)
    said = rows((late, TRAINED), (late, TRAINED), (early, TRAINED))
    assert find_faulty(said) == {2}
    assert explain(said, frozenset({2}), "abc", 2) == (
        "this group (c) reduces 816 bytes of float32 (generator, bucket 0) as collective 3 of step 7 where a and b "
        "reduce 816 bytes of float32 (generator, bucket 0) as collective 1 of step 8"
    )


def test_flags_and_payload_are_no_part_of_what_is_compared():
    said = [from_words(to_words(WIDE, TRAINED, 4, flags, payload)) for flags, payload in FLAGGED]
    assert not find_faulty(said)
    assert [(row.flags, row.payload[:2]) for row in said] == FLAGGED


def test_data_is_compared_among_those_that_draw_it() -> None:
    """A rank that has drawn nothing yet, or by a loader of its own, is at no fault, and no example for the others."""
    data = DataChoice(1000, 8, 1, 0)
    draws, silent = announce_draw(data), announce_draw(None)
    assert faulty((silent, TRAINED), (draws, HEALS), (draws, HEALS)) == set()
    assert faulty((silent, TRAINED), (silent, HEALS)) == set()
    for other in (
        data._replace(length=990),
        data._replace(batch_size=4),
        data._replace(accumulate=2),
        data._replace(seed=1),
    ):
        assert faulty((silent, TRAINED), (draws, TRAINED), (announce_draw(other), HEALS)) == {2}
    said = rows((silent, TRAINED), (draws, TRAINED), (announce_draw(data._replace(length=10**9, accumulate=4)), HEALS))
    assert explain(said, frozenset({2}), ("a", "b", "c"), 2) == (
        "this group (c) draws from 1000000000 samples, in batches of 8 x 4, in the order of seed 0 where b draws from "
        "1000 samples, in batches of 8, in the order of seed 0"
    )


class TestWords:
    @given(announcements)
    def test_come_back_as_they_were(self, announced: Announced):
        words = to_words(announced, HEALS)
        assert len(words) == len(to_words(WIDE, TRAINED))
        assert all(-(2**63) <= word < 2**63 for word in words)
        row = from_words(words)
        assert row.standing == HEALS
        assert row.announced == announced

    def test_those_of_an_unknown_kind_say_nothing(self):
        assert from_words([0, 99, *[0] * (len(to_words(END, TRAINED)) - 2)]).announced.kind is Kind.NONE


class TestExplained:
    def test_to_the_one_at_fault(self):
        said = rows((WIDE, TRAINED), (WIDE, TRAINED), (NARROW, HEALS))
        assert explain(said, frozenset({2}), ("a", "b", "c"), 2) == (
            "this group (c) reduces 580 bytes of float32 (discriminator, bucket 0) as collective 3 where a and b "
            "reduce 816 bytes of float32 (generator, bucket 0) as collective 3"
        )

    def test_to_the_others(self):
        said = rows((WIDE, TRAINED), (END, HEALS), (NARROW, HEALS), (NARROW, HEALS))
        assert explain(said, frozenset({1, 2, 3}), ("a", "b", "c", "d"), 0) == (
            "b ends the step after 2 collectives; c and d reduce 580 bytes of float32 (discriminator, bucket 0) as "
            "collective 3, where a reduces 816 bytes of float32 (generator, bucket 0) as collective 3"
        )

    def test_of_many_the_first_are_named(self):
        said = rows(*[(WIDE, TRAINED)] * 30, (END, HEALS))
        text = explain(said, frozenset({30}), [f"g{place}" for place in range(31)], 30)
        assert "where g0, g1, g2, g3, g4, g5, g6, g7 and 22 more reduce 816" in text


def dumb(said: list[tuple[Announced, Standing]]) -> set[int]:
    """Each candidate against each other one, by the rules in words."""
    distinct = {announced for announced, _ in said}
    if len(distinct) == 1:
        return set()
    speaking: list[Announced] = []
    for standing in (TRAINED, HOLDS_STATE, HEALS):
        speaking = speaking or [announced for announced, whose in said if whose == standing]
    right = speaking[0]
    for candidate in speaking[1:]:
        more = speaking.count(candidate) - speaking.count(right)
        of_all = [announced for announced, _ in said]
        if more > 0 or (more == 0 and of_all.count(candidate) > of_all.count(right)):
            right = candidate
    return {place for place, (announced, _) in enumerate(said) if announced != right}


participants = st.lists(
    st.tuples(st.sampled_from([WIDE, WIDE, NARROW, END]), st.sampled_from(list(Standing))), min_size=1, max_size=7
)


@given(participants)
def test_like_the_dumb_version(said: list[tuple[Announced, Standing]]):
    assert faulty(*said) == dumb(said)


@given(participants)
def test_never_all_and_never_one_that_says_the_same_as_one_that_is_right(said: list[tuple[Announced, Standing]]):
    found = faulty(*said)
    assert len(found) < len(said)
    right = {announced for place, (announced, _) in enumerate(said) if place not in found}
    assert len(right) == 1
    assert all(announced not in right for place, (announced, _) in enumerate(said) if place in found)
    text = [explain(rows(*said), frozenset(found), "abcdefg", place) for place in range(len(said)) if found]
    assert all(" where " in each for each in text)


def test_standing_in_the_job():
    assert standing_of(heals=True, max_step=7, has_trained=True) is Standing.HEALS
    assert standing_of(heals=True, max_step=0, has_trained=False) is Standing.HOLDS_STATE
    assert standing_of(heals=False, max_step=7, has_trained=False) is Standing.HOLDS_STATE
    assert standing_of(heals=False, max_step=7, has_trained=True) is Standing.TRAINED


CHOICE = DataChoice(100, 4, 2, 7)


def used(*steps: tuple[int, int]) -> DataUses:
    """Drawn from CHOICE and committed: (step, quorum_id)."""
    uses = DataUses()
    for step in steps:
        uses.drawn(CHOICE, *step)
        uses.count_commit(*step)
    return uses


def test_nothing_is_said_before_the_first_batch() -> None:
    uses = DataUses()
    uses.count_commit(0, 1)
    assert uses.summary(3) == {}


def test_samples_are_counted_over_all_groups() -> None:
    report = used((0, 1), (1, 1), (2, 2)).summary(27)
    assert report == {
        **CHOICE._asdict(),
        "samples": 216,
        "epoch": 2,
        "position": 16,
        "irregular_steps": 0,
        "is_exact": True,
    }


def test_a_step_with_a_batch_of_another_quorum_is_told() -> None:
    """As of salvage, which keeps what was computed; or of a loop that draws once and steps twice."""
    uses = used((0, 1))
    uses.drawn(CHOICE, 1, 1)
    uses.count_commit(1, 2)
    uses.count_commit(2, 2)
    report = uses.summary(3)
    assert (report["irregular_steps"], report["is_exact"]) == (2, False)


def test_other_data_is_told() -> None:
    uses = used((0, 1))
    for step in (1, 2):
        uses.drawn(CHOICE._replace(length=50), step, 1)
        uses.count_commit(step, 1)
    assert (uses.summary(2)["irregular_steps"], uses.summary(2)["is_exact"]) == (0, False)
