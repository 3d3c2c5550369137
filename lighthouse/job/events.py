"""What happens to the members of a job."""

from dataclasses import dataclass, field
from enum import StrEnum

from lighthouse.job.records import Membership, QuorumRecord, RestartRecord, RunRecord
from lighthouse_protocol.messages import run as supervisor
from lighthouse_protocol.messages.membership import Participant, Quorum
from lighthouse_protocol.messages.run import (
    CloseReport,
    FailureReport,
    FinishReport,
    Generation,
    RankHeartbeat,
    RankHello,
    RankId,
    ReadyReport,
    RunStopped,
    SupervisorHello,
    ToSupervisor,
)
from lighthouse_protocol.messages.session import Heartbeat, Hello, QuorumOrder, Welcome
from lighthouse_protocol.refusals import LighthouseError


@dataclass(frozen=True, slots=True)
class MemberJoined:
    """A replica group that was not there, or another incarnation of one."""

    replica_id: str


@dataclass(frozen=True, slots=True)
class MemberBack:
    """A replica group that was lost or down takes part again; `text` says how."""

    replica_id: str
    text: str


@dataclass(frozen=True, slots=True)
class MemberLost:
    """`quorum_id`: the quorum that ends without this member; None: none does. `last_seen_at`: when it was last heard
    of; None: it was there until now."""

    replica_id: str
    quorum_id: int | None
    reason: str
    last_seen_at: float | None = None


@dataclass(frozen=True, slots=True)
class MemberLeft:
    """It has ended in good order."""

    replica_id: str


@dataclass(frozen=True, slots=True)
class MemberDraining:
    """It does the steps of its quorum, and asks for no further one."""

    replica_id: str


@dataclass(frozen=True, slots=True)
class GridChanged:
    """The grid of ranks (rank_grid.py) may have changed. At most one in the effects of one call."""


@dataclass(frozen=True, slots=True)
class ConnectionsCut:
    """The connections of these members ended together. They are held for `hold_s`."""

    replica_ids: tuple[str, ...]
    hold_s: float


MemberEffect = MemberJoined | MemberBack | MemberLost | MemberLeft | MemberDraining | GridChanged | ConnectionsCut


# -- events -------------------------------------------------------------------
#
# What happens to a job's machine, and what it answers with.


@dataclass(frozen=True, slots=True)
class Joined:
    """A call asks for a quorum; `call` is the driver's number of it, `deadline_at` the end of its time.

    `session`: the one that it came by.
    """

    call: int
    participant: Participant
    deadline_at: float
    session: int | None = None


@dataclass(frozen=True, slots=True)
class HeartbeatReceived:
    replica_id: str
    incarnation: str = ""


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """The call ended without an answer: cancelled, its time over, or its connection closed."""

    call: int


@dataclass(frozen=True, slots=True)
class SessionOpened:
    """`session` numbers are the driver's and grow."""

    session: int
    hello: Hello


@dataclass(frozen=True, slots=True)
class SessionHeartbeatReceived:
    session: int
    beat: Heartbeat


@dataclass(frozen=True, slots=True)
class SessionEnded:
    """The stream is over. An end without a leave is a crash."""

    session: int


@dataclass(frozen=True, slots=True)
class Left:
    """The group has gone in good order."""

    session: int


@dataclass(frozen=True, slots=True)
class WasLate:
    """The lighthouse itself was paused: it acts now on what should have been seen `by_s` ago."""

    by_s: float


@dataclass(frozen=True, slots=True)
class HostBusy:
    """At this moment the lighthouse's host has more to do than it can: what happened in one is read in several."""


