"""Faults of the network. Messages over a cut wait until it is over."""

from typing import TYPE_CHECKING

from tests.simulation.faults import Fault
from tests.simulation.network import LIGHTHOUSE_HOST
from tests.simulation.quorums.faults.groups import anybody
from tests.simulation.quorums.faults.kinds import fault

if TYPE_CHECKING:
    from tests.simulation.quorums.simulation import QuorumSimulation


def _both(host: str, other: str) -> list[tuple[str, str]]:
    return [(host, other), (other, host)]


@fault(anybody)
def cut_lighthouse(simulation: "QuorumSimulation", anybody: "QuorumSimulation", fault: Fault) -> None:
    """some of the groups and the lighthouse are out of each other's reach"""
    r = simulation.world.random
    share = r.choice((0.3, 0.6, 1.0))
    hosts = [group.host for group in simulation.groups if r.random() < share]
    hosts = hosts or [simulation.groups[fault.whom].host]
    simulation.network.cut_for(fault.for_s, [way for host in hosts for way in _both(host, LIGHTHOUSE_HOST)])


@fault(anybody)
def cut_one_way(simulation: "QuorumSimulation", anybody: "QuorumSimulation", fault: Fault) -> None:
    """one way between a group and the lighthouse, or another group, carries nothing"""
    r, host = simulation.world.random, simulation.groups[fault.whom].host
    other = r.choice([LIGHTHOUSE_HOST, *(group.host for group in simulation.groups if group.host != host)])
    simulation.network.cut_for(fault.for_s, [r.choice(_both(host, other))])


@fault(anybody)
def cut_lighthouse_one_way(simulation: "QuorumSimulation", anybody: "QuorumSimulation", fault: Fault) -> None:
    """some groups hear the lighthouse and are not heard, or are heard and hear nothing"""
    r = simulation.world.random
    hosts = [group.host for group in simulation.groups if r.random() < 0.5] or [simulation.groups[fault.whom].host]
    is_outward = r.random() < 0.5
    ways = [(host, LIGHTHOUSE_HOST) if is_outward else (LIGHTHOUSE_HOST, host) for host in hosts]
    simulation.network.cut_for(fault.for_s, ways)


@fault(anybody)
def cut_peers(simulation: "QuorumSimulation", anybody: "QuorumSimulation", fault: Fault) -> None:
    """a group and all others are out of each other's reach"""
    host = simulation.groups[fault.whom].host
    others = [group.host for group in simulation.groups if group.host != host]
    simulation.network.cut_for(fault.for_s, [way for other in others for way in _both(host, other)])
