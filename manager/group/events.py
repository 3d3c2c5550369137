"""Events that a replica group's machine handles, and the effects that it returns.

The effect for a vote is the message `VoteAnswer`, with the number of the call.
"""

from collections.abc import Set
from dataclasses import dataclass

from lighthouse_protocol.messages.membership import PLAIN, Assignment, CatchUp, Distrust, Quorum, Tag, World
from lighthouse_protocol.messages.progress import HealTotals
from lighthouse_protocol.messages.session import EvidenceRequest, ToLighthouse, ToManager, ToRank, VoteAnswer
from lighthouse_protocol.rank_set import NO_RANKS
from lighthouse_protocol.refusals import LighthouseError


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


@dataclass(frozen=True, slots=True)
class CallEnded:
    """A waiting call of a rank has ended: its caller has disconnected, or received `error` at its deadline."""

    call: int
    error: LighthouseError | None = None


@dataclass(frozen=True, slots=True)
class WatchOpened:
    watch: int
    group_rank: int
    rank_incarnation: str


@dataclass(frozen=True, slots=True)
class WatchEnded:
    """The stream or its process has ended."""

    watch: int


@dataclass(frozen=True, slots=True)
class RankLeaves:
    """A rank closes its Agent in good order."""

    watch: int
    step: int | None = None  # as in `Leaving`


@dataclass(frozen=True, slots=True)
class RankFailed:
    """A rank reports its own failure, and ends."""

    group_rank: int
    rank_incarnation: str
    reason: str
    ends_group: bool = False  # no rank of the group can continue


@dataclass(frozen=True, slots=True)
class RankHealed:
    """A rank reports the totals of its process's heals."""

    group_rank: int
    rank_incarnation: str
    totals: HealTotals


@dataclass(frozen=True, slots=True)
class RanksStarted:
    """A supervisor has started these ranks, or all lost ranks if None."""

    group_ranks: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class WasLate:
    """The manager's own process was paused for `by_s` seconds."""

    by_s: float


@dataclass(frozen=True, slots=True)
class SessionOpened:
    pass


@dataclass(frozen=True, slots=True)
class SessionClosed:
    pass


@dataclass(frozen=True, slots=True)
class Received:
    message: ToManager


@dataclass(frozen=True, slots=True)
class DrainAsked:
    reason: str


@dataclass(frozen=True, slots=True)
class QuorumAnswered:
    """Answer a rank's request."""

    call: int
    assignment: Assignment
    quorum: Quorum | None  # None for a grant


@dataclass(frozen=True, slots=True)
class CallRefused:
    call: int
    error: LighthouseError


@dataclass(frozen=True, slots=True)
class Sent:
    message: ToLighthouse


@dataclass(frozen=True, slots=True)
class Pushed:
    """Send `message` on these watches."""

    message: ToRank
    watches: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FailureReported:
    """A rank has reported its own failure."""

    group_rank: int
    reason: str
    is_known: bool  # False if the manager does not watch the process; then the report changes nothing


@dataclass(frozen=True, slots=True)
class MissingChanged:
    """The missing ranks have changed."""

    text: str  # names the present and the missing ranks; empty if all or none are missing


@dataclass(frozen=True, slots=True)
class WaitChanged:
    """A request for a quorum waits (none waited before, or some have just been answered), or none waits any more."""

    is_waiting: bool


@dataclass(frozen=True, slots=True)
class RankGivenUp:
    """A lost rank has not returned in time. Its process, if it still runs, is useless unless it left in good order."""

    group_rank: int
    reason: str
    lost_at: float
    has_left: bool  # the rank ended in good order
    is_started: bool  # a supervisor has started another process for the rank, which has not connected yet

    @property
    def is_expected(self) -> bool:
        """Return whether this is no failure."""
        return self.has_left or self.is_started


@dataclass(frozen=True, slots=True)
class GroupGivenUp:
    """The group does not fit its peers. None of its ranks can continue, and a restart alone does not fix that."""

    reason: str


@dataclass(frozen=True, slots=True)
class WorldChanged:
    """Send the world to the ranks."""

    world: World


@dataclass(frozen=True, slots=True)
class SessionGivenUp:
    """Close the connection and make a new one."""

    reason: str


@dataclass(frozen=True, slots=True)
class SilenceChanged:
    """A heartbeat has no answer: open a second connection, and move the session there. Cancel this if it answers."""

    is_silent: bool


@dataclass(frozen=True, slots=True)
class Killed:
    """The lighthouse kills the group."""

    reason: str
    behind: Set[int] = NO_RANKS  # stalled ranks that are the reason; empty if an operator requests the kill


@dataclass(frozen=True, slots=True)
class EvidenceWanted:
    """Collect evidence of what the ranks are doing, and send it."""

    request: EvidenceRequest


@dataclass(frozen=True, slots=True)
class HasLeft:
    """The group has left the lighthouse, and no rank needs this manager any more."""

    reason: str


RankEvent = (
    QuorumRequest
    | PendingVote
    | CallEnded
    | WatchOpened
    | WatchEnded
    | RankLeaves
    | RankHealed
    | RankFailed
    | RanksStarted
)
Event = RankEvent | WasLate | SessionOpened | SessionClosed | Received | DrainAsked
Effect = (
    QuorumAnswered
    | VoteAnswer
    | CallRefused
    | Sent
    | Pushed
    | FailureReported
    | MissingChanged
    | WaitChanged
    | RankGivenUp
    | GroupGivenUp
    | WorldChanged
    | SessionGivenUp
    | SilenceChanged
    | Killed
    | EvidenceWanted
    | HasLeft
)
