"""Faults of a run: what each does, and to whom. One that finds nobody to hit waits for somebody, and does nothing if
nobody has come when the faults end."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from tests.simulation.runs.lighthouse import HOST, RunLighthouse
from tests.simulation.runs.supervisor import Host

if TYPE_CHECKING:
    from tests.simulation.runs.rank import RankProcess
    from tests.simulation.runs.simulation import RunSimulation

RETRY_S = 0.25
FIRST_FAULT_S = 1.0


@dataclass(frozen=True, slots=True)
class Fault:
    at: float
    what: str
    whom: int
    for_s: float


def draw_faults(simulation: "RunSimulation") -> list[Fault]:
    plan, r = simulation.plan, simulation.world.random
    faults: list[Fault] = []
    at = FIRST_FAULT_S + r.random()
    while at < plan.faults_s:
        for_s = r.choice((0.05, 0.3, 1.0, 2.5, 6.0)) * r.uniform(0.7, 1.3)
        faults.append(Fault(at, r.choice(plan.mix), r.randrange(plan.terms.world_size), for_s))
        at += r.expovariate(1 / plan.fault_every_s)
    return faults


def schedule(simulation: "RunSimulation", fault: Fault) -> None:
    simulation.world.at(fault.at, None, _try, simulation, fault)


def _try(simulation: "RunSimulation", fault: Fault) -> None:
    world = simulation.world
    if FAULTS[fault.what](simulation, fault):
        world.counts[f"fault: {fault.what}"] += 1
        world.say("FAULT", f"{fault.what} {fault.whom} for {fault.for_s:.2f} s")
    elif world.now + RETRY_S < simulation.plan.faults_s:
        world.after(RETRY_S, _try, simulation, fault)
    else:
        world.counts["faults that found nobody"] += 1


def _of_rank(act: Callable[["RunSimulation", Fault, "RankProcess"], bool]) -> Callable[["RunSimulation", Fault], bool]:
    def fire(simulation: "RunSimulation", fault: Fault) -> bool:
        ranks = [rank for host in simulation.hosts for rank in host.ranks]
        return bool(ranks) and act(simulation, fault, ranks[fault.whom % len(ranks)])

    return fire


def _of_host(act: Callable[["RunSimulation", Fault, Host], None]) -> Callable[["RunSimulation", Fault], bool]:
    def fire(simulation: "RunSimulation", fault: Fault) -> bool:
        hosts = [host for host in simulation.hosts if host.is_up]
        if hosts:
            act(simulation, fault, hosts[fault.whom % len(hosts)])
        return bool(hosts)

    return fire


def _of_lighthouse(act: Callable[["RunSimulation", Fault], None]) -> Callable[["RunSimulation", Fault], bool]:
    def fire(simulation: "RunSimulation", fault: Fault) -> bool:
        process = simulation.site.process
        is_here = process is not None and process.is_up and not process.is_paused
        if is_here:
            simulation.trouble(None, until=simulation.world.now + fault.for_s)
            act(simulation, fault)
        return is_here

    return fire


# -- ranks


def _kill_rank(simulation: "RunSimulation", fault: Fault, rank: "RankProcess") -> bool:
    rank.exit(-9, "killed by signal 9")
    return True


def _kill_two(simulation: "RunSimulation", fault: Fault, rank: "RankProcess") -> bool:
    others = [other for host in simulation.hosts for other in host.ranks if other is not rank]
    if not others:
        return False
    rank.exit(-9, "killed by signal 9")
    simulation.world.after(fault.for_s / 10, _kill_if_up, others[fault.whom % len(others)])
    return True


def _kill_if_up(rank: "RankProcess") -> None:
    if rank.is_up:
        rank.exit(-9, "killed by signal 9")


def _raise_in_rank(simulation: "RunSimulation", fault: Fault, rank: "RankProcess") -> bool:
    if rank.running is None or rank.is_paused:
        return False
    rank.fail("ValueError: drawn")
    return True


def _exit_130(simulation: "RunSimulation", fault: Fault, rank: "RankProcess") -> bool:
    if rank.is_paused:
        return False
    rank.exit(130, "RestartAbort")
    return True


def _pause_rank(simulation: "RunSimulation", fault: Fault, rank: "RankProcess") -> bool:
    rank.pause(fault.for_s)
    simulation.trouble(rank, until=simulation.world.now + fault.for_s)
    return True


def _hang_rank(simulation: "RunSimulation", fault: Fault, rank: "RankProcess") -> bool:
    if rank.running is None:
        return False
    rank.hang(fault.for_s)
    simulation.trouble(rank, until=simulation.world.now + fault.for_s)
    return True


def _behind_rank(simulation: "RunSimulation", fault: Fault, rank: "RankProcess") -> bool:
    """It hangs, and the verdict has come."""
    restart = partial(RunLighthouse.restart, slot=rank.rank.slot)
    return _hang_rank(simulation, fault, rank) and simulation.operator(restart)


def _break_rank(simulation: "RunSimulation", fault: Fault, rank: "RankProcess") -> bool:
    if not rank.link.is_open:
        return False
    rank.link.break_()
    simulation.trouble(rank, until=simulation.world.now)
    return True


# -- supervisors


def _kill_supervisor(simulation: "RunSimulation", fault: Fault, host: Host) -> None:
    host.kill_supervisor(simulation.plan.relaunch_s)


def _twin_supervisor(simulation: "RunSimulation", fault: Fault, host: Host) -> None:
    host.start_twin()


def _pause_supervisor(simulation: "RunSimulation", fault: Fault, host: Host) -> None:
    assert host.supervisor is not None
    host.supervisor.pause(fault.for_s)
    simulation.trouble(host.supervisor, until=simulation.world.now + fault.for_s)


def _break_supervisor(simulation: "RunSimulation", fault: Fault, host: Host) -> None:
    assert host.supervisor is not None
    host.supervisor.link.break_()
    simulation.trouble(host.supervisor, until=simulation.world.now)


# -- somebody else, who has not the secret


def _impostor_supervisor(simulation: "RunSimulation", fault: Fault, host: Host) -> None:
    simulation.operator(lambda process: process.supervise_as(host))


def _impostor_rank(simulation: "RunSimulation", fault: Fault, rank: "RankProcess") -> bool:
    return simulation.operator(lambda process: process.enter_as(rank))


def _cut_host(simulation: "RunSimulation", fault: Fault, host: Host) -> None:
    _cut(simulation, fault, ((host.name, HOST), (HOST, host.name)), host)


def _cut_one_way(simulation: "RunSimulation", fault: Fault, host: Host) -> None:
    ways = ((host.name, HOST), (HOST, host.name))
    _cut(simulation, fault, (ways[fault.whom % 2],), host)


def _cut(simulation: "RunSimulation", fault: Fault, ways: tuple[tuple[str, str], ...], host: Host) -> None:
    for way in ways:
        simulation.network.cut(*way)
        simulation.world.after(fault.for_s, simulation.network.mend, *way)
    simulation.trouble(host.name, until=simulation.world.now + fault.for_s)


# -- the lighthouse and the operator


def _kill_lighthouse(simulation: "RunSimulation", fault: Fault) -> None:
    simulation.site.kill(fault.for_s)


def _lose_journal(simulation: "RunSimulation", fault: Fault) -> None:
    simulation.site.kill(fault.for_s)
    simulation.site.lose_journal()


def _crash_telling(simulation: "RunSimulation", fault: Fault) -> None:
    assert simulation.site.process is not None
    simulation.site.process.arm_crash(simulation.world.random.randrange(6), fault.for_s)


def _pause_lighthouse(simulation: "RunSimulation", fault: Fault) -> None:
    assert simulation.site.process is not None
    simulation.site.process.pause(fault.for_s)


def _slow_lighthouse(simulation: "RunSimulation", fault: Fault) -> None:
    assert simulation.site.process is not None
    simulation.site.process.slow(simulation.world.random.choice((0.003, 0.02)), fault.for_s)


def _stop_run(simulation: "RunSimulation", fault: Fault) -> bool:
    reason = f"enough at {simulation.world.now:.3f}"  # no two are the same
    return simulation.operator(lambda process: process.ask_stop(reason))


def _resume(simulation: "RunSimulation", fault: Fault) -> bool:
    """If the run is stopped; whoever died: it is launched again."""
    return simulation.checkers.stop is not None and simulation.resume()


def _launch_again(simulation: "RunSimulation", fault: Fault) -> bool:
    return simulation.launch_again()


FAULTS: dict[str, Callable[["RunSimulation", Fault], bool]] = {
    "kill_rank": _of_rank(_kill_rank),
    "kill_two": _of_rank(_kill_two),
    "raise_in_rank": _of_rank(_raise_in_rank),
    "exit_130": _of_rank(_exit_130),
    "pause_rank": _of_rank(_pause_rank),
    "hang_rank": _of_rank(_hang_rank),
    "behind_rank": _of_rank(_behind_rank),
    "break_rank": _of_rank(_break_rank),
    "kill_supervisor": _of_host(_kill_supervisor),
    "twin_supervisor": _of_host(_twin_supervisor),
    "pause_supervisor": _of_host(_pause_supervisor),
    "break_supervisor": _of_host(_break_supervisor),
    "impostor_supervisor": _of_host(_impostor_supervisor),
    "impostor_rank": _of_rank(_impostor_rank),
    "cut_host": _of_host(_cut_host),
    "cut_one_way": _of_host(_cut_one_way),
    "kill_lighthouse": _of_lighthouse(_kill_lighthouse),
    "crash_telling": _of_lighthouse(_crash_telling),
    "pause_lighthouse": _of_lighthouse(_pause_lighthouse),
    "slow_lighthouse": _of_lighthouse(_slow_lighthouse),
    "lose_journal": _of_lighthouse(_lose_journal),
    "stop_run": _stop_run,
    "resume": _resume,
    "launch_again": _launch_again,
}
