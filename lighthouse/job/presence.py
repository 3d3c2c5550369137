"""Sessions, joins and losses of replica groups, and their effect on the standing quorum.

1. If a session ends without a leave, its group is lost. The lighthouse declares the loss within a few milliseconds. If
   the sessions of more than half of a quorum end together, the network is the likelier cause (`MassSilence`). When an
   old session ends, a newer session of the group is not affected. A new session of the same manager, authenticated by
   the manager's secret (identity rules in roster.py), replaces the old one.
2. A group whose heartbeats stop is lost, too, unless the lighthouse's own network is the likelier cause
   (`MassSilence`).
3. A group is down while its ranks restart. Its quorum loses it, and the others stop waiting for it until it joins. A
   group whose ranks exited cleanly has left its quorum (standing.py) and is not lost.
4. A participant is identified by (replica_id, incarnation). A group that loses its state restarts under a new
   incarnation. When that incarnation joins or opens a session, the old one is lost.

`JobEnd` decides when the job has ended and which groups arrive too late.
"""

import math
from collections.abc import Collection, Iterable, Iterator

from lighthouse.job import events
from lighthouse.job.records import Group, Kind, Membership
from lighthouse.job.roster import Job, identity_error, is_reborn, refusal, unreachable_groups
from lighthouse.job.standing import ResendQuorum
from lighthouse_protocol.messages.membership import Participant, Tag
from lighthouse_protocol.messages.session import (
    LEFT,
    RESTARTING,
    STARTING,
    GroupReport,
    HoldState,
    QuorumOrder,
    QuorumPhase,
    Welcome,
)
from lighthouse_protocol.refusals import Drained, InvalidRequest, LighthouseError, Superseded, Unreachable
from lighthouse_protocol.rules.access import digest_of, is_same

BEAT_SLACK_S = 0.25
CLOSINGS_HELD_S = 2.0
SAME_MOMENT_S = 0.1
"""Seconds for which the result "most members are silent" is reused, so that 10,000 losses need only one count."""
JUDGED_AFTER_S = 0.007
"""Seconds from the last closed connection of a burst to the verdict on the burst. The loss of a single killed manager
must be noticed within 20 ms, and the kernel, gRPC and the notification of the other ranks need 11 ms
(benchmarks/recovery.py).
"""
JUDGED_WITHIN_S = 0.1
"""Longest time in seconds from the first closed connection of a burst to the verdict."""
LATE_S = 0.005
"""A verdict that is late by more than this many seconds shows that the lighthouse was paused."""
POSTPONED_AT_MOST = 40
"""Maximum number of times that a paused or busy lighthouse postpones a verdict by JUDGED_AFTER_S. It may read
simultaneous closings far apart: with a load average of 20 on two CPUs, up to 98 ms for three members.
"""
SILENT_TOGETHER = "most members fell silent together; they have one more timeout before they count as lost"
CLOSED_TOGETHER = "the connections of most members ended together; they have one lease to reconnect"


