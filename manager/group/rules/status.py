"""One snapshot of a group's machine, and what of it is said to people."""

from collections.abc import Collection, Set
from dataclasses import dataclass

from lighthouse_protocol.messages.membership import Participant
from lighthouse_protocol.messages.progress import RankName
from lighthouse_protocol.messages.session import HeldQuorum
from lighthouse_protocol.rules.rank_text import here_and_missing, list_names


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupStatus:
    """`quorum_id` is the last one answered, `step` that of the state that the group holds or was let into. `waiting`:
    the ranks whose requests wait, `is_gathering`: some of them for the other ranks or the join. `awaited`: what the
    lighthouse waits for, by its own words."""

    me: Participant
    incarnation: str
    held: HeldQuorum | None
    quorum_id: int
    step: int
    is_joined: bool
    is_gathering: bool
    is_voting: bool
    waiting: tuple[int, ...]
    missing: frozenset[int]
    awaited: str
    commits: int
    discards: int
    grants: int

    @property
    def phase(self) -> str:
        if self.is_joined:
            return "joined"
        if self.waiting:
            return "gathering"
        return "voting" if self.is_voting else "idle"

    @property
    def silent(self) -> list[int]:
        """The ranks that have no request."""
        return [rank for rank in range(self.me.group_world_size) if rank not in self.waiting]

    def waiting_for(self, lighthouse_error: str) -> str:
        """What the requests for a quorum wait for, in words. `lighthouse_error`: why the lighthouse cannot be asked;
        empty: it can."""
        lighthouse = f"the lighthouse: {lighthouse_error}" if lighthouse_error else ""
        if self.is_joined or not self.is_gathering:
            return lighthouse or self.awaited or "the lighthouse to answer"
        gone = [rank for rank in self.silent if rank in self.missing]
        late = [rank for rank in self.silent if rank not in self.missing]
        parts = (
            f"{_ranks_of(gone, self.me)}, not connected yet" if gone else "",
            f"{_ranks_of(late, self.me)}, connected but not asking for a quorum" if late else "",
            lighthouse,
        )
        return "; ".join(filter(None, parts))


def say_missing(me: Participant, missing: Set[int]) -> str:
    """Which of its ranks are here and which are missing; empty: all are, or none."""
    size = me.group_world_size
    return here_and_missing(me.replica_id, size, missing) if 0 < len(missing) < size else ""


def _ranks_of(ranks: Collection[int], me: Participant) -> str:
    names = list_names(RankName("", rank) for rank in ranks)
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {names} of {me.group_world_size} of {me.replica_id}"
