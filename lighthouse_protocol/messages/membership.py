"""Participant, Quorum and what they mean for a rank, as the pure cores know them: no protobuf."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, NamedTuple

from lighthouse_protocol.constraints import Count, Cut, FilledText, Name, QuorumId, Reason

MAX_PENDING_NAMED = 16


class Tag(NamedTuple):
    """The name of a state: so many steps, the last one committed under that quorum. None: not known."""

    step: int
    quorum_id: int | None


@dataclass(frozen=True, slots=True)
class CatchUp:
    """How a rank heals. `is_wanted`: beside its steps, else plainly; `held`: the state that it holds, where it works at
    a later one; `has_source`: what it needs to get there is on its way, or here."""

    is_wanted: bool = False
    held: Tag | None = None
    has_source: bool = False


PLAIN = CatchUp()


class DistrustKind(StrEnum):
    NOT_APPLIED = "not_applied"  # a step was committed, and its gradients were not applied, or in part
    DIVERGENCE = "divergence"  # other bits than the peers have under the same tag


@dataclass(frozen=True, slots=True)
class Distrust:
    """Why a group holds no state of its own and heals: one of its ranks says so. `text` names the rank and the step.
    `step`, `quorum_id`: the tag of the state that the rank would hold, which tells what was committed; 0: it does not
    say."""

    kind: DistrustKind
    text: Reason
    step: Count = 0
    quorum_id: QuorumId = 0


@dataclass(frozen=True, slots=True)
class Participant:
    """A replica group as it asks for a quorum.

    `wire_id` is the id as its caller writes it (torchft: name:uuid); `replica_id` and `incarnation` are what it means.
    `tag_quorum_id` is the quorum under which `step` was committed, None where the caller does not say.
    `watched`: all ranks of the group hold a Watch, so that its collectives can be aborted.
    `catch_up`: where it is behind, it heals beside its steps; `works_at`: it does so now, at that step, while it holds
    `step`; `has_source`: and is to be dealt no source.
    `heals_first`: where it is behind, it takes over a peer's state before it computes anything; None: it does not say.
    `resolves_to_loopback`: a host name in its addresses does so on its own host.
    `compares`: its ranks compare their collectives with their peers' in the first step under a quorum.
    `distrust`: one of its ranks holds no complete state, which is told until it has healed.
    `continues`: it trains on, also after the end of the job.
    `wire` is the member as it came, opaque: fields that we do not know are relayed in it. `extras`: these alone.
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
    catch_up: bool = False
    works_at: int | None = None
    has_source: bool = False
    heals_first: bool | None = None
    resolves_to_loopback: bool = False
    compares: bool = False
    distrust: Distrust | None = None
    continues: bool = False
    extras: bytes = field(default=b"", compare=False, repr=False)
    wire: bytes = field(default=b"", compare=False, repr=False)

    def __post_init__(self) -> None:
        if not self.wire_id:
            object.__setattr__(self, "wire_id", self.replica_id)

    @property
    def asks_for(self) -> int:
        """The step that it wants a quorum for, if it is not behind."""
        return self.step if self.works_at is None else self.works_at

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
class QuorumChange:
    """What makes the quorum that a manager holds into the one that `digest` names (rules/quorum_change.py).

    `gone`: their places in the list that it holds. `members`: who is new, or has changed in another way than most.
    `like`: one of all others, whose states have become what its state is.
    """

    digest: FilledText
    quorum_id: QuorumId
    like: Participant
    gone: tuple[Count, ...] = ()
    members: tuple[Participant, ...] = ()


def _first(names: tuple[str, ...]) -> tuple[str, ...]:
    return names[:MAX_PENDING_NAMED]


@dataclass(frozen=True, slots=True)
class World:
    """The ranks of a job, those that are not admitted to a quorum yet included.

    `global_world_size`: ranks that are connected. `largest_peer_group_world_size`: the most of them that hold the same
    shard; a peer group has at most one of each replica group. `ranks_pending`: how many are missing until each group
    that has begun to come is whole. `group_world_size`: of the group that is told. `peers_pending`: replica groups that
    ask to come in, and will be in the next quorum; `pending` names the first of them. `waiting_for`: what requests for
    a quorum wait for, in words, once that lasts; empty: nothing.
    """

    global_world_size: Count
    largest_peer_group_world_size: Count
    ranks_pending: Count = 0
    group_world_size: Count = 0
    peers_pending: Count = 0
    pending: Annotated[tuple[Name, ...], Cut(_first)] = ()
    waiting_for: Reason = ""

    @property
    def who_joins(self) -> str:
        """For a log."""
        more = self.peers_pending - len(self.pending)
        return ", ".join(self.pending) + (f" and {more} more" if more > 0 else "")


@dataclass(frozen=True, slots=True)
class Assignment:
    """What a quorum means for one rank of one replica group.

    `contributors` is what a sum over the participants is divided by: those that count. `place` is this group's among
    them, None where it adds zeros. `healing`: the replica ranks that take over a peer's state in this step, and are
    waited for. `heal_*` name the peer to take state from, `other_sources` the managers of some that can stand in for
    it; `serve_to` the replica ranks that take it from here. `shares_with`: the managers of the groups that share that
    state out among them, in order, empty in its own place; each takes its share and hands it on to the others.
    `max_rank` is the place among those at `max_step`, None for one that is behind. `revoked`: the quorum was revoked
    meanwhile; do the step and vote no. `catching_up`: the replica ranks that heal beside their steps, and contribute
    nothing for as long as the quorum stands. `tag_quorum_id` with `max_step`: the state that the step begins with.
    `world`: as the manager was told last, where it was asked for a quorum.
    `compares`: every participant does. `secret`: of the quorum's members, which prove by it that they are.
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
    shares_with: tuple[str, ...] = ()
    catching_up: tuple[int, ...] = ()
    tag_quorum_id: int | None = None
    world: World | None = None
    compares: bool = False
    place: int | None = None
    healing: tuple[int, ...] = ()
    secret: str = field(default="", repr=False)

    @property
    def catches_up(self) -> bool:
        return self.replica_rank in self.catching_up

    @property
    def heals(self) -> bool:
        return self.heal_from_rank is not None

    @property
    def has_healing(self) -> bool:
        """Whether any participant heals, and is waited for."""
        return bool(self.healing)


@dataclass(frozen=True, slots=True)
class Decision:
    """What the ranks of a group have decided; `next` is the grant of the next step, if one came with it."""

    commit: bool
    next: Assignment | None = None
