"""Ledger: how each replica group spent its time, by cause, and which faults occurred. `lighthouse report` reads it.

1. A group's time begins with its first session or join and ends when it leaves in good order. At every moment it has
   one cause, so a group's causes add up to its time exactly.
2. While a group is in a quorum, its manager's counters divide the time: committed steps are `compute`, discarded steps
   are `repeated`, and the rest is `wait`. A counter may arrive after the end of the interval to which it belongs. What
   exceeds the time of an interval then counts in the next one.
3. Steps that a job has committed before, and repeats after it fell back to an older state, count as `repeated`.
4. A lost group is `down` from its last heartbeat, not from the moment at which its loss was noticed, and for up to
   DOWN_KEPT_S.

Every EVERY_S, the daemon takes `lines`: one JSON line per job with the time of each group, and one line per new or
changed fault. The module does no I/O. Moments come from the monotonic clock, except those in the lines.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from lighthouse.job.records import Group
from lighthouse_protocol.messages.incident import IncidentKind, IncidentSummary
from lighthouse_protocol.messages.progress import GroupView
from lighthouse_protocol.messages.session import LEFT, GroupCounts, GroupReport, HoldState

EVERY_S = 300.0
DOWN_KEPT_S = 12 * 3600.0
MAX_GROUPS = 20_000
MAX_GROUPS_PER_LINE = 500
MAX_HOSTS = 16  # hosts named per group; a larger group names its first ones
MAX_FAULTS = 1000  # faults that wait for the next line
MAX_TEXT_CHARS = 200


class Cause(StrEnum):
    """What a replica group spent time on. The order is that of the seconds in a line."""

    COMPUTE = "compute"  # committed steps, including their collectives
    WAIT = "wait"  # in a quorum, but in no step: other groups are lost, slow or healing, or a quorum is forming
    REPEATED = "repeated"  # discarded steps, and steps that had been committed before
    HEAL = "heal"  # behind its quorum, until it has another group's state
    RESTART = "restart"  # its ranks are starting, or have not requested a quorum since they started
    DOWN = "down"  # lost, or without ranks that are starting
    IDLE = "idle"  # ready, but in no quorum: a spare, or a quorum has yet to form


CAUSES = tuple(Cause)
# Kinds of incidents that interrupt training.
FAULTS = frozenset(
    {IncidentKind.LOSS, IncidentKind.STALL, IncidentKind.RESTART, IncidentKind.DIVERGENCE, IncidentKind.NOT_APPLIED}
)


def cause_of(group: Group) -> Cause:
    """Return the cause of a group's present time. WAIT is divided later, by the manager's counters."""
    if group.is_alive and group.is_starting:
        return Cause.RESTART
    if not group.is_alive or group.down:
        return Cause.DOWN
    if group.is_participant:
        if group.heal is not None:
            return Cause.HEAL
        return Cause.WAIT if group.reports.counts is not None else Cause.COMPUTE  # torchft's managers do not count
    return Cause.RESTART if group.call is None and group.last_assignment is None else Cause.IDLE


@dataclass(slots=True)
class _Spent:
    """Time of one group since the last lines."""

    cause: Cause | None  # None after the group has left
    since: float
    began_at: float  # since when the cause holds, across lines
    hosts: tuple[str, ...] = ()
    ranks: int = 1
    commits: int = 0
    seconds: dict[Cause, float] = field(default_factory=lambda: dict.fromkeys(CAUSES, 0.0))
    owed: dict[Cause, float] = field(default_factory=lambda: {Cause.COMPUTE: 0.0, Cause.REPEATED: 0.0})
    view: GroupView | None = None  # the one from which the hosts were read

    def change(self, cause: Cause | None, at: float) -> None:
        if cause is not self.cause:
            if self.cause is not None:
                self.seconds[self.cause] += at - self.since
            self.cause, self.since, self.began_at = cause, at, at

    def settled(self, now: float) -> dict[Cause, float]:
        """Return the seconds by cause, with waits divided by the counters."""
        seconds = self.seconds.copy()
        if self.cause is not None:
            seconds[self.cause] += now - self.since
        for cause, owed_s in self.owed.items():
            moved_s = min(owed_s, seconds[Cause.WAIT])
            seconds[Cause.WAIT] -= moved_s
            seconds[cause] += moved_s
        return seconds

    def row(self, now: float) -> list[Any]:
        return [self.hosts, self.ranks, self.commits, [round(s, 3) or 0 for s in self.settled(now).values()]]

    def restart(self, now: float) -> None:
        """Begin the next interval. At most one interval's worth of counters is carried over."""
        settled = self.settled(now)
        if self.cause is not None:
            self.seconds[self.cause] += now - self.since
        for cause, owed_s in self.owed.items():
            self.owed[cause] = min(EVERY_S, owed_s - (settled[cause] - self.seconds[cause]))
        self.seconds, self.commits, self.since = dict.fromkeys(CAUSES, 0.0), 0, now


