"""Drivers that track one job's progress and incidents, and totals for its metrics.

`ProgressDriver` tracks the progress of the ranks and reports stalls. `IncidentDriver` feeds the `IncidentMachine`,
collects evidence from managers and runs, and carries out the policy for stalls. `IncidentRegistry` holds the state of
incidents that all jobs share. `JobAccount` holds the totals that the metrics report.
"""

import functools
import itertools
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from lighthouse.job import incidents
from lighthouse.job.events import MemberLost
from lighthouse.job.incidents import (
    EXIT_KEPT_S,
    SHOWN,
    WITHIN_S,
    Asked,
    Decision,
    EvidenceRound,
    IncidentArchive,
    IncidentMachine,
    OnStall,
    read_ranks,
)
from lighthouse.job.ledger import Ledger
from lighthouse.job.progress import NOTHING, REASONS, JobProgress, Runs, difference
from lighthouse.job.records import Group, GroupReports
from lighthouse.job.roster import Job
from lighthouse.job.run_driver import Ports, RunDriver
from lighthouse_protocol.limits import MAX_COUNT, cut_reason
from lighthouse_protocol.messages.incident import Gathered, Incident, IncidentKind, IncidentSummary, RankEvidence
from lighthouse_protocol.messages.membership import Participant, Quorum
from lighthouse_protocol.messages.progress import GroupView, RankName, RankPlace
from lighthouse_protocol.messages.session import (
    Evidence,
    EvidenceDone,
    EvidenceRequest,
    GroupCounts,
    GroupReport,
    HeldQuorum,
    HoldState,
    KillRequest,
    ToManager,
)
from lighthouse_protocol.messages.status import HealStatus, TimelineKind
from lighthouse_protocol.refusals import LimitReached
from lighthouse_protocol.rules.heal import GroupHeal
from lighthouse_protocol.rules.stall import Kind, StallVerdict
from lighthouse_runtime.histogram import Histogram
from lighthouse_runtime.log_event import event
from lighthouse_runtime.ports import Reply
from lighthouse_runtime.process.logs import without_credentials
from lighthouse_runtime.timing.timers import DeadlineTimer, StallWatch

log = logging.getLogger(__name__)


WAIT_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
HEAL_BOUNDS_S = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)
MAX_HEALS_TOLD = 1000
"""Maximum number of heals counted per report, in case a report is wrong."""


class JobAccount:
    """Totals of one job's steps, heals and joins. They never decrease.

    1. Managers report totals since they started, and the increase since the last report is added. If a number has
       decreased, the report is from a new manager, and all of it is added.
    2. The first report of a group adds nothing, because most of it may date from before this lighthouse started.
    3. A group's training time runs from its first report of a quorum until it leaves cleanly or its record is removed.
       It includes the time in which the group is lost, restarting or healing, which is the cost of its failure.
    4. Goodput is the time in committed steps divided by the training time of all groups.
    """

    def __init__(self, groups: Mapping[str, Group]) -> None:
        self._groups = groups
        self._past_s = 0.0  # time of groups that have left or whose records were removed
        self.step_s = 0.0
        self.commits = 0
        self.discards = dict.fromkeys(REASONS, 0)
        self.heal_bytes = 0
        self.heals = Histogram(HEAL_BOUNDS_S)
        self.waits = Histogram(WAIT_BOUNDS_S)

    def add_report(self, replica_id: str, report: GroupReport, now: float) -> GroupCounts:
        """Add a group's report from a hello or heartbeat. Return the increase since the group's last report."""
        group, counts = self._groups.get(replica_id), report.counts
        if group is None or counts is None:
            return NOTHING
        reports = group.reports
        new, reports.counts = difference(reports.counts or counts, counts), counts
        if report.held is not None and report.held.mode is HoldState.LEAVING:
            self.stop_time(reports, now)
        elif report.held is not None and reports.trains_since is None:
            reports.trains_since = now
        self.step_s += new.step_s
        self.commits += new.commits
        for reason in REASONS:
            self.discards[reason] += getattr(new.discards, reason)
        self.heal_bytes += new.healed.bytes
        heals = min(new.healed.heals, MAX_HEALS_TOLD)
        for _ in range(heals):  # reports contain only their sum
            self.heals.add(new.healed.seconds / heals)
        return new

    def stop_time(self, reports: GroupReports, now: float) -> None:
        """Stop counting the training time of a group that left or was removed, until it reports a quorum again."""
        if reports.trains_since is not None:
            self._past_s += now - reports.trains_since
            reports.trains_since = None

    @property
    def all_discards(self) -> int:
        """Discarded steps, summed over groups and reasons. A wrong report counts up to what a message can contain."""
        return min(MAX_COUNT, sum(self.discards.values()))

    def group_s(self, now: float) -> float:
        """Return the total training time of all groups, in group-seconds. It never decreases."""
        since = [at for group in self._groups.values() if (at := group.reports.trains_since) is not None]
        return self._past_s + sum(now - at for at in since)

    def goodput(self, now: float) -> float | None:
        """Return the goodput from 0 to 1, or None before any group has trained."""
        group_s = self.group_s(now)
        return min(1.0, self.step_s / group_s) if group_s > 0 else None


