"""Ledger: how each replica group spent its time, by cause, and which faults occurred. `lighthouse report` reads it.

1. A group's time begins with its first session or join and ends when it leaves cleanly, or with the job if the group is
   lost then. Each moment has exactly one cause, so the seconds of a line add up to the line's interval.
2. While a group is in a quorum, its manager's counters divide the time: committed steps are `compute`, discarded steps
   are `repeated`, and the rest is `wait`. If the counters report more time than a line covers, because a long step
   began in an earlier line, the rest counts toward the next line.
3. Steps that a job has committed before, and repeats after it fell back to an older state, are `repeated`.
4. A lost group is `down` from its last heartbeat, not from the moment at which the loss was noticed. After DOWN_KEPT_S,
   a lost group counts as removed.

Every EVERY_S, the daemon writes what `take_lines` returns: one line per group, and one per new or changed fault. The
module does no I/O. Times come from the monotonic clock. Only the written lines have wall-clock times.
"""

import json
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Any

from lighthouse.job.records import Group
from lighthouse_protocol.messages.incident import IncidentKind, IncidentSummary
from lighthouse_protocol.messages.session import LEFT, GroupCounts, GroupReport, HoldState

EVERY_S = 300.0
DOWN_KEPT_S = 12 * 3600.0
MAX_GROUPS = 20_000
MAX_CLOSED, MAX_FAULTS = 2 * MAX_GROUPS, 1000  # between two calls of `take_lines`
MAX_HOSTS = 16  # named per group
MAX_TEXT_CHARS = 200


class Cause(StrEnum):
    """Activity or failure on which a replica group spends time."""

    COMPUTE = "compute"
    WAIT = "wait"
    REPEATED = "repeated"
    HEAL = "heal"
    RESTART = "restart"
    DOWN = "down"
    IDLE = "idle"


CAUSES = tuple(Cause)
# Kinds of incidents that interrupt training.
FAULTS = frozenset(
    {
        IncidentKind.LOSS,
        IncidentKind.STALL,
        IncidentKind.RESTART,
        IncidentKind.DIVERGENCE,
        IncidentKind.NOT_APPLIED,
        IncidentKind.CHAOS,
    }
)


def cause_of(group: Group) -> Cause:
    """Return what a group is spending its time on now. `divide_wait` later splits WAIT by the manager's counters."""
    if group.is_alive and group.is_starting:
        return Cause.RESTART
    if not group.is_alive or group.down:
        return Cause.DOWN
    if group.is_participant and group.heal is not None:
        return Cause.HEAL
    if group.is_participant:
        return Cause.WAIT if group.reports.counts is not None else Cause.COMPUTE  # torchft's managers do not count
    return Cause.RESTART if group.call is None and group.last_assignment is None else Cause.IDLE


@dataclass(slots=True)
class _Spent:
    """Time that one group has spent, by cause, since its last line in the ledger."""

    cause: Cause
    since: float  # `seconds` covers the time until then
    from_at: float  # start of the next line
    changed_at: float  # when the cause last changed, possibly before the last line
    hosts: tuple[str, ...] = ()  # empty until a rank has reported its host
    has_trained: bool = False
    ranks: int = 1
    seconds: dict[Cause, float] = field(default_factory=lambda: dict.fromkeys(CAUSES, 0.0))
    owed_s: dict[Cause, float] = field(default_factory=lambda: {Cause.COMPUTE: 0.0, Cause.REPEATED: 0.0})

    def advance(self, at: float) -> None:
        self.seconds[self.cause] += at - self.since
        self.since = at

    def divide_wait(self) -> None:
        """Move time from WAIT to COMPUTE and REPEATED, as the manager's counters report.

        If they report more time than WAIT contains, up to EVERY_S of the rest per cause is kept for the next line.
        """
        for cause, owed_s in self.owed_s.items():
            moved_s = min(owed_s, self.seconds[Cause.WAIT])
            self.seconds[Cause.WAIT] -= moved_s
            self.seconds[cause] += moved_s
            self.owed_s[cause] = min(EVERY_S, owed_s - moved_s)


@dataclass(slots=True)
class _Steps:
    committed: int = 0  # highest step that a group of the job has certainly committed
    repeated_to: int = -1


