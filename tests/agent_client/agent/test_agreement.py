"""Which participant is at fault: by example, and against the dumb version."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_client.agent.rules.agreement import (
    Announced,
    Kind,
    Row,
    Standing,
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

announcements = st.builds(
    Announced,
    st.sampled_from(list(Kind)),
    st.integers(0, 2**62),
    st.integers(0, 2**62),
    st.sampled_from(["", "float32", "bfloat16"]),
    st.text("abc. é", max_size=20).map(str.strip),
)


def rows(*said: tuple[Announced, Standing]) -> list[Row]:
    return [from_words(to_words(announced, standing)) for announced, standing in said]


def faulty(*said: tuple[Announced, Standing]) -> set[int]:
    return set(find_faulty(rows(*said)))


OTHER_NAME = WIDE._replace(name="discriminator, bucket 0")
LONG = WIDE._replace(name="x" * 200)
FAULTY: dict[str, tuple[list[tuple[Announced, Standing]], set[int]]] = {
    "none where all say the same": ([(WIDE, TRAINED), (WIDE, HEALS), (WIDE, HOLDS_STATE)], set()),
    "the one that differs": ([(WIDE, TRAINED), (NARROW, TRAINED), (WIDE, TRAINED)], {1}),
    "one collective less": ([(WIDE, TRAINED), (WIDE, TRAINED), (END, TRAINED)], {2}),
    "one collective more": ([(END, TRAINED), (END, TRAINED), (WIDE, TRAINED)], {2}),
    "of two the one that heals": ([(WIDE, HEALS), (NARROW, TRAINED)], {0}),
    "of two the one that has not trained": ([(WIDE, HOLDS_STATE), (NARROW, TRAINED)], {0}),
    "of two new ones the one that heals": ([(WIDE, HEALS), (NARROW, HOLDS_STATE)], {0}),
    "newcomers do not outvote a veteran": ([(WIDE, HEALS), (WIDE, HEALS), (NARROW, TRAINED)], {0, 1}),
    "between two veterans they decide": ([(WIDE, TRAINED), (NARROW, TRAINED), (NARROW, HEALS)], {0}),
    "of two that are alike the second": ([(WIDE, TRAINED), (NARROW, TRAINED)], {1}),
    "of two new ones that are alike, too": ([(WIDE, HOLDS_STATE), (NARROW, HOLDS_STATE)], {1}),
    "the same size of another part of the script": ([(WIDE, TRAINED), (OTHER_NAME, HEALS)], {1}),
    "names that differ beyond what is told": (
        [(LONG._replace(name=LONG.name + "a"), TRAINED), (LONG._replace(name=LONG.name + "b"), HEALS)],
        {1},
    ),
}


@pytest.mark.parametrize("case", FAULTY)
def test_which_is_at_fault(case: str):
    said, expected = FAULTY[case]
    assert faulty(*said) == expected


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
