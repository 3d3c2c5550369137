"""Cost of failures over a period, according to the ledger, compared with the cost of restarts from checkpoints.

`add_up` computes all numbers of `lighthouse report`. This module does no I/O.
"""

import json
import math
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean
from typing import NamedTuple

from lighthouse.job.ledger import CAUSES, Cause
from lighthouse_protocol.messages.incident import IncidentSummary, from_document

Seconds = dict[Cause, float]

# Causes that cost time because of failures. Groups wait for lost and healing groups, but also for slow ones.
LOST = (Cause.WAIT, Cause.REPEATED, Cause.HEAL, Cause.RESTART, Cause.DOWN)
COLUMNS = 60
UNKNOWN = "(unknown)"  # host of groups whose ranks do not report one
RESTART_S = 300.0  # used if no fault of the period shows how long a restart takes


@dataclass(frozen=True, slots=True)
class Report:
    """Time that replica groups spent in a period, by cause, and the cost of failures. Seconds are sums over groups."""

    job: str  # empty for all jobs
    since_unix_s: float
    until_unix_s: float
    recorded_s: float  # part of the period for which there are records
    group_s: float  # sum of `seconds`
    groups: float  # mean number of groups
    goodput: float | None
    lost_s: float  # sum over LOST
    seconds: Seconds
    by_host: dict[str, Seconds]
    by_group: dict[str, Seconds]
    faults_by_host: dict[str, int]
    faults_by_group: dict[str, int]
    columns: list[Seconds]  # equal parts of the period, for a graph
    faults: list[IncidentSummary]
    mttf_s: float | None  # recorded time per fault
    notice_s: float | None  # mean time from a fault until it was noticed
    recover_s: float | None  # mean time from a fault until the other groups committed their next step
    back_s: float | None  # mean time from a fault until the lost groups were in a quorum again
    checkpoint_every_s: float
    restart_s: float  # assumed duration of a restart: `back_s`, or RESTART_S if that is None
    checkpoints_lost_s: float
    """Estimated cost of the same faults if each of them restarted all groups from the last checkpoint. A fault then
    costs each group one restart and, on average, half of the interval between two checkpoints. Writing checkpoints
    costs nothing in this model.
    """
    price_per_h: float | None  # of one rank
    money: Seconds | None  # by cause, in the unit of the price


class _Row(NamedTuple):
    job: str
    group: str
    from_s: float
    to_s: float
    hosts: list[str]
    ranks: int
    seconds: Seconds

    def share(self, since: float, until: float) -> float:
        """Return the fraction of this row's interval that lies between `since` and `until`."""
        return max(0.0, min(self.to_s, until) - max(self.from_s, since)) / (self.to_s - self.from_s)


