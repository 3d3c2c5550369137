"""What counts in a step, and which part of it a replica group does. Pure; every participant comes to the same answer.

A step consists of microbatches, one for each rank of the group that does it. Its gradients are the sum over those that
count, divided by `divisor`. Contributors are the participants that hold the state when they compute; one that does not
count still does one microbatch, because the others wait for it in their collectives, and adds zeros.

    mode                 done by                                          microbatches, divisor
    DYNAMIC              every contributor its own                        contributors
    FIXED_WITH_SPARES    the first `size` contributors; the rest spare    min(size, contributors)
    CONSTANT_BATCH       dealt to the contributors in turn                size
"""

from dataclasses import dataclass
from enum import StrEnum

from lighthouse_protocol.messages.membership import Assignment


class WorldSizeMode(StrEnum):
    """Which batches a step consists of, if replica groups come and go."""

    DYNAMIC = "dynamic"
    """One batch of each contributing group. The global batch shrinks and grows with the number of groups."""
    FIXED_WITH_SPARES = "fixed_with_spares"
    """One batch of each of the first `world_size` groups. Further groups are spares, whose gradients do not count."""
    CONSTANT_BATCH = "constant_batch"
    """Always `world_size` batches, distributed among the groups that are present."""


@dataclass(frozen=True, slots=True)
class Share:
    """`microbatches`: the numbers, below `divisor`, of those that this group does. `counts` False: it adds zeros.

    `is_first`: of all that count, so exactly one in a quorum: where one must speak for all.
    """

    microbatches: tuple[int, ...]
    divisor: int
    counts: bool
    is_first: bool = False

    @property
    def weight(self) -> int:
        """Number of microbatches of this group in `divisor`."""
        return len(self.microbatches) if self.counts else 0

    def slots(self, group_rank: int, group_world_size: int) -> list[tuple[int, int]]:
        """(place, number of places) among the ranks of all groups, of each of the microbatches."""
        places = self.divisor * group_world_size
        return [(number * group_world_size + group_rank, places) for number in self.microbatches]


@dataclass(frozen=True, slots=True)
class WorldSize:
    """`size`: at least 1, not used in DYNAMIC mode; AgentConfig checks it."""

    mode: WorldSizeMode = WorldSizeMode.DYNAMIC
    size: int = 0

    @property
    def is_dealt_by_quorum(self) -> bool:
        """Whether the quorum of a step says which microbatches a group computes."""
        return self.mode is not WorldSizeMode.DYNAMIC

    def share(self, assignment: Assignment | None) -> Share:
        """Without a quorum nothing counts."""
        if assignment is None:
            return Share((0,), 1, counts=False)
        divisor = self._divisor(assignment.contributors)
        place = assignment.place
        if place is None:
            return Share((assignment.replica_rank % divisor,), divisor, counts=False)
        own = self._own(place, assignment.contributors, divisor)
        return Share(own or (place % divisor,), divisor, counts=bool(own), is_first=place == 0)

    def _divisor(self, contributors: int) -> int:
        match self.mode:
            case WorldSizeMode.DYNAMIC:
                return contributors
            case WorldSizeMode.FIXED_WITH_SPARES:
                return min(self.size, contributors)
            case WorldSizeMode.CONSTANT_BATCH:
                return self.size

    def _own(self, place: int, contributors: int, divisor: int) -> tuple[int, ...]:
        if self.mode is WorldSizeMode.CONSTANT_BATCH:
            return tuple(range(place, self.size, contributors))
        return (place,) if place < divisor else ()


def slot_among_all(assignment: Assignment | None, group_rank: int, group_world_size: int) -> tuple[int, int]:
    """(place, number of places) of a rank among all ranks of the quorum; without one, among those of its group."""
    if assignment is None:
        return group_rank, group_world_size
    place = assignment.replica_rank * group_world_size + group_rank
    return place, assignment.replica_world_size * group_world_size


NO_SHARE = WorldSize().share(None)
