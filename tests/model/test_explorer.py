"""The explorer finds dead ends and cycles without progress, and merging equal groups hides no state."""

from collections.abc import Iterator

import pytest

from tests.model.bounds import FIELDS_OF_THE_WHOLE, Bounds
from tests.model.explorer import Arguments, Explorer, Goal, State, Symmetry
from tests.model.protocol import Action

STEP, FAULT = Action("step", ""), Action("fault", "", fault=0)


class Unmerged(Symmetry):
    def order(self, state: State) -> list[int]:
        return list(range(len(state[0])))


class Graph:
    """Numbers as states. A second number that is negative marks an edge as a fault."""

    broken = ""
    first: State = (0,)

    def __init__(self, *edges: tuple[int, int]) -> None:
        self._edges = edges

    def moves(self, state: State) -> Iterator[tuple[Action, Arguments, State]]:
        for source, target in self._edges:
            if source == state[0]:
                yield FAULT if target < 0 else STEP, (), (abs(target),)


class Plain(Symmetry):
    def order(self, state: State) -> list[int]:
        return []

    def rename(self, state: State, order: list[int]) -> State:
        return state


@pytest.mark.parametrize(
    ("edges", "holds"),
    [
        (((0, 1), (1, 9)), True),
        (((0, 1), (1, 0), (1, 9)), True),  # a fair run leaves the cycle
        (((0, 1), (1, 2), (2, 1), (0, 9)), False),  # a cycle without progress
        (((0, 1), (0, 9)), False),  # a dead end
        (((0, 1), (1, -9)), False),  # only a fault leads on
        (((0, -1), (0, 9)), False),  # a fault leads to a dead end
        (((0, -1), (0, 9), (1, 9)), True),
    ],
)
def test_a_goal_is_reached_from_every_state_without_further_faults(edges: tuple[tuple[int, int], ...], holds: bool):
    goal = Goal("L1 nine", lambda state: state[0] == 9)
    found = Explorer(Graph(*edges), Plain(0), [goal]).run()
    assert bool(found.violation) != holds


@pytest.mark.parametrize("bounds", [Bounds(3, 2), Bounds(2, 1, {"fail": 1})], ids=str)
def test_merging_equal_groups_hides_no_state(bounds: Bounds):
    symmetry = Symmetry(FIELDS_OF_THE_WHOLE)
    merged = Explorer(bounds.model(), symmetry)
    unmerged = Explorer(bounds.model(), Unmerged(FIELDS_OF_THE_WHOLE))
    assert merged.run().states < unmerged.run().states
    assert {symmetry.rename(state, symmetry.order(state)) for state in unmerged.states} == set(merged.states)
