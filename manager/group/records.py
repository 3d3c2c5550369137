"""The records of one replica group: its ranks and the watches that are open.

Each fact about a rank has one place: a field of its `Rank`. The rules (presence.py, requests.py, votes.py) read and
change these records, and `ReplicaGroup` holds them.
"""

from dataclasses import dataclass, field

from lighthouse_protocol.messages.membership import PLAIN, Assignment, CatchUp, Distrust, Tag
from lighthouse_protocol.messages.progress import HealTotals


@dataclass(eq=False, slots=True)
class OpenWatch:
    """A stream of a rank's process that has not ended."""

    number: int
    group_rank: int
    rank_incarnation: str

    has_left: bool = False
    """The process has announced that it ends in good order."""

    mates: set[int] = field(default_factory=set[int])
    """Ranks that may still read what this process has sent. It stays until all of them have moved on."""

    is_released: bool = False
    """`Released` was sent."""


@dataclass(slots=True)
class LostRank:
    """How a rank was lost, and what became of it since. The record goes when the rank comes back."""

    group_rank: int
    lost_at: float
    mates: frozenset[str]
    """The other ranks' processes at that moment, by rank incarnation."""

    has_left: bool
    """The rank ended in good order."""

    reason: str = field(default="", compare=False)

    is_restarted: bool = field(default=False, compare=False)
    """A supervisor has started another process in its place."""

    is_given_up: bool = field(default=False, compare=False)
    """The rank did not come back in time, and its mates have been told so."""


@dataclass(frozen=True, slots=True)
class QuorumRequest:
    """One rank's call for a quorum.

    `rank_incarnation` is empty, and `tag_quorum_id` None, if the caller does not send them.
    """

    call: int
    group_rank: int
    step: int
    deadline_at: float
    checkpoint_address: str = ""
    tag_quorum_id: int | None = None
    rank_incarnation: str = ""
    shrink_only: bool = False
    init_sync: bool = True
    commit_failures: int = 0
    handle: str = ""
    catch_up: CatchUp = PLAIN
    compares: bool = False
    distrust: Distrust | None = None
    heals_first: bool | None = None

    @property
    def holds(self) -> Tag:
        """Return the tag of the state that the rank holds."""
        return self.catch_up.held or Tag(self.step, self.tag_quorum_id)


@dataclass(frozen=True, slots=True)
class PendingRequest:
    """A request that waits for an answer."""

    request: QuorumRequest

    is_gathering: bool
    """It waits for the other ranks of the group, or for the lighthouse to answer their join. Otherwise it waits until
    the manager may decide on it by itself."""

    number: int
    """Higher than those of all requests that waited before."""


@dataclass(frozen=True, slots=True)
class PendingVote:
    """One rank's vote on its step. A yes waits in the record of its rank until the step is decided."""

    call: int
    group_rank: int
    step: int
    vote: bool
    quorum_id: int | None = None
    """None for a caller that does not name the quorum: the vote is for the one that it got last."""

    wants_next: bool = False
    """The rank can use a grant of the next step that comes with the decision."""

    @property
    def is_bound(self) -> bool:
        """The vote names its quorum, so a yes counts even when its call is over."""
        return self.quorum_id is not None


@dataclass(eq=False, slots=True)
class Rank:
    """One rank of the group, through all its processes."""

    group_rank: int

    # -- presence

    watch: OpenWatch | None = None
    """The newest watch, while it is open."""

    process: str | None = None
    """Rank incarnation that was watched last. It outlives the watch: the process may be between two watches."""

    has_asked: bool = False
    """The rank has asked for a quorum since it was lost last. A rank without a watch is present by this alone."""

    heard_at: float = 0.0
    """When the rank last had a call under way. Counts only with a rank timeout, for ranks without a watch."""

    loss: LostRank | None = None
    """Set while the rank is lost and has not come back."""

    # -- heals

    heals: tuple[str, HealTotals] | None = None
    """The process that last reported heals, and its totals."""

    past_heals: HealTotals = field(default_factory=HealTotals)
    """Totals of the rank's earlier processes."""

    # -- requests for a quorum

    pending: PendingRequest | None = None

    last_request: QuorumRequest | None = None
    """The last request that gathered: where the rank serves its state, and what a later request is checked against."""

    lowest: tuple[Tag, int] | None = None
    """The state that the rank last joined with, and the lowest step of the quorums that it got with that state."""

    is_dismissed: bool = False
    """The rank knows that the group drains: it gets no further quorum."""

    # -- the vote on the present step

    vote: PendingVote | None = None
    """Its vote that waits for the decision."""

    knows_decision: bool = False
    """The rank got the decision on the present step."""

    is_without_step: bool = False
    """The rank has shown that it neither holds the step that is voted on nor votes for it."""

    # -- the standing quorum

    assigned: dict[bool, Assignment] = field(default_factory=dict[bool, Assignment])
    """Its assignment in the quorum, by `init_sync`. Computed once, because it is O(participants)."""

    has_voted: bool = False
    """The rank has done its part in the step that the quorum was formed for."""

    catch_up: CatchUp | None = None
    """How far the rank has caught up, as it said in its request for the present step."""

    wants_next: bool = False
    """As in the rank's last vote under the present quorum and step."""

    @property
    def is_present(self) -> bool:
        return self.watch is not None or self.has_asked


class ReplicaGroup:
    """All records of one replica group."""

    def __init__(self, wire_id: str, group_world_size: int) -> None:
        self.wire_id = wire_id
        self.size = group_world_size
        self.ranks = tuple(map(Rank, range(group_world_size)))
        self.watches: dict[int, OpenWatch] = {}  # by number, in the order in which they opened

    @property
    def missing(self) -> frozenset[int]:
        """The ranks that have not come yet, or are lost."""
        return frozenset(rank.group_rank for rank in self.ranks if not rank.is_present)

    # -- pending requests

    def wait(self, request: QuorumRequest, *, is_gathering: bool) -> None:
        """Let a request wait, in place of the one of its rank that waits now."""
        number = 1 + max((rank.pending.number for rank in self.ranks if rank.pending is not None), default=0)
        self.ranks[request.group_rank].pending = PendingRequest(request, is_gathering, number)

    def pending(self, *, is_gathering: bool) -> tuple[QuorumRequest, ...]:
        """Return the requests that wait, in the order in which they began to."""
        found = [p for rank in self.ranks if (p := rank.pending) is not None and p.is_gathering is is_gathering]
        return tuple(p.request for p in sorted(found, key=lambda p: p.number))

    def withdraw(self, call: int, *, is_gathering: bool) -> bool:
        """Remove a request by its call. Return whether it waited."""
        for rank in self.ranks:
            p = rank.pending
            if p is not None and p.is_gathering is is_gathering and p.request.call == call:
                rank.pending = None
                return True
        return False

    def clear(self, *, is_gathering: bool) -> None:
        """Remove all requests that wait."""
        for rank in self.ranks:
            if rank.pending is not None and rank.pending.is_gathering is is_gathering:
                rank.pending = None
