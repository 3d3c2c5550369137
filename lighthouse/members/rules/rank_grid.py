"""The grid of ranks: a column is a replica group, a row a peer group, the ranks that hold the same shard. No I/O.

Ranks of a sharded model meet in collectives of their group before any other: a group of which a rank is missing would
wait in the first of them for ever. So a group is admitted whole or not at all: its manager joins when all
its ranks have asked, and not before. To count the ranks is not enough: half of one group and the other half of another
are as many as a whole one.
"""

from collections.abc import Iterable, Set
from dataclasses import dataclass

from lighthouse.members.rules.roster import Member
from lighthouse_protocol.messages.session import STARTING
from lighthouse_protocol.rank_set import NO_RANKS, RankSet, largest_count
from lighthouse_protocol.rules.rank_text import here_and_missing

GROUPS_NAMED = 8


@dataclass(frozen=True, slots=True)
class GroupRanks:
    """A replica group whose manager is connected, admitted or not; `missing`: its ranks that are not."""

    replica_id: str
    group_world_size: int
    missing: Set[int] = NO_RANKS

    @property
    def here(self) -> int:
        return self.group_world_size - len(self.missing)

    @property
    def is_whole(self) -> bool:
        return not self.missing

    def __str__(self) -> str:
        return here_and_missing(self.replica_id, self.group_world_size, self.missing)


class Grid:
    """A group of which no rank has come holds up no other, and is left out."""

    def __init__(self, groups: Iterable[GroupRanks]) -> None:
        self.groups = tuple(group for group in groups if group.here)

    @property
    def global_world_size(self) -> int:
        """Ranks that are connected."""
        return sum(group.here for group in self.groups)

    @property
    def largest_peer_group_world_size(self) -> int:
        """The ranks of the longest row: in so many groups that one is here."""
        here = (RankSet.first(group.group_world_size) for group in self.groups)
        return largest_count(all_ - g.missing if g.missing else all_ for all_, g in zip(here, self.groups, strict=True))

    @property
    def ranks_pending(self) -> int:
        """How many are missing until every group is whole."""
        return sum(len(group.missing) for group in self.groups)

    def explain(self) -> str:
        """Which groups are held back, and for which ranks; empty: none is."""
        held_back = [group for group in self.groups if not group.is_whole]
        more = len(held_back) - GROUPS_NAMED
        return "; ".join(map(str, held_back[:GROUPS_NAMED])) + (f"; and {more} groups more" if more > 0 else "")


def grid_of(members: Iterable[Member]) -> Grid:
    """O(n log n), sorted by replica_id."""
    ordered = sorted(members, key=lambda member: member.replica_id)
    return Grid(group for member in ordered if (group := _group_ranks(member)) is not None)


def _group_ranks(member: Member) -> GroupRanks | None:
    """None for one that is not here, or whose number of ranks is not known."""
    participant = member.participant
    if not member.is_alive or participant is None or participant.group_world_size == 0:
        return None
    everyone = RankSet.first(participant.group_world_size)
    missing = everyone & member.missing if member.missing else NO_RANKS
    if member.down not in ("", STARTING) and not member.missing:
        missing = everyone  # a group that is down, and names no rank, misses all; one that starts names those it misses
    return GroupRanks(member.replica_id, participant.group_world_size, missing)
