"""Which members are alive.

A member is alive while its session is open and sends heartbeats, or, without a session, while a call of it is open or
its last message (heartbeat, join, answer) is younger than `heartbeat_timeout_s`. It is healthy while it is alive, not
down, and has not missed a join_timeout; joining heals it. A lapsed member is remembered for a while, for the status,
and then forgotten.

A reported member is one of which only heartbeats without a session have come. Anyone can send these under any name, so
such members are counted apart; and where others hold sessions, only the first quorum of a job waits for them.

Moments are the caller's monotonic clock. Every operation costs O(log n) at most.
"""

import heapq
import math
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass

from lighthouse.job.events import GridChanged, MemberBack, MemberEffect, MemberJoined, MemberLost, NewcomersChanged
from lighthouse.job.records import (
    Group,
    Job,
    Kind,
    Membership,
    Remembered,
    is_loopback,
    unreachable,
)
from lighthouse_protocol.messages.membership import Participant
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
from lighthouse_protocol.rules.access import is_same, is_shown

FORGET_AFTER_TIMEOUTS = 12
MIN_FORGET_AFTER_S = 60.0


class Roster:
    def __init__(self, heartbeat_timeout_s: float, emit: Callable[[MemberEffect], None], job: Job) -> None:
        self._emit = emit
        self.job = job
        self._timeout_s = heartbeat_timeout_s
        self._forget_after_s = max(MIN_FORGET_AFTER_S, FORGET_AFTER_TIMEOUTS * heartbeat_timeout_s)
        self._due: list[tuple[float, int, Group]] = []
        self._pushed = 0

    def __len__(self) -> int:
        return len(self.job.groups)

    def __iter__(self) -> Iterator[Group]:
        return iter(self.job.groups.values())

    @property
    def healthy(self) -> int:
        return self.job.counts[Kind.HEALTHY]

    @property
    def working(self) -> int:
        """How many participants of the present quorum are healthy."""
        return self.job.counts[Kind.WORKING]

    @property
    def reported(self) -> int:
        """How many groups have neither joined nor opened a session."""
        return self.job.counts[Kind.REPORTED]

    @property
    def present(self) -> int:
        """How many groups have joined or opened a session."""
        return len(self.job.groups) - self.reported

    def get(self, replica_id: str) -> Group | None:
        return self.job.groups.get(replica_id)

    def participants(self) -> list[Group]:
        """The members of the present quorum that are known here. O(n)."""
        return [member for member in self if member.is_participant]

    def has_peers(self, member: Group) -> bool:
        """It is a member of the present quorum, and not the only one."""
        return len(self.job.replica_ids) > 1 and member.is_participant

    def beat(self, replica_id: str, incarnation: str, now: float) -> Group | None:
        """A heartbeat without a session. None, and no effect, if another incarnation of that id is alive."""
        member = self.job.groups.get(replica_id)
        if member is not None and member.incarnation != incarnation:
            if member.is_alive:
                return None
            self.remove(member)
            member = None
        if member is None:
            member = self._add(replica_id, incarnation, now)
        self.see(member, now)
        return member

    def admit(self, participant: Participant, now: float) -> Group:
        """A join: its member, healthy. Another incarnation of that id is replaced; its loss is the caller's to tell."""
        member = self.job.groups.get(participant.replica_id)
        if member is not None and is_reborn(participant, member):
            self.remove(member)
            member = None
        if member is None:
            member = self._add(participant.replica_id, participant.incarnation, now)
        if member.down:
            self._emit(MemberBack(member.replica_id, "all its ranks are connected"))
            self._emit(GridChanged())
        member.has_missed, member.down, member.is_starting = False, "", False
        self.miss_ranks(member, NO_RANKS)
        self._describe(member, participant)
        self.see(member, now)
        return member

    def greet(self, participant: Participant, session: int, now: float, secret: str = "") -> Group:
        """A session was opened; its member, which has not joined by that. Another incarnation is gone before."""
        member = self.job.groups.get(participant.replica_id)
        if member is not None and member.incarnation != participant.incarnation:
            self.remove(member)
            member = None
        if member is None:
            member = self._add(participant.replica_id, participant.incarnation, now)
        self._describe(member, participant)
        member.session, member.closes_at, member.secret = session, None, secret
        self.count(member)
        self.see(member, now)
        self._push(member, now)
        return member

    def see(self, member: Group, now: float) -> None:
        member.seen_at = now
        if not member.is_alive:
            member.is_alive = True
            self._emit(MemberBack(member.replica_id, "is back"))
            self._emit(GridChanged())
            self.count(member)
            self._push(member, now)
        elif not member.is_healthy:
            self.count(member)

    def is_waited_for(self, member: Group) -> bool:
        """Whether the others wait for the group while it is alive and well."""
        is_first = not self.job.counts[Kind.CONNECTED] or not self.job.replica_ids
        return is_first or not member.is_reported or member.is_participant

    def miss(self, member: Group) -> None:
        member.has_missed = True
        self.count(member)

    def go_down(self, member: Group, reason: str) -> None:
        """Alive, and not to be waited for until it joins."""
        member.down = reason
        self._emit(GridChanged())
        self.count(member)

    def miss_ranks(self, member: Group, missing: Set[int]) -> None:
        """These of its ranks are not here."""
        if member.missing != missing:
            member.missing = missing
            self._emit(GridChanged())

    def close(self, member: Group, at: float, now: float) -> None:
        """Its stream has ended; from `at` on it is lost unless it comes back."""
        member.closes_at = at
        self._push(member, now)

    def lose(
        self,
        member: Group,
        now: float,
        reason: str,
        *,
        quorum_id: int | None = None,
        last_seen_at: float | None = None,
    ) -> None:
        """It is gone, as of now; `quorum_id` ends with that."""
        member.session = member.closes_at = None
        member.drains = False
        self.count(member)
        if member.is_alive:
            self._lapse(member, now, MemberLost(member.replica_id, quorum_id, reason, last_seen_at))
            self._push(member, now)

    def excuse(self, member: Group, until: float, now: float) -> None:
        member.excused_until = until
        self._push(member, now)

    def shift(self, by_s: float) -> None:
        """The lighthouse was paused: no member could be heard for that long. O(n)."""
        for member in self.job.groups.values():
            member.seen_at += by_s

    def form(self) -> None:
        """Update the counts after the job has another quorum. O(n)."""
        for member in self.job.groups.values():
            is_working = Kind.WORKING in member.counts_as
            if member.is_reported or member.drains or is_working != (member.is_healthy and member.is_participant):
                self.count(member)

    def remove(self, member: Group) -> None:
        self._emit(GridChanged())
        del self.job.groups[member.replica_id]
        self._count_as(member, frozenset())
        self.job.forget(member.replica_id)

    def expire(self, now: float) -> list[Group]:
        """The members that lapse by `now`; forgets those that lapsed long ago. One with a session is not lapsed yet."""
        lapsed: list[Group] = []
        while self._due and self._due[0][0] <= now:
            due_at, _, member = heapq.heappop(self._due)
            if due_at != member.due_at or self.job.groups.get(member.replica_id) is not member:
                continue
            member.due_at = math.inf  # an entry counts once
            if member.is_alive and self._due_at(member, now) <= now:
                lapsed.append(member)
                if member.session is not None:
                    continue  # its loss has consequences that are told first
                self._lapse(member, now, MemberLost(member.replica_id, None, "it fell silent", member.seen_at))
            elif not member.is_alive and self._due_at(member, now) <= now:
                self.remove(member)
                continue
            self._push(member, now)
        return lapsed

    def next_at(self) -> float | None:
        """A moment at or before the next lapse."""
        return self._due[0][0] if self._due else None

    def _add(self, replica_id: str, incarnation: str, now: float) -> Group:
        assigned = self.job.assigned_before(replica_id, incarnation)
        member = Group(replica_id, incarnation, now, is_participant=assigned is not None, last_told=assigned)
        self.job.groups[replica_id] = member
        self._emit(MemberJoined(replica_id))
        self._push(member, now)
        return member

    def count(self, member: Group) -> None:
        """Update the counts after a change of the group's record. O(1), unless the first session opens or the last one
        ends: then O(n)."""
        kinds: set[Kind | int] = set()
        if member.is_reported:
            kinds.add(Kind.REPORTED)
        if member.session is not None:
            kinds.add(Kind.CONNECTED)
        if member.is_alive and not member.has_missed and not member.down and self.is_waited_for(member):
            kinds |= {Kind.HEALTHY, Kind.WORKING} if member.is_participant else {Kind.HEALTHY}
        if member.drains and member.is_participant:
            kinds.add(Kind.DRAINING)
        if member.is_alive and member.is_loopback is not None:
            kinds.add(Kind.LOOPBACK if member.is_loopback else Kind.ROUTABLE)
        if member.is_alive and member.participant is not None and member.participant.group_world_size:
            kinds.add(member.participant.group_world_size)
        self._count_as(member, frozenset(kinds))

    def _count_as(self, member: Group, kinds: frozenset[Kind | int]) -> None:
        had_sessions = self.job.counts[Kind.CONNECTED] > 0
        self.job.count(member, kinds)
        if (self.job.counts[Kind.CONNECTED] > 0) != had_sessions:
            for other in self.job.groups.values():
                if other.is_reported:
                    self.count(other)

    def _push(self, member: Group, now: float) -> None:
        self._pushed += 1
        member.due_at = self._due_at(member, now)
        heapq.heappush(self._due, (member.due_at, self._pushed, member))

    def _due_at(self, member: Group, now: float) -> float:
        if not member.is_alive:
            return member.lapsed_at + self._forget_after_s
        if member.session is not None:
            due_at = max(member.seen_at + self._timeout_s, member.excused_until)
            return due_at if member.closes_at is None else member.closes_at
        return (now if member.call is not None else member.seen_at) + self._timeout_s

    def _lapse(self, member: Group, now: float, loss: MemberLost) -> None:
        self._emit(loss)
        self._emit(GridChanged())
        member.is_alive = False
        member.lapsed_at = now
        self.count(member)

    def _describe(self, member: Group, participant: Participant) -> None:
        before, member.step = member.participant, participant.step
        if (
            before
            and before.identity == participant.identity
            and before.group_world_size == participant.group_world_size
            and before.resolves_to_loopback == participant.resolves_to_loopback
        ):
            member.participant = participant
            return
        self._emit(GridChanged())
        member.participant = participant
        member.is_loopback = is_loopback(participant)
        self.count(member)


