"""Where a rank is and since when: what it says of itself, and what is made of that on the way up. No protobuf.

Nobody shares a clock: all times are ages in seconds, as of the moment at which a sample was taken or a view was made.
"""

from dataclasses import dataclass
from typing import NamedTuple

STEP = "step"
"""The phase that a rank is in outside of every phase that its script names."""

MAX_NAMES = 64
MAX_DEPTH = 16
MAX_NAME_CHARS = 64
MAX_LABEL_CHARS = 128

OTHER = "(other)"
"""Stands for every phase beyond those that are counted by their names."""


@dataclass(frozen=True, slots=True)
class OpenPhase:
    """`done` counts its ticks, `total` is how many there will be; None: not told."""

    name: str
    done: int = 0
    total: int | None = None
    open_s: float = 0.0

    def __str__(self) -> str:
        if self.total is not None:
            return f"{self.name} {self.done}/{self.total}"
        return f"{self.name} {self.done}" if self.done else self.name


@dataclass(frozen=True, slots=True)
class Collective:
    """The newest one that the rank has entered. `number` counts those under `quorum_id`, from 1; between two of them
    `inner` counts those that only the ranks of the group have: how many these are, is each group's own affair."""

    quorum_id: int
    number: int
    operation: str
    shape: str = ""
    is_inside: bool = True
    within_group: bool = False
    inner: int = 0

    @property
    def order(self) -> tuple[int, int, int]:
        return (self.quorum_id, self.number, self.inner)


@dataclass(frozen=True, slots=True)
class PhaseTime:
    """All visits of a phase that are over: `seconds` of its own, without the phases and waits inside it. `longest_s`:
    the longest time without a mark that has ended."""

    name: str
    visits: int
    seconds: float
    longest_s: float


@dataclass(frozen=True, slots=True)
class Sample:
    """Where a rank is. `phases` are the open ones, the innermost last.

    `entered`: how often each phase was entered in this step. `waits_for`: what its script has declared to wait for.
    `still_s`: since the last mark. `is_first`: this process has not done a step yet.
    """

    step: int = 0
    phases: tuple[OpenPhase, ...] = (OpenPhase(STEP),)
    entered: tuple[tuple[str, int], ...] = ()
    collective: Collective | None = None
    waits_for: str = ""
    still_s: float = 0.0
    is_first: bool = False
    times: tuple[PhaseTime, ...] = ()

    @property
    def innermost(self) -> OpenPhase:
        return self.phases[-1]

    @property
    def is_inside(self) -> bool:
        """It is in a collective."""
        return self.collective is not None and self.collective.is_inside


class RankName(NamedTuple):
    """`replica_id` is empty where only one group is spoken of."""

    replica_id: str
    group_rank: int

    def __str__(self) -> str:
        return f"{self.replica_id}/{self.group_rank}" if self.replica_id else str(self.group_rank)


@dataclass(frozen=True, slots=True)
class RankView:
    """A rank as somebody else sees it. `limit_s`: how long it may be without a mark where it is."""

    name: RankName
    sample: Sample
    limit_s: float
    beat_age_s: float = 0.0
    worker: str = ""
    host: str = ""
    pid: int = 0

    @property
    def progress_age_s(self) -> float:
        """How long it has not moved, for all that is known."""
        return self.sample.still_s + self.beat_age_s

    @property
    def is_running(self) -> bool:
        """It waits for nobody, as far as it says."""
        return not self.sample.is_inside and not self.sample.waits_for

    def aged(self, by_s: float) -> "RankView":
        beat_age_s = self.beat_age_s + by_s  # not by replace: thousands are aged at a time
        return RankView(self.name, self.sample, self.limit_s, beat_age_s, self.worker, self.host, self.pid)


@dataclass(frozen=True, slots=True)
class GroupView:
    """The ranks of one replica group, as its manager sees them; `seconds`: own time per phase, over all its ranks."""

    replica_id: str
    incarnation: str
    ranks: tuple[RankView, ...]
    seconds: tuple[tuple[str, float], ...] = ()
