"""Does nothing move, and who is behind? One rule for a manager (its ranks) and the lighthouse (all groups'). No I/O.

1. A rank waits while it is in a collective, or in a wait that its script has declared. Else it runs.
2. While some rank runs and has not been without a mark for longer than its phase's limit, something moves: no verdict.
   So a declared wait goes by the clock of the one that is waited for. If nobody runs, the limit is the floor.
3. Divergence: one collective by its number, entered with different operations or shapes. Ranks that have entered
   several at once, as DDP does with its buffers, are compared by each number.
4. Behind: in process groups that scripts have made, ranks are compared group by group, by the collectives that they
   have entered there; the suspects are those that are behind somebody, and ahead of nobody. Where that tells nobody
   apart, ranks are compared by the newest collective that they have entered, then by step, then by the phases of this
   step that at least two ranks have been in, and the suspects are those furthest behind. Who is in a collective that
   others have not entered is never suspected, nor who has declared to wait. Behind is not guilty.
5. Some ranks, and not all, give no sign of life: they are behind, all of them, whatever rule 4 says of the others.
   Their last word is older than what holds them: who waits gives signs of life, and C code that keeps the interpreter
   lock does not.
6. Nobody is behind: all in one collective is "network or collective"; other places are named.

Collectives come before steps: there ranks meet, and the step of a rank that heals may be a lower one.
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
from lighthouse_protocol.rules.quorum_change import doing, each, listed, named, operation, parties, place, signature

FLOOR_S = 60.0
FACTOR = 5.0
FIRST_S = 600.0
SILENT_S = 10.0
"""Without a beat for so long; half of the floor where that is less."""
LEAST_SILENT_S = 5.0

Order: TypeAlias = tuple[int, int, int]
NOTHING: Order = (0, 0, 0)

Circle: TypeAlias = tuple[str, str]
"""Ranks that meet in collectives: the replica group and the process group of a script; both empty: an Agent's."""

Place: TypeAlias = tuple[Order, bool]
"""The newest collective, and whether it was left: who is still in it is behind those who have left it."""


class Kind(StrEnum):
    BEHIND = "behind"
    WAITING = "waiting"  # everybody waits, and not in one collective
    NETWORK = "network or collective"
    DIVERGENCE = "divergence"
    TOGETHER = "nobody behind"  # they run, and none has got further than another


@dataclass(frozen=True, slots=True)
class Limits:
    """How long a rank may be without a mark: `factor` times the longest healthy time in that phase, and at least
    `floor_s`; `first_s` where there was none yet, and in the first step of a process."""

    floor_s: float = FLOOR_S
    factor: float = FACTOR
    first_s: float = FIRST_S

    def limit_s(self, longest_s: float, *, is_first: bool) -> float:
        """`longest_s`: 0 where nothing is known."""
        known_s = max(self.floor_s, self.factor * longest_s)
        return max(known_s, self.first_s) if is_first or longest_s == 0 else known_s


@dataclass(frozen=True, slots=True)
class StallVerdict:
    """`behind` are the suspects, sorted; `still_s`: for so long nobody has moved."""

    kind: Kind
    behind: tuple[RankName, ...]
    text: str
    still_s: float

    def says_the_same(self, other: "StallVerdict | None") -> bool:
        return other is not None and (self.kind, self.behind, self.text) == (other.kind, other.behind, other.text)


def judge(ranks: Sequence[RankView], *, floor_s: float = FLOOR_S, is_complete: bool = True) -> StallVerdict | None:
    """`is_complete`: these are all the ranks that meet in their collectives. Else who waits may wait for another."""
    if not ranks or time_left_s(ranks, floor_s) >= 0:
        return None
    silent = _without_beat(ranks, min(SILENT_S, max(LEAST_SILENT_S, floor_s / 2)))
    found = _divergence(ranks) or _behind(ranks, silent, is_complete) or _nobody_behind(ranks, is_complete)
    if found is not None and silent:
        found = replace(found, text=f"{found.text}; no beat from {listed(silent)}")
    return found


def time_left_s(ranks: Sequence[RankView], floor_s: float = FLOOR_S) -> float:
    """How long it may still be until something moves (rule 2); below zero: nothing does."""
    running = [rank for rank in ranks if rank.is_running]
    if running:
        return max(rank.limit_s - rank.progress_age_s for rank in running)
    return max((floor_s - rank.progress_age_s for rank in ranks), default=floor_s)


def _divergence(ranks: Sequence[RankView]) -> StallVerdict | None:
    inside = [rank for rank in ranks if rank.sample.is_inside]
    for here in parties(_meeting, inside):
        sides = parties(signature, here)
        if len(sides) > 1:
            say = signature if len({operation(rank) for rank in here}) == 1 else operation
            text = ", ".join(f"{named(side)} {say(side[0])}" for side in sides)
            return _verdict(Kind.DIVERGENCE, (), f"divergence: {text}", ranks)
    numbered: dict[tuple[Circle, int], dict[str, list[RankView]]] = {}
    for rank in inside:
        for call, name in _unfinished(rank):
            numbered.setdefault(call, {}).setdefault(name, []).append(rank)
    for _, by_name in sorted(numbered.items()):
        if len(by_name) > 1:
            text = ", ".join(f"{named(side)} {name}" for name, side in by_name.items())
            return _verdict(Kind.DIVERGENCE, (), f"divergence: {text}", ranks)
    return None