def is_reborn(participant: Participant, old: Group) -> bool:
    """Whether it is another incarnation than `old`: one that names none and whose step went back has lost its state."""
    if participant.incarnation or old.incarnation:
        return participant.incarnation != old.incarnation
    return old.participant is not None and participant.step < old.participant.step


# -- identity -----------------------------------------------------------------
#
# May this caller speak for that replica group? A session is bound to the manager that has opened it.
#
# 1. A manager makes a secret when it starts, and shows it in each of its hellos. What is kept of it is its digest.
# 2. While a session of a group is open, or its connection was cut together with those of most others (silence.py),
#    only a hello with its secret takes its place, whatever incarnation it shows, and joins and heartbeats without a
#    session are refused. Otherwise the name is free when the session has ended, by a leave, by its connection's end,
#    or by silence: the manager of a group that is started anew knows no secret, and need not wait for more than that.
# 3. An incarnation belongs to the manager that came with it first, for as long as the group is remembered, also after
#    its session has ended: another manager takes an incarnation of its own, and by that it has promised nothing.
# 4. While a quorum of an earlier lighthouse returns (standing.py), its members are going on, and come back: their
#    names are theirs until then. They are known by the digests that the record has of them.
# 5. By the same secret a supervisor, which serves as its group's manager, shows that its group is a member of the
#    quorum: what it asks for then counts for its whole run (runs/rules/supervisors.py).


