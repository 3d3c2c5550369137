"""Formation of quorums: which replica groups form the next quorum, and when.

A *member* is a group in the current quorum, and a *newcomer* is any other group. `decide` applies these rules, in this
order, after every event and tick:

1. A group is a candidate while it has joined, which means that its call for the next quorum is pending. Such a group is
   alive and healthy. If a member asks to shrink the quorum, newcomers are not candidates.
2. No quorum forms unless at least `min_replicas` groups are candidates and can fill one of the allowed sizes.
3. If every member is a candidate, the quorum forms at once.
4. If every healthy group has joined, the quorum forms at once.
5. Otherwise it waits for the stragglers, the healthy groups that have not joined, until `join_timeout_s` after the
   first join. A straggler that misses this timeout no longer counts as healthy until it joins. While a member is alive,
   a newcomer's join does not start the timeout: the members are running a step, and a long step is not a fault. If
   no candidate is a member that holds the state of the last quorum, but a connected straggler may be one, the timeout
   is EARLIER_COUNTS_FOR_S: until then, the straggler's state would win over a branch (lineage.py, rule 3).
6. If the quorum size is limited (`active`), surplus groups wait as spares. A spare replaces a lost member only after
   `last_call_s`, so that a group that returns in time keeps its place. A call that is about to expire ends this wait
   early, as in rule 7.
7. If more than half of the healthy groups are candidates, the quorum forms `deadline_margin_s` before the first pending
   call expires, so that one straggler cannot make all calls expire. While a member is alive, only the members' calls
   count, because the call of a spare is always pending. This does not apply while rule 5 waits for a holder.

A standing quorum takes precedence over these rules. Its members train for many steps without joining again. Each holds
a lease, the time for which it may start steps without contacting the lighthouse (standing.py). While the quorum stands,
no other quorum forms. After that, the next quorum must include one of its members, or wait until their leases expire.
`Numbering` (lineage.py) assigns the quorum_id.

The machine keeps no data about forgotten groups. With n groups, an event that changes nothing takes O(1) time, and
forming a quorum takes O(n log n).
"""

import math
from collections.abc import Sequence
from operator import attrgetter
from typing import NamedTuple

from lighthouse.job import events
from lighthouse.job.lineage import (
    EARLIER_COUNTS_FOR_S,
    Claim,
    History,
    assign_steps,
    choose,
    foreign,
    size_for,
    tag_of,
)
from lighthouse.job.presence import JobEnd, Presence
from lighthouse.job.records import Group, Kind, LastAssignment, QuorumConfig, QuorumRecord, Verdict
from lighthouse.job.roster import Job
from lighthouse.job.standing import lease_of
from lighthouse_protocol.messages.membership import Quorum, Tag
from lighthouse_protocol.messages.session import QuorumPhase

END_KEPT_S = 7 * 86400.0
"""Seconds for which the machine remembers that a job has ended, in case a scheduler starts some of its groups late."""


class Decision(NamedTuple):
    """Result of `decide`: whether a quorum forms now and, if not, what the joined groups are waiting for."""

    verdict: Verdict
    until: float | None = None
    """Time at which the wait times out, or None if it has no timeout."""
    missed_at: float | None = None
    """When the join timeout expires for the stragglers, or None while it is not running."""
    next_at: float | None = None
    """Next time at which the decision may change without an event."""
    chosen: tuple[Group, ...] = ()
    """Members of the quorum that forms now. Empty unless the verdict is READY."""


