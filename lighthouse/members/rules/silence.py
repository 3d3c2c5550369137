"""Which members are lost by their silence or the end of their connections, and where the network is the likelier cause.

1. If more than half of the members of a quorum fall silent in one moment, that is rather the lighthouse's own network:
   they are held for alive for one timeout more.
2. A lighthouse that was itself paused moves every lapse by its lateness, and holds the closings that it reads then for
   the lateness and CLOSINGS_HELD_S: their managers come back.
3. A closed connection is not a dead process: a load balancer, a sidecar or a firewall that restarts closes them all.
   So the end of a member's connection is judged some milliseconds later, and later still while this host is busy, as
   the ends are read one after the other there. If the connections of more than half of the quorum's members have ended
   by then, their members are held for a lease, as after a restart of the lighthouse. A member that reports a failed
   step meanwhile shows that more than connections to the lighthouse has broken: those that are held then have
   CLOSINGS_HELD_S more, and those that are not judged yet are judged at once.
"""

from collections.abc import Callable

from lighthouse.members.rules.events import ConnectionsCut
from lighthouse.members.rules.roster import Member, Roster

BEAT_SLACK_S = 0.25
CLOSINGS_HELD_S = 2.0
SAME_MOMENT_S = 0.1
"""What was found to be shared is, for all who are lost within this: ten thousand are counted once, not for each."""
JUDGED_AFTER_S = 0.007
"""How long after the last closing of a burst its closings are judged. A manager that is killed alone is to be noticed
within 20 ms, of which the kernel, gRPC and the way to the other ranks take 11 (benchmarks/recovery.py)."""
JUDGED_WITHIN_S = 0.1
"""After the first closing of a burst, however long the burst is."""
LATE_S = 0.005
"""A lighthouse that judges a burst so late was held up."""
POSTPONED_AT_MOST = 40
"""How often a burst is judged JUDGED_AFTER_S later, as the lighthouse was held up or its host is busy: connections that
are cut in one moment end there in several. With a load of 20 on two CPUs the ends of three lay up to 98 ms apart."""
SILENT_TOGETHER = "most members fell silent together; they have one more timeout before they count as lost"
CLOSED_TOGETHER = "the connections of most members ended together: held for a lease"