class MassSilence:
    """Decides whether silent or disconnected members are lost, or get more time because the network may be at fault.

    1. If more than half of a quorum's members fall silent together, the lighthouse's own network is the likelier cause.
       The silent members count as alive for one more timeout.
    2. After the lighthouse process was paused, it postpones all timeouts by the length of the pause. A member that is
       found disconnected then has the length of the pause plus CLOSINGS_HELD_S to reconnect.
    3. A closed connection does not prove that a process died: a restart of a load balancer, sidecar or firewall closes
       all connections. So the lighthouse judges a burst of closed connections as a whole, a few milliseconds after
       the last one, or later on a busy host. If more than half of the quorum's members are disconnected at that time,
       they count as alive for the length of a lease, as after a restart of the lighthouse.
    4. If a member reports a failed step, more has failed than the connections to the lighthouse. A pending burst is
       then judged at once, and members that rule 3 keeps alive have only CLOSINGS_HELD_S left to reconnect.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._timeout_s = job.config.heartbeat_timeout_s
        self._lease_s = job.config.lease_s
        self._closings_held_until = 0.0
        self._most_silent_until = 0.0
        self.all_excused_until = 0.0
        self._burst = 0  # number of the newest burst
        self._is_judged = True
        self._judge_at = self._judge_by = 0.0
        self._postponed = 0
        self._cut_until = -math.inf  # end of the time in which members of a judged burst count as alive
        self.all_excused_for = ""

    def postpone_closings(self, by_s: float, now: float) -> None:
        self._job.postpone_timeouts(by_s)
        self._cut_until += by_s
        self.all_excused_until += by_s
        self._closings_held_until = max(self._closings_held_until, now + CLOSINGS_HELD_S) + by_s

    def is_judging(self, now: float) -> bool:
        """Return whether the next event or tick decides if recently disconnected members are lost.

        If the host is overloaded, the caller must first pass a `HostBusy` event, which may postpone the decision.
        """
        due_at = self._job.next_timeout_at()
        return not self._is_judged and due_at is not None and due_at <= now and self._judge_at <= now

    def postpone_judgement(self, now: float) -> None:
        """Postpone the decision on a burst of closed connections, because the lighthouse may not have read all of them.

        Do nothing if all members are disconnected, if all members of the burst have reconnected, or if the decision has
        been postponed POSTPONED_AT_MOST times.
        """
        members, ended = self._members_before_burst()
        is_pending = any(m.closes_at is not None and self._is_unjudged(m) for m in ended)
        if is_pending and self._postponed < POSTPONED_AT_MOST and len(ended) < len(members):
            self._postponed += 1
            self._judge_at, self._judge_by = now + JUDGED_AFTER_S, now + JUDGED_WITHIN_S

    def hold_closing(self, member: Group, beat_interval_s: float, now: float) -> float | None:
        """Decide how long a member whose stream has ended without a leave still counts as alive.

        Returns:
            Time at which the member is lost, or checked again, unless it reconnects. None if it is lost at once.
        """
        if now < self._closings_held_until:
            return self._closings_held_until
        is_silent = _is_silent(member, beat_interval_s, now)
        if is_silent and self._are_most_silent(beat_interval_s, now):
            return self._excuse_all(now + self._timeout_s, SILENT_TOGETHER)
        if len(self._job.members) < 2 or not member.is_participant:
            return None
        if self._is_judged or now > self._judge_by:
            self._burst, self._is_judged = self._burst + 1, False
            self._judge_by, self._postponed = now + JUDGED_WITHIN_S, 0
        member.burst = self._burst
        self._judge_at = min(now + JUDGED_AFTER_S, self._judge_by)
        if not is_silent:
            member.seen_at = now
        return self._judge_at

    def excuse_member(self, member: Group, beat_interval_s: float, now: float) -> bool:
        """Return whether a silent or disconnected member gets more time before it is lost.

        A silent member gets more time only if most members are silent, and only once until its next message.
        """
        if member.closes_at is not None:
            return self._excuse_closing(member, now)
        was_excused = member.excused_until > member.seen_at + self._timeout_s
        if was_excused or not self._are_most_silent(beat_interval_s, now):
            return False
        self._job.extend_timeout(member, self._excuse_all(now + self._timeout_s, SILENT_TOGETHER), now)
        return True

    def is_cut(self, member: Group, now: float) -> bool:
        """Return whether the member lost its connection together with most others and may still reconnect."""
        return member.closes_at is not None and now < self._cut_until

    def handle_failed_step(self, now: float) -> None:
        """Shorten the waits for disconnected members, because a member has reported a failed step."""
        if not self._is_judged:
            self._judge_at = min(self._judge_at, now)
            for member in self._job.groups.values():
                if self._is_unjudged(member) and member.closes_at is not None:
                    self._job.await_reconnect(member, now, now)
        if now >= self._cut_until:
            return
        self._cut_until, until = now, now + CLOSINGS_HELD_S
        for member in self._job.list_participants():
            if member.closes_at is not None and member.closes_at > until:
                self._job.await_reconnect(member, until, now)

    def _excuse_closing(self, member: Group, now: float) -> bool:
        if self._is_unjudged(member):
            if now > self._judge_at + LATE_S:
                self.postpone_judgement(now)
            if now < self._judge_at:
                self._job.await_reconnect(member, self._judge_at, now)
            else:
                self._judge_burst(now)
        return member.closes_at is None or now < member.closes_at

    def _judge_burst(self, now: float) -> None:
        """If more than half of the members are disconnected, let those of this burst count as alive for one lease."""
        members, ended = self._members_before_burst()
        self._is_judged = True
        if 2 * len(ended) <= len(members) or len(members) < 2:
            return
        until = self._cut_until = self._excuse_all(now + self._lease_s, CLOSED_TOGETHER)
        held = [m for m in members if m.burst == self._burst and m.closes_at is not None]
        for member in held:
            self._job.await_reconnect(member, until, now)
        self._job.emit(events.ConnectionsCut(tuple(sorted(m.replica_id for m in held)), self._lease_s))

    def _members_before_burst(self) -> tuple[list[Group], list[Group]]:
        """Return the members with a session before the newest burst of closed connections, and those that lost it."""
        members = [m for m in self._job.list_participants() if m.session is not None and m.is_alive]
        return members, [m for m in members if m.closes_at is not None or self._is_unjudged(m)]

    def _is_unjudged(self, member: Group) -> bool:
        return not self._is_judged and member.burst == self._burst

    def _excuse_all(self, until: float, why: str) -> float:
        self.all_excused_until, self.all_excused_for = until, why
        return until

    def _are_most_silent(self, beat_interval_s: float, now: float) -> bool:
        """Return whether more than half of the members with a session are silent."""
        if now < self._most_silent_until:
            return True
        members = silent = 0
        for member in self._job.list_participants():
            if member.session is not None and member.is_alive:
                members += 1
                silent += _is_silent(member, beat_interval_s, now)
        if 2 * silent <= members or members < 2:
            return False
        self._most_silent_until = now + SAME_MOMENT_S
        return True


def _is_silent(member: Group, beat_interval_s: float, now: float) -> bool:
    """Return whether the member's next heartbeat is overdue by more than BEAT_SLACK_S."""
    return now - member.seen_at > beat_interval_s + BEAT_SLACK_S


