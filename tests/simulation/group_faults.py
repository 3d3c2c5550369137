"""What the faults of replica groups do, and to whom they can happen: True, if it has happened."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from agent_client.agent.rules.step import Phase
from tests.simulation.faults import RETRY_S, Fault
from tests.simulation.network import End

if TYPE_CHECKING:
    from tests.simulation.group_process import Group
    from tests.simulation.rank import Rank
    from tests.simulation.simulation import Simulation

DRAIN_GRACE_S = 15.0
STRANGER_PATIENCE_S = 60.0


def _pick(simulation: "Simulation", fault: Fault, suits: Callable[["Group"], bool]) -> "Group | None":
    groups = simulation.groups[fault.whom :] + simulation.groups[: fault.whom]
    return next((group for group in groups if suits(group)), None)


def _of_group(act: Callable[["Simulation", "Group", Fault], None]) -> Callable[["Simulation", Fault], bool]:
    """Happens to a group that is training."""

    def fire(simulation: "Simulation", fault: Fault) -> bool:
        group = _pick(simulation, fault, lambda group: group.is_training)
        if group is not None:
            simulation.world.say("FAULT", f"{fault.what} {group.name} ({fault.for_s:.2f} s)")
            simulation.promise.fired(fault, group)
            act(simulation, group, fault)
        return group is not None

    return fire


# -- groups


def _kill_group(simulation: "Simulation", group: "Group", fault: Fault) -> None:
    group.kill()


def _vanish_group(simulation: "Simulation", group: "Group", fault: Fault) -> None:
    group.vanish()


def _kill_rank(simulation: "Simulation", group: "Group", fault: Fault) -> None:
    simulation.world.random.choice(group.ranks).kill()


def _kill_manager(simulation: "Simulation", group: "Group", fault: Fault) -> None:
    group.manager.kill()


def _pause_group(simulation: "Simulation", group: "Group", fault: Fault) -> None:
    for process in (group.manager, *group.ranks):
        process.pause(fault.for_s)


def _pause_manager(simulation: "Simulation", group: "Group", fault: Fault) -> None:
    group.manager.pause(fault.for_s)


def _pause_rank(simulation: "Simulation", group: "Group", fault: Fault) -> None:
    simulation.world.random.choice(group.ranks).pause(fault.for_s)


def _break_session(simulation: "Simulation", fault: Fault) -> bool:
    group = _pick(simulation, fault, lambda group: group.is_training and group.manager.link is not None)
    if group is None:
        return False
    link = group.manager.link
    assert isinstance(link, End)
    simulation.world.say("FAULT", f"break_session {group.name}")
    simulation.promise.fired(fault, group)
    simulation.network.break_(link)
    return True


def _break_watch(simulation: "Simulation", group: "Group", fault: Fault) -> None:
    rank = simulation.world.random.choice(group.ranks)
    group.manager.on_watch_end(rank.watch)
    rank.on_watch_end()


def _slow_group(simulation: "Simulation", group: "Group", fault: Fault) -> None:
    by_s = simulation.world.random.choice((0.003, 0.02, 0.06))
    for process in (group.manager, *group.ranks):
        process.slow(by_s, fault.for_s)


def _shrink_only(simulation: "Simulation", group: "Group", fault: Fault) -> None:
    group.shrinks = True
    simulation.world.after(fault.for_s, setattr, group, "shrinks", False)


def _fail_step(simulation: "Simulation", fault: Fault) -> bool:
    """A rank's step fails without a loss."""
    return _of_rank(simulation, fault, Phase.COMPUTING, lambda rank: rank.report_error("reported"))


def _cancel_call(simulation: "Simulation", group: "Group", fault: Fault) -> None:
    """The next call for a quorum is withdrawn while it waits."""
    group.cancels.append(Phase.ASKED)


def _cancel_vote(simulation: "Simulation", group: "Group", fault: Fault) -> None:
    group.cancels.append(Phase.VOTED)


