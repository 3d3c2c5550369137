"""What a manager and the lighthouse say to each other on a session, and a rank and its manager on a watch. No protobuf.

Levels, not edges: what a manager holds, whether it drains and whether its ranks are down is repeated in its hello and
in every beat; what the lighthouse wants of a quorum is repeated in every echo. A message that was lost with a broken
connection costs nothing.
"""

from dataclasses import dataclass
from enum import StrEnum

from lighthouse_protocol.messages.evidence import RankEvidence, SelfReport
from lighthouse_protocol.messages.membership import Participant, Quorum, Vote, World
from lighthouse_protocol.messages.progress import GroupView, Sample
from lighthouse_protocol.refusals import LighthouseError


class HoldState(StrEnum):
    """How a manager holds the standing quorum that it was handed last."""

    STANDING = "standing"  # it grants the next step by itself
    FROZEN = "frozen"  # recalled: it grants nothing beyond its highest grant
    RESUMED = "resumed"  # it grants up to a step, then joins
    JOINING = "joining"  # it has done the last step that it may, and never grants under it again
    LEAVING = "leaving"  # its ranks have ended in good order; `granted` is what they have committed
    REVOKED = "revoked"  # revoked, or a step failed; it never grants under it again


@dataclass(frozen=True, slots=True)
class HeldQuorum:
    """`granted` is the highest step that the manager's ranks were let into under that quorum.

    `wants_next`: the group catches up under it, and has got there, or cannot: it is to be followed by another one.
    """

    quorum_id: int
    mode: HoldState
    granted: int
    wants_next: bool = False


class QuorumPhase(StrEnum):
    """What the lighthouse wants of a standing quorum."""

    NONE = "none"  # there is none: every step asks the lighthouse
    RETURNING = "returning"  # the lighthouse has restarted: who holds it may go on, and is to come back
    STANDING = "standing"
    RECALLED = "recalled"  # grant nothing new, and say what was granted
    RESUMED = "resumed"  # grant up to `upto`, then join
    REVOKED = "revoked"  # stop, and abort what has not completed


@dataclass(frozen=True, slots=True)
class QuorumOrder:
    quorum_id: int
    phase: QuorumPhase
    upto: int = 0
    reason: str = ""
    lost: str = ""


# -- manager to lighthouse


# Why a group is down whose ranks have not all come yet: the first quorum of a job waits for it.
STARTING = "its ranks have not come yet"
# Why a group is down that has lost ranks, since its supervisor has started them again.
RESTARTING = "its ranks are started again"
# Why a group is down whose ranks end in good order: it is no loss to its quorum.
LEFT = "its ranks have ended"


