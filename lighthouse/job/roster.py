"""Presence of replica groups, identity and admission of callers, and pending joins.

A group is alive while its session is open and sends heartbeats. Without a session, it is alive while one of its calls
is pending or its last message (heartbeat, join, answer) is younger than `heartbeat_timeout_s`. When that time has
passed, the group has lapsed. Its record is kept for a while, for the status. A group is healthy while it is alive, is
not down, and has not missed a join timeout. A join makes it healthy again.

A reported group has only sent heartbeats without a session. Any process can send these under any name, so the number of
reported groups has its own limit. If other groups have sessions, only the first quorum of a job waits for reported
ones.

`Job` holds the groups, joins and last quorum, which `decide` (forming.py) reads, and collects the effects of an event.
The functions below it implement the rules of identity and admission, and `JoinQueue` holds the pending joins. Times are
in seconds of the lighthouse's monotonic clock. With n groups, an operation takes O(log n) time unless noted.
"""

import heapq
import math
from collections import Counter
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from operator import attrgetter

from lighthouse.job import events
from lighthouse.job.lineage import History, Numbering
from lighthouse.job.records import (
    Group,
    GroupReports,
    Kind,
    LastAssignment,
    QuorumConfig,
    QuorumRecord,
    is_loopback,
    loopback_error,
)
from lighthouse.job.standing import Standing
from lighthouse_protocol.messages.membership import Participant, Quorum
from lighthouse_protocol.messages.session import RESTARTING
from lighthouse_protocol.rank_set import NO_RANKS
from lighthouse_protocol.refusals import (
    DuplicateReplica,
    InvalidRequest,
    LighthouseError,
    LimitReached,
    Unreachable,
    WrongState,
)
from lighthouse_protocol.rules.access import is_shown

FORGET_AFTER_TIMEOUTS = 12
MIN_FORGET_AFTER_S = 60.0


@dataclass(slots=True)
class Member:
    """A member of the current quorum. It remains a member even if the record of its group is removed."""

    participant: Participant
    secret: str
    """Digest of the manager's secret when the quorum formed. Empty after a restart of the lighthouse."""
    has_finished: bool = False
    """True if the member's script has ended."""


