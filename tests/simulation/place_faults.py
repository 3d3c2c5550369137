"""What the faults of the lighthouse and of the network do."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from tests.simulation.faults import Fault
from tests.simulation.lighthouse_process import HOST

if TYPE_CHECKING:
    from tests.simulation.simulation import Simulation

# Back within the lease, less a beat and the time to connect again: nobody is to notice.
SHORTLY_S = 1.2


def _of_lighthouse(act: Callable[["Simulation", Fault], None]) -> Callable[["Simulation", Fault], bool]:
    def fire(simulation: "Simulation", fault: Fault) -> bool:
        if simulation.lighthouse.is_up:
            simulation.world.say("FAULT", f"{fault.what} ({fault.for_s:.2f} s)")
            simulation.promise.fired(fault, None)
            act(simulation, fault)
            return True
        return False

    return fire


def _kill_lighthouse(simulation: "Simulation", fault: Fault) -> None:
    simulation.lighthouse.kill(fault.for_s)


def _restart_lighthouse(simulation: "Simulation", fault: Fault) -> None:
    simulation.lighthouse.kill(min(fault.for_s, SHORTLY_S))


def _slow_lighthouse(simulation: "Simulation", fault: Fault) -> None:
    process = simulation.lighthouse.process
    assert process is not None
    process.slow(simulation.world.random.choice((0.003, 0.02)), fault.for_s)


def _crash_telling(simulation: "Simulation", fault: Fault) -> None:
    """It dies between two effects, and waits for a moment when a quorum forms if it can."""
    process = simulation.lighthouse.process
    assert process is not None
    process.arm_crash(simulation.world.random.randrange(6), patience_s=fault.for_s)


def _pause_lighthouse(simulation: "Simulation", fault: Fault) -> None:
    process = simulation.lighthouse.process
    assert process is not None
    process.pause(fault.for_s)


def _lose_journal(simulation: "Simulation", fault: Fault) -> None:
    simulation.lighthouse.kill(fault.for_s)
    simulation.lighthouse.lose_journal()


def _change_lease(simulation: "Simulation", fault: Fault) -> None:
    simulation.lighthouse.change_lease(simulation.world.random.choice((1.5, 3.0, 5.0)))
    simulation.lighthouse.kill(fault.for_s)


# -- the network


def _cut(simulation: "Simulation", ways: list[tuple[str, str]], for_s: float) -> None:
    for source, target in ways:
        simulation.network.cut(source, target)
        simulation.world.after(for_s, simulation.network.mend, source, target)


def _cut_lighthouse(simulation: "Simulation", fault: Fault) -> None:
    """Some of the groups and the lighthouse are out of each other's reach."""
    r = simulation.world.random
    share = r.choice((0.3, 0.6, 1.0))
    hosts = [group.host for group in simulation.groups if r.random() < share]
    hosts = hosts or [simulation.groups[fault.whom].host]
    _cut(simulation, [way for host in hosts for way in ((host, HOST), (HOST, host))], fault.for_s)


def _cut_one_way(simulation: "Simulation", fault: Fault) -> None:
    host = simulation.groups[fault.whom].host
    other = simulation.world.random.choice([HOST, *(g.host for g in simulation.groups if g.host != host)])
    _cut(simulation, [simulation.world.random.choice([(host, other), (other, host)])], fault.for_s)


def _cut_peers(simulation: "Simulation", fault: Fault) -> None:
    host = simulation.groups[fault.whom].host
    others = [group.host for group in simulation.groups if group.host != host]
    _cut(simulation, [way for other in others for way in ((host, other), (other, host))], fault.for_s)


PLACE_FAULTS: dict[str, Callable[["Simulation", Fault], bool]] = {
    "lose_journal": _of_lighthouse(_lose_journal),
    "change_lease": _of_lighthouse(_change_lease),
    "kill_lighthouse": _of_lighthouse(_kill_lighthouse),
    "restart_lighthouse": _of_lighthouse(_restart_lighthouse),
    "slow_lighthouse": _of_lighthouse(_slow_lighthouse),
    "crash_telling": _of_lighthouse(_crash_telling),
    "pause_lighthouse": _of_lighthouse(_pause_lighthouse),
    "cut_lighthouse": _of_lighthouse(_cut_lighthouse),
    "cut_one_way": _of_lighthouse(_cut_one_way),
    "cut_peers": _of_lighthouse(_cut_peers),
}
