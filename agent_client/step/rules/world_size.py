"""Decides which microbatches of a step a replica group computes, consistently on all participants.

This module does no I/O. A step consists of microbatches, each computed by all ranks in one group. The step's gradients
are the sum over the groups that count, divided by `divisor`. *Contributors* are the participants that hold the current
state when they compute. A group that does not count still computes one microbatch and contributes zeros, because the
other groups wait for it in their collectives.

    mode                 who computes a microbatch                        number of microbatches, divisor
    DYNAMIC              each contributor                                 contributors
    FIXED_WITH_SPARES    the first `size` contributors; others: spares    min(size, contributors)
    CONSTANT_BATCH       the contributors in turn                         size
                         or in proportion to their speeds (`shares`)

With `share_by_speed`, the participants exchange how long a microbatch takes at each contributor, and all compute the
same `shares` from the same numbers. They do so in the first step under a quorum, so a group that joins or heals needs
no earlier shares.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from heapq import heapify, heapreplace

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

    def slots_of_rank(self, group_rank: int, group_world_size: int) -> list[tuple[int, int]]:
        """Return (index, count) for each microbatch of a rank. `index` numbers the microbatches of all ranks from 0."""
        places = self.divisor * group_world_size
        return [(number * group_world_size + group_rank, places) for number in self.microbatches]


@dataclass(frozen=True, slots=True)
class WorldSize:
    mode: WorldSizeMode = WorldSizeMode.DYNAMIC
    size: int = 0
    """Value of the option `world_size`, at least 1. Not used in DYNAMIC mode."""

    def share(self, assignment: Assignment | None, counts: Sequence[int] = ()) -> Share:
        """Return this group's microbatches in the step. Without a quorum (None), its gradients do not count.

        `counts` is a result of shares(): the number of microbatches of each contributor. It is ignored if the number of
        contributors or of microbatches has changed since.
        """
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
        if self.mode is WorldSizeMode.CONSTANT_BATCH and (len(counts), sum(counts)) == (contributors, divisor):
            begin = sum(counts[:place])
            own = tuple(range(begin, begin + counts[place]))
        return Share(own or (place % divisor,), divisor, counts=bool(own), is_first=place == 0)


SHARE_EVERY = 16
"""Number of steps after which the shares are decided again under the same quorum."""
SHARE_AGAIN = 4
"""Number of steps that replaces SHARE_EVERY while the speed of a contributor is unknown."""
MIN_GAIN = 0.05
"""Minimum share of a step's time that new shares must save to replace the current ones."""


def shares(times_us: Sequence[int], total: int) -> tuple[int, ...]:
    """Divide the microbatches of a step so that the last contributor finishes as early as possible.

    Each contributor gets one microbatch. Each further microbatch goes to the contributor that finishes it first. If
    several do, it goes to the fastest of them, or to the first of the fastest. Times are integers, so all participants
    compute the same shares.

    Args:
        times_us: Time in microseconds that a microbatch takes at each contributor, at least 1.
        total: Number of microbatches, at least one per contributor.
    """
    counts = [1] * len(times_us)
    finishes = [(2 * time_us, time_us, place) for place, time_us in enumerate(times_us)]
    heapify(finishes)
    for _ in range(total - len(times_us)):
        _, time_us, place = finishes[0]
        counts[place] += 1
        heapreplace(finishes, ((counts[place] + 1) * time_us, time_us, place))
    return tuple(counts)


def decide_shares(before: tuple[int, ...], times_us: Sequence[int], total: int) -> tuple[int, ...]:
    """Return the shares of the contributors: `before`, unless other shares save at least MIN_GAIN.

    Args:
        before: Current shares under the same quorum, empty if there are none.
        times_us: Time that a microbatch takes at each contributor, 0 if unknown. An unknown time counts as the median.
        total: Number of microbatches.
    """
    known = sorted(time_us for time_us in times_us if time_us)
    times_us = [time_us or (known[len(known) // 2] if known else 1) for time_us in times_us]
    new = shares(times_us, total)
    if len(before) != len(new):
        return new
    old_us, new_us = (
        max(count * time_us for count, time_us in zip(counts, times_us, strict=True)) for counts in (before, new)
    )
    return new if new_us <= (1 - MIN_GAIN) * old_us else before


def slot_among_all(assignment: Assignment | None, group_rank: int, group_world_size: int) -> tuple[int, int]:
    """Return (index, count) of a rank among all ranks in the quorum, or in its group if there is no quorum."""
    if assignment is None:
        return group_rank, group_world_size
    place = assignment.replica_rank * group_world_size + group_rank
    return place, assignment.replica_world_size * group_world_size


NO_SHARE = WorldSize().share(None)