class Job:
    """State of a job: its replica groups with their counts and timeouts, its pending joins and its last quorum."""

    def __init__(self, config: QuorumConfig, record: QuorumRecord | None = None) -> None:
        """Create a job, or restore it from the record that an earlier lighthouse stored."""
        self.config = config
        self.standing = Standing()
        self.numbering = Numbering(config.first_quorum_id, record)
        self.history = History(record.named if record is not None else ())
        self.groups: dict[str, Group] = {}
        """Groups by replica_id. Lapsed groups remain for a limited time."""
        self.counts = Counter[Kind | int](dict.fromkeys(Kind, 0))
        """Number of groups of each kind and of each group_world_size that occurs."""
        self.quorum: Quorum | None = None
        self.members: dict[str, Member] = {}
        """Members of the quorum, by replica_id."""
        self.max_step = 0
        """Highest step among the participants."""
        self.formed_at: float | None = None
        """When the quorum_id last changed, or when this lighthouse handled its first event if that is later."""
        self.first_formed_at: float | None = None
        """When this lighthouse formed its first quorum."""
        self.branch_id = record.branch_id if record is not None else 0
        """Quorum with which the newest branch began (lineage.py, rule 3), or 0."""
        self.branch_at: float | None = None
        """When that branch began, or None if an earlier lighthouse began it."""
        self.lost_at: float | None = None
        """When a member of the current quorum was last lost."""
        self.rounds = 0
        """Number of quorums that this lighthouse has formed."""
        self.changes = 0
        """Number of quorums formed by this lighthouse with a new quorum_id."""
        self.tags: set[int | None] = set()
        """Tags of the states that the quorum started from and commits. Any rank of its members may hold these states.
        """

        self.joins = JoinQueue(self)
        self._effects: list[events.QuorumEffect] = []
        self._has_grid_changed = False
        self._timeout_s = config.heartbeat_timeout_s
        self._forget_after_s = max(MIN_FORGET_AFTER_S, FORGET_AFTER_TIMEOUTS * self._timeout_s)
        self._due: list[tuple[float, int, Group]] = []  # when to examine each group; outdated entries remain
        self._pushed = 0
        if record is not None and record.quorum is not None:
            self._set_quorum(record.quorum, [""] * len(record.quorum.participants))
            self.history.add_quorum(record.quorum.quorum_id)

    def emit(self, effect: events.QuorumEffect) -> None:
        """Queue an effect of the current event. `GridChanged` is queued at most once."""
        if isinstance(effect, events.GridChanged):
            if self._has_grid_changed:
                return
            self._has_grid_changed = True
        self._effects.append(effect)

    def take_effects(self) -> list[events.QuorumEffect]:
        effects, self._effects, self._has_grid_changed = self._effects, [], False
        return effects

    def other_groups(self, replica_id: str, kind: Kind | int) -> list[Group]:
        """List the groups of this kind or group_world_size, except `replica_id`, sorted by name.

        This takes O(n) time, or O(1) if there are none.
        """
        own = self.groups.get(replica_id)
        if self.counts[kind] == (own is not None and kind in own.counts_as):
            return []
        found = [group for group in self.groups.values() if kind in group.counts_as and group is not own]
        return sorted(found, key=attrgetter("replica_id"))

    def replace_quorum(self, quorum: Quorum, members: Sequence[Group], now: float, *, is_new: bool) -> None:
        """Replace the current quorum with a newly formed one, in O(n) time.

        Args:
            quorum: The new quorum.
            members: The records of its participants, in the same order.
            now: Current time.
            is_new: Whether the quorum has a new id.
        """
        for group in self.groups.values():
            group.is_participant = False
            if (former := self.members.get(group.replica_id)) is not None:
                group.former_secret = former.secret
        for member in members:
            member.is_participant = True
        self._set_quorum(quorum, [member.secret for member in members])
        self.lost_at = None
        self.first_formed_at = now if self.first_formed_at is None else self.first_formed_at
        self.rounds += 1
        if is_new:
            self.changes += 1
            self.formed_at = now
        for group in self.groups.values():
            kinds = group.counts_as
            is_working = group.is_participant and Kind.HEALTHY in kinds
            if Kind.REPORTED in kinds or group.drains or is_working != (Kind.WORKING in kinds):
                self.update_counts(group)

    def _set_quorum(self, quorum: Quorum, secrets: Sequence[str]) -> None:
        self.quorum = quorum
        self.members = {p.replica_id: Member(p, s) for p, s in zip(quorum.participants, secrets, strict=True)}
        self.max_step = max([member.step for member in quorum.participants])
        self.tags = {m.tag_quorum_id for m in quorum.participants if m.step == self.max_step} | {quorum.quorum_id}

    @property
    def unfinished_members(self) -> list[str]:
        """Names of the quorum members whose scripts have not ended, sorted in O(n log n) time."""
        return sorted(name for name, member in self.members.items() if not member.has_finished)

    def last_secret(self, replica_id: str) -> str:
        """Return the digest of the manager's secret in the group's last quorum, or "" if unknown."""
        if (member := self.members.get(replica_id)) is not None:
            return member.secret
        group = self.groups.get(replica_id)
        return group.former_secret if group is not None else ""

    def can_repeat(self, members: Sequence[Group]) -> bool:
        """Return whether `members` are the current quorum's members, unchanged and without a failed commit.

        If so, the next quorum may keep the current id. False if an earlier lighthouse formed the current quorum.
        """
        before = self.quorum.participants if self.quorum is not None and self.rounds else ()
        if len(before) != len(members):
            return False
        for member, old in zip(members, before, strict=True):
            new = member.participant if member.is_participant else None
            if new is None or new.identity != old.identity or new.commit_failures:
                return False
        return True

    # -- presence

    @property
    def present_count(self) -> int:
        """Number of groups that have joined or opened a session."""
        return len(self.groups) - self.counts[Kind.REPORTED]

    def list_participants(self) -> list[Group]:
        """Return the records of the current quorum's participants, in O(n) time."""
        return [group for group in self.groups.values() if group.is_participant]

    def record_heartbeat(self, replica_id: str, incarnation: str, now: float) -> Group | None:
        """Handle a heartbeat without a session. Return the group, or None if another incarnation of it is alive."""
        member = self.groups.get(replica_id)
        if member is not None and member.incarnation != incarnation and member.is_alive:
            return None
        if member is None or member.incarnation != incarnation:
            member = self._add_group(replica_id, incarnation, now)
            self._schedule_check(member, now)
        self.record_message(member, now)
        return member

    def record_join(self, participant: Participant, now: float) -> Group:
        """Record a join and return its group, which becomes healthy.

        Replace the record of an earlier process of the group. The caller must already have handled its loss.
        """
        member = self.groups.get(participant.replica_id)
        if member is None or is_reborn(participant, member):
            member = self._add_group(participant.replica_id, participant.incarnation, now)
            self._schedule_check(member, now)
        if member.down:
            self.emit(events.MemberReturned(member.replica_id, "all its ranks are connected"))
            self.emit(events.GridChanged())
        member.has_missed, member.down, member.is_starting = False, "", False
        if member.missing is not NO_RANKS:
            self.set_missing_ranks(member, NO_RANKS)
        if self._set_participant(member, participant):
            self.update_counts(member)
        self.record_message(member, now)
        return member

    def add_session(self, participant: Participant, session: int, now: float, secret: str = "") -> Group:
        """Add or update the group of a new session, and return the group. A session alone is not a join.

        Replace the record of an earlier process of the group. The caller must already have handled its loss.
        """
        member = self.groups.get(participant.replica_id)
        if member is None or member.incarnation != participant.incarnation:
            member = self._add_group(participant.replica_id, participant.incarnation, now)
        self._set_participant(member, participant)
        member.session, member.closes_at, member.secret = session, None, secret
        self.update_counts(member)
        self.record_message(member, now)
        self._schedule_check(member, now)
        return member

    def record_message(self, member: Group, now: float) -> None:
        member.seen_at = now
        if not member.is_alive:
            member.is_alive = True
            self.emit(events.MemberReturned(member.replica_id, "is back"))
            self.emit(events.GridChanged())
            self.update_counts(member)
            self._schedule_check(member, now)
        elif Kind.HEALTHY not in member.counts_as:
            self.update_counts(member)

    def mark_missed_timeout(self, member: Group) -> None:
        member.has_missed = True
        self.update_counts(member)

    def mark_down(self, member: Group, reason: str) -> None:
        """Mark a live group as down. The other groups stop waiting for it until it joins."""
        member.down = reason
        self.emit(events.GridChanged())
        self.update_counts(member)

    def set_missing_ranks(self, member: Group, missing: Set[int]) -> None:
        if member.missing != missing:
            member.missing = missing
            self.emit(events.GridChanged())

    def await_reconnect(self, member: Group, at: float, now: float) -> None:
        """Record that the group's stream has closed. The group is lost at `at` unless it reconnects before then."""
        member.closes_at = at
        self._schedule_check(member, now)

    def mark_lost(
        self,
        member: Group,
        now: float,
        reason: str,
        *,
        quorum_id: int | None = None,
        last_seen_at: float | None = None,
    ) -> None:
        """Mark a group as lost at `now`.

        `quorum_id` is the quorum that ends because of the loss, or None. `last_seen_at` is the time of the group's last
        message if the group is lost because of a timeout, otherwise None.
        """
        member.session = member.closes_at = None
        member.drains = False
        self.update_counts(member)
        if member.is_alive:
            self._mark_lapsed(member, now, events.MemberLost(member.replica_id, quorum_id, reason, last_seen_at))
            self._schedule_check(member, now)

    def extend_timeout(self, member: Group, until: float, now: float) -> None:
        member.excused_until = until
        self._schedule_check(member, now)

    def postpone_timeouts(self, by_s: float) -> None:
        """Postpone all timeouts, in O(n) time, by the `by_s` seconds for which the lighthouse was paused."""
        for member in self.groups.values():
            member.seen_at += by_s
            member.excused_until += by_s
            member.lapsed_at += by_s
            if member.closes_at is not None:
                member.closes_at += by_s
        if self.lost_at is not None:
            self.lost_at += by_s
        self.joins.postpone_timeouts(by_s)

    def remove_group(self, member: Group) -> None:
        self.emit(events.GridChanged())
        del self.groups[member.replica_id]
        self._set_kinds(member, frozenset())
        if member.reports != GroupReports():
            self.emit(events.MemberForgotten(member.reports))

    def lapse_due_groups(self, now: float) -> list[Group]:
        """Return the groups whose timeout has expired, and remove the records of groups that lapsed long ago.

        Mark the returned groups as lapsed (not alive), except those with a session, whose loss the caller must handle.
        """
        lapsed: list[Group] = []
        while self._due and self._due[0][0] <= now:
            due_at, _, member = heapq.heappop(self._due)
            if due_at != member.due_at or self.groups.get(member.replica_id) is not member:
                continue
            member.due_at = math.inf  # each entry is used once
            if member.is_alive and self._timeout_at(member, now) <= now:
                lapsed.append(member)
                if member.session is not None:
                    continue  # the caller handles its loss
                self._mark_lapsed(
                    member, now, events.MemberLost(member.replica_id, None, "it fell silent", member.seen_at)
                )
            elif not member.is_alive and self._timeout_at(member, now) <= now:
                self.remove_group(member)
                continue
            self._schedule_check(member, now)
        return lapsed

    def next_timeout_at(self) -> float | None:
        """Return the earliest time at which a group may time out, or None if no group can."""
        return self._due[0][0] if self._due else None

    def _add_group(self, replica_id: str, incarnation: str, now: float) -> Group:
        """Add the record of a group, which replaces that of an earlier incarnation."""
        member, known = Group(replica_id, incarnation, now), self.members.get(replica_id)
        is_assigned = self.rounds == 0 and known is not None and known.participant.incarnation == incarnation
        if is_assigned and self.quorum is not None:  # by an earlier lighthouse
            member.is_participant = True
            member.last_assignment = LastAssignment(self.quorum.quorum_id, self.max_step, None, lowest=0)
        if (old := self.groups.pop(replica_id, None)) is not None:
            self.emit(events.GridChanged())
            self._set_kinds(old, frozenset())
            member.reports = old.reports
        self.groups[replica_id] = member
        self._effects.append(events.MemberJoined(replica_id))
        return member

    def update_counts(self, member: Group) -> None:
        """Update the counts after a change to the group's record.

        This takes O(1) time, or O(n) if the job's first session opens or its last one ends.
        """
        kinds: set[Kind | int] = set()
        participant, is_first = member.participant, not self.counts[Kind.CONNECTED] or not self.members
        if participant is None:
            kinds.add(Kind.REPORTED)
        if member.session is not None:
            kinds.add(Kind.CONNECTED)
        is_waited_for = is_first or participant is not None or member.is_participant
        if member.is_alive and not member.has_missed and not member.down and is_waited_for:
            kinds |= {Kind.HEALTHY, Kind.WORKING} if member.is_participant else {Kind.HEALTHY}
        if member.drains and member.is_participant:
            kinds.add(Kind.DRAINING)
        if member.is_alive and member.is_loopback is not None:
            kinds.add(Kind.LOOPBACK if member.is_loopback else Kind.ROUTABLE)
        if member.is_alive and participant is not None and participant.group_world_size:
            kinds.add(participant.group_world_size)
        self._set_kinds(member, frozenset(kinds))

    def _set_kinds(self, member: Group, kinds: frozenset[Kind | int]) -> None:
        had_sessions = self.counts[Kind.CONNECTED] > 0
        for kind in member.counts_as - kinds:
            self.counts[kind] -= 1
            if not isinstance(kind, Kind) and not self.counts[kind]:
                del self.counts[kind]
        for kind in kinds - member.counts_as:
            self.counts[kind] += 1
        member.counts_as = kinds
        if (self.counts[Kind.CONNECTED] > 0) != had_sessions:
            for other in self.groups.values():
                if other.is_reported:
                    self.update_counts(other)

    def _schedule_check(self, member: Group, now: float) -> None:
        self._pushed += 1
        member.due_at = self._timeout_at(member, now)
        heapq.heappush(self._due, (member.due_at, self._pushed, member))

    def _timeout_at(self, member: Group, now: float) -> float:
        if not member.is_alive:
            return member.lapsed_at + self._forget_after_s
        if member.session is not None:
            due_at = max(member.seen_at + self._timeout_s, member.excused_until)
            return due_at if member.closes_at is None else member.closes_at
        return (now if member.call is not None else member.seen_at) + self._timeout_s

    def _mark_lapsed(self, member: Group, now: float, loss: events.MemberLost) -> None:
        self.emit(loss)
        self.emit(events.GridChanged())
        member.is_alive = False
        member.lapsed_at = now
        self.update_counts(member)

    def _set_participant(self, member: Group, participant: Participant) -> bool:
        """Store the description of a group. Return whether the caller must update the counts."""
        before, member.participant, member.step = member.participant, participant, participant.step
        if (
            before
            and before.identity == participant.identity
            and before.group_world_size == participant.group_world_size
            and before.resolves_to_loopback == participant.resolves_to_loopback
        ):
            return False
        self.emit(events.GridChanged())
        member.is_loopback = is_loopback(participant)
        return True


