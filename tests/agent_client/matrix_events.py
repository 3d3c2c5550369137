"""What happens to the replica groups of test_matrix.py, each at the moment that is meant, and how such a run ends."""

from collections.abc import Callable
from dataclasses import dataclass

from tests.agent_client.clusters import check_all
from tests.agent_client.ranks import Rank
from tests.agent_client.training_jobs import Group, TrainingJob
from tests.processes import eventually

PACE_S = 0.03
STEPS_AT_THE_END = 3
COMPUTES_AGAIN = ("plain", "ddp", "hsdp")
"""The ways in which a step that loses a peer is discarded; in the others it is tried again with what was computed."""


@dataclass(frozen=True)
class Cell:
    """One way of training, to which one thing happens."""

    way: str
    job: TrainingJob

    @property
    def ranks(self) -> int:
        return self.job.ranks

    @property
    def is_sharded(self) -> bool:
        """Each rank of a group has a part of the model; else all have the whole."""
        return self.way.startswith(("hsdp", "sharded"))

    def train(self, *names: str) -> list[Group]:
        """Groups that train together."""
        groups = self.job.all_groups(*names)
        self.job.start(*groups, pace_s=PACE_S)
        self.wait_together(*groups)
        return groups

    def add(self, *groups: Group) -> None:
        """New ranks for them, which heal."""
        self.job.start(*groups, pace_s=PACE_S)

    def wait_together(self, *groups: Group) -> None:
        self.job.wait_steps(*groups, more=2, participants=len(groups))

    def discards(self, *groups: Group) -> int:
        return sum(len(self.job.discarded(group, rank)) for group in groups for rank in range(self.ranks))

    def newest_step(self, group: Group) -> int:
        return self.job.committed(group)[-1]["step"]


Event = Callable[[Cell], list[Group]]
"""Returns the groups that train when it is over, which is all but those that have left for good."""


def hold(victim: Group, *others: Group) -> int:
    """The step in the middle of which rank 0 of `victim` stands still; all others wait for it there."""
    held = victim.ranks[0]
    held.call("hold_step")
    step = held.call("wait_held")
    for rank in ranks_of(*others):
        eventually(lambda rank=rank: rank.call("is_in_step", step), f"all are in step {step}")
    return step


def ranks_of(*groups: Group) -> list[Rank]:
    return [rank for group in groups for rank in group.ranks]


def check_healed(cell: Cell, victim: Group, step: int) -> None:
    """It began with what its peers had made of `step` and of those before."""
    for rank in range(cell.ranks):
        assert cell.job.committed(victim, rank)[0]["step"] > step
        assert "healing from" in cell.job.log_of(victim, rank)


# -- kills


def kill_and_heal(cell: Cell) -> list[Group]:
    """The first by name: its store is where all meet, and it is the source of those that heal."""
    victim, *others = groups = cell.train("a", "b", "c")
    discards = cell.discards(*others)
    hold(victim, *others)
    victim.kill(with_manager=True)
    cell.wait_together(*others)
    lost = cell.discards(*others) - discards
    assert lost >= len(others) * cell.ranks if cell.way in COMPUTES_AGAIN else lost == 0
    step = cell.newest_step(others[0])
    cell.add(victim)
    cell.wait_together(*groups)
    check_healed(cell, victim, step)
    return groups


def kill_two_at_once(cell: Cell) -> list[Group]:
    return kill_two(cell, in_turn=False)


def kill_two_in_turn(cell: Cell) -> list[Group]:
    """The second one in the step that it tries with those that are left, or in the next."""
    return kill_two(cell, in_turn=True)


def kill_two(cell: Cell, *, in_turn: bool) -> list[Group]:
    first, second, survivor = groups = cell.train("a", "b", "c")
    step = hold(first, second, survivor)
    if in_turn:
        second.ranks[0].call("hold_step")
    first.kill(with_manager=True)
    if in_turn:
        second.ranks[0].call("wait_held")
    second.kill(with_manager=not in_turn)
    cell.wait_together(survivor)
    cell.add(first, second)
    cell.wait_together(*groups)
    for victim in (first, second):
        check_healed(cell, victim, step)
    return groups


def kill_rank_0(cell: Cell) -> list[Group]:
    """The group's other rank ends when the group is started again, as a supervisor would have it."""
    victim, other = groups = cell.train("a", "b")
    step = hold(victim, other)
    victim.ranks[0].kill()
    cell.wait_together(other)
    assert victim.ranks[1].is_alive
    victim.kill()
    cell.add(victim)
    cell.wait_together(*groups)
    check_healed(cell, victim, step)
    return groups


