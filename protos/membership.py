"""Participant, Quorum and what they mean for a rank, as the pure cores know them: no protobuf."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Participant:
    """A replica group as it asks for a quorum.

    `wire_id` is the id as its caller writes it (torchft: name:uuid); `replica_id` and `incarnation` are what it means.
    `tag_quorum_id` is the quorum under which `step` was committed, None where the caller does not say.
    `watched`: all ranks of the group hold a Watch, so that its collectives can be aborted.
    `wire` is the member as it came, opaque: fields that we do not know are relayed in it.
    """

    replica_id: str
    incarnation: str = ""
    wire_id: str = ""
    address: str = ""
    store_address: str = ""
    step: int = 0
    group_world_size: int = 1
    shrink_only: bool = False
    commit_failures: int = 0
    data: str = ""
    tag_quorum_id: int | None = None
    ranks_disagree: bool = False
    seen_quorum_id: int = 0
    watched: bool = False
    wire: bytes = field(default=b"", compare=False, repr=False)

    def __post_init__(self) -> None:
        if not self.wire_id:
            object.__setattr__(self, "wire_id", self.replica_id)

    @property
    def identity(self) -> tuple[str, str, str, str]:
        """What a quorum_id names: a change of any of these is a change of membership."""
        return (self.replica_id, self.incarnation, self.address, self.store_address)


@dataclass(frozen=True, slots=True)
class Quorum:
    """The participants that train together, sorted by `wire_id`."""

    quorum_id: int
    participants: tuple[Participant, ...]


@dataclass(frozen=True, slots=True)
class Assignment:
    """What a quorum means for one rank of one replica group.

    `contributors` is what a sum over the participants is divided by: those that do not heal. `heal_*` name the peer
    to take state from, `other_sources` the managers of some that can stand in for it; `serve_to` the replica ranks that
    take it from here. `max_rank` is the place among those at
    `max_step`, None for one that is behind. `revoked`: the quorum was revoked meanwhile; do the step and vote no.
    """

    quorum_id: int
    replica_rank: int
    replica_world_size: int
    replica_ids: tuple[str, ...]
    store_address: str
    max_step: int
    max_rank: int | None
    max_world_size: int
    contributors: int
    primary_address: str
    heal_from_rank: int | None = None
    heal_from_address: str = ""
    serve_to: tuple[int, ...] = ()
    commit_failures: int = 0
    revoked: bool = False
    other_sources: tuple[str, ...] = ()

    @property
    def heals(self) -> bool:
        return self.heal_from_rank is not None

    @property
    def has_healing(self) -> bool:
        """Whether any participant heals."""
        return self.contributors < self.replica_world_size


@dataclass(frozen=True, slots=True)
class Vote:
    """What the ranks of a group have decided; `next` is the grant of the next step, if one came with it."""

    commit: bool
    next: Assignment | None = None
