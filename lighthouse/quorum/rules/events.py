"""What happens to a job's machine, and what it answers with."""

from dataclasses import dataclass, field

from lighthouse.members.rules.events import MemberEffect
from lighthouse.quorum.rules.record import QuorumRecord
from lighthouse_protocol.messages.membership import Participant, Quorum
from lighthouse_protocol.messages.session import Heartbeat, Hello, QuorumOrder, Welcome
from lighthouse_protocol.refusals import LighthouseError


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


Event = (
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
Effect = (
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
