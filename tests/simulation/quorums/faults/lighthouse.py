"""Faults of the lighthouse and of its host."""

from dataclasses import replace
from typing import TYPE_CHECKING

from tests.simulation.faults import Fault
from tests.simulation.quorums.faults.kinds import fault

if TYPE_CHECKING:
    from tests.simulation.quorums.lighthouse import QuorumLighthouse
    from tests.simulation.quorums.simulation import QuorumSimulation

# Back within the lease, less a beat and the time to connect again: nobody is to notice.
SHORTLY_S = 1.2
LEASES_S = (1.5, 3.0, 5.0)
SIZES = ((1, 2), (2, 4), (1, 3), (2, 3))


def find_lighthouse(simulation: "QuorumSimulation", fault: Fault) -> "QuorumLighthouse | None":
    process = simulation.lighthouse.process
    return process if process is not None and process.is_up else None


def find_only_lighthouse(simulation: "QuorumSimulation", fault: Fault) -> "QuorumLighthouse | None":
    is_alone = not any(impostor.is_up for impostor in simulation.impostors)
    return find_lighthouse(simulation, fault) if is_alone else None


@fault(find_lighthouse)
def kill_lighthouse(simulation: "QuorumSimulation", process: "QuorumLighthouse", fault: Fault) -> None:
    """it is killed, and started again after a while"""
    simulation.lighthouse.kill(fault.for_s)


@fault(find_lighthouse, weight=0)
def restart_lighthouse(simulation: "QuorumSimulation", process: "QuorumLighthouse", fault: Fault) -> None:
    """the same, and it is back within 1.2 s"""
    simulation.lighthouse.kill(min(fault.for_s, SHORTLY_S))


@fault(find_lighthouse)
def close_connections(simulation: "QuorumSimulation", process: "QuorumLighthouse", fault: Fault) -> None:
    """what lies before it (a load balancer, a firewall) closes all connections at once, and refuses new ones for a
    while"""
    simulation.lighthouse.close_connections(fault.for_s)


@fault(find_lighthouse, weight=0)
def close_shortly(simulation: "QuorumSimulation", process: "QuorumLighthouse", fault: Fault) -> None:
    """the same, for at most 1.2 s"""
    simulation.lighthouse.close_connections(min(fault.for_s, SHORTLY_S))


@fault(find_lighthouse)
def reboot_lighthouse(simulation: "QuorumSimulation", process: "QuorumLighthouse", fault: Fault) -> None:
    """its host loses its power: nobody is told; once it is back it answers old connections with a reset"""
    simulation.lighthouse.vanish(fault.for_s)


@fault(find_lighthouse)
def crash_telling(simulation: "QuorumSimulation", process: "QuorumLighthouse", fault: Fault) -> None:
    """it dies between two things that it writes or tells, of a quorum that forms if one does in time"""
    process.arm_crash(simulation.world.random.randrange(6), patience_s=fault.for_s)


@fault(find_lighthouse)
def pause_lighthouse(simulation: "QuorumSimulation", process: "QuorumLighthouse", fault: Fault) -> None:
    """SIGSTOP, for a while"""
    process.pause(fault.for_s)


@fault(find_lighthouse)
def slow_lighthouse(simulation: "QuorumSimulation", process: "QuorumLighthouse", fault: Fault) -> None:
    """everything that it does takes 3 or 20 ms more, for a while"""
    process.slow(simulation.world.random.choice((0.003, 0.02)), fault.for_s)


@fault(find_lighthouse)
def change_lease(simulation: "QuorumSimulation", process: "QuorumLighthouse", fault: Fault) -> None:
    """it is started again with another lease"""
    simulation.lighthouse.change_lease(simulation.world.random.choice(LEASES_S))
    simulation.lighthouse.kill(fault.for_s)


@fault(find_only_lighthouse, weight=0)
def change_sizes(simulation: "QuorumSimulation", process: "QuorumLighthouse", fault: Fault) -> None:
    """it is started again with other sizes that a quorum may have (--min-replicas, --allowed-replicas,
    --active-replicas), and later with those that it had"""
    site, r = simulation.lighthouse, simulation.world.random
    usual, groups = simulation.plan.config, simulation.plan.groups
    sizes = frozenset(r.choice(SIZES)) if r.random() < 0.5 else frozenset[int]()
    active = r.randint(1, groups) if not sizes and r.random() < 0.3 else None
    site.config = replace(site.config, min_replicas=r.randint(1, groups), allowed_sizes=sizes, active=active)
    site.kill(r.choice((0.05, SHORTLY_S)))
    simulation.begin()

    def end() -> None:
        site.config = replace(
            site.config, min_replicas=usual.min_replicas, allowed_sizes=usual.allowed_sizes, active=usual.active
        )
        site.kill(SHORTLY_S)
        simulation.end()

    simulation.world.after(2.0 + fault.for_s, end)


@fault(find_only_lighthouse, weight=0.5)
def second_lighthouse(simulation: "QuorumSimulation", process: "QuorumLighthouse", fault: Fault) -> None:
    """by mistake another one is started, with a journal of its own, and some groups find that one for a while"""
    simulation.start_impostor(fault.for_s)