def add_up(
    lines: Iterable[str],
    job: str = "",
    since: float | None = None,
    until: float | None = None,
    *,
    checkpoint_every_s: float = 1800.0,
    price_per_h: float | None = None,
) -> Report:
    """Compute the report for a period from the lines of the ledger.

    Args:
        lines: Lines of the ledger, in any order. Malformed lines, for example one cut off by a crash, are skipped.
        job: Name of the job to report on, or "" for all jobs.
        since: Start of the period in Unix time, by default the start of the oldest record.
        until: End of the period, by default the end of the newest record. Records that cross a limit count in part.
        checkpoint_every_s: Assumed time between checkpoints, for the comparison.
        price_per_h: Price of one rank per hour.
    """
    rows, faults = _parse(lines, job)
    if since is None:
        since = min((row.from_s for row in rows if until is None or row.from_s < until), default=until or 0.0)
    until = max((since, *(row.to_s for row in rows))) if until is None else until
    rows = [row for row in rows if row.share(since, until)]
    faults = [fault for fault in faults if since <= _fault_at(fault) < until]
    has_many_jobs, width = len({row.job for row in rows}) > 1, max(1e-9, until - since) / COLUMNS
    moments = [_fault_at(fault) for fault in faults]
    total, money, columns = _none(), _none(), [_none() for _ in range(COLUMNS)]
    by_host: dict[str, Seconds] = defaultdict(_none)
    by_group: dict[str, Seconds] = defaultdict(_none)
    struck_hosts: set[tuple[str, str]] = set()  # (host, id of the fault)
    struck_groups: set[tuple[str, str]] = set()
    for row in rows:
        name = f"{row.job}: {row.group}" if has_many_jobs else row.group
        share = row.share(since, until)
        _add(total, row, share)
        _add(money, row, share * row.ranks * (price_per_h or 0.0) / 3600)
        _add(by_group[name], row, share)
        hosts = row.hosts or [UNKNOWN]
        for host in hosts:
            _add(by_host[host], row, share / len(hosts))
        for i in range(max(0, int((row.from_s - since) / width)), min(COLUMNS, int((row.to_s - since) / width) + 1)):
            _add(columns[i], row, row.share(since + i * width, since + (i + 1) * width))
        for fault in faults[bisect_left(moments, row.from_s) : bisect_left(moments, row.to_s)]:
            if row.group in fault.groups and row.job == fault.job:
                struck_hosts |= {(host, fault.id) for host in hosts}
                struck_groups.add((name, fault.id))
    group_s, recorded_s = sum(total.values()), _covered(rows, since, until)
    groups, back_s = group_s / recorded_s if recorded_s else 0.0, _mean(fault.back_s for fault in faults)
    restart_s = RESTART_S if back_s is None else back_s
    return Report(
        job=job,
        since_unix_s=since,
        until_unix_s=until,
        recorded_s=recorded_s,
        group_s=group_s,
        groups=groups,
        goodput=total[Cause.COMPUTE] / group_s if group_s else None,
        lost_s=sum(total[cause] for cause in LOST),
        seconds=total,
        by_host=dict(by_host),
        by_group=dict(by_group),
        faults_by_host=_count(by_host, struck_hosts),
        faults_by_group=_count(by_group, struck_groups),
        columns=columns,
        faults=faults,
        mttf_s=recorded_s / len(faults) if faults and recorded_s else None,
        notice_s=_mean(fault.noticed_s for fault in faults),
        recover_s=_mean(fault.step_s for fault in faults),
        back_s=back_s,
        checkpoint_every_s=checkpoint_every_s,
        restart_s=restart_s,
        checkpoints_lost_s=len(faults) * groups * (checkpoint_every_s / 2 + restart_s),
        price_per_h=price_per_h,
        money=None if price_per_h is None else money,
    )


def _none() -> Seconds:
    return dict.fromkeys(CAUSES, 0.0)


def _add(to: Seconds, row: _Row, share: float) -> None:
    for cause, seconds in row.seconds.items():
        to[cause] += seconds * share


def _count(names: Iterable[str], struck: set[tuple[str, str]]) -> dict[str, int]:
    counts = Counter(name for name, _ in struck)
    return {name: counts[name] for name in names}


def _parse(lines: Iterable[str], job: str) -> tuple[list[_Row], list[IncidentSummary]]:
    """Parse lines of the ledger into rows and faults of `job`, or of all jobs if it is "". Sort the faults by time."""
    rows: list[_Row] = []
    faults: dict[tuple[str, str], IncidentSummary] = {}  # by job and id; the last line about a fault counts
    for line in lines:
        try:
            found = json.loads(line)
            if job not in ("", found["job"]):
                continue
            if "fault" in found:
                summary = from_document({**found["fault"], "evidence": (), "missing": ()}).summary
                faults[summary.job, summary.id] = summary
            elif found["to"] > found["from"]:
                seconds = {Cause(cause): float(seconds) for cause, seconds in found["seconds"].items()}
                job_name, group, hosts, ranks = (found[name] for name in ("job", "group", "hosts", "ranks"))
                rows.append(_Row(job_name, group, found["from"], found["to"], hosts, ranks, seconds))
        except (ValueError, TypeError, KeyError, AttributeError):
            continue
    return rows, sorted(faults.values(), key=_fault_at)


def _fault_at(fault: IncidentSummary) -> float:
    return fault.opened_unix_s - fault.noticed_s


def _covered(rows: Iterable[_Row], since: float, until: float) -> float:
    """Return the number of seconds of the period that at least one row covers."""
    covered_s, end = 0.0, -math.inf
    for from_s, to_s in sorted({(row.from_s, row.to_s) for row in rows}):
        covered_s += max(0.0, min(to_s, until) - max(from_s, since, end))
        end = max(end, to_s)
    return covered_s


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None
