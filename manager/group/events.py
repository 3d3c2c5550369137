"""Events that the state machine of a replica group handles, and the effects that it returns.

There is no effect class for the answer to a vote. The state machine returns the message `VoteAnswer` itself, with the
number of the call.
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
    """A rank's request for a quorum.

    `rank_incarnation` is empty, and `tag_quorum_id` is None, if the caller does not send them.
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
        """Tag (step and quorum id) of the state that the rank holds."""
        return self.catch_up.held or Tag(self.step, self.tag_quorum_id)


@dataclass(frozen=True, slots=True)
class PendingVote:
    """A rank's vote on its step. A yes is stored in the rank's record until the step is decided."""

    call: int
    group_rank: int
    step: int
    vote: bool
    quorum_id: int | None = None
    """Quorum of the step, or None if the caller did not send it. The vote is then for the current attempt."""

    wants_next: bool = False
    """True if the decision may carry a grant of the next step."""

    @property
    def is_bound(self) -> bool:
        """True if the vote names its quorum. A bound yes counts even after its call has ended."""
        return self.quorum_id is not None


@dataclass(frozen=True, slots=True)
class CallEnded:
    """A rank's pending call has ended. `error` is what the caller received at its deadline, None if it disconnected."""

    call: int
    error: LighthouseError | None = None


@dataclass(frozen=True, slots=True)
class WatchOpened:
    watch: int
    group_rank: int
    rank_incarnation: str


@dataclass(frozen=True, slots=True)
class WatchEnded:
    """The stream of a watch has closed, or the rank's process has exited."""

    watch: int


@dataclass(frozen=True, slots=True)
class RankLeaves:
    """A rank is closing its Agent normally."""

    watch: int
    step: int | None = None  # see `Leaving`


@dataclass(frozen=True, slots=True)
class RankFailed:
    """A rank has reported that it has failed and is about to exit."""

    group_rank: int
    rank_incarnation: str
    reason: str
    ends_group: bool = False  # no rank of the group can continue


@dataclass(frozen=True, slots=True)
class RankHealed:
    """A rank has reported the heal totals of its process."""

    group_rank: int
    rank_incarnation: str
    totals: HealTotals


@dataclass(frozen=True, slots=True)
class RanksStarted:
    """A supervisor has restarted the lost ranks among `group_ranks`, or all of them if it is None."""

    group_ranks: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class ProcessPaused:
    """The manager's process was paused for `by_s` seconds."""

    by_s: float


@dataclass(frozen=True, slots=True)
class SessionOpened:
    pass


@dataclass(frozen=True, slots=True)
class SessionClosed:
    is_moving: bool = False  # the session continues on another connection, which is already open


@dataclass(frozen=True, slots=True)
class Received:
    message: ToManager


@dataclass(frozen=True, slots=True)
class DrainAsked:
    reason: str
    is_revocable: bool = False  # a DrainCancelled may follow


@dataclass(frozen=True, slots=True)
class DrainCancelled:
    """The reason for a revocable drain no longer applies. This has no effect once the group has begun to leave."""


@dataclass(frozen=True, slots=True)
class QuorumAnswered:
    """Answer a rank's request for a quorum with an assignment."""

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
    """Send `message` on the watches with these numbers."""

    message: ToRank
    watches: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FailureReported:
    """Log that a rank has reported its own failure."""

    group_rank: int
    reason: str
    is_known: bool  # False if the manager does not watch the process, in which case the report has no effect


@dataclass(frozen=True, slots=True)
class MissingChanged:
    """Log that the set of missing ranks has changed, and notify the present ranks."""

    text: str  # names the present and the missing ranks; empty if all or none are missing


@dataclass(frozen=True, slots=True)
class WaitChanged:
    """Record that the ranks' wait for a quorum has begun, has ended, or continues after some requests were answered."""

    is_waiting: bool


@dataclass(frozen=True, slots=True)
class RankGivenUp:
    """Report that a lost rank has not returned in time. A supervisor restarts it unless it exited normally."""

    group_rank: int
    reason: str
    lost_at: float
    has_left: bool  # the rank exited normally
    is_started: bool  # a supervisor has started another process for the rank, which has not connected yet

    @property
    def is_expected(self) -> bool:
        """True if the loss is not a failure: the rank exited normally, or is being restarted."""
        return self.has_left or self.is_started


@dataclass(frozen=True, slots=True)
class GroupGivenUp:
    """Report that the group cannot train with its peers, for example because its model differs. No restart helps."""

    reason: str


@dataclass(frozen=True, slots=True)
class WorldChanged:
    """Send the size of the job to the ranks."""

    world: World


@dataclass(frozen=True, slots=True)
class SessionGivenUp:
    """Close the connection to the lighthouse and open a new one."""

    reason: str


@dataclass(frozen=True, slots=True)
class SilenceChanged:
    """The lighthouse has stopped or resumed answering heartbeats.

    If it has stopped, open a second connection and move the session there. If it has resumed, cancel that attempt.
    """

    is_silent: bool


@dataclass(frozen=True, slots=True)
class Killed:
    """Make the ranks exit, because an operator has killed the group or some of its ranks have stalled."""

    reason: str
    behind: Set[int] = NO_RANKS  # stalled ranks that caused the kill; empty if an operator requested it


@dataclass(frozen=True, slots=True)
class EvidenceWanted:
    """Collect evidence of what the ranks are doing, and send it to the lighthouse."""

    request: EvidenceRequest


@dataclass(frozen=True, slots=True)
class GroupLeft:
    """Stop the manager. The group has left the job, and no rank needs this manager any more."""

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
Event = RankEvent | ProcessPaused | SessionOpened | SessionClosed | Received | DrainAsked | DrainCancelled
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
    | GroupLeft
)
