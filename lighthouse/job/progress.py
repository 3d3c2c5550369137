"""Where every rank of a job is, and which is behind across its replica groups. No I/O.

Managers send the views of their groups with their heartbeats; between two of them a view ages by the lighthouse's own
clock. A manager judges its own ranks; only here is it seen which rank is behind in a collective across groups.

Ranks of runs, whose functions a Wrapper runs again, say where they are on their own streams. A process that is a rank
of both is one rank: that of its replica group if the group is in the quorum, else that of its run.

A lighthouse that was held up judges nobody for that time.
"""

from collections import deque
from collections.abc import Collection, Container, Iterable, Sequence, Set
from dataclasses import dataclass, fields, replace
from typing import TypeAlias

from lighthouse.job.records import Group
from lighthouse.job.roster import Roster
from lighthouse_protocol.messages.progress import (
    HEAL,
    MAX_NAMES,
    OTHER,
    DataUse,
    GroupView,
    HealTotals,
    ProgressSample,
    RankName,
    RankView,
)
from lighthouse_protocol.messages.session import STARTING, Discards, GroupCounts, GroupReport, HoldState
from lighthouse_protocol.messages.status import RankPlace, RankState
from lighthouse_protocol.rank_set import NO_RANKS, RankSet, largest_count
from lighthouse_protocol.rules.quorum_change import describe_missing_ranks
from lighthouse_protocol.rules.stall import FLOOR_S, PauseLog, StallVerdict, find_stall, time_left_s

# -- ledger -------------------------------------------------------------------
#
# What the replica groups of a job report about their steps, as sums over all groups that ever were. No I/O.
#
# 1. A manager reports counts since its start. What is added is the difference to its last report; where a number has
#    gone back, another manager counts, and its report is all new.
# 2. The first report of a group adds nothing: most of it may be older than this lighthouse.
# 3. The time of a group runs from the first report in which it holds a quorum until it has left in good order, or is
#    forgotten. A group that is lost, restarts or heals still has time: that is what its failure costs.
# 4. Goodput is the time in committed steps over the time of all groups.

NOTHING = GroupCounts()
REASONS = tuple(field.name for field in fields(Discards))


@dataclass(slots=True)
class _Group:
    """`since`: when its time began; None: it has held no quorum."""

    counts: GroupCounts
    since: float | None = None


class Ledger:
    """Of one job. Moments are of one clock that never goes back."""

    def __init__(self) -> None:
        self.step_s = 0.0
        self._groups: dict[str, _Group] = {}
        self._past_s = 0.0  # of groups that are gone

    def take(self, replica_id: str, report: GroupReport, now: float) -> GroupCounts:
        """What is new in the report."""
        if report.counts is None:
            return NOTHING
        group = self._groups.get(replica_id)
        if group is None:
            group = self._groups[replica_id] = _Group(report.counts)
        new, group.counts = difference(group.counts, report.counts), report.counts
        if report.held is not None and report.held.mode is HoldState.LEAVING:
            self.left(replica_id, now)
        elif report.held is not None and group.since is None:
            group.since = now
        self.step_s += new.step_s
        return new

    def left(self, replica_id: str, now: float) -> None:
        """In good order: its time is over, until it holds another quorum."""
        group = self._groups.get(replica_id)
        if group is not None and group.since is not None:
            self._past_s += now - group.since
            group.since = None

    def keep(self, names: Container[str], now: float) -> None:
        """Forget all other groups."""
        for name in [name for name in self._groups if name not in names]:
            self.left(name, now)
            del self._groups[name]

    def group_s(self, now: float) -> float:
        """The time of all groups; it never goes back."""
        return self._past_s + sum(now - group.since for group in self._groups.values() if group.since is not None)

    def goodput(self, now: float) -> float | None:
        """From 0 to 1; None: no group has trained yet."""
        group_s = self.group_s(now)
        return min(1.0, self.step_s / group_s) if group_s > 0 else None


def difference(before: GroupCounts, now: GroupCounts) -> GroupCounts:
    """What has been added since `before`; all of `now`, where that is of another manager."""
    if any(new < old for old, new in zip(_numbers(before), _numbers(now), strict=True)):
        return now
    discards = Discards(*(getattr(now.discards, name) - getattr(before.discards, name) for name in REASONS))
    old, new = before.healed, now.healed
    healed = HealTotals(new.heals - old.heals, new.seconds - old.seconds, new.bytes - old.bytes)
    return GroupCounts(now.commits - before.commits, discards, now.step_s - before.step_s, healed)


