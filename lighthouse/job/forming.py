"""Which groups are in a quorum, and when it forms.

The machine applies these rules on every event and tick, in this order:

1. Candidates are the groups that have joined. Each is alive and healthy, since its call is open. If a member of the
   previous quorum asks to shrink, only members of that quorum stay candidates.
2. With fewer candidates than `min_replicas` or the smallest allowed size, no quorum forms.
3. If every member of the previous quorum is a candidate, the quorum forms now.
4. If every healthy group has joined, it forms now.
5. Otherwise stragglers have until `join_timeout_s` after the first join. Then they have missed it: they no longer count
   and the others stop waiting for them until they join. While members of the previous quorum are alive, a newcomer's
   join does not start that clock: the members are in their step, and a long step is no fault.
6. If `active` leaves spares, a spare does not replace a lost member until `last_call_s` after the loss. A group that
   returns in time keeps its place. A deadline ends the wait early, as in rule 7.
7. If more than half of the healthy groups are candidates, the quorum forms `deadline_margin_s` before the first waiting
   call expires, so one straggler cannot let all calls expire. While members of the previous quorum are alive, only
   their calls count, because a spare always waits.

A quorum that stands (standing.py) precedes these rules. While it stands nothing forms, and afterwards the next quorum
needs a member of it, or has to wait for its leases. `Numbering` (lineage.py) assigns the id.

The machine keeps nothing about forgotten groups. An event without news costs O(1), a round O(n log n) once.
"""

from collections.abc import Iterator, Sequence

from lighthouse.job import events
from lighthouse.job.events import GridChanged
from lighthouse.job.lineage import (
    EARLIER_COUNTS_FOR_S,
    Claim,
    History,
    Numbering,
    assign_steps,
    choose,
    foreign,
    size_for,
    tag_of,
)
from lighthouse.job.presence import JobEnd, Presence
from lighthouse.job.records import Group, Job, LastQuorumTold, QuorumConfig, QuorumRecord, Verdict
from lighthouse.job.standing import Standing, entry_of
from lighthouse_protocol.messages.membership import Participant, Quorum, Tag
from lighthouse_protocol.messages.session import LEFT, QuorumPhase

END_KEPT_S = 7 * 86400.0
"""How long the machine remembers the end of a job, for groups whose scheduler starts them late."""