class Ledger:
    """Time that the groups of all jobs have spent, by cause, and new or changed faults, since the last `take_lines`."""

    def __init__(self) -> None:
        self._spent: dict[tuple[str, str], _Spent] = {}
        self._steps: dict[str, _Steps] = {}
        self._closed: list[dict[str, Any]] = []
        self._faults: dict[str, IncidentSummary] = {}

    def observe_group(self, job: str, group: Group | None, now: float, at: float | None = None) -> None:
        """Record what the group spends its time on from `at` on, or from `now` on if `at` is None.

        Do nothing if `group` is None or has no participant.
        """
        if group is None or group.participant is None:
            return
        key, cause = (job, group.replica_id), cause_of(group)
        spent = self._spent.get(key)
        if spent is None:
            if len(self._spent) >= MAX_GROUPS:
                return
            spent = self._spent[key] = _Spent(cause, now, now, now)
        spent.has_trained |= group.is_participant
        if cause is Cause.RESTART and not spent.has_trained:
            cause = Cause.IDLE  # its first start is not the cost of a failure
        if cause is spent.cause and spent.hosts:
            return
        spent.advance(now if at is None else max(spent.since, min(at, now)))
        if cause is not spent.cause:
            spent.cause, spent.changed_at = cause, spent.since
        spent.ranks = max(1, group.participant.group_world_size)
        view = group.reports.view if group.is_alive else None  # a lost group keeps its hosts
        hosts = tuple(sorted({rank.host for rank in view.ranks if rank.host})[:MAX_HOSTS]) if view is not None else ()
        if hosts and hosts != spent.hosts:
            if spent.hosts:
                self._close(key, spent, spent.since)
            spent.hosts = hosts

    def add_report(self, job: str, group: Group | None, report: GroupReport, new: GroupCounts, now: float) -> None:
        """Record a manager's report, or the end of the group's time if the report says that the group is leaving.

        `group` is None if it is unknown. `new` is the increase in the manager's counters since its last report.
        """
        is_leaving = report.down == LEFT or (report.held is not None and report.held.mode is HoldState.LEAVING)
        if group is None or is_leaving:
            self.end_group(job, group.replica_id if group is not None else "", now)
            return
        self.observe_group(job, group, now)
        if (spent := self._spent.get((job, group.replica_id))) is not None:
            steps = self._steps.setdefault(job, _Steps())
            spent.owed_s[Cause.REPEATED if group.step <= steps.repeated_to else Cause.COMPUTE] += new.step_s
            spent.owed_s[Cause.REPEATED] += new.discarded_s
            if new.commits:
                steps.committed = max(steps.committed, group.step - 1)

    def add_quorum(self, job: str, max_step: int) -> None:
        """Record that a quorum is beginning at `max_step`. Steps committed above it will be repeated."""
        steps = self._steps.setdefault(job, _Steps())
        if max_step < steps.committed:
            steps.repeated_to = steps.committed

    def end_group(self, job: str, replica_id: str, now: float) -> None:
        """Stop recording the time of a group that has left cleanly."""
        if (spent := self._spent.pop((job, replica_id), None)) is not None:
            self._close((job, replica_id), spent, now)
            if all(other != job for other, _ in self._spent):
                self._steps.pop(job, None)  # the next run with this name may begin at any step

    def end_job(self, job: str, now: float) -> None:
        """Stop recording the time of the lost groups of a job that has ended. The others still leave."""
        for each, replica_id in [key for key, spent in self._spent.items() if spent.cause is Cause.DOWN]:
            if each == job:
                self.end_group(job, replica_id, now)

    def add_incident(self, summary: IncidentSummary) -> None:
        """Record a new or changed incident."""
        if summary.kind in FAULTS and (summary.id in self._faults or len(self._faults) < MAX_FAULTS):
            self._faults[summary.id] = replace(summary, text=summary.text[:MAX_TEXT_CHARS])

    def take_lines(self, now: float, unix_s: float) -> list[str]:
        """Return the ledger's lines since the last call, for all groups and for new or changed faults."""
        for key, spent in list(self._spent.items()):
            self._close(key, spent, now)
            if spent.cause is Cause.DOWN and now - spent.changed_at > DOWN_KEPT_S:
                del self._spent[key]
        closed, faults = self._closed, self._faults.values()
        self._closed, self._faults = [], {}
        jobs = {job for job, _ in self._spent}
        self._steps = {job: steps for job, steps in self._steps.items() if job in jobs}
        for each in closed:
            each["from"], each["to"] = (round(unix_s - (now - each[name]), 3) for name in ("from", "to"))
        documents = [*closed, *({"job": each.job, "fault": asdict(each)} for each in faults)]
        return [json.dumps(document, separators=(",", ":")) for document in documents]

    def _close(self, key: tuple[str, str], spent: _Spent, at: float) -> None:
        """End the group's current interval, queue its line, and begin the next interval."""
        spent.advance(at)
        spent.divide_wait()
        seconds = {cause: round(seconds, 3) for cause, seconds in spent.seconds.items() if seconds > 0}
        if seconds and len(self._closed) < MAX_CLOSED:
            job, group = key
            document = {"job": job, "group": group, "from": spent.from_at, "to": at}
            self._closed.append({**document, "hosts": spent.hosts, "ranks": spent.ranks, "seconds": seconds})
        spent.seconds, spent.from_at = dict.fromkeys(CAUSES, 0.0), at
