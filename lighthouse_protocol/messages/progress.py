"""Progress of ranks: the samples that ranks send, and the views and statuses derived from them.

All times are in seconds. They are durations, or ages at the time when the sample or view was created, so the hosts'
clocks need not agree.
"""

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Annotated, NamedTuple

from lighthouse_protocol.constraints import (
    Advisory,
    Age,
    Count,
    EntryCount,
    GroupRank,
    MaxChars,
    Name,
    Offset,
    QuorumId,
    Reason,
    Text,
)
from lighthouse_protocol.limits import MAX_GROUP_WORLD_SIZE
from lighthouse_protocol.refusals import InvalidRequest

STEP = "step"  # phase of a rank outside of all phases that its script names
HEAL = "heal"  # phase of a rank that receives a peer's state while its step waits

MAX_NAMES = 64
MAX_DEPTH = 16
MAX_GROUPS = 16
MAX_BEFORE = 8
MAX_NAME_CHARS = 64
MAX_LABEL_CHARS = 128
MAX_TIMES = MAX_NAMES + 2  # one entry for all waits and one for all further names
MAX_SUMS = 4 * MAX_TIMES

OTHER = "(other)"  # sum of all phases without their own entry

PhaseName = Annotated[str, MaxChars(MAX_NAME_CHARS)]


@dataclass(frozen=True, slots=True)
class OpenPhase:
    """A phase of training that a rank has entered and not left, for example validation."""

    name: PhaseName
    done: Count = 0  # ticks so far
    total: Count | None = None  # expected ticks, None if unknown
    open_s: Age = 0.0

    def __str__(self) -> str:
        if self.total is not None:
            return f"{self.name} {self.done}/{self.total}"
        return f"{self.name} {self.done}" if self.done else self.name


@dataclass(frozen=True, slots=True)
class Collective:
    """The most recent collective that a rank has entered."""

    quorum_id: QuorumId
    number: Count  # counts the collectives under `quorum_id`, from 1
    operation: PhaseName
    shape: Annotated[str, MaxChars(MAX_LABEL_CHARS)] = ""
    is_inside: bool = True
    within_group: bool = False
    inner: Count = 0  # counts the group's internal collectives since `number`; differs between groups

    @property
    def order(self) -> tuple[int, int, int]:
        return (self.quorum_id, self.number, self.inner)


@dataclass(frozen=True, slots=True)
class GroupCalls:
    """Number of collectives that a rank has entered in a process group of its script, and the most recent one."""

    group: PhaseName
    entered: Count
    is_inside: bool = False  # one of them has not finished
    operation: PhaseName = ""  # most recent operation, empty if unknown
    shape: Annotated[str, MaxChars(MAX_LABEL_CHARS)] = ""  # its shape, empty if unknown
    # Unfinished operations that were entered before the most recent one, oldest first.
    before: Annotated[tuple[PhaseName, ...], EntryCount(MAX_BEFORE)] = ()


@dataclass(frozen=True, slots=True)
class PhaseTime:
    """Total time that a rank has spent in a phase."""

    name: PhaseName
    visits: Count
    seconds: Age  # excluding inner phases and waits
    longest_s: Age  # longest completed time without progress


class PhaseCount(NamedTuple):
    """Number of times that a rank has entered a phase in its current step."""

    name: PhaseName
    entered: Count


class PhaseSeconds(NamedTuple):
    """Time in a phase, excluding inner phases, summed over all past and present ranks of a manager."""

    name: PhaseName
    seconds: Age


@dataclass(frozen=True, slots=True)
class HealTotals:
    """Totals over all heals of a process or of a replica group. They never decrease."""

    heals: Count = 0
    seconds: Age = 0.0  # between the first request for a state and its verification
    bytes: Count = 0  # size of the received tensors


