"""Progress of each rank in a job, how fast the job is training, and which ranks are behind across replica groups.

Managers send views of their groups with heartbeats. Between two heartbeats, a view ages by the lighthouse's clock. A
manager compares only its own ranks, so only the lighthouse can detect a rank that is behind in a collective across
groups. In a run, where a Wrapper restarts each rank's function, every rank reports on its own stream. A process that is
a rank of both a group and a run counts once: in its group if that group is in the quorum, otherwise in its run. The
lighthouse's own pauses do not count against any rank.

`Samples` keeps samples from the last few minutes for graphs, and `Grid` counts the connected ranks. Times come from the
caller's monotonic clock, and this module does no I/O.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, fields, replace
from typing import TypeAlias

from lighthouse.job.records import Group, GroupReports
from lighthouse.job.roster import Job
from lighthouse.job.slow_ranks import SLOW_AFTER_S, SlowRank, SlowRanks
from lighthouse_protocol.messages.progress import (
    HEAL,
    MAX_NAMES,
    OTHER,
    DataUse,
    GroupView,
    HealTotals,
    ProgressSample,
    RankName,
    RankPlace,
    RankState,
    RankView,
)
from lighthouse_protocol.messages.session import STARTING, Discards, GroupCounts
from lighthouse_protocol.rank_set import NO_RANKS, RankSet, largest_count
from lighthouse_protocol.rules.quorum_change import describe_missing_ranks
from lighthouse_protocol.rules.stall import FLOOR_S, PauseLog, StallVerdict, find_stall, time_left_s

NOTHING = GroupCounts()
REASONS = tuple(field.name for field in fields(Discards))


def difference(before: GroupCounts, now: GroupCounts) -> GroupCounts:
    """Return the increase from `before` to `now`.

    If a number has decreased, return `now`, because a new manager has counted from zero.
    """
    if any(new < old for old, new in zip(_numbers(before), _numbers(now), strict=True)):
        return now
    discards = Discards(*(getattr(now.discards, name) - getattr(before.discards, name) for name in REASONS))
    old, new = before.healed, now.healed
    healed = HealTotals(new.heals - old.heals, new.seconds - old.seconds, new.bytes - old.bytes)
    step_s, discarded_s = now.step_s - before.step_s, now.discarded_s - before.discarded_s
    return GroupCounts(now.commits - before.commits, discards, step_s, healed, discarded_s)


def _numbers(counts: GroupCounts) -> tuple[float, ...]:
    healed, discards = counts.healed, counts.discards
    reasons = (getattr(discards, name) for name in REASONS)
    return (counts.commits, counts.step_s, counts.discarded_s, healed.heals, healed.seconds, healed.bytes, *reasons)


EVERY_S = 2.0
KEPT = 300
RATE_STEPS = 4
RATE_OVER_S = 5.0


@dataclass(frozen=True, slots=True)
class Levels:
    """Size and progress of a job at one time. In a job that has only runs, ranks are counted instead of groups."""

    step: int  # highest step of the groups that are training
    training: int  # live groups in the quorum
    alive: int  # all live groups
    goodput: float | None  # from 0 to 1; None if unknown


@dataclass(frozen=True, slots=True)
class Pace(Levels):
    """Speed and size of a job now. The lists contain its earlier samples, oldest first, with their ages in seconds."""

    steps_per_s: float | None  # None if unknown
    discards: int  # discarded steps, summed over replica groups
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
    """Samples of a job over the last few minutes, for the dashboard's graphs.

    1. A sample has the same values as the job's status at that time, because one function computes both.
    2. The training rate covers the last RATE_STEPS steps, or the last RATE_OVER_S seconds if these steps took less
       time, because a step may take a millisecond or a minute. While a job makes no progress, its rate falls.
    3. The measurement of the rate restarts if the step decreases or no group is training.
    4. Apart from counting the groups, a sample takes constant time. Up to KEPT samples are kept.
    """

    def __init__(self) -> None:
        self._samples: deque[_Sample] = deque(maxlen=KEPT)
        self._rated: deque[tuple[float, int]] = deque(maxlen=KEPT)

    def add_levels(self, levels: Levels, now: float) -> None:
        """Add a sample. Call this every EVERY_S seconds."""
        self._rate_from(levels, now)
        self._samples.append(_Sample(now, levels, self.steps_per_s(levels, now)))

    def pace_of(self, levels: Levels, discards: int, now: float) -> Pace:
        """Combine the current state `levels`, the total of discarded steps and the stored samples into a `Pace`."""
        samples = self._samples
        return Pace(
            **asdict(levels),
            steps_per_s=self.steps_per_s(levels, now),
            discards=discards,
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
        while len(rated) > 1 and now - rated[1][0] >= RATE_OVER_S and levels.step - rated[1][1] >= RATE_STEPS:
            rated.popleft()

    def steps_per_s(self, levels: Levels, now: float) -> float | None:
        if not levels.training:
            return 0.0
        if not self._rated or levels.step < self._rated[-1][1] or now - self._rated[0][0] < EVERY_S:
            return None
        at, step = self._rated[0]
        return round((levels.step - step) / (now - at), 3)


def levels_of(job: Job, ranks: Sequence[RankPlace], goodput: float | None) -> Levels:
    """Compute a job's current `Levels` from its groups, or from the `ranks` of its runs if it has no groups."""
    ratio = None if goodput is None else round(goodput, 4)
    if job.groups:
        training = [member for member in job.list_participants() if member.is_alive]
        step = max((member.step for member in training), default=0)
        return Levels(step, len(training), sum(1 for member in job.groups.values() if member.is_alive), ratio)
    alive = [rank for rank in ranks if rank.state is not RankState.LOST]
    active = [rank for rank in alive if rank.generation is not None and rank.state is not RankState.SPARE]
    return Levels(max((rank.step for rank in active), default=0), len(active), len(alive), ratio)


