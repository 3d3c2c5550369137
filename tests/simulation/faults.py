"""Faults: what can happen to a run, drawn from its seed as a list of (when, what, whom, for how long).

A kind of fault is one function. Its decorator names the targets and how often the kind is drawn; its docstring
describes it.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from tests.simulation.world import Died

if TYPE_CHECKING:
    from random import Random

    from tests.simulation.simulation import Plan

BURST_S = (0.001, 0.02, 0.3)
"""The delay of a message, and a step or two."""
FIRST_OVERLAPPING_S = 3.0
ALL_SHARE = 0.15
S = TypeVar("S")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Fault:
    at: float
    what: str
    whom: int
    """The number of the first target to try."""
    for_s: float

    def __str__(self) -> str:
        return f"{self.at:.3f} {self.what} of {self.whom} for {self.for_s:.2f} s"


@dataclass(frozen=True, slots=True)
class Kind:
    name: str
    place: str
    """The module that defines the fault."""
    says: str
    weight: float
    """How often a storm has it in its mix. With 0, only scenarios that name the fault draw it."""
    fire: Callable[[Any, Fault], bool]
    """Return False if there was no target."""


class Kinds(dict[str, Kind]):
    """All kinds of faults of one simulator, by name."""

    def fault(
        self, find: Callable[[S, Fault], T | None], *, weight: float = 1.0
    ) -> Callable[[Callable[[S, T, Fault], object]], Callable[[S, T, Fault], object]]:
        """Register a kind of fault.

        Args:
            find: returns the target, or None if there is none yet.
            weight: how often a storm has the fault in its mix.
        """

        def register(act: Callable[[S, T, Fault], object]) -> Callable[[S, T, Fault], object]:
            """`act` returns False to be tried again."""
            name, place = act.__name__, act.__module__.rpartition(".")[2]

            def fire(simulation: Any, fault: Fault) -> bool:
                target = find(simulation, fault)
                if target is None:
                    return False
                simulation.world.log("FAULT", f"{name} {getattr(target, 'name', '')} ({fault.for_s:.2f} s)")
                simulation.before_fault(fault, target)
                with suppress(Died):  # a process that dies of the fault at once does not end the fault
                    return act(simulation, target, fault) is not False
                return True

            self[name] = Kind(name, place, " ".join((act.__doc__ or "").split()), weight, fire)
            return act

        return register


def draw_overlapping(r: "Random", plan: "Plan", targets: int, deadlines_s: Sequence[float]) -> list[Fault]:
    """Draw one to three faults at a time, each about a deadline after the last one or at once; or one for all.

    A fault lasts for about one of the deadlines, or for two of them in a row.
    """

    def about_s() -> float:
        return sum(r.sample(deadlines_s, r.choice((1, 1, 1, 2)))) * r.uniform(0.9, 1.15)

    faults: list[Fault] = []
    at = FIRST_OVERLAPPING_S + r.random()
    while at < plan.faults_s:
        whom, what, strikes_all = r.randrange(targets), r.choice(plan.mix), r.random() < ALL_SHARE
        for number in range(targets if strikes_all else r.choice((1, 2, 2, 3))):
            faults.append(Fault(at, what, (whom + number * strikes_all) % targets, about_s()))
            if strikes_all:
                at += 0.1 * r.choice(BURST_S) * r.random()
            else:
                at += r.choice((r.choice(BURST_S) * r.random(), about_s()))
                what, whom = r.choice(plan.mix), r.choice((whom, r.randrange(targets)))
        at += r.expovariate(1 / plan.fault_every_s)
    return faults
