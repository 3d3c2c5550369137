"""Where a rank is and since when: what it says of itself, and what is made of that on the way up. No protobuf.

Nobody shares a clock: all times are ages in seconds, as of the moment at which a sample was taken or a view was made.
"""

from dataclasses import dataclass, replace
from typing import Annotated, NamedTuple

from lighthouse_protocol.constraints import (
    Advisory,
    Age,
    Chars,
    Count,
    Entries,
    GroupRank,
    Name,
    QuorumId,
    Reason,
    Text,
)
from lighthouse_protocol.limits import MAX_GROUP_WORLD_SIZE
from lighthouse_protocol.refusals import InvalidRequest

STEP = "step"
"""The phase that a rank is in outside of every phase that its script names."""
HEAL = "heal"
"""The phase of a rank that receives the state of a peer, and whose step waits for it."""

MAX_NAMES = 64
MAX_DEPTH = 16
MAX_GROUPS = 16
MAX_BEFORE = 8
MAX_NAME_CHARS = 64
MAX_LABEL_CHARS = 128
MAX_TIMES = MAX_NAMES + 2  # with what stands for all waits, and for all further names
MAX_SUMS = 4 * MAX_TIMES

OTHER = "(other)"
"""Stands for every phase beyond those that are counted by their names."""

PhaseName = Annotated[str, Chars(MAX_NAME_CHARS)]


@dataclass(frozen=True, slots=True)
class OpenPhase:
    """`done` counts its ticks, `total` is how many there will be; None: not told."""

    name: PhaseName
    done: Count = 0
    total: Count | None = None
    open_s: Age = 0.0

    def __str__(self) -> str:
        if self.total is not None:
            return f"{self.name} {self.done}/{self.total}"
        return f"{self.name} {self.done}" if self.done else self.name


@dataclass(frozen=True, slots=True)
class Collective:
    """The newest one that the rank has entered. `number` counts those under `quorum_id`, from 1; between two of them
    `inner` counts those that only the ranks of the group have: how many these are, is each group's own affair."""

    quorum_id: QuorumId
    number: Count
    operation: PhaseName
    shape: Annotated[str, Chars(MAX_LABEL_CHARS)] = ""
    is_inside: bool = True
    within_group: bool = False
    inner: Count = 0

    @property
    def order(self) -> tuple[int, int, int]:
        return (self.quorum_id, self.number, self.inner)


@dataclass(frozen=True, slots=True)
class GroupCalls:
    """The collectives that the rank has entered in one process group of its script. `is_inside`: one of them goes on;
    `operation` and `shape` are the newest one's, empty where they are not known. `before`: operations that were entered
    just before it and go on, too, the newest last."""

    group: PhaseName
    entered: Count
    is_inside: bool = False
    operation: PhaseName = ""
    shape: Annotated[str, Chars(MAX_LABEL_CHARS)] = ""
    before: Annotated[tuple[PhaseName, ...], Entries(MAX_BEFORE)] = ()


@dataclass(frozen=True, slots=True)
class PhaseTime:
    """All visits of a phase that are over: `seconds` of its own, without the phases and waits inside it. `longest_s`:
    the longest time without a mark that has ended."""

    name: PhaseName
    visits: Count
    seconds: Age
    longest_s: Age


class PhaseCount(NamedTuple):
    """How often a phase was entered in this step."""

    name: PhaseName
    entered: Count


class PhaseSeconds(NamedTuple):
    """Own time of a phase, over all ranks that the manager has seen."""

    name: PhaseName
    seconds: Age


@dataclass(frozen=True, slots=True)
class HealTotals:
    """All heals of a process, or of a replica group; each number only grows. `seconds`: from the first request for each
    state until it was received and checked; `bytes`: of the tensors of these states."""

    heals: Count = 0
    seconds: Age = 0.0
    bytes: Count = 0


@dataclass(frozen=True, slots=True)
class HealProgress:
    """A heal of one process: the state of `step` from the replica group `source`. `number` counts those that the
    process has begun, from 1. `received` of `total` bytes of the encoded state are here; None: the source has not said
    yet. `seconds`: since the first request, until now or its end. `is_over`: all is received and checked."""

    number: Count
    source: Annotated[str, Chars(MAX_LABEL_CHARS)]
    step: Count
    received: Count = 0
    total: Count | None = None
    seconds: Age = 0.0
    is_over: bool = False


@dataclass(frozen=True, slots=True)
class RejectedStep:
    """A step that was discarded because gradients were not finite. `is_own`: they were this rank's."""

    step: Count
    reason: Reason
    is_own: bool = False