def _unfinished(rank: RankView) -> Iterator[tuple[tuple[Circle, int], str]]:
    """The collectives that it is in, by process group and number, with their operations, as far as these are known."""
    for calls in rank.sample.calls:
        if calls.is_inside and calls.operation:
            names = (*calls.before, calls.operation)
            for number, name in enumerate(names, calls.entered + 1 - len(names)):
                yield ((rank.name.replica_id, calls.group), number), name


def _behind(ranks: Sequence[RankView], silent: Sequence[RankView], is_complete: bool) -> StallVerdict | None:
    suspects = behind_in_groups(ranks, is_complete=is_complete) or furthest_behind(ranks, is_complete=is_complete)
    if not silent or len(silent) == len(ranks):
        return _are_behind(suspects, lambda rank: f"behind in {place(rank)}", ranks) if suspects else None
    stuck = {rank.name for rank in silent}
    names = stuck | {rank.name for rank in suspects}

    def say(rank: RankView) -> str:
        return f"behind, last seen {doing(rank)}" if rank.name in stuck else f"behind in {place(rank)}"

    return _are_behind([rank for rank in ranks if rank.name in names], say, ranks)


def _are_behind(
    suspects: Sequence[RankView], say: Callable[[RankView], str], ranks: Sequence[RankView]
) -> StallVerdict:
    names = {rank.name for rank in suspects}
    others = [rank for rank in ranks if rank.name not in names]
    said = (each(say, suspects), each(doing, others))
    return _verdict(Kind.BEHIND, suspects, ", ".join(filter(None, said)), ranks)


def _nobody_behind(ranks: Sequence[RankView], is_complete: bool) -> StallVerdict | None:
    if any(rank.is_running for rank in ranks):
        return _verdict(Kind.TOGETHER, (), f"nobody behind: {each(doing, ranks)}", ranks)
    if not is_complete:
        return None
    is_inside = all(rank.sample.is_inside for rank in ranks)
    if is_inside and any(least != most for least, most in _bounds(ranks).values()):
        sides = parties(_meeting, ranks)  # each is in what another one of them has not entered
        said = (f"{named(side)} {operation(side[0])} in process group {_meeting(side[0])[0][1]}" for side in sides)
        return _verdict(Kind.DIVERGENCE, (), f"divergence: {', '.join(said)}", ranks)
    if is_inside and len(parties(operation, ranks)) == 1:
        text = f"network or collective: {listed(ranks)} in {operation(ranks[0])}, nobody behind"
        return _verdict(Kind.NETWORK, (), text, ranks)
    return _verdict(Kind.WAITING, (), f"everybody waits: {each(doing, ranks)}", ranks)


def _verdict(kind: Kind, behind: Iterable[RankView], text: str, ranks: Sequence[RankView]) -> StallVerdict:
    still_s = min(rank.progress_age_s for rank in ranks)
    return StallVerdict(kind, tuple(sorted(rank.name for rank in behind)), text, still_s)


def _without_beat(ranks: Sequence[RankView], limit_s: float) -> list[RankView]:
    return [rank for rank in ranks if rank.beat_age_s > limit_s]


# -- who is behind whom


def behind_in_groups(ranks: Sequence[RankView], *, is_complete: bool = True) -> list[RankView]:
    """Those that are behind somebody, and ahead of nobody, in what scripts do by themselves."""
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


def _bounds(ranks: Iterable[RankView]) -> dict[Circle, tuple[Place, Place]]:
    """The least and the most that ranks have reached."""
    bounds: dict[Circle, tuple[Place, Place]] = {}
    for rank in ranks:
        for circle, reached in _places(rank).items():
            least, most = bounds.get(circle, (reached, reached))
            bounds[circle] = min(least, reached), max(most, reached)
    return bounds


def _places(rank: RankView) -> dict[Circle, Place]:
    replica_id, _ = rank.name
    sample, collective = rank.sample, rank.sample.collective
    places: dict[Circle, Place] = {
        (replica_id, calls.group): ((0, 0, calls.entered), not calls.is_inside) for calls in sample.calls
    }
    if collective is not None:
        places["", ""] = collective.order, not collective.is_inside
    return places


def _meeting(rank: RankView) -> tuple[Circle, Order]:
    """The collective that it is in."""
    inside = rank.sample.inside
    if isinstance(inside, GroupCalls):
        return (rank.name.replica_id, inside.group), (0, 0, inside.entered)
    return ("", ""), _order(rank.sample)