def membership_of(digest: str, known: str, remembered: Remembered | None, *, is_held: bool) -> Membership:
    """`digest`: of the secret that was shown; `known`: of the manager of that name that was told a quorum last.
    `is_held`: a member of the quorum is alive, or may come back to it."""
    if is_same(digest, known) or (remembered is not None and is_same(digest, remembered.secret)):
        return Membership.MEMBER
    return Membership.OUTSIDER if is_held else Membership.OPEN


def why_impostor(
    participant: Participant, secret: str, old: Group | None, remembered: Remembered | None, *, is_cut: bool = False
) -> LighthouseError | None:
    """Why the caller does not speak for the group that it names; None: it may. `secret`: empty for a call that has no
    session. `old`, `remembered`: what is known of the group of that name; `is_cut`: it is held, as MassSilence says."""
    name, kept = participant.replica_id, old.secret if old is not None else ""
    if old is not None and old.is_connected:
        return None if is_shown(secret, kept) else _in_use(participant, old)
    if is_cut and not is_shown(secret, kept):
        return Unreachable(
            f"replica_id: the connection of {name} was cut together with most others, and its manager may reconnect; "
            "another manager of this name is admitted once it counts as lost: ask again"
        )
    awaited = remembered.secret if remembered is not None and remembered.is_awaited else ""
    if awaited and not is_shown(secret, awaited):
        return Unreachable(
            f"replica_id: {name} is a member of the quorum that the lighthouse held before it restarted, and may "
            "reconnect until that quorum's lease expires; another manager of this name is admitted then: ask again"
        )
    if not participant.incarnation:
        return None
    for incarnation, digest in _known(old, remembered):
        if digest and incarnation == participant.incarnation and not is_shown(secret, digest):
            return DuplicateReplica(
                f"replica_id: {name} with incarnation {participant.incarnation} is another manager than the one at "
                f"{participant.address or 'no address'}; restart this one, so that it gets its own"
            )
    return None