@dataclass(frozen=True, slots=True)
class DataUse:
    """How many samples the committed steps of all groups have used of a data set of `length`. `irregular_steps`: those
    of this rank with batches that were drawn under another quorum, or not drawn. `is_exact`: each sample was used once
    per epoch."""

    length: Count
    samples: Count
    irregular_steps: Count = 0
    is_exact: bool = True

    def __str__(self) -> str:
        epoch, position = divmod(self.samples, max(1, self.length))
        used = f"{position:,} of {self.length:,} samples used in epoch {epoch}"
        if self.is_exact:
            return f"{used}, each sample once per epoch"
        why = f"{self.irregular_steps} steps with other batches" if self.irregular_steps else "the sampler has changed"
        return f"{used}, not each sample once per epoch: {why}"


@dataclass(frozen=True, slots=True)
class ProgressSample:
    """Where a rank is. `phases` are the open ones, the innermost last.

    `waits_for`: what its script has declared to wait for. `still_s`: since the last mark. `is_first`: this process has
    not done a step yet. `calls`: of the process groups that moved last. `at`: the line of the script, for a rank that
    is observed and has no Agent. `healed`: None for a process that has never healed. `heal`: one that goes on, or has
    just ended well. `rejected`: a step, a short while ago. `data`: None where no sampler of ours has drawn a batch.
    """

    step: Count = 0
    phases: Annotated[tuple[OpenPhase, ...], Entries(MAX_DEPTH, least=1)] = (OpenPhase(STEP),)
    entered: Annotated[tuple[PhaseCount, ...], Entries(MAX_NAMES)] = ()
    collective: Collective | None = None
    waits_for: PhaseName = ""
    still_s: Age = 0.0
    is_first: bool = False
    times: Annotated[tuple[PhaseTime, ...], Entries(MAX_TIMES)] = ()
    calls: Annotated[tuple[GroupCalls, ...], Entries(MAX_GROUPS)] = ()
    at: Annotated[str, Chars(MAX_LABEL_CHARS)] = ""
    healed: Advisory[HealTotals] = None
    heal: Advisory[HealProgress] = None
    rejected: Advisory[RejectedStep] = None
    data: Advisory[DataUse] = None

    @property
    def innermost(self) -> OpenPhase:
        return self.phases[-1]

    @property
    def inside(self) -> Collective | GroupCalls | None:
        """The collective that it is in."""
        if self.collective is not None and self.collective.is_inside:
            return self.collective
        return next((calls for calls in self.calls if calls.is_inside), None)

    @property
    def is_inside(self) -> bool:
        return self.inside is not None


class RankName(NamedTuple):
    """`replica_id` is empty where only one group is spoken of."""

    replica_id: Text
    group_rank: GroupRank

    def __str__(self) -> str:
        return f"{self.replica_id}/{self.group_rank}" if self.replica_id else str(self.group_rank)


@dataclass(frozen=True, slots=True)
class RankView:
    """A rank as somebody else sees it. `limit_s`: how long it may be without a mark where it is."""

    name: RankName
    sample: ProgressSample
    limit_s: Age
    beat_age_s: Age = 0.0
    rank_incarnation: Text = ""
    host: Text = ""
    pid: Count = 0

    @property
    def process(self) -> tuple[str, int] | None:
        """What is told of one process from two sides is told of one rank."""
        return (self.host, self.pid) if self.pid else None

    @property
    def progress_age_s(self) -> float:
        """How long it has not moved, for all that is known."""
        return self.sample.still_s + self.beat_age_s

    @property
    def is_running(self) -> bool:
        """It waits for nobody, as far as it says."""
        return not self.sample.is_inside and not self.sample.waits_for

    def aged(self, by_s: float, still_by_s: float = 0.0) -> "RankView":
        """`by_s` longer since its last beat, and `still_by_s` longer from its last mark to that beat."""
        beat_age_s = self.beat_age_s + by_s  # not by replace: thousands are aged at a time
        sample = replace(self.sample, still_s=self.sample.still_s + still_by_s) if still_by_s else self.sample
        return RankView(self.name, sample, self.limit_s, beat_age_s, self.rank_incarnation, self.host, self.pid)


@dataclass(frozen=True, slots=True)
class GroupView:
    """The ranks of one replica group, as its manager sees them; `seconds`: own time per phase, over all its ranks."""

    replica_id: Name
    incarnation: Text
    ranks: Annotated[tuple[RankView, ...], Entries(MAX_GROUP_WORLD_SIZE)]
    seconds: Annotated[tuple[PhaseSeconds, ...], Entries(MAX_SUMS)] = ()
    group_world_size: Count = 0

    @property
    def is_observed(self) -> bool:
        """Its ranks have no Agents."""
        return bool(self.ranks) and all(rank.sample.at for rank in self.ranks)

    def check(self) -> None:
        names = {rank.name for rank in self.ranks}
        if len(names) < len(self.ranks):
            raise InvalidRequest("names a rank twice", field="ranks")
        if any(name.replica_id != self.replica_id for name in names):
            raise InvalidRequest(f"names a rank of another group than {self.replica_id}", field="ranks")
