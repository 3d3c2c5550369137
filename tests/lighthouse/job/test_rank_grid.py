"""The document's grid of ranks: a group is admitted whole or not at all."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from lighthouse.job.driver import world_of
from lighthouse.job.events import GridChanged
from lighthouse.job.forming import QuorumMachine
from lighthouse.job.progress import GROUPS_NAMED, Grid, GroupRanks, grid_of
from lighthouse.job.status import explain
from lighthouse_protocol.messages.membership import World
from lighthouse_protocol.messages.session import STARTING
from tests.lighthouse.builders import join, machine, training
from tests.lighthouse.sessions import asks, connected, ended, native, opened, pulse, recalled, resumed, standing


def ranks(name: str, *present: int, size: int = 8) -> GroupRanks:
    return GroupRanks(name, size, frozenset(range(size)) - set(present))


def admitted(grid: Grid) -> tuple[str, ...]:
    """The groups that may be in a quorum."""
    return tuple(group.replica_id for group in grid.groups if not group.missing)


def documents_check_waits(grid: Grid, mpi_world_size: int) -> bool:
    """As the document has it."""
    return grid.global_world_size < mpi_world_size * grid.largest_peer_group_world_size


def test_the_documents_table_is_full():
    grid = Grid(tuple(ranks(name, *range(8)) for name in "abcd"))
    assert (grid.global_world_size, grid.largest_peer_group_world_size, grid.ranks_pending) == (32, 4, 0)
    assert not documents_check_waits(grid, 8)
    assert admitted(grid) == tuple("abcd")
    assert grid.describe_incomplete() == ""


def test_a_sparse_table_holds_back_only_the_group_that_is_not_whole():
    grid = Grid((ranks("a", *range(8)), ranks("b", 0, 1, 2, 4, 5, 6)))
    assert documents_check_waits(grid, 8)
    assert admitted(grid) == ("a",)
    assert grid.ranks_pending == 2
    assert grid.describe_incomplete() == "b has ranks 0-2, 4-6 of 8; missing: 3, 7"


def test_two_halves_on_two_hosts_fill_the_count_and_are_no_group():
    """The document's check lets them into their first forward, where all eight wait for ever."""
    grid = Grid((ranks("a", 0, 1, 2, 3), ranks("b", 4, 5, 6, 7)))
    assert not documents_check_waits(grid, 8)
    assert admitted(grid) == ()
    assert grid.ranks_pending == 8
    assert grid.describe_incomplete() == "a has ranks 0-3 of 8; missing: 4-7; b has ranks 4-7 of 8; missing: 0-3"


def test_of_many_that_are_held_back_the_first_are_named():
    grid = Grid(ranks(f"g{number}", 0) for number in range(GROUPS_NAMED + 2))
    assert grid.describe_incomplete().endswith("g7 has rank 0 of 8; missing: 1-7; and 2 groups more")


def test_a_group_of_which_nobody_has_come_holds_up_nothing():
    grid = Grid((ranks("a"), ranks("b", 0, size=1)))
    assert (admitted(grid), grid.ranks_pending, grid.describe_incomplete()) == (("b",), 0, "")
    assert (Grid(()).global_world_size, Grid(()).largest_peer_group_world_size) == (0, 0)


@settings(max_examples=50)
@given(st.lists(st.tuples(st.integers(1, 5), st.sets(st.integers(0, 4))), max_size=5))
def test_the_longest_row_counted_one_by_one(columns: list[tuple[int, set[int]]]):
    grid = Grid(ranks(f"g{n}", *(r for r in column if r < size), size=size) for n, (size, column) in enumerate(columns))
    rows = Counter(rank for size, column in columns for rank in column if rank < size)
    assert grid.largest_peer_group_world_size == max(rows.values(), default=0)


@settings(max_examples=50)
@given(st.integers(1, 4), st.lists(st.sets(st.integers(0, 3)), max_size=4))
def test_never_more_than_the_documents_check_allows(size: int, columns: list[set[int]]):
    """Where all is admitted, the document's check passes, too; and who is admitted misses nobody."""
    grid = Grid(tuple(ranks(f"g{n}", *(r for r in c if r < size), size=size) for n, c in enumerate(columns)))
    begun = grid.groups
    assert all(not g.missing for g in begun if g.replica_id in admitted(grid))
    assert (grid.ranks_pending == 0) == (len(begun) == len(admitted(grid))) == (grid.describe_incomplete() == "")
    if grid.ranks_pending == 0:
        assert not documents_check_waits(grid, size)
    assert grid.global_world_size + grid.ranks_pending == size * len(begun)


