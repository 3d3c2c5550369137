"""A set of ranks is the same set as Python's own, at any size."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from lighthouse_protocol.limits import MAX_GROUP_WORLD_SIZE
from lighthouse_protocol.rank_set import NO_RANKS, RankSet, largest_count

SETS = st.frozensets(st.integers(0, 70))


@given(SETS, SETS)
def test_it_is_the_set_that_python_has(one: frozenset[int], other: frozenset[int]):
    ours, theirs = RankSet(one), RankSet(other)
    assert ours == one
    assert list(ours) == sorted(one)
    assert (len(ours), bool(ours), hash(ours)) == (len(one), bool(one), hash(RankSet(one)))
    assert (ours == theirs) == (one == other)
    assert (ours & theirs, ours | theirs, ours - theirs) == (one & other, one | other, one - other)
    assert (ours & other, ours | other, ours - other) == (one & other, one | other, one - other)
    assert all((rank in ours) == (rank in one) for rank in range(-1, 72))
    assert RankSet.from_bytes(ours.to_bytes()) == one


@given(SETS)
def test_runs_are_neighbours(ranks: frozenset[int]):
    runs = list(RankSet(ranks).runs())
    assert {rank for first, last in runs for rank in range(first, last + 1)} == ranks
    assert all(before[1] + 1 < after[0] for before, after in zip(runs, runs[1:], strict=False))


@given(st.lists(SETS, max_size=9))
def test_the_most_common_rank_counted_one_by_one(sets: list[frozenset[int]]):
    counted = Counter(rank for each in sets for rank in each)
    assert largest_count(map(RankSet, sets)) == max(counted.values(), default=0)


def test_the_largest_group_takes_as_many_bytes_as_on_the_wire():
    everyone = RankSet.first(MAX_GROUP_WORLD_SIZE)
    assert (len(everyone), len(everyone.to_bytes())) == (MAX_GROUP_WORLD_SIZE, MAX_GROUP_WORLD_SIZE // 8)
    assert str(everyone) == "RankSet(0-65535)"
    assert (NO_RANKS.to_bytes(), "a" in everyone) == (b"", False)
