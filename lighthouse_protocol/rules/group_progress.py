"""Where the ranks of a group are, how long each may be there, and whether they stall. No I/O.

A manager keeps this of its ranks, the lighthouse of a run's.

Samples tell ages, so no clock is shared: from its arrival on a sample ages by its reader's own. What a phase takes is
learned from all ranks together: one that has validated knows how long the others may. A first step teaches nothing, and
neither does a time that was over its limit. A rank that is lost is dropped with its open phases. Whoever keeps this
says when it was held up itself: no rank is older by that time.
"""

from dataclasses import dataclass, replace

from lighthouse_protocol.messages.progress import (
    MAX_NAMES,
    OTHER,
    GroupView,
    PhaseSeconds,
    PhaseTime,
    ProgressSample,
    RankName,
    RankView,
)
from lighthouse_protocol.rules.held_up import HeldUp
from lighthouse_protocol.rules.stall import Limits, StallVerdict, judge, time_left_s

MAX_KNOWN = 4 * MAX_NAMES
SOON_S = 0.001


@dataclass(frozen=True, slots=True)
class Process:
    """Which one a sample is from; `rank_incarnation` is new at every start."""

    rank_incarnation: str
    host: str = ""
    pid: int = 0


@dataclass(frozen=True, slots=True)
class _Heard:
    process: Process
    sample: ProgressSample
    at: float


class GroupProgress:
    def __init__(self, replica_id: str = "", limits: Limits | None = None) -> None:
        """`replica_id` stands before the ranks' numbers; empty: nothing does."""
        self._replica_id = replica_id
        self._limits = limits or Limits()
        self._heard: dict[int, _Heard] = {}
        self._longest: dict[str, float] = {}
        self._past_s: dict[str, float] = {}  # of processes that are gone
        self._held_up = HeldUp()

    def take(self, group_rank: int, process: Process, sample: ProgressSample, now: float) -> None:
        before = self._heard.get(group_rank)
        if before is not None and before.process.rank_incarnation != process.rank_incarnation:
            self.lose(group_rank)
        self._heard[group_rank] = _Heard(process, sample, now)
        if not sample.is_first:
            for time in sample.times:
                self._learn(time)

    def lose(self, group_rank: int) -> None:
        """Its process has ended."""
        heard = self._heard.pop(group_rank, None)
        if heard is not None:
            _add(self._past_s, heard.sample)

    def was_late(self, by_s: float, now: float) -> None:
        """Its reader was held up until now."""
        self._held_up.was_late(by_s, now)

    def limit_s(self, sample: ProgressSample) -> float:
        """How long a rank that stands there may be without a mark."""
        return self._limits.limit_s(self._longest.get(sample.innermost.name, 0.0), is_first=sample.is_first)

    def ranks(self, now: float) -> tuple[RankView, ...]:
        views = (self._view(rank, heard, now) for rank, heard in sorted(self._heard.items()))
        return tuple(self._held_up.without(view, now) for view in views)

    def view(self, incarnation: str, now: float) -> GroupView:
        """For the lighthouse; of the times it wants their sums."""
        ranks = tuple(replace(rank, sample=replace(rank.sample, times=())) for rank in self.ranks(now))
        return GroupView(
            self._replica_id, incarnation, ranks, tuple(map(PhaseSeconds._make, sorted(self.seconds.items())))
        )

    @property
    def seconds(self) -> dict[str, float]:
        """Each phase's own time, over all ranks that ever were; it never goes back."""
        total = self._past_s.copy()
        for heard in self._heard.values():
            _add(total, heard.sample)
        return total

    def verdict(self, now: float, *, is_complete: bool) -> StallVerdict | None:
        """`is_complete`: the group trains alone, or all its ranks are where only they meet."""
        return judge(self.ranks(now), floor_s=self._limits.floor_s, is_complete=is_complete)

    def left_s(self, now: float) -> float | None:
        """How long until there may be a verdict if no rank moves, below zero where there may be one; None: no rank is
        here."""
        ranks = self.ranks(now)
        return time_left_s(ranks, self._limits.floor_s) + SOON_S if ranks else None

    def _learn(self, time: PhaseTime) -> None:
        known_s = self._longest.get(time.name, 0.0)
        is_healthy = known_s == 0 or time.longest_s <= self._limits.limit_s(known_s, is_first=False)
        if time.longest_s > known_s and is_healthy and (known_s or len(self._longest) < MAX_KNOWN):
            self._longest[time.name] = time.longest_s

    def _view(self, group_rank: int, heard: _Heard, now: float) -> RankView:
        process, sample = heard.process, heard.sample
        return RankView(
            RankName(self._replica_id, group_rank),
            sample,
            limit_s=self.limit_s(sample),
            beat_age_s=now - heard.at,
            rank_incarnation=process.rank_incarnation,
            host=process.host,
            pid=process.pid,
        )


def _add(total: dict[str, float], sample: ProgressSample) -> None:
    for time in sample.times:
        name = time.name if time.name in total or len(total) < MAX_KNOWN else OTHER
        total[name] = total.get(name, 0.0) + time.seconds