class MassSilence:
    def __init__(
        self, roster: Roster, heartbeat_timeout_s: float, lease_s: float, emit: Callable[[ConnectionsCut], None]
    ) -> None:
        self._emit = emit
        self._roster = roster
        self._timeout_s = heartbeat_timeout_s
        self._lease_s = lease_s
        self._closings_held_until = 0.0
        self._is_shared_until = 0.0
        self.braked_until = 0.0
        self._burst: set[Member] = set()  # those whose connections have ended, and are not judged yet
        self._judge_at = self._judge_by = 0.0
        self._postponed = 0
        self._cut_until = 0.0  # members of a burst are held
        self.braked_for = ""

    def was_late(self, by_s: float, now: float) -> None:
        self._roster.shift(by_s)
        self._closings_held_until = now + by_s + CLOSINGS_HELD_S

    def is_judging(self, now: float) -> bool:
        """A burst is judged now, unless `postpone` is called first."""
        due_at = self._roster.next_at()
        return bool(self._burst) and due_at is not None and due_at <= now and self._judge_at <= now

    def postpone(self, now: float) -> None:
        """The ends of more connections may be unread, unless all have been read."""
        members, ended = self._ended()
        if self._postponed < POSTPONED_AT_MOST and len(ended) < len(members):
            self._postponed += 1
            self._judge_at, self._judge_by = now + JUDGED_AFTER_S, now + JUDGED_WITHIN_S

    def closing_held_until(self, member: Member, beat_interval_s: float, now: float) -> float | None:
        """Its stream has ended without a leave: until when it may come back, or when that is judged; None if it is
        lost at once."""
        if now < self._closings_held_until:
            return self._closings_held_until
        is_silent = _is_silent(member, beat_interval_s, now)
        if is_silent and self._is_shared(beat_interval_s, now):
            return self._brake(now + self._timeout_s, SILENT_TOGETHER)
        if not self._roster.has_peers(member):
            return None
        if not self._burst or now > self._judge_by:
            self._burst, self._judge_by, self._postponed = set(), now + JUDGED_WITHIN_S, 0
        self._burst.add(member)
        self._judge_at = min(now + JUDGED_AFTER_S, self._judge_by)
        if not is_silent:
            member.seen_at = now
        return self._judge_at

    def excuse(self, member: Member, beat_interval_s: float, now: float) -> bool:
        """Its connection has ended, or it has not been heard of for the timeout: whether it gets more time. A silent
        member does once."""
        if member.closes_at is not None:
            return self._excuse_closing(member, now)
        was_excused = member.excused_until > member.seen_at + self._timeout_s
        if was_excused or not self._is_shared(beat_interval_s, now):
            return False
        self._roster.excuse(member, self._brake(now + self._timeout_s, SILENT_TOGETHER), now)
        return True

    def is_cut(self, member: Member, now: float) -> bool:
        """It is held since its connection was cut together with most others, and no step has failed since."""
        return member.closes_at is not None and now < self._cut_until

    def step_failed(self, now: float) -> None:
        """A member of the quorum reports it. O(n), once a burst."""
        if self._burst:
            self._judge_at = min(self._judge_at, now)
            for member in self._burst:
                if member.closes_at is not None:
                    self._roster.close(member, now, now)
        if now >= self._cut_until:
            return
        self._cut_until, until = now, now + CLOSINGS_HELD_S
        for member in self._roster.participants():
            if member.closes_at is not None and member.closes_at > until:
                self._roster.close(member, until, now)

    def _excuse_closing(self, member: Member, now: float) -> bool:
        if member in self._burst:
            if now > self._judge_at + LATE_S:
                self.postpone(now)
            if now < self._judge_at:
                self._roster.close(member, self._judge_at, now)
            else:
                self._judge(now)
        return member.closes_at is None or now < member.closes_at

    def _judge(self, now: float) -> None:
        """Hold those that are still away, if the burst is one of the network. O(n), once a burst."""
        members, ended = self._ended()
        burst, self._burst = self._burst, set()
        if 2 * len(ended) <= len(members) or len(members) < 2:
            return
        until = self._cut_until = self._brake(now + self._lease_s, CLOSED_TOGETHER)
        held = [m for m in members if m in burst and m.closes_at is not None]
        for member in held:
            self._roster.close(member, until, now)
        self._emit(ConnectionsCut(tuple(sorted(m.replica_id for m in held)), self._lease_s))

    def _ended(self) -> tuple[list[Member], list[Member]]:
        """The members that had a session before the burst, and those whose connections have ended in it or before."""
        members = [m for m in self._roster.participants() if m.session is not None and m.is_alive]
        return members, [m for m in members if m.closes_at is not None or m in self._burst]

    def _brake(self, until: float, why: str) -> float:
        self.braked_until, self.braked_for = until, why
        return until

    def _is_shared(self, beat_interval_s: float, now: float) -> bool:
        """Whether more than half of the quorum's members with a session are silent. O(n), when one is lost."""
        if now < self._is_shared_until:
            return True
        members = silent = 0
        for member in self._roster.participants():
            if member.session is not None and member.is_alive:
                members += 1
                silent += _is_silent(member, beat_interval_s, now)
        if 2 * silent <= members or members < 2:
            return False
        self._is_shared_until = now + SAME_MOMENT_S
        return True


def _is_silent(member: Member, beat_interval_s: float, now: float) -> bool:
    """Its heartbeat is overdue: a process that is killed was heard within an interval."""
    return now - member.seen_at > beat_interval_s + BEAT_SLACK_S