class DriverOwner(Protocol):
    """The methods of `JobDriver` that `ProgressDriver` and `IncidentDriver` call."""

    def send_to_member(self, member: Group, message: ToManager) -> bool: ...

    def add_timeline_entry(self, kind: TimelineKind, replica_ids: Sequence[str], text: str) -> None: ...

    def list_runs(self) -> Sequence[RunDriver]: ...

    def handle_verdict(self, verdict: StallVerdict | None) -> None: ...


class ProgressDriver:
    """Tracks the progress of a job's ranks and of its heals, and reports stalls.

    Only ranks that share collectives are checked: the ranks of quorum members, the ranks of observed groups (which have
    no Agents), and the active ranks of runs.
    """

    def __init__(self, job: str, groups: Mapping[str, Group], ports: Ports, owner: DriverOwner) -> None:
        """Create the driver. `groups` contains the job's groups by replica_id, and `owner` receives stall verdicts."""
        timers, floor_s = ports.timers, ports.stall_after_s
        self.known = JobProgress(groups, floor_s, ports.ranks_kept, ports.slow_after_s)
        self._job = job
        self._groups = groups
        self._owner = owner
        self._clock = timers.time
        self._check_lag = ports.check_lag_in_timer
        self._heal_timer = DeadlineTimer(self._log_heals, timers)
        self._is_full = False  # True after the log line about the first view that did not fit
        self.watch = StallWatch(timers, log, job, self, floor_s)

    def add_view(self, replica_id: str, view: GroupView) -> None:
        """Handle a progress view from the session of group `replica_id`. Ignore it if it describes another group."""
        group, now = self._groups.get(replica_id), self._clock()
        if group is not None and view.replica_id == replica_id:
            if not self.known.add_view(group.reports, view, now) and not self._is_full:
                self._is_full = True
                extra = event("ranks_left_out", job=self._job, replica_group=replica_id)
                text = (
                    "the progress of %s's ranks is not shown or checked for stalls: the lighthouse keeps that of %d "
                    "ranks already"
                )
                log.warning(text, replica_id, self.known.stored_ranks, extra=extra)
            self._add_heal(group, view, now)
            self.watch.wake()

    def handle_pause(self, by_s: float) -> None:
        """Record that the whole process was paused for `by_s` seconds. Call this before the next verdict."""
        self.known.pauses.add_pause(by_s, self._clock())

    def verdict(self) -> StallVerdict | None:
        """Return the current stall verdict, or None if there is no stall."""
        return self.judge_ranks(self._clock())

    def ranks(self) -> tuple[RankPlace, ...]:
        """Return the progress of each rank. Ranks that are behind come first."""
        return self.known.places(self._clock(), self._runs)

    @property
    def heals(self) -> dict[str, HealStatus]:
        """Heals in progress, by replica group."""
        now = self._clock()
        found = {group.replica_id: heal.status(now) for group, heal in self._healing()}
        return {name: status for name, status in found.items() if status is not None}

    def close(self) -> None:
        self.watch.close()
        self._heal_timer.cancel()
        for group in self._groups.values():
            self.known.drop_view(group.reports)

    # -- for the watch

    def judge_ranks(self, now: float) -> StallVerdict | None:
        self._check_lag()
        return self.known.verdict(now, self._runs)

    def verdict_in_s(self, now: float) -> float | None:
        return self.known.verdict_in_s(now, self._runs)

    def handle_verdict(self, verdict: StallVerdict | None) -> None:
        self._owner.handle_verdict(verdict)

    @property
    def _runs(self) -> Runs:
        return [run.ranks() for run in self._owner.list_runs()]

    # -- heals

    def _healing(self) -> list[tuple[Group, GroupHeal]]:
        return [(group, heal) for group in self._groups.values() if (heal := group.reports.heal) is not None]

    def _add_heal(self, group: Group, view: GroupView, now: float) -> None:
        is_reported = any(rank.sample.heal is not None for rank in view.ranks)
        heal = group.reports.heal
        if heal is None:
            if not is_reported:
                return
            heal = group.reports.heal = GroupHeal()
        heal.retain_ranks({rank.name.group_rank for rank in view.ranks}, now)
        for rank in view.ranks:
            at = now - rank.beat_age_s
            heal.add_report(rank.name.group_rank, rank.rank_incarnation, rank.sample.heal, at)
        self._log_heals()
        if not is_reported and heal.next_at(now) is None:
            group.reports.heal = None

    def _log_heals(self) -> None:
        """Log the progress of each heal whose next log line is due, and set the timer for the next line."""
        now, healing = self._clock(), self._healing()
        for group, heal in healing:
            while line := heal.next_line(now):
                extra = event("heal", job=self._job, replica_group=group.replica_id)
                log.info("%s: %s", group.replica_id, line, extra=extra)
        due = [at for _, heal in healing if (at := heal.next_at(now)) is not None]
        self._heal_timer.set(min(due, default=None))


