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
from collections.abc import Callable, Collection, Iterator, Set
from dataclasses import dataclass
from typing import Protocol

from lighthouse.members.rules.events import GridChanged, MemberBack, MemberEffect, MemberJoined, MemberLost
from lighthouse.members.rules.reachability import is_loopback
from lighthouse_protocol.messages.membership import Participant, Tag
from lighthouse_protocol.rank_set import NO_RANKS

FORGET_AFTER_TIMEOUTS = 12
MIN_FORGET_AFTER_S = 60.0


@dataclass(slots=True)
class LastQuorumTold:
    """What a member was last told: the tag of a caller that sends none is derived from it.

    `was_at`: it came with that step, which is higher, and was to heal. `held`: the state that it came with; `lowest`:
    the lowest max_step that it was told since it first came with that one. A group that catches up may come to hold it,
    and where its ranks hold different states, which no tag names, any one of them may, whatever the others have done.
    `formed_from`: the quorum under which the state was committed that its members at max_step held.
    """

    quorum_id: int
    max_step: int
    tag_quorum_id: int | None
    was_at: int | None = None
    held: Tag | None = None
    lowest: int | None = None
    formed_from: int | None = None

    def lowest_with(self, held: Tag, max_step: int) -> int:
        """With the quorum that it is told now."""
        is_another = self.held != held and held.quorum_id is not None
        return max_step if is_another or self.lowest is None else min(self.lowest, max_step)

    def has_not_healed(self, participant: Participant) -> bool:
        """It was to heal, and comes with the state that it had before."""
        if self.was_at is None or self.held is None:
            return False
        return participant.step >= self.was_at and participant.tag_quorum_id == self.held.quorum_id


@dataclass(slots=True, eq=False)
class Member:
    """One replica group's present incarnation; `birth` numbers them.

    `call` is the number of its waiting call, if it waits; `deadline_at` the end of that call's time. `session` is the
    number of its session; `closes_at`: the stream has ended, and that counts from then on. `excused_until` moves its
    lapse. `down` says why it cannot take part, `missing` which of its ranks are not here; `is_starting`: they have not
    come yet, or are started again. `step` is the newest one that it has told. `secret`: the digest of its sessions'
    secret (identity.py); empty: it has had no session.
    """

    replica_id: str
    incarnation: str
    seen_at: float
    birth: int
    participant: Participant | None = None
    call: int | None = None
    deadline_at: float = 0.0
    is_alive: bool = True
    has_missed: bool = False
    lapsed_at: float = 0.0
    due_at: float = 0.0
    is_loopback: bool | None = None
    last_told: LastQuorumTold | None = None
    session: int | None = None
    closes_at: float | None = None
    excused_until: float = 0.0
    lease_until: float = 0.0
    down: str = ""
    is_starting: bool = False
    missing: Set[int] = NO_RANKS
    step: int = 0
    secret: str = ""

    @property
    def is_reported(self) -> bool:
        """It has neither joined nor opened a session."""
        return self.participant is None

    @property
    def is_connected(self) -> bool:
        return self.session is not None and self.closes_at is None


class Participants(Protocol):
    """The present quorum, as far as the roster reads it (quorum/rules/current.py)."""

    replica_ids: frozenset[str]

    def has(self, member: Member) -> bool: ...

    def told_before(self, replica_id: str, incarnation: str) -> LastQuorumTold | None: ...

    def forget(self, replica_id: str) -> None: ...