ABSENT_KEPT = 256


class JobEnd:
    """Decides when a job has ended, and which groups arrive too late.

    A group has finished when it leaves its quorum because its script ended (HoldState.LEAVING). The job has ended when
    a member of the last quorum has finished and every other member has finished, was lost, or has drained. If scripts
    differ in length, the longest one ends the job.

    A group is absent if it was in a quorum of the job and has not finished, or if it was alive at the end but not in
    the last quorum. An absent group that arrives after the end is late: it would train the job again, alone, from
    its own step. It is refused unless

    - it starts at or after the step at which the job ended, for example from a checkpoint,
    - its manager runs with --continue, or
    - another live group is not absent, which means that the job was started again on purpose.

    Finished and unknown groups are never refused: they begin another training run under this name. When the next quorum
    forms, the recorded end is cleared.
    """

    def __init__(self, step: int | None = None, absent: Iterable[str] = ()) -> None:
        """Begin without a recorded end, or restore a recorded one.

        Args:
            step: Step at which the job ended, or None if it has not ended.
            absent: Absent groups, in the order in which they were lost.
        """
        self.step = step
        self.absent = tuple(absent)
        self.finished_step: int | None = None
        """Highest step count among members whose script has ended, or None if all members are training."""

    def record_end(self, away: Iterable[str]) -> None:
        """Record the end of the job.

        The groups `away` become absent: those that have not finished, and were in the last quorum or are alive.
        """
        self.step = self.finished_step
        self._set_absent((*self.absent, *away))

    def record_quorum(self, before: Iterable[str], members: Collection[str]) -> None:
        """Record that a quorum of `members` has formed. `before` lists unfinished members of the previous quorum."""
        if self.step is None:
            self._set_absent(name for name in (*self.absent, *before) if name not in members)
        else:
            self.absent = ()
        self.step = self.finished_step = None

    def check_late_group(self, participant: Participant, others: Iterable[str]) -> Drained | None:
        """Return the error for a group that joins too late, or None. `others` are the other live groups."""
        name, step = participant.replica_id, participant.requested_step
        if self.step is None or participant.continues or name not in self.absent or step >= self.step:
            return None
        if any(other not in self.absent for other in others):
            return None
        return Drained(
            f"the job ended at step {self.step}: all remaining groups have finished. {name} was absent at the end and "
            f"has step {step}, so it has nothing left to do. To train anyway, start it with "
            f"--continue (LIGHTHOUSE_MANAGER_CONTINUE=1), from a checkpoint of step {self.step} or later, or under "
            "another --job"
        )

    def _set_absent(self, names: Iterable[str]) -> None:
        self.absent = tuple(dict.fromkeys(names))[-ABSENT_KEPT:]