def fail_in_turn(cell: Cell) -> list[Group]:
    """Each fails in its vote alone, and takes over the state of the other, which may have committed that step."""
    groups = cell.train("a", "b")
    for group in groups:
        for rank in group.ranks:
            rank.call("fail_once")
        cell.wait_together(*groups)
        assert any("told to fail" in cell.job.log_of(group, rank) for rank in range(cell.ranks))
    return groups


# -- what comes and what goes


def shrink(cell: Cell) -> list[Group]:
    """It drains; the others lose no step."""
    leaves, *others = cell.train("a", "b", "c")
    discards = cell.discards(*others)
    cell.job.drain(leaves)
    cell.wait_together(*others)
    assert cell.discards(*others) == discards
    return others


def grow(cell: Cell) -> list[Group]:
    """Those that are there lose no step."""
    groups = cell.train("a", "b")
    discards, step = cell.discards(*groups), cell.newest_step(groups[0])
    late = cell.job.group("c")
    cell.add(late)
    cell.wait_together(*groups, late)
    assert cell.discards(*groups) == discards
    check_healed(cell, late, step)
    return [*groups, late]


# -- kills in the middle of a transfer


def begin_transfer(cell: Cell, target: Group, *others: Group) -> Group:
    """To where some bytes of it have arrived in each rank of `target`, and the rest cannot; from whom to its rank 0."""
    for rank in ranks_of(*others):
        rank.call("hold_sending")
    cell.add(target)
    for rank in target.ranks:
        eventually(lambda rank=rank: rank.call("received")[1] > 0, "some bytes have arrived")
        _, received, length = rank.call("received")
        assert 0 < received < length
    source, _, _ = target.ranks[0].call("received")
    return next(group for group in others if group.name == source)


def check_state_came_from(other: Group, cell: Cell, target: Group) -> None:
    """It finished the transfer of the lost source, or began a new one under the next quorum."""
    log = cell.job.log_of(target)
    assert "healed from" in log
    assert f"healing from {other.name}" in log or "the group at" in log


def kill_source(cell: Cell) -> list[Group]:
    groups = cell.train("a", "b")
    target = cell.job.group("c")
    source = begin_transfer(cell, target, *groups)
    [other] = (group for group in groups if group is not source)
    source.kill(with_manager=True)
    for rank in other.ranks:
        rank.call("allow_sending")
    cell.wait_together(other, target)
    check_state_came_from(other, cell, target)
    step = cell.newest_step(other)
    cell.add(source)
    cell.wait_together(*groups, target)
    check_healed(cell, source, step)
    return [*groups, target]


def kill_target(cell: Cell) -> list[Group]:
    groups = cell.train("a", "b")
    target = cell.job.group("c")
    begin_transfer(cell, target, *groups)
    target.kill()
    for rank in ranks_of(*groups):
        rank.call("allow_sending")
    cell.wait_together(*groups)
    step = cell.newest_step(groups[0])
    cell.add(target)
    cell.wait_together(*groups, target)
    check_healed(cell, target, step)
    return [*groups, target]


EVENTS: tuple[Event, ...] = (
    kill_and_heal,
    shrink,
    grow,
    kill_two_at_once,
    kill_two_in_turn,
    kill_source,
    kill_target,
    kill_rank_0,
    fail_in_turn,
)


# -- the end


def finish(cell: Cell, groups: list[Group]) -> None:
    """All of `groups` live, do some more steps together, and stop; nobody ever held other bits than the others."""
    step = hold(*groups)
    last_step = step + STEPS_AT_THE_END
    for rank in ranks_of(*groups):
        rank.call("finish", last_step)
    groups[0].ranks[0].call("go_on")
    by_rank = [[group.training[number].result() for group in groups] for number in range(cell.ranks)]
    for number, ends in enumerate(by_rank):
        assert [end["step"] for end in ends] == [last_step] * len(groups)
        assert [end["participants"] for end in ends] == [len(groups)] * len(groups)
        assert all(end["hash"] == ends[0]["hash"] for end in ends)
        assert check_all(cell.job.folder, str(number)) > STEPS_AT_THE_END
    if not cell.is_sharded:
        inside = [without_buffers(end["hash"]) for end, *_ in by_rank]
        assert all(of_rank == inside[0] for of_rank in inside), "the ranks of a group, too"
    assert all(process.is_alive for group in groups for process in (group.manager, *group.ranks))


def without_buffers(digests: dict[str, str]) -> dict[str, str]:
    """They are each rank's own, the same in that rank of all groups."""
    return {name: digest for name, digest in digests.items() if name != "buffers"}
