"""Events and effects of the two state machines of a job.

Drivers feed each `QuorumEvent` to the job's `QuorumMachine` and each `RunEvent` to the run's `RunMachine`, and perform
the returned effects in order. The `Member...` effects describe what happened to a replica group. The driver records
them in the timeline, the log and the incidents, and sends no message for them.
"""

from dataclasses import dataclass, field
from enum import StrEnum

from lighthouse.job.records import GroupReports, Membership, QuorumRecord, RestartRecord, RunRecord
from lighthouse_protocol.messages import run
from lighthouse_protocol.messages.membership import Participant, Quorum
from lighthouse_protocol.messages.session import Heartbeat, Hello, QuorumOrder, Welcome
from lighthouse_protocol.refusals import LighthouseError


@dataclass(frozen=True, slots=True)
class MemberJoined:
    """A new replica group, or a new incarnation of one, has appeared."""

    replica_id: str


@dataclass(frozen=True, slots=True)
class MemberReturned:
    """A replica group that was lost or down is taking part again. `text` describes how."""

    replica_id: str
    text: str


@dataclass(frozen=True, slots=True)
class MemberLost:
    """A replica group has been lost: it disconnected, fell silent, went down or restarted."""

    replica_id: str
    quorum_id: int | None  # quorum that ends because of the loss, if any
    reason: str
    last_seen_at: float | None = None  # when the group's last message arrived; None if it was connected until now


@dataclass(frozen=True, slots=True)
class MemberLeft:
    """A replica group has left the job cleanly, which is not a loss."""

    replica_id: str


@dataclass(frozen=True, slots=True)
class MemberForgotten:
    """The record of a replica group has been removed. The group's past reports still count toward the job's totals."""

    reports: GroupReports


@dataclass(frozen=True, slots=True)
class MemberDraining:
    """A replica group is draining: it completes the steps of its quorum and then leaves."""

    replica_id: str


@dataclass(frozen=True, slots=True)
class GridChanged:
    """The grid of connected ranks (`Grid`) may have changed. Emitted at most once per event."""


@dataclass(frozen=True, slots=True)
class ConnectionsCut:
    """Several members lost their connections at the same time. They count as alive for another `hold_s` seconds."""

    replica_ids: tuple[str, ...]
    hold_s: float


MemberEffect = MemberJoined | MemberReturned | MemberLost | MemberLeft | MemberForgotten | MemberDraining


@dataclass(frozen=True, slots=True)
class Joined:
    """A replica group has requested the next quorum."""

    call: int  # assigned by the driver
    participant: Participant
    deadline_at: float  # when the call expires
    session: int | None = None  # session that carried the request; None for a separate call


@dataclass(frozen=True, slots=True)
class HeartbeatReceived:
    replica_id: str
    incarnation: str = ""


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """A group's request for the next quorum has been cancelled, has been replaced by a newer one, or has expired."""

    replica_id: str
    call: int


@dataclass(frozen=True, slots=True)
class SessionOpened:
    """A manager has opened a session. The driver assigns ascending session numbers."""

    session: int
    hello: Hello


@dataclass(frozen=True, slots=True)
class SessionHeartbeatReceived:
    session: int
    beat: Heartbeat


@dataclass(frozen=True, slots=True)
class SessionEnded:
    """A manager's or a rank's stream has ended. Unless a `Left` came first, the process crashed or was disconnected."""

    session: int


@dataclass(frozen=True, slots=True)
class Left:
    """The manager with this session has reported that its replica group leaves cleanly."""

    session: int


@dataclass(frozen=True, slots=True)
class ProcessPaused:
    """The lighthouse process was paused for `by_s` seconds, so it receives the following events late."""

    by_s: float


@dataclass(frozen=True, slots=True)
class HostBusy:
    """The lighthouse's host is overloaded, so the lighthouse may receive simultaneous events far apart."""


@dataclass(frozen=True, slots=True)
class QuorumFormed:
    """A quorum has formed. The driver sends it in answer to the joins whose numbers are in `calls`."""

    quorum: Quorum
    calls: tuple[int, ...]
    is_new: bool  # True if the quorum has a new id
    stands: bool = False
    record: QuorumRecord | None = field(default=None, compare=False, repr=False)  # stored before any answer
    is_branch: bool = False  # True if no group with the last quorum's state has joined (lineage.py, rule 3)


