"""Faults of single ranks and of their calls."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from agent_client.agent.rules.step import Phase
from tests.simulation.faults.groups import find_group
from tests.simulation.faults.kinds import Fault, fault

if TYPE_CHECKING:
    from tests.simulation.group_process import Group
    from tests.simulation.rank import Rank
    from tests.simulation.simulation import Simulation


def find_rank(simulation: "Simulation", fault: Fault) -> "Rank | None":
    group = find_group(simulation, fault)
    return simulation.world.random.choice(group.ranks) if group is not None else None


def find_rank_in(phase: Phase) -> Callable[["Simulation", Fault], "Rank | None"]:
    def ranks_of(group: "Group") -> list["Rank"]:
        return [rank for rank in group.ranks if rank.machine.phase is phase and not rank.is_paused]

    def find(simulation: "Simulation", fault: Fault) -> "Rank | None":
        group = find_group(simulation, fault, lambda group: bool(ranks_of(group)))
        return simulation.world.random.choice(ranks_of(group)) if group is not None else None

    return find


@fault(find_rank)
def kill_rank(simulation: "Simulation", rank: "Rank", fault: Fault) -> None:
    """it is killed; its group's ranks are started again"""
    rank.kill()


@fault(find_rank)
def pause_rank(simulation: "Simulation", rank: "Rank", fault: Fault) -> None:
    """SIGSTOP, for a while"""
    rank.pause(fault.for_s)


@fault(find_rank_in(Phase.COMPUTING))
def fail_step(simulation: "Simulation", rank: "Rank", fault: Fault) -> None:
    """its step fails, without a loss"""
    rank.report_error("reported")


@fault(find_group)
def cancel_call(simulation: "Simulation", group: "Group", fault: Fault) -> None:
    """the next call for a quorum in a group is withdrawn while it waits"""
    group.cancels.append(Phase.ASKED)


@fault(find_group)
def cancel_vote(simulation: "Simulation", group: "Group", fault: Fault) -> None:
    """the next vote in a group is withdrawn while it waits, and repeated"""
    group.cancels.append(Phase.VOTED)
