"""The records of one replica group: its ranks, its open watches, its standing quorum and its current attempt.

A *watch* is the stream that an Agent's process keeps open to its manager. A *standing quorum* is one under which the
group may do many steps; for each step after the first, the manager gives its ranks a *grant*, the permission to enter
it. An *attempt* is one execution of a step under one quorum; it ends when the group commits or discards the step.

Each fact about a rank is stored in one place, a field of its `Rank`. The rules (presence.py, requests.py, votes.py)
read and change these records, and append their effects to `ReplicaGroup.effects`.
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
"""Modes in which the quorum allows further grants, immediately or after the lighthouse has resumed it."""


@dataclass(eq=False, slots=True)
class OpenWatch:
    """A stream that a rank's process keeps open to this manager, and the progress of the process's normal exit."""

    number: int
    group_rank: int
    rank_incarnation: str

    has_left: bool = False
    """True if the process has announced that it will exit normally."""

    mates: set[int] = field(default_factory=set[int])
    """Other ranks in the group that may still read this process's data. It does not exit before this set is empty."""

    is_released: bool = False
    """True if the manager has sent `Released` to the process, which may then exit."""


@dataclass(slots=True)
class LostRank:
    """Record of a lost rank, deleted when the rank returns."""

    group_rank: int
    lost_at: float
    mates: frozenset[str]
    """Rank incarnations of the group's other ranks at the time of the loss."""

    has_left: bool
    """True if the rank exited normally."""

    reason: str = field(default="", compare=False)

    is_restarted: bool = field(default=False, compare=False)
    """True if a supervisor has started another process for the rank."""

    is_given_up: bool = field(default=False, compare=False)
    """True if the rank did not return in time, so the other ranks were sent `RankGone`."""


@dataclass(frozen=True, slots=True)
class PendingRequest:
    """A rank's request for a quorum that is waiting for an answer."""

    request: QuorumRequest

    is_gathering: bool
    """True if the request is waiting for the group's other ranks or for the answer to their join. False if it is
    waiting for the lighthouse's next message or the group's next vote, after which the manager decides on it again."""

    number: int
    """Position in the order of arrival."""


@dataclass(eq=False, slots=True)
class Rank:
    """One rank in the group. The record outlives the rank's processes."""

    group_rank: int

    # -- presence

    watch: OpenWatch | None = None
    """The newest watch, or None if it has closed."""

    process: str | None = None
    """Rank incarnation of the last watch. Kept after the watch has closed, because the process may be reconnecting."""

    has_asked: bool = False
    """True if the rank has requested a quorum since its last loss. It then counts as present even without a watch."""

    heard_at: float = 0.0
    """When the rank last had a call in progress. Used for the rank timeout of ranks without a watch."""

    loss: LostRank | None = None
    """Set while the rank is lost."""

    # -- heals

    heals: tuple[str, HealTotals] | None = None
    """Rank incarnation of the process that last reported heal totals, and these totals."""

    past_heals: HealTotals = field(default_factory=HealTotals)
    """Heal totals of the rank's earlier processes, summed."""

    # -- requests for a quorum

    pending: PendingRequest | None = None

    last_request: QuorumRequest | None = None
    """The last request that was part of a join. It contains the address at which the rank serves its state. Later
    requests must not be for a lower step."""

    lowest: tuple[Tag, int] | None = None
    """Tag (step and quorum) of the state that the rank last joined with, and the lowest `max_step` of the quorums
    since then, to which the rank may have healed."""

    is_dismissed: bool = False
    """True if the manager has refused the rank with `Drained`. The rank then requests no other quorum."""

    # -- the vote on the current step

    vote: PendingVote | None = None
    """Vote that is waiting for the decision."""

    knows_decision: bool = False
    """True if the rank has received the decision on the current step."""

    is_without_step: bool = False
    """True if the rank's request or its no vote shows that it lacks the step's result and will not vote yes."""

    # -- the standing quorum

    assigned: dict[bool, Assignment] = field(default_factory=dict[bool, Assignment])
    """Assignment in the quorum's first step, by `init_sync`. Cached, because `assign` takes O(participants) time."""

    has_voted: bool = False
    """True if the rank has voted on a granted step of the quorum."""

    catch_up: CatchUp | None = None
    """Catch-up state from the rank's request for the highest granted step, or None before that request."""

    wants_next: bool = False
    """True if the rank's last vote in the current attempt requests a grant of the next step."""