@dataclass(frozen=True, slots=True)
class HealProgress:
    """Progress of a heal, in which a process receives the state of a peer."""

    number: Count  # counts the heals that this process has begun, from 1
    source: Annotated[str, MaxChars(MAX_LABEL_CHARS)]  # replica group that sends the state
    step: Count  # step of the state
    received: Count = 0  # bytes of the encoded state
    total: Count | None = None  # bytes of the encoded state, None if the source has not sent its size yet
    seconds: Age = 0.0  # since the first request, until now or the end
    is_over: bool = False  # the state is received and verified


@dataclass(frozen=True, slots=True)
class ComputeTotals:
    """Compute time that a process has measured over its committed steps. The totals never decrease."""

    seconds: Age = 0.0  # without waits for other ranks
    microbatches: Count = 0  # computed in this time; one per step, except with `constant_batch`


@dataclass(frozen=True, slots=True)
class RejectedStep:
    """A step that was discarded because gradients were not finite."""

    step: Count
    reason: Reason
    is_own: bool = False  # the gradients belong to this rank


@dataclass(frozen=True, slots=True)
class DataUse:
    """Number of samples from a data set that the committed steps of all groups have used."""

    length: Count  # number of samples in the data set
    samples: Count  # number of samples used so far, over all epochs
    irregular_steps: Count = 0  # this rank's steps with batches drawn under another quorum, or not drawn by the sampler
    is_exact: bool = True  # each sample was used once per epoch

    def __str__(self) -> str:
        epoch, position = divmod(self.samples, max(1, self.length))
        used = f"{position:,} of {self.length:,} samples used in epoch {epoch}"
        if self.is_exact:
            return f"{used}, each sample once per epoch"
        why = f"{self.irregular_steps} steps with other batches" if self.irregular_steps else "the sampler has changed"
        return f"{used}, not each sample once per epoch: {why}"


@dataclass(frozen=True, slots=True)
class StateDigest:
    """Digest of a part of a rank's state, which the rank has compared with its peers."""

    step: Count
    quorum_id: QuorumId
    digest: Text


@dataclass(frozen=True, slots=True)
class ProgressSample:
    """A rank's report on its progress: step, open phases, most recent collectives and times."""

    step: Count = 0
    # Open phases, the innermost last.
    phases: Annotated[tuple[OpenPhase, ...], EntryCount(MAX_DEPTH, least=1)] = (OpenPhase(STEP),)
    entered: Annotated[tuple[PhaseCount, ...], EntryCount(MAX_NAMES)] = ()
    collective: Collective | None = None
    waits_for: PhaseName = ""  # wait that the script has declared
    still_s: Age = 0.0  # since the last sign of progress
    is_first: bool = False  # this process has not finished a step yet
    times: Annotated[tuple[PhaseTime, ...], EntryCount(MAX_TIMES)] = ()
    calls: Annotated[tuple[GroupCalls, ...], EntryCount(MAX_GROUPS)] = ()  # by process group, only the most recent ones
    at: Annotated[str, MaxChars(MAX_LABEL_CHARS)] = ""  # line of the script, for an observed rank without an Agent
    healed: Advisory[HealTotals] = None  # None for a process that has never healed
    heal: Advisory[HealProgress] = None  # current heal, or one that has just succeeded
    rejected: Advisory[RejectedStep] = None  # recently discarded step
    data: Advisory[DataUse] = None  # None unless our sampler has drawn a batch
    compared: Advisory[StateDigest] = None  # newest comparison, None before the first
    computed: Advisory[ComputeTotals] = None  # None before the first measured step

    @property
    def innermost(self) -> OpenPhase:
        return self.phases[-1]

    @property
    def inside(self) -> Collective | GroupCalls | None:
        """The collective that the rank has entered and not left, or None."""
        if self.collective is not None and self.collective.is_inside:
            return self.collective
        return next((calls for calls in self.calls if calls.is_inside), None)

    @property
    def is_inside(self) -> bool:
        return self.inside is not None


class RankName(NamedTuple):
    """Name of a rank. `replica_id` is empty if all ranks in question belong to one group."""

    replica_id: Text
    group_rank: GroupRank

    def __str__(self) -> str:
        return f"{self.replica_id}/{self.group_rank}" if self.replica_id else str(self.group_rank)


