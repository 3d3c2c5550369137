"""Which groups ask for the next quorum, since when, and until when their calls wait."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from lighthouse.members.rules.roster import Member
from lighthouse.quorum.rules.current import CurrentQuorum
from lighthouse.quorum.rules.events import NewcomersChanged


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
    """The joined members in the order in which they came. `members` are those of the present quorum. Until when the
    first call waits: `earliest_deadline_at` of all, `members_deadline_at` of the members."""

    def __init__(self, grace_s: float, emit: Callable[[NewcomersChanged], None], current: CurrentQuorum) -> None:
        self._emit = emit
        self._current = current
        self._joined: dict[str, Member] = {}
        self._calls: dict[int, Member] = {}
        self._participants = 0
        self._shrinking = 0
        self.earliest_deadline_at: float | None = None
        self.members_deadline_at: float | None = None
        self.anyone = JoinTimer(grace_s)
        self.members = JoinTimer(grace_s)

    def __len__(self) -> int:
        return len(self._joined)

    def __iter__(self) -> Iterator[Member]:
        return iter(self._joined.values())

    def __contains__(self, replica_id: str) -> bool:
        return replica_id in self._joined

    def add(self, member: Member, call: int, deadline_at: float, now: float) -> None:
        member.call, member.deadline_at = call, deadline_at
        self._joined[member.replica_id] = member
        self._calls[call] = member
        self.earliest_deadline_at = _earlier(self.earliest_deadline_at, deadline_at)
        self.anyone.joined(now)
        if member.replica_id in self._current.replica_ids:
            self.members_deadline_at = _earlier(self.members_deadline_at, deadline_at)
            self.members.joined(now)
        self._count(member, 1)

    def withdraw(self, call: int, now: float) -> Member | None:
        """The member of that call; None if the call does not wait any more."""
        member = self._calls.pop(call, None)
        if member is None:
            return None
        del self._joined[member.replica_id]
        self.anyone.withdrew(now)
        if member.replica_id in self._current.replica_ids:
            self.members.withdrew(now)
        self._count(member, -1)
        self._released(member)
        return member

    def take(self, members: list[Member], now: float) -> tuple[int, ...]:
        """Those `members` have formed the present quorum; their calls. The others go on waiting."""
        calls: list[int] = []
        for member in members:
            assert member.call is not None
            calls.append(member.call)
            del self._joined[member.replica_id], self._calls[member.call]
            member.call = None
        self._set_deadlines()
        self._participants = self._shrinking = 0  # the rest are of no quorum
        self.anyone.restart(len(self), now)
        self.members.restart(0, now)
        return tuple(calls)

    @property
    def has_all_members(self) -> bool:
        """Every member of the present quorum, if there is one, has joined."""
        members = self._current.replica_ids
        return bool(members) and self.members.asking == len(members)

    @property
    def newcomers(self) -> int:
        return len(self) - self.members.asking

    @property
    def candidates(self) -> int:
        """How many may be in the next quorum: where one of the present quorum asks to shrink, only those of it."""
        return self._participants if self._shrinking else len(self)

    def list_candidates(self) -> list[Member]:
        return [member for member in self if self._current.has(member)] if self._shrinking else list(self)

    def list_newcomers(self) -> list[str]:
        """In the order in which they came."""
        return [name for name in self._joined if name not in self._current.replica_ids]

    def _count(self, member: Member, change: int) -> None:
        if member.replica_id not in self._current.replica_ids:
            self._emit(NewcomersChanged())
        if self._current.has(member):
            self._participants += change
            self._shrinking += change * (member.participant is not None and member.participant.shrink_only)

    def _set_deadlines(self) -> None:
        members = (member.deadline_at for member in self if member.replica_id in self._current.replica_ids)
        self.earliest_deadline_at = min((member.deadline_at for member in self), default=None)
        self.members_deadline_at = min(members, default=None)

    def _released(self, member: Member) -> None:
        if member.deadline_at in (self.earliest_deadline_at, self.members_deadline_at):
            self._set_deadlines()
        member.call = None


def _earlier(first: float | None, other: float) -> float:
    return other if first is None else min(first, other)