GROUPS_NAMED = 8


@dataclass(frozen=True, slots=True)
class GroupRanks:
    """Connected and missing ranks in a replica group whose manager is connected."""

    replica_id: str
    group_world_size: int
    missing: Set[int] = NO_RANKS  # ranks that are not connected

    @property
    def connected_count(self) -> int:
        return self.group_world_size - len(self.missing)

    def __str__(self) -> str:
        return describe_missing_ranks(self.replica_id, self.group_world_size, self.missing)


class Grid:
    """Grid of a job's connected ranks, with a column for each replica group and a row for each shard.

    Ranks of a sharded model first run collectives within their group, where they would wait forever for missing ranks.
    So a manager joins only after all its ranks have requested a quorum. Counting ranks is not enough, because two
    incomplete groups may have as many ranks as a complete one. Groups without a connected rank are left out, because
    no other group waits for them.
    """

    def __init__(self, groups: Iterable[GroupRanks]) -> None:
        self.groups = tuple(group for group in groups if group.connected_count)

    @property
    def global_world_size(self) -> int:
        """Number of connected ranks in all groups."""
        return sum(group.connected_count for group in self.groups)

    @property
    def largest_peer_group_world_size(self) -> int:
        """Largest number of groups in which the same rank is connected: the length of the longest row."""
        here = (RankSet.first(group.group_world_size) for group in self.groups)
        return largest_count(all_ - g.missing if g.missing else all_ for all_, g in zip(here, self.groups, strict=True))

    @property
    def ranks_pending(self) -> int:
        """Number of ranks that are not connected, in all groups."""
        return sum(len(group.missing) for group in self.groups)

    def describe_incomplete(self) -> str:
        """Describe the incomplete groups and their missing ranks. Return "" if all groups are complete."""
        held_back = [group for group in self.groups if group.missing]
        more = len(held_back) - GROUPS_NAMED
        return "; ".join(map(str, held_back[:GROUPS_NAMED])) + (f"; and {more} groups more" if more > 0 else "")


def grid_of(members: Iterable[Group]) -> Grid:
    """Build the grid of the groups `members`, sorted by replica_id."""
    ordered = sorted(members, key=lambda member: member.replica_id)
    return Grid(group for member in ordered if (group := _group_ranks(member)) is not None)


def _group_ranks(member: Group) -> GroupRanks | None:
    """Return the group's ranks, or None if the group is not alive or its number of ranks is unknown."""
    participant = member.participant
    if not member.is_alive or participant is None or participant.group_world_size == 0:
        return None
    everyone = RankSet.first(participant.group_world_size)
    missing = everyone & member.missing if member.missing else NO_RANKS
    if member.down not in ("", STARTING) and not member.missing:
        missing = everyone  # a starting group names its missing ranks
    return GroupRanks(member.replica_id, participant.group_world_size, missing)


@dataclass(frozen=True, slots=True)
class RunRank:
    """A rank of a run, described in the same form as the ranks of replica groups."""

    view: RankView
    generation: int | None = None  # last generation in which the rank was active
    state: RankState | None = None  # derived from the view if None
    is_judged: bool = False  # True if the rank is active in an unbroken generation


MAX_KNOWN = 4 * MAX_NAMES
MAX_RANKS_KEPT = 131_072

Runs: TypeAlias = Sequence[Sequence[RunRank]]
"""Ranks in each run of the job."""


@dataclass(frozen=True, slots=True)
class _PeerRanks:
    """Ranks that share collectives and are therefore checked for stalls together."""

    ranks: list[RankView]
    is_complete: bool  # no rank is missing


