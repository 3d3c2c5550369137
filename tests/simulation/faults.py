"""Faults: a list of (when, what, whom, how long), drawn from the seed, and what each does."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from agent_client.step import Phase
from tests.simulation.lighthouse_process import HOST
from tests.simulation.network import End

if TYPE_CHECKING:
    from tests.simulation.group_process import Group
    from tests.simulation.rank import Rank
    from tests.simulation.simulation import Simulation

RETRY_S = 0.25
DRAIN_GRACE_S = 15.0
PATIENCE_S = 300.0
FIRST_FAULT_S = 3.0


@dataclass(frozen=True, slots=True)
class Fault:
    """`whom` is the number of a group; the next one that it can happen to has it."""

    at: float
    what: str
    whom: int
    for_s: float

    def __str__(self) -> str:
        return f"{self.at:.3f} {self.what} group {self.whom} for {self.for_s:.2f} s"


def draw_faults(simulation: "Simulation") -> list[Fault]:
    plan, r = simulation.plan, simulation.world.random
    faults: list[Fault] = []
    at = FIRST_FAULT_S + r.random()
    while at < plan.faults_s:
        for_s = r.choice((0.05, 0.3, 1.0, 2.5, 5.0)) * r.uniform(0.7, 1.3)
        faults.append(Fault(at, r.choice(plan.mix), r.randrange(len(simulation.groups)), for_s))
        at += r.expovariate(1 / plan.fault_every_s)
    return faults


def schedule(simulation: "Simulation", fault: Fault) -> None:
    world = simulation.world
    simulation.pending += 1
    world.at(fault.at, None, _try, simulation, fault)


def _try(simulation: "Simulation", fault: Fault) -> None:
    """Now, or as soon as there is somebody whom it can happen to."""
    world = simulation.world
    if not WHAT[fault.what](simulation, fault):
        if world.now < fault.at + PATIENCE_S:
            return world.after(RETRY_S, _try, simulation, fault)
        simulation.pending -= 1
        return simulation.unfired.append(fault)
    simulation.pending -= 1
    world.counts[f"fault: {fault.what}"] += 1
    simulation.last_fault_ends_at = max(simulation.last_fault_ends_at, world.now + fault.for_s)
    return None


def _pick(simulation: "Simulation", fault: Fault, suits: Callable[["Group"], bool]) -> "Group | None":
    groups = simulation.groups[fault.whom :] + simulation.groups[: fault.whom]
    return next((group for group in groups if suits(group)), None)


def _of_group(act: Callable[["Simulation", "Group", Fault], None]) -> Callable[["Simulation", Fault], bool]:
    """Happens to a group that is training."""

    def fire(simulation: "Simulation", fault: Fault) -> bool:
        group = _pick(simulation, fault, lambda group: group.is_training)
        if group is not None:
            simulation.world.say("FAULT", f"{fault.what} {group.name} ({fault.for_s:.2f} s)")
            act(simulation, group, fault)
        return group is not None

    return fire


def _of_lighthouse(act: Callable[["Simulation", Fault], None]) -> Callable[["Simulation", Fault], bool]:
    def fire(simulation: "Simulation", fault: Fault) -> bool:
        if simulation.lighthouse.is_up:
            simulation.world.say("FAULT", f"{fault.what} ({fault.for_s:.2f} s)")
            act(simulation, fault)
            return True
        return False

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
    group.drain()
    simulation.pending += 1
    _bring_back(simulation, group, fault, simulation.world.now + DRAIN_GRACE_S)
    return True


def _bring_back(simulation: "Simulation", group: "Group", fault: Fault, kill_at: float) -> None:
    """After its grace a supervisor kills what is left."""
    world = simulation.world
    if not group.has_gone and world.now >= kill_at:
        world.counts["drains that ended by a kill"] += 1
        group.has_left(group.manager)
    if not group.has_gone:
        return world.after(RETRY_S, _bring_back, simulation, group, fault, kill_at)

    def back() -> None:
        simulation.pending -= 1
        group.come_back()

    return world.after(fault.for_s, back)


def _twin(simulation: "Simulation", group: "Group", fault: Fault) -> None:
    """Somebody starts a second group with the same replica_id, and ends it after a while."""
    twin = simulation.add_group(group.replica_id)
    twin.name = f"{group.name}-twin{len(simulation.twins)}"
    simulation.twins.append(twin)
    twin.start()

    def end() -> None:
        twin.has_gone = True
        twin.kill()

    simulation.world.after(fault.for_s, end)


# -- the lighthouse


def _kill_lighthouse(simulation: "Simulation", fault: Fault) -> None:
    simulation.lighthouse.kill(fault.for_s)


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


WHAT: dict[str, Callable[["Simulation", Fault], bool]] = {
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
    "twin": _of_group(_twin),
    "lose_journal": _of_lighthouse(_lose_journal),
    "change_lease": _of_lighthouse(_change_lease),
    "pause_rank": _of_group(_pause_rank),
    "break_session": _break_session,
    "kill_lighthouse": _of_lighthouse(_kill_lighthouse),
    "crash_telling": _of_lighthouse(_crash_telling),
    "pause_lighthouse": _of_lighthouse(_pause_lighthouse),
    "cut_lighthouse": _of_lighthouse(_cut_lighthouse),
    "cut_one_way": _of_lighthouse(_cut_one_way),
    "cut_peers": _of_lighthouse(_cut_peers),
}
