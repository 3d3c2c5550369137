"""What failures cost: the sums of the ledger's lines over a period, and a comparison with checkpoints and restarts.

All numbers of `lighthouse report` come from `add_up`. No I/O.
"""

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from lighthouse.job.ledger import CAUSES, Cause

Seconds = dict[Cause, float]

# Causes that cost time because of failures. Waits are included: groups wait for lost and healing ones, and for slow ones.
LOST = (Cause.WAIT, Cause.REPEATED, Cause.HEAL, Cause.RESTART, Cause.DOWN)
COLUMNS = 60  # of the graph over time
RESTART_S = 300.0  # if no fault of the period shows how long a restart takes


@dataclass(frozen=True, slots=True)
class Fault:
    """An incident that interrupted training. Times are seconds since the fault, and None if that has not happened."""

    id: str
    kind: str
    text: str
    groups: tuple[str, ...]
    at_unix_s: float
    noticed_s: float
    step_s: float | None  # the other groups committed their next step
    back_s: float | None  # the lost groups were in a quorum again


@dataclass(frozen=True, slots=True)
class Share:
    """Time of one host or replica group."""

    seconds: Seconds
    faults: int


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """Cost of the same faults without Lighthouse, if every fault restarts all groups from the last checkpoint.

    Each fault costs every group half of the interval between two checkpoints and one restart. On average a fault
    strikes in the middle of an interval. The time to write checkpoints is left out, and faults do not overlap.
    """

    every_s: float
    restart_s: float
    is_restart_measured: bool
    lost_s: float  # summed over groups


@dataclass(frozen=True, slots=True)
class Report:
    """Costs of a period. Seconds are summed over replica groups, except where they describe a period or one fault."""

    job: str  # "" for all jobs
    since_unix_s: float
    until_unix_s: float
    recorded_s: float  # part of the period for which there are records
    group_s: float  # time of all groups, the sum of `seconds`
    groups: float  # mean number of groups
    seconds: Seconds
    lost_s: float  # sum over LOST
    commits: int  # summed over groups
    hosts: dict[str, Share]
    by_group: dict[str, Share]
    columns: list[tuple[float, Seconds]]  # time from each moment (Unix time) on, of equal length
    faults: list[Fault]
    mttf_s: float | None  # recorded time per fault
    mttr_s: float | None  # mean time from a fault until the other groups committed their next step
    back_s: float | None  # mean time from a loss until the lost groups were in a quorum again
    notice_s: float | None
    checkpoints: Checkpoints
    price_per_h: float | None = None  # of one rank
    money: dict[Cause, float] = field(default_factory=dict[Cause, float])

    @property
    def goodput(self) -> float | None:
        return self.seconds[Cause.COMPUTE] / self.group_s if self.group_s else None

    @property
    def money_lost(self) -> float:
        return sum(self.money.get(cause, 0.0) for cause in LOST)

    @property
    def column_s(self) -> float:
        return (self.until_unix_s - self.since_unix_s) / max(1, len(self.columns))


@dataclass(slots=True)
class _Interval:
    from_s: float
    to_s: float
    job: str
    rows: list[tuple[str, tuple[str, ...], int, int, Seconds]]