class RankQuota:
    """Limit on the number of stored ranks over all jobs. Each rank takes about a kilobyte."""

    def __init__(self, limit: int = MAX_RANKS_KEPT) -> None:
        self._limit = limit
        self.count = 0

    def reserve(self, by: int) -> bool:
        """Reserve room for `by` more ranks, or release room if `by` is negative. Return False if there is no room."""
        if by > 0 and self.count + by > self._limit:
            return False
        self.count += by
        return True


class JobProgress:
    """Progress of a job's ranks, as last reported by its groups. All jobs share the quota `kept`."""

    def __init__(
        self,
        groups: Mapping[str, Group],
        floor_s: float = FLOOR_S,
        kept: RankQuota | None = None,
        slow_after_s: float = SLOW_AFTER_S,
    ) -> None:
        self._groups = groups
        self.slow_ranks = SlowRanks(slow_after_s)
        self._kept = kept or RankQuota()
        self._floor_s = floor_s
        self.pauses = PauseLog()
        self._past_s: dict[str, float] = {}  # seconds of former groups and managers, by phase
        self._known: set[str] = set()  # names of phases, MAX_KNOWN at most

    def add_view(self, reports: GroupReports, view: GroupView, now: float) -> bool:
        """Store a group's view in its `reports`, without its ranks if the quota is exhausted. Return whether all fits.

        Ranks from an older view must not stay, because they would soon look stalled. If the view is from a new manager,
        the times in the old view still count in `phase_seconds`.
        """
        if reports.view is not None and _is_over(reports.view, view):
            self.drop_view(reports)
        before = len(reports.view.ranks) if reports.view is not None else 0
        is_stored = self._kept.reserve(len(view.ranks) - before)
        if not is_stored:
            self._kept.reserve(-before)
            view = replace(view, ranks=())
        reports.view, reports.view_at = view, now
        unknown = [name for name, _ in view.seconds if name not in self._known]
        self._known.update(unknown[: MAX_KNOWN - len(self._known)])
        return is_stored

    def drop_view(self, reports: GroupReports) -> None:
        """Drop the view of a former group or manager. The view's times still count in `phase_seconds`."""
        if reports.view is not None:
            self._kept.reserve(-len(reports.view.ranks))
            self._add_seconds(self._past_s, reports.view)
            reports.view = None

    @property
    def stored_ranks(self) -> int:
        """Number of stored ranks over all jobs."""
        return self._kept.count

    @property
    def _views(self) -> list[tuple[Group, GroupView]]:
        """Groups that have a stored view, with their views, sorted by name."""
        found = [(group, view) for group in self._groups.values() if (view := group.reports.view) is not None]
        return sorted(found, key=lambda pair: pair[0].replica_id)

    @property
    def data(self) -> DataUse | None:
        """Use of training data as reported by the most advanced rank, or None if no rank reports it.

        The numbers are exact only if all ranks report exact numbers.
        """
        uses = [use for _, view in self._views for rank in view.ranks if (use := rank.sample.data) is not None]
        if not uses:
            return None
        irregular = max(use.irregular_steps for use in uses)
        is_exact = all(use.is_exact for use in uses)
        return replace(max(uses, key=lambda use: use.samples), irregular_steps=irregular, is_exact=is_exact)

    def verdict_in_s(self, now: float, runs: Runs = ()) -> float | None:
        """Return the seconds until a stall verdict is possible. Negative if it is possible now.

        If no rank is checked for stalls at present, return the shortest duration of a stall, or None if no group has a
        stored view.
        """
        left_s = [time_left_s(peers.ranks, self._floor_s) for peers in self._peer_sets(now, runs)]
        return min(left_s, default=self._floor_s if self._views else None)

    def verdict(self, now: float, runs: Runs = ()) -> StallVerdict | None:
        """Return the first stall found among the quorum's participants, the observed groups and the runs, or None."""
        for peers in self._peer_sets(now, runs):
            verdict = find_stall(peers.ranks, floor_s=self._floor_s, is_complete=peers.is_complete)
            if verdict is not None:
                return verdict
        return None

    def find_slow(self, now: float) -> dict[RankName, SlowRank] | None:
        """Return the slow ranks of live groups, or None if the next comparison is not due yet."""
        if not self.slow_ranks.is_due(now):
            return None
        return self.slow_ranks.compare((view for group, view in self._views if group.is_alive), now)

    @property
    def observed(self) -> list[str]:
        """Names of the groups whose ranks run without Agents. They train alone, outside quorums."""
        return [group.replica_id for group, view in self._views if view.is_observed]

    def _peer_sets(self, now: float, runs: Runs) -> list[_PeerRanks]:
        views = self._views
        members = [(group, view) for group, view in views if group.is_participant]
        size = sum(group.is_participant for group in self._groups.values())
        is_complete = len(members) == size and all(view.ranks for _, view in members)
        sets = [_PeerRanks([rank for each in members for rank in _aged(*each, now)], is_complete)]
        for group, view in views:
            if view.is_observed and not group.is_participant:
                alone = _aged(group, view, now)
                sets.append(_PeerRanks(alone, len(alone) == view.group_world_size))
        known = _processes(rank for peers in sets for rank in peers.ranks)
        for run in runs:
            judged = [each.view for each in run if each.is_judged]
            own = [view for view in judged if view.process not in known]
            sets.append(_PeerRanks(own, len(own) == len(judged)))
        return [
            _PeerRanks([self.pauses.without_pauses(rank, now) for rank in peers.ranks], peers.is_complete)
            for peers in sets
            if peers.ranks
        ]

    def places(self, now: float, runs: Runs = ()) -> tuple[RankPlace, ...]:
        """Return the progress of each rank of the job's groups and `runs`. Ranks that are behind come first."""
        verdict = self.verdict(now, runs)
        behind = frozenset(verdict.behind) if verdict is not None else frozenset[RankName]()
        ranks = [(group, rank) for group, view in self._views for rank in _aged(group, view, now)]
        known = _processes(rank for group, rank in ranks if group.is_participant)
        of_runs = {each.view.process: each for run in runs for each in run if each.view.process is not None}
        places: list[RankPlace] = []
        for group, rank in ranks:
            found = None if rank.process is None else of_runs.get(rank.process)
            if found is None or rank.process in known:
                state = _state(rank, behind) if group.is_alive else RankState.LOST
                ratio_1m, ratio_10m, is_slow = self.slow_ranks.slowness(rank.name)
                place = _place(rank, state, None if found is None else found.generation)
                places.append(replace(place, compute_ratio_1m=ratio_1m, compute_ratio_10m=ratio_10m, is_slow=is_slow))
        for each in (each for run in runs for each in run if each.view.process not in known):
            places.append(_place(each.view, each.state or _state(each.view, behind), each.generation))
        order = list(RankState)
        return tuple(
            sorted(places, key=lambda p: (order.index(p.state), -p.progress_age_s, p.replica_id, p.group_rank))
        )

    @property
    def phase_seconds(self) -> dict[str, float]:
        """Seconds in each phase, excluding nested phases, over all current and former ranks.

        Phases beyond the first MAX_KNOWN names count as OTHER.
        """
        total = self._past_s.copy()
        for _, view in self._views:
            self._add_seconds(total, view)
        return total

    def _add_seconds(self, total: dict[str, float], view: GroupView) -> None:
        for name, seconds in view.seconds:
            known = name if name in self._known else OTHER
            total[known] = total.get(known, 0.0) + seconds


