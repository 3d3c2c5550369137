"""What happens to the members of a job."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MemberJoined:
    """A replica group that was not there, or another incarnation of one."""

    replica_id: str


@dataclass(frozen=True, slots=True)
class MemberBack:
    """A replica group that was lost or down takes part again; `text` says how."""

    replica_id: str
    text: str


@dataclass(frozen=True, slots=True)
class MemberLost:
    """`quorum_id`: the quorum that ends without this member; None: none does. `last_seen_at`: when it was last heard
    of; None: it was there until now."""

    replica_id: str
    quorum_id: int | None
    reason: str
    last_seen_at: float | None = None


@dataclass(frozen=True, slots=True)
class MemberLeft:
    """It has ended in good order."""

    replica_id: str


@dataclass(frozen=True, slots=True)
class MemberDraining:
    """It does the steps of its quorum, and asks for no further one."""

    replica_id: str


@dataclass(frozen=True, slots=True)
class GridChanged:
    """The grid of ranks (rank_grid.py) may have changed. At most one in the effects of one call."""


@dataclass(frozen=True, slots=True)
class ConnectionsCut:
    """The connections of these members ended together. They are held for `hold_s`."""

    replica_ids: tuple[str, ...]
    hold_s: float


MemberEffect = MemberJoined | MemberBack | MemberLost | MemberLeft | MemberDraining | GridChanged | ConnectionsCut
