"""Which quorum_id the members that form a quorum get.

A quorum that does not stand keeps its id while the same members (id, incarnation, addresses) form it and none reports a
failed commit; one that stands, or follows one that stood, always gets a new one. A new id is above every id that was
formed, and above every one that a member was told.
"""

from collections.abc import Sequence

from lighthouse.memory import Record
from lighthouse.roster import Member


class Numbering:
    """`quorum_id` is that of the last quorum; before any, the lowest that the first one may get."""

    def __init__(self, first_id: int, record: Record | None) -> None:
        """`record`: what an earlier lighthouse has written down."""
        self._has_formed = record is not None and record.quorum is not None
        self.quorum_id = max(first_id, record.quorum_id + (not self._has_formed) if record is not None else 0)
        self._composition: tuple[tuple[int, tuple[str, ...]], ...] = ()

    def number(self, chosen: Sequence[Member], seen_id: int, *, always: bool) -> bool:
        """`chosen` form a quorum: whether its id is new. `seen_id`: the highest that a member was told."""
        composition = tuple((member.birth, member.participant.identity) for member in chosen if member.participant)
        has_failed = any(member.participant is not None and member.participant.commit_failures > 0 for member in chosen)
        is_same = composition == self._composition and not has_failed and not always
        if self._has_formed and is_same and seen_id <= self.quorum_id:
            return False
        self.quorum_id = max(self.quorum_id + self._has_formed, seen_id + 1)
        self._has_formed, self._composition = True, composition
        return True