def _aged(group: Group, view: GroupView, now: float) -> list[RankView]:
    return [rank.aged(now - group.reports.view_at) for rank in view.ranks]


def _is_over(before: GroupView, view: GroupView) -> bool:
    """Return whether `view` is from a newer manager than `before`. A new manager's totals start again from zero."""
    now_s = dict(view.seconds)
    return any(seconds > now_s.get(name, 0.0) for name, seconds in before.seconds)


def _state(rank: RankView, behind: frozenset[RankName]) -> RankState:
    if rank.name in behind:
        return RankState.BEHIND
    return RankState.RUNNING if rank.is_running else RankState.WAITING


def _processes(ranks: Iterable[RankView]) -> set[tuple[str, int] | None]:
    return {rank.process for rank in ranks} - {None}


def _ticks(sample: ProgressSample) -> tuple[int, int | None]:
    """Return the completed and total units of work of the innermost phase. The total is None if unknown.

    The units of a heal are percent.
    """
    phase, heal = sample.innermost, sample.heal
    if phase.name != HEAL or heal is None or not heal.total:
        return phase.done, phase.total
    return 100 * heal.received // heal.total, 100


# Fields of a sample that are shown as sent by the rank. For a collective, only the operation is shown.
_SHOWN_AS_SENT = ({f.name for f in fields(ProgressSample)} & {f.name for f in fields(RankPlace)}) - {"collective"}


def _place(rank: RankView, state: RankState, generation: int | None) -> RankPlace:
    sample, innermost, collective = rank.sample, rank.sample.innermost, rank.sample.inside or rank.sample.collective
    done, total = _ticks(sample)
    return RankPlace(
        **{name: getattr(sample, name) for name in _SHOWN_AS_SENT},
        replica_id=rank.name.replica_id,
        group_rank=rank.name.group_rank,
        state=state,
        phase=innermost.name,
        done=done,
        total=total,
        phase_s=innermost.open_s + rank.beat_age_s,
        collective=collective.operation if collective is not None else "",
        is_inside=sample.is_inside,
        beat_age_s=rank.beat_age_s,
        progress_age_s=rank.progress_age_s,
        limit_s=rank.limit_s,
        host=rank.host,
        pid=rank.pid,
        generation=generation,
    )