def _known(old: Group | None, remembered: Remembered | None) -> list[tuple[str, str]]:
    ours = [(old.incarnation, old.secret)] if old is not None else []
    return ours + ([(remembered.incarnation, remembered.secret)] if remembered is not None else [])


def _in_use(participant: Participant, old: Group) -> DuplicateReplica:
    address = old.participant.address if old.participant is not None else ""
    return DuplicateReplica(
        f"replica_id: {participant.replica_id} is in use: {address or 'no address'} holds a session, "
        f"{participant.address or 'no address'} asks for one; give each replica group its own ID. If the "
        "other one died, the name is free as soon as the lighthouse has detected that"
    )


# -- admission ----------------------------------------------------------------
#
# May this join come in? One function, all the reasons to say no; a refusal changes nothing.
#
# A member on a loopback beside a routable one (reachability.py) is refused; if it came first, it is sent away.


def refusal(
    participant: Participant,
    roster: Roster,
    *,
    max_replicas: int,
    allow_heterogeneous: bool,
    session: int | None = None,
    is_hello: bool = False,
    is_starting: bool = False,
) -> LighthouseError | None:
    """Why `participant` may not join beside those in `roster`; None if it may. That it speaks for its group is known
    (identity.py). `session`: it asks by that one, and may take another incarnation there. `is_hello`: it opens one.
    `is_starting`: none of its ranks has come, and if they have no Agent none will.
    """
    old = roster.get(participant.replica_id)
    if (old is None or old.is_reported) and roster.present >= max_replicas:
        return LimitReached(
            f"replica_id: {participant.replica_id} would be replica group number {roster.present + 1}; "
            f"the lighthouse takes {max_replicas} (--max-members)"
        )
    return (
        (None if session is not None and old is not None and old.session == session else _duplicate(participant, old))
        or (None if is_hello else _backwards(participant, old))
        or (None if allow_heterogeneous or is_starting else _misfit(participant, roster.job))
        or _loopback(participant, roster.job)
    )


def sent_away(participant: Participant, job: Job) -> list[tuple[Group, WrongState]]:
    """The loopback members that an admitted routable `participant` makes unreachable."""
    if is_loopback(participant) is not False:
        return []
    members = job.others(participant.replica_id, Kind.LOOPBACK)
    return [(m, unreachable(m.participant, participant)) for m in members if m.participant]


def _duplicate(participant: Participant, old: Group | None) -> DuplicateReplica | None:
    if old is None or old.participant is None or old.call is None or old.is_connected:
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


def _backwards(participant: Participant, old: Group | None) -> InvalidRequest | None:
    """A group whose ranks disagree has said so, and heals: one of them may still be getting what an earlier incarnation
    of the group was told to heal to."""
    if not participant.incarnation or participant.ranks_disagree or old is None or old.participant is None:
        return None
    before = old.participant
    # It may have been told to heal to an older state than its own, and that, where it catches up, some quorums ago.
    told = old.last_told
    lowest = before.step if told is None else min(before.step, told.max_step if told.lowest is None else told.lowest)
    if before.incarnation != participant.incarnation or participant.step >= lowest:
        return None
    return InvalidRequest(
        f"of {participant.replica_id} went from {before.step} back to {participant.step}; "
        "a group that lost its state needs a new incarnation (restart its manager)",
        field="step",
    )


def _misfit(participant: Participant, job: Job) -> WrongState | None:
    if participant.group_world_size == 0:
        return None
    others = (size for size in job.counts if isinstance(size, int) and size != participant.group_world_size)
    for size in others:
        trains = (other for other in job.others(participant.replica_id, size) if not _awaits_first_ranks(other))
        if other := next(trains, None):
            return WrongState(
                f"world_size: {participant.replica_id} has {participant.group_world_size} ranks, "
                f"{other.replica_id} has {size}: their ranks hold different shards and cannot be peers; "
                "replica groups of one job need the same size, or one rank each that gathers and scatters "
                "the group's state (--group-world-size 1), unless the lighthouse runs with --allow-heterogeneous; "
                "if these are two jobs, give each its own --job"
            )
    return None


def _awaits_first_ranks(member: Group) -> bool:
    """Whether no Agent has joined for the group. It may be a run of wrapped functions, which has no peers."""
    return member.is_starting and member.down != RESTARTING


def _loopback(participant: Participant, job: Job) -> WrongState | None:
    if not is_loopback(participant):
        return None
    for other in job.others(participant.replica_id, Kind.ROUTABLE):
        if other.participant is not None:
            return unreachable(participant, other.participant)
    return None


