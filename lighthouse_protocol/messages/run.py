"""Messages that the lighthouse exchanges with the ranks and supervisors of a run, and the status of a run.

A *generation* is one attempt to run the user's function. It has a unique number and a fixed list of ranks.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, NamedTuple

from lighthouse_protocol.constraints import (
    Advisory,
    Age,
    Count,
    EntryCount,
    LastGeneration,
    Name,
    Offset,
    Output,
    Reason,
    Restarts,
    Seconds,
    Secret,
    Slot,
    Text,
    WorldSize,
)
from lighthouse_protocol.limits import MAX_RANKS_PER_HOST
from lighthouse_protocol.messages.incident import EvidenceAsked, SelfReport
from lighthouse_protocol.messages.progress import ProgressSample
from lighthouse_protocol.refusals import InvalidRequest, LighthouseError


@dataclass(frozen=True, slots=True, order=True)
class RankId:
    """Identity of a rank's process.

    The parts of an incarnation are separated by dots. Under a supervisor, the first part is the supervisor's
    incarnation, and the second part identifies the ranks that the supervisor starts and restarts together.
    """

    slot: Slot  # assigned by the supervisor, 0 to world_size - 1
    incarnation: Name  # new at each start of the process

    @property
    def supervisor(self) -> str:
        """Incarnation of the supervisor that started the process. Without a supervisor, the rank's own incarnation."""
        return self.incarnation.partition(".")[0]

    @property
    def is_supervised(self) -> bool:
        return self.supervisor != self.incarnation

    @property
    def unit(self) -> str:
        """Name shared by the ranks that restart together. Without a supervisor, the rank's own incarnation."""
        return self.incarnation.partition(".")[2].partition(".")[0] or self.incarnation

    def __str__(self) -> str:
        return f"slot {self.slot} ({self.incarnation})"


@dataclass(frozen=True, slots=True)
class RunTerms:
    """Settings of a run. All ranks in the run must send the same settings."""

    world_size: WorldSize = 1  # ranks, including spares
    active: WorldSize | None = None  # maximum number of ranks that train, the others are spares; None for all
    min_active: WorldSize = 1  # minimum number of active ranks in a generation
    divisible_by: WorldSize = 1  # the number of active ranks is a multiple of this
    hosts_together: bool = False  # if a host lacks one of its ranks, its other ranks are not active either
    stride: WorldSize = 1  # after a process restart, the next generation's number is a multiple of this
    join_timeout_s: Seconds = 60.0  # how long a generation waits for more ranks than `min_active`
    return_timeout_s: Seconds = 60.0  # how long the run waits for `min_active` ranks before it stops
    max_iterations: int | None = None  # maximum number of generations; None for no limit
    max_restarts: Restarts | None = None  # failures of the function allowed in `restart_window_s`; None for no limit
    restart_window_s: Seconds = 600.0
    restart_delay_s: Seconds | None = None  # after a generation without progress; doubles with each further one
    is_elastic: bool = False  # slots are assigned by the lighthouse, and any `active` ranks make a full generation

    def check(self) -> None:
        most = self.target // self.divisible_by * self.divisible_by
        if most < self.min_active:
            raise InvalidRequest(
                f"is {self.min_active}; at most {most} ranks can be active (world_size, active, divisible_by)",
                field="min_active",
            )

    @property
    def target(self) -> int:
        """Number of ranks that train if none is missing."""
        return self.world_size if self.active is None else min(self.active, self.world_size)


@dataclass(frozen=True, slots=True)
class RunCounters:
    number: LastGeneration = -1  # number of the newest generation, -1 before the first
    global_iteration: Count = 0  # number of the newest generation that began with a restarted process
    job_restarts: Count = 0  # number of incidents
    ranks_restarts: Count = 0  # incidents since that generation, all recovered without restarting a process


@dataclass(frozen=True, slots=True)
class Generation:
    """One attempt to run the user's function. `active[i]` is the process of rank i."""

    active: tuple[RankId, ...]
    counters: RunCounters

    @property
    def number(self) -> int:
        return self.counters.number


