"""Faults of clocks. Rates stay within the ten per cent that leases allow for. Readings may have any value."""

from typing import TYPE_CHECKING

from tests.simulation.faults import Fault
from tests.simulation.quorums.faults.groups import find_group
from tests.simulation.quorums.faults.kinds import fault
from tests.simulation.quorums.faults.lighthouse import find_lighthouse
from tests.simulation.world import MAX_RATE, MIN_RATE

if TYPE_CHECKING:
    from tests.simulation.quorums.group import Group
    from tests.simulation.quorums.lighthouse import QuorumLighthouse
    from tests.simulation.quorums.simulation import QuorumSimulation

WALL_JUMPS_S = (-86_400.0, -3600.0, -5.0, 5.0, 3600.0, 43_200.0)


@fault(find_group)
def drift_group(simulation: "QuorumSimulation", group: "Group", fault: Fault) -> None:
    """the clocks of a group's processes run at other rates from now on"""
    for process in group.processes:
        process.drift(simulation.world.random.choice((MIN_RATE, 1.0, MAX_RATE)))


@fault(find_lighthouse)
def drift_lighthouse(simulation: "QuorumSimulation", process: "QuorumLighthouse", fault: Fault) -> None:
    """the lighthouse's clock runs at another rate from now on"""
    process.drift(simulation.world.random.choice((MIN_RATE, 1.0, MAX_RATE)))


@fault(find_lighthouse)
def jump_wall_clock(simulation: "QuorumSimulation", process: "QuorumLighthouse", fault: Fault) -> None:
    """the lighthouse's wall clock is set, to at most half a day off the true time, and the lighthouse started again"""
    simulation.lighthouse.set_wall_clock(simulation.world.random.choice(WALL_JUMPS_S))
    simulation.lighthouse.kill(min(fault.for_s, 1.0))
