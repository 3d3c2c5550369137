"""The document's grid of ranks: a group is admitted whole or not at all."""

from hypothesis import given, settings
from hypothesis import strategies as st

from lighthouse.grid import Grid, GroupRanks
from tests.lighthouse.builders import group


def ranks(name: str, *present: int, size: int = 8) -> GroupRanks:
    return GroupRanks(name, size, frozenset(present))


def documents_check_waits(grid: Grid, mpi_world_size: int) -> bool:
    """As the document has it."""
    return grid.global_world_size < mpi_world_size * grid.largest_peer_group_world_size


def test_the_documents_table_is_full():
    grid = Grid(tuple(ranks(name, *range(8)) for name in "abcd"))
    assert (grid.global_world_size, grid.largest_peer_group_world_size, grid.ranks_pending) == (32, 4, 0)
    assert not documents_check_waits(grid, 8)
    assert grid.admitted == tuple("abcd")
    assert grid.explain() == ""


def test_a_sparse_table_holds_back_only_the_group_that_is_not_whole():
    grid = Grid((ranks("a", *range(8)), ranks("b", 0, 1, 2, 4, 5, 6)))
    assert documents_check_waits(grid, 8)
    assert grid.admitted == ("a",)
    assert grid.ranks_pending == 2
    assert grid.explain() == "b is held back: 6 of its 8 ranks are here; ranks 3, 7 are missing"


def test_two_halves_on_two_hosts_fill_the_count_and_are_no_group():
    """The document's check lets them into their first forward, where all eight wait for ever."""
    grid = Grid((ranks("a", 0, 1, 2, 3), ranks("b", 4, 5, 6, 7)))
    assert not documents_check_waits(grid, 8)
    assert grid.admitted == ()
    assert grid.ranks_pending == 8
    assert grid.explain() == (
        "a is held back: 4 of its 8 ranks are here; ranks 4-7 are missing; "
        "b is held back: 4 of its 8 ranks are here; ranks 0-3 are missing"
    )


def test_one_missing_rank_is_named():
    assert ranks("a", *range(7)).missing == [7]
    assert Grid((ranks("a", *range(7)),)).explain().endswith("7 of its 8 ranks are here; rank 7 is missing")


def test_a_group_of_which_nobody_has_come_holds_up_nothing():
    grid = Grid((ranks("a"), ranks("b", 0, size=1)))
    assert (grid.admitted, grid.ranks_pending, grid.explain()) == (("b",), 0, "")
    assert (Grid(()).global_world_size, Grid(()).largest_peer_group_world_size) == (0, 0)


def test_a_participant_is_a_whole_group():
    assert GroupRanks.whole(group("a", group_world_size=3)) == ranks("a", 0, 1, 2, size=3)


@settings(max_examples=50)
@given(st.integers(1, 4), st.lists(st.sets(st.integers(0, 3)), max_size=4))
def test_never_more_than_the_documents_check_allows(size: int, columns: list[set[int]]):
    """Where all is admitted, the document's check passes, too; and who is admitted misses nobody."""
    grid = Grid(tuple(ranks(f"g{n}", *(r for r in c if r < size), size=size) for n, c in enumerate(columns)))
    begun = [g for g in grid.groups if g.present]
    assert all(g.present == frozenset(range(size)) for g in grid.groups if g.replica_id in grid.admitted)
    assert (grid.ranks_pending == 0) == (len(begun) == len(grid.admitted)) == (grid.explain() == "")
    if grid.ranks_pending == 0:
        assert not documents_check_waits(grid, size)
    assert grid.global_world_size + grid.ranks_pending == size * len(begun)