@dataclass(frozen=True, slots=True)
class RankHello:
    """First message from a rank on each connection. It repeats the rank's state, in case earlier messages were lost."""

    rank: RankId
    terms: RunTerms
    attempt: int = 0  # how many times the supervisor had started this rank before
    host: Text = ""
    pid: Count = 0
    generation: Count | None = None  # last generation in which this process was active
    is_ready: bool = False  # the process waits for the next generation
    seen: Count | None = None  # highest generation number that the rank or its supervisor has received
    step: Count = 0
    secret: Secret = field(default="", repr=False)  # from the supervisor; without one, generated by the process itself

    @property
    def is_first(self) -> bool:
        """True for the first process in a slot, until it or its supervisor has received a generation."""
        return self.attempt == 0 and self.seen is None and self.generation is None


@dataclass(frozen=True, slots=True)
class RunStopped:
    """Announces that the run has been stopped. It forms no new generation unless an operator resumes it."""

    reason: Reason
    who: Reason  # requester; empty for the lighthouse
    generation: LastGeneration  # newest generation at that time, -1 before the first

    @property
    def text(self) -> str:
        return f"{self.reason} (by {self.who or 'the lighthouse'})"


class KeyKind(StrEnum):
    """Kinds of keys that ranks set in a run. A key is identified by its generation, kind and name."""

    ITERATION = "iteration"
    JOB_RESTART = "job_restart"
    RANKS_RESTART = "ranks_restart"


class Key(NamedTuple):
    kind: KeyKind
    name: str
    value: bytes


class Keys(NamedTuple):
    """Keys in the key-value store that the ranks of a run share."""

    generation: LastGeneration  # current generation
    keys: tuple[Key, ...]


def check_kind(kind: str) -> KeyKind:
    try:
        return KeyKind(kind)
    except ValueError:
        raise InvalidRequest(f"is {kind!r}; {', '.join(KeyKind)} are known", field="kind") from None


# Messages on a rank's stream, after its hello.


@dataclass(frozen=True, slots=True)
class RankHeartbeat:
    step: Count = 0
    phase: Text = ""  # for display
    progress: Advisory[ProgressSample] = field(default=None, repr=False)  # None if unchanged


@dataclass(frozen=True, slots=True)
class ReadyReport:
    """Reports that the rank is not running the function and is ready for the next generation."""

    generation: Count | None = None  # last generation in which the rank was active


@dataclass(frozen=True, slots=True)
class FailureReport:
    generation: Count
    reason: Reason


@dataclass(frozen=True, slots=True)
class FinishReport:
    generation: Count


@dataclass(frozen=True, slots=True)
class CloseReport:
    """Request by a rank to end its elastic run for all ranks, even if some have not finished."""


FromRunRank = RankHello | RankHeartbeat | ReadyReport | FailureReport | FinishReport | CloseReport | SelfReport


@dataclass(frozen=True, slots=True)
class GenerationFormed:
    """Announces a new generation. All ranks receive the same message, so it is serialised once."""

    counters: RunCounters
    slots: tuple[int, ...]  # `slots[i]` is rank i; all other slots are spares


@dataclass(frozen=True, slots=True)
class GenerationEnded:
    """Order to stop running generation `number` and to send a ReadyReport."""

    number: Count
    reason: Reason = ""
    is_failure: bool = False  # a rank's function failed; otherwise a rank was lost or joined


@dataclass(frozen=True, slots=True)
class RunCompleted:
    """Announces that all ranks have finished generation `number`, which completes the run."""

    number: Count


@dataclass(frozen=True, slots=True)
class HelloRejected:
    error: LighthouseError


@dataclass(frozen=True, slots=True)
class RankWelcome:
    """Confirms that the lighthouse has accepted the rank's hello. Other messages may arrive earlier."""

    term: Count = 0  # grows with each start of the lighthouse; 0 without a journal


@dataclass(frozen=True, slots=True)
class SlotGiven:
    """Slot that the lighthouse assigned to a rank of an elastic run.

    This is the first message on the stream. It is omitted if the hello already named this slot.
    """

    slot: Slot