BOUNDS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 120.0, 300.0, 600.0)
MAX_JOBS = 1000

Key = tuple[str, IncidentKind]


class IncidentTimes:
    """Incident counts by job and kind, with histograms of the times to detect an incident and to recover from it."""

    def __init__(self) -> None:
        self.opened: Counter[Key] = Counter()
        self.detect: dict[Key, Histogram] = {}
        self.recover: dict[Key, Histogram] = {}

    def count_opened(self, job: str, kind: IncidentKind) -> None:
        key = job, kind
        if key not in self.opened and len(self.opened) >= MAX_JOBS * len(IncidentKind):
            del self.opened[next(iter(self.opened))]
        self.opened[key] += 1

    def add_detect_time(self, job: str, kind: IncidentKind, seconds: float) -> None:
        """Record how many seconds after a fault the lighthouse detected it."""
        _add(self.detect, (job, kind), seconds)

    def add_recover_time(self, job: str, kind: IncidentKind, seconds: float) -> None:
        """Record how many seconds after a fault the next step was committed."""
        _add(self.recover, (job, kind), seconds)


def _add(times: dict[Key, Histogram], key: Key, seconds: float) -> None:
    if key not in times and len(times) >= MAX_JOBS * len(IncidentKind):
        del times[next(iter(times))]
    times.setdefault(key, Histogram(BOUNDS_S)).add(seconds)


class IncidentStore(Protocol):
    """Durable storage of incidents. `load` and `close` may block the event loop, and `save` must not."""

    def load(self) -> Iterable[Incident]: ...

    def save(self, incident: Incident) -> None:
        """Queue an incident for storage, without waiting for the disk."""
        ...

    def close(self) -> None: ...


