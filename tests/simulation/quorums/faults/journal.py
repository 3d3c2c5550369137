"""Faults of the lighthouse's journal and of the disk below it."""

from typing import TYPE_CHECKING

from tests.simulation.faults import Fault
from tests.simulation.quorums.faults.kinds import fault
from tests.simulation.quorums.faults.lighthouse import find_lighthouse

if TYPE_CHECKING:
    from tests.simulation.quorums.lighthouse import QuorumLighthouse
    from tests.simulation.quorums.simulation import QuorumSimulation

SLOW_WRITE_S = (0.05, 0.5, 2.0)


@fault(find_lighthouse)
def lose_journal(simulation: "QuorumSimulation", process: "QuorumLighthouse", fault: Fault) -> None:
    """the lighthouse is killed and comes back without what it had written down"""
    simulation.lighthouse.kill(fault.for_s)
    simulation.lighthouse.lose_journal()


@fault(find_lighthouse, weight=0.5)
def roll_back_journal(simulation: "QuorumSimulation", process: "QuorumLighthouse", fault: Fault) -> None:
    """the same, and it finds an older copy of it"""
    simulation.lighthouse.kill(fault.for_s)
    simulation.lighthouse.lose_journal(simulation.world.random.choice((1, 1, 2, 5)))


@fault(find_lighthouse)
def tear_write(simulation: "QuorumSimulation", process: "QuorumLighthouse", fault: Fault) -> None:
    """it is killed in the middle of its next write, which is lost"""
    simulation.lighthouse.journal.tears_next = True
    simulation.world.after(fault.for_s, setattr, simulation.lighthouse.journal, "tears_next", False)


@fault(find_lighthouse)
def slow_disk(simulation: "QuorumSimulation", process: "QuorumLighthouse", fault: Fault) -> None:
    """each write takes up to 2 s, for a while; the whole lighthouse waits for it"""
    journal = simulation.lighthouse.journal
    journal.write_s = simulation.world.random.choice(SLOW_WRITE_S)
    simulation.world.after(fault.for_s, setattr, journal, "write_s", 0.0)


@fault(find_lighthouse)
def full_disk(simulation: "QuorumSimulation", process: "QuorumLighthouse", fault: Fault) -> None:
    """each write fails, for a while: the lighthouse ends, and is started again"""
    journal = simulation.lighthouse.journal
    journal.is_full = True
    simulation.world.after(fault.for_s, setattr, journal, "is_full", False)