@dataclass(frozen=True, slots=True)
class RankView:
    """Progress of a rank, as known to its manager or the lighthouse."""

    name: RankName
    sample: ProgressSample
    limit_s: Age  # allowed time without progress at this place
    beat_age_s: Age = 0.0
    rank_incarnation: Text = ""
    host: Text = ""
    pid: Count = 0

    @property
    def process(self) -> tuple[str, int] | None:
        """Host and pid, or None if the pid is unknown. Two reports with equal values are about the same process."""
        return (self.host, self.pid) if self.pid else None

    @property
    def progress_age_s(self) -> float:
        """Seconds since the last known progress of the rank."""
        return self.sample.still_s + self.beat_age_s

    @property
    def is_running(self) -> bool:
        """True if the rank is neither in a collective nor in a wait that its script has declared."""
        return not self.sample.is_inside and not self.sample.waits_for

    def aged(self, by_s: float, still_by_s: float = 0.0) -> "RankView":
        """Return a copy with seconds added to its ages, or subtracted if negative.

        Args:
            by_s: Seconds to add to the age of the last heartbeat.
            still_by_s: Seconds to add to the time without progress before that heartbeat.
        """
        beat_age_s = self.beat_age_s + by_s  # dataclasses.replace() is too slow for thousands of ranks
        sample = replace(self.sample, still_s=self.sample.still_s + still_by_s) if still_by_s else self.sample
        return RankView(self.name, sample, self.limit_s, beat_age_s, self.rank_incarnation, self.host, self.pid)


@dataclass(frozen=True, slots=True)
class GroupView:
    """Progress of all ranks in a replica group, as known to their manager."""

    replica_id: Name
    incarnation: Text
    ranks: Annotated[tuple[RankView, ...], EntryCount(MAX_GROUP_WORLD_SIZE)]
    seconds: Annotated[tuple[PhaseSeconds, ...], EntryCount(MAX_SUMS)] = ()  # summed over all ranks
    group_world_size: Count = 0

    @property
    def is_observed(self) -> bool:
        """True if no rank has an Agent, so their progress is observed from outside the script."""
        return bool(self.ranks) and all(rank.sample.at for rank in self.ranks)

    def check(self) -> None:
        names = {rank.name for rank in self.ranks}
        if len(names) < len(self.ranks):
            raise InvalidRequest("names a rank twice", field="ranks")
        if any(name.replica_id != self.replica_id for name in names):
            raise InvalidRequest(f"names a rank of another group than {self.replica_id}", field="ranks")


# Progress of a rank in the status of its job.


class RankState(StrEnum):
    """State of a rank. The members are ordered from worst to best."""

    BEHIND = "behind"  # furthest behind during a stall
    LOST = "lost"  # the replica group or the process is not alive
    WAITING = "waiting"  # in a collective, or in a wait that its script has declared
    RUNNING = "running"
    SPARE = "spare"  # not active in the current generation of its run


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Status of a rank: its step, phase and most recent collective."""

    replica_id: str  # or the run, for a rank of a run
    group_rank: int  # or the slot, for a rank of a run
    state: RankState
    step: int
    phase: str  # the innermost
    done: int  # ticks of the phase
    total: int | None  # expected ticks, None if unknown
    phase_s: Offset
    collective: str  # most recent collective that the rank has entered
    is_inside: bool
    waits_for: str
    beat_age_s: Offset
    progress_age_s: Offset
    limit_s: Offset  # allowed time without progress at this place
    host: str
    pid: int
    generation: int | None = None  # last generation in which a run's rank was active
    at: str = ""  # line of a script without an Agent
    compared: StateDigest | None = None  # newest state that was compared with the peers
    compute_ratio_1m: Age | None = None  # compute time divided by its peers' median, over the last minute
    compute_ratio_10m: Age | None = None  # the same, over the last 10 minutes
    is_slow: bool = False  # the ratio has been high for `--slow-after`