def _numbers(counts: GroupCounts) -> tuple[float, ...]:
    healed, discards = counts.healed, counts.discards
    told = (getattr(discards, name) for name in REASONS)
    return (counts.commits, counts.step_s, healed.heals, healed.seconds, healed.bytes, *told)


# -- samples ------------------------------------------------------------------
#
# How a job goes, over the last minutes: a bounded ring of samples, for the page's graphs. No I/O; handed the time.
#
# 1. A sample holds what the status says at that moment; the present numbers come by the same way, so both are equal.
# 2. The rate is that of the last RATE_STEPS steps, or of RATE_OVER_S where a step takes less: a step may take a
#    millisecond or a minute. A job that stands still has a rate that falls with the time since.
# 3. A step that goes back, or a job that no group trains, begins the rate anew: a jump is no pace.
# 4. A sample costs O(1), beside the count of the groups, and at most KEPT of them are held.

EVERY_S = 2.0
KEPT = 300
RATE_STEPS = 4
RATE_OVER_S = 5.0


@dataclass(frozen=True, slots=True)
class Levels:
    """`training`: live groups of the quorum; `alive`: all live groups; of a job that has runs alone, its ranks. `step`:
    the highest of those that train. `goodput`: from 0 to 1; None: not known yet."""

    step: int
    training: int
    alive: int
    goodput: float | None


@dataclass(frozen=True, slots=True)
class Pace:
    """The present numbers, and the samples as columns of one length, the oldest first. `steps_per_s`: None: not known
    yet. `discards`: steps, summed over replica groups."""

    step: int
    training: int
    alive: int
    goodput: float | None
    steps_per_s: float | None
    discards: int
    ages_s: list[float]
    steps_per_s_then: list[float | None]
    training_then: list[int]
    alive_then: list[int]
    goodput_then: list[float | None]


@dataclass(frozen=True, slots=True)
class _Sample:
    at: float
    levels: Levels
    steps_per_s: float | None


class Samples:
    """Of one job. Moments are of one clock that never goes back."""

    def __init__(self) -> None:
        self._samples: deque[_Sample] = deque(maxlen=KEPT)
        self._rated: deque[tuple[float, int]] = deque(maxlen=KEPT)

    def take(self, levels: Levels, now: float) -> None:
        """To be called every EVERY_S."""
        self._rate_from(levels, now)
        self._samples.append(_Sample(now, levels, self.steps_per_s(levels, now)))

    def pace(self, levels: Levels, discards: int, now: float) -> Pace:
        """`levels` are those of now."""
        samples = self._samples
        return Pace(
            levels.step,
            levels.training,
            levels.alive,
            levels.goodput,
            self.steps_per_s(levels, now),
            discards,
            ages_s=[round(now - sample.at, 1) for sample in samples],
            steps_per_s_then=[sample.steps_per_s for sample in samples],
            training_then=[sample.levels.training for sample in samples],
            alive_then=[sample.levels.alive for sample in samples],
            goodput_then=[sample.levels.goodput for sample in samples],
        )

    def _rate_from(self, levels: Levels, now: float) -> None:
        rated = self._rated
        if not levels.training or (rated and levels.step < rated[-1][1]):
            rated.clear()
        if levels.training:
            rated.append((now, levels.step))
        while len(rated) > 1 and _is_enough(*rated[1], levels, now):
            rated.popleft()

    def steps_per_s(self, levels: Levels, now: float) -> float | None:
        if not levels.training:
            return 0.0
        if not self._rated or levels.step < self._rated[-1][1] or now - self._rated[0][0] < EVERY_S:
            return None
        at, step = self._rated[0]
        return round((levels.step - step) / (now - at), 3)


def _is_enough(at: float, step: int, levels: Levels, now: float) -> bool:
    return now - at >= RATE_OVER_S and levels.step - step >= RATE_STEPS


