"""What a fault is, and the table of all kinds, which the modules of this folder fill."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from tests.simulation.world import Died

if TYPE_CHECKING:
    from random import Random

    from tests.simulation.quorums.plan import Plan
    from tests.simulation.quorums.simulation import Simulation

RETRY_S = 0.25
PATIENCE_S = 300.0
FIRST_FAULT_S = 3.0
# Some faults come in one another's wake: within a message's time, or within a step or two.
BURST_SHARE = 0.15
FOCUSED_SHARE = 0.5
BURST_S = (0.001, 0.02, 0.3)
SHORT_S = (0.05, 0.3, 1.0, 2.5, 5.0)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Fault:
    """`whom` is the number of a group; the next one that it can happen to has it."""

    at: float
    what: str
    whom: int
    for_s: float

    def __str__(self) -> str:
        return f"{self.at:.3f} {self.what} group {self.whom} for {self.for_s:.2f} s"


Find = Callable[["Simulation", Fault], T | None]
Act = Callable[["Simulation", T, Fault], None]


@dataclass(frozen=True, slots=True)
class Kind:
    """`fire` says whether there was somebody whom it could happen to. `weight`: how often a storm has it in its mix;
    0: it is drawn by the scenarios alone that name it."""

    name: str
    to: str
    says: str
    weight: float
    fire: Callable[["Simulation", Fault], bool]


KINDS: dict[str, Kind] = {}


def fault(find: Find[T], *, weight: float = 1.0) -> Callable[[Act[T]], Act[T]]:
    """The decorator of a fault kind. `find` returns to whom it happens now; None: to nobody yet."""

    def register(act: Act[T]) -> Act[T]:
        name, to = act.__name__, act.__module__.rpartition(".")[2]

        def fire(simulation: "Simulation", fault: Fault) -> bool:
            target = find(simulation, fault)
            if target is None:
                return False
            simulation.world.say("FAULT", f"{name} {getattr(target, 'name', '')} ({fault.for_s:.2f} s)")
            simulation.promise.fired(fault, simulation.group_of(target))
            with suppress(Died):  # a process that dies by what it is told just now; the fault goes on
                act(simulation, target, fault)
            return True

        KINDS[name] = Kind(name, to, " ".join((act.__doc__ or "").split()), weight, fire)
        return act

    return register


def draw_mix(r: "Random", most: int) -> tuple[str, ...]:
    """Two to `most` kinds for a storm, each at most once; half of the storms strike two places only."""
    drawn = [kind for kind in KINDS.values() if kind.weight]
    places = sorted({kind.to for kind in drawn})
    struck = r.sample(places, 2) if r.random() < FOCUSED_SHARE else places
    left = {kind.name: kind.weight for kind in drawn if kind.to in struck}
    mix: list[str] = []
    for _ in range(min(len(left), r.randint(2, most))):
        name = r.choices(tuple(left), tuple(left.values()))[0]
        del left[name]
        mix.append(name)
    return tuple(mix)


def draw_faults(simulation: "Simulation") -> list[Fault]:
    plan, r = simulation.plan, simulation.world.random
    faults: list[Fault] = []
    at = FIRST_FAULT_S + r.random()
    while at < plan.faults_s:
        faults.append(Fault(at, r.choice(plan.mix), r.randrange(plan.groups), _draw_duration(plan, r)))
        is_burst = not plan.one_at_a_time and r.random() < BURST_SHARE
        at += r.choice(BURST_S) * r.random() if is_burst else r.expovariate(1 / plan.fault_every_s)
    return faults


def _draw_duration(plan: "Plan", r: "Random") -> float:
    """Any, or about as long as something in the configuration waits."""
    if r.random() < 0.5:
        return r.choice(SHORT_S) * r.uniform(0.7, 1.3)
    config = plan.config
    return r.choice((config.lease_s, 0.8 * config.lease_s, config.heartbeat_timeout_s, plan.step_s)) * r.uniform(
        0.9, 1.2
    )


def schedule(simulation: "Simulation", fault: Fault) -> None:
    world = simulation.world
    simulation.pending += 1
    world.at(fault.at, None, _try, simulation, fault)


def _try(simulation: "Simulation", fault: Fault) -> None:
    """Now, or as soon as there is somebody whom it can happen to."""
    world = simulation.world
    must_wait = simulation.plan.one_at_a_time and not simulation.is_settled()
    if must_wait or not simulation.kinds[fault.what].fire(simulation, fault):
        if world.now < fault.at + PATIENCE_S:
            return world.after(RETRY_S, _try, simulation, fault)
        simulation.pending -= 1
        return simulation.unfired.append(fault)
    simulation.pending -= 1
    world.counts[f"fault: {fault.what}"] += 1
    simulation.settled.forget()
    simulation.last_fault_ends_at = max(simulation.last_fault_ends_at, world.now + fault.for_s)
    return None