# -- joins --------------------------------------------------------------------
#
# Which groups ask for the next quorum, since when, and until when their calls wait.


@dataclass(slots=True)
class JoinTimer:
    """Since when a group has been asking. A short gap (callers that retry) does not restart it."""

    grace_s: float
    started_at: float | None = None
    asking: int = 0
    _quiet_at: float = 0.0

    def joined(self, now: float) -> None:
        if self.asking == 0 and (self.started_at is None or now - self._quiet_at > self.grace_s):
            self.started_at = now
        self.asking += 1

    def withdrew(self, now: float) -> None:
        self.asking -= 1
        if self.asking == 0:
            self._quiet_at = now

    def running_since(self, now: float) -> float | None:
        """None if no group asks, or has asked within the grace."""
        return self.started_at if self.asking or now - self._quiet_at <= self.grace_s else None

    def restart(self, asking: int, now: float) -> None:
        """A quorum was formed; the `asking` groups that were left out begin to wait anew."""
        self.asking = asking
        self.started_at = now if asking else None
        self._quiet_at = now


class JoinQueue:
    """The groups that have joined, in the order of their calls. `members` are those of the present quorum."""

    def __init__(self, grace_s: float, emit: Callable[[NewcomersChanged], None], job: Job) -> None:
        self._emit = emit
        self._job = job
        self._calls: dict[int, Group] = {}
        self._participants = 0
        self._shrinking = 0
        self.earliest_deadline_at: float | None = None
        """When the first call expires."""
        self.members_deadline_at: float | None = None
        """When the first call of a member expires."""
        self.anyone = JoinTimer(grace_s)
        self.members = JoinTimer(grace_s)

    def __len__(self) -> int:
        return len(self._calls)

    def __iter__(self) -> Iterator[Group]:
        return iter(self._calls.values())

    def add(self, member: Group, call: int, deadline_at: float, now: float) -> None:
        member.call, member.deadline_at = call, deadline_at
        self._calls[call] = member
        self.earliest_deadline_at = _earlier(self.earliest_deadline_at, deadline_at)
        self.anyone.joined(now)
        if member.replica_id in self._job.replica_ids:
            self.members_deadline_at = _earlier(self.members_deadline_at, deadline_at)
            self.members.joined(now)
        self._count(member, 1)

    def withdraw(self, call: int, now: float) -> Group | None:
        """End a call. Return its group, or None if the call has ended already."""
        member = self._calls.pop(call, None)
        if member is None:
            return None
        self.anyone.withdrew(now)
        if member.replica_id in self._job.replica_ids:
            self.members.withdrew(now)
        self._count(member, -1)
        self._released(member)
        return member

    def take(self, members: list[Group], now: float) -> tuple[int, ...]:
        """Return the calls of `members`, which have formed the present quorum. The others go on waiting."""
        calls: list[int] = []
        for member in members:
            assert member.call is not None
            calls.append(member.call)
            del self._calls[member.call]
            member.call = None
        self._set_deadlines()
        self._participants = self._shrinking = 0  # the rest are of no quorum
        self.anyone.restart(len(self), now)
        self.members.restart(0, now)
        return tuple(calls)

    @property
    def has_all_members(self) -> bool:
        """Every member of the present quorum, if there is one, has joined."""
        members = self._job.replica_ids
        return bool(members) and self.members.asking == len(members)

    @property
    def newcomers(self) -> int:
        return len(self) - self.members.asking

    @property
    def candidates(self) -> int:
        """How many groups may be in the next quorum. If a member asks to shrink, only members may."""
        return self._participants if self._shrinking else len(self)

    def list_candidates(self) -> list[Group]:
        return [member for member in self if member.is_participant] if self._shrinking else list(self)

    def list_newcomers(self) -> list[str]:
        return [member.replica_id for member in self if member.replica_id not in self._job.replica_ids]

    def _count(self, member: Group, change: int) -> None:
        if member.replica_id not in self._job.replica_ids:
            self._emit(NewcomersChanged())
        if member.is_participant:
            self._participants += change
            self._shrinking += change * (member.participant is not None and member.participant.shrink_only)

    def _set_deadlines(self) -> None:
        members = (member.deadline_at for member in self if member.replica_id in self._job.replica_ids)
        self.earliest_deadline_at = min((member.deadline_at for member in self), default=None)
        self.members_deadline_at = min(members, default=None)

    def _released(self, member: Group) -> None:
        if member.deadline_at in (self.earliest_deadline_at, self.members_deadline_at):
            self._set_deadlines()
        member.call = None


def _earlier(first: float | None, other: float) -> float:
    return other if first is None else min(first, other)