@dataclass(frozen=True, slots=True)
class QuorumFormed:
    """`calls` are to be answered with `quorum`; `is_new` when its id is. `record` is written down before that."""

    quorum: Quorum
    calls: tuple[int, ...]
    is_new: bool
    stands: bool = False
    record: QuorumRecord | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class JobEnded:
    """The job has ended at `step` (job_end.py). `record` is written down before any group is told."""

    step: int
    absent: tuple[str, ...]
    record: QuorumRecord = field(compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class QuorumResent:
    """`call` is of a member of the standing quorum that has not heard of it."""

    quorum: Quorum
    call: int


@dataclass(frozen=True, slots=True)
class JoinRefused:
    call: int
    error: LighthouseError


@dataclass(frozen=True, slots=True)
class JournalOutdated:
    """`replica_id` was told quorum `seen_id`; the last one that this lighthouse knows of is `last_id`.

    Nothing forms for `wait_s`: some quorum may be held by members that it does not know.
    """

    replica_id: str
    seen_id: int
    last_id: int
    wait_s: float


@dataclass(frozen=True, slots=True)
class Welcomed:
    session: int
    welcome: Welcome


@dataclass(frozen=True, slots=True)
class HeartbeatAnswered:
    """The answer to heartbeat `number`."""

    session: int
    number: int
    order: QuorumOrder | None


@dataclass(frozen=True, slots=True)
class Ordered:
    """`order` goes to `sessions`."""

    order: QuorumOrder
    sessions: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SessionRefused:
    """The session is to be ended with `error`; None: in good order."""

    session: int
    error: LighthouseError | None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class NewcomersChanged:
    """Another group that is not of the present quorum asks for the next one, or one asks no more."""


QuorumEvent = (
    Joined
    | HeartbeatReceived
    | Withdrawn
    | SessionOpened
    | SessionHeartbeatReceived
    | SessionEnded
    | Left
    | WasLate
    | HostBusy
)
QuorumEffect = (
    QuorumFormed
    | QuorumResent
    | JobEnded
    | JoinRefused
    | JournalOutdated
    | Welcomed
    | HeartbeatAnswered
    | Ordered
    | SessionRefused
    | NewcomersChanged
    | MemberEffect
)


# -- events -------------------------------------------------------------------
#
# What happens to a run's machine, and what it answers with; and why there is, or is not, a generation.

RankMessage = RankHeartbeat | ReadyReport | FailureReport | FinishReport | CloseReport

# -- events


@dataclass(frozen=True, slots=True)
class RankJoined:
    """A process is here, or here again. `session`: the stream that it came by; None: it only beats."""

    entry: RankHello
    session: int | None = None


@dataclass(frozen=True, slots=True)
class RankSaid:
    """What it says after its hello."""

    rank: RankId
    message: RankMessage


@dataclass(frozen=True, slots=True)
class RankLost:
    """Its supervisor says that the process is gone. `output`: its last lines; `by`: the supervisor's name."""

    rank: RankId
    reason: str
    output: tuple[str, ...] = ()
    by: str = ""


@dataclass(frozen=True, slots=True)
class RanksBehind:
    """The others wait for the ranks of these slots in vain."""

    slots: tuple[int, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class StopAsked:
    """By an operator, or for a stall."""

    reason: str
    who: str


@dataclass(frozen=True, slots=True)
class ResumeAsked:
    pass


@dataclass(frozen=True, slots=True)
class SupervisorJoined:
    entry: SupervisorHello
    session: int


@dataclass(frozen=True, slots=True)
class SupervisorEnded:
    session: int


@dataclass(frozen=True, slots=True)
class SupervisorAsked:
    """A stop, or that its host is excluded: none of its processes comes back. `membership`: of its group in the quorum
    of the job."""

    session: int
    message: supervisor.StopAsked | supervisor.HostExcluded
    membership: Membership = Membership.OPEN


# -- effects


@dataclass(frozen=True, slots=True)
class RecordDue:
    """The record has changed, and what follows in the list depends on it: it is written down first."""

    record: RunRecord = field(compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class GenerationFormed:
    """Told to all its active ranks at once, and to `spares`."""

    generation: Generation
    spares: tuple[RankId, ...] = ()


@dataclass(frozen=True, slots=True)
class GenerationTold:
    """Told to one: it has not heard of its generation, or is a spare of it."""

    rank: RankId
    generation: Generation


@dataclass(frozen=True, slots=True)
class Interrupted:
    """`number` is over for `ranks`: they stop what they run, and report ready. Also if no rank is left to be told.

    `is_new`: it has just been broken, or for one more reason. `is_failure`: by what a rank has said of its function.
    """

    number: int
    reason: str
    ranks: tuple[RankId, ...]
    is_new: bool = False
    is_failure: bool = False


@dataclass(frozen=True, slots=True)
class RankRefused:
    rank: RankId
    error: LighthouseError


@dataclass(frozen=True, slots=True)
class Completed:
    """Every active rank has finished: all may end with 0, `ranks`, and every supervisor if it is new."""

    number: int
    ranks: tuple[RankId, ...]
    is_new: bool = False


@dataclass(frozen=True, slots=True)
class Stopped:
    """To `ranks`, and to every supervisor if it is new: it has just come into force."""

    stop: RunStopped
    ranks: tuple[RankId, ...]
    is_new: bool = False


@dataclass(frozen=True, slots=True)
class Resumed:
    pass


@dataclass(frozen=True, slots=True)
class OutsiderHeard:
    """The supervisor `who` has asked for what concerns the whole run, and has no part in it: `what` it comes to."""

    who: str
    what: str


@dataclass(frozen=True, slots=True)
class RecordChanged:
    """The record has changed, and nothing that is told depends on it: it is to be written down soon."""


@dataclass(frozen=True, slots=True)
class IncidentChanged:
    """An incident of the run began or changed: the record, and the archive of incidents, are to follow soon."""

    restart: RestartRecord


@dataclass(frozen=True, slots=True)
class SupervisorTold:
    """After a Refusal its stream ends."""

    session: int
    message: ToSupervisor


class RunVerdict(StrEnum):
    """Why the next generation forms, or does not."""

    STOPPED = "stopped"
    COMPLETED = "completed"
    STANDS = "stands"
    NOBODY_READY = "nobody_ready"
    WAITING_FOR_RANKS = "waiting_for_ranks"
    NO_MAJORITY = "no_majority"
    TOO_FEW = "too_few"
    BACKING_OFF = "backing_off"
    READY = "ready"


RunEvent = (
    RankJoined
    | RankSaid
    | SessionEnded
    | RankLost
    | RanksBehind
    | StopAsked
    | ResumeAsked
    | SupervisorJoined
    | SupervisorEnded
    | SupervisorAsked
    | WasLate
)
RunEffect = (
    RecordDue
    | GenerationFormed
    | GenerationTold
    | Interrupted
    | RankRefused
    | Completed
    | Stopped
    | Resumed
    | SupervisorTold
    | OutsiderHeard
    | RecordChanged
    | IncidentChanged
)


def changes_record(effect: RunEffect) -> bool:
    """Whether the record must be durable before this is told."""
    match effect:
        case GenerationFormed() | Resumed():
            return True
        case Interrupted(is_new=is_new) | Completed(is_new=is_new) | Stopped(is_new=is_new):
            return is_new
        case _:
            return False
