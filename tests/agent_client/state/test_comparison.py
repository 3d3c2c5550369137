"""Windows cover everything once; the majority is right: against dumb versions, drawn."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_client.state.digest import LEAST_COST, WINDOW_BYTES, windows
from agent_client.step.rules.comparison import (
    MAX_DIVERGENCES,
    Digest,
    Divergences,
    common_interval,
    differs,
    outliers,
)

sizes = st.lists(st.tuples(st.integers(0, 300), st.sampled_from([1, 2, 4, 8])), max_size=8)
digests = st.lists(st.none() | st.tuples(st.integers(0, 2), st.integers(0, 1)), max_size=6)


@given(sizes, st.integers(8, 512))
def test_every_element_is_in_one_window(sizes: list[tuple[int, int]], window_bytes: int) -> None:
    covered = [
        (piece.index, element)
        for window in windows(sizes, window_bytes)
        for piece in window
        for element in range(piece.start, piece.stop)
    ]
    assert covered == [(index, element) for index, (count, _) in enumerate(sizes) for element in range(count)]


@given(sizes, st.integers(8, 512))
def test_no_window_is_larger_than_asked_for(sizes: list[tuple[int, int]], window_bytes: int) -> None:
    for window in windows(sizes, window_bytes):
        assert sum((piece.stop - piece.start) * sizes[piece.index][1] for piece in window) <= window_bytes


def test_a_small_model_is_covered_whole_by_each_check_and_many_tensors_by_several() -> None:
    assert len(windows([(1000, 4)] * 20)) == 1
    found = windows([(10, 4)] * 1000)
    assert max(map(len, found)) == WINDOW_BYTES // LEAST_COST
    assert len(windows([(WINDOW_BYTES, 4)])) == 4


def _dumb(told: list[Digest | None]) -> tuple[int, ...]:
    """Try every set of places, the larger ones first, and of one size those with the lowest places."""
    places = [place for place, digest in enumerate(told) if digest is not None]
    for size in range(len(places), 0, -1):
        for right in combinations(places, size):
            if len({told[place] for place in right}) == 1:
                return tuple(place for place in places if place not in right)
    return ()


@given(digests)
def test_the_largest_set_is_right(told: list[Digest | None]) -> None:
    assert outliers(told) == _dumb(told)


@pytest.mark.parametrize(
    ("asked_for", "every"), [([16, 16], 16), ([16, 4, 16], 16), ([16, 0], 0), ([0, 0], 0), ([1], 1)]
)
def test_all_compare_in_the_same_steps_or_none_does(asked_for: list[int], every: int) -> None:
    assert common_interval(asked_for) == every


@pytest.mark.parametrize(
    ("own", "told", "is_other"),
    [
        ((1, 1), [(1, 1), None, (1, 1)], False),
        ((2, 1), [(1, 1), None, (1, 1)], True),
        ((2, 1), [(1, 1), (2, 1), (1, 1)], True),
        ((0, 0), [(0, 0)], False),
        ((2, 1), [None, None], False),
    ],
)
def test_one_that_is_not_judged_is_held_against_the_right_one(
    own: Digest, told: list[Digest | None], is_other: bool
) -> None:
    assert differs(own, told) is is_other


def test_a_group_that_differs_after_each_heal_is_counted_until_all_windows_were_equal() -> None:
    found = Divergences()
    assert found.compared(["b"], windows=2) == 1
    assert found.compared([], windows=2) == 0
    assert found.compared(["b"], windows=2) == 2
    assert found.compared([], windows=2) == 0
    assert found.compared(["c"], windows=2) == 1
    assert found.compared(["b", "c"], windows=2) == MAX_DIVERGENCES
    assert [found.compared([], windows=2) for _ in range(2)] == [0, 0]
    assert found.compared(["b"], windows=2) == 1
