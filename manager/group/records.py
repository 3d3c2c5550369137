"""The records of one replica group: its ranks and the watches that are open.

Each fact about a rank has one place: a field of its `Rank`. The rules (presence.py, requests.py, votes.py) read and
change these records, and `ReplicaGroup` holds them.
"""

from dataclasses import dataclass, field

from lighthouse_protocol.messages.membership import PLAIN, Assignment, CatchUp, Distrust, Tag
from lighthouse_protocol.messages.progress import HealTotals


@dataclass(eq=False, slots=True)
class OpenWatch:
    """An open stream of a rank's process."""

    number: int
    group_rank: int
    rank_incarnation: str

    has_left: bool = False
    """The process has announced that it ends in good order."""

    mates: set[int] = field(default_factory=set[int])
    """Ranks that may still read what this process has sent. The process stays until all of them have moved on."""

    is_released: bool = False
    """`Released` was sent."""


@dataclass(slots=True)
class LostRank:
    """Loss of a rank. The record is deleted when the rank returns."""

    group_rank: int
    lost_at: float
    mates: frozenset[str]
    """Rank incarnations of the other ranks at that moment."""

    has_left: bool
    """The rank ended in good order."""

    reason: str = field(default="", compare=False)

    is_restarted: bool = field(default=False, compare=False)
    """A supervisor has started another process for the rank."""

    is_given_up: bool = field(default=False, compare=False)
    """The rank did not return in time, and its mates have received `RankGone`."""


@dataclass(frozen=True, slots=True)
class QuorumRequest:
    """Request of one rank for a quorum.

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
    """True if the request waits for the group's other ranks or for the answer to their join. False if it waits until
    the manager may decide without a join."""

    number: int
    """Order of arrival among the requests that wait."""


@dataclass(frozen=True, slots=True)
class PendingVote:
    """Vote of one rank on its step. A yes waits in the record of its rank until the step is decided."""

    call: int
    group_rank: int
    step: int
    vote: bool
    quorum_id: int | None = None
    """None if the caller does not name the quorum. The vote is then for the newest attempt."""

    wants_next: bool = False
    """The rank can use a grant of the next step that comes with the decision."""

    @property
    def is_bound(self) -> bool:
        """Return whether the vote names its quorum. A bound yes counts even after its call has ended."""
        return self.quorum_id is not None


@dataclass(eq=False, slots=True)
class Rank:
    """One rank of the group, through all its processes."""

    group_rank: int

    # -- presence

    watch: OpenWatch | None = None
    """The newest watch, while it is open."""

    process: str | None = None
    """Rank incarnation of the last watch. It outlives the watch, because the process may be between two watches."""

    has_asked: bool = False
    """The rank has requested a quorum since its last loss. Without a watch, this makes it present."""

    heard_at: float = 0.0
    """When the rank last had an open call. Used only with a rank timeout, for ranks without a watch."""

    loss: LostRank | None = None
    """Set from the loss of the rank until its return."""

    # -- heals

    heals: tuple[str, HealTotals] | None = None
    """The process that last reported heals, and its totals."""

    past_heals: HealTotals = field(default_factory=HealTotals)
    """Totals of the rank's earlier processes."""

    # -- requests for a quorum

    pending: PendingRequest | None = None

    last_request: QuorumRequest | None = None
    """The last request that gathered. It names the address of the rank's state, and later requests are checked
    against its step."""

    lowest: tuple[Tag, int] | None = None
    """Tag of the state that the rank last joined with, and the lowest max_step of the quorums since."""

    is_dismissed: bool = False
    """The rank has been refused with `Drained`, so it expects no other quorum."""

    # -- the vote on the present step

    vote: PendingVote | None = None
    """Vote that waits for the decision."""

    knows_decision: bool = False
    """The rank has received the decision on the present step."""

    is_without_step: bool = False
    """A request or a no has shown that the rank neither holds the result of the present step nor will vote yes."""

    # -- the standing quorum

    assigned: dict[bool, Assignment] = field(default_factory=dict[bool, Assignment])
    """Assignment in the quorum, by `init_sync`. Computed once, because it is O(participants)."""

    has_voted: bool = False
    """The rank has voted on a granted step of the quorum."""

    catch_up: CatchUp | None = None
    """Catch-up state from the rank's request for the present step."""

    wants_next: bool = False
    """`wants_next` of the rank's last vote in the present attempt."""

    @property
    def is_present(self) -> bool:
        return self.watch is not None or self.has_asked


class ReplicaGroup:
    """All records of one replica group."""

    def __init__(self, wire_id: str, group_world_size: int) -> None:
        self.wire_id = wire_id
        self.size = group_world_size
        self.ranks = tuple(map(Rank, range(group_world_size)))
        self.watches: dict[int, OpenWatch] = {}  # by watch number, in opening order

    @property
    def missing(self) -> frozenset[int]:
        """The ranks that have not connected yet, or are lost."""
        return frozenset(rank.group_rank for rank in self.ranks if not rank.is_present)

    # -- pending requests

    def wait(self, request: QuorumRequest, *, is_gathering: bool) -> None:
        """Store a request, and replace the one of the same rank that waits now."""
        number = 1 + max((rank.pending.number for rank in self.ranks if rank.pending is not None), default=0)
        self.ranks[request.group_rank].pending = PendingRequest(request, is_gathering, number)

    def pending(self, *, is_gathering: bool) -> tuple[QuorumRequest, ...]:
        """Return the waiting requests in order of arrival."""
        found = [p for rank in self.ranks if (p := rank.pending) is not None and p.is_gathering is is_gathering]
        return tuple(p.request for p in sorted(found, key=lambda p: p.number))

    def withdraw(self, call: int, *, is_gathering: bool) -> bool:
        """Remove the waiting request of a call. Return whether there was one."""
        for rank in self.ranks:
            p = rank.pending
            if p is not None and p.is_gathering is is_gathering and p.request.call == call:
                rank.pending = None
                return True
        return False

    def clear(self, *, is_gathering: bool) -> None:
        """Remove all waiting requests."""
        for rank in self.ranks:
            if rank.pending is not None and rank.pending.is_gathering is is_gathering:
                rank.pending = None
