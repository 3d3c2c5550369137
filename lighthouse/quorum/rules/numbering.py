"""Which quorum_id the members that form a quorum get.

A quorum that does not stand keeps its id while the same members (id, incarnation, addresses) form it and none reports a
failed commit; one that stands, or follows one that stood, always gets a new one. A new id is above every id that was
formed, above every one that a member was told, and at or above `first_id`: so that it names one list for ever, also
where what is remembered is older than what was told. Where a member was told one that would be given out here only
later, another lighthouse may be giving out the next ones at this moment: they are left to it.
"""

from collections.abc import Sequence

from lighthouse.members.rules.roster import Member
from lighthouse.quorum.rules.current import CurrentQuorum
from lighthouse.quorum.rules.record import QuorumRecord
from lighthouse_protocol.refusals import InvalidRequest

# Clocks of two hosts on which a lighthouse has run may differ, and ids may be used faster than milliseconds pass.
AHEAD_MS = 24 * 3600 * 1000
# Of another lighthouse that serves this job by mistake. It ends by that, or is told of these.
LEFT_TO_ANOTHER = 1000


class Numbering:
    """`quorum_id` is the highest that was given out; 0 before any."""

    def __init__(self, first_id: int, record: QuorumRecord | None, current: CurrentQuorum) -> None:
        """`first_id`: the lowest that a new quorum may get. `record`: what an earlier lighthouse has written down."""
        self.quorum_id = record.quorum_id if record is not None else 0
        self._recorded_id = self.quorum_id
        self._first_id = first_id
        self._own_first_id: int | None = None
        self._began_at: float | None = None
        self._current = current

    def check(self, seen_id: int, field: str, now: float) -> None:
        """Raises InvalidRequest for an id that no lighthouse of this job can have given out.

        Ids begin at the wall clock in milliseconds: one that is a day above it and above the last one was never told.
        """
        self._began_at = now if self._began_at is None else self._began_at
        by_clock = self._first_id + int((now - self._began_at) * 1000)
        if seen_id > max(self.quorum_id, by_clock + AHEAD_MS):
            raise InvalidRequest(
                f"is {seen_id}; this lighthouse's ids are at {max(self.quorum_id, by_clock)} by its clock, so it was "
                "never given out. A checkpoint that it comes from is damaged; or the clock of the lighthouse was wrong "
                "when it started: set it, and start the lighthouse again",
                field=field,
            )

    def is_unknown(self, seen_id: int) -> bool:
        """A member was told an id that was neither written down before this life nor given out in it."""
        own = self._own_first_id is not None and self._own_first_id <= seen_id <= self.quorum_id
        return seen_id > self._recorded_id and not own

    def number(self, chosen: Sequence[Member], seen_id: int, *, always: bool) -> bool:
        """`chosen` form a quorum: whether its id is new. `seen_id`: the highest that a member was told."""
        has_failed = any(member.participant is not None and member.participant.commit_failures > 0 for member in chosen)
        is_same = self._current.consists_of(chosen) and not has_failed and not always
        if is_same and seen_id <= self.quorum_id:
            return False
        next_id = max(self._first_id, self.quorum_id + 1)
        self.quorum_id = next_id if seen_id < next_id else seen_id + LEFT_TO_ANOTHER
        self._own_first_id = self._own_first_id or self.quorum_id
        return True
