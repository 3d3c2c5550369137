"""Where every rank of a job is, and which is behind across its replica groups. No I/O.

Managers send the views of their groups with their heartbeats; between two of them a view ages by the lighthouse's own
clock. A manager judges its own ranks; only here is it seen which rank is behind in a collective across groups.

Ranks of runs, whose functions a Wrapper runs again, say where they are on their own streams. A process that is a rank
of both is one rank: that of its replica group if the group is in the quorum, else that of its run.

A lighthouse that was held up judges nobody for that time.
"""

from collections.abc import Collection, Container, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from lighthouse.members.rules.run_rank import RunRank
from lighthouse_protocol.messages.progress import (
    HEAL,
    MAX_NAMES,
    OTHER,
    DataUse,
    GroupView,
    ProgressSample,
    RankName,
    RankView,
)
from lighthouse_protocol.messages.status import RankPlace, RankState
from lighthouse_protocol.rules.held_up import HeldUp
from lighthouse_protocol.rules.stall import FLOOR_S, StallVerdict, judge, time_left_s

MAX_KNOWN = 4 * MAX_NAMES
MAX_RANKS_KEPT = 131_072

Runs: TypeAlias = Sequence[Sequence[RunRank]]
"""The ranks of each run of the job."""


@dataclass(frozen=True, slots=True)
class _Told:
    view: GroupView
    at: float


@dataclass(frozen=True, slots=True)
class _Party:
    """Ranks that meet in their collectives, and whether these are all of them."""

    ranks: list[RankView]
    is_complete: bool


class RanksKept:
    """How many ranks are known of all jobs together: each costs a kilobyte. What is beyond the limit is not shown."""

    def __init__(self, limit: int = MAX_RANKS_KEPT) -> None:
        self._limit = limit
        self.count = 0

    def grow(self, by: int) -> bool:
        """Whether there is room for so many more; fewer always have it."""
        if by > 0 and self.count + by > self._limit:
            return False
        self.count += by
        return True


