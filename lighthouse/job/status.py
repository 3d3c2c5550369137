"""Status of a job and of a run, as shown in the log, the CLI, the dashboard and the metrics, and the job's timeline.

`explain` describes in one line why there is or is not a quorum. `TimelineWriter` fills the timeline from the effects of
the machine and the steps of the members. Building a status takes O(n log n) time, so it happens only on request, never
while a quorum forms.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from lighthouse.job import events
from lighthouse.job.forming import QuorumMachine, leaves_holders_behind, stragglers
from lighthouse.job.progress import Grid, RunRank, grid_of
from lighthouse.job.records import Group, Heal, Kind, QuorumConfig, Rank, RunName, SavedRun, Verdict
from lighthouse.job.restarts import RunMachine
from lighthouse.job.roster import Job
from lighthouse_protocol.messages.incident import IncidentSummary
from lighthouse_protocol.messages.membership import Quorum
from lighthouse_protocol.messages.progress import (
    STEP,
    DataUse,
    OpenPhase,
    ProgressSample,
    RankName,
    RankPlace,
    RankView,
)
from lighthouse_protocol.messages.progress import RankState as PlaceState
from lighthouse_protocol.messages.run import RankState, RankStatus, RunStatus, SupervisorStatus
from lighthouse_protocol.messages.status import (
    HealStatus,
    JobStatus,
    MemberState,
    MemberStatus,
    PreemptionStatus,
    TimelineEntry,
    TimelineKind,
)
from lighthouse_protocol.rules.access import short_name
from lighthouse_protocol.rules.stall import FIRST_S, StallVerdict

NAMES_SHOWN = 8


def job_status(
    job: str,
    machine: QuorumMachine,
    now: float,
    stall: StallVerdict | None = None,
    ranks: tuple[RankPlace, ...] = (),
    timeline: tuple[TimelineEntry, ...] = (),
    incidents: tuple[IncidentSummary, ...] = (),
    heals: Mapping[str, HealStatus] = MappingProxyType({}),
    data: DataUse | None = None,
    steps_per_s: float | None = None,
) -> JobStatus:
    """Build a job's status. `heals` contains the status of each healing group."""
    own = machine.job
    members = sorted(own.groups.values(), key=lambda member: member.replica_id)
    return JobStatus(
        job=job,
        quorum_id=machine.quorum.quorum_id if machine.quorum else 0,
        quorum_age_s=now - own.formed_at if own.formed_at is not None else 0.0,
        verdict=machine.decision.verdict.value,
        explanation=explain(machine, now, steps_per_s),
        quorums_formed=own.changes,
        rounds=own.rounds,
        members=tuple(_member_status(m, machine, now, heals.get(m.replica_id)) for m in members),
        phase=machine.standing.phase.value,
        sessions=len(machine.presence.sessions),
        recalls=machine.standing.recalls,
        revokes=machine.standing.revokes,
        ranks=ranks,
        stall=stall.text if stall is not None else "",
        stall_s=stall.still_s if stall is not None else 0.0,
        timeline=timeline,
        incidents=incidents,
        data=data,
        ended_step=_ended_step(machine),
    )


def explain(machine: QuorumMachine, now: float, steps_per_s: float | None = None) -> str:
    """Describe in one line why a job has a quorum or not. The text contains numbers that change over time."""
    held = machine.presence.silence.all_excused_for if now < machine.presence.silence.all_excused_until else ""
    silent = machine.presence.silent_groups(now)
    overdue = f"no heartbeat in time from {_shown(silent)}" if silent else ""
    grid = grid_of(machine.job.groups.values())
    starting = _starting(machine, grid)
    why = "" if starting and _are_all_starting(machine) else _explain(machine, now, steps_per_s)
    return "; ".join(filter(None, (why, held, overdue, starting, grid.describe_incomplete())))


def _are_all_starting(machine: QuorumMachine) -> bool:
    alive = [group for group in machine.job.groups.values() if group.is_alive]
    return machine.decision.verdict is Verdict.NO_JOINS and bool(alive) and all(group.is_starting for group in alive)


def _ended_step(machine: QuorumMachine) -> int | None:
    """Return the step at which the job ended, or None if it is running or starting again."""
    is_over = machine.decision.verdict is Verdict.NO_JOINS and not _are_all_starting(machine)
    return machine.job_end.step if is_over else None