def levels_of(roster: Roster, ranks: Sequence[RankPlace], goodput: float | None) -> Levels:
    """`ranks`: of a job's runs; they count where it has no replica groups."""
    ratio = None if goodput is None else round(goodput, 4)
    if len(roster):
        training = [member for member in roster.participants() if member.is_alive]
        step = max((member.step for member in training), default=0)
        return Levels(step, len(training), sum(1 for member in roster if member.is_alive), ratio)
    alive = [rank for rank in ranks if rank.state is not RankState.LOST]
    active = [rank for rank in alive if rank.generation is not None and rank.state is not RankState.SPARE]
    return Levels(max((rank.step for rank in active), default=0), len(active), len(alive), ratio)


# -- rank grid ----------------------------------------------------------------
#
# The grid of ranks: a column is a replica group, a row a peer group, the ranks that hold the same shard. No I/O.
#
# Ranks of a sharded model meet in collectives of their group before any other: a group of which a rank is missing
# would wait in the first of them for ever. So a group is admitted whole or not at all: its manager joins when all its
# ranks have asked, and not before. To count the ranks is not enough: half of one group and the other half of another
# are as many as a whole one.

GROUPS_NAMED = 8


@dataclass(frozen=True, slots=True)
class GroupRanks:
    """A replica group whose manager is connected, admitted or not; `missing`: its ranks that are not."""

    replica_id: str
    group_world_size: int
    missing: Set[int] = NO_RANKS

    @property
    def here(self) -> int:
        return self.group_world_size - len(self.missing)

    @property
    def is_whole(self) -> bool:
        return not self.missing

    def __str__(self) -> str:
        return describe_missing_ranks(self.replica_id, self.group_world_size, self.missing)


class Grid:
    """A group of which no rank has come holds up no other, and is left out."""

    def __init__(self, groups: Iterable[GroupRanks]) -> None:
        self.groups = tuple(group for group in groups if group.here)

    @property
    def global_world_size(self) -> int:
        """Ranks that are connected."""
        return sum(group.here for group in self.groups)

    @property
    def largest_peer_group_world_size(self) -> int:
        """The ranks of the longest row: in so many groups that one is here."""
        here = (RankSet.first(group.group_world_size) for group in self.groups)
        return largest_count(all_ - g.missing if g.missing else all_ for all_, g in zip(here, self.groups, strict=True))

    @property
    def ranks_pending(self) -> int:
        """How many are missing until every group is whole."""
        return sum(len(group.missing) for group in self.groups)

    def explain(self) -> str:
        """Which groups are held back, and for which ranks; empty: none is."""
        held_back = [group for group in self.groups if not group.is_whole]
        more = len(held_back) - GROUPS_NAMED
        return "; ".join(map(str, held_back[:GROUPS_NAMED])) + (f"; and {more} groups more" if more > 0 else "")


def grid_of(members: Iterable[Group]) -> Grid:
    """O(n log n), sorted by replica_id."""
    ordered = sorted(members, key=lambda member: member.replica_id)
    return Grid(group for member in ordered if (group := _group_ranks(member)) is not None)


def _group_ranks(member: Group) -> GroupRanks | None:
    """None for one that is not here, or whose number of ranks is not known."""
    participant = member.participant
    if not member.is_alive or participant is None or participant.group_world_size == 0:
        return None
    everyone = RankSet.first(participant.group_world_size)
    missing = everyone & member.missing if member.missing else NO_RANKS
    if member.down not in ("", STARTING) and not member.missing:
        missing = everyone  # a group that is down, and names no rank, misses all; one that starts names those it misses
    return GroupRanks(member.replica_id, participant.group_world_size, missing)


# -- run rank -----------------------------------------------------------------
#
# A rank of a run, as it stands beside the ranks of replica groups.


@dataclass(frozen=True, slots=True)
class RunRank:
    """`generation`: the last one in which it was active. `state`: None: what its view says. `is_judged`: it is active
    in a generation that goes on."""

    view: RankView
    generation: int | None = None
    state: RankState | None = None
    is_judged: bool = False


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
        self._held_up = PauseLog()
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
        self._held_up.add_pause(by_s, now)

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
            verdict = find_stall(party.ranks, floor_s=self._floor_s, is_complete=party.is_complete)
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
            _Party([self._held_up.without_pauses(rank, now) for rank in party.ranks], party.is_complete)
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
