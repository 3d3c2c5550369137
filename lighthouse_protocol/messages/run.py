"""What a rank and the lighthouse say about generations: who a rank is, which generation it is in. No protobuf.

A generation is one attempt to run a job's function: a number that is never given out twice, and one list of ranks.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, NamedTuple

from lighthouse_protocol.constraints import (
    Advisory,
    Age,
    Count,
    Entries,
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
    """`slot` is the supervisor's, 0 to world_size - 1; `incarnation` is new at each start of the process.

    It begins with that of the supervisor that started the process; without one, with the process's own. What follows
    between dots names what was started together and is restarted together.
    """

    slot: Slot
    incarnation: Name

    @property
    def supervisor(self) -> str:
        """The incarnation of the one that started it; its own, if nobody did."""
        return self.incarnation.partition(".")[0]

    @property
    def is_supervised(self) -> bool:
        return self.supervisor != self.incarnation

    @property
    def unit(self) -> str:
        """Shared with the ranks that are restarted when this one dies; its own, if no supervisor started it."""
        return self.incarnation.partition(".")[2].partition(".")[0] or self.incarnation

    def __str__(self) -> str:
        return f"slot {self.slot} ({self.incarnation})"


@dataclass(frozen=True, slots=True)
class RunTerms:
    """What all ranks of a run agree on.

    `active`: so many train and the others are spares; None: all. `stride`: a restarted process begins at the next
    multiple of it; 1 without a supervisor. `max_iterations`: so many generations, then the run is stopped.
    `max_restarts`: so many after failures of the function within `restart_window_s`; None: any number.
    `restart_delay_s`: how long the next generation waits after one that got nowhere; it doubles each time in a row.
    None: no delay. `is_elastic`: slots mean nothing, and the lighthouse gives each rank one that is free. Any `active`
    ranks are all; any `min_active` are enough, `join_timeout_s` after so many are ready.
    """

    world_size: WorldSize = 1
    active: WorldSize | None = None
    min_active: WorldSize = 1
    divisible_by: WorldSize = 1
    hosts_together: bool = False
    stride: WorldSize = 1
    join_timeout_s: Seconds = 60.0
    return_timeout_s: Seconds = 60.0
    max_iterations: int | None = None
    max_restarts: Restarts | None = None
    restart_window_s: Seconds = 600.0
    restart_delay_s: Seconds | None = None
    is_elastic: bool = False

    def check(self) -> None:
        most = self.target // self.divisible_by * self.divisible_by
        if most < self.min_active:
            raise InvalidRequest(
                f"is {self.min_active}; at most {most} ranks can be active (world_size, active, divisible_by)",
                field="min_active",
            )

    @property
    def target(self) -> int:
        """How many train when all are there."""
        return self.world_size if self.active is None else min(self.active, self.world_size)


@dataclass(frozen=True, slots=True)
class RunCounters:
    """Restart counters of a run. `number` is that of the generation, -1 before the first.

    `global_iteration` is the number of the last generation that a restarted process began. `job_restarts` counts
    incidents, `ranks_restarts` those that were recovered in the process since.
    """

    number: LastGeneration = -1
    global_iteration: Count = 0
    job_restarts: Count = 0
    ranks_restarts: Count = 0


@dataclass(frozen=True, slots=True)
class Generation:
    """`active[i]` is rank i. It never changes; another list is another generation."""

    active: tuple[RankId, ...]
    counters: RunCounters

    @property
    def number(self) -> int:
        return self.counters.number

    def place(self, rank: RankId) -> int | None:
        """What is RANK for it; None: it is a spare."""
        return self.active.index(rank) if rank in self.active else None


@dataclass(frozen=True, slots=True)
class RankHello:
    """How a rank comes, and comes back. What it holds is repeated, so that no message must arrive.

    `attempt` counts the starts by its supervisor, from 0. `generation`: the last one in which this process was active.
    `is_ready`: it runs nothing and waits for the next. `seen`: the highest number that it or its supervisor was told.
    `secret`: its supervisor's; without one, made by the process, which no other one knows.
    """

    rank: RankId
    terms: RunTerms
    attempt: int = 0
    host: Text = ""
    pid: Count = 0
    generation: Count | None = None
    is_ready: bool = False
    seen: Count | None = None
    step: Count = 0
    secret: Secret = field(default="", repr=False)

    @property
    def is_first(self) -> bool:
        """A supervisor's first process of this slot, that knows of no generation."""
        return self.attempt == 0 and self.seen is None and self.generation is None


@dataclass(frozen=True, slots=True)
class RunStopped:
    """The run is over and restarts nothing. `who` asked for it; empty: the lighthouse. `generation`: the number at that
    time, -1 before the first."""

    reason: Reason
    who: Reason
    generation: LastGeneration

    @property
    def text(self) -> str:
        return f"{self.reason} (by {self.who or 'the lighthouse'})"


class KeyKind(StrEnum):
    """Key spaces of a run."""

    ITERATION = "iteration"
    JOB_RESTART = "job_restart"
    RANKS_RESTART = "ranks_restart"


class Key(NamedTuple):
    kind: KeyKind
    name: str
    value: bytes


class Keys(NamedTuple):
    """Of a run, whose present generation is `generation`."""

    generation: LastGeneration
    keys: tuple[Key, ...]


def check_kind(kind: str) -> KeyKind:
    try:
        return KeyKind(kind)
    except ValueError:
        raise InvalidRequest(f"is {kind!r}; {', '.join(KeyKind)} are known", field="kind") from None


