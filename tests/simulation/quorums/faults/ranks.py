"""Faults of single ranks and of their calls."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from agent_client.step.rules.machine import Phase
from tests.simulation.faults import Fault
from tests.simulation.quorums.faults.groups import find_group
from tests.simulation.quorums.faults.kinds import fault

if TYPE_CHECKING:
    from tests.simulation.quorums.group import Group
    from tests.simulation.quorums.rank import Rank
    from tests.simulation.quorums.simulation import QuorumSimulation


def find_rank(simulation: "QuorumSimulation", fault: Fault) -> "Rank | None":
    group = find_group(simulation, fault)
    return simulation.world.random.choice(group.ranks) if group is not None else None


FOREIGN_TAG = 1  # with its group's own its manager would believe it
BACK_AFTER_S = (0.05, 0.5, 3.0, None)


def find_rank_of_many(simulation: "QuorumSimulation", fault: Fault) -> "Rank | None":
    """Return a rank of a native group with several ranks."""
    group = find_group(simulation, fault, lambda group: group.size > 1 and not group.is_torchft)
    return simulation.world.random.choice(group.ranks) if group is not None else None


def find_rank_in(phase: Phase) -> Callable[["QuorumSimulation", Fault], "Rank | None"]:
    def ranks_of(group: "Group") -> list["Rank"]:
        return [rank for rank in group.ranks if rank.machine.phase is phase and not rank.is_paused]

    def find(simulation: "QuorumSimulation", fault: Fault) -> "Rank | None":
        group = find_group(simulation, fault, lambda group: bool(ranks_of(group)))
        return simulation.world.random.choice(ranks_of(group)) if group is not None else None

    return find


@fault(find_rank)
def kill_rank(simulation: "QuorumSimulation", rank: "Rank", fault: Fault) -> None:
    """it is killed; its group's ranks are started again"""
    rank.kill()


@fault(find_rank)
def restart_rank(simulation: "QuorumSimulation", rank: "Rank", fault: Fault) -> None:
    """it alone is killed, or its host loses its power, and it is started again; or it stays away, and its mates are
    told that after 10 s"""
    if rank.site.size == 1:
        return rank.kill()
    return rank.site.restart_rank(rank, simulation.world.random.choice(BACK_AFTER_S))


@fault(find_group)
def crash_calling(simulation: "QuorumSimulation", group: "Group", fault: Fault) -> None:
    """when a rank of it votes next, or asks, then within a moment it is killed, or a mate, or its manager, which comes
    back below its ranks"""
    group.crashes_in = simulation.world.random.choice((Phase.VOTED, Phase.VOTED, Phase.ASKED))


@fault(find_rank)
def pause_rank(simulation: "QuorumSimulation", rank: "Rank", fault: Fault) -> None:
    """SIGSTOP, for a while"""
    rank.pause(fault.for_s)


@fault(find_rank_in(Phase.COMPUTING))
def fail_step(simulation: "QuorumSimulation", rank: "Rank", fault: Fault) -> None:
    """its step fails, without a loss"""
    rank.report_error("reported")


@fault(find_rank_of_many, weight=0.5)
def lie(simulation: "QuorumSimulation", rank: "Rank", fault: Fault) -> None:
    """it asks for the step after its next one, or as if it had failed, and goes on as if it had not"""
    step = rank.machine.step
    lies = [{"step": step + ahead, "tag_quorum_id": FOREIGN_TAG} for ahead in (1, 2)]
    rank.lie(**simulation.world.random.choice([*lies, {"commit_failures": 1}]))


@fault(find_group)
def cancel_call(simulation: "QuorumSimulation", group: "Group", fault: Fault) -> None:
    """the next call for a quorum in a group is withdrawn while it waits"""
    group.cancels.append(Phase.ASKED)


@fault(find_group)
def double_call(simulation: "QuorumSimulation", group: "Group", fault: Fault) -> None:
    """the next calls of a group's ranks come twice, one right after the other; the answer to one is lost"""
    group.doubles += simulation.world.random.randint(1, 6)


@fault(find_group)
def cancel_vote(simulation: "QuorumSimulation", group: "Group", fault: Fault) -> None:
    """the next vote in a group is withdrawn while it waits, and repeated"""
    group.cancels.append(Phase.VOTED)
