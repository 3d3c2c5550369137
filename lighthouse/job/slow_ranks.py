"""Detection of slow ranks, whose compute time is much longer than that of their peers. This module does no I/O.

1. Ranks report totals: the compute time of their committed steps, without waits, and the number of microbatches
   computed in that time. A rank that is waiting for a slow one therefore does not look slow itself.
2. The peers of a rank are the ranks at the same position (`group_rank`) of the other live groups. With fewer than
   MIN_PEERS, no rank is compared.
3. All ranks are compared every `slow_after_s / COMPARISONS` seconds, by the time per microbatch since the last
   comparison. For a rank without a new step, the comparison is skipped.
4. A rank becomes slow if it takes at least SLOW_FACTOR times the median, and at least MIN_EXCESS_S longer, in
   COMPARISONS consecutive comparisons. It recovers after as many comparisons below RECOVERED_FACTOR. So a single long
   step, for example one that includes a checkpoint, changes nothing.
"""

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from lighthouse_protocol.messages.progress import ComputeTotals, GroupView, RankName

SLOW_AFTER_S = 60.0
COMPARISONS = 4
SLOW_FACTOR = 1.5
RECOVERED_FACTOR = 1.25
MIN_EXCESS_S = 0.01  # per microbatch; less is within the noise of a busy host
MIN_PEERS = 2
WINDOWS_S = (60.0, 600.0)
MAX_RATIO = 1e6  # a ratio to peers that report no more than nanoseconds might be infinite, which JSON cannot express


class Slowness(NamedTuple):
    """A rank's compute time divided by the median of its peers, over one and ten minutes, or None if unknown."""

    ratio_1m: float | None = None
    ratio_10m: float | None = None
    is_slow: bool = False


@dataclass(frozen=True, slots=True)
class SlowRank:
    text: str
    since: float  # start of the first slow comparison


@dataclass(slots=True)
class _Rank:
    incarnation: str
    totals: ComputeTotals
    compared_at: float
    sums: list[tuple[float, float]] = field(default_factory=lambda: [(0.0, 0.0)] * len(WINDOWS_S))
    """(seconds, microbatches) for each of WINDOWS_S, weighted by age as in a load average."""
    newest_s: float | None = None  # time of a microbatch in the last interval with a step
    has_stepped: bool = False
    streak: int = 0  # consecutive comparisons that contradict `is_slow`
    streak_since: float = 0.0
    is_slow: bool = False
    since: float = 0.0
    median_s: float = 0.0  # median of the peers
    ratios: tuple[float | None, ...] = (None,) * len(WINDOWS_S)

    def add_totals(self, totals: ComputeTotals, now: float) -> None:
        seconds = totals.seconds - self.totals.seconds
        microbatches = totals.microbatches - self.totals.microbatches
        weights = [math.exp((self.compared_at - now) / window_s) for window_s in WINDOWS_S]
        self.sums = [(w * s + seconds, w * n + microbatches) for w, (s, n) in zip(weights, self.sums, strict=True)]
        self.has_stepped = microbatches > 0
        if self.has_stepped:
            self.newest_s = seconds / microbatches
        self.totals = totals

    def mean_s(self, window: int) -> float | None:
        seconds, microbatches = self.sums[window]
        return seconds / microbatches if microbatches else None

    def judge(self, median_s: float | None, now: float) -> None:
        if median_s is None or self.newest_s is None:
            self.is_slow, self.streak = False, 0
        elif self.has_stepped:
            excess_s = self.newest_s - median_s
            is_slow = self.newest_s >= SLOW_FACTOR * median_s and excess_s >= MIN_EXCESS_S
            is_contrary = self.newest_s < RECOVERED_FACTOR * median_s if self.is_slow else is_slow
            self.streak_since = self.streak_since if self.streak else self.compared_at
            self.streak, self.median_s = (self.streak + 1 if is_contrary else 0), median_s
            if self.streak == COMPARISONS:
                self.is_slow, self.since, self.streak = not self.is_slow, self.streak_since, 0
        self.compared_at = now


class SlowRanks:
    """Compares the compute times of a job's ranks, with constant memory per rank. Drops ranks of lost groups."""

    def __init__(self, slow_after_s: float = SLOW_AFTER_S) -> None:
        self._every_s = slow_after_s / COMPARISONS
        self._compared_at = -math.inf
        self._ranks: dict[RankName, _Rank] = {}

    def is_due(self, now: float) -> bool:
        return now >= self._compared_at + self._every_s

    def compare(self, views: Iterable[GroupView], now: float) -> dict[RankName, SlowRank]:
        """Compare the ranks of the live groups, and return the slow ones. Call this only if `is_due` returns True."""
        before, self._ranks, self._compared_at = self._ranks, {}, now
        positions: dict[int, list[_Rank]] = {}
        for view in views:
            for rank in view.ranks:
                if (totals := rank.sample.computed) is not None:
                    known = before.get(rank.name)
                    if known is None or known.incarnation != rank.rank_incarnation or _decrease(known.totals, totals):
                        known = _Rank(rank.rank_incarnation, totals, now)
                    known.add_totals(totals, now)
                    self._ranks[rank.name] = known
                    positions.setdefault(rank.name.group_rank, []).append(known)
        for ranks in positions.values():
            medians_s = [peer_medians([rank.mean_s(window) for rank in ranks]) for window in range(len(WINDOWS_S))]
            for place, (rank, median_s) in enumerate(
                zip(ranks, peer_medians([rank.newest_s for rank in ranks]), strict=True)
            ):
                rank.judge(median_s, now)
                rank.ratios = tuple(
                    _ratio(rank.mean_s(window), medians[place]) for window, medians in enumerate(medians_s)
                )
        return {name: SlowRank(_describe(name, rank), rank.since) for name, rank in self._ranks.items() if rank.is_slow}

    def slowness(self, name: RankName) -> Slowness:
        rank = self._ranks.get(name)
        return Slowness() if rank is None else Slowness(rank.ratios[0], rank.ratios[1], rank.is_slow)

    def list_slowness(self) -> list[Slowness]:
        return [self.slowness(name) for name in self._ranks]


def peer_medians(values: Sequence[float | None]) -> list[float | None]:
    """Return, for each value, the median of the other values.

    An unknown value is None. A median is None if its own value is unknown, or if fewer than MIN_PEERS others are known.
    """
    known = sorted(value for value in values if value is not None)
    others = len(known) - 1
    if others < MIN_PEERS:
        return [None] * len(values)

    def median_without(value: float) -> float:
        place = bisect_left(known, value)
        low, high = ((others - 1) // 2, others // 2)
        return (known[low + (low >= place)] + known[high + (high >= place)]) / 2

    return [None if value is None else median_without(value) for value in values]


def _ratio(value_s: float | None, median_s: float | None) -> float | None:
    return None if value_s is None or not median_s else min(MAX_RATIO, round(value_s / median_s, 2))


def _decrease(before: ComputeTotals, now: ComputeTotals) -> bool:
    return now.seconds < before.seconds or now.microbatches < before.microbatches


def _describe(name: RankName, rank: _Rank) -> str:
    own_s, peers_s = rank.newest_s or 0.0, rank.median_s
    return f"{name} is slow: it computes for {own_s:.3g} s per microbatch, its peers for {peers_s:.3g} s (median)"