# -- on a rank's stream, after its hello


@dataclass(frozen=True, slots=True)
class RankHeartbeat:
    """A sign of life. `phase` is for people; `progress` is where its function is, None: as it was told before."""

    step: Count = 0
    phase: Text = ""
    progress: Advisory[ProgressSample] = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class ReadyReport:
    """It runs nothing, and waits. `generation`: the one that it leaves, the last in which it was active."""

    generation: Count | None = None


@dataclass(frozen=True, slots=True)
class FailureReport:
    generation: Count
    reason: Reason


@dataclass(frozen=True, slots=True)
class FinishReport:
    generation: Count


@dataclass(frozen=True, slots=True)
class CloseReport:
    """Of an elastic run: it is over for all its ranks, finished or not."""


FromRunRank = RankHello | RankHeartbeat | ReadyReport | FailureReport | FinishReport | CloseReport | SelfReport


@dataclass(frozen=True, slots=True)
class GenerationFormed:
    """`slots[i]` is rank i; who is not in it is a spare. The same for all, so that it is serialised once."""

    counters: RunCounters
    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GenerationEnded:
    """Order to stop generation `number` and report ready. `is_failure`: a rank reported that its function failed;
    otherwise a rank was lost or joined."""

    number: Count
    reason: Reason = ""
    is_failure: bool = False


@dataclass(frozen=True, slots=True)
class RunCompleted:
    """All have finished generation `number`."""

    number: Count


@dataclass(frozen=True, slots=True)
class HelloRejected:
    error: LighthouseError


@dataclass(frozen=True, slots=True)
class RankWelcome:
    """The hello was taken; who runs is told nothing else for long. All else may come before it. `term` grows with each
    life of the lighthouse; 0: it keeps no journal."""

    term: Count = 0


@dataclass(frozen=True, slots=True)
class SlotGiven:
    """The slot of a rank of an elastic run, where its hello named another. It comes before all else."""

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


# -- supervisor ---------------------------------------------------------------
#
# What a supervisor, who starts and restarts the ranks of one host, and the lighthouse say to each other. No protobuf.
#
# Not only runs of wrapped functions have supervisors: the stop of a run holds for all who share its run id.


@dataclass(frozen=True, slots=True)
class SupervisorHello:
    """`name`: in its run: the replica group's id, with /K for host K of several. `slots`: of the ranks it starts.
    `secret`: random, made by this start of the supervisor, and known to its ranks."""

    name: Name
    incarnation: Name
    host: Text = ""
    slots: Annotated[tuple[Slot, ...], Entries(MAX_RANKS_PER_HOST)] = ()
    secret: Secret = field(default="", repr=False)


@dataclass(frozen=True, slots=True)
class SupervisorHeartbeat:
    """Sent while the supervisor runs, so that a connection that has died without a close is noticed.

    Attributes:
        budget_used: Share of the restart budget that is used up, from 0 to 1.
        restarts: Restarts since the supervisor was started.
        restarts_left: Restarts that the budget still allows now, of the ranks that have the fewest.
        running: Processes of ranks that are running.
    """

    budget_used: Age = 0.0
    restarts: Count = 0
    restarts_left: Count = 0
    running: Count = 0


@dataclass(frozen=True, slots=True)
class ProcessLost:
    """A rank's process has ended. `output`: the last lines that it wrote."""

    rank: RankId
    reason: Reason
    output: Output = ()


@dataclass(frozen=True, slots=True)
class StopAsked:
    """The run shall stop for all: an exit by 130, an exhausted budget."""

    reason: Reason


@dataclass(frozen=True, slots=True)
class HostExcluded:
    """This host's hardware has failed its check, or its ranks too often in a row: none of it comes back."""

    reason: Reason


FromSupervisor = SupervisorHello | SupervisorHeartbeat | ProcessLost | StopAsked | HostExcluded


@dataclass(frozen=True, slots=True)
class SupervisorWelcome:
    """The run is not stopped, and this host is not excluded: start."""

    beat_interval_s: Seconds


ToSupervisor = SupervisorWelcome | RunStopped | RunCompleted | HelloRejected


# -- run status ---------------------------------------------------------------
#
# What the lighthouse says of a run, for people and programs. Moments are wall-clock seconds. No protobuf.


class RankState(StrEnum):
    ACTIVE = "active"
    READY = "ready"  # waits for the next generation
    SPARE = "spare"  # of the present one
    STARTING = "starting"  # is here, and not ready
    FINISHED = "finished"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class RankStatus:
    """`state`: a RankState, or one that only a newer lighthouse knows. `rank`: in the last generation; None: none.
    `start`: another one for each incarnation (rules/proof.py)."""

    slot: int
    start: str
    state: str
    rank: int | None
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
    """`supervisor`: the only one that it is excluded for; empty: for all."""

    host: str
    reason: str
    at: Offset
    supervisor: str = ""


@dataclass(frozen=True, slots=True)
class RunStatus:
    """`verdict`: why the next generation forms, or does not. `slots[i]` is rank i of the last one. `budget_used`:
    of the restart budget that is used up the most, be it a supervisor's or that of wrapped functions: 0 none, 1 all."""

    job: str
    run: str
    verdict: str
    counters: RunCounters
    terms: RunTerms
    slots: tuple[int, ...]
    is_complete: bool
    stop: RunStopped | None
    ranks: tuple[RankStatus, ...]
    supervisors: tuple[SupervisorStatus, ...]
    excluded: tuple[ExcludedHost, ...]
    budget_used: Offset = 0.0
