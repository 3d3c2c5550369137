"""The kinds of faults of a run. A fault that finds no target waits for one until the faults end."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from tests.simulation.faults import Fault, Kinds, draw_overlapping
from tests.simulation.network import LIGHTHOUSE_HOST
from tests.simulation.runs.lighthouse import NAME, RunLighthouse
from tests.simulation.runs.supervisor import Host, Supervisor

if TYPE_CHECKING:
    from tests.simulation.runs.plan import RunPlan
    from tests.simulation.runs.rank import RankProcess
    from tests.simulation.runs.simulation import RunSimulation

FIRST_FAULT_S = 1.0
SIGKILL = -9, "killed by signal 9"

KINDS = Kinds()
fault = KINDS.fault


def draw_faults(simulation: "RunSimulation") -> list[Fault]:
    plan, r = simulation.plan, simulation.world.random
    if plan.scenario == "tight":
        return draw_overlapping(r, plan, plan.terms.world_size, deadlines_s(plan))
    faults: list[Fault] = []
    at = FIRST_FAULT_S + r.random()
    while at < plan.faults_s:
        for_s = r.choice((0.05, 0.3, 1.0, 2.5, 6.0)) * r.uniform(0.7, 1.3)
        faults.append(Fault(at, r.choice(plan.mix), r.randrange(plan.terms.world_size), for_s))
        at += r.expovariate(1 / plan.fault_every_s)
    return faults


def deadlines_s(plan: "RunPlan") -> tuple[float, ...]:
    terms = plan.terms
    own_s = (plan.rank_timeout_s, plan.restart_s, plan.boot_s, plan.step_s, plan.accept_timeout_s)
    return terms.join_timeout_s, terms.return_timeout_s, *own_s


# -- targets


def any_rank(rank: "RankProcess") -> bool:
    return True


def is_running(rank: "RankProcess") -> bool:
    return rank.running is not None


def find_rank(suits: Callable[["RankProcess"], bool]) -> Callable[["RunSimulation", Fault], "RankProcess | None"]:
    def find(simulation: "RunSimulation", fault: Fault) -> "RankProcess | None":
        ranks = simulation.ranks
        rank = ranks[fault.whom % len(ranks)] if ranks else None
        return rank if rank is not None and suits(rank) else None

    return find


def find_host(simulation: "RunSimulation", fault: Fault) -> Host | None:
    hosts = [host for host in simulation.hosts if host.is_up]
    return hosts[fault.whom % len(hosts)] if hosts else None


def find_supervisor(simulation: "RunSimulation", fault: Fault) -> Supervisor | None:
    host = find_host(simulation, fault)
    return host.supervisor if host is not None else None


def find_lighthouse(simulation: "RunSimulation", fault: Fault) -> RunLighthouse | None:
    process = simulation.lighthouse.process
    return process if process is not None and process.is_up and not process.is_paused else None


def find_run(simulation: "RunSimulation", fault: Fault) -> "RunSimulation":
    return simulation


# -- ranks


@fault(find_rank(any_rank))
def kill_rank(simulation: "RunSimulation", rank: "RankProcess", fault: Fault) -> None:
    """a rank is killed"""
    rank.exit(*SIGKILL)


@fault(find_rank(lambda rank: len(rank.simulation.ranks) > 1))
def kill_two(simulation: "RunSimulation", rank: "RankProcess", fault: Fault) -> None:
    """a rank is killed, and another one soon after it"""
    others = [other for other in simulation.ranks if other is not rank]
    rank.exit(*SIGKILL)
    simulation.world.after(fault.for_s / 10, others[fault.whom % len(others)].exit, *SIGKILL)


@fault(find_rank(lambda rank: is_running(rank) and not rank.is_paused))
def raise_in_rank(simulation: "RunSimulation", rank: "RankProcess", fault: Fault) -> None:
    """the function of a rank raises"""
    rank.fail("ValueError: drawn")


@fault(find_rank(lambda rank: not rank.is_paused))
def exit_130(simulation: "RunSimulation", rank: "RankProcess", fault: Fault) -> None:
    """a rank exits with 130, which stops the run"""
    rank.exit(130, "RestartAbort")


@fault(find_rank(any_rank))
def pause_rank(simulation: "RunSimulation", rank: "RankProcess", fault: Fault) -> None:
    """SIGSTOP to a rank, for a while"""
    rank.pause(fault.for_s)
    simulation.trouble(rank, until=simulation.world.now + fault.for_s)


@fault(find_rank(is_running))
def hang_rank(simulation: "RunSimulation", rank: "RankProcess", fault: Fault) -> None:
    """the function of a rank hangs in C code, for a while"""
    rank.hang(fault.for_s)
    simulation.trouble(rank, until=simulation.world.now + fault.for_s)


@fault(find_rank(is_running))
def behind_rank(simulation: "RunSimulation", rank: "RankProcess", fault: Fault) -> bool:
    """a rank hangs, and the stall verdict names it"""
    hang_rank(simulation, rank, fault)
    return simulation.operator(lambda process: process.driver.fail_ranks(NAME[1], (rank.rank.slot,), "nothing moves"))


@fault(find_rank(lambda rank: rank.link.is_open))
def break_rank(simulation: "RunSimulation", rank: "RankProcess", fault: Fault) -> None:
    """the stream of a rank breaks"""
    rank.link.break_()
    simulation.trouble(rank, until=simulation.world.now)


@fault(find_rank(any_rank))
def impostor_rank(simulation: "RunSimulation", rank: "RankProcess", fault: Fault) -> bool:
    """a process without the secret claims a rank"""
    return simulation.operator(lambda process: process.enter_as(rank))


# -- supervisors and their hosts


@fault(find_host)
def kill_supervisor(simulation: "RunSimulation", host: Host, fault: Fault) -> None:
    """a supervisor is killed, and its ranks with it"""
    host.kill_supervisor(simulation.plan.relaunch_s)


@fault(find_host)
def twin_supervisor(simulation: "RunSimulation", host: Host, fault: Fault) -> None:
    """a second supervisor with the same name starts"""
    host.start_twin()


@fault(find_supervisor)
def pause_supervisor(simulation: "RunSimulation", supervisor: Supervisor, fault: Fault) -> None:
    """SIGSTOP to a supervisor, for a while"""
    supervisor.pause(fault.for_s)
    simulation.trouble(supervisor, until=simulation.world.now + fault.for_s)


@fault(find_supervisor)
def break_supervisor(simulation: "RunSimulation", supervisor: Supervisor, fault: Fault) -> None:
    """the stream of a supervisor breaks"""
    supervisor.link.break_()
    simulation.trouble(supervisor, until=simulation.world.now)


@fault(find_host)
def impostor_supervisor(simulation: "RunSimulation", host: Host, fault: Fault) -> None:
    """a process without the secret claims the name of a supervisor"""
    simulation.operator(lambda process: process.supervise_as(host))


@fault(find_host)
def cut_host(simulation: "RunSimulation", host: Host, fault: Fault) -> None:
    """a host and the lighthouse lose contact, for a while"""
    _cut(simulation, host, fault, _ways(host))


@fault(find_host)
def cut_one_way(simulation: "RunSimulation", host: Host, fault: Fault) -> None:
    """one direction between a host and the lighthouse carries nothing, for a while"""
    _cut(simulation, host, fault, [_ways(host)[fault.whom % 2]])


def _ways(host: Host) -> list[tuple[str, str]]:
    return [(host.name, LIGHTHOUSE_HOST), (LIGHTHOUSE_HOST, host.name)]


def _cut(simulation: "RunSimulation", host: Host, fault: Fault, ways: list[tuple[str, str]]) -> None:
    simulation.network.cut_for(fault.for_s, ways)
    simulation.trouble(host.name, until=simulation.world.now + fault.for_s)


# -- the lighthouse


@fault(find_lighthouse)
def kill_lighthouse(simulation: "RunSimulation", process: RunLighthouse, fault: Fault) -> None:
    """the lighthouse is killed, and started again after a while"""
    simulation.lighthouse.kill(fault.for_s)


@fault(find_lighthouse)
def lose_journal(simulation: "RunSimulation", process: RunLighthouse, fault: Fault) -> None:
    """the same, and its journal is lost"""
    simulation.lighthouse.kill(fault.for_s)
    simulation.lighthouse.lose_journal()


@fault(find_lighthouse)
def crash_telling(simulation: "RunSimulation", process: RunLighthouse, fault: Fault) -> None:
    """the lighthouse dies between two writes or messages, while a generation forms if one does in time"""
    process.arm_crash(simulation.world.random.randrange(6), fault.for_s)


@fault(find_lighthouse)
def pause_lighthouse(simulation: "RunSimulation", process: RunLighthouse, fault: Fault) -> None:
    """SIGSTOP to the lighthouse, for a while"""
    process.pause(fault.for_s)


@fault(find_lighthouse)
def slow_lighthouse(simulation: "RunSimulation", process: RunLighthouse, fault: Fault) -> None:
    """everything that the lighthouse does takes 3 or 20 ms more, for a while"""
    process.slow(simulation.world.random.choice((0.003, 0.02)), fault.for_s)


# -- the operator


@fault(find_run)
def stop_run(simulation: "RunSimulation", run: "RunSimulation", fault: Fault) -> bool:
    """an operator stops the run"""
    reason = f"enough at {simulation.world.now:.3f}"  # no two are the same
    return simulation.operator(lambda process: process.driver.request_stop(reason, "operator"))


@fault(find_run)
def resume(simulation: "RunSimulation", run: "RunSimulation", fault: Fault) -> bool:
    """an operator resumes a stopped run, and launches it again"""
    return simulation.checkers.stop is not None and simulation.resume()


@fault(find_run)
def launch_again(simulation: "RunSimulation", run: "RunSimulation", fault: Fault) -> bool:
    """the run is launched again after its training has ended"""
    return simulation.launch_again()