class JobProgress:
    """`kept` is shared by all jobs."""

    def __init__(self, floor_s: float = FLOOR_S, kept: RanksKept | None = None) -> None:
        self._kept = kept or RanksKept()
        self._floor_s = floor_s
        self._told: dict[str, _Told] = {}
        self._held_up = HeldUp()
        self._past_s: dict[str, float] = {}  # of groups and managers that are gone
        self._known: set[str] = set()  # names of phases, MAX_KNOWN at most

    def take(self, view: GroupView, now: float) -> None:
        """Another incarnation's takes the place of the old one's."""
        before = self._told.get(view.replica_id)
        if before is not None and _is_over(before.view, view):
            self.drop(view.replica_id)
            before = None
        if not self._kept.grow(len(view.ranks) - (len(before.view.ranks) if before is not None else 0)):
            return
        self._told[view.replica_id] = _Told(view, now)
        unknown = [name for name, _ in view.seconds if name not in self._known]
        self._known.update(unknown[: MAX_KNOWN - len(self._known)])

    def was_late(self, by_s: float, now: float) -> None:
        """The lighthouse itself was held up until now."""
        self._held_up.was_late(by_s, now)

    def drop(self, replica_id: str) -> None:
        """The group is lost, or has left."""
        told = self._told.pop(replica_id, None)
        if told is not None:
            self._kept.grow(-len(told.view.ranks))
            self._add(self._past_s, told.view)

    def ranks(self, now: float) -> list[RankView]:
        return [rank for name in sorted(self._told) for rank in self._ranks_of(name, now)]

    @property
    def names(self) -> list[str]:
        """The replica groups of which something is known."""
        return sorted(self._told)

    @property
    def data(self) -> DataUse | None:
        """As the rank says that is furthest; exact only if all say so."""
        samples = [rank.sample for told in self._told.values() for rank in told.view.ranks]
        uses = [sample.data for sample in samples if sample.data is not None]
        if not uses:
            return None
        irregular = max(use.irregular_steps for use in uses)
        is_exact = all(use.is_exact for use in uses)
        return replace(max(uses, key=lambda use: use.samples), irregular_steps=irregular, is_exact=is_exact)

    def left_s(self, members: Collection[str], now: float, runs: Runs = ()) -> float | None:
        """How long until there may be a verdict about them, below zero where there may be one; None: nothing is known
        of any group. Of groups that are no members' ranks may come any time."""
        left_s = [time_left_s(party.ranks, self._floor_s) for party in self._parties(members, now, runs)]
        return min(left_s, default=self._floor_s if self._told else None)

    def verdict(self, members: Collection[str], now: float, runs: Runs = ()) -> StallVerdict | None:
        """About the replica groups `members`, those of the quorum, together; about each group that is observed; and
        about each run."""
        for party in self._parties(members, now, runs):
            verdict = judge(party.ranks, floor_s=self._floor_s, is_complete=party.is_complete)
            if verdict is not None:
                return verdict
        return None

    @property
    def observed(self) -> list[str]:
        """The groups whose ranks have no Agents: they train alone, in no quorum."""
        return [name for name in self.names if self._told[name].view.is_observed]

    def _parties(self, members: Collection[str], now: float, runs: Runs) -> list[_Party]:
        here = [name for name in sorted(members) if name in self._told]
        ranks = [rank for name in here for rank in self._ranks_of(name, now)]
        parties = [_Party(ranks, len(here) == len(members))]
        for name in self.observed:
            if name not in members:
                alone = self._ranks_of(name, now)
                parties.append(_Party(alone, len(alone) == self._told[name].view.group_world_size))
        known = _processes(rank for party in parties for rank in party.ranks)
        for run in runs:
            judged = [each.view for each in run if each.is_judged]
            own = [view for view in judged if view.process not in known]
            parties.append(_Party(own, len(own) == len(judged)))
        return [
            _Party([self._held_up.without(rank, now) for rank in party.ranks], party.is_complete)
            for party in parties
            if party.ranks
        ]

    def places(
        self, members: Collection[str], alive: Container[str], now: float, runs: Runs = ()
    ) -> tuple[RankPlace, ...]:
        """The worst first. `alive`: the replica groups that are, members or not."""
        verdict = self.verdict(members, now, runs)
        behind = frozenset(verdict.behind) if verdict is not None else frozenset[RankName]()
        ranks, wanted = self.ranks(now), frozenset(members)
        known = _processes(rank for rank in ranks if rank.name.replica_id in wanted)
        of_runs = {each.view.process: each for run in runs for each in run if each.view.process is not None}
        places: list[RankPlace] = []
        for rank in ranks:
            found = None if rank.process is None else of_runs.get(rank.process)
            if found is None or rank.process in known:
                state = _state(rank, behind) if rank.name.replica_id in alive else RankState.LOST
                places.append(_place(rank, state, None if found is None else found.generation))
        for each in (each for run in runs for each in run if each.view.process not in known):
            places.append(_place(each.view, each.state or _state(each.view, behind), each.generation))
        order = list(RankState)
        return tuple(
            sorted(places, key=lambda p: (order.index(p.state), -p.progress_age_s, p.replica_id, p.group_rank))
        )

    @property
    def seconds(self) -> dict[str, float]:
        """Each phase's own time, over all ranks that ever were; it never goes back. Of names without end, the first."""
        total = self._past_s.copy()
        for told in self._told.values():
            self._add(total, told.view)
        return total

    def _add(self, total: dict[str, float], view: GroupView) -> None:
        for name, seconds in view.seconds:
            known = name if name in self._known else OTHER
            total[known] = total.get(known, 0.0) + seconds

    def _ranks_of(self, replica_id: str, now: float) -> list[RankView]:
        told = self._told[replica_id]
        return [rank.aged(now - told.at) for rank in told.view.ranks]


def _is_over(before: GroupView, view: GroupView) -> bool:
    """A manager's sums outlive its ranks, and start anew with itself."""
    now_s = dict(view.seconds)
    return any(seconds > now_s.get(name, 0.0) for name, seconds in before.seconds)


def _state(rank: RankView, behind: frozenset[RankName]) -> RankState:
    if rank.name in behind:
        return RankState.BEHIND
    return RankState.RUNNING if rank.is_running else RankState.WAITING


def _processes(ranks: Iterable[RankView]) -> set[tuple[str, int] | None]:
    return {rank.process for rank in ranks} - {None}


def _ticks(sample: ProgressSample) -> tuple[int, int | None]:
    """Of the innermost phase; of a heal in hundredths of its bytes."""
    phase, heal = sample.innermost, sample.heal
    if phase.name != HEAL or heal is None or not heal.total:
        return phase.done, phase.total
    return 100 * heal.received // heal.total, 100


def _place(rank: RankView, state: RankState, generation: int | None) -> RankPlace:
    sample, innermost, collective = rank.sample, rank.sample.innermost, rank.sample.inside or rank.sample.collective
    done, total = _ticks(sample)
    return RankPlace(
        replica_id=rank.name.replica_id,
        group_rank=rank.name.group_rank,
        state=state,
        step=sample.step,
        phase=innermost.name,
        done=done,
        total=total,
        phase_s=innermost.open_s + rank.beat_age_s,
        collective=collective.operation if collective is not None else "",
        is_inside=sample.is_inside,
        waits_for=sample.waits_for,
        beat_age_s=rank.beat_age_s,
        progress_age_s=rank.progress_age_s,
        limit_s=rank.limit_s,
        host=rank.host,
        pid=rank.pid,
        at=sample.at,
        generation=generation,
    )
