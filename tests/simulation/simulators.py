"""The two simulators: replica groups under a lighthouse (`quorums`), and runs whose ranks restart together (`runs`)."""

import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.simulation import quorums, runs
from tests.simulation.faults import Kinds
from tests.simulation.quorums.faults import KINDS as QUORUM_FAULTS
from tests.simulation.quorums.plan import SCENARIOS as QUORUM_SCENARIOS
from tests.simulation.quorums.plan import draw_plan as draw_quorum_plan
from tests.simulation.quorums.simulation import QuorumSimulation
from tests.simulation.runs.faults import KINDS as RUN_FAULTS
from tests.simulation.runs.plan import SCENARIOS as RUN_SCENARIOS
from tests.simulation.runs.plan import draw_plan as draw_run_plan
from tests.simulation.runs.simulation import RunSimulation
from tests.simulation.simulation import Simulation
from tests.simulation.world import Result, Violation


@dataclass(frozen=True, slots=True)
class Simulator:
    draw_plan: Callable[..., Any]
    simulate: Callable[..., Simulation]
    scenarios: Mapping[str, object]
    faults: Kinds
    says: str | None

    def run(self, plan: Any, trace: Callable[[str], None] | None = None) -> Result:
        """Run a plan to its end or its first violation."""
        simulation, result = self.simulate(plan, trace), Result(plan.seed)
        world = simulation.world
        try:
            simulation.run()
        except Violation as violation:
            result.violation = str(violation)
            world.log("VIOLATION", result.violation)
        result.simulated_s, result.events, result.counts = world.now, world.events, world.counts
        return result


SIMULATORS = {
    "quorums": Simulator(draw_quorum_plan, QuorumSimulation, QUORUM_SCENARIOS, QUORUM_FAULTS, quorums.__doc__),
    "runs": Simulator(draw_run_plan, RunSimulation, RUN_SCENARIOS, RUN_FAULTS, runs.__doc__),
}


def run_seed(name: str, seed: int, *, trace: Callable[[str], None] | None = None, **options: Any) -> Result:
    """Run a seed of the simulator `name`. `options` are those of its `draw_plan`."""
    simulator = SIMULATORS[name]
    return simulator.run(simulator.draw_plan(seed, **options), trace)


def run_guarded(name: str, seed: int, **options: Any) -> Result:
    """Run a seed, and report an exception of a machine as a violation."""
    try:
        return run_seed(name, seed, **options)
    except Exception as error:  # noqa: BLE001
        where = traceback.extract_tb(error.__traceback__)[-1]
        text = f"{type(error).__name__}: {error} ({Path(where.filename).name}:{where.lineno})"
        return Result(seed, violation=text)
