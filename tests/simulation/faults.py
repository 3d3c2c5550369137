"""Faults: a list of (when, what, whom, how long), drawn from the seed.

What each does is in group_faults.py and place_faults.py.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.simulation.simulation import Simulation

RETRY_S = 0.25
PATIENCE_S = 300.0
FIRST_FAULT_S = 3.0


@dataclass(frozen=True, slots=True)
class Fault:
    """`whom` is the number of a group; the next one that it can happen to has it."""

    at: float
    what: str
    whom: int
    for_s: float

    def __str__(self) -> str:
        return f"{self.at:.3f} {self.what} group {self.whom} for {self.for_s:.2f} s"


def draw_faults(simulation: "Simulation") -> list[Fault]:
    plan, r = simulation.plan, simulation.world.random
    faults: list[Fault] = []
    at = FIRST_FAULT_S + r.random()
    while at < plan.faults_s:
        for_s = r.choice((0.05, 0.3, 1.0, 2.5, 5.0)) * r.uniform(0.7, 1.3)
        faults.append(Fault(at, r.choice(plan.mix), r.randrange(len(simulation.groups)), for_s))
        at += r.expovariate(1 / plan.fault_every_s)
    return faults


def schedule(simulation: "Simulation", fault: Fault) -> None:
    world = simulation.world
    simulation.pending += 1
    world.at(fault.at, None, _try, simulation, fault)


def _try(simulation: "Simulation", fault: Fault) -> None:
    """Now, or as soon as there is somebody whom it can happen to."""
    world = simulation.world
    must_wait = simulation.plan.one_at_a_time and not simulation.is_settled()
    if must_wait or not simulation.effects[fault.what](simulation, fault):
        if world.now < fault.at + PATIENCE_S:
            return world.after(RETRY_S, _try, simulation, fault)
        simulation.pending -= 1
        return simulation.unfired.append(fault)
    simulation.pending -= 1
    world.counts[f"fault: {fault.what}"] += 1
    simulation.settled.forget()
    simulation.last_fault_ends_at = max(simulation.last_fault_ends_at, world.now + fault.for_s)
    return None