ToRunRank = (
    SlotGiven
    | RankWelcome
    | GenerationFormed
    | GenerationEnded
    | RunStopped
    | RunCompleted
    | HelloRejected
    | EvidenceAsked
)


# Messages of a supervisor, which starts and restarts the ranks on one host. Runs without wrapped functions have
# supervisors too: stopping a run stops every process with its run id.


@dataclass(frozen=True, slots=True)
class SupervisorHello:
    name: Name  # unique in the run: the replica group's id, plus /K for host K of several
    incarnation: Name
    host: Text = ""
    slots: Annotated[tuple[Slot, ...], EntryCount(MAX_RANKS_PER_HOST)] = ()  # of the ranks that it starts
    secret: Secret = field(default="", repr=False)  # random, made at the supervisor's start, shared with its ranks


@dataclass(frozen=True, slots=True)
class SupervisorHeartbeat:
    """Periodic report by a supervisor on its restarts and processes. Sending it also reveals a lost connection."""

    budget_used: Age = 0.0  # share of the restart budget, 0 to 1
    restarts: Count = 0  # since the start of the supervisor
    restarts_left: Count = 0  # restarts that the budget still allows, for the ranks with the fewest left
    running: Count = 0  # running processes of ranks


@dataclass(frozen=True, slots=True)
class ProcessLost:
    """Reports that a rank's process has exited."""

    rank: RankId
    reason: Reason
    output: Output = ()  # last lines written


@dataclass(frozen=True, slots=True)
class StopAsked:
    """Supervisor's request to stop the run: a rank exited with status 130, or the restart budget is exhausted."""

    reason: Reason


@dataclass(frozen=True, slots=True)
class HostExcluded:
    """Reports that a host's ranks will not restart: its hardware check failed, or they failed too often in a row."""

    reason: Reason


FromSupervisor = SupervisorHello | SupervisorHeartbeat | ProcessLost | StopAsked | HostExcluded


@dataclass(frozen=True, slots=True)
class SupervisorWelcome:
    """Permission for a supervisor to start its ranks. It is withheld if the run has stopped or the host is excluded."""

    beat_interval_s: Seconds


ToSupervisor = SupervisorWelcome | RunStopped | RunCompleted | HelloRejected


# Status of a run, for display and programs. Times are Unix seconds.


class RankState(StrEnum):
    ACTIVE = "active"
    READY = "ready"  # waits for the next generation
    SPARE = "spare"  # not in the current generation
    STARTING = "starting"  # connected but not ready
    FINISHED = "finished"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class RankStatus:
    slot: int
    start: str  # distinguishes incarnations without revealing them (rules/access.py)
    state: str  # a RankState, or an unknown state of a newer lighthouse
    rank: int | None  # in the last generation
    generation: Count | None
    step: Count
    phase: str
    beat_age_s: Offset
    attempt: int
    host: str
    pid: Count


@dataclass(frozen=True, slots=True)
class SupervisorStatus:
    name: str
    host: str
    slots: tuple[int, ...]
    is_connected: bool
    last: SupervisorHeartbeat = field(default_factory=SupervisorHeartbeat)


@dataclass(frozen=True, slots=True)
class ExcludedHost:
    """A host whose ranks the run no longer admits, for example after a failed hardware check."""

    host: str
    reason: str
    at: Offset
    supervisor: str = ""  # the only supervisor affected; empty for all on the host


@dataclass(frozen=True, slots=True)
class RunStatus:
    job: str
    run: str
    verdict: str  # why the next generation can or cannot form
    counters: RunCounters
    terms: RunTerms
    slots: tuple[int, ...]  # `slots[i]` is rank i of the last generation
    is_complete: bool
    stop: RunStopped | None
    ranks: tuple[RankStatus, ...]
    supervisors: tuple[SupervisorStatus, ...]
    excluded: tuple[ExcludedHost, ...]
    budget_used: Offset = 0.0  # used share of the restart budget closest to exhaustion, 0 to 1
