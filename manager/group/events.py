"""Events that a replica group's machine handles, and the effects that it returns.

`QuorumRequest` and `PendingVote` are in records.py.
"""

from collections.abc import Set
from dataclasses import dataclass, field

from lighthouse_protocol.messages.membership import Assignment, Decision, Quorum, World
from lighthouse_protocol.messages.progress import HealTotals
from lighthouse_protocol.messages.session import EvidenceRequest, ToLighthouse, ToManager, ToRank
from lighthouse_protocol.rank_set import NO_RANKS
from lighthouse_protocol.refusals import LighthouseError
from manager.group.records import PendingVote, QuorumRequest


@dataclass(frozen=True, slots=True)
class CallEnded:
    """A waiting call of a rank has ended without an answer."""

    call: int


@dataclass(frozen=True, slots=True)
class CallExpired:
    """The time of a waiting call is over, and its rank got `error`."""

    call: int
    error: LighthouseError


@dataclass(frozen=True, slots=True)
class WatchOpened:
    watch: int
    group_rank: int
    rank_incarnation: str


@dataclass(frozen=True, slots=True)
class WatchEnded:
    """The stream, or its process, has ended."""

    watch: int


@dataclass(frozen=True, slots=True)
class RankLeaves:
    """A rank closes its Agent in good order. `step` as in `Leaving`."""

    watch: int
    step: int | None = None


@dataclass(frozen=True, slots=True)
class RankFailed:
    """A rank reports its own failure, and ends. `ends_group`: no rank of the group can go on."""

    group_rank: int
    rank_incarnation: str
    reason: str
    ends_group: bool = False


@dataclass(frozen=True, slots=True)
class RankHealed:
    """A rank reports the totals of all heals so far of its process."""

    group_rank: int
    rank_incarnation: str
    totals: HealTotals


@dataclass(frozen=True, slots=True)
class RanksStarted:
    """A supervisor has started these ranks, or all lost ranks if None."""

    group_ranks: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class WasLate:
    """The manager itself was held up for `by_s` seconds."""

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
    """The answer to a rank's request. `quorum` is None for a grant."""

    call: int
    assignment: Assignment
    quorum: Quorum | None


@dataclass(frozen=True, slots=True)
class VoteAnswered:
    """The decision on a rank's vote, for the caller. If all ranks want it, the grant of the next step comes along."""

    call: int
    decision: Decision
    group_rank: int = field(default=-1, compare=False)


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
    """A rank has reported its own failure.

    If `is_known` is false, the report comes from a process that this manager does not watch, and changes nothing.
    """

    group_rank: int
    reason: str
    is_known: bool


@dataclass(frozen=True, slots=True)
class MissingChanged:
    """Text that names the present and the missing ranks; empty if all or none are present."""

    text: str


@dataclass(frozen=True, slots=True)
class WaitBegan:
    """A request for a quorum waits: the first one since the last answer, or since no request waited."""


@dataclass(frozen=True, slots=True)
class WaitEnded:
    """No request for a quorum waits any more."""


@dataclass(frozen=True, slots=True)
class RankGivenUp:
    """A lost rank has not come back in time.

    Unless it has left in good order, its process does nothing useful any more, if it still runs. `is_started`: a
    supervisor has started another process in its place, which has not connected yet.
    """

    group_rank: int
    reason: str
    lost_at: float
    has_left: bool
    is_started: bool

    @property
    def is_expected(self) -> bool:
        """Whether this is no failure."""
        return self.has_left or self.is_started


@dataclass(frozen=True, slots=True)
class GroupGivenUp:
    """The group does not fit its peers. No rank of it can go on, and a restart alone does not fix that."""

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
class SessionSilent:
    """A heartbeat has no answer: open a second connection, and move the session there."""

    reason: str


@dataclass(frozen=True, slots=True)
class SessionHeard:
    """The silent session has answered: no second connection is needed."""


@dataclass(frozen=True, slots=True)
class Killed:
    """The lighthouse kills the group. `behind`: the stalled ranks that are the reason; empty if a person asks."""

    reason: str
    behind: Set[int] = NO_RANKS


@dataclass(frozen=True, slots=True)
class EvidenceWanted:
    """Collect evidence of what the ranks are doing, and send it."""

    request: EvidenceRequest


@dataclass(frozen=True, slots=True)
class HasLeft:
    """The lighthouse has let the group go, and no rank needs this manager any more."""

    reason: str


RankEvent = (
    QuorumRequest
    | PendingVote
    | CallEnded
    | CallExpired
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
    | VoteAnswered
    | CallRefused
    | Sent
    | Pushed
    | FailureReported
    | MissingChanged
    | WaitBegan
    | WaitEnded
    | RankGivenUp
    | GroupGivenUp
    | WorldChanged
    | SessionGivenUp
    | SessionSilent
    | SessionHeard
    | Killed
    | EvidenceWanted
    | HasLeft
)