def is_reborn(participant: Participant, old: Group) -> bool:
    """Return whether a join comes from another incarnation of the group than `old`.

    If neither names an incarnation, a lower step in the join indicates a new one.
    """
    if participant.incarnation or old.incarnation:
        return participant.incarnation != old.incarnation
    return old.participant is not None and participant.step < old.participant.step


# Identity: whether a caller may act for a replica group.
#
# 1. A manager draws a secret when it starts and sends it in each hello. The lighthouse keeps the digest.
# 2. While a session of the group is open, or was cut together with most others (`MassSilence`), only a hello with the
#    same secret replaces it, whatever the incarnation. Joins and heartbeats outside the session are refused. Otherwise
#    the name is free as soon as the session ends (leave, closed connection or silence), because a group that starts
#    again has a manager with a new secret and must not wait.
# 3. An incarnation belongs to the first manager that used it, until the group is forgotten, even after its session.
#    Another manager needs a new incarnation.
# 4. While a quorum of an earlier lighthouse is RETURNING (standing.py), the names of its members are reserved for them.
#    The quorum's record has the digests of their secrets.
# 5. A supervisor that is also its group's manager proves with the same secret that its group is in the quorum, so its
#    requests count for the whole run (`Supervisors`).


def identity_error(participant: Participant, secret: str, job: Job, *, is_cut: bool) -> LighthouseError | None:
    """Return the error for a caller that may not act for its group, or None if it may.

    Args:
        participant: The group as the caller describes it.
        secret: Secret of the caller, or "" for a call outside a session.
        job: The job.
        is_cut: Whether the group lost its connection together with most others and may still reconnect.
    """
    name = participant.replica_id
    old, lease = job.groups.get(name), job.standing.leases.get(name)
    kept = old.secret if old is not None else ""
    if old is not None and old.is_connected:
        if is_shown(secret, kept):
            return None
        address = old.participant.address if old.participant is not None else ""
        return DuplicateReplica(
            f"replica_id: {name} is in use: {address or 'no address'} holds a session, "
            f"{participant.address or 'no address'} asks for one; give each replica group its own ID. If the "
            "other one died, the name is free as soon as the lighthouse has detected that"
        )
    if is_cut and not is_shown(secret, kept):
        return Unreachable(
            f"replica_id: the connection of {name} was cut together with most others, and its manager may reconnect; "
            "another manager of this name is admitted once it counts as lost: ask again"
        )
    is_reserved = lease is not None and lease.entry.secret and job.standing.is_awaited(name)
    if lease is not None and is_reserved and not is_shown(secret, lease.entry.secret):
        return Unreachable(
            f"replica_id: {name} is a member of the quorum that the lighthouse held before it restarted, and may "
            "reconnect until that quorum's lease expires; another manager of this name is admitted then: ask again"
        )
    if not participant.incarnation:
        return None
    owners = [(old.incarnation, old.secret)] if old is not None else []
    owners += [(lease.incarnation, lease.entry.secret)] if lease is not None else []
    for incarnation, digest in owners:
        if digest and incarnation == participant.incarnation and not is_shown(secret, digest):
            return DuplicateReplica(
                f"replica_id: {name} with incarnation {participant.incarnation} is another manager than the one at "
                f"{participant.address or 'no address'}; restart this one, so that it gets its own"
            )
    return None


