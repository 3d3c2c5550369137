"""Faults of two lighthouses on one store, and of the store."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tests.simulation.faults import Fault
from tests.simulation.quorums.faults.kinds import fault
from tests.simulation.world import MAX_RATE, MIN_RATE

if TYPE_CHECKING:
    from tests.simulation.quorums.simulation import QuorumSimulation
    from tests.simulation.quorums.two_lighthouses import Contender, Etcd, TwoLighthouses

STORE_HOST = "etcd"
STOPS_S = (0.5, 1.9, 2.3, 3.2, 6.0)


def find_pair(simulation: "QuorumSimulation", fault: Fault) -> "TwoLighthouses | None":
    place: Any = simulation.lighthouse
    return place if simulation.plan.has_two_lighthouses and place.is_up else None


def find_leader(simulation: "QuorumSimulation", fault: Fault) -> "Contender | None":
    pair = find_pair(simulation, fault)
    return pair.leader if pair is not None else None


def find_store(simulation: "QuorumSimulation", fault: Fault) -> "Etcd | None":
    pair = find_pair(simulation, fault)
    return pair.store if pair is not None and not pair.store.is_stopped else None


def _cut(simulation: "QuorumSimulation", ways: Sequence[tuple[str, str]], for_s: float) -> None:
    simulation.begin()
    for way in ways:
        simulation.network.cut(*way)

    def mend() -> None:
        for way in ways:
            simulation.network.mend(*way)
        simulation.end()

    simulation.world.after(for_s, mend)


@fault(find_leader, weight=0)
def kill_leader(simulation: "QuorumSimulation", leader: "Contender", fault: Fault) -> None:
    """the lighthouse that leads is killed, and started again after a while"""
    leader.site.kill(fault.for_s)


@fault(find_leader, weight=0)
def stop_leader(simulation: "QuorumSimulation", leader: "Contender", fault: Fault) -> None:
    """SIGSTOP of the lighthouse that leads, for about as long as its lease, more or less"""
    for_s = simulation.world.random.choice(STOPS_S)
    simulation.begin()
    leader.pause(for_s)
    simulation.world.after(for_s, simulation.end)


@fault(find_leader, weight=0)
def cut_leader_from_store(simulation: "QuorumSimulation", leader: "Contender", fault: Fault) -> None:
    """the lighthouse that leads and the store are out of each other's reach, one way or both"""
    ways = [(leader.host, STORE_HOST), (STORE_HOST, leader.host)]
    draw = simulation.world.random
    _cut(simulation, draw.choice((ways, ways[:1], ways[1:])), draw.choice(STOPS_S))


@fault(find_leader, weight=0)
def cut_leader_from_groups(simulation: "QuorumSimulation", leader: "Contender", fault: Fault) -> None:
    """some groups reach the lighthouse that follows, and not the one that leads"""
    draw = simulation.world.random
    hosts = [group.host for group in simulation.groups if draw.random() < 0.5]
    _cut(simulation, [way for host in hosts for way in ((leader.host, host), (host, leader.host))], fault.for_s)


@fault(find_pair, weight=0)
def kill_both_lighthouses(simulation: "QuorumSimulation", pair: "TwoLighthouses", fault: Fault) -> None:
    """both are killed, and started again, each after a while"""
    for seat in pair.seats:
        seat.kill(simulation.world.random.uniform(0.5, 1.5) * fault.for_s)


@fault(find_store, weight=0)
def stop_store(simulation: "QuorumSimulation", store: "Etcd", fault: Fault) -> None:
    """the store has no quorum, for a while"""
    simulation.begin()
    store.is_stopped = True

    def resume() -> None:
        store.is_stopped = False
        simulation.end()

    simulation.world.after(simulation.world.random.choice(STOPS_S), resume)


@fault(find_store, weight=0)
def drift_store(simulation: "QuorumSimulation", store: "Etcd", fault: Fault) -> None:
    """the store's clock runs at another rate from now on, the fastest or the slowest"""
    store.drift(simulation.world.random.choice((MIN_RATE, MAX_RATE)))