def awaited(machine: QuorumMachine) -> str:
    """Describe what pending joins are waiting for, without numbers that change over time. Return "" if none wait."""
    if not (what := _awaited(machine)):
        return ""
    grid = grid_of(machine.job.groups.values())
    return "; ".join(filter(None, (what, _starting(machine, grid), grid.describe_incomplete())))


def _awaited(machine: QuorumMachine) -> str:
    joined, config = machine.joins.candidate_count, machine.config
    names = _shown(sorted(member.replica_id for member in machine.joins.list_candidates()))
    match machine.decision.verdict:
        case Verdict.TOO_FEW_PARTICIPANTS:
            more = config.min_replicas - joined
            groups = f"{more} more replica group{'s' if more > 1 else ''}"
            return f"{groups}: at least {config.min_replicas} are needed (--min-replicas), joined: {names}"
        case Verdict.NO_ALLOWED_SIZE:
            return f"more replica groups: allowed sizes are {_sizes(config)}, joined: {names}"
        case Verdict.WAITING_FOR_MEMBERS:
            return f"{_names(machine)}, the members of the quorum, to finish their step"
        case Verdict.WAITING_FOR_STRAGGLERS:
            return f"{_names(machine)}, at most {config.join_timeout_s:g} s (--join-timeout)"
        case Verdict.WAITING_FOR_RECALL:
            return "the members of the quorum to report their step"
        case Verdict.WAITING_FOR_RECONNECT:
            return "the members of the quorum to reconnect after the restart of the lighthouse"
        case Verdict.WAITING_FOR_LEASES:
            return "the last quorum's leases to expire: none of its members has joined, or the lighthouse has restarted"
        case Verdict.WAITING_FOR_LOST_MEMBER:
            return "a lost member to return before a spare replaces it (--spare-promotion-delay)"
        case Verdict.NO_JOINS | Verdict.FORMED | Verdict.READY:
            return ""


def _starting(machine: QuorumMachine, grid: Grid) -> str:
    """Describe the starting groups that have no connected rank, or return "". `grid` contains the other groups."""
    begun = {group.replica_id for group in grid.groups}
    names = [
        m.replica_id for m in machine.job.groups.values() if m.is_alive and m.is_starting and m.replica_id not in begun
    ]
    return f"starting: {_shown(sorted(names))}" if names else ""


def _explain(machine: QuorumMachine, now: float, steps_per_s: float | None) -> str:
    joined, healthy, config = machine.joins.candidate_count, machine.job.counts[Kind.HEALTHY], machine.config
    left = max(0.0, (machine.decision.until or now) - now)
    match machine.decision.verdict:
        case Verdict.NO_JOINS:
            end = machine.job_end.step
            return f"waiting for a replica group to join; {healthy} alive" if end is None else f"ended at step {end}"
        case Verdict.FORMED:
            return _progress(machine, steps_per_s)
        case Verdict.TOO_FEW_PARTICIPANTS:
            return f"waiting for replica groups: {joined} of at least {config.min_replicas} joined (--min-replicas)"
        case Verdict.NO_ALLOWED_SIZE:
            return f"waiting for replica groups: {joined} joined, allowed sizes are {_sizes(config)}"
        case Verdict.WAITING_FOR_MEMBERS:
            return f"waiting for {_names(machine)} to finish their step; {joined} joined"
        case Verdict.WAITING_FOR_STRAGGLERS:
            newest = ", none with the newest state" if leaves_holders_behind(machine.job) else ""
            return f"waiting for {_names(machine)}, {left:.0f} s more at most; {joined} of {healthy} joined{newest}"
        case Verdict.WAITING_FOR_RECALL:
            return f"waiting for the quorum's members to report their step: {machine.standing.reason}; {joined} joined"
        case Verdict.WAITING_FOR_RECONNECT:
            return f"waiting for the quorum to reconnect after a restart, {left:.1f} s more at most; {joined} joined"
        case Verdict.WAITING_FOR_LEASES:
            away = _shown(sorted(machine.standing.unreported_members(now)))
            what = f"{away} to return after a restart" if away else "the last quorum's leases to expire"
            return f"waiting for {what}, {left:.1f} s more at most; {joined} joined"
        case Verdict.WAITING_FOR_LOST_MEMBER:
            return f"waiting {left:.1f} s more for a lost member before a spare replaces it; {joined} joined"
        case Verdict.READY:
            return f"forming a quorum; {joined} joined"