def refusal(
    participant: Participant,
    job: Job,
    *,
    session: int | None = None,
    is_hello: bool = False,
    is_starting: bool = False,
) -> LighthouseError | None:
    """Return the error for a group that may not be in the job, or None if it may.

    Call `identity_error` first, which checks the identity.

    Args:
        participant: The group that joins or opens a session.
        job: The job.
        session: Session of the request, or None. A manager may change the group's incarnation on its own session.
        is_hello: Whether the request opens a session.
        is_starting: Whether no rank has connected yet. Ranks without an Agent never connect.
    """
    old = job.groups.get(participant.replica_id)
    if (old is None or old.is_reported) and job.present_count >= job.config.max_replicas:
        return LimitReached(
            f"replica_id: {participant.replica_id} would be replica group number {job.present_count + 1}; "
            f"the lighthouse takes {job.config.max_replicas} (--max-members)"
        )
    is_own_session = old is not None and session is not None and old.session == session
    return (
        (None if old is None or is_own_session else _duplicate_error(participant, old))
        or (None if is_hello else _step_decrease_error(participant, old))
        or (None if job.config.allow_heterogeneous or is_starting else _size_error(participant, job))
        or _loopback_error(participant, job)
    )


def unreachable_groups(participant: Participant, job: Job) -> list[tuple[Group, WrongState]]:
    """Return the groups whose loopback addresses `participant` cannot reach, each with the error to send to it."""
    if is_loopback(participant) is not False:
        return []
    members = job.other_groups(participant.replica_id, Kind.LOOPBACK)
    return [(m, loopback_error(m.participant, participant)) for m in members if m.participant]


