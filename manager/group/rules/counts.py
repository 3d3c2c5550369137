"""What the steps of this group have come to: committed, discarded and why, the time in them, and heals. No I/O.

A step's time runs from when the ranks are let into it until it is decided. With the grant of the next step in the
answer to a vote that is all of the time between two decisions, so what the script does between two steps belongs to the
later one. It counts if the step is committed, and no group healed in it: in a step that heals, ranks wait for a state.
"""

from dataclasses import fields, replace

from lighthouse_protocol.messages.progress import HealTotals
from lighthouse_protocol.messages.session import Discards, GroupCounts

REASONS = tuple(field.name for field in fields(Discards))
GROUP_LOST, RANK_LOST, REVOKED, VOTED_NO = REASONS


class StepCounts:
    """Each number only grows."""

    def __init__(self) -> None:
        self.commits = 0
        self._discards = Discards()
        self._step_s = 0.0
        self._heals, self._healed = _RankHeals(), HealTotals()
        self._began_at: float | None = None
        self._revoked_id = 0
        self._lost_id = 0  # revoked because a group was lost
        self._unsettled: tuple[int, str] | None = None  # the quorum and the reason of the last discard, for now
        self._told: GroupCounts | None = None

    @property
    def discards(self) -> int:
        return sum(getattr(self._discards, reason) for reason in REASONS) + (self._unsettled is not None)

    @property
    def told(self) -> GroupCounts:
        """For the lighthouse; the same object until a number changes."""
        if self._told is None:
            self._told = GroupCounts(self.commits, self._discards, self._step_s, self._healed)
        return self._told

    def began(self, now: float, *, has_healing: bool) -> None:
        """The ranks are let into a step."""
        self._settle()
        self._began_at = None if has_healing else now

    def revoked(self, quorum_id: int, *, is_group_lost: bool) -> None:
        """The lighthouse has revoked that quorum; `is_group_lost`: because it has lost a group."""
        self._revoked_id = quorum_id
        if is_group_lost:
            self._lost_id = quorum_id

    def committed(self, now: float) -> None:
        self._settle()
        self.commits += 1
        if self._began_at is not None:
            self._step_s += max(0.0, now - self._began_at)
        self._began_at = self._told = None

    def discarded(self, quorum_id: int, *, is_rank_lost: bool) -> None:
        """`is_rank_lost`: a rank of this group was lost before it voted. Else the reason is settled with the next step:
        ranks may notice that a group is lost, and vote no, before the lighthouse says so."""
        self._settle()
        is_revoked = quorum_id == self._revoked_id
        self._unsettled = quorum_id, RANK_LOST if is_rank_lost else REVOKED if is_revoked else VOTED_NO
        self._began_at = None

    def _settle(self) -> None:
        if self._unsettled is None:
            return
        (quorum_id, reason), self._unsettled = self._unsettled, None
        if reason != RANK_LOST and quorum_id == self._lost_id:
            reason = GROUP_LOST
        self._discards = replace(self._discards, **{reason: getattr(self._discards, reason) + 1})
        self._told = None

    def healed(self, group_rank: int, rank_incarnation: str, totals: HealTotals) -> None:
        """All heals so far of that rank's process."""
        self._heals.take(group_rank, rank_incarnation, totals)
        self._healed, self._told = self._heals.totals, None


class _RankHeals:
    """A group heals as one: the rank that has healed most often, and longest, stands for the group."""

    def __init__(self) -> None:
        self._now: dict[int, tuple[str, HealTotals]] = {}  # by rank: its process, and what that has told last
        self._past: dict[int, HealTotals] = {}  # by rank: of its processes that are gone

    def take(self, group_rank: int, rank_incarnation: str, totals: HealTotals) -> None:
        known = self._now.get(group_rank)
        if known is not None and known[0] != rank_incarnation:
            self._past[group_rank] = _sum(self._past.get(group_rank), known[1])
            known = None
        if known is None or totals.heals >= known[1].heals:
            self._now[group_rank] = rank_incarnation, totals

    @property
    def totals(self) -> HealTotals:
        ranks = [_sum(self._past.get(rank), totals) for rank, (_, totals) in self._now.items()]
        return HealTotals(
            max((rank.heals for rank in ranks), default=0),
            max((rank.seconds for rank in ranks), default=0.0),
            sum(rank.bytes for rank in ranks),
        )


def _sum(past: HealTotals | None, now: HealTotals) -> HealTotals:
    if past is None:
        return now
    return HealTotals(past.heals + now.heals, past.seconds + now.seconds, past.bytes + now.bytes)
