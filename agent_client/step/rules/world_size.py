"""Computes which part of a step a replica group does. No I/O. All participants compute consistent results.

A step consists of microbatches, each computed by all ranks of one group. The step's gradients are the sum over the
groups that count, divided by `divisor`. *Contributors* are the participants that hold the current state when they
compute. A group that does not count still computes one microbatch and contributes zeros, because the other groups wait
for it in their collectives.

    mode                 who computes a microbatch                        number of microbatches, divisor
    DYNAMIC              each contributor                                 contributors
    FIXED_WITH_SPARES    the first `size` contributors; others: spares    min(size, contributors)
    CONSTANT_BATCH       the contributors in turn                         size
"""

from dataclasses import dataclass
from enum import StrEnum

from lighthouse_protocol.messages.membership import Assignment


class WorldSizeMode(StrEnum):
    """How the batches of a step depend on the number of replica groups."""

    DYNAMIC = "dynamic"
    """One batch of each contributing group. The global batch shrinks and grows with the number of groups."""
    FIXED_WITH_SPARES = "fixed_with_spares"
    """One batch of each of the first `world_size` contributing groups. Other groups are spares and do not count."""
    CONSTANT_BATCH = "constant_batch"
    """Always `world_size` batches, distributed among the contributing groups."""


@dataclass(frozen=True, slots=True)
class Share:
    microbatches: tuple[int, ...]
    """Indices of this group's microbatches, from 0 to `divisor` - 1."""
    divisor: int
    counts: bool
    """False if the group contributes zeros."""
    is_first: bool = False
    """True in exactly one of the groups that count, which provides the values that must be equal in all groups."""

    @property
    def weight(self) -> int:
        return len(self.microbatches) if self.counts else 0

    def slots(self, group_rank: int, group_world_size: int) -> list[tuple[int, int]]:
        """Return (index, count) for each microbatch of a rank. `index` numbers the microbatches of all ranks from 0."""
        places = self.divisor * group_world_size
        return [(number * group_world_size + group_rank, places) for number in self.microbatches]


@dataclass(frozen=True, slots=True)
class WorldSize:
    mode: WorldSizeMode = WorldSizeMode.DYNAMIC
    size: int = 0
    """At least 1. Not used in DYNAMIC mode."""

    @property
    def depends_on_quorum(self) -> bool:
        return self.mode is not WorldSizeMode.DYNAMIC

    def share(self, assignment: Assignment | None) -> Share:
        """Return this group's share of the step. Without a quorum, the group does not count."""
        if assignment is None:
            return Share((0,), 1, counts=False)
        place, contributors = assignment.place, assignment.contributors
        match self.mode:
            case WorldSizeMode.DYNAMIC:
                divisor = contributors
            case WorldSizeMode.FIXED_WITH_SPARES:
                divisor = min(self.size, contributors)
            case WorldSizeMode.CONSTANT_BATCH:
                divisor = self.size
        if place is None:
            return Share((assignment.replica_rank % divisor,), divisor, counts=False)
        own = tuple(range(place, divisor, contributors))
        return Share(own or (place % divisor,), divisor, counts=bool(own), is_first=place == 0)


def slot_among_all(assignment: Assignment | None, group_rank: int, group_world_size: int) -> tuple[int, int]:
    """Return (index, count) of a rank among all ranks of the quorum, or of its group if there is no quorum."""
    if assignment is None:
        return group_rank, group_world_size
    place = assignment.replica_rank * group_world_size + group_rank
    return place, assignment.replica_world_size * group_world_size


NO_SHARE = WorldSize().share(None)
