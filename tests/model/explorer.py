"""An explicit-state explorer: breadth-first search over all states that a model reaches, equal groups merged.

It knows nothing of the protocol. A model has `first`, `moves(state)` and `broken`. Safety is checked in each action.
Liveness is checked on the graph of the actions that are no faults, under strong fairness: an action that is possible
again and again happens. Then every run without further faults ends in a component of the graph that it cannot leave,
and visits each state of that component. So a goal is reached from every state if and only if it can be reached from
every state, and a state from which it cannot is a counterexample: a dead end, or a cycle without progress.
"""

import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

State = tuple[Any, ...]
Arguments = tuple[int, ...]


class Move(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def of(self) -> str: ...

    @property
    def fault(self) -> int | None: ...


class Explorable(Protocol):
    first: State
    broken: str

    def moves(self, state: State) -> Iterable[tuple[Any, Arguments, State]]: ...


class Goal(NamedTuple):
    """`is_reached` of every state must become true once faults stop."""

    name: str
    is_reached: Callable[[State], bool]


class Step(NamedTuple):
    action: Any
    args: Arguments


@dataclass
class Found:
    """What was explored. `violation` is empty if nothing is wrong; then `trace` leads to it, as actions and states."""

    states: int = 0
    transitions: int = 0
    depth: int = 0
    seconds: float = 0.0
    violation: str = ""
    trace: list[tuple[Step, State]] = field(default_factory=list[tuple[Step, State]])
    waiting: dict[str, int] = field(default_factory=dict[str, int])  # by goal, states in which it is not reached yet


class Symmetry:
    """Merges states that differ only in the names of the groups.

    Everything that a state says about one group makes its key, so groups with equal keys are interchangeable, and
    sorting by the keys gives one form to all states that are equal but for the names.
    """

    def __init__(self, group_fields: int) -> None:
        self._first = group_fields  # a lighthouse's fields from here on have an entry for each group

    def order(self, state: State) -> list[int]:
        """Return the groups in the order of their keys."""
        groups, lighthouses, quorums = state[0], state[1], state[2]
        keys: list[tuple[Any, ...]] = []
        for g, group in enumerate(groups):
            columns = [[() if v[g] is None else v[g] for v in lighthouse[self._first :]] for lighthouse in lighthouses]
            places = [
                next(((i, *more) for (m, i), *more in zip(q.members, q.joins, q.parts, strict=True) if m == g), ())
                for q in quorums
            ]
            keys.append((group, columns, places))
        return sorted(range(len(groups)), key=keys.__getitem__)

    def rename(self, state: State, order: list[int]) -> State:
        """Let group `order[i]` be group i."""
        if order == sorted(order):
            return state
        groups, lighthouses, quorums, *rest = state
        place = {g: i for i, g in enumerate(order)}
        renamed: list[Any] = []
        for q in quorums:
            rows = sorted((place[g], i, *more) for (g, i), *more in zip(q.members, q.joins, q.parts, strict=True))
            members, joins, parts = tuple(row[:2] for row in rows), *zip(*(row[2:] for row in rows), strict=True)
            renamed.append(q._replace(members=members, joins=joins, parts=parts))
        return (
            tuple([groups[g] for g in order]),
            tuple(
                [(*h[: self._first], *[tuple([v[g] for g in order]) for v in h[self._first :]]) for h in lighthouses]
            ),
            tuple(renamed),
            *rest,
        )

    def rename_args(self, action: Move, args: Arguments, order: list[int]) -> Arguments:
        return tuple(order[value] if kind == "g" else value for kind, value in zip(action.of, args, strict=True))


class Explorer:
    def __init__(self, model: Explorable, symmetry: Symmetry, goals: Iterable[Goal] = ()) -> None:
        self._model = model
        self._symmetry = symmetry
        self._goals = tuple(goals)
        self._numbers: dict[State, int] = {}
        self.states: list[State] = []
        self._came_from: list[tuple[int, Step] | None] = []
        self._sources, self._targets = array("l"), array("l")  # of actions that are no faults
        self._found = Found()

    def run(self) -> Found:
        began_at = time.process_time()
        found = self._found
        first = self._canonical(self._model.first)
        self._add(first, None)
        depths = array("l", [0])
        waiting = deque([0])
        while waiting and not found.violation:
            number = waiting.popleft()
            found.depth = max(found.depth, depths[number])
            for action, args, state in self._model.moves(self.states[number]):
                found.transitions += 1
                if self._model.broken:
                    self._report(self._model.broken, number, Step(action, args))
                    break
                after = self._canonical(state)
                place = self._numbers.get(after)
                if place is None:
                    place = self._add(after, (number, Step(action, args)))
                    depths.append(depths[number] + 1)
                    waiting.append(place)
                if action.fault is None and place != number:
                    self._sources.append(number)
                    self._targets.append(place)
        found.states = len(self.states)
        if not found.violation:
            self._check_goals()
        found.seconds = time.process_time() - began_at
        return found

    def _canonical(self, state: State) -> State:
        return self._symmetry.rename(state, self._symmetry.order(state))

    def _add(self, state: State, came_from: tuple[int, Step] | None) -> int:
        self._numbers[state] = len(self.states)
        self.states.append(state)
        self._came_from.append(came_from)
        return len(self.states) - 1

    # -- liveness

    def _check_goals(self) -> None:
        self._found.waiting = {}
        before = self._predecessors()
        for goal in self._goals:
            reached = [goal.is_reached(state) for state in self.states]
            self._found.waiting[goal.name] = reached.count(False)
            can_reach = bytearray(reached)
            waiting = [n for n, is_reached in enumerate(reached) if is_reached]
            while waiting:
                for source in before(waiting.pop()):
                    if not can_reach[source]:
                        can_reach[source] = True
                        waiting.append(source)
            if not self._found.violation and (stuck := can_reach.find(0)) >= 0:
                count = can_reach.count(0)
                text = f"{goal.name}: from here on this can never happen ({count} such states)"
                self._report(text, stuck, None)

    def _predecessors(self) -> Callable[[int], Iterable[int]]:
        """Sort the edges by target."""
        starts = array("l", bytes(8 * (len(self.states) + 1)))
        for target in self._targets:
            starts[target + 1] += 1
        for n in range(len(self.states)):
            starts[n + 1] += starts[n]
        places, edges = array("l", starts), array("l", bytes(8 * len(self._targets)))
        for source, target in zip(self._sources, self._targets, strict=True):
            edges[places[target]] = source
            places[target] += 1
        return lambda n: edges[starts[n] : starts[n + 1]]

    # -- counterexamples

    def _report(self, text: str, number: int, last: Step | None) -> None:
        """Find the way to that state from the start, and let every group keep its name on it."""
        steps: list[Step] = [] if last is None else [last]
        while (came_from := self._came_from[number]) is not None:
            number, step = came_from
            steps.append(step)
        state = self._model.first
        self._model.broken = ""
        for step in reversed(steps):
            args = self._symmetry.rename_args(step.action, step.args, self._symmetry.order(state))
            for action, its_args, after in self._model.moves(state):
                if action is step.action and its_args == args:
                    state = after
                    break
            self._found.trace.append((Step(step.action, args), state))
        self._found.violation = self._model.broken or text