def _progress(machine: QuorumMachine, steps_per_s: float | None) -> str:
    """Describe the progress of a job with a quorum: its speed, and how many of its groups are training."""
    size = len(machine.quorum.participants) if machine.quorum else 0
    if not machine.job.counts[Kind.HEALTHY]:
        return f"no group is alive; {size} took part"
    training = sum(member.is_alive for member in machine.job.list_participants())
    rate = f"{steps_per_s:.3g} steps/s, " if steps_per_s else ""
    return f"{rate}{training} of {max(size, len(machine.job.groups))} groups"


def _sizes(config: QuorumConfig) -> str:
    return ", ".join(str(size) for size in sorted(config.allowed_sizes)) or f"at most {config.active}"


def _names(machine: QuorumMachine) -> str:
    return _shown([group.replica_id for group in stragglers(machine.job)])


def _shown(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return ", ".join(names[:NAMES_SHOWN]) + more


def _member_status(member: Group, machine: QuorumMachine, now: float, heal: HealStatus | None) -> MemberStatus:
    participant, state = member.participant, _state(member, machine)
    return MemberStatus(
        replica_id=member.replica_id,
        start=short_name(member.incarnation),
        state=MemberState.HEALING if heal is not None and state is MemberState.PARTICIPANT else state,
        is_participant=member.is_participant,
        step=member.step,
        world_size=participant.group_world_size if participant else 0,
        heartbeat_age_s=0.0 if member.call is not None and member.session is None else max(0.0, now - member.seen_at),
        commit_failures=participant.commit_failures if participant else 0,
        address=participant.address if participant else "",
        store_address=participant.store_address if participant else "",
        heal=heal,
        preemption=preemption_status(member, now) if member.is_alive else None,
    )


def preemption_status(member: Group, now: float) -> PreemptionStatus | None:
    notice, ends_at = member.reports.preemption, member.reports.preempted_at
    if notice is None:
        return None
    left_s = None if ends_at is None else max(0.0, ends_at - now)
    return PreemptionStatus(notice.source, notice.reason, notice.host, left_s, notice.is_advice)


def _state(member: Group, machine: QuorumMachine) -> MemberState:
    if not member.is_alive:
        return MemberState.EXPIRED
    if member.call is not None:
        return MemberState.JOINED
    if member.is_starting:
        return MemberState.STARTING
    if member.down:
        return MemberState.DOWN
    if member.has_missed:
        return MemberState.TIMED_OUT
    if machine.decision.missed_at is not None:
        return MemberState.STRAGGLER
    return MemberState.PARTICIPANT if member.is_participant else MemberState.IDLE


ENTRIES_KEPT = 500
NAMES = 16
TOGETHER_S = 1.0


class Timeline:
    """Newest events of a job, for display. Events of the same kind and text within TOGETHER_S share an entry."""

    def __init__(self, limit: int = ENTRIES_KEPT) -> None:
        self._entries: deque[TimelineEntry] = deque(maxlen=limit)

    def add_entry(self, at_unix_s: float, kind: TimelineKind, replica_ids: Sequence[str], text: str = "") -> None:
        """Add an entry. If the newest entry is recent and has the same kind and text, add the names to it instead."""
        newest = self._entries[-1] if self._entries else None
        if newest is None or not _is_same(newest, at_unix_s, kind, text) or not replica_ids:
            names = tuple(replica_ids)
            self._entries.append(TimelineEntry(at_unix_s, kind, names[:NAMES], len(names[NAMES:]), text))
            return
        names = (*newest.replica_ids, *replica_ids)
        self._entries[-1] = replace(newest, replica_ids=names[:NAMES], more=newest.more + len(names[NAMES:]))

    @property
    def entries(self) -> tuple[TimelineEntry, ...]:
        """All entries, oldest first."""
        return tuple(self._entries)


def _is_same(newest: TimelineEntry, at_unix_s: float, kind: TimelineKind, text: str) -> bool:
    is_now = abs(at_unix_s - newest.at_unix_s) <= TOGETHER_S
    return is_now and (newest.kind, newest.text) == (kind, text) and bool(newest.replica_ids)


class TimelineWriter(Timeline):
    """Timeline that is filled from the quorum machine's effects and the groups' steps.

    A participant below its quorum's highest step is healing. It has healed once it works on a later step, or joins at
    that step or a later one. A group that is catching up works on later steps while it heals, so only its join shows
    that it has healed.
    """

    def __init__(self, job: Job) -> None:
        super().__init__()
        self._job = job

    def add_effects(self, effects: Sequence[events.QuorumEffect], at_unix_s: float) -> None:
        """Add timeline entries for effects that the machine has returned."""
        for effect in effects:
            match effect:
                case events.MemberJoined(replica_id):
                    self.add_entry(at_unix_s, TimelineKind.JOINED, (replica_id,))
                case events.MemberReturned(replica_id, text):
                    self.add_entry(at_unix_s, TimelineKind.JOINED, (replica_id,), text)
                case events.MemberLost(replica_id, _, reason):
                    self._end_heal(replica_id)
                    self.add_entry(at_unix_s, TimelineKind.LOST, (replica_id,), reason)
                case events.MemberLeft(replica_id):
                    self._end_heal(replica_id)
                    self.add_entry(at_unix_s, TimelineKind.LEFT, (replica_id,))
                case events.MemberDraining(replica_id):
                    self.add_entry(at_unix_s, TimelineKind.DRAINED, (replica_id,))
                case events.QuorumFormed():
                    self._add_quorum(effect.quorum, at_unix_s, is_new=effect.is_new)
                case _:
                    pass

    def check_heal(self, replica_id: str, at_unix_s: float) -> None:
        """Check, after a heartbeat of the group, whether its heal is complete."""
        group = self._job.groups.get(replica_id)
        heal = group.heal if group is not None else None
        if group is not None and heal is not None and not heal.catches_up and group.step > heal.upto:
            self._healed(group, group.step, at_unix_s)

    def add_verdict(self, verdict: StallVerdict | None, at_unix_s: float) -> None:
        """Add an entry for a new stall verdict or, if `verdict` is None, for the end of a stall."""
        if verdict is None:
            self.add_entry(at_unix_s, TimelineKind.MOVES, (), "progress resumed")
            return
        names = sorted({rank.replica_id for rank in verdict.behind})
        text = f"nothing has moved for {verdict.still_s:.0f} s: {verdict.text}"
        self.add_entry(at_unix_s, TimelineKind.STALL, names, text)

    def _add_quorum(self, quorum: Quorum, at_unix_s: float, *, is_new: bool) -> None:
        max_step = max(member.step for member in quorum.participants)
        if is_new:
            names = [member.replica_id for member in quorum.participants]
            noun = "participant" if len(names) == 1 else "participants"
            text = f"quorum {quorum.quorum_id}: {len(names)} {noun} at step {max_step}"
            self.add_entry(at_unix_s, TimelineKind.QUORUM, names, text)
        for member in quorum.participants:
            group = self._job.groups.get(member.replica_id)
            if group is None:
                continue
            if group.heal is not None and member.step >= group.heal.upto:
                self._healed(group, member.step, at_unix_s)
            if member.step < max_step and group.heal is None:
                group.heal = Heal(max_step, member.catch_up)
                text = f"from step {member.step} to {max_step}"
                self.add_entry(at_unix_s, TimelineKind.HEALING, (group.replica_id,), text)

    def _healed(self, group: Group, step: int, at_unix_s: float) -> None:
        group.heal = None
        self.add_entry(at_unix_s, TimelineKind.HEALED, (group.replica_id,), f"at step {step}")

    def _end_heal(self, replica_id: str) -> None:
        if (group := self._job.groups.get(replica_id)) is not None:
            group.heal = None


_WAITS = {RankState.READY: "the next generation", RankState.FINISHED: "the other ranks to finish"}


def run_status(name: RunName, machine: RunMachine, now: float) -> RunStatus:
    generations = machine.generations
    generation = generations.current.generation
    places = {rank: place for place, rank in enumerate(generation.active if generation else ())}
    reported = {view.name.group_rank: view.sample.step for view in generations.progress.ranks(now)}
    return RunStatus(
        job=name[0],
        run=name[1],
        verdict=machine.verdict(now).value,
        counters=generations.restarts.counters,
        terms=generations.terms,
        slots=tuple(generations.current.slots),
        is_complete=machine.completed is not None,
        stop=machine.stop,
        ranks=tuple(
            _rank(rank, places.get(rank.rank), reported.get(rank.rank.slot, rank.step), _run_state(rank, machine), now)
            for rank in sorted(generations.ranks, key=lambda rank: rank.rank)
        ),
        supervisors=tuple(
            SupervisorStatus(each.entry.name, each.entry.host, each.entry.slots, each.session is not None, each.last)
            for each in sorted(machine.supervisors, key=lambda each: each.entry.name)
        ),
        excluded=machine.supervisors.excluded_hosts,
        budget_used=max(
            machine.supervisors.budget_used,
            generations.budget.used_share(generations.terms, generations.wall_time(now)),
        ),
    )


def saved_run_status(name: RunName, saved: SavedRun) -> RunStatus:
    """Build the status of a run without processes from its stored record."""
    machine = RunMachine(record=saved.record)
    ranks = machine.generations.ranks
    for rank in ranks.live_ranks:
        ranks.mark_rank_lost(rank)
    return run_status(name, machine, 0.0)


def run_ranks(machine: RunMachine, now: float) -> tuple[RunRank, ...]:
    """Describe a run's ranks in the same form as the ranks of groups. Omit ranks that have finished and exited."""
    reported = {view.name.group_rank: view for view in machine.generations.progress.ranks(now)}
    current = machine.generations.current
    found: list[RunRank] = []
    for rank in machine.generations.ranks:
        state = _run_state(rank, machine)
        if state is RankState.FINISHED and not rank.is_here:
            continue
        shown = {RankState.LOST: PlaceState.LOST, RankState.SPARE: PlaceState.SPARE}.get(state)
        is_bare = machine.generations.terms.is_elastic  # ranks of an elastic run only launch the training processes
        is_judged = shown is None and rank.rank in current.active and not current.is_broken and not is_bare
        view = reported.get(rank.rank.slot)
        if view is None or state is not RankState.ACTIVE:
            view = _idle(RankName(machine.config.run, rank.rank.slot), rank, view, state, now)
        found.append(RunRank(view, rank.generation, shown, is_judged))
    return tuple(found)


def _idle(name: RankName, rank: Rank, reported: RankView | None, state: RankState, now: float) -> RankView:
    """Describe a rank that reports no progress, because it is running nothing or has just started.

    The age of the view is the age of the rank's last report. A rank that has never reported progress gets a long time
    limit, so that it does not count as stalled.
    """
    beat_age_s, limit_s, waits_for = max(0.0, now - rank.seen_at), FIRST_S, _WAITS.get(state, "")
    phase = rank.phase if state is RankState.STARTING and rank.phase else STEP
    sample = ProgressSample(rank.step, (OpenPhase(phase),), waits_for=waits_for)
    if reported is not None:
        still_s = max(0.0, reported.progress_age_s - beat_age_s)
        sample, limit_s = replace(reported.sample, still_s=still_s, waits_for=waits_for), reported.limit_s
    return RankView(name, sample, limit_s, beat_age_s, rank.rank.incarnation, rank.host, rank.pid)


def _rank(rank: Rank, place: int | None, step: int, state: RankState, now: float) -> RankStatus:
    return RankStatus(
        slot=rank.rank.slot,
        start=short_name(rank.rank.incarnation),
        state=state,
        rank=place,
        generation=rank.generation,
        step=step,
        phase=rank.phase,
        beat_age_s=max(0.0, now - rank.seen_at),
        attempt=rank.attempt,
        host=rank.host,
        pid=rank.pid,
    )


def _run_state(rank: Rank, machine: RunMachine) -> RankState:
    current = machine.generations.current
    if rank.rank in current.finished and not rank.is_ready:
        return RankState.FINISHED
    if not rank.is_here:
        return RankState.LOST
    if rank.rank in current.running:
        return RankState.ACTIVE
    if not rank.is_ready:
        return RankState.STARTING
    return RankState.SPARE if current.is_standing else RankState.READY