def add_up(
    lines: Iterable[str],
    job: str = "",
    since: float | None = None,
    until: float | None = None,
    *,
    checkpoint_every_s: float = 1800.0,
    price_per_h: float | None = None,
) -> Report:
    """Sum the lines of `job`, or of all jobs if it is empty.

    Args:
        lines: Lines of the ledger in any order. Malformed lines, such as one that a crash has cut off, are skipped.
        job: The job.
        since: Begin of the period in Unix time. None for the oldest record.
        until: End of the period. None for the newest record. An interval that crosses a limit counts in proportion.
        checkpoint_every_s: Interval of the checkpoints with which the costs are compared.
        price_per_h: Price of one rank per hour.
    """
    intervals, known = _parse(lines, job)
    since = min((each.from_s for each in intervals), default=0.0) if since is None else since
    until = max((each.to_s for each in intervals), default=since) if until is None else until
    intervals = [each for each in intervals if each.from_s < until and each.to_s > since]
    several = len({each.job for each in intervals}) > 1
    faults = sorted(
        (fault for _, fault in known if since <= fault.at_unix_s < until), key=lambda fault: fault.at_unix_s
    )
    total, ranks_s, commits = _none(), _none(), 0.0
    hosts: dict[str, Seconds] = defaultdict(_none)
    groups: dict[str, Seconds] = defaultdict(_none)
    struck: dict[str, set[str]] = defaultdict(set)  # ids of faults, by host and by group
    width = (until - since) / COLUMNS
    columns = [_none() for _ in range(COLUMNS)] if width > 0 else []
    for each in intervals:
        share = _overlap(each, since, until) / (each.to_s - each.from_s)
        inside = [f for f in faults if each.from_s <= f.at_unix_s < each.to_s]
        first, last = (max(0, min(COLUMNS - 1, int((at - since) / width))) for at in (each.from_s, each.to_s))
        shares = [_overlap(each, since + i * width, since + (i + 1) * width) for i in range(first, last + 1)]
        shares = [part / (each.to_s - each.from_s) for part in shares]
        for name, on, ranks, steps, seconds in each.rows:
            label = f"{each.job}: {name}" if several else name
            commits += steps * share
            for cause, spent_s in seconds.items():
                total[cause] += spent_s * share
                ranks_s[cause] += spent_s * share * ranks
                groups[label][cause] += spent_s * share
                for host in on:
                    hosts[host][cause] += spent_s * share / len(on)
                for i, part in enumerate(shares, first):
                    columns[i][cause] += spent_s * part
            for fault in inside:
                if name in fault.groups:
                    struck[f"group {label}"].add(fault.id)
                    for host in on:
                        struck[f"host {host}"].add(fault.id)
    group_s, recorded_s = sum(total.values()), _covered(intervals, since, until)
    mean_groups = group_s / recorded_s if recorded_s else 0.0
    back_s = _mean(fault.back_s for fault in faults)
    restart_s = RESTART_S if back_s is None else back_s
    lost_s = len(faults) * mean_groups * (checkpoint_every_s / 2 + restart_s)
    return Report(
        job=job,
        since_unix_s=since,
        until_unix_s=until,
        recorded_s=recorded_s,
        group_s=group_s,
        groups=mean_groups,
        seconds=total,
        lost_s=sum(total[cause] for cause in LOST),
        commits=round(commits),
        hosts={name: Share(hosts[name], len(struck[f"host {name}"])) for name in sorted(hosts)},
        by_group={name: Share(groups[name], len(struck[f"group {name}"])) for name in sorted(groups)},
        columns=[(since + i * width, seconds) for i, seconds in enumerate(columns)],
        faults=faults,
        mttf_s=recorded_s / len(faults) if faults and recorded_s else None,
        mttr_s=_mean(fault.step_s for fault in faults),
        back_s=back_s,
        notice_s=_mean(fault.noticed_s for fault in faults),
        checkpoints=Checkpoints(checkpoint_every_s, restart_s, back_s is not None, lost_s),
        price_per_h=price_per_h,
        money={} if price_per_h is None else {cause: price_per_h * s / 3600 for cause, s in ranks_s.items()},
    )


def _none() -> Seconds:
    return dict.fromkeys(CAUSES, 0.0)


def _parse(lines: Iterable[str], job: str) -> tuple[list[_Interval], list[tuple[str, Fault]]]:
    intervals: list[_Interval] = []
    faults: dict[str, tuple[str, Fault]] = {}  # the last line about a fault counts
    for line in lines:
        try:
            document = json.loads(line)
            if job not in ("", document["job"]):
                continue
            if "fault" in document:
                fault = _fault(document["fault"])
                faults[fault.id] = document["job"], fault
            elif document["to"] > document["from"]:
                rows = [_row(name, row) for name, row in document["groups"]]
                intervals.append(_Interval(document["from"], document["to"], document["job"], rows))
        except (ValueError, TypeError, KeyError, AttributeError):
            continue
    return intervals, list(faults.values())


def _row(name: str, row: Any) -> tuple[str, tuple[str, ...], int, int, Seconds]:
    hosts, ranks, commits, seconds = row
    return name, tuple(hosts), ranks, commits, dict(zip(CAUSES, map(float, seconds), strict=True))


def _fault(document: Mapping[str, Any]) -> Fault:
    groups = {suspect.rpartition("/")[0] or suspect for suspect in document["suspects"]}
    return Fault(
        id=document["id"],
        kind=document["kind"],
        text=document["text"],
        groups=tuple(sorted(groups)),
        at_unix_s=document["at"],
        noticed_s=document["noticed_s"],
        step_s=document["step_s"],
        back_s=document["back_s"],
    )


def _overlap(interval: _Interval, since: float, until: float) -> float:
    return max(0.0, min(interval.to_s, until) - max(interval.from_s, since))


def _covered(intervals: Iterable[_Interval], since: float, until: float) -> float:
    """Return the length of the union of the intervals within the period."""
    covered_s, end = 0.0, -math.inf
    for each in sorted(intervals, key=lambda each: each.from_s):
        from_s, to_s = max(each.from_s, since, end), min(each.to_s, until)
        covered_s += max(0.0, to_s - from_s)
        end = max(end, to_s)
    return covered_s


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None
