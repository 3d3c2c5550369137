"""Participants, quorums and a rank's assignment within a quorum."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, NamedTuple

from lighthouse_protocol.constraints import Count, FilledText, Name, QuorumId, Reason, Shortened, UnknownAs

MAX_PENDING_NAMED = 16


class Tag(NamedTuple):
    """Identifier of a model state: the number of committed steps, and the quorum that committed the last one."""

    step: int
    quorum_id: int | None  # None if unknown


@dataclass(frozen=True, slots=True)
class CatchUp:
    """A rank's request to heal while it continues to train, and the progress of that heal."""

    is_wanted: bool = False  # heal while training
    held: Tag | None = None  # state that the rank has while it works at a later step
    has_source: bool = False  # the state it needs has arrived or is on its way


PLAIN = CatchUp()


class DistrustKind(StrEnum):
    NOT_APPLIED = "not_applied"  # a committed step's gradients were not applied, or only in part
    DIVERGENCE = "divergence"  # the bits differ from a peer's with the same tag


@dataclass(frozen=True, slots=True)
class Distrust:
    """A rank's report that its model state is unusable. The group then heals."""

    kind: Annotated[DistrustKind, UnknownAs(DistrustKind.DIVERGENCE)]
    text: Reason  # names the rank and the step
    step: Count = 0  # tag of the expected state; 0 if unknown
    quorum_id: QuorumId = 0  # tag of the expected state; 0 if unknown


@dataclass(frozen=True, slots=True)
class Participant:
    """A replica group that requests a quorum or belongs to one."""

    replica_id: str
    incarnation: str = ""
    wire_id: str = ""  # the id as the caller writes it; torchft's is name:uuid
    address: str = ""
    store_address: str = ""
    step: int = 0
    group_world_size: int = 1
    shrink_only: bool = False
    commit_failures: int = 0
    data: str = ""  # relayed to the other participants
    tag_quorum_id: int | None = None  # quorum under which `step` was committed, None if not given
    ranks_disagree: bool = False  # the group's ranks have different states, or one state is unusable
    seen_quorum_id: int = 0  # highest quorum id that the group has received
    watched: bool = False  # all ranks have an open watch, so their collectives can be aborted
    catch_up: bool = False  # heals while training if it is behind
    works_at: int | None = None  # step at which the group trains while it still heals from `step`
    has_source: bool = False  # needs no other source while it catches up
    heals_first: bool | None = None  # heals before it computes anything if it is behind; None if not given
    resolves_to_loopback: bool = False  # a host name in its addresses resolves to a loopback address on its own host
    compares: bool = False  # the ranks compare their collectives with the peers' in the first step under a quorum
    distrust: Distrust | None = None  # a rank's state is unusable; repeated until the group has healed
    continues: bool = False  # continues training after other groups have finished
    extras: bytes = field(default=b"", compare=False, repr=False)  # the unknown fields of `wire`
    wire: bytes = field(default=b"", compare=False, repr=False)  # the member as received, to relay its unknown fields

    def __post_init__(self) -> None:
        if not self.wire_id:
            object.__setattr__(self, "wire_id", self.replica_id)

    @property
    def requested_step(self) -> int:
        """The step for which the group requests a quorum: `works_at` if set, otherwise `step`."""
        return self.step if self.works_at is None else self.works_at

    @property
    def identity(self) -> tuple[str, str, str, str]:
        """The values that identify a participant. If any of them changes, the next quorum gets a new quorum_id."""
        return (self.replica_id, self.incarnation, self.address, self.store_address)


@dataclass(frozen=True, slots=True)
class Quorum:
    """The participants that train together, sorted by `wire_id`."""

    quorum_id: int
    participants: tuple[Participant, ...]


@dataclass(frozen=True, slots=True)
class QuorumChange:
    """Difference between the quorum that a manager has and a newer one (rules/quorum_change.py)."""

    digest: FilledText  # of the resulting quorum
    quorum_id: QuorumId
    like: Participant  # any of the unlisted members, which all share its state
    gone: tuple[Count, ...] = ()  # indices of departed members in the old list
    members: tuple[Participant, ...] = ()  # new and individually changed members


@dataclass(frozen=True, slots=True)
class World:
    """Size of a job, including groups that are not in a quorum yet."""

    global_world_size: Count  # connected ranks
    # Largest number of ranks that have the same shard. Each replica group has at most one of them.
    largest_peer_group_world_size: Count
    ranks_pending: Count = 0  # missing ranks of groups that are partly connected
    group_world_size: Count = 0  # size of the receiver's group
    peers_pending: Count = 0  # replica groups that will be in the next quorum
    # The first of these groups.
    pending: Annotated[tuple[Name, ...], Shortened(lambda names: names[:MAX_PENDING_NAMED])] = ()
    waiting_for: Reason = ""  # unmet condition of a quorum that has been awaited for long; empty otherwise

    @property
    def joining_names(self) -> str:
        """Names of the groups that will be in the next quorum, for a log line. Long lists are truncated."""
        more = self.peers_pending - len(self.pending)
        return ", ".join(self.pending) + (f" and {more} more" if more > 0 else "")


@dataclass(frozen=True, slots=True)
class Assignment:
    """A rank's part in a quorum: its place among the participants, its peers, and the source if it must heal."""

    quorum_id: int
    replica_rank: int
    replica_world_size: int
    replica_ids: tuple[str, ...]
    store_address: str
    max_step: int
    max_rank: int | None  # index among the groups at `max_step`, None if this group is behind
    max_world_size: int
    contributors: int  # divisor of a sum over the participants
    primary_address: str
    heal_from_rank: int | None = None  # peer that sends the state
    heal_from_address: str = ""
    serve_to: tuple[int, ...] = ()  # replica ranks that receive the state from this group
    commit_failures: int = 0
    revoked: bool = False  # the quorum was revoked in the meantime: do the step and vote no
    other_sources: tuple[str, ...] = ()  # managers of replacements for the source
    catching_up: tuple[int, ...] = ()  # replica ranks that heal while training; they contribute nothing
    tag_quorum_id: int | None = None  # with `max_step`, the tag of the state before the step
    world: World | None = None  # newest version that the manager has, if it was requested with a quorum
    compares: bool = False  # every participant compares its collectives
    place: int | None = None  # this group's index among the contributors, None if it adds zeros
    healing: tuple[int, ...] = ()  # replica ranks that receive a state before this step, for which the others wait
    secret: str = field(default="", repr=False)  # shared by the quorum's members, to authenticate each other

    @property
    def catches_up(self) -> bool:
        return self.replica_rank in self.catching_up

    @property
    def heals(self) -> bool:
        return self.heal_from_rank is not None

    @property
    def has_healing(self) -> bool:
        """True if this step begins only after some participants have healed."""
        return bool(self.healing)


@dataclass(frozen=True, slots=True)
class Decision:
    """Result of a vote by all ranks in a group: commit or discard the step."""

    commit: bool
    next: Assignment | None = None  # assignment for the next step, if it was granted with the decision