def _duplicate_error(participant: Participant, old: Group) -> DuplicateReplica | None:
    if old.participant is None or old.call is None or old.is_connected:
        return None
    before = old.participant
    same = (
        before.incarnation == participant.incarnation
        if participant.incarnation
        else before.identity == participant.identity
    )
    if same:
        return None
    return DuplicateReplica(
        f"replica_id: {participant.replica_id} is in use: {before.address or 'no address'} "
        "waits for a quorum, "
        f"{participant.address or 'no address'} asks for one; give each replica group its own ID"
    )


def _step_decrease_error(participant: Participant, old: Group | None) -> InvalidRequest | None:
    """Return an error if the group's step has gone backwards, otherwise None.

    Groups whose ranks disagree about their state are exempt, because one of their ranks may still be receiving an older
    state. Such groups heal anyway.
    """
    if not participant.incarnation or participant.ranks_disagree or old is None or old.participant is None:
        return None
    before = old.participant
    # The group may heal to a state older than its own, chosen some quorums ago if it is catching up.
    last = old.last_assignment
    lowest = before.step if last is None else min(before.step, last.max_step if last.lowest is None else last.lowest)
    if before.incarnation != participant.incarnation or participant.step >= lowest:
        return None
    return InvalidRequest(
        f"of {participant.replica_id} went from {before.step} back to {participant.step}; "
        "a group that lost its state needs a new incarnation (restart its manager)",
        field="step",
    )