class Roster:
    def __init__(self, heartbeat_timeout_s: float, emit: Callable[[MemberEffect], None], current: Participants) -> None:
        self._emit = emit
        self._current = current
        self._timeout_s = heartbeat_timeout_s
        self._forget_after_s = max(MIN_FORGET_AFTER_S, FORGET_AFTER_TIMEOUTS * heartbeat_timeout_s)
        self._members: dict[str, Member] = {}
        self._due: list[tuple[float, int, Member]] = []
        self._pushed = 0
        self._births = 0
        self.healthy: set[str] = set()
        self.working: set[str] = set()  # the healthy ones of the present quorum
        self.loopback: set[str] = set()
        self.routable: set[str] = set()
        self.sizes: dict[int, set[str]] = {}
        self.reported: set[str] = set()
        self.connected: set[str] = set()  # those with a session

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Member]:
        return iter(self._members.values())

    @property
    def present(self) -> int:
        """How many members have joined, or opened a session."""
        return len(self._members) - len(self.reported)

    @property
    def names(self) -> Collection[str]:
        return self._members.keys()

    def get(self, replica_id: str) -> Member | None:
        return self._members.get(replica_id)

    def participants(self) -> list[Member]:
        """The members of the present quorum that are known here. O(n)."""
        return [member for member in self if self._current.has(member)]

    def has_peers(self, member: Member) -> bool:
        """It is a member of the present quorum, and not the only one."""
        return len(self._current.replica_ids) > 1 and self._current.has(member)

    def beat(self, replica_id: str, incarnation: str, now: float) -> Member | None:
        """A heartbeat without a session. None, and no effect, if another incarnation of that id is alive."""
        member = self._members.get(replica_id)
        if member is not None and member.incarnation != incarnation:
            if member.is_alive:
                return None
            self.remove(member)
            member = None
        if member is None:
            member = self._add(replica_id, incarnation, now)
        self.see(member, now)
        return member

    def admit(self, participant: Participant, now: float) -> Member:
        """A join: its member, healthy. Another incarnation of that id is replaced; its loss is the caller's to tell."""
        member = self._members.get(participant.replica_id)
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

    def greet(self, participant: Participant, session: int, now: float, secret: str = "") -> Member:
        """A session was opened; its member, which has not joined by that. Another incarnation is gone before."""
        member = self._members.get(participant.replica_id)
        if member is not None and member.incarnation != participant.incarnation:
            self.remove(member)
            member = None
        if member is None:
            member = self._add(participant.replica_id, participant.incarnation, now)
        self._describe(member, participant)
        member.session, member.closes_at, member.secret = session, None, secret
        self.connect(member)
        self.see(member, now)
        self._push(member, now)
        return member

    def see(self, member: Member, now: float) -> None:
        member.seen_at = now
        if not member.is_alive:
            member.is_alive = True
            self._emit(MemberBack(member.replica_id, "is back"))
            self._index(member)
            self._push(member, now)
        if not member.has_missed and not member.down and self.is_waited_for(member):
            self.healthy.add(member.replica_id)
            if self._current.has(member):
                self.working.add(member.replica_id)

    def is_waited_for(self, member: Member) -> bool:
        """As long as it is alive and well."""
        is_first = not self.connected or not self._current.replica_ids
        return is_first or not member.is_reported or self._current.has(member)

    def miss(self, member: Member) -> None:
        member.has_missed = True
        self.healthy.discard(member.replica_id)
        self.working.discard(member.replica_id)

    def go_down(self, member: Member, reason: str) -> None:
        """Alive, and not to be waited for until it joins."""
        member.down = reason
        self._emit(GridChanged())
        self.healthy.discard(member.replica_id)
        self.working.discard(member.replica_id)

    def miss_ranks(self, member: Member, missing: Set[int]) -> None:
        """These of its ranks are not here."""
        if member.missing != missing:
            member.missing = missing
            self._emit(GridChanged())

    def close(self, member: Member, at: float, now: float) -> None:
        """Its stream has ended; from `at` on it is lost unless it comes back."""
        member.closes_at = at
        self._push(member, now)

    def lose(
        self,
        member: Member,
        now: float,
        reason: str,
        *,
        quorum_id: int | None = None,
        last_seen_at: float | None = None,
    ) -> None:
        """It is gone, as of now; `quorum_id` ends with that."""
        member.session = member.closes_at = None
        self._disconnect(member)
        if member.is_alive:
            self._lapse(member, now, MemberLost(member.replica_id, quorum_id, reason, last_seen_at))
            self._push(member, now)

    def excuse(self, member: Member, until: float, now: float) -> None:
        member.excused_until = until
        self._push(member, now)

    def shift(self, by_s: float) -> None:
        """The lighthouse was paused: no member could be heard for that long. O(n)."""
        for member in self._members.values():
            member.seen_at += by_s

    def form(self) -> None:
        """The present quorum is another one from now on. O(n)."""
        self._review_reported()
        self.working = {member.replica_id for member in self.participants()} & self.healthy

    def remove(self, member: Member) -> None:
        self._unindex(member)
        self.reported.discard(member.replica_id)
        del self._members[member.replica_id]
        self._disconnect(member)
        self._current.forget(member.replica_id)

    def expire(self, now: float) -> list[Member]:
        """The members that lapse by `now`; forgets those that lapsed long ago. One with a session is not lapsed yet."""
        lapsed: list[Member] = []
        while self._due and self._due[0][0] <= now:
            due_at, _, member = heapq.heappop(self._due)
            if due_at != member.due_at or self._members.get(member.replica_id) is not member:
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

    def _add(self, replica_id: str, incarnation: str, now: float) -> Member:
        self._births += 1
        told = self._current.told_before(replica_id, incarnation)
        member = Member(replica_id, incarnation, now, self._births, last_told=told)
        self._members[replica_id] = member
        self.reported.add(replica_id)
        self._emit(MemberJoined(replica_id))
        self._push(member, now)
        return member

    def connect(self, member: Member) -> None:
        """It has a session from now on."""
        self.connected.add(member.replica_id)
        if len(self.connected) == 1:
            self._review_reported()

    def _disconnect(self, member: Member) -> None:
        if member.replica_id in self.connected:
            self.connected.discard(member.replica_id)
            if not self.connected:
                self._review_reported()

    def _review_reported(self) -> None:
        """Whether they are waited for may have changed. O(n) of these."""
        for name in self.reported:
            member = self._members[name]
            if not self.is_waited_for(member):
                self.healthy.discard(name)
            elif member.is_alive and not member.has_missed and not member.down:
                self.healthy.add(name)

    def _push(self, member: Member, now: float) -> None:
        self._pushed += 1
        member.due_at = self._due_at(member, now)
        heapq.heappush(self._due, (member.due_at, self._pushed, member))

    def _due_at(self, member: Member, now: float) -> float:
        if not member.is_alive:
            return member.lapsed_at + self._forget_after_s
        if member.session is not None:
            due_at = max(member.seen_at + self._timeout_s, member.excused_until)
            return due_at if member.closes_at is None else member.closes_at
        return (now if member.call is not None else member.seen_at) + self._timeout_s

    def _lapse(self, member: Member, now: float, loss: MemberLost) -> None:
        self._emit(loss)
        member.is_alive = False
        member.lapsed_at = now
        self._unindex(member)

    def _describe(self, member: Member, participant: Participant) -> None:
        before, member.step = member.participant, participant.step
        self.reported.discard(member.replica_id)
        if (
            before
            and before.identity == participant.identity
            and before.group_world_size == participant.group_world_size
            and before.resolves_to_loopback == participant.resolves_to_loopback
        ):
            member.participant = participant
            return
        self._unindex(member)
        member.participant = participant
        member.is_loopback = is_loopback(participant)
        self._index(member)

    def _index(self, member: Member) -> None:
        self._emit(GridChanged())
        if member.is_loopback is not None:
            (self.loopback if member.is_loopback else self.routable).add(member.replica_id)
        if member.participant is not None and member.participant.group_world_size > 0:
            self.sizes.setdefault(member.participant.group_world_size, set()).add(member.replica_id)

    def _unindex(self, member: Member) -> None:
        self._emit(GridChanged())
        for group in (self.healthy, self.working, self.loopback, self.routable):
            group.discard(member.replica_id)
        if member.participant is not None:
            size = member.participant.group_world_size
            same = self.sizes.get(size, set())
            same.discard(member.replica_id)
            if not same:
                self.sizes.pop(size, None)


def is_reborn(participant: Participant, old: Member) -> bool:
    """Whether it is another incarnation than `old`: one that names none and whose step went back has lost its state."""
    if participant.incarnation or old.incarnation:
        return participant.incarnation != old.incarnation
    return old.participant is not None and participant.step < old.participant.step
