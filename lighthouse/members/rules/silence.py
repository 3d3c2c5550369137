"""Which silent members are lost, and which silence is more likely the lighthouse's own fault.

1. If more than half of the members of a quorum fall silent in one moment, that is rather the lighthouse's own network:
   they are held for alive for one timeout more.
2. A lighthouse that was itself paused moves every lapse by its lateness, and holds the closings that it reads then for
   the lateness and CLOSINGS_HELD_S: their managers come back.
"""

from lighthouse.members.rules.roster import Member, Roster

BEAT_SLACK_S = 0.25
CLOSINGS_HELD_S = 2.0
SAME_MOMENT_S = 0.1
"""What was found to be shared is, for all who are lost within this: ten thousand are counted once, not for each."""


class MassSilence:
    def __init__(self, roster: Roster, heartbeat_timeout_s: float) -> None:
        self._roster = roster
        self._timeout_s = heartbeat_timeout_s
        self._closings_held_until = 0.0
        self._is_shared_until = 0.0
        self.braked_until = 0.0

    def was_late(self, by_s: float, now: float) -> None:
        self._roster.shift(by_s)
        self._closings_held_until = now + by_s + CLOSINGS_HELD_S

    def closing_held_until(self, member: Member, beat_interval_s: float, now: float) -> float | None:
        """Its stream has ended without a leave: until when it may come back; None if it is lost at once."""
        if now < self._closings_held_until:
            return self._closings_held_until
        if not _is_silent(member, beat_interval_s, now) or not self._is_shared(beat_interval_s, now):
            return None
        return self._brake(now)

    def excuse(self, member: Member, beat_interval_s: float, now: float) -> bool:
        """It has not been heard of for the timeout: whether it gets one more, as it does once."""
        was_excused = member.excused_until > member.seen_at + self._timeout_s
        if member.closes_at is not None or was_excused or not self._is_shared(beat_interval_s, now):
            return False
        self._roster.excuse(member, self._brake(now), now)
        return True

    def _brake(self, now: float) -> float:
        self.braked_until = now + self._timeout_s
        return self.braked_until

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