def _size_error(participant: Participant, job: Job) -> WrongState | None:
    if participant.group_world_size == 0:
        return None
    for size in list(job.counts):
        if not isinstance(size, int) or size == participant.group_world_size:
            continue
        for other in job.other_groups(participant.replica_id, size):
            # A starting group has no peers yet. Groups that run wrapped functions without an Agent stay in this state.
            if other.is_starting and other.down != RESTARTING:
                continue
            return WrongState(
                f"world_size: {participant.replica_id} has {participant.group_world_size} ranks, "
                f"{other.replica_id} has {size}: their ranks hold different shards and cannot be peers; "
                "replica groups of one job need the same size, or one rank each that gathers and scatters "
                "the group's state (--group-world-size 1), unless the lighthouse runs with --allow-heterogeneous; "
                "if these are two jobs, give each its own --job"
            )
    return None


def _loopback_error(participant: Participant, job: Job) -> WrongState | None:
    if not is_loopback(participant):
        return None
    for other in job.other_groups(participant.replica_id, Kind.ROUTABLE):
        if other.participant is not None:
            return loopback_error(participant, other.participant)
    return None


@dataclass(slots=True)
class JoinTimer:
    """Measures how long groups have waited for a quorum. Gaps of up to `grace_s` before a retry count as waiting."""

    grace_s: float
    started_at: float | None = None
    asking: int = 0
    deadline_at: float | None = None
    """When the earliest pending call expires."""
    _quiet_at: float = 0.0

    def count_join(self, now: float, deadline_at: float) -> None:
        if self.asking == 0 and (self.started_at is None or now - self._quiet_at > self.grace_s):
            self.started_at = now
        self.asking += 1
        self.deadline_at = deadline_at if self.deadline_at is None else min(self.deadline_at, deadline_at)

    def count_withdrawal(self, now: float) -> None:
        self.asking -= 1
        if self.asking == 0:
            self._quiet_at = now

    def waiting_since(self, now: float) -> float | None:
        """Return when the wait began, or None if no group has been waiting within the grace period."""
        return self.started_at if self.asking or now - self._quiet_at <= self.grace_s else None

    def postpone_timeout(self, by_s: float) -> None:
        if self.started_at is not None:
            self.started_at += by_s
        self._quiet_at += by_s

    def restart_wait(self, asking: int, now: float) -> None:
        """Restart the measurement after a quorum has formed. `asking` is the number of groups that still wait."""
        self.asking = asking
        self.started_at = now if asking else None
        self._quiet_at = now


