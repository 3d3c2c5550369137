"""Faults of managers and of their connections."""

from typing import TYPE_CHECKING

from tests.simulation.faults import Fault
from tests.simulation.quorums.faults.groups import find_group, find_living
from tests.simulation.quorums.faults.kinds import fault

if TYPE_CHECKING:
    from tests.simulation.quorums.group import Group
    from tests.simulation.quorums.simulation import QuorumSimulation


BACK_AFTER_S = (0.05, 0.5, 3.0, 9.0)


def find_native(simulation: "QuorumSimulation", fault: Fault) -> "Group | None":
    return find_group(simulation, fault, lambda group: not group.is_torchft)


def find_linked(simulation: "QuorumSimulation", fault: Fault) -> "Group | None":
    return find_group(simulation, fault, lambda group: group.manager.link is not None)


@fault(find_living)
def kill_manager(simulation: "QuorumSimulation", group: "Group", fault: Fault) -> None:
    """it is killed; its ranks end with it"""
    group.manager.kill()


@fault(find_native)
def restart_manager(simulation: "QuorumSimulation", group: "Group", fault: Fault) -> None:
    """it is killed, and started again below its ranks, which live on for up to 10 s"""
    group.restart_manager(simulation.world.random.choice(BACK_AFTER_S))


@fault(find_living)
def pause_manager(simulation: "QuorumSimulation", group: "Group", fault: Fault) -> None:
    """SIGSTOP to the manager alone, for a while"""
    group.manager.pause(fault.for_s)


@fault(find_living)
def pause_beyond_lease(simulation: "QuorumSimulation", group: "Group", fault: Fault) -> None:
    """SIGSTOP to the manager until about the moment at which its lease ends, or somewhat longer"""
    group.manager.pause(simulation.plan.config.lease_s * simulation.world.random.uniform(0.7, 1.6))


@fault(find_linked)
def break_session(simulation: "QuorumSimulation", group: "Group", fault: Fault) -> None:
    """its connection to the lighthouse breaks; both learn it, each in its time"""
    assert group.manager.link is not None
    simulation.network.break_(group.manager.link)


@fault(find_native, weight=0.5)
def answer_goes_back(simulation: "QuorumSimulation", group: "Group", fault: Fault) -> None:
    """before the answer to its next join comes another one, with a lower id than it was answered last"""
    group.is_answered_back = True


@fault(find_linked)
def half_break(simulation: "QuorumSimulation", group: "Group", fault: Fault) -> None:
    """its connection breaks for the manager alone: what it had sent, and the end, reach the lighthouse much later,
    after what it sends on its next one"""
    assert group.manager.link is not None
    simulation.network.linger(group.manager.link, fault.for_s)


@fault(find_linked)
def double_session(simulation: "QuorumSimulation", group: "Group", fault: Fault) -> None:
    """its connection breaks, and a proxy on the way opens the next one twice with the same words; one carries on"""
    assert group.manager.link is not None
    group.doubles_sessions_until = simulation.world.now + fault.for_s
    simulation.network.break_(group.manager.link)


@fault(find_group)
def break_watch(simulation: "QuorumSimulation", group: "Group", fault: Fault) -> None:
    """a rank's watch breaks"""
    rank = simulation.world.random.choice(group.ranks)
    group.manager.on_watch_end(rank.watch)
    rank.on_watch_end()