# -- of a job's machine


def halves() -> QuorumMachine:
    """The document's layout: eight ranks on two hosts, of two groups of eight."""
    made = machine()
    for session, (name, missing) in enumerate({"a": range(4, 8), "b": range(4)}.items(), start=1):
        made.handle(opened(session, native(name, group_world_size=8), down=STARTING, missing=frozenset(missing)), 0)
    return made


def test_the_status_names_the_missing_ranks():
    made = halves()
    assert made.quorum is None
    assert explain(made, 1) == (
        "waiting for a replica group to join; 2 alive; "
        "a has ranks 0-3 of 8; missing: 4-7; b has ranks 4-7 of 8; missing: 0-3"
    )
    assert world_of(made, grid_of(made.job.groups.values())) == World(8, 1, 8)


def test_with_the_missing_ranks_there_the_quorum_forms():
    made = halves()
    for session, name in enumerate("ab", start=1):
        made.handle(asks(session, session, native(name, group_world_size=8)), 1)
    assert [p.replica_id for p in made.quorum.participants] == ["a", "b"]
    assert world_of(made, grid_of(made.job.groups.values())) == World(16, 2)
    assert explain(made, 2) == "2 of 2 groups"


def test_a_group_none_of_whose_ranks_was_here_is_in_the_grid_when_they_are_seen_before_they_ask():
    made = standing("a")
    made.handle(opened(2, "b", down=STARTING, missing=frozenset({0})), 0)
    assert grid_of(made.job.groups.values()).global_world_size == 1
    assert GridChanged() in QuorumMachine.handle(made, pulse(2, 2), 1)
    assert grid_of(made.job.groups.values()).global_world_size == 2


def test_a_rank_that_goes_is_missing_until_it_is_back():
    made = standing("ab")
    assert GridChanged() not in QuorumMachine.handle(made, pulse(1, 2), 1), "a beat that says nothing new"
    effects = QuorumMachine.handle(made, pulse(1, 3, down="rank 0 has ended", missing=frozenset({0})), 1)
    assert effects.count(GridChanged()) == 1
    assert world_of(made, grid_of(made.job.groups.values())) == World(1, 1), (
        "of a group of one rank nobody is left that would be held back"
    )
    made.handle(asks(9, 1, "a"), 2)
    assert world_of(made, grid_of(made.job.groups.values())) == World(2, 2)


def test_who_is_gone_is_in_the_grid_no_more():
    made = connected("ab")
    made.handle(ended(2), 1)
    assert [member.replica_id for member in grid_of(made.job.groups.values()).groups] == ["a"]


def test_a_newcomer_is_pending_until_it_is_admitted():
    """Also while the members say how far they are, and while they come."""
    for made in (recalled("ab"), resumed("ab")):
        world = world_of(made, grid_of(made.job.groups.values()))
        assert (world.peers_pending, world.pending) == (1, ("x",))
    for session, name in enumerate("ab", start=1):
        made.handle(asks(20 + session, session, name, step=5, seen_quorum_id=1, tag_quorum_id=1), 1)
    assert world_of(made, grid_of(made.job.groups.values())) == World(3, 3)


def test_a_spare_is_not_pending():
    made = standing("ab", active=2)
    made.handle(opened(3, "c"), 0)
    made.handle(asks(3, 3, "c"), 0)
    assert world_of(made, grid_of(made.job.groups.values())) == World(3, 3)


def test_a_newcomer_to_a_quorum_that_does_not_stand_is_pending_until_the_next_round():
    made = training("ab")
    made.handle(join(9, "c"), 1)
    assert world_of(made, grid_of(made.job.groups.values())).pending == ("c",)
    for call, name in enumerate("ab", start=10):
        made.handle(join(call, name, step=1), 2)
    assert world_of(made, grid_of(made.job.groups.values())).peers_pending == 0