_BY_CALL = attrgetter("call")


class JoinQueue:
    """Pending joins in call order. The timer `anyone` covers all joins, and `members` the joins of quorum members."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._participants = 0
        self._shrinking = 0
        self.anyone = JoinTimer(job.config.heartbeat_timeout_s)
        self.members = JoinTimer(job.config.heartbeat_timeout_s)

    def __len__(self) -> int:
        return self.anyone.asking

    def __iter__(self) -> Iterator[Group]:
        """Iterate over the waiting groups in call order, in O(n log n) time."""
        return iter(sorted(self._joined_groups(), key=_BY_CALL))

    def add_join(self, member: Group, call: int, deadline_at: float, now: float) -> None:
        member.call, member.deadline_at = call, deadline_at
        self.anyone.count_join(now, deadline_at)
        if member.replica_id in self._job.members:
            self.members.count_join(now, deadline_at)
        self._count_change(member, 1)

    def withdraw_join(self, replica_id: str, call: int, now: float) -> None:
        """Cancel a group's join. Do nothing if `call` is not the group's pending call."""
        member = self._job.groups.get(replica_id)
        if member is None or member.call != call:
            return
        member.call = None
        self.anyone.count_withdrawal(now)
        if member.replica_id in self._job.members:
            self.members.count_withdrawal(now)
        self._count_change(member, -1)
        if member.deadline_at in (self.anyone.deadline_at, self.members.deadline_at):
            self._set_deadlines()

    def postpone_timeouts(self, by_s: float) -> None:
        """Postpone the join timeout by `by_s`. The deadlines of calls stay, because the callers were not paused."""
        self.anyone.postpone_timeout(by_s)
        self.members.postpone_timeout(by_s)

    def take_calls(self, members: Sequence[Group], now: float) -> tuple[int, ...]:
        """Remove and return the calls of `members`, which form the new quorum. Other calls stay pending."""
        calls: list[int] = []
        for member in members:
            assert member.call is not None
            calls.append(member.call)
            member.call = None
        self._participants = self._shrinking = 0  # the rest are newcomers
        self.anyone.restart_wait(self.anyone.asking - len(calls), now)
        self.members.restart_wait(0, now)
        self._set_deadlines()
        return tuple(calls)

    @property
    def has_all_members(self) -> bool:
        """True if there is a current quorum, and every member of it has joined."""
        members = self._job.members
        return bool(members) and self.members.asking == len(members)

    @property
    def newcomer_count(self) -> int:
        return self.anyone.asking - self.members.asking

    @property
    def candidate_count(self) -> int:
        """Number of groups that may be in the next quorum. If a member asks to shrink the quorum, only members may."""
        return self._participants if self._shrinking else self.anyone.asking

    def list_candidates(self) -> list[Group]:
        waiting = self._joined_groups()
        return sorted([m for m in waiting if m.is_participant] if self._shrinking else waiting, key=_BY_CALL)

    def list_newcomers(self) -> list[str]:
        return [member.replica_id for member in self if member.replica_id not in self._job.members]

    def _count_change(self, member: Group, change: int) -> None:
        if member.replica_id not in self._job.members:
            self._job.emit(events.NewcomersChanged())
        if member.is_participant:
            self._participants += change
            self._shrinking += change * (member.participant is not None and member.participant.shrink_only)

    def _joined_groups(self) -> list[Group]:
        return [group for group in self._job.groups.values() if group.call is not None]

    def _set_deadlines(self) -> None:
        self.anyone.deadline_at = self.members.deadline_at = None
        if not self.anyone.asking:
            return
        joined = self._joined_groups()
        members = [group.deadline_at for group in joined if group.replica_id in self._job.members]
        self.anyone.deadline_at = min([group.deadline_at for group in joined], default=None)
        self.members.deadline_at = min(members, default=None)