@dataclass(slots=True)
class IncidentRegistry:
    """The incidents of all jobs with their files, statistics and ledger, and the policy for stalls."""

    policy: OnStall = OnStall.NOTIFY
    files: IncidentStore | None = None
    archive: IncidentArchive = field(default_factory=IncidentArchive)
    times: IncidentTimes = field(default_factory=IncidentTimes)
    ledger: Ledger = field(default_factory=Ledger)

    def load_stored(self) -> None:
        """Load the incidents that earlier lighthouses stored. Call this before the first job, because it blocks."""
        if self.files is not None:
            self.archive = IncidentArchive(self.files.load())

    def record_opened(self, incident: Incident) -> None:
        summary = incident.summary
        self.times.count_opened(summary.job, summary.kind)
        self.times.add_detect_time(summary.job, summary.kind, summary.noticed_s)
        self.record_changed(incident)

    def record_recovered(self, incident: Incident) -> None:
        summary = incident.summary
        self.times.add_recover_time(summary.job, summary.kind, summary.step_s or 0.0)
        self.record_changed(incident)

    def record_changed(self, incident: Incident) -> None:
        self.archive.store_incident(incident)
        self.ledger.add_incident(incident.summary)
        if self.files is not None:
            self.files.save(incident)

    def record_of_run(self, incident: Incident) -> None:
        """Record a new or changed incident that the `RunMachine` of a run tracks."""
        before, after_s = self.archive.find_incident(incident.id), incident.summary.step_s
        if before is None:
            self.times.count_opened(incident.summary.job, incident.summary.kind)
        if after_s is not None and (before is None or before.summary.step_s is None):
            self.record_recovered(incident)
        else:
            self.record_changed(incident)

    def newest_summaries(self, job: str) -> tuple[IncidentSummary, ...]:
        """Return summaries of the job's newest incidents, up to SHOWN of them, newest first."""
        return self.archive.summaries(job)[:SHOWN]

    def close(self) -> None:
        """Close the incident files. This call blocks briefly."""
        if self.files is not None:
            self.files.close()


MAX_ROUNDS = 8


def without_secrets(evidence: RankEvidence) -> RankEvidence:
    """Return the evidence without credentials, because incidents are stored and included in bug reports."""
    return replace(
        evidence,
        stacks=without_credentials(evidence.stacks),
        process=without_credentials(evidence.process),
        output=tuple(map(without_credentials, evidence.output)),
    )


@dataclass(slots=True)
class _OpenRound:
    round: EvidenceRound
    deliver: Callable[[Gathered], None]
    due_at: float
    limit: DeadlineTimer