def _of_rank(simulation: "Simulation", fault: Fault, phase: Phase, act: Callable[["Rank"], None]) -> bool:
    def ranks_of(group: "Group") -> list["Rank"]:
        return [rank for rank in group.ranks if rank.machine.phase is phase and not rank.is_paused]

    group = _pick(simulation, fault, lambda group: group.is_training and bool(ranks_of(group)))
    if group is None:
        return False
    rank = simulation.world.random.choice(ranks_of(group))
    simulation.world.say("FAULT", f"{fault.what} {rank.name}")
    act(rank)
    return True


def _drain(simulation: "Simulation", fault: Fault) -> bool:
    """A group leaves in good order, and comes back later."""
    group = _pick(simulation, fault, lambda group: group.is_training)
    if group is None:
        return False
    simulation.world.say("FAULT", f"drain {group.name}")
    simulation.promise.fired(fault, group)
    group.drain()
    simulation.begin()
    _when_gone(simulation, group, lambda: simulation.world.after(fault.for_s, back))

    def back() -> None:
        simulation.end()
        group.come_back()

    return True


def _end_script(simulation: "Simulation", fault: Fault) -> bool:
    """A group's script ends in good order; later the group is started again, below its old manager or a new one."""
    group = _pick(simulation, fault, lambda group: group.is_training)
    if group is None:
        return False
    if group.is_torchft:
        return _drain(simulation, fault)
    world = simulation.world
    world.say("FAULT", f"end_script {group.name}")
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

    look()
    return True


def _when_gone(simulation: "Simulation", group: "Group", act: Callable[[], None]) -> None:
    """After its grace a supervisor kills what is left."""
    kill_at = simulation.world.now + DRAIN_GRACE_S

    def look() -> None:
        world = simulation.world
        if not group.has_gone and world.now >= kill_at:
            world.counts["drains that ended by a kill"] += 1
            group.end_for_good()
        if group.has_gone:
            act()
        else:
            world.after(RETRY_S, look)

    look()


def _stranger(simulation: "Simulation", fault: Fault) -> bool:
    """A group that was never there before comes, and is killed for ever."""
    group = simulation.add_stranger()
    simulation.world.say("FAULT", f"stranger {group.name} ({fault.for_s:.2f} s)")
    simulation.world.after(2 * fault.for_s, _end_stranger, simulation, group)
    return True


def _end_stranger(simulation: "Simulation", group: "Group") -> None:
    group.end_for_good()
    simulation.end()


def _stranger_drains(simulation: "Simulation", fault: Fault) -> bool:
    """The same, and it leaves in good order, once it trains."""
    group = simulation.add_stranger()
    simulation.world.say("FAULT", f"stranger_drains {group.name} ({fault.for_s:.2f} s)")

    def leave(give_up_at: float) -> None:
        if not any(rank.commits for rank in group.ranks) and simulation.world.now < give_up_at:
            return simulation.world.after(RETRY_S, leave, give_up_at)
        group.drain()
        return _when_gone(simulation, group, simulation.end)

    simulation.world.after(2 * fault.for_s, leave, simulation.world.now + STRANGER_PATIENCE_S)
    return True


def _twin(simulation: "Simulation", group: "Group", fault: Fault) -> None:
    """Somebody starts a second group with the same replica_id, and ends it after a while."""
    twin = simulation.add_group(group.replica_id)
    twin.name = f"{group.name}-twin{len(simulation.twins)}"
    simulation.twins.append(twin)
    twin.start()
    simulation.world.after(fault.for_s, twin.end_for_good)


GROUP_FAULTS: dict[str, Callable[["Simulation", Fault], bool]] = {
    "kill_group": _of_group(_kill_group),
    "vanish_group": _of_group(_vanish_group),
    "kill_rank": _of_group(_kill_rank),
    "kill_manager": _of_group(_kill_manager),
    "pause_group": _of_group(_pause_group),
    "pause_manager": _of_group(_pause_manager),
    "break_watch": _of_group(_break_watch),
    "slow_group": _of_group(_slow_group),
    "shrink_only": _of_group(_shrink_only),
    "fail_step": _fail_step,
    "cancel_call": _of_group(_cancel_call),
    "cancel_vote": _of_group(_cancel_vote),
    "drain": _drain,
    "end_script": _end_script,
    "stranger": _stranger,
    "stranger_drains": _stranger_drains,
    "twin": _of_group(_twin),
    "pause_rank": _of_group(_pause_rank),
    "break_session": _break_session,
}