@dataclass(slots=True)
class StandingQuorum:
    """The standing quorum that the ranks received last, and the steps granted under it.

    A standing quorum lasts for many steps. To grant a step is to let the ranks start it without asking the lighthouse.
    """

    quorum: Quorum
    mode: HoldState

    formed_for: int
    """First step of the quorum."""

    granted: int
    """Highest granted step. The ranks may have entered it."""

    upto: int
    """Last step to grant if the mode is RESUMED."""

    committed: int = -1
    """Last step that all ranks have committed under this quorum, or -1 if there is none."""

    is_late: bool = False
    """True if the group had already begun to compute when it learned that it must heal. It contributes zeros to the
    first step and then joins again."""

    wants_next: bool = False
    """True if the group has caught up, or has failed to, and therefore needs another quorum."""

    knows_lost: bool = False
    """True if the ranks have received the name of the lost group that caused the revoke."""

    is_revoked_by_order: bool = False
    """True if the lighthouse revoked the quorum while the quorum still allowed grants."""

    @property
    def held(self) -> HeldQuorum:
        return HeldQuorum(self.quorum.quorum_id, self.mode, self.granted, self.wants_next)


@dataclass(slots=True)
class Attempt:
    """One execution of a step under one quorum. The votes are stored in the ranks' records."""

    quorum_id: int
    step: int

    is_opened: bool
    """True if this manager opened the attempt with a quorum or a grant, False if a vote opened it."""

    decision: bool | None = None
    """True for a commit, False for a discard, None while undecided."""

    is_bound: bool = False
    """True if a vote on the attempt has named the quorum."""

    @property
    def is_inherited(self) -> bool:
        """True if an earlier manager opened the attempt, and may have decided it."""
        return not self.is_opened and self.is_bound and self.decision is None


class ReplicaGroup:
    """All records of one replica group. `me` describes the group, except for the fields that each join sets."""

    def __init__(self, me: Participant) -> None:
        self.me = me
        self.size = me.group_world_size
        self.ranks = tuple(map(Rank, range(self.size)))
        self.watches: dict[int, OpenWatch] = {}  # by watch number, in opening order

        self.incarnation = 0
        """Number of times that a rank has lost its state since the manager started."""

        self.drains = False

        self.quorum_id = 0
        """Id of the last quorum that the group received."""

        self.max_step = 0
        """First step of the last quorum."""

        self.had_peers: bool | None = None
        """True if the last quorum of the group's current processes had other participants, or None if unknown."""

        self.step = 0
        """Lowest step that the group's state may have: its own at the last join, or one that it has healed to."""

        self.standing: StandingQuorum | None = None
        self.lease_until = 0.0
        self.renewed_until = 0.0
        """End of the lease according to the last acknowledged heartbeat, on the caller's monotonic clock."""

        self.grants = 0
        """Number of granted steps, under all quorums."""

        self.attempt: Attempt | None = None
        self.decided = OrderedDict[tuple[int, int], bool]()
        """The last decisions, by (quorum_id, step). True for a commit."""

        self.effects: list[Effect] = []
        """Effects of the event that the machine is handling."""

    def refuse(self, call: int, error: LighthouseError) -> None:
        self.effects.append(CallRefused(call, error))

    # -- pending requests

    def wait(self, request: QuorumRequest, *, is_gathering: bool) -> None:
        """Store a request that cannot be answered yet, instead of the rank's earlier one.

        `is_gathering` means that it waits for the group's other ranks or for the answer to their join.
        """
        number = 1 + max((rank.pending.number for rank in self.ranks if rank.pending is not None), default=0)
        self.ranks[request.group_rank].pending = PendingRequest(request, is_gathering, number)

    def pending(self, *, is_gathering: bool) -> list[QuorumRequest]:
        """Return the requests gathered for a join, or the other waiting ones if not `is_gathering`, oldest first."""
        found: list[PendingRequest] = []
        for rank in self.ranks:
            if rank.pending is not None and rank.pending.is_gathering is is_gathering:
                found.append(rank.pending)
        found.sort(key=attrgetter("number"))
        return [pending.request for pending in found] if found else []