def decide(job: Job, now: float) -> Decision:
    """Decide by the rules at the top of this module whether a quorum forms now, without changing any state.

    Takes O(1) time while groups are missing, and O(n log n) time while the quorum waits only for leases to expire.
    """
    config, joins, standing = job.config, job.joins, job.standing
    healthy, working = job.counts[Kind.HEALTHY], job.counts[Kind.WORKING]
    joined = joins.anyone.asking
    if not joined:
        return Decision(Verdict.FORMED if working else Verdict.NO_JOINS)
    candidates = joins.candidate_count
    size = size_for(candidates, config.allowed_sizes, config.active)
    has_stragglers = healthy > joined
    does_wait_count = has_stragglers and not standing.blocks_forming
    timer = joins.members if working else joins.anyone
    since = timer.waiting_since(now) if does_wait_count else None
    missed_at = None if since is None else since + config.join_timeout_s
    cut_at = last_call_until = next_at = None
    if candidates >= config.min_replicas and size >= config.min_replicas:
        deadline_at = timer.deadline_at
        answer_by = math.inf if deadline_at is None else deadline_at - config.deadline_margin_s
        if missed_at is not None and now >= min(missed_at, answer_by) and leaves_holders_behind(job):
            missed_at += max(0.0, EARLIER_COUNTS_FOR_S - config.join_timeout_s)
        elif missed_at is not None and 2 * candidates > healthy:
            cut_at = answer_by
        if config.active is not None and job.lost_at is not None and joins.members.asking < size:
            last_call_until = min(job.lost_at + config.last_call_s, answer_by)
        moments = [missed_at, cut_at, last_call_until, standing.leases_free_at()]
        if standing.unreported_members(now):
            moments.append(standing.leases_free_at(choose_members(job, now)))
        next_at = min((at for at in moments if at is not None and now < at < math.inf), default=None)

    def wait(verdict: Verdict, until: float | None = None) -> Decision:
        return Decision(verdict, until, missed_at, next_at)

    if standing.phase is QuorumPhase.RETURNING and not (standing.is_unheld and joins.has_all_members):
        return wait(Verdict.WAITING_FOR_RECONNECT, standing.returns_until())
    if standing.phase is QuorumPhase.RECALLED:
        return wait(Verdict.WAITING_FOR_RECALL)
    if standing.phase is QuorumPhase.STANDING:  # a quorum with the waiting groups would not differ
        return wait(Verdict.FORMED)
    if candidates < config.min_replicas:
        return wait(Verdict.TOO_FEW_PARTICIPANTS)
    if size < config.min_replicas:
        return wait(Verdict.NO_ALLOWED_SIZE)
    if missed_at is not None and now >= missed_at:  # the machine stops waiting for the stragglers and decides again
        return wait(Verdict.WAITING_FOR_STRAGGLERS, missed_at)
    must_wait = has_stragglers and not joins.has_all_members
    if must_wait and missed_at is None:
        return wait(Verdict.WAITING_FOR_MEMBERS)
    if must_wait and (cut_at is None or now < cut_at):
        return wait(Verdict.WAITING_FOR_STRAGGLERS, missed_at)
    if last_call_until is not None and now < last_call_until:
        return wait(Verdict.WAITING_FOR_LOST_MEMBER, last_call_until)
    chosen = choose_members(job, now)
    free_at = standing.leases_free_at(chosen)
    if now >= free_at:
        return Decision(Verdict.READY, None, missed_at, next_at, chosen)
    if must_wait:
        return wait(Verdict.WAITING_FOR_STRAGGLERS, missed_at)
    return wait(Verdict.WAITING_FOR_LEASES, free_at)


def stragglers(job: Job) -> list[Group]:
    """List the healthy groups that have not joined, sorted by name."""
    found = [group for group in job.groups.values() if group.is_healthy and group.call is None]
    return sorted(found, key=lambda group: group.replica_id)


def leaves_holders_behind(job: Job) -> bool:
    """Return whether no candidate holds the last quorum's state, and a connected member that may has not joined."""
    members = [group.participant for group in job.joins.list_candidates() if group.is_participant]
    has_holder = any(member is not None and member.step >= job.max_step for member in members)
    return not has_holder and any(group.is_participant and group.is_connected for group in stragglers(job))


def peers_pending(job: Job) -> int:
    """Return how many waiting newcomers would fit into the next quorum if all current members stay."""
    members = len(job.members)
    most = size_for(members + job.joins.newcomer_count, job.config.allowed_sizes, job.config.active)
    return max(0, most - members)