class IncidentDriver:
    """Drives the `IncidentMachine` of one job, collects evidence and carries out the policy for stalls.

    While the job has a quorum, evidence and recovery depend on the quorum's members only, not on the job's runs.
    """

    def __init__(
        self,
        job: str,
        state: Job,
        ports: Ports,
        registry: IncidentRegistry,
        owner: DriverOwner,
        progress: ProgressDriver,
    ) -> None:
        """Create the driver. `state` belongs to the job's `QuorumMachine`. All jobs share `ports` and `registry`."""
        self._job = job
        self._state = state
        self._registry = registry
        self._owner = owner
        self._incidents = IncidentMachine(job, registry.policy, registry.archive.make_id)
        self._ports = ports
        self._clock = ports.timers.time
        self._wall = ports.wall
        self._progress = progress
        self._numbers = itertools.count(1)
        self._rounds: dict[int, _OpenRound] = {}
        self._is_closed = False

    # -- events

    def handle_pause(self, by_s: float) -> None:
        """Extend pending evidence requests by the `by_s` seconds for which this process was paused."""
        for round_ in self._rounds.values():
            round_.due_at += by_s
            round_.limit.set(round_.due_at)

    def end_session_rounds(self, session: int) -> None:
        for number in list(self._rounds):
            self._rounds[number].round.drop_session(session)
            self._finish_if_complete(number)

    def handle_participant(self, participant: Participant) -> None:
        group, now = self._state.groups.get(participant.replica_id), self._clock()
        is_news = group is not None and group.reports.distrust != participant.distrust
        if group is not None and is_news:
            self._perform(self._incidents.record_distrust(group, participant.distrust, now, self._wall()))
        if is_news or self._incidents.is_awaiting_commit:
            step, quorum_id = participant.requested_step, participant.seen_quorum_id
            self._perform(self._incidents.open_losses(now, {participant.replica_id: quorum_id}))
            self._perform(self._incidents.record_step_reached(step, quorum_id, now))

    def handle_view(self, replica_id: str, view: GroupView) -> None:
        """Open incidents for a step that the progress view reports as discarded, and for the job's slow ranks."""
        group = self._state.groups.get(replica_id)
        if group is not None and view.replica_id == replica_id:
            ranks = [rank for rank in view.ranks if rank.sample.rejected is not None]
            name, rejected = (ranks[0].name, ranks[0].sample.rejected) if ranks else (RankName(replica_id, 0), None)
            now, unix_s = self._clock(), self._wall()
            self._perform(self._incidents.record_rejected_step(group, name, rejected, now, unix_s))
            if (slow := self._progress.known.find_slow(now)) is not None:
                self._perform(self._incidents.track_slow(slow, now, unix_s))

    def handle_grant(self, held: HeldQuorum) -> None:
        """Check whether training has recovered, by the highest step that a manager has allowed its ranks to start."""
        if self._incidents.is_awaiting_commit:
            self._perform(self._incidents.record_step_reached(held.granted, held.quorum_id, self._clock()))

    def handle_kill(self, replica_id: str, quorum_id: int, why: str) -> None:
        """Record that an operator killed a member of the quorum. `why` names the operator and the reason."""
        self._perform(self._incidents.open_kill(replica_id, quorum_id, why, self._clock(), self._wall()))

    def open_fault(self, replica_id: str, text: str, target: str, step: int) -> str:
        """Open an incident for an injected fault that hits `target`. Return the incident's id, for `end_fault`."""
        opened = self._incidents.open_fault(replica_id, text, target, step, self._clock(), self._wall())
        self._perform([opened])
        return opened.incident.id

    def end_fault(self, id: str) -> None:
        self._perform(self._incidents.end_fault(id))

    def handle_loss(self, loss: MemberLost) -> None:
        """Record the loss of a quorum member. Ignore the losses of other groups."""
        if loss.quorum_id is None:
            return
        self._perform(self._incidents.add_loss(loss, self._clock(), self._wall(), is_asked=bool(self._state.joins)))

    def end_slow_group(self, replica_id: str) -> None:
        self._perform(self._incidents.end_slow_group(replica_id, self._clock()))

    def handle_quorum(self, quorum: Quorum, *, is_new: bool) -> None:
        if self._incidents.is_awaiting_quorum:
            step, now = max(member.requested_step for member in quorum.participants), self._clock()
            members = {member.replica_id: member.seen_quorum_id for member in quorum.participants}
            self._perform(
                self._incidents.record_new_quorum(quorum.quorum_id, step, now, is_new=is_new, members=members)
            )

    def handle_job_end(self, step: int, quorum_id: int) -> None:
        self._perform(self._incidents.end_job(step, quorum_id, self._clock()))

    def handle_exit(self, replica_id: str, reason: str, evidence: RankEvidence) -> bool:
        """Record a supervisor's report on a dead process. Return whether the report may explain a loss of the group."""
        now, is_member = self._clock(), any(m.replica_id == replica_id for m in self._state.list_participants())
        effects = self._incidents.add_exit_report(replica_id, reason, evidence, now, self._wall(), is_member=is_member)
        if effects is None:
            return False
        self._perform(effects)
        self._ports.timers.call_later(EXIT_KEPT_S, self._expire_exits)
        return True

    def _expire_exits(self) -> None:
        if not self._is_closed:
            self._perform(self._incidents.open_unexplained_exits(self._clock()))

    def handle_verdict(self, verdict: StallVerdict | None) -> None:
        """Handle a new stall verdict, or the end of a stall (None).

        Waiting for a quorum is not an incident. The job's status gives the reason for such a wait.
        """
        now = self._clock()
        if verdict is None:
            return self._perform(self._incidents.end_stall(now))
        if verdict.kind is Kind.WAITING and self._state.joins:
            return None
        step = max([member.step for member in self._members()] or [self._run_steps()])
        return self._perform(self._incidents.open_or_update_stall(verdict, step, now, self._wall()))

    def handle_run_progress(self) -> None:
        """Check whether training has recovered, after a rank of one of the job's runs has sent a message."""
        if self._incidents.is_awaiting_commit:
            self._perform(self._incidents.record_step_reached(self._run_steps(), 0, self._clock()))

    @property
    def _runs(self) -> dict[str, RunDriver]:
        runs = () if self._state.list_participants() else self._owner.list_runs()
        return {run.run_id: run for run in runs if run.size}

    def _run_steps(self) -> int:
        return sum(run.steps for run in self._runs.values())

    def receive_evidence(self, session: Asked, message: Evidence | EvidenceDone) -> None:
        round_ = self._rounds.get(message.number)
        if round_ is None:
            return
        if isinstance(message, Evidence):
            round_.round.add_rank(session, without_secrets(message.rank))
        else:
            round_.round.finish_session(session)
            self._finish_if_complete(message.number)

    # -- evidence

    def gather_evidence(self, ranks: Mapping[str, tuple[int, ...]] | None, reply: Reply[Gathered]) -> None:
        """Collect evidence from `ranks`, or from all members and runs if it is None, and pass it to `reply`.

        `ranks` contains rank numbers by group or run. An empty tuple stands for all ranks of that group or run.

        Raises:
            LimitReached: MAX_ROUNDS requests for evidence are already pending.
        """
        if len(self._rounds) >= MAX_ROUNDS:
            raise LimitReached(f"{MAX_ROUNDS} collections of evidence are in progress; try again in {WITHIN_S:g} s")
        self._begin_round(EvidenceRound(self._targets()) if ranks is None else self._plan_round(ranks), reply.answer)

    def _plan_round(self, ranks: Mapping[str, tuple[int, ...]]) -> EvidenceRound:
        found = (self._state.groups.get(name) for name in ranks)
        runs = {run.run_id: run.run_id for run in self._owner.list_runs() if run.run_id in ranks}
        return EvidenceRound(runs | _sessions(member for member in found if member is not None), ranks=ranks)

    def _targets(self) -> dict[str, Asked | None]:
        return _sessions(self._members()) | {name: name for name in self._runs}

    def _members(self) -> list[Group]:
        """Return the groups that are checked for stalls: quorum members, and observed groups, which have no Agents."""
        observed = (self._state.groups.get(name) for name in self._progress.known.observed)
        return list(dict.fromkeys((*self._state.list_participants(), *(one for one in observed if one is not None))))

    def _begin_round(self, evidence_round: EvidenceRound, deliver: Callable[[Gathered], None]) -> None:
        number = next(self._numbers)
        due_at = self._clock() + WITHIN_S
        limit = DeadlineTimer(functools.partial(self._tick, number), self._ports.timers)
        limit.set(due_at)
        self._rounds[number] = _OpenRound(evidence_round, deliver, due_at, limit)
        runs = {run.run_id: run for run in self._owner.list_runs()}
        for question in evidence_round.questions:
            request = EvidenceRequest(number, question.group_ranks)
            member = self._state.groups.get(question.replica_id)
            if isinstance(question.session, str):
                runs[question.session].collect_evidence(
                    request, functools.partial(self.receive_evidence, question.session)
                )
            elif member is None or not self._owner.send_to_member(member, request):
                evidence_round.drop_session(question.session)
        self._finish_if_complete(number)

    def _tick(self, number: int) -> None:
        self._ports.check_lag_in_timer()
        round_ = self._rounds.get(number)
        if round_ is not None and self._clock() < round_.due_at:
            round_.limit.set(round_.due_at)
        elif round_ is not None:
            self._finish_round(number)

    def _finish_if_complete(self, number: int) -> None:
        if self._rounds[number].round.is_complete:
            self._finish_round(number)

    def _finish_round(self, number: int) -> None:
        round_ = self._rounds.pop(number)
        round_.limit.cancel()
        round_.deliver(round_.round.gathered())

    # -- effects

    def _perform(self, effects: Sequence[incidents.Effect]) -> None:
        for effect in effects:
            match effect:
                case incidents.Opened(incident):
                    self._registry.record_opened(incident)
                    self._log_opened(incident)
                case incidents.Changed(incident):
                    self._registry.record_changed(incident)
                case incidents.Recovered(incident):
                    self._registry.record_recovered(incident)
                    log.info(
                        "incident %s: recovered: the next step was committed %.2f s after the fault",
                        incident.id,
                        incident.summary.step_s or 0.0,
                        extra=event(
                            "incident_recovered", job=self._job, incident=incident.id, after_s=incident.summary.step_s
                        ),
                    )
                case incidents.EvidenceWanted(id, suspects, is_of_suspects):
                    self._collect_evidence(id, suspects, is_of_suspects=is_of_suspects)
                case incidents.ActionDue(id, decision):
                    self._perform_action(id, decision)

    def _log_opened(self, incident: Incident) -> None:
        summary = incident.summary
        extra = event(
            "incident_opened",
            job=self._job,
            incident=summary.id,
            kind=summary.kind.value,
            suspects=list(summary.suspects),
        )
        log.warning("incident %s: %s: %s", summary.id, summary.kind, summary.text, extra=extra)
        self._owner.add_timeline_entry(TimelineKind.INCIDENT, sorted(summary.groups), f"{summary.id}: {summary.kind}")

    def _collect_evidence(self, id: str, suspects: Sequence[str], *, is_of_suspects: bool) -> None:
        began_at = self._clock()

        def deliver(gathered: Gathered) -> None:
            now = self._clock()
            log.info(
                "incident %s: evidence of %d ranks after %.1f s%s",
                id,
                len(gathered.evidence),
                now - began_at,
                f"; missing: {'; '.join(gathered.missing)}" if gathered.missing else "",
                extra=event("incident_evidence", job=self._job, incident=id, ranks=len(gathered.evidence)),
            )
            if not self._is_closed:
                self._progress.watch.check_now()  # the verdict may be outdated by now
            members = {
                member.replica_id: member.participant.group_world_size if member.participant is not None else 1
                for member in self._members()
            } | {name: run.size for name, run in self._runs.items()}
            self._perform(self._incidents.add_evidence(id, gathered, members, now))

        chosen = read_ranks(suspects) if is_of_suspects else None
        round_ = EvidenceRound(self._targets(), suspects=suspects) if chosen is None else self._plan_round(chosen)
        self._begin_round(round_, deliver)

    def _perform_action(self, id: str, decision: Decision) -> None:
        if self._is_closed:
            return self._perform(
                self._incidents.record_action(id, "the lighthouse stopped: nothing was done", self._clock())
            )
        text = decision.text
        if decision.stop:
            text = self._stop_job(id)
        elif decision.restart:
            text = self._restart_groups(id, decision)
        log.warning(
            "incident %s: %s", id, text, extra=event("incident_action", job=self._job, incident=id, action=text)
        )
        return self._perform(self._incidents.record_action(id, text, self._clock()))

    def _stop_job(self, id: str) -> str:
        text = self._registry.archive.get_incident(id).summary.text
        reason = cut_reason(f"incident {id}: nothing moves: {text}")
        runs = [run for run in self._owner.list_runs() if not (run.is_quiet or run.is_over)]
        for run in runs:
            run.request_stop(reason, f"--on-stall stop-run, incident {id}")
        if runs:
            return f"stopped the run {', '.join(run.run_id for run in runs)}"
        members = sorted(member.replica_id for member in self._members())
        return f"killed {', '.join(members)}: the job has no run to stop" + self._kill_groups(members, reason)

    def _restart_groups(self, id: str, decision: Decision) -> str:
        reason, groups = cut_reason(f"incident {id}: {decision.text}"), decision.groups
        runs = self._owner.list_runs()
        killed = [name for name in groups if not any(run.fail_ranks(name, groups[name], reason) for run in runs)]
        return f"{'killed' if killed else 'interrupted'} {decision.text}" + self._kill_groups(killed, reason, groups)

    def _kill_groups(
        self, names: Iterable[str], reason: str, behind: Mapping[str, frozenset[int]] | None = None
    ) -> str:
        """Send kill requests to replica groups. Return a note that names groups without a session, or "".

        Args:
            names: The replica_ids of the groups.
            reason: Reason for the kill.
            behind: Ranks that are behind, by group. If None, groups receive the same request as for an operator's kill.
        """
        requests = {name: KillRequest(reason, (behind or {}).get(name, frozenset())) for name in names}
        found = {name: self._state.groups.get(name) for name in requests}
        missed = [n for n, m in found.items() if m is None or not self._owner.send_to_member(m, requests[n])]
        return f"; not notified: {', '.join(missed)}" if missed else ""

    def close(self, reason: str) -> None:
        """End all evidence requests, and open incidents for unexplained exits. The incident of a stall stays open."""
        self._is_closed = True
        self._perform(self._incidents.open_unexplained_exits(math.inf))
        for number in list(self._rounds):
            log.info("evidence round %d ended: %s", number, reason, extra=event("evidence_ended", job=self._job))
            self._finish_round(number)


def _sessions(members: Iterable[Group]) -> dict[str, Asked | None]:
    return {member.replica_id: member.session if member.is_connected else None for member in members}
