"""Faults of whole replica groups."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from tests.simulation.faults import Fault
from tests.simulation.quorums.faults.kinds import fault
from tests.simulation.quorums.rank import Snapshot
from tests.simulation.simulation import RETRY_S
from tests.simulation.world import Violation

if TYPE_CHECKING:
    from tests.simulation.quorums.group import Group
    from tests.simulation.quorums.simulation import QuorumSimulation

DRAIN_GRACE_S = 15.0
STRANGER_PATIENCE_S = 60.0
REBOOT_S = (0.05, 0.5, 3.0)
ANOTHER_JOBS_STATE = 0xBAD
FAR_AHEAD = 10**6
SLOWED_BY_S = (0.003, 0.02, 0.06)


def find_group(
    simulation: "QuorumSimulation", fault: Fault, suits: Callable[["Group"], bool] = lambda group: True
) -> "Group | None":
    """Return a training group, beginning with the number `whom`."""
    groups = simulation.groups[fault.whom :] + simulation.groups[: fault.whom]
    return next((group for group in groups if group.is_training and suits(group)), None)


def find_living(simulation: "QuorumSimulation", fault: Fault) -> "Group | None":
    """Return a training group, or in a tight run also one that is leaving."""
    if not simulation.plan.is_tight:
        return find_group(simulation, fault)
    groups = simulation.groups[fault.whom :] + simulation.groups[: fault.whom]
    return next((group for group in groups if group.is_up and not group.has_gone), None)


def anybody(simulation: "QuorumSimulation", fault: Fault) -> "QuorumSimulation":
    return simulation


def find_training(simulation: "QuorumSimulation", fault: Fault) -> "QuorumSimulation | None":
    """Return the simulation once its job has committed its first steps."""
    own = [group for group in simulation.groups if group.is_training and group not in simulation.strangers]
    return simulation if any(all(rank.commits > 1 for rank in group.ranks) for group in own) else None


@fault(find_living)
def kill_group(simulation: "QuorumSimulation", group: "Group", fault: Fault) -> None:
    """its manager and all ranks are killed, and started again"""
    group.kill()


@fault(find_living)
def vanish_group(simulation: "QuorumSimulation", group: "Group", fault: Fault) -> None:
    """its host loses its power: nobody is told; it is started again at the usual time"""
    group.vanish()


@fault(find_living)
def reboot_group(simulation: "QuorumSimulation", group: "Group", fault: Fault) -> None:
    """its host loses its power and is back at once with the same address: it answers old connections with a reset"""
    group.vanish(back_after_s=simulation.world.random.choice(REBOOT_S))


@fault(find_living)
def pause_group(simulation: "QuorumSimulation", group: "Group", fault: Fault) -> None:
    """SIGSTOP to all its processes, for a while"""
    for process in group.processes:
        process.pause(fault.for_s)


@fault(find_living)
def slow_group(simulation: "QuorumSimulation", group: "Group", fault: Fault) -> None:
    """everything that its processes do takes 3 to 60 ms more, for a while"""
    by_s = simulation.world.random.choice(SLOWED_BY_S)
    for process in group.processes:
        process.slow(by_s, fault.for_s)


@fault(find_group)
def shrink_only(simulation: "QuorumSimulation", group: "Group", fault: Fault) -> None:
    """its ranks ask to shrink, for a while"""
    group.shrinks = True
    simulation.world.after(fault.for_s, setattr, group, "shrinks", False)


@fault(find_group)
def twin(simulation: "QuorumSimulation", group: "Group", fault: Fault) -> None:
    """somebody starts a second group with its replica_id, and ends it after a while"""
    second = simulation.add_group(group.replica_id)
    second.name = f"{group.name}-twin{len(simulation.twins)}"
    simulation.twins.append(second)
    second.start()
    simulation.world.after(fault.for_s, second.end_for_good)


# -- in good order


@fault(find_group)
def drain(simulation: "QuorumSimulation", group: "Group", fault: Fault) -> None:
    """it leaves in good order, and comes back later"""
    _drain(simulation, group, fault)


def _drain(simulation: "QuorumSimulation", group: "Group", fault: Fault) -> None:
    simulation.begin()
    _when_gone(simulation, group, lambda: simulation.world.after(fault.for_s, _come_back, simulation, group))
    group.drain()  # its manager may die of it, between two answers


def _come_back(simulation: "QuorumSimulation", group: "Group") -> None:
    simulation.end()
    group.come_back()


def _when_gone(simulation: "QuorumSimulation", group: "Group", act: Callable[[], None]) -> None:
    """Call `act` when a group has left. After the grace period, kill what is left of it."""
    kill_at = simulation.world.now + DRAIN_GRACE_S

    def look() -> None:
        world = simulation.world
        if not group.has_gone and world.now >= kill_at:
            world.counts["drains that ended by a kill"] += 1
            if simulation.plan.one_at_a_time:
                raise Violation(f"S6 {group.name} was drained {DRAIN_GRACE_S:g} s ago, and has not left")
            group.end_for_good()
        if group.has_gone:
            act()
        else:
            world.after(RETRY_S, look)

    look()


@fault(find_group)
def end_script(simulation: "QuorumSimulation", group: "Group", fault: Fault) -> None:
    """its script ends in good order; later it is started again, below its old manager or a new one"""
    if group.is_torchft:
        return _drain(simulation, group, fault)
    world = simulation.world
    group.end_script(1 + max(rank.machine.step for rank in group.ranks))
    simulation.begin()
    give_up_at = world.now + DRAIN_GRACE_S

    def look() -> None:
        if any(rank.is_up for rank in group.ranks) and world.now < give_up_at:
            return world.after(RETRY_S, look)
        return world.after(fault.for_s, back)

    def back() -> None:
        simulation.end()
        group.come_back(keeps_manager=world.random.random() < 0.5)

    return look()


# -- strangers


@fault(anybody)
def stranger(simulation: "QuorumSimulation", anybody: "QuorumSimulation", fault: Fault) -> None:
    """a group that was never there before comes, and is killed for ever"""
    group = simulation.add_stranger()
    simulation.world.after(2 * fault.for_s, _end_stranger, simulation, group)


def _end_stranger(simulation: "QuorumSimulation", group: "Group") -> None:
    group.end_for_good()
    simulation.end()


@fault(find_training, weight=0)
def stranger_ahead(simulation: "QuorumSimulation", job: "QuorumSimulation", fault: Fault) -> None:
    """a group comes with the state of another job, says that it is far ahead, and names the present quorum as the one
    that has led it there; those that train must not take its state over"""
    step = FAR_AHEAD + max(rank.machine.step for group in job.groups for rank in group.ranks)
    stranger = simulation.add_stranger(Snapshot(ANOTHER_JOBS_STATE, step, simulation.checkers.newest_id))

    def look() -> None:
        for group in simulation.groups:
            for rank in group.ranks:
                if group.begins_with is None and rank.is_up and rank.machine.step >= FAR_AHEAD:
                    raise Violation(f"S3 {rank.name} has taken over the state with which {stranger.name} came")
        if not stranger.has_gone:
            simulation.world.after(RETRY_S, look)

    look()
    simulation.world.after(2 * fault.for_s, _end_stranger, simulation, stranger)


@fault(anybody)
def stranger_drains(simulation: "QuorumSimulation", anybody: "QuorumSimulation", fault: Fault) -> None:
    """the same, and it leaves in good order once it trains"""
    group = simulation.add_stranger()

    def leave(give_up_at: float) -> None:
        if not any(rank.commits for rank in group.ranks) and simulation.world.now < give_up_at:
            return simulation.world.after(RETRY_S, leave, give_up_at)
        _when_gone(simulation, group, simulation.end)
        return group.drain()

    simulation.world.after(2 * fault.for_s, leave, simulation.world.now + STRANGER_PATIENCE_S)
