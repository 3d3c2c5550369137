"""What both simulators share: the plan that a seed means, a world, a network, and faults that wait for a target."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.simulation.faults import Fault, Kind
from tests.simulation.network import Network
from tests.simulation.world import World

RETRY_S = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a seed means. Everything is drawn from it."""

    seed: int
    scenario: str
    mix: tuple[str, ...]
    """Kinds of faults."""
    faults_s: float
    """The time in which faults strike. The rest of a run is for settling."""
    fault_every_s: float
    delay_s: float = 0.002
    """The usual delay of a message."""
    step_s: float = 0.2
    restart_s: float = 1.0


class Simulation:
    def __init__(self, plan: Plan, kinds: dict[str, Kind], trace: Callable[[str], None] | None) -> None:
        self.world = World(plan.seed, trace)
        self.network = Network(self.world, plan.delay_s)
        self.kinds = dict(kinds)
        self.unfired: list[Fault] = []
        self._numbers = 0

    def next_number(self) -> int:
        self._numbers += 1
        return self._numbers

    def run(self) -> None:
        """Run to the end, or raise Violation."""
        raise NotImplementedError

    # -- faults

    def schedule(self, fault: Fault) -> None:
        self.world.at(fault.at, None, self._try, fault)

    def _try(self, fault: Fault) -> None:
        """Fire now, or as soon as there is a target."""
        world = self.world
        if self.may_fire() and self.kinds[fault.what].fire(self, fault):
            world.counts[f"fault: {fault.what}"] += 1
            self.after_fault(fault)
        elif world.now < self.latest(fault):
            world.after(RETRY_S, self._try, fault)
        else:
            world.counts["faults that found no target"] += 1
            self.unfired.append(fault)
            self.after_fault(None)

    def may_fire(self) -> bool:
        return True

    def latest(self, fault: Fault) -> float:
        """Return the moment after which a fault is not tried again."""
        raise NotImplementedError

    def before_fault(self, fault: Fault, target: Any) -> None:
        """Note what a fault is about to hit."""

    def after_fault(self, fault: Fault | None) -> None:
        """Note that a fault has begun; None if it found no target."""
