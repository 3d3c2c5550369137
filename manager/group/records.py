"""The records of one replica group: its ranks, its open watches, its standing quorum and the attempt at a step.

Each fact about a rank has one place: a field of its `Rank`. The rules (presence.py, requests.py, votes.py) read and
change these records, and append what follows to `ReplicaGroup.effects`.
"""

from collections import OrderedDict
from dataclasses import dataclass, field
from operator import attrgetter

from lighthouse_protocol.messages.membership import Assignment, CatchUp, Participant, Quorum, Tag
from lighthouse_protocol.messages.progress import HealTotals
from lighthouse_protocol.messages.session import HeldQuorum, HoldState
from lighthouse_protocol.refusals import LighthouseError
from manager.group.events import CallRefused, Effect, PendingVote, QuorumRequest

GRANTING = (HoldState.STANDING, HoldState.RECALLED, HoldState.RESUMED)
"""The quorum allows further grants, at once or after a resume."""


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
class PendingRequest:
    """A request that waits for an answer."""

    request: QuorumRequest

    is_gathering: bool
    """True if the request waits for the group's other ranks or for the answer to their join. False if it waits until
    the manager may decide without a join."""

    number: int
    """Order of arrival among the requests that wait."""


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


@dataclass(slots=True)
class StandingQuorum:
    """The standing quorum that the ranks received last."""

    quorum: Quorum
    mode: HoldState

    formed_for: int
    """Step that the quorum was formed for."""

    granted: int
    """Highest step that the ranks have entered."""

    upto: int
    """Last step to grant if the mode is RESUMED."""

    committed: int = -1
    """Last step that all ranks have committed under this quorum."""

    is_late: bool = False
    """The group learned too late that it must heal. It does its only step with zeros."""

    wants_next: bool = False
    """The group has finished or failed to catch up, and needs another quorum."""

    knows_lost: bool = False
    """The ranks have received the name of the lost group."""

    is_revoked_by_order: bool = False
    """The lighthouse has revoked the quorum while it allowed grants."""

    @property
    def held(self) -> HeldQuorum:
        return HeldQuorum(self.quorum.quorum_id, self.mode, self.granted, self.wants_next)


@dataclass(slots=True)
class Attempt:
    """An attempt at a step. The votes are in the records of the ranks."""

    quorum_id: int
    step: int

    is_opened: bool
    """A quorum has opened the attempt, not a vote."""

    decision: bool | None = None

    is_bound: bool = False
    """A vote has named its quorum."""

    @property
    def is_inherited(self) -> bool:
        """Return whether an earlier manager may have decided the attempt."""
        return not self.is_opened and self.is_bound and self.decision is None


class ReplicaGroup:
    """All records of one replica group.

    Args:
        me: This group as a participant. The fields that change with each join are filled in later.
    """

    def __init__(self, me: Participant) -> None:
        self.me = me
        self.size = me.group_world_size
        self.ranks = tuple(map(Rank, range(self.size)))
        self.watches: dict[int, OpenWatch] = {}  # by watch number, in opening order

        self.incarnation = 0
        """Number of times that a rank has lost its state."""

        self.drains = False

        self.quorum_id = 0
        """The last quorum that the group received."""

        self.max_step = 0
        """Step that the last quorum was formed for."""

        self.had_peers: bool | None = None
        """Whether the last quorum of the same processes had other participants, or None if unknown."""

        self.step = 0
        """Step of the state that the group holds, or the lowest one that it may have healed to since it joined."""

        self.standing: StandingQuorum | None = None
        self.lease_until = 0.0
        self.renewed_until = 0.0
        """End of the lease by the newest acknowledged heartbeat."""

        self.grants = 0
        """Number of granted steps, under all quorums."""

        self.attempt: Attempt | None = None
        self.decided = OrderedDict[tuple[int, int], bool]()
        """The last decisions, by quorum_id and step."""

        self.effects: list[Effect] = []
        """Effects of the event that the machine handles."""

    def refuse(self, call: int, error: LighthouseError) -> None:
        self.effects.append(CallRefused(call, error))

    # -- pending requests

    def wait(self, request: QuorumRequest, *, is_gathering: bool) -> None:
        """Store a request, and replace the one of the same rank that waits now."""
        number = 1 + max((rank.pending.number for rank in self.ranks if rank.pending is not None), default=0)
        self.ranks[request.group_rank].pending = PendingRequest(request, is_gathering, number)

    def pending(self, *, is_gathering: bool) -> list[QuorumRequest]:
        """Return the waiting requests in order of arrival."""
        found: list[PendingRequest] = []
        for rank in self.ranks:
            if rank.pending is not None and rank.pending.is_gathering is is_gathering:
                found.append(rank.pending)
        found.sort(key=attrgetter("number"))
        return [pending.request for pending in found] if found else []
