"""What happens to a replica group's machine, and what it answers with.

Requests for a quorum are in request.py, votes in commit.py.
"""

from collections.abc import Set
from dataclasses import dataclass

from lighthouse_protocol.messages.membership import Assignment, Quorum, World
from lighthouse_protocol.messages.progress import HealTotals
from lighthouse_protocol.messages.session import EvidenceRequest, ToLighthouse, ToManager, ToRank
from lighthouse_protocol.rank_set import NO_RANKS
from lighthouse_protocol.refusals import LighthouseError
from manager.group.requests import QuorumRequest
from manager.group.votes import Decided, Voted


@dataclass(frozen=True, slots=True)
class CallEnded:
    """A waiting call of a rank is over, without an answer."""

    call: int


@dataclass(frozen=True, slots=True)
class CallExpired:
    """The time of a waiting call was over; its rank was told `error`."""

    call: int
    error: LighthouseError


@dataclass(frozen=True, slots=True)
class WatchOpened:
    watch: int
    group_rank: int
    rank_incarnation: str


@dataclass(frozen=True, slots=True)
class WatchEnded:
    """The stream, or the process that it is of, has ended."""

    watch: int


@dataclass(frozen=True, slots=True)
class RankLeaves:
    """The rank of that watch closes its Agent in good order. `step` as in Leaving."""

    watch: int
    step: int | None = None


@dataclass(frozen=True, slots=True)
class RankFailed:
    """It says so itself, and ends; `ends_group`: and no rank of the group can go on."""

    group_rank: int
    rank_incarnation: str
    reason: str
    ends_group: bool = False


@dataclass(frozen=True, slots=True)
class RankHealed:
    """`totals`: all heals so far of that rank's process."""

    group_rank: int
    rank_incarnation: str
    totals: HealTotals


@dataclass(frozen=True, slots=True)
class RanksStarted:
    """A supervisor has started these ranks; None: all that were lost."""

    group_ranks: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class WasLate:
    """The manager itself was held up: it acts now on what should have been seen `by_s` ago."""

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
    """A rank's request: `quorum` is None for a grant."""

    call: int
    assignment: Assignment
    quorum: Quorum | None


@dataclass(frozen=True, slots=True)
class CallRefused:
    call: int
    error: LighthouseError


@dataclass(frozen=True, slots=True)
class Sent:
    message: ToLighthouse


@dataclass(frozen=True, slots=True)
class Pushed:
    """To the ranks of `watches`."""

    message: ToRank
    watches: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FailureReported:
    """By a rank of itself; or, where `is_known` is false, by a process that this manager does not watch, which changes
    nothing."""

    group_rank: int
    reason: str
    is_known: bool


@dataclass(frozen=True, slots=True)
class MissingChanged:
    """Which ranks of the group are here and which are missing, in words; empty: all are here, or none."""

    text: str


@dataclass(frozen=True, slots=True)
class WaitBegan:
    """A request for a quorum waits, the first one since the last answer or the last end of a wait."""


@dataclass(frozen=True, slots=True)
class WaitEnded:
    """No request for a quorum waits any more."""


@dataclass(frozen=True, slots=True)
class RankGivenUp:
    """It was lost then and is not back. Where it has not left in good order, its process does nothing any more, if it
    is still there. `is_started`: another one was started in its place, and is on its way."""

    group_rank: int
    reason: str
    lost_at: float
    has_left: bool
    is_started: bool

    @property
    def is_expected(self) -> bool:
        """Nothing is wrong with that."""
        return self.has_left or self.is_started


@dataclass(frozen=True, slots=True)
class GroupGivenUp:
    """It does not fit its peers: no rank of it can go on, and a restart alone does not mend that."""

    reason: str


@dataclass(frozen=True, slots=True)
class WorldChanged:
    """The ranks are to be told."""

    world: World


@dataclass(frozen=True, slots=True)
class SessionGivenUp:
    """Close the connection and make a new one."""

    reason: str


@dataclass(frozen=True, slots=True)
class SessionSilent:
    """A heartbeat has no answer: make a second connection beside the first, and move the session there."""

    reason: str


@dataclass(frozen=True, slots=True)
class SessionHeard:
    """The silent session has answered: no second connection is needed."""


@dataclass(frozen=True, slots=True)
class Killed:
    """`behind`: the ranks that the lighthouse has the group killed for; empty: a person asks."""

    reason: str
    behind: Set[int] = NO_RANKS


@dataclass(frozen=True, slots=True)
class EvidenceWanted:
    """What the ranks are doing is to be found out and sent."""

    request: EvidenceRequest


@dataclass(frozen=True, slots=True)
class HasLeft:
    """The lighthouse has let the group go, and no rank needs this manager any more."""

    reason: str


RankEvent = (
    QuorumRequest
    | Voted
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
    | Decided
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
