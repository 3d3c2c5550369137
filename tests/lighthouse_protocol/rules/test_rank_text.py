"""Ranks and places in words. What is said of each in a verdict is in stall.txt."""

import pytest

from lighthouse_protocol.messages.progress import OpenPhase, RankName
from lighthouse_protocol.rules.quorum_change import MAX_LISTED, describe_missing_ranks, describe_place, list_rank_views
from tests.lighthouse_protocol.views import rank


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ([("", 0)], "0"),
        ([("", 3), ("", 1), ("", 2)], "1-3"),
        ([("", 0), ("", 2), ("", 3), ("", 9)], "0, 2-3, 9"),
        ([("b", 0), ("a", 0), ("a", 1)], "a/0-1, b/0"),
        ([("a", 0), ("b", 1)], "a/0, b/1"),
    ],
)
def test_listed(names: list[tuple[str, int]], text: str):
    assert list_rank_views([rank(number, group=group) for group, number in names]) == text


def test_long_lists_are_cut():
    text = list_rank_views([rank(number, group=f"g{n:02}") for n in range(20) for number in range(4)])
    assert text.count(",") == MAX_LISTED - 1
    assert text.endswith("g15/0-3 and 16 more")


def test_place_is_the_innermost_phase():
    told = {
        "v": OpenPhase("v"),
        "v 3": OpenPhase("v", 3),
        "v 0/9": OpenPhase("v", 0, 9),
        "v 3/25": OpenPhase("v", 3, 25),
    }
    assert [describe_place(rank(0, "epoch", phase)) for phase in told.values()] == [*told]


def test_a_name_without_group_is_its_number():
    assert (str(RankName("", 3)), str(RankName("a", 3))) == ("3", "a/3")


def test_who_of_a_group_is_here_and_who_is_missing():
    assert describe_missing_ranks("a", 8, {4, 5, 6, 7}) == "a has ranks 0-3 of 8; missing: 4-7"
    assert describe_missing_ranks("a", 8, {0, 2}) == "a has ranks 1, 3-7 of 8; missing: 0, 2"
    assert describe_missing_ranks("b", 2, {0}) == "b has rank 1 of 2; missing: 0"
    assert describe_missing_ranks("b", 2, {0, 1}) == "b has none of 2; missing: 0-1"
    assert describe_missing_ranks("b", 2, ()) == "b has ranks 0-1 of 2"
