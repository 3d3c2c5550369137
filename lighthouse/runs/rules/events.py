"""What happens to a run's machine, and what it answers with; and why there is, or is not, a generation."""

from dataclasses import dataclass, field
from enum import StrEnum

from lighthouse.members.rules.identity import Membership
from lighthouse.runs.rules.record import RestartRecord, RunRecord
from lighthouse_protocol.messages import supervisor
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
)
from lighthouse_protocol.messages.supervisor import SupervisorHello, ToSupervisor
from lighthouse_protocol.refusals import LighthouseError

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
class SessionEnded:
    session: int


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


@dataclass(frozen=True, slots=True)
class WasLate:
    """The lighthouse itself was paused: it acts now on what should have been seen `by_s` ago."""

    by_s: float


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


Event = (
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
Effect = (
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


def changes_record(effect: Effect) -> bool:
    """Whether the record must be durable before this is told."""
    match effect:
        case GenerationFormed() | Resumed():
            return True
        case Interrupted(is_new=is_new) | Completed(is_new=is_new) | Stopped(is_new=is_new):
            return is_new
        case _:
            return False