def furthest_behind(ranks: Sequence[RankView], *, is_complete: bool = True) -> list[RankView]:
    """Those that are behind somebody, and ahead of nobody who is."""
    least = min((_order(rank.sample) for rank in ranks), default=NOTHING)
    suspectable = [rank for rank in ranks if _is_suspectable(rank.sample, least if is_complete else None)]
    if not suspectable:
        return []
    lowest = min(_level(rank.sample) for rank in suspectable)
    last = [rank for rank in suspectable if _level(rank.sample) == lowest]
    # Somebody has got further, or waits and these are the ones that run.
    are_behind = any(_level(rank.sample) > lowest for rank in ranks) or (
        any(not rank.is_running for rank in ranks) and any(rank.is_running for rank in last)
    )
    return _least(last, shared_phases(rank.sample for rank in ranks), are_behind=are_behind)


def _is_suspectable(sample: ProgressSample, least: Order | None) -> bool:
    """`least`: what everybody has entered; None: not all of them are known."""
    inside = sample.inside
    return not sample.waits_for if inside is None else isinstance(inside, Collective) and inside.order == least


def _least(ranks: list[RankView], shared: frozenset[str], *, are_behind: bool) -> list[RankView]:
    """Those that are ahead of none of `ranks`; unless all `are_behind`, they must be behind one of them."""
    places = parties(lambda rank: _phases_of(rank.sample, shared), ranks)  # many ranks are at few places
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
    """Who is still in a collective is behind those who have left it."""
    return _order(sample), not sample.is_inside, sample.step


def shared_phases(samples: Iterable[ProgressSample]) -> frozenset[str]:
    """Those that at least two ranks have entered in their step: one that is one rank's own orders nobody."""
    once: set[str] = set()
    twice: set[str] = set()
    for sample in samples:
        names = {name for name, _ in sample.entered}
        twice |= once & names
        once |= names
    return frozenset(twice)


def is_behind_in_phases(sample: ProgressSample, other: ProgressSample, shared: frozenset[str]) -> bool:
    """Within one step: by some of the shared phases, and ahead by none."""
    mine, theirs = _phases_of(sample, shared), _phases_of(other, shared)
    return mine != theirs and all(have <= others for have, others in zip(mine, theirs, strict=True))


def _phases_of(sample: ProgressSample, shared: frozenset[str]) -> tuple[tuple[int, bool, int], ...]:
    """Of each shared phase: how often entered, whether left since, and the ticks if not. More is further."""
    entered = dict(sample.entered)
    done = {phase.name: phase.done for phase in sample.phases}
    return tuple((entered.get(name, 0), name not in done, done.get(name, 0)) for name in sorted(shared))


# -- held up ------------------------------------------------------------------
#
# When whoever judges others by time was held up itself. No I/O.
#
# A process that was paused, swapped out or moved with its machine has read nothing meanwhile: those that it judges
# may have moved, and where they share the machine they could not. So that time counts against nobody.

MAX_TIMES = 64


class HeldUp:
    def __init__(self) -> None:
        self._times: list[tuple[float, float]] = []  # when each ended, and how long it was; the newest last

    def was_late(self, by_s: float, now: float) -> None:
        """It was held up for `by_s` until now. Of more than MAX_TIMES times, the two oldest count as one."""
        self._times.append((now, by_s))
        if len(self._times) > MAX_TIMES:
            (_, first_s), (ended_at, second_s), *newer = self._times
            self._times = [(ended_at, first_s + second_s), *newer]

    def within(self, age_s: float, now: float) -> float:
        """For how long of the last `age_s` seconds it was held up."""
        since, total_s = now - age_s, 0.0
        for ended_at, length_s in reversed(self._times):
            if ended_at <= since:
                break
            total_s += min(length_s, ended_at - since)
        return min(total_s, age_s)

    def without(self, rank: RankView, now: float) -> RankView:
        """The rank, by that time younger."""
        if not self._times:
            return rank
        of_beat_s = self.within(rank.beat_age_s, now)
        of_sample_s = self.within(rank.progress_age_s, now) - of_beat_s
        return rank.aged(-of_beat_s, -of_sample_s) if of_beat_s or of_sample_s else rank


# -- group progress -----------------------------------------------------------
#
# Where the ranks of a group are, how long each may be there, and whether they stall. No I/O.
#
# A manager keeps this of its ranks, the lighthouse of a run's.
#
# Samples tell ages, so no clock is shared: from its arrival on a sample ages by its reader's own. What a phase takes
# is learned from all ranks together: one that has validated knows how long the others may. A first step teaches
# nothing, and neither does a time that was over its limit. A rank that is lost is dropped with its open phases.
# Whoever keeps this says when it was held up itself: no rank is older by that time.

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


# -- span ---------------------------------------------------------------------
#
# A length of time in the words of a log: 39 ms, 4.1 s, 28 s, 12 min, 3.5 h.


def span(seconds: float) -> str:
    if seconds < 0.9995:
        return f"{1000 * max(0.0, seconds):.0f} ms"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    if seconds < 119.5:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