def choose_members(job: Job, now: float) -> tuple[Group, ...]:
    """Choose the members of the next quorum from the candidates."""
    chosen = job.joins.list_candidates()
    size = size_for(len(chosen), job.config.allowed_sizes, job.config.active)
    if len(chosen) > size:
        is_foreign = foreign(claims_of(job, chosen, now), known_history(job, now), job.max_step)
        foreign_ids = {member.replica_id for member, heals in zip(chosen, is_foreign, strict=True) if heals}
        participants = [member.participant for member in chosen if member.participant]
        places = choose(participants, job.members.keys(), size, foreign_ids)
        chosen = [job.groups[participant.replica_id] for participant in places]
    return tuple(sorted(chosen, key=attrgetter("participant.wire_id")))


def claims_of(job: Job, candidates: Sequence[Group], now: float) -> list[Claim]:
    """Return a `Claim` for each candidate: the state that it reports, and what the lighthouse knows about it."""
    claims: list[Claim] = []
    branch_at = job.first_formed_at if job.branch_at is None else job.branch_at
    branch_id = job.branch_id if branch_at is None or now < branch_at + EARLIER_COUNTS_FOR_S else 0
    for member in candidates:
        participant, last = member.participant, member.last_assignment
        assert participant is not None
        tag = tag_of(participant, last)
        is_member = member.is_participant and not (last is not None and last.has_not_healed(participant))
        was_assigned = tag is not None and (
            (last is not None and tag in (last.quorum_id, last.formed_from))
            or (tag in job.tags and member.replica_id in job.members)
        )
        # A step needs all members of a quorum, so members are at most one step apart.
        may_be_ahead: int | None = int(was_assigned)
        if tag is not None and (tag < branch_id or job.numbering.is_unknown(tag)):
            may_be_ahead = None
        disagree, works_at = participant.ranks_disagree, participant.works_at
        claims.append(Claim(participant.step, tag, is_member, may_be_ahead, disagree, works_at))
    return claims


def known_history(job: Job, now: float) -> History:
    """Return the ids of this job's quorums.

    Until EARLIER_COUNTS_FOR_S after the first quorum, include ids that only candidates report (lineage.py, rule 3).
    """
    if job.first_formed_at is not None and now >= job.first_formed_at + EARLIER_COUNTS_FOR_S:
        return job.history
    history = History(job.history.ranges)
    for member in job.joins.list_candidates():
        if member.participant and job.numbering.is_unknown(member.participant.seen_quorum_id):
            history.add_quorum(member.participant.seen_quorum_id)
    return history


