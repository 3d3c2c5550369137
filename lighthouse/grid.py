"""The grid of ranks: a column is a replica group, a row a peer group, the ranks that hold the same shard. No I/O.

Ranks of a sharded model meet in collectives of their group before they meet anybody else: a group of which a rank is
missing would wait in the first of them for ever. So a group is admitted whole or not at all. To count the ranks is not
enough: half of one group and the other half of another are as many as a whole one.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from protos.membership import Participant
from protos.progress import RankName
from protos.stall_words import list_names


@dataclass(frozen=True, slots=True)
class GroupRanks:
    """The ranks of a replica group that are connected, admitted or not."""

    replica_id: str
    group_world_size: int
    present: frozenset[int]

    @classmethod
    def whole(cls, participant: Participant) -> "GroupRanks":
        """One whose manager has joined: that it does only when all its ranks have asked."""
        size = participant.group_world_size
        return cls(participant.replica_id, size, frozenset(range(size)))

    @property
    def missing(self) -> list[int]:
        return [rank for rank in range(self.group_world_size) if rank not in self.present]

    @property
    def is_whole(self) -> bool:
        return not self.missing


@dataclass(frozen=True, slots=True)
class Grid:
    groups: tuple[GroupRanks, ...]

    @property
    def global_world_size(self) -> int:
        """Ranks that are connected."""
        return sum(len(group.present) for group in self.groups)

    @property
    def largest_peer_group_world_size(self) -> int:
        rows = Counter(rank for group in self.groups for rank in group.present)
        return max(rows.values(), default=0)

    @property
    def ranks_pending(self) -> int:
        """How many are missing until every group that has begun to come is whole."""
        return sum(len(group.missing) for group in self._begun())

    @property
    def admitted(self) -> tuple[str, ...]:
        """The groups that may be in a quorum."""
        return tuple(group.replica_id for group in self.groups if group.is_whole)

    def explain(self) -> str:
        """Who is held back and for which ranks; empty: nobody is."""
        return "; ".join(_held_back(group) for group in self._begun() if not group.is_whole)

    def _begun(self) -> Iterable[GroupRanks]:
        return (group for group in self.groups if group.present)


def _held_back(group: GroupRanks) -> str:
    missing = group.missing
    are = "rank {} is" if len(missing) == 1 else "ranks {} are"
    named = are.format(list_names(RankName("", rank) for rank in missing))
    return (
        f"{group.replica_id} is held back: {len(group.present)} of its {group.group_world_size} ranks are here; "
        f"{named} missing"
    )