USUAL_BEAT_INTERVAL_S = 1.0
USUAL_BEAT_SHARE = 0.25  # share of the lease and of the heartbeat timeout
BEATS_PER_S = 500
"""Maximum heartbeats per second of all sessions. With more sessions, each sends heartbeats less often."""
LONGEST_BEAT_SHARE = 0.4
"""Longest heartbeat interval, as a share of the lease and of the heartbeat timeout. Leaves room for the longest
pause that the keepalive allows.
"""
SILENT_AFTER_INTERVALS = 1.5
MAX_REPORTED = 500


class Presence:
    """Part of `QuorumMachine` that handles the sessions, joins and losses of a job's groups."""

    def __init__(self, job: Job, job_end: JobEnd, holders_until: float | None) -> None:
        """Start without sessions.

        Until `holders_until`, members may hold quorums of an earlier lighthouse that the restored record lacks. None
        disables the check for such quorums.
        """
        self._config = job.config
        self._job = job
        self.job_end = job_end
        self.standing, self.joins = job.standing, job.joins
        self.silence = MassSilence(job)
        self.seen_id = 0
        self._holders_until = holders_until
        self.sessions: dict[int, Group] = {}
        """Groups with an open session, by session number."""
        self._leaving: list[int] = []

    @property
    def beat_interval_s(self) -> float:
        """Seconds between heartbeats of a session.

        Grows with the number of sessions, up to LONGEST_BEAT_SHARE of the lease or the heartbeat timeout, whichever is
        shorter.
        """
        shortest_s = min(self._config.lease_s, self._config.heartbeat_timeout_s)
        usual_s = min(USUAL_BEAT_INTERVAL_S, USUAL_BEAT_SHARE * shortest_s)
        return max(usual_s, min(len(self.sessions) / BEATS_PER_S, LONGEST_BEAT_SHARE * shortest_s))

    def membership(self, replica_id: str, digest: str) -> Membership:
        """Return the group's membership in the quorum, which the caller proves with a secret that has this `digest`."""
        lease = self.standing.leases.get(replica_id)
        if is_same(digest, self._job.last_secret(replica_id)) or (lease and is_same(digest, lease.entry.secret)):
            return Membership.MEMBER
        is_held = self._job.counts[Kind.WORKING] or self.standing.members_at_work
        return Membership.OUTSIDER if is_held else Membership.OPEN

    # -- calls and joins

    def handle_join(self, event: events.Joined, now: float) -> None:
        participant = event.participant
        if (error := self._check_join(event, now)) is not None:
            return self._job.emit(events.JoinRefused(event.call, error))
        if self._job.counts[Kind.LOOPBACK]:
            self._evict_loopbacks(participant, now)
        self._supersede_join(participant, now)
        member = self._admit_join(participant, event.session, now)
        self._record_seen_id(participant, participant.seen_quorum_id, now)
        self.seen_id = max(self.seen_id, participant.tag_quorum_id or 0)
        if participant.commit_failures > 0 and member.is_participant:
            self.silence.handle_failed_step(now)
            self.lapse_silent_groups(now)
        outcome = self.standing.handle_member_join(participant, now)
        if member.is_participant and self._has_missed_answer(member):
            outcome = ResendQuorum()
        if isinstance(outcome, ResendQuorum):
            self._resend_quorum(member, event.call)
            return self._send_order(outcome.order)
        self.joins.add_join(member, event.call, event.deadline_at, now)
        return self._send_order(outcome)

    def _has_missed_answer(self, member: Group) -> bool:
        """Return whether the others run a quorum that does not stand, and this member of it never received it."""
        participant, last = member.participant, member.last_assignment
        assert participant is not None
        return (
            self.standing.phase is QuorumPhase.NONE
            and member.is_connected
            and last is not None
            and participant.seen_quorum_id < last.quorum_id
            and last.held == Tag(participant.step, participant.tag_quorum_id)
            and not self.joins.members.asking
        )

    def _check_join(self, event: events.Joined, now: float) -> LighthouseError | None:
        if event.session is not None:
            ours = self.sessions.get(event.session)
            if ours is None:
                return Superseded("this session has ended")
            if ours.replica_id != event.participant.replica_id:
                return InvalidRequest(
                    f"is {event.participant.replica_id}; this session is that of {ours.replica_id}, and speaks for no "
                    "other replica group",
                    field="replica_id",
                )
        error = self._check_caller(event.participant, now, session=event.session)
        if error is None and event.session is not None and self.sessions[event.session].drains:
            return _drained_error(event.participant.replica_id)
        if error is not None or self.job_end.step is None:
            return error
        return self.job_end.check_late_group(event.participant, self.live_groups(event.participant.replica_id))

    def live_groups(self, other_than: str = "") -> Iterator[str]:
        """Yield the live groups except `other_than`, excluding those that have left or only sent heartbeats."""
        for member in self._job.groups.values():
            if member.replica_id != other_than and member.is_alive and not member.is_reported and member.down != LEFT:
                yield member.replica_id

    def refuse_late_joins(self, now: float) -> None:
        """Refuse the pending joins of groups that are too late (`JobEnd`). Call this when the job ends."""
        for member in list(self.joins):
            assert member.participant is not None
            late = self.job_end.check_late_group(member.participant, self.live_groups(member.replica_id))
            if late is not None and member.call is not None:
                self._job.emit(events.JoinRefused(member.call, late))
                self._drop_join(member, now)

    def _admit_join(self, participant: Participant, session: int | None, now: float) -> Group:
        """Admit a join. If the group has a new incarnation, move its manager's open session to the new record."""
        old = self._job.groups.get(participant.replica_id)
        if old is not None and is_reborn(participant, old):
            reason = "its ranks have restarted"
            if old.is_alive:
                self._job.emit(events.MemberLost(old.replica_id, self._quorum_lost_with(old), reason))
            self._send_order(self.standing.handle_member_loss(old.replica_id, old.incarnation, reason))
            if session is not None and session == old.session:
                self.standing.end_lease(old.replica_id, old.incarnation)
        member = self._job.record_join(participant, now)
        if old is not None and old is not member and old.session is not None and old.is_connected:
            member.session, member.lease_until, member.secret = old.session, old.lease_until, old.secret
            member.drains = old.drains
            self.sessions[old.session] = member
            self._job.update_counts(member)
        return member

    def handle_plain_heartbeat(self, replica_id: str, incarnation: str, now: float) -> None:
        """Handle a heartbeat outside a session.

        Ignore callers that may not act for the group. Also ignore a new group if MAX_REPORTED groups are already known
        from heartbeats only.
        """
        old = self._job.groups.get(replica_id)
        if self._check_identity(Participant(replica_id, incarnation), None, "", now) is not None:
            return
        if old is not None or self._job.counts[Kind.REPORTED] < min(MAX_REPORTED, self._config.max_replicas):
            self._job.record_heartbeat(replica_id, incarnation, now)

    # -- sessions

    def handle_hello(self, event: events.SessionOpened, now: float) -> None:
        participant, session = event.hello.participant, event.session
        secret = event.hello.secret
        error = self._check_caller(participant, now, event.hello.levels, session=session, is_hello=True, secret=secret)
        if error is not None:
            return self._job.emit(events.SessionRefused(session, error))
        if self._job.counts[Kind.LOOPBACK]:
            self._evict_loopbacks(participant, now)
        self._replace_session(participant, now)
        member = self.sessions[session] = self._job.add_session(participant, session, now, digest_of(secret))
        self._record_seen_id(participant, participant.seen_quorum_id, now)
        self._apply_report(member, event.hello.levels, now)
        order = self.standing.order_for_held(member.replica_id, member.incarnation, event.hello.levels.held)
        return self._job.emit(events.Welcomed(session, Welcome(self.beat_interval_s, self._config.lease_s, order)))

    def handle_session_heartbeat(self, event: events.SessionHeartbeatReceived, now: float) -> None:
        member = self.sessions.get(event.session)
        if member is None:
            return
        levels = event.beat.levels
        if (error := self._check_quorum_ids(None, levels, now)) is not None:
            self._job.emit(events.SessionRefused(event.session, error))
            return
        self._job.record_message(member, now)
        self._apply_report(member, levels, now)
        order = self.standing.order_for_held(member.replica_id, member.incarnation, levels.held)
        self._job.emit(events.HeartbeatAnswered(event.session, event.beat.number, order))

    def answer_unchanged_heartbeat(
        self, event: events.SessionHeartbeatReceived, now: float
    ) -> events.HeartbeatAnswered | None:
        """If a heartbeat reports no change, renew the group's lease and return the answer. Otherwise return None."""
        group, report, standing = self.sessions.get(event.session), event.beat.levels, self.standing
        held, quorum = report.held, standing.quorum
        if group is None or held is None or quorum is None or standing.phase is not QuorumPhase.STANDING:
            return None
        if self.joins:  # the next deadline of waiting joins depends on the leases
            return None
        is_same = held.quorum_id == quorum.quorum_id and held.mode is HoldState.STANDING and not held.wants_next
        is_well = Kind.WORKING in group.counts_as and not (report.down or group.is_starting)
        if not is_same or not is_well or report.drains != group.drains or report.missing != group.missing:
            return None
        group.seen_at, group.lease_until = now, now + self._config.lease_s
        group.step = max(group.step, held.granted)
        standing.extend_lease(group.replica_id, group.incarnation, group.lease_until)
        return events.HeartbeatAnswered(event.session, event.beat.number, standing.current_order())

    def handle_session_end(self, event: events.SessionEnded, now: float) -> None:
        member = self.sessions.pop(event.session, None)
        if event.session in self._leaving:
            self._leaving.remove(event.session)
        if member is None or member.session != event.session:
            return
        until = self.silence.hold_closing(member, self.beat_interval_s, now)
        if until is None:
            self._lose_group(member, "its connection was lost", now)
        else:
            self._drop_join(member, now)
            self._job.await_reconnect(member, until, now)

    def handle_leave(self, event: events.Left, now: float) -> None:
        member = self.sessions.pop(event.session, None)
        if member is None or member.session != event.session:
            return
        self._drop_join(member, now)
        self._job.emit(events.MemberLeft(member.replica_id))
        self._send_order(self.standing.handle_member_leave(member.replica_id, member.incarnation))
        self._job.remove_group(member)
        self._leaving.append(event.session)

    def close_leaving_sessions(self) -> None:
        """Close the sessions of groups that have left, once no other group needs them to complete a step."""
        if not self._leaving:
            return
        if self.standing.phase is QuorumPhase.RESUMED:  # members may still run granted steps that need their peers
            members = [self._job.groups.get(replica_id) for replica_id in self.standing.members_at_work]
            if any(member is not None and member.is_connected for member in members):
                return
        leaving, self._leaving = self._leaving, []
        for session in leaving:
            self._job.emit(events.SessionRefused(session, None, "as requested"))

    # -- time

    def lapse_silent_groups(self, now: float) -> None:
        for member in self._job.lapse_due_groups(now):
            if member.session is not None:
                self._handle_timeout(member, now)
        if self.standing.phase is QuorumPhase.RETURNING:
            self._send_order(self.standing.end_overdue_wait(now))

    def silent_groups(self, now: float) -> list[str]:
        """List connected groups with an overdue heartbeat. They count as alive until their timeout expires."""
        overdue = now - SILENT_AFTER_INTERVALS * self.beat_interval_s
        return sorted(member.replica_id for member in self.sessions.values() if member.seen_at < overdue)

    def postpone_after_pause(self, by_s: float, now: float) -> None:
        self.silence.postpone_closings(by_s, now)
        self.standing.postpone_waits(by_s)

    # -- internals

    def _check_caller(
        self,
        participant: Participant,
        now: float,
        levels: GroupReport | None = None,
        *,
        session: int | None,
        is_hello: bool = False,
        secret: str = "",
    ) -> LighthouseError | None:
        return (
            self._check_quorum_ids(participant, levels, now)
            or self._check_identity(participant, session, secret, now)
            or refusal(
                participant,
                self._job,
                session=session,
                is_hello=is_hello,
                is_starting=levels is not None and levels.down == STARTING,
            )
        )

    def _check_identity(
        self, participant: Participant, session: int | None, secret: str, now: float
    ) -> LighthouseError | None:
        """Return the error for a caller that may not act for its group, or None. Accept any call on an open session."""
        if session in self.sessions:
            return None
        old = self._job.groups.get(participant.replica_id)
        is_cut = old is not None and self.silence.is_cut(old, now)
        return identity_error(participant, secret, self._job, is_cut=is_cut)

    def _check_quorum_ids(
        self, participant: Participant | None, levels: GroupReport | None, now: float
    ) -> LighthouseError | None:
        """Return the error if `participant` or the report `levels` has a quorum id that was never assigned, or None."""
        held = levels.held.quorum_id if levels is not None and levels.held is not None else None
        seen, tag = (participant.seen_quorum_id, participant.tag_quorum_id) if participant is not None else (None, None)
        return self._job.numbering.why_unassigned(now, seen_quorum_id=seen, tag_quorum_id=tag, quorum_id=held)

    def _record_seen_id(self, member: Participant | Group, seen_id: int, now: float) -> None:
        """Record the highest quorum_id that a member has seen.

        If the journal lacks this id, it is outdated: revoke the quorum and wait until all leases have expired.
        """
        self.seen_id = max(self.seen_id, seen_id)
        if self._holders_until is None or not self._job.numbering.is_unknown(seen_id):
            return
        until, self._holders_until = self._holders_until, None
        wait_s = max(0.0, until - now)
        self._job.emit(events.JournalOutdated(member.replica_id, seen_id, self._job.numbering.quorum_id, wait_s))
        if now >= until:
            return
        sessions = self._member_sessions()
        order = self.standing.revoke_unknown_holders(
            until, f"{member.replica_id} was told quorum {seen_id}, which is not remembered"
        )
        if order is not None:
            self._job.emit(events.Ordered(order, sessions))

    def _send_order(self, order: QuorumOrder | None) -> None:
        """Send an order, if there is one, to every quorum member that has a session."""
        if order is not None:
            self._job.emit(events.Ordered(order, self._member_sessions()))

    def _member_sessions(self) -> tuple[int, ...]:
        sessions: list[int] = []
        for member in self.standing.quorum.participants if self.standing.quorum else ():
            here = self._job.groups.get(member.replica_id)
            if here is not None and here.is_connected and here.incarnation == member.incarnation:
                assert here.session is not None
                sessions.append(here.session)
        return tuple(sessions)

    def draining_members(self) -> list[str]:
        """List the members of the current quorum that want to leave, sorted."""
        if not self._job.counts[Kind.DRAINING]:
            return []
        return sorted(member.replica_id for member in self._job.groups.values() if Kind.DRAINING in member.counts_as)

    def recall_for(self, reason: str) -> None:
        self._send_order(self.standing.recall_quorum(reason))

    def _resend_quorum(self, member: Group, call: int) -> None:
        assert self._job.quorum is not None
        stands = self.standing.phase is not QuorumPhase.NONE
        self._job.emit(events.QuorumResent(self._job.quorum, call, stands))
        if (
            self.standing.phase in (QuorumPhase.RECALLED, QuorumPhase.RESUMED, QuorumPhase.REVOKED)
            and member.session is not None
        ):
            self._job.emit(events.Ordered(self.standing.current_order(), (member.session,)))

    def _evict_loopbacks(self, participant: Participant, now: float) -> None:
        for member, error in unreachable_groups(participant, self._job):
            if member.call is not None:
                self._job.emit(events.JoinRefused(member.call, error))
            if member.session is not None:
                self._job.emit(events.SessionRefused(member.session, error))
            self._lose_group(member, "its address is a loopback", now)
            self._job.remove_group(member)

    def _supersede_join(self, participant: Participant, now: float) -> None:
        old = self._job.groups.get(participant.replica_id)
        if old is None or old.call is None:
            return
        call = old.call
        self._drop_join(old, now)
        error = Superseded(f"{participant.replica_id} has asked again; its newer call is answered")
        self._job.emit(events.JoinRefused(call, error))

    def _replace_session(self, participant: Participant, now: float) -> None:
        """Close the group's older session before a new one opens. An older incarnation of the group is lost."""
        old = self._job.groups.get(participant.replica_id)
        if old is None:
            return
        self._supersede_join(participant, now)
        if old.session is not None and old.is_connected:
            self.sessions.pop(old.session, None)
            error = Superseded(f"{old.replica_id} has opened a newer session")
            self._job.emit(events.SessionRefused(old.session, error))
        if old.incarnation != participant.incarnation:
            self._lose_group(old, "has restarted", now)

    def _apply_report(self, member: Group, levels: GroupReport, now: float) -> None:
        member.lease_until = now + self._config.lease_s
        name, incarnation = member.replica_id, member.incarnation
        if self.standing.leases:
            self.standing.extend_lease(name, incarnation, member.lease_until)
        if levels.missing is not member.missing:
            self._job.set_missing_ranks(member, levels.missing)
        if levels.held is not None:
            self._record_seen_id(member, levels.held.quorum_id, now)
            member.step = max(member.step, levels.held.granted)
            if levels.held.mode is HoldState.LEAVING and self.standing.is_holder(name, incarnation):
                self._job.members[name].has_finished = True
                self.job_end.finished_step = max(self.job_end.finished_step or 0, levels.held.granted + 1)
        if levels.drains and not member.drains:
            self._job.emit(events.MemberDraining(name))
        if levels.drains != member.drains:
            member.drains = levels.drains
            self._job.update_counts(member)
        if levels.drains and member.call is not None:
            self._job.emit(events.JoinRefused(member.call, _drained_error(name)))
            self._drop_join(member, now)
        if levels.down or not member.down:  # a group that is down is starting until it joins
            member.is_starting = levels.down in (STARTING, RESTARTING)
        is_waited_for = levels.down == STARTING and self._job.quorum is None
        if levels.down and not member.down and not is_waited_for:
            self._take_down(member, levels.down, now)
        if self.standing.leases:
            self._send_order(self.standing.handle_held_quorum(name, incarnation, levels.held, now))

    def _take_down(self, member: Group, reason: str, now: float) -> None:
        self._drop_join(member, now)
        quorum_id = self._quorum_lost_with(member)
        if reason == LEFT:
            self._job.emit(events.MemberLeft(member.replica_id))
        elif reason != STARTING or quorum_id is not None:
            self._job.emit(events.MemberLost(member.replica_id, quorum_id, reason))
        self._job.mark_down(member, reason)
        if reason != LEFT:
            self._send_order(self.standing.handle_member_loss(member.replica_id, member.incarnation, reason))

    def _handle_timeout(self, member: Group, now: float) -> None:
        if self.silence.excuse_member(member, self.beat_interval_s, now):
            return
        session = member.session if member.closes_at is None else None
        reason = "it fell silent" if member.closes_at is None else "its connection was lost"
        self._lose_group(member, reason, now, member.seen_at)
        if session is not None:
            timeout_s = self._config.heartbeat_timeout_s
            gone = Unreachable(f"the lighthouse received no heartbeat from {member.replica_id} for {timeout_s:g} s")
            self._job.emit(events.SessionRefused(session, gone))

    def _lose_group(self, member: Group, reason: str, now: float, last_seen_at: float | None = None) -> None:
        self._drop_join(member, now)
        if member.session is not None:
            self.sessions.pop(member.session, None)
        self._job.mark_lost(member, now, reason, quorum_id=self._quorum_lost_with(member), last_seen_at=last_seen_at)
        self._send_order(self.standing.handle_member_loss(member.replica_id, member.incarnation, reason))

    def _quorum_lost_with(self, member: Group) -> int | None:
        return self.standing.quorum_lost_with(member.replica_id, member.incarnation)

    def _drop_join(self, member: Group, now: float) -> None:
        if member.call is not None:
            self.joins.withdraw_join(member.replica_id, member.call, now)


def staying_groups(groups: Iterable[Group]) -> set[str]:
    """Return the replica_ids of groups that can train and whose hosts are not about to be taken away.

    A preemption notice that is only advice does not count.
    """
    return {
        group.replica_id
        for group in groups
        if group.is_alive
        and not (group.is_reported or group.is_starting or group.down or group.drains)
        and (group.reports.preemption is None or group.reports.preemption.is_advice)
    }


def _drained_error(replica_id: str) -> Drained:
    return Drained(f"{replica_id} drains; it is in no further quorum")