@dataclass(frozen=True, slots=True)
class GroupReport:
    """`down` says why the group cannot take part though its manager lives; empty: all its ranks are there. `missing`:
    which of them are not; empty while `down` says something: all of them, or an older manager's."""

    held: HeldQuorum | None = None
    drains: bool = False
    down: str = ""
    missing: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Hello:
    """The first message of a session. `participant` is as in the last join. `gives_evidence`: it may be asked what its
    ranks are doing; an older manager would not answer. `takes_world`: it is told when the World changes."""

    participant: Participant
    levels: GroupReport = GroupReport()
    gives_evidence: bool = False
    takes_world: bool = False


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Sent at every heartbeat_interval, and at once when a level changes. `number` grows. `progress`: where the ranks
    are; None: as was told before."""

    number: int
    levels: GroupReport = GroupReport()
    progress: GroupView | None = None


@dataclass(frozen=True, slots=True)
class JoinRequest:
    """`number` grows; a newer one takes the place of an older."""

    number: int
    participant: Participant
    time_left_s: float


@dataclass(frozen=True, slots=True)
class WithdrawRequest:
    number: int


@dataclass(frozen=True, slots=True)
class Leave:
    """The group has gone in good order. A session that ends without it is a crash."""

    reason: str = ""


@dataclass(frozen=True, slots=True)
class Evidence:
    """Of one rank, an answer to the request of that number."""

    number: int
    rank: RankEvidence


@dataclass(frozen=True, slots=True)
class EvidenceDone:
    """No more comes to the request of that number."""

    number: int


ToLighthouse = Hello | Heartbeat | JoinRequest | WithdrawRequest | Leave | Evidence | EvidenceDone


# -- lighthouse to manager


@dataclass(frozen=True, slots=True)
class Welcome:
    heartbeat_interval_s: float
    lease_s: float
    order: QuorumOrder | None = None


@dataclass(frozen=True, slots=True)
class HeartbeatAck:
    """The answer to beat `number`. `order` is about the quorum that the beat said it holds."""

    number: int
    heartbeat_interval_s: float
    order: QuorumOrder | None = None


@dataclass(frozen=True, slots=True)
class JoinAccepted:
    """The answer to join `join`."""

    join: int
    quorum: Quorum
    stands: bool


@dataclass(frozen=True, slots=True)
class JoinRejected:
    """`join` was refused; 0: the hello was, and the session ends."""

    join: int
    error: LighthouseError


@dataclass(frozen=True, slots=True)
class DrainRequest:
    """Leave after the step that the others know of."""

    reason: str = ""


@dataclass(frozen=True, slots=True)
class KillRequest:
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Goodbye:
    """The lighthouse ends this session: it stops, or a newer session has taken its place, or the leave is done."""

    reason: str = ""


@dataclass(frozen=True, slots=True)
class EvidenceRequest:
    """What are these ranks doing? Empty: all. Answered by an Evidence for each of them, then EvidenceDone, within
    GATHERED_WITHIN_S."""

    number: int
    group_ranks: tuple[int, ...] = ()


ToManager = (
    Welcome
    | HeartbeatAck
    | JoinAccepted
    | JoinRejected
    | QuorumOrder
    | DrainRequest
    | KillRequest
    | Goodbye
    | EvidenceRequest
    | World
)


# -- rank and manager


@dataclass(frozen=True, slots=True)
class EvidenceOffer:
    """A rank can be asked what it is doing. `signal` has its stacks written to its file `descriptor`, also while it
    runs no Python; 0: there is no such signal."""

    signal: int = 0
    descriptor: int = 0


@dataclass(frozen=True, slots=True)
class WatchRequest:
    """What a rank says of its process. `host` names the machine and its pid namespace; `started` the process's start.

    Where `host` is the manager's own, the manager watches the process too, by its pid. `hostname` is for a person.
    `offer`: None for an older rank, which is never asked.
    """

    group_rank: int
    worker: str
    pid: int = 0
    host: str = ""
    started: int = 0
    hostname: str = ""
    offer: EvidenceOffer | None = None
    takes_world: bool = False


@dataclass(frozen=True, slots=True)
class WatchOpened:
    """The first answer: the rank is watched. `takes_progress`: it may say where it is, `takes_leave`: that it leaves;
    an older manager would end the watch by that."""

    takes_progress: bool = False
    takes_leave: bool = False


@dataclass(frozen=True, slots=True)
class Leaving:
    """The rank closes its Agent in good order: the end of its watch is no failure of its process. It stays until it is
    told that it is released. `step`: which it would have asked for next; None: it is in the middle of one."""

    step: int | None = None


@dataclass(frozen=True, slots=True)
class Released:
    """To a rank that leaves: nobody waits for what it has sent any more."""


@dataclass(frozen=True, slots=True)
class RankGone:
    """A rank of the same group was lost and is not back: what its mates wait for inside the group never comes, and the
    group has to be started again."""

    group_rank: int
    reason: str


@dataclass(frozen=True, slots=True)
class Revoked:
    """Abort the collectives of that quorum that have not completed, vote, and ask again. `lost`: the group that it has
    lost; empty: none is known. It may be told after the rest."""

    quorum_id: int
    reason: str
    lost: str = ""


@dataclass(frozen=True, slots=True)
class Waiting:
    """What the group's requests for a quorum wait for, in words; empty: for nothing, or not for long."""

    reason: str


@dataclass(frozen=True, slots=True)
class Killed:
    """End the process with status 1."""

    reason: str


@dataclass(frozen=True, slots=True)
class Ballot:
    """A vote, by a rank that holds a watch: answered by a Counted of the same number within `time_left_s`."""

    number: int
    step: int
    vote: bool
    quorum_id: int | None
    wants_next: bool
    time_left_s: float


@dataclass(frozen=True, slots=True)
class Counted:
    """The answer to a ballot: what was decided, or why it was refused."""

    number: int
    outcome: Vote | LighthouseError


@dataclass(frozen=True, slots=True)
class EvidenceAsked:
    """Say what you are doing: answered by an OwnEvidence of the same number, by a rank that can."""

    number: int


FromRank = WatchRequest | Ballot | Sample | SelfReport | Leaving
ToRank = WatchOpened | Revoked | RankGone | Released | Waiting | Killed | Counted | EvidenceAsked | World
