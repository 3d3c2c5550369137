"""What the replica groups of a job report about their steps, as sums over all groups that ever were. No I/O.

1. A manager reports counts since its start. What is added is the difference to its last report; where a number has gone
   back, another manager counts, and its report is all new.
2. The first report of a group adds nothing: most of it may be older than this lighthouse.
3. The time of a group runs from the first report in which it holds a quorum until it has left in good order, or is
   forgotten. A group that is lost, restarts or heals still has time: that is what its failure costs.
4. Goodput is the time in committed steps over the time of all groups.
"""

from collections.abc import Container
from dataclasses import dataclass, fields

from lighthouse_protocol.messages.progress import HealTotals
from lighthouse_protocol.messages.session import Discards, GroupCounts, GroupReport, HoldState

NOTHING = GroupCounts()
REASONS = tuple(field.name for field in fields(Discards))


@dataclass(slots=True)
class _Group:
    """`since`: when its time began; None: it has held no quorum."""

    counts: GroupCounts
    since: float | None = None


class Ledger:
    """Of one job. Moments are of one clock that never goes back."""

    def __init__(self) -> None:
        self.step_s = 0.0
        self._groups: dict[str, _Group] = {}
        self._past_s = 0.0  # of groups that are gone

    def take(self, replica_id: str, report: GroupReport, now: float) -> GroupCounts:
        """What is new in the report."""
        if report.counts is None:
            return NOTHING
        group = self._groups.get(replica_id)
        if group is None:
            group = self._groups[replica_id] = _Group(report.counts)
        new, group.counts = difference(group.counts, report.counts), report.counts
        if report.held is not None and report.held.mode is HoldState.LEAVING:
            self.left(replica_id, now)
        elif report.held is not None and group.since is None:
            group.since = now
        self.step_s += new.step_s
        return new

    def left(self, replica_id: str, now: float) -> None:
        """In good order: its time is over, until it holds another quorum."""
        group = self._groups.get(replica_id)
        if group is not None and group.since is not None:
            self._past_s += now - group.since
            group.since = None

    def keep(self, names: Container[str], now: float) -> None:
        """Forget all other groups."""
        for name in [name for name in self._groups if name not in names]:
            self.left(name, now)
            del self._groups[name]

    def group_s(self, now: float) -> float:
        """The time of all groups; it never goes back."""
        return self._past_s + sum(now - group.since for group in self._groups.values() if group.since is not None)

    def goodput(self, now: float) -> float | None:
        """From 0 to 1; None: no group has trained yet."""
        group_s = self.group_s(now)
        return min(1.0, self.step_s / group_s) if group_s > 0 else None


def difference(before: GroupCounts, now: GroupCounts) -> GroupCounts:
    """What has been added since `before`; all of `now`, where that is of another manager."""
    if any(new < old for old, new in zip(_numbers(before), _numbers(now), strict=True)):
        return now
    discards = Discards(*(getattr(now.discards, name) - getattr(before.discards, name) for name in REASONS))
    old, new = before.healed, now.healed
    healed = HealTotals(new.heals - old.heals, new.seconds - old.seconds, new.bytes - old.bytes)
    return GroupCounts(now.commits - before.commits, discards, now.step_s - before.step_s, healed)


def _numbers(counts: GroupCounts) -> tuple[float, ...]:
    healed, discards = counts.healed, counts.discards
    told = (getattr(discards, name) for name in REASONS)
    return (counts.commits, counts.step_s, healed.heals, healed.seconds, healed.bytes, *told)