class Ledger:
    """Time of the groups of all jobs since the last lines, and their new faults."""

    def __init__(self) -> None:
        self._spent: dict[tuple[str, str], _Spent] = {}
        self._finished: list[tuple[str, str, list[Any]]] = []  # rows of groups whose hosts have changed
        self._top: dict[str, int] = {}  # by job: the highest step that was committed for certain
        self._repeats_to: dict[str, int] = {}  # by job: the steps up to this one had been committed before
        self._faults: dict[str, IncidentSummary] = {}
        self._from: float | None = None  # moment of the last lines

    def observe(self, job: str, group: Group | None, now: float, at: float | None = None) -> None:
        """Note the group's present state, which holds since `at` if that is known, and otherwise since `now`."""
        if group is None or group.participant is None:
            return
        spent = self._spent.get((job, group.replica_id))
        if spent is None:
            if len(self._spent) >= MAX_GROUPS:
                return
            self._from = now if self._from is None else self._from
            spent = self._spent[job, group.replica_id] = _Spent(None, now, now)
        cause = cause_of(group)
        since = now if at is None else min(now, max(at, spent.since))
        spent.change(cause, since)
        self._locate(job, spent, group, now)

    def _locate(self, job: str, spent: _Spent, group: Group, now: float) -> None:
        view, participant = group.reports.view, group.participant
        assert participant is not None
        spent.ranks = max(1, participant.group_world_size)
        if view is None and spent.hosts:
            return  # a lost group keeps its hosts
        if view is not None and view is spent.view:
            return
        names = {rank.host for rank in view.ranks if rank.host} if view is not None else set[str]()
        hosts = tuple(sorted(names or {participant.address.rpartition(":")[0]})[:MAX_HOSTS])
        spent.view = view
        if hosts != spent.hosts and (names or not spent.hosts):
            if spent.hosts and any(spent.settled(now).values()):
                self._finished.append((job, group.replica_id, spent.row(now)))
                spent.restart(now)
            spent.hosts = hosts

    def report(self, job: str, group: Group | None, report: GroupReport, new: GroupCounts, now: float) -> None:
        """Note a manager's report, which adds `new` to its group's counters."""
        if group is None:
            return
        if report.down == LEFT or (report.held is not None and report.held.mode is HoldState.LEAVING):
            self.leave(job, group.replica_id, now)
        else:
            self.observe(job, group, now)
        spent = self._spent.get((job, group.replica_id))
        if spent is None:
            return
        repeats = group.step <= self._repeats_to.get(job, -1)
        spent.commits += new.commits
        spent.owed[Cause.REPEATED if repeats else Cause.COMPUTE] += new.step_s
        spent.owed[Cause.REPEATED] += new.discarded_s
        if new.commits:
            self._top[job] = max(self._top.get(job, 0), group.step - 1)

    def formed(self, job: str, max_step: int) -> None:
        """Note that a quorum begins with the state of `max_step`."""
        if max_step < self._top.get(job, 0):
            self._repeats_to[job] = self._top[job]

    def leave(self, job: str, replica_id: str, now: float) -> None:
        """End the time of a group that leaves in good order."""
        if (spent := self._spent.get((job, replica_id))) is not None:
            spent.change(None, now)

    def fault(self, summary: IncidentSummary) -> None:
        """Note a new or changed incident."""
        if summary.kind in FAULTS and (summary.id in self._faults or len(self._faults) < MAX_FAULTS):
            self._faults[summary.id] = summary

    def lines(self, now: float, unix_s: float, *, keep: bool = False) -> list[str]:
        """Return the lines since the last call, and begin the next interval unless `keep` is set."""
        from_s = unix_s - (now - self._from) if self._from is not None else unix_s
        rows = [(job, name, spent.row(now)) for (job, name), spent in self._spent.items()]
        found = [*_time_lines([*self._finished, *rows], from_s, unix_s), *map(_fault_line, self._faults.values())]
        if not keep:
            self._faults.clear()
            self._finished.clear()
            for key, spent in list(self._spent.items()):
                is_gone = spent.cause is Cause.DOWN and now - spent.began_at > DOWN_KEPT_S
                spent.restart(now)
                if spent.cause is None or is_gone:
                    del self._spent[key]
            self._from = now if self._spent else None
            jobs = {job for job, _ in self._spent}
            self._top = {job: step for job, step in self._top.items() if job in jobs}
            self._repeats_to = {job: step for job, step in self._repeats_to.items() if job in jobs}
        return found


def line_prefix(job: str) -> str:
    """Return how each line of the job begins."""
    return f'{{"job":{json.dumps(job)},'


def _time_lines(rows: list[tuple[str, str, list[Any]]], from_s: float, to_s: float) -> Iterator[str]:
    """Write the rows of each job with the seconds between which they lie, in several lines if there are many."""
    by_job: dict[str, list[tuple[str, list[Any]]]] = {}
    for job, name, row in rows:
        if any(row[-1]):
            by_job.setdefault(job, []).append((name, row))
    for job, of_job in by_job.items():
        for i in range(math.ceil(len(of_job) / MAX_GROUPS_PER_LINE)):
            some = of_job[i * MAX_GROUPS_PER_LINE : (i + 1) * MAX_GROUPS_PER_LINE]
            yield _line({"job": job, "from": round(from_s, 3), "to": round(to_s, 3), "groups": some})


def _fault_line(summary: IncidentSummary) -> str:
    fault = {
        "id": summary.id,
        "kind": summary.kind.value,
        "text": summary.text[:MAX_TEXT_CHARS],
        "suspects": summary.suspects,
        "at": summary.opened_unix_s - summary.noticed_s,
        "noticed_s": summary.noticed_s,
        "step_s": summary.step_s,
        "back_s": summary.back_s,
    }
    return _line({"job": summary.job, "fault": fault})


def _line(document: dict[str, Any]) -> str:
    return json.dumps(document, separators=(",", ":"))
