"""Counters and status of one replica group. This module does no I/O.

`StepCounts` counts committed steps, discarded steps (by reason) and heals, and measures the time spent in committed and
in discarded steps. A step lasts from its grant until its decision. If the answer to a vote carries the next grant, the
next step starts immediately, so the time that the script spends between two steps counts towards the later one. Steps
in which a group heals add no time, because ranks are then waiting for a state.

`GroupStatus` is a snapshot of the group, and describes waits and missing ranks in text.
"""

from collections.abc import Collection, Set
from dataclasses import dataclass, fields, replace

from lighthouse_protocol.messages.membership import Participant
from lighthouse_protocol.messages.progress import HealTotals, RankName
from lighthouse_protocol.messages.session import Discards, GroupCounts, HeldQuorum
from lighthouse_protocol.rules.quorum_change import describe_missing_ranks, list_names
from manager.group.records import ReplicaGroup

REASONS = tuple(field.name for field in fields(Discards))
GROUP_LOST, RANK_LOST, REVOKED, VOTED_NO = REASONS


class StepCounts:
    """Counts the steps, discards and heals of one manager. The counts never decrease."""

    def __init__(self, group: ReplicaGroup) -> None:
        self._group = group
        self.commits = 0
        self._discards = Discards()
        self._step_s = self._discarded_s = 0.0
        self._began_at: float | None = None
        self._revoked_id = 0
        self._lost_id = 0  # id of the last quorum that was revoked because a group was lost
        self._unsettled: tuple[int, str] | None = None  # quorum id and provisional reason of the last discard
        self._healed = HealTotals()
        self.totals = GroupCounts()  # the same object until a number changes

    @property
    def discards(self) -> int:
        return sum(getattr(self._discards, reason) for reason in REASONS) + (self._unsettled is not None)

    def begin_step(self, now: float, *, has_healing: bool) -> None:
        """Start measuring a step at time `now`. If groups heal in the step (`has_healing`), its time is not counted."""
        self._settle()
        self._began_at = None if has_healing else now

    def record_revoke(self, quorum_id: int, *, is_group_lost: bool) -> None:
        """Record that the lighthouse has revoked a quorum. `is_group_lost` is True if a lost group was the reason."""
        self._revoked_id = quorum_id
        if is_group_lost:
            self._lost_id = quorum_id

    def count_step(self, now: float) -> None:
        self._settle()
        self.commits += 1
        self._step_s += self._end_step(now)
        self._note_totals()

    def count_discard(self, quorum_id: int, now: float, *, is_rank_lost: bool) -> None:
        """Count a discarded step.

        `is_rank_lost` means that a rank of this group was lost before it voted. Any other reason is provisional until
        the next step begins, because ranks may notice the loss of another group and vote no before the lighthouse
        reports that loss.
        """
        self._settle()
        is_revoked = quorum_id == self._revoked_id
        self._unsettled = quorum_id, RANK_LOST if is_rank_lost else REVOKED if is_revoked else VOTED_NO
        self._discarded_s += self._end_step(now)

    def _end_step(self, now: float) -> float:
        """Stop measuring the step. Return how many seconds it took, or 0 if its time is not counted."""
        began_at, self._began_at = self._began_at, None
        return 0.0 if began_at is None else max(0.0, now - began_at)

    def _settle(self) -> None:
        if self._unsettled is None:
            return
        (quorum_id, reason), self._unsettled = self._unsettled, None
        if reason != RANK_LOST and quorum_id == self._lost_id:
            reason = GROUP_LOST
        self._discards = replace(self._discards, **{reason: getattr(self._discards, reason) + 1})
        self._note_totals()

    def record_heals(self, group_rank: int, rank_incarnation: str, totals: HealTotals) -> None:
        """Record the heal totals that a rank's process reports. Ignore them if the process has reported more heals."""
        rank = self._group.ranks[group_rank]
        known = rank.heals
        if known is not None and known[0] != rank_incarnation:
            rank.past_heals, known = _sum(rank.past_heals, known[1]), None
        if known is None or totals.heals >= known[1].heals:
            rank.heals = rank_incarnation, totals
        # All ranks in a group heal together, which counts as one heal.
        ranks = [_sum(rank.past_heals, rank.heals[1]) for rank in self._group.ranks if rank.heals is not None]
        self._healed = HealTotals(
            max((rank.heals for rank in ranks), default=0),
            max((rank.seconds for rank in ranks), default=0.0),
            sum(rank.bytes for rank in ranks),
        )
        self._note_totals()

    def _note_totals(self) -> None:
        self.totals = GroupCounts(self.commits, self._discards, self._step_s, self._healed, self._discarded_s)


def _sum(past: HealTotals, now: HealTotals) -> HealTotals:
    return HealTotals(past.heals + now.heals, past.seconds + now.seconds, past.bytes + now.bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupStatus:
    """Snapshot of one replica group, for the status command, metrics and logs."""

    me: Participant
    incarnation: str
    held: HeldQuorum | None
    quorum_id: int  # the last one that the ranks received
    step: int  # step of the group's state, or its highest granted step if that is higher
    is_joined: bool
    is_gathering: bool  # some requests are waiting for the other ranks or for the answer to the join
    is_voting: bool
    waiting: tuple[int, ...]  # ranks with a waiting request
    missing: frozenset[int]
    awaited: str  # reason for the wait, from the lighthouse
    commits: int
    discards: int
    grants: int

    @property
    def phase(self) -> str:
        if self.is_joined:
            return "joined"
        if self.waiting:
            return "gathering"
        return "voting" if self.is_voting else "idle"

    @property
    def silent(self) -> list[int]:
        """The ranks without a waiting request."""
        return [rank for rank in range(self.me.group_world_size) if rank not in self.waiting]

    def waiting_for(self, lighthouse_error: str) -> str:
        """Describe what the requests are waiting for. `lighthouse_error` is empty if the lighthouse is reachable."""
        lighthouse = f"the lighthouse: {lighthouse_error}" if lighthouse_error else ""
        if self.is_joined or not self.is_gathering:
            return lighthouse or self.awaited or "the lighthouse to answer"
        gone = [rank for rank in self.silent if rank in self.missing]
        late = [rank for rank in self.silent if rank not in self.missing]
        parts = (
            f"{_ranks_of(gone, self.me)}, not connected yet" if gone else "",
            f"{_ranks_of(late, self.me)}, connected, but without a request for a quorum" if late else "",
            lighthouse,
        )
        return "; ".join(filter(None, parts))


def describe_missing(me: Participant, missing: Set[int]) -> str:
    """Describe which ranks of the group `me` are present and which are missing.

    Return an empty string if all or none are missing.
    """
    size = me.group_world_size
    return describe_missing_ranks(me.replica_id, size, missing) if 0 < len(missing) < size else ""


def _ranks_of(ranks: Collection[int], me: Participant) -> str:
    names = list_names(RankName("", rank) for rank in ranks)
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {names} of {me.group_world_size} of {me.replica_id}"