class QuorumMachine:
    """Pure state machine that forms the quorums of one job. `now` is the caller's monotonic time in seconds."""

    def __init__(
        self, config: QuorumConfig, *, record: QuorumRecord | None = None, holders_until: float | None = None
    ) -> None:
        """Create the machine, or restore it from a record.

        Args:
            config: Settings.
            record: State that an earlier lighthouse stored, or None.
            holders_until: When the last lease of an earlier lighthouse's quorum expires, or None if all have expired.
        """
        self.config = config
        self.job = Job(config, record)
        self.standing, self.joins = self.job.standing, self.job.joins
        self.job_end = JobEnd() if record is None else JobEnd(record.ended, record.absent)
        self.presence = Presence(self.job, self.job_end, None if self.job.quorum is None else holders_until)
        self.decision = Decision(Verdict.NO_JOINS)
        """Decision after the last event or tick."""
        self._ended_at: float | None = None
        self._working = 0
        self._next_at = -math.inf  # `deadline` after the last event or tick
        if holders_until is not None:
            self.standing.restore_standing(record, holders_until, holders_until + config.lease_s)

    def should_remember_end(self, now: float) -> bool:
        """Return whether the job ended less than END_KEPT_S ago and has absent groups, which may still arrive."""
        is_recent = self._ended_at is None or now < self._ended_at + END_KEPT_S
        return self.job_end.step is not None and bool(self.job_end.absent) and is_recent

    def is_quiet(self, now: float) -> bool:
        """Return whether the machine has no records of groups and all leases have expired."""
        return (
            not self.job.groups
            and self.standing.phase is not QuorumPhase.RETURNING
            and now >= self.standing.leases_free_at()
        )

    @property
    def quorum(self) -> Quorum | None:
        return self.job.quorum

    def handle(self, event: events.QuorumEvent, now: float) -> Sequence[events.QuorumEffect]:
        if isinstance(event, events.SessionHeartbeatReceived) and now < self._next_at:
            answer = self.presence.answer_unchanged_heartbeat(event, now)
            if answer is not None:
                return [answer]
        if isinstance(event, events.ProcessPaused):  # before `_advance_time`: a pause ends no group
            self.presence.postpone_after_pause(event.by_s, now)
        elif isinstance(event, events.HostBusy):  # before closings are judged
            self.presence.silence.postpone_judgement(now)
        self._advance_time(now)
        match event:
            case events.Joined():
                self.presence.handle_join(event, now)
            case events.HeartbeatReceived(replica_id, incarnation):
                self.presence.handle_plain_heartbeat(replica_id, incarnation, now)
            case events.Withdrawn(replica_id, call):
                self.joins.withdraw_join(replica_id, call, now)
            case events.SessionOpened():
                self.presence.handle_hello(event, now)
            case events.SessionHeartbeatReceived():
                self.presence.handle_session_heartbeat(event, now)
            case events.SessionEnded():
                self.presence.handle_session_end(event, now)
            case events.Left():
                self.presence.handle_leave(event, now)
            case events.ProcessPaused() | events.HostBusy():
                pass
        self._decide_and_form(now)
        return self.job.take_effects()

    def tick(self, now: float) -> Sequence[events.QuorumEffect]:
        self._advance_time(now)
        self._decide_and_form(now)
        return self.job.take_effects()

    def deadline(self, now: float) -> float | None:
        """Return when to call `tick` next, or None if no timer is pending.

        Right after `handle` or `tick` with the same `now`, the result is later than `now`.
        """
        moments = [self.job.next_timeout_at(), self.standing.returns_until(), self.decision.next_at]
        return min([moment for moment in moments if moment is not None and moment > now], default=None)

    # -- time

    def _advance_time(self, now: float) -> None:
        self.job.numbering.start_clock(now)
        if self.job.formed_at is None and self.job.quorum is not None:
            self.job.formed_at = now
        if self.job_end.step is None:
            self._ended_at = None
        elif self._ended_at is None:
            self._ended_at = now
        self.presence.lapse_silent_groups(now)

    def _decide_and_form(self, now: float) -> None:
        if self.job.counts[Kind.WORKING] < self._working:
            self.job.lost_at = now
        self._recall_if_needed()
        self._end_job_if_over(now)
        decision = decide(self.job, now)
        is_overdue = decision.until is not None and now >= decision.until
        if decision.verdict is Verdict.WAITING_FOR_STRAGGLERS and is_overdue:
            for group in stragglers(self.job):
                self.job.mark_missed_timeout(group)
            decision = decide(self.job, now)
        self._working = self.job.counts[Kind.WORKING]
        if decision.chosen:
            self._form_quorum(decision.chosen, now)
            self._working = self.job.counts[Kind.WORKING]
            self._recall_if_needed()
            decision = decide(self.job, now)
        self.decision = decision
        self.presence.close_leaving_sessions()
        next_at = self.deadline(now)
        self._next_at = math.inf if next_at is None else next_at

    def _end_job_if_over(self, now: float) -> None:
        """Record the end of the job if a member of the last quorum has finished and no unfinished member is alive."""
        end, job = self.job_end, self.job
        if end.step is not None or end.finished_step is None or job.counts[Kind.WORKING]:
            return
        present = [m for m in job.list_participants() if m.is_alive and not m.down]
        is_returning = self.standing.phase is QuorumPhase.RETURNING
        if is_returning or any(not job.members[m.replica_id].has_finished for m in present):
            return
        waiting = [name for name in self.presence.live_groups() if name not in job.members]
        end.record_end([*job.unfinished_members, *waiting])
        assert end.step is not None
        record = self._make_record(stands=self.standing.phase is not QuorumPhase.NONE)
        self.job.emit(events.JobEnded(end.step, end.absent, record))
        self.presence.refuse_late_joins(now)

    # -- a standing quorum

    def _recall_if_needed(self) -> None:
        """Recall the standing quorum if waiting groups fit into the next quorum, or if a member is draining.

        Its members complete the started steps, up to the last one that all can complete, and then join again.
        """
        if self.standing.phase is not QuorumPhase.STANDING:
            return
        draining = self.presence.draining_members()
        if draining:
            self.presence.recall_for(f"{draining[0]} drains")
        elif peers_pending(self.job):
            self.presence.recall_for(f"{self.joins.newcomer_count} waiting to join")

    # -- forming

    def _form_quorum(self, chosen: Sequence[Group], now: float) -> None:
        job = self.job
        participants = [member.participant for member in chosen if member.participant]
        claims, history = claims_of(job, chosen, now), known_history(job, now)
        lineage = assign_steps(participants, [claim.tag for claim in claims], foreign(claims, history, job.max_step))
        stands = self.config.stands and all(map(_can_stand, chosen))
        # A standing quorum always gets a new id, and so does its successor.
        is_repeated = not stands and self.standing.phase is QuorumPhase.NONE and job.can_repeat(chosen)
        is_new = job.numbering.choose_id(self.presence.seen_id, is_repeated=is_repeated)
        quorum = Quorum(job.numbering.quorum_id, lineage.participants)
        for member, joined, given in zip(chosen, participants, lineage.participants, strict=True):
            # A group whose step was lowered may or may not have healed when it joins again at max_step.
            tag_quorum_id = lineage.tag_quorum_id if given.step == joined.step else None
            was_at = joined.step if joined.step > lineage.max_step else None
            max_step, held = lineage.max_step, Tag(joined.step, joined.tag_quorum_id)
            lowest = max_step if member.last_assignment is None else member.last_assignment.lowest_with(held, max_step)
            member.last_assignment = LastAssignment(
                quorum.quorum_id, max_step, tag_quorum_id, was_at, held, lowest, lineage.tag_quorum_id
            )
            member.seen_at = now  # no pending call keeps the group alive any more
        job.history = history
        for quorum_id in (lineage.tag_quorum_id, quorum.quorum_id):
            if quorum_id:
                history.add_quorum(quorum_id)
        is_branch = lineage.max_step < job.max_step and self.job_end.step is None
        if is_branch:
            job.branch_id, job.branch_at = quorum.quorum_id, now
        elif self.job_end.step is not None:  # another training run begins under this name
            job.branch_id = 0
        self.job_end.record_quorum(job.unfinished_members, {p.replica_id for p in participants})
        job.replace_quorum(quorum, chosen, now, is_new=is_new)
        if stands:
            self.standing.begin_standing(quorum, {member.replica_id: lease_of(member) for member in chosen})
        else:
            self.standing.end_standing()
        calls = self.joins.take_calls(chosen, now)
        record = self._make_record(stands) if is_new else None
        job.emit(events.QuorumFormed(quorum, calls, is_new, stands, record, is_branch))

    def _make_record(self, stands: bool) -> QuorumRecord:
        quorum, history = self.job.quorum, self.job.history.ranges
        assert quorum is not None
        entries = {name: lease.entry for name, lease in self.standing.leases.items()}
        ended, absent = self.job_end.step, self.job_end.absent
        return QuorumRecord(
            quorum.quorum_id, quorum, stands, entries, self.config.lease_s, history, self.job.branch_id, ended, absent
        )


def _can_stand(member: Group) -> bool:
    """Return whether the group may be in a standing quorum, whose members train many steps without joining again.

    The group needs a session and abortable collectives, and must not ask to shrink the quorum.
    """
    participant = member.participant
    return member.is_connected and participant is not None and participant.watched and not participant.shrink_only