@dataclass(frozen=True, slots=True)
class JobEnded:
    """The job has ended at `step` (see `JobEnd`). The driver must store `record` before it answers any group."""

    step: int
    absent: tuple[str, ...]
    record: QuorumRecord = field(compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class QuorumResent:
    """Instruction to answer request `call` of a member with the current quorum, which the member never received."""

    quorum: Quorum
    call: int
    stands: bool = True


@dataclass(frozen=True, slots=True)
class JoinRefused:
    call: int
    error: LighthouseError


@dataclass(frozen=True, slots=True)
class JournalOutdated:
    """A group has received a quorum that is missing from the journal. No quorum forms for `wait_s` seconds."""

    replica_id: str  # group that received quorum `seen_id`
    seen_id: int
    last_id: int  # newest quorum_id that this lighthouse knows
    wait_s: float  # unknown members may hold a quorum during this time


@dataclass(frozen=True, slots=True)
class Welcomed:
    session: int
    welcome: Welcome


@dataclass(frozen=True, slots=True)
class HeartbeatAnswered:
    """Instruction to answer a manager's heartbeat `number`, and to include `order` if it is not None."""

    session: int
    number: int
    order: QuorumOrder | None


@dataclass(frozen=True, slots=True)
class Ordered:
    """Instruction to send `order` to the managers whose session numbers are in `sessions`."""

    order: QuorumOrder
    sessions: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SessionRefused:
    """Instruction to close the session with `error`, or cleanly if `error` is None."""

    session: int
    error: LighthouseError | None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class NewcomersChanged:
    """The set of groups outside the quorum that are waiting for the next one has changed."""


GroupEvent = Joined | HeartbeatReceived | Withdrawn | SessionOpened | SessionHeartbeatReceived | SessionEnded | Left
QuorumEvent = GroupEvent | ProcessPaused | HostBusy
JobEffect = QuorumFormed | QuorumResent | JobEnded | JoinRefused | JournalOutdated | ConnectionsCut
SessionEffect = Welcomed | HeartbeatAnswered | Ordered | SessionRefused
QuorumEffect = JobEffect | SessionEffect | MemberEffect | GridChanged | NewcomersChanged


RankMessage = run.RankHeartbeat | run.ReadyReport | run.FailureReport | run.FinishReport | run.CloseReport


@dataclass(frozen=True, slots=True)
class RankJoined:
    """A rank's process has connected or reconnected to the run."""

    entry: run.RankHello
    session: int | None = None  # stream of the rank, or None if it only sends heartbeats


@dataclass(frozen=True, slots=True)
class RankReported:
    """A rank has sent a message other than its hello."""

    rank: run.RankId
    message: RankMessage


@dataclass(frozen=True, slots=True)
class RankLost:
    """A supervisor has reported that a rank's process has exited."""

    rank: run.RankId
    reason: str
    output: tuple[str, ...] = ()  # last lines of output
    by: str = ""  # name of the supervisor


@dataclass(frozen=True, slots=True)
class RanksBehind:
    """Some ranks are behind, and the run's other ranks are waiting for them. `slots` lists their slots."""

    slots: tuple[int, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class StopAsked:
    """An operator or the stall policy has requested that the run stop."""

    reason: str
    who: str


@dataclass(frozen=True, slots=True)
class ResumeAsked:
    pass


@dataclass(frozen=True, slots=True)
class SupervisorJoined:
    entry: run.SupervisorHello
    session: int


@dataclass(frozen=True, slots=True)
class SupervisorEnded:
    session: int


@dataclass(frozen=True, slots=True)
class SupervisorAsked:
    """A supervisor has requested that the run stop, or that its own host be excluded from the run."""

    session: int
    message: run.StopAsked | run.HostExcluded
    membership: Membership = Membership.OPEN  # whether the supervisor's group is in the job's quorum


@dataclass(frozen=True, slots=True)
class RecordDue:
    """Instruction to store `record` before performing the remaining effects, which depend on it."""

    record: RunRecord = field(compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class GenerationFormed:
    """Instruction to send the new generation to its active ranks and to `spares`."""

    generation: run.Generation
    spares: tuple[run.RankId, ...] = ()


@dataclass(frozen=True, slots=True)
class GenerationSent:
    """Instruction to send the current generation to a spare, or to a rank that has not received it."""

    rank: run.RankId
    generation: run.Generation


@dataclass(frozen=True, slots=True)
class Interrupted:
    """Instruction to notify `ranks` that generation `number` has ended, so that they interrupt the user's function."""

    number: int
    reason: str
    ranks: tuple[run.RankId, ...]  # may be empty
    is_new: bool = False  # the generation has just broken, or a later loss is now the cause
    is_failure: bool = False  # a rank reported a failure of its function


@dataclass(frozen=True, slots=True)
class RankRefused:
    rank: run.RankId
    error: LighthouseError


@dataclass(frozen=True, slots=True)
class Completed:
    """The run has been completed. The driver notifies `ranks`, which then exit with status 0."""

    number: int
    ranks: tuple[run.RankId, ...]  # if `is_new`, the driver notifies every supervisor, too
    is_new: bool = False


@dataclass(frozen=True, slots=True)
class Stopped:
    """Instruction to send `stop` to `ranks` and, if `is_new`, to every supervisor."""

    stop: run.RunStopped
    ranks: tuple[run.RankId, ...]
    is_new: bool = False


@dataclass(frozen=True, slots=True)
class Resumed:
    pass


@dataclass(frozen=True, slots=True)
class OutsiderIgnored:
    """Supervisor `who` has requested a change to the whole run, but does not take part in the run."""

    who: str
    what: str  # what the request changes instead


@dataclass(frozen=True, slots=True)
class RecordChanged:
    """The run's record has changed. The driver may store it later, because no message depends on it."""


@dataclass(frozen=True, slots=True)
class IncidentChanged:
    """An incident of the run is new or has changed. The driver reports it, and stores the run's record soon after."""

    restart: RestartRecord


@dataclass(frozen=True, slots=True)
class SupervisorMessage:
    """Instruction to send `message` to a supervisor. If it is a refusal, the driver also closes the stream."""

    session: int
    message: run.ToSupervisor


class RunVerdict(StrEnum):
    """Reason why the next generation is or is not forming now."""

    STOPPED = "stopped"
    COMPLETED = "completed"
    STANDS = "stands"
    NOBODY_READY = "nobody_ready"
    WAITING_FOR_RANKS = "waiting_for_ranks"
    NO_MAJORITY = "no_majority"
    TOO_FEW = "too_few"
    BACKING_OFF = "backing_off"
    READY = "ready"


RankEvent = RankJoined | RankReported | SessionEnded | RankLost | RanksBehind
RunEvent = RankEvent | StopAsked | ResumeAsked | SupervisorJoined | SupervisorEnded | SupervisorAsked | ProcessPaused
GenerationEffect = GenerationFormed | GenerationSent | Interrupted | RankRefused | Completed | Stopped | Resumed
RunEffect = GenerationEffect | RecordDue | SupervisorMessage | OutsiderIgnored | RecordChanged | IncidentChanged
