"""Stall detection: has training stopped making progress, and which ranks are behind?

A manager applies the rules to its own ranks, the lighthouse to the ranks of all groups. A *mark* is any sign of a
rank's progress. This module does no I/O.

1. A rank is waiting while it is in a collective, or in a wait that its script has declared. Otherwise it is running.
2. Training has stalled if the last mark of every running rank is older than the limit for its phase. Waiting ranks
   count only if no rank is running. Training has then stalled if all last marks are older than `floor_s`.
3. If ranks have entered the same collective, by number, with different operations or shapes, the verdict is
   "divergence", without suspects. Ranks that are in several collectives at once, as with DDP's buffers, are compared
   number by number.
4. Otherwise, the verdict names the suspects. First, ranks are compared by the number of collectives that they have
   entered in each process group: the suspects are behind another rank in some group and ahead of none in any. If there
   are none, ranks are compared by their most recent collective, then by step, then by those phases of the step that at
   least two ranks have entered: the suspects are the ranks furthest behind. A rank is never a suspect if it has
   declared a wait, or if it is in a collective that others have not entered. A suspect need not be at fault.
5. If some ranks, but not all, have stopped sending heartbeats, these are suspects too. A waiting rank still sends
   heartbeats, unless C code holds the GIL.
6. If there are no suspects and all ranks are in the same collective, the verdict is "network or collective". If they
   are in different collectives, it is "divergence". Otherwise, it describes what each rank is doing.

Collectives are compared before steps because ranks synchronise there, and because a healing rank may be at a lower
step.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TypeAlias

from lighthouse_protocol.messages.progress import (
    MAX_NAMES,
    OTHER,
    Collective,
    GroupCalls,
    GroupView,
    PhaseSeconds,
    PhaseTime,
    ProgressSample,
    RankName,
    RankView,
)
from lighthouse_protocol.rules.quorum_change import (
    describe_activity,
    describe_each,
    describe_place,
    group_ranks,
    list_rank_views,
    name_ranks,
    operation_name,
    signature,
)

FLOOR_S = 60.0
FACTOR = 5.0
FIRST_S = 600.0
SILENT_S = 10.0  # without a heartbeat; half of the floor if that is shorter
MIN_SILENT_S = 5.0

Order: TypeAlias = tuple[int, int, int]
NOTHING: Order = (0, 0, 0)

# A process group: (replica id, name of the process group of the script). Both are empty for the Agent's collectives.
GroupKey: TypeAlias = tuple[str, str]

# The most recent collective, and whether the rank has left it. A rank still inside is behind a rank that has left it.
Place: TypeAlias = tuple[Order, bool]


class Kind(StrEnum):
    BEHIND = "behind"
    WAITING = "waiting"  # all ranks wait, but not in one collective
    NETWORK = "network or collective"
    DIVERGENCE = "divergence"
    TOGETHER = "no rank behind"  # ranks run, and none is ahead of another


@dataclass(frozen=True, slots=True)
class Limits:
    """Settings for the time that a rank may spend without progress."""

    floor_s: float = FLOOR_S  # minimum for every phase
    factor: float = FACTOR  # multiple of the longest healthy time in the phase
    first_s: float = FIRST_S  # minimum for an unmeasured phase, and in the first step of a process

    def limit_s(self, longest_s: float, *, is_first: bool) -> float:
        """Return how many seconds a rank may spend in a phase without progress.

        `longest_s` is the longest healthy time without progress in this phase so far, or 0 if unknown.
        `is_first` means that the process has not finished its first step.
        """
        known_s = max(self.floor_s, self.factor * longest_s)
        return max(known_s, self.first_s) if is_first or longest_s == 0 else known_s


@dataclass(frozen=True, slots=True)
class StallVerdict:
    kind: Kind
    behind: tuple[RankName, ...]  # suspects, sorted
    text: str
    still_s: float  # seconds since any rank moved

    def is_same_as(self, other: "StallVerdict | None") -> bool:
        return other is not None and (self.kind, self.behind, self.text) == (other.kind, other.behind, other.text)


def find_stall(ranks: Sequence[RankView], *, floor_s: float = FLOOR_S, is_complete: bool = True) -> StallVerdict | None:
    """Return why training has stalled, or None if it has not stalled or the cause is unknown.

    Args:
        ranks: The ranks to compare.
        floor_s: Seconds without progress after which training has stalled if all ranks are waiting.
        is_complete: Whether `ranks` includes every rank that takes part in their collectives. If False, a rank may be
            waiting for a rank that is not in `ranks`.
    """
    if not ranks or time_left_s(ranks, floor_s) >= 0:
        return None
    silent_s = min(SILENT_S, max(MIN_SILENT_S, floor_s / 2))
    silent = [rank for rank in ranks if rank.beat_age_s > silent_s]
    found = _divergence(ranks) or _behind(ranks, silent, is_complete) or _verdict_without_suspects(ranks, is_complete)
    if found is not None and silent:
        found = replace(found, text=f"{found.text}; no heartbeat from {list_rank_views(silent)}")
    return found


def time_left_s(ranks: Sequence[RankView], floor_s: float = FLOOR_S) -> float:
    """Return the seconds until the ranks count as stalled if none of them makes progress.

    The result is negative if they count as stalled already.
    """
    running = [rank for rank in ranks if rank.is_running]
    if running:
        return max(rank.limit_s - rank.progress_age_s for rank in running)
    return max((floor_s - rank.progress_age_s for rank in ranks), default=floor_s)


def _divergence(ranks: Sequence[RankView]) -> StallVerdict | None:
    inside = [rank for rank in ranks if rank.sample.is_inside]
    for here in group_ranks(_current_collective, inside):
        sides = group_ranks(signature, here)
        if len(sides) > 1:
            describe = signature if len({operation_name(rank) for rank in here}) == 1 else operation_name
            text = ", ".join(f"{name_ranks(side)} {describe(side[0])}" for side in sides)
            return _verdict(Kind.DIVERGENCE, (), f"divergence: {text}", ranks)
    numbered: dict[tuple[GroupKey, int], dict[str, list[RankView]]] = {}
    for rank in inside:
        for call, name in _unfinished(rank):
            numbered.setdefault(call, {}).setdefault(name, []).append(rank)
    for _, by_name in sorted(numbered.items()):
        if len(by_name) > 1:
            text = ", ".join(f"{name_ranks(side)} {name}" for name, side in by_name.items())
            return _verdict(Kind.DIVERGENCE, (), f"divergence: {text}", ranks)
    return None


def _unfinished(rank: RankView) -> Iterator[tuple[tuple[GroupKey, int], str]]:
    """Yield ((process group, collective's number), operation) for each unfinished collective of known operation."""
    for calls in rank.sample.calls:
        if calls.is_inside and calls.operation:
            names = (*calls.before, calls.operation)
            for number, name in enumerate(names, calls.entered + 1 - len(names)):
                yield ((rank.name.replica_id, calls.group), number), name


def _behind(ranks: Sequence[RankView], silent: Sequence[RankView], is_complete: bool) -> StallVerdict | None:
    suspects = behind_in_groups(ranks, is_complete=is_complete) or furthest_behind(ranks, is_complete=is_complete)
    if not silent or len(silent) == len(ranks):
        if not suspects:
            return None
        return _verdict_on_suspects(suspects, lambda rank: f"behind in {describe_place(rank)}", ranks)
    stuck = {rank.name for rank in silent}
    names = stuck | {rank.name for rank in suspects}

    def describe(rank: RankView) -> str:
        return (
            f"behind, last seen {describe_activity(rank)}"
            if rank.name in stuck
            else f"behind in {describe_place(rank)}"
        )

    return _verdict_on_suspects([rank for rank in ranks if rank.name in names], describe, ranks)


def _verdict_on_suspects(
    suspects: Sequence[RankView], describe: Callable[[RankView], str], ranks: Sequence[RankView]
) -> StallVerdict:
    names = {rank.name for rank in suspects}
    others = [rank for rank in ranks if rank.name not in names]
    parts = (describe_each(describe, suspects), describe_each(describe_activity, others))
    return _verdict(Kind.BEHIND, suspects, ", ".join(filter(None, parts)), ranks)


def _verdict_without_suspects(ranks: Sequence[RankView], is_complete: bool) -> StallVerdict | None:
    if any(rank.is_running for rank in ranks):
        return _verdict(Kind.TOGETHER, (), f"no rank behind: {describe_each(describe_activity, ranks)}", ranks)
    if not is_complete:
        return None
    is_inside = all(rank.sample.is_inside for rank in ranks)
    if is_inside and any(least != most for least, most in _bounds(ranks).values()):
        # Each side is in a collective that another side has not entered.
        sides = group_ranks(_current_collective, ranks)
        parts = (
            f"{name_ranks(side)} {operation_name(side[0])} in process group {_current_collective(side[0])[0][1]}"
            for side in sides
        )
        return _verdict(Kind.DIVERGENCE, (), f"divergence: {', '.join(parts)}", ranks)
    if is_inside and len(group_ranks(operation_name, ranks)) == 1:
        text = f"network or collective: {list_rank_views(ranks)} in {operation_name(ranks[0])}, no rank behind"
        return _verdict(Kind.NETWORK, (), text, ranks)
    return _verdict(Kind.WAITING, (), f"all ranks wait: {describe_each(describe_activity, ranks)}", ranks)


def _verdict(kind: Kind, behind: Iterable[RankView], text: str, ranks: Sequence[RankView]) -> StallVerdict:
    still_s = min(rank.progress_age_s for rank in ranks)
    return StallVerdict(kind, tuple(sorted(rank.name for rank in behind)), text, still_s)


# Comparison of ranks.


def behind_in_groups(ranks: Sequence[RankView], *, is_complete: bool = True) -> list[RankView]:
    """Return the suspects by the number of collectives in each process group.

    These are the ranks that are behind another rank in some process group, and ahead of no rank in any process group.
    See find_stall() for `is_complete`.
    """
    if not any(rank.sample.calls for rank in ranks):
        return []
    bounds = _bounds(ranks)
    return [
        rank
        for rank in ranks
        if not rank.sample.waits_for
        and (is_complete or not rank.sample.is_inside)
        and any(reached < bounds[circle][1] for circle, reached in _places(rank).items())
        and all(reached == bounds[circle][0] for circle, reached in _places(rank).items())
    ]


def _bounds(ranks: Iterable[RankView]) -> dict[GroupKey, tuple[Place, Place]]:
    """Return the Place of the least and of the most advanced rank, by process group."""
    bounds: dict[GroupKey, tuple[Place, Place]] = {}
    for rank in ranks:
        for circle, reached in _places(rank).items():
            least, most = bounds.get(circle, (reached, reached))
            bounds[circle] = min(least, reached), max(most, reached)
    return bounds


def _places(rank: RankView) -> dict[GroupKey, Place]:
    replica_id, _ = rank.name
    sample, collective = rank.sample, rank.sample.collective
    places: dict[GroupKey, Place] = {
        (replica_id, calls.group): ((0, 0, calls.entered), not calls.is_inside) for calls in sample.calls
    }
    if collective is not None:
        places["", ""] = collective.order, not collective.is_inside
    return places


def _current_collective(rank: RankView) -> tuple[GroupKey, Order]:
    inside = rank.sample.inside
    if isinstance(inside, GroupCalls):
        return (rank.name.replica_id, inside.group), (0, 0, inside.entered)
    return ("", ""), _order(rank.sample)


def furthest_behind(ranks: Sequence[RankView], *, is_complete: bool = True) -> list[RankView]:
    """Return the ranks furthest behind by most recent collective, then by step, then by phase.

    See find_stall() for `is_complete`.
    """
    least = min((_order(rank.sample) for rank in ranks), default=NOTHING)
    suspectable = [rank for rank in ranks if _is_suspectable(rank.sample, least if is_complete else None)]
    if not suspectable:
        return []
    lowest = min(_level(rank.sample) for rank in suspectable)
    last = [rank for rank in suspectable if _level(rank.sample) == lowest]
    # Another rank is further ahead, or waits while these run.
    are_behind = any(_level(rank.sample) > lowest for rank in ranks) or (
        any(not rank.is_running for rank in ranks) and any(rank.is_running for rank in last)
    )
    return _least(last, shared_phases(rank.sample for rank in ranks), are_behind=are_behind)


def _is_suspectable(sample: ProgressSample, least: Order | None) -> bool:
    """Return whether a rank can be a suspect. Rule 4 in the module docstring gives the exceptions.

    `least` is the most recent collective that all ranks have entered, or None if not all ranks are known.
    """
    inside = sample.inside
    return not sample.waits_for if inside is None else isinstance(inside, Collective) and inside.order == least


def _least(ranks: list[RankView], shared: frozenset[str], *, are_behind: bool) -> list[RankView]:
    """Return those of `ranks` that are furthest behind in the `shared` phases. All of `ranks` are at the same step.

    `are_behind` means that they are all behind a rank outside `ranks`. If False, return only those behind another of
    `ranks`.
    """
    places = group_ranks(lambda rank: _phases_of(rank.sample, shared), ranks)  # many ranks share few places
    heads = [party[0].sample for party in places]
    return [
        rank
        for party, head in zip(places, heads, strict=True)
        if not any(is_behind_in_phases(other, head, shared) for other in heads)
        and (are_behind or any(is_behind_in_phases(head, other, shared) for other in heads))
        for rank in party
    ]


def _order(sample: ProgressSample) -> Order:
    return sample.collective.order if sample.collective is not None else NOTHING


def _level(sample: ProgressSample) -> tuple[Order, bool, int]:
    # A rank still in a collective is behind a rank that has left it.
    return _order(sample), not sample.is_inside, sample.step


def shared_phases(samples: Iterable[ProgressSample]) -> frozenset[str]:
    """Return the phases that at least two ranks have entered in their current step. Other phases cannot be compared."""
    once: set[str] = set()
    twice: set[str] = set()
    for sample in samples:
        names = {name for name, _ in sample.entered}
        twice |= once & names
        once |= names
    return frozenset(twice)


def is_behind_in_phases(sample: ProgressSample, other: ProgressSample, shared: frozenset[str]) -> bool:
    """Return whether `sample` is behind `other` in a shared phase and ahead in none. Both must be at the same step."""
    mine, theirs = _phases_of(sample, shared), _phases_of(other, shared)
    return mine != theirs and all(have <= others for have, others in zip(mine, theirs, strict=True))


def _phases_of(sample: ProgressSample, shared: frozenset[str]) -> tuple[tuple[int, bool, int], ...]:
    """Return (entries, has left, ticks so far) for each shared phase. Higher values are further ahead."""
    entered = dict(sample.entered)
    done = {phase.name: phase.done for phase in sample.phases}
    return tuple((entered.get(name, 0), name not in done, done.get(name, 0)) for name in sorted(shared))


# Pauses of the observer. A process that was paused, swapped out or migrated has received nothing in that time. The
# ranks may have moved, or may have been paused with it, so the time does not count.

MAX_TIMES = 64


class PauseLog:
    def __init__(self) -> None:
        self._times: list[tuple[float, float]] = []  # (end, length) of each pause, the newest last

    def add_pause(self, by_s: float, now: float) -> None:
        """Record a pause of `by_s` seconds that ends now. If there are more than MAX_TIMES, merge the two oldest."""
        self._times.append((now, by_s))
        if len(self._times) > MAX_TIMES:
            (_, first_s), (ended_at, second_s), *newer = self._times
            self._times = [(ended_at, first_s + second_s), *newer]

    def paused_s(self, age_s: float, now: float) -> float:
        """Return for how many of the last `age_s` seconds the observer was paused."""
        since, total_s = now - age_s, 0.0
        for ended_at, length_s in reversed(self._times):
            if ended_at <= since:
                break
            total_s += min(length_s, ended_at - since)
        return min(total_s, age_s)

    def without_pauses(self, rank: RankView, now: float) -> RankView:
        """Return a copy of `rank` whose heartbeat and progress ages exclude the pauses."""
        if not self._times:
            return rank
        of_beat_s = self.paused_s(rank.beat_age_s, now)
        of_sample_s = self.paused_s(rank.progress_age_s, now) - of_beat_s
        return rank.aged(-of_beat_s, -of_sample_s) if of_beat_s or of_sample_s else rank


# Progress of a group. The manager uses this for its ranks, and the lighthouse for the ranks in a run.
#
# Samples contain ages, so clocks need not agree: the reader adds the time since a sample's arrival. The longest healthy
# time of a phase is learned from all ranks: one rank's validation time sets the limit for the others. First steps and
# times above the limit are not learned. A lost rank is dropped with its open phases.

MAX_KNOWN = 4 * MAX_NAMES
SOON_S = 0.001


@dataclass(frozen=True, slots=True)
class Process:
    """The process that sent a sample."""

    rank_incarnation: str  # new at every start
    host: str = ""
    pid: int = 0


@dataclass(frozen=True, slots=True)
class _LastSample:
    process: Process
    sample: ProgressSample
    at: float


class GroupProgress:
    def __init__(self, replica_id: str = "", limits: Limits | None = None) -> None:
        """Create a group without ranks. A `replica_id` that is not empty becomes part of the rank names."""
        self._replica_id = replica_id
        self._limits = limits or Limits()
        self._last: dict[int, _LastSample] = {}
        self._longest: dict[str, float] = {}
        self._past_s: dict[str, float] = {}  # seconds per phase of processes that have ended
        self._pauses = PauseLog()

    def add_sample(self, group_rank: int, process: Process, sample: ProgressSample, now: float) -> None:
        before = self._last.get(group_rank)
        if before is not None and before.process.rank_incarnation != process.rank_incarnation:
            self.remove_rank(group_rank)
        self._last[group_rank] = _LastSample(process, sample, now)
        if not sample.is_first:
            for time in sample.times:
                self._learn(time)

    def remove_rank(self, group_rank: int) -> None:
        """Remove a rank whose process has exited. Its times per phase stay in `seconds`."""
        last = self._last.pop(group_rank, None)
        if last is not None:
            _add(self._past_s, last.sample)

    def add_pause(self, by_s: float, now: float) -> None:
        """Record that the observing process was paused for the last `by_s` seconds."""
        self._pauses.add_pause(by_s, now)

    def limit_s(self, sample: ProgressSample) -> float:
        """Return how many seconds a rank may spend in its phase without progress."""
        return self._limits.limit_s(self._longest.get(sample.innermost.name, 0.0), is_first=sample.is_first)

    def ranks(self, now: float) -> tuple[RankView, ...]:
        views = (self._view(rank, last, now) for rank, last in sorted(self._last.items()))
        return tuple(self._pauses.without_pauses(view, now) for view in views)

    def view(self, incarnation: str, now: float) -> GroupView:
        """Return the progress of the group with this `incarnation`, with times per phase summed over the ranks."""
        ranks = tuple(replace(rank, sample=replace(rank.sample, times=())) for rank in self.ranks(now))
        return GroupView(
            self._replica_id, incarnation, ranks, tuple(map(PhaseSeconds._make, sorted(self.seconds.items())))
        )

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds in each phase, summed over all past and present ranks. The sums never decrease."""
        total = self._past_s.copy()
        for last in self._last.values():
            _add(total, last.sample)
        return total

    def verdict(self, now: float, *, is_complete: bool) -> StallVerdict | None:
        """Return why the group has stalled, or None if it has not. See find_stall() for `is_complete`."""
        return find_stall(self.ranks(now), floor_s=self._limits.floor_s, is_complete=is_complete)

    def left_s(self, now: float) -> float | None:
        """Return the seconds until the group counts as stalled if no rank makes progress, or None without ranks.

        The result is negative for a group that has stalled already.
        """
        ranks = self.ranks(now)
        return time_left_s(ranks, self._limits.floor_s) + SOON_S if ranks else None

    def _learn(self, time: PhaseTime) -> None:
        known_s = self._longest.get(time.name, 0.0)
        is_healthy = known_s == 0 or time.longest_s <= self._limits.limit_s(known_s, is_first=False)
        if time.longest_s > known_s and is_healthy and (known_s or len(self._longest) < MAX_KNOWN):
            self._longest[time.name] = time.longest_s

    def _view(self, group_rank: int, last: _LastSample, now: float) -> RankView:
        process, sample = last.process, last.sample
        return RankView(
            RankName(self._replica_id, group_rank),
            sample,
            limit_s=self.limit_s(sample),
            beat_age_s=now - last.at,
            rank_incarnation=process.rank_incarnation,
            host=process.host,
            pid=process.pid,
        )


def _add(total: dict[str, float], sample: ProgressSample) -> None:
    for time in sample.times:
        name = time.name if time.name in total or len(total) < MAX_KNOWN else OTHER
        total[name] = total.get(name, 0.0) + time.seconds


# Durations in log lines.


def span(seconds: float) -> str:
    """Format a duration, for example 39 ms, 4.1 s, 28 s, 12 min or 3.5 h."""
    if seconds < 0.9995:
        return f"{1000 * max(0.0, seconds):.0f} ms"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    if seconds < 119.5:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