class QuorumMachine:
    """Quorums of one job. `now` is the caller's monotonic clock."""

    def __init__(
        self, config: QuorumConfig, *, record: QuorumRecord | None = None, holders_until: float | None = None
    ) -> None:
        """Create the machine, or restore it from a record.

        Args:
            config: Settings.
            record: What an earlier lighthouse has stored.
            holders_until: When the last lease of an earlier lighthouse's quorum ends. None if no member can hold one.
        """
        self.config = config
        self._effects: list[events.QuorumEffect] = []
        self._has_grid_changed = False
        self.job = Job()
        self.standing = Standing(self.job)
        self._numbering = Numbering(config.first_quorum_id, record, self.job)
        may_be_older = None if record is None else holders_until
        self.job_end = JobEnd() if record is None else JobEnd(record.ended, record.absent)
        self.presence = Presence(
            config, self.job, self.standing, self._numbering, self._emit, may_be_older, self.job_end
        )
        self.roster = self.presence.roster
        self.joins = self.presence.joins
        self._history = History(record.named if record is not None else ())
        self._ended_at: float | None = None
        self._now, self._working = 0.0, 0
        self._first_formed_at: float | None = None  # first quorum of this lighthouse
        self._lost_at: float | None = None  # last loss of a member of the present quorum
        if record is not None and record.quorum is not None:
            self.job.restore(record.quorum)
            self._history.add(record.quorum.quorum_id)
        if holders_until is not None:
            self.standing.restore(record, holders_until, holders_until + config.lease_s)

    def remembers_end(self, now: float) -> bool:
        """Return whether the job has ended recently and absent groups may still come too late."""
        is_recent = self._ended_at is None or now < self._ended_at + END_KEPT_S
        return self.job_end.step is not None and bool(self.job_end.absent) and is_recent

    def is_quiet(self, now: float) -> bool:
        """Return whether no group is alive or remembered, and no lease can still run."""
        return (
            len(self.roster) == 0
            and self.standing.phase is not QuorumPhase.RETURNING
            and now >= self.standing.free_at()
        )

    @property
    def braked_until(self) -> float:
        """Until this moment, members that disappeared together count as alive."""
        return self.presence.silence.braked_until

    def is_judging_closings(self, now: float) -> bool:
        """Return whether the caller must first report an overloaded host (`HostBusy`)."""
        return self.presence.silence.is_judging(now)

    @property
    def quorum(self) -> Quorum | None:
        """Present quorum."""
        return self.job.quorum

    def handle(self, event: events.QuorumEvent, now: float) -> Sequence[events.QuorumEffect]:
        if isinstance(event, events.WasLate):  # before the pause makes groups lapse
            self.presence.was_late(event.by_s, now)
        elif isinstance(event, events.HostBusy):  # before closings are judged
            self.presence.silence.postpone(now)
        self._pass_time(now)
        match event:
            case events.Joined():
                self.presence.join(event, now)
            case events.HeartbeatReceived(replica_id, incarnation):
                self.presence.beat_without_session(replica_id, incarnation, now)
            case events.Withdrawn(call):
                self.joins.withdraw(call, now)
            case events.SessionOpened():
                self.presence.open(event, now)
            case events.SessionHeartbeatReceived():
                self.presence.beat(event, now)
            case events.SessionEnded():
                self.presence.end(event, now)
            case events.Left():
                self.presence.leave(event, now)
            case events.WasLate() | events.HostBusy():
                pass
        self._settle(now)
        return self._take_effects()

    def tick(self, now: float) -> Sequence[events.QuorumEffect]:
        self._pass_time(now)
        self._settle(now)
        return self._take_effects()

    def deadline(self, now: float) -> float | None:
        """Return when to call `tick` next. After `handle` or `tick` with `now`, it is later than `now`."""
        moments = [self.roster.next_at(), self.standing.returns_until()]
        if self._is_enough():  # otherwise time alone cannot form a quorum
            moments += [
                self.missed_at(),
                self._cut_at() if self._is_majority() else None,
                self.standing.free_at(),
                self.leases_until() if self.standing.unheard(now) else None,
                self.last_call_until,
            ]
        return min((moment for moment in moments if moment is not None and moment > now), default=None)

    def verdict(self) -> Verdict:
        """Return why a quorum has or has not formed, as of the last event or tick."""
        candidates = self.joins.candidates
        if candidates == 0:
            return Verdict.FORMED if self.roster.working else Verdict.NO_JOINS
        if self.standing.phase is QuorumPhase.RETURNING:
            return Verdict.WAITING_FOR_RECONNECT
        if self.standing.phase is QuorumPhase.RECALLED:
            return Verdict.WAITING_FOR_RECALL
        if self.standing.phase is QuorumPhase.STANDING:  # the waiting groups would change nothing
            return Verdict.FORMED
        if candidates < self.config.min_replicas:
            return Verdict.TOO_FEW_PARTICIPANTS
        if self._size(candidates) < self.config.min_replicas:
            return Verdict.NO_ALLOWED_SIZE
        if not (self.joins.has_all_members or not self._has_stragglers()):
            return Verdict.WAITING_FOR_MEMBERS if self.missed_at() is None else Verdict.WAITING_FOR_STRAGGLERS
        if self.last_call_until is not None and self._now < self.last_call_until:
            return Verdict.WAITING_FOR_LOST_MEMBER
        return Verdict.READY if self._is_free() else Verdict.WAITING_FOR_LEASES

    @property
    def peers_pending(self) -> int:
        """Number of waiting groups that would get a place beside the present members."""
        members = len(self.job.replica_ids)
        return max(0, self._size(members + self.joins.newcomers) - members)

    def stragglers(self) -> list[str]:
        """List the healthy groups that have not joined, sorted. O(n log n)."""
        return sorted(member.replica_id for member in self.roster if member.is_healthy and member.call is None)

    # -- effects

    def _emit(self, effect: events.QuorumEffect) -> None:
        """Collect an effect. Parts of the machine have no other way to send one."""
        if isinstance(effect, GridChanged):
            if self._has_grid_changed:
                return
            self._has_grid_changed = True
        self._effects.append(effect)

    def _take_effects(self) -> list[events.QuorumEffect]:
        effects, self._effects, self._has_grid_changed = self._effects, [], False
        return effects

    # -- time

    def _pass_time(self, now: float) -> None:
        self.job.pass_time(now)
        self._now = now
        if self.job_end.step is None:
            self._ended_at = None
        elif self._ended_at is None:
            self._ended_at = now
        self.presence.pass_time(now)
        self.presence.standing_time(now)

    def _note_missed(self) -> None:
        missed_at = self.missed_at()
        if missed_at is not None and self._now >= missed_at:
            for name in self.stragglers():
                member = self.roster.get(name)
                if member is not None:
                    self.roster.miss(member)

    def missed_at(self) -> float | None:
        """Return when the present stragglers miss their join_timeout, or None while no wait counts."""
        if not self._has_stragglers() or not len(self.joins) or self.standing.holds_back:
            return None
        clock = self.joins.members if self.roster.working else self.joins.anyone
        started_at = clock.running_since(self._now)
        return None if started_at is None else started_at + self.config.join_timeout_s

    @property
    def last_call_until(self) -> float | None:
        """End of the wait of rule 6, or None if no spare would replace a lost member."""
        members = self.joins.members.asking
        if self.config.active is None or self._lost_at is None or members >= self._size(self.joins.candidates):
            return None
        until, answer_by = self._lost_at + self.config.last_call_s, self._answer_by()
        return until if answer_by is None else min(until, answer_by)

    def _cut_at(self) -> float | None:
        """Return the moment of rule 7 while a member's wait counts. Only a majority may form then."""
        return None if self.missed_at() is None else self._answer_by()

    def _answer_by(self) -> float | None:
        """Return when the first call that counts in rule 7 needs an answer."""
        earliest = self.joins.members_deadline_at if self.roster.working else self.joins.earliest_deadline_at
        return None if earliest is None else earliest - self.config.deadline_margin_s

    def _has_stragglers(self) -> bool:
        return self.roster.healthy > len(self.joins)

    def _is_majority(self) -> bool:
        return 2 * self.joins.candidates > self.roster.healthy

    def _is_enough(self) -> bool:
        candidates = self.joins.candidates
        return candidates >= self.config.min_replicas and self._size(candidates) >= self.config.min_replicas

    def _size(self, candidates: int) -> int:
        return size_for(candidates, self.config.allowed_sizes, self.config.active)

    def _is_free(self) -> bool:
        """Return whether the leases of the last quorum allow the waiting groups to form the next one."""
        if self.standing.phase is QuorumPhase.NONE or self._now >= self.standing.free_at():
            return not self.standing.holds_back
        return self.standing.may_form(self._chosen(), self._now)

    def leases_until(self) -> float:
        """Return when the last lease ends that keeps the waiting groups from forming."""
        return self.standing.free_at(self._chosen())

    def _chosen(self) -> Iterator[Participant]:
        return (member.participant for member in self._choose() if member.participant)

    def _settle(self, now: float) -> None:
        if self.roster.working < self._working:
            self._lost_at = now
        self._review()
        self._end_job(now)
        has_formed = self._form(now)
        self._working = self.roster.working
        if has_formed:
            self._review()
        self.presence.dismiss()

    def _end_job(self, now: float) -> None:
        if not self.presence.has_ended():
            return
        members = self.job.replica_ids
        others = [m for m in self.roster if m.is_alive and not m.is_reported and m.down != LEFT]
        self.job_end.reach(sorted(members), [m.replica_id for m in others if m.replica_id not in members])
        assert self.job_end.step is not None
        record = self._record(stands=self.standing.phase is not QuorumPhase.NONE)
        self._emit(events.JobEnded(self.job_end.step, self.job_end.absent, record))
        self.presence.refuse_late(now)

    # -- a standing quorum

    def _review(self) -> None:
        """Recall the standing quorum if the waiting groups would change it, or if a member drains."""
        if self.standing.phase is not QuorumPhase.STANDING:
            return
        draining = self.presence.draining()
        if draining:
            self.presence.recall(f"{draining[0]} drains")
        elif self.peers_pending:
            self.presence.recall(f"{self.joins.newcomers} waiting to join")

    # -- forming

    def _form(self, now: float) -> bool:
        """Form a quorum if the rules allow it. Return whether one has formed."""
        if self.standing.holds_back or not self._is_enough():
            return False
        self._note_missed()
        cut_at = self._cut_at()
        is_cut = cut_at is not None and now >= cut_at and self._is_majority() and self._is_free()
        if self.verdict() is not Verdict.READY and not is_cut:
            return False
        chosen = self._choose()
        participants = [member.participant for member in chosen if member.participant]
        tags = [tag_of(member.participant, member.last_told) for member in chosen if member.participant]
        lineage = assign_steps(participants, tags, self._foreign(chosen))
        stands = self.config.stands and all(m.is_connected and _can_stand(m.participant) for m in chosen)
        always = stands or self.standing.phase is not QuorumPhase.NONE
        is_new = self._numbering.number(chosen, self.presence.seen_id, always=always)
        for member, joined, given in zip(chosen, participants, lineage.participants, strict=True):
            # A group whose step was lowered may or may not have healed when it joins again at max_step.
            tag_quorum_id = lineage.tag_quorum_id if given.step == joined.step else None
            was_at = joined.step if joined.step > lineage.max_step else None
            max_step, held = lineage.max_step, Tag(joined.step, joined.tag_quorum_id)
            lowest = max_step if member.last_told is None else member.last_told.lowest_with(held, max_step)
            member.last_told = LastQuorumTold(
                self._numbering.quorum_id, max_step, tag_quorum_id, was_at, held, lowest, lineage.tag_quorum_id
            )
            self.roster.see(member, now)
        quorum = Quorum(self._numbering.quorum_id, lineage.participants)
        for quorum_id in (lineage.tag_quorum_id, quorum.quorum_id):
            if quorum_id:
                self._history.add(quorum_id)
        self.job_end.formed(self.job.replica_ids, frozenset(p.replica_id for p in participants))
        self.job.form(quorum, chosen, now, is_new=is_new)
        self._stand(participants, chosen, stands)
        self._lost_at = None
        self._first_formed_at = now if self._first_formed_at is None else self._first_formed_at
        self.roster.form()
        calls = self.joins.take(chosen, now)
        record = self._record(stands) if is_new else None
        self._emit(events.QuorumFormed(quorum, calls, is_new, stands, record))
        return True

    def _foreign(self, candidates: Sequence[Group]) -> list[bool]:
        if self._does_earlier_count():
            for member in candidates:
                if member.participant and self._numbering.is_unknown(member.participant.seen_quorum_id):
                    self._history.add(member.participant.seen_quorum_id)
        claims = [self._claim(member, member.participant) for member in candidates if member.participant]
        return foreign(claims, self._history, self.job.max_step)

    def _does_earlier_count(self) -> bool:
        """Return whether managers' reports about an earlier lighthouse count (lineage.py)."""
        return self._first_formed_at is None or self._now < self._first_formed_at + EARLIER_COUNTS_FOR_S

    def _claim(self, member: Group, participant: Participant) -> Claim:
        told, tag = member.last_told, tag_of(participant, member.last_told)
        is_member = member.is_participant and not (told is not None and told.has_not_healed(participant))
        was_told = tag is not None and (
            (told is not None and tag in (told.quorum_id, told.formed_from))
            or self.job.may_hold(member.replica_id, tag)
        )
        # A step needs all members of a quorum, so they are at most one step apart.
        may_be_ahead: int | None = int(was_told)
        if tag is not None and self._numbering.is_unknown(tag):
            may_be_ahead = None
        return Claim(participant.step, tag, is_member, may_be_ahead, participant.ranks_disagree, participant.works_at)

    def _stand(self, participants: list[Participant], chosen: list[Group], stands: bool) -> None:
        if not stands:
            return self.standing.replace()
        secrets = {member.replica_id: member.secret for member in chosen}
        entries = {p.replica_id: entry_of(p, secrets[p.replica_id]) for p in participants}
        return self.standing.form(entries, {member.replica_id: member.lease_until for member in chosen})

    def _record(self, stands: bool) -> QuorumRecord:
        quorum = self.job.quorum
        assert quorum is not None
        entries, lease_s = self.standing.entries, self.config.lease_s
        ended, absent = self.job_end.step, self.job_end.absent
        return QuorumRecord(quorum.quorum_id, quorum, stands, entries, lease_s, self._history.ranges, ended, absent)

    def _choose(self) -> list[Group]:
        candidates = self.joins.list_candidates()
        by_id = {member.replica_id: member for member in candidates}
        participants = [member.participant for member in candidates if member.participant]
        strangers = frozenset(
            member.replica_id for member, heals in zip(candidates, self._foreign(candidates), strict=True) if heals
        )
        places = choose(participants, self.job.replica_ids, self._size(len(candidates)), strangers)
        chosen = [by_id[participant.replica_id] for participant in places]
        return sorted(chosen, key=lambda member: member.participant.wire_id if member.participant else "")


def _can_stand(participant: Participant | None) -> bool:
    """Return whether the participant's collectives can be aborted, and it does not ask to shrink."""
    return participant is not None and participant.watched and not participant.shrink_only
