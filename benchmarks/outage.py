"""Measure the effect of a lighthouse outage on three replica groups that train under a standing quorum.

The cluster is the same as in recovery.py. If the lighthouse is paused, a hundred more managers of another job
(support/session_crowd.py) must survive the outage, too.
"""

import itertools
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import click

from benchmarks.support.children import Child, Children
from benchmarks.support.cluster import Cluster, wait_until
from benchmarks.support.daemons import OURS, is_standing
from benchmarks.support.figures import Bar, Measured, benchmark, spread, table_of

HEARTBEAT_TIMEOUT_S = 5.0
AWAY_S = 2.0
PAUSE_S = 10.0
QUIET_S = 2.0
RETURN_TIMEOUT_S = 30.0
CROWD = 100
CROWD_STEP_S = 0.25
MARGIN_S = 1.0
LONGER_S = 0.05


@dataclass(frozen=True, slots=True)
class Outage:
    """A kind of outage."""

    key: str
    name: str
    strike: Callable[[Cluster], float]  # returns after the outage, with the time of its beginning
    runs: int
    has_crowd: bool = False
    is_hidden: bool = False  # shorter than the lease: no step may be longer


@dataclass(frozen=True, slots=True)
class Run:
    """Measurements of one outage."""

    away_s: float
    standing_s: float
    median_step_s: float
    longest_before_s: float  # longest step in a period before the outage
    longest_step_s: float
    discards: int
    quorums: int
    others_lost: int | None  # number of revokes and new quorums in the crowd; None without a crowd


def kill(cluster: Cluster) -> float:
    return cluster.kill_lighthouse(AWAY_S)


def pause(cluster: Cluster) -> float:
    paused_at = time.monotonic()
    cluster.lighthouse.child.signal(signal.SIGSTOP)
    time.sleep(PAUSE_S)
    cluster.lighthouse.child.signal(signal.SIGCONT)
    return paused_at


OUTAGES = (
    Outage("kill", f"SIGKILL, back after {AWAY_S:g} s", kill, runs=20, is_hidden=True),
    Outage("pause", f"SIGSTOP for {PAUSE_S:g} s", pause, runs=3, has_crowd=True),
)


def run_outage(outage: Outage, runs: int, crowd_size: int) -> list[Run]:
    with Children() as children:
        cluster = Cluster(children, OURS, HEARTBEAT_TIMEOUT_S)
        cluster.wait_training()
        crowd = _start_crowd(children, cluster, crowd_size) if outage.has_crowd else None
        return [_strike(outage, cluster, crowd) for _ in range(runs)]


def _start_crowd(children: Children, cluster: Cluster, size: int) -> Child:
    crowd = children.start("the crowd", "-m", "benchmarks.support.session_crowd", cluster.lighthouse.address, "crowd")
    crowd.ask(what="pace", step_s=CROWD_STEP_S)
    crowd.ask(what="add", count=size)
    return crowd


def _strike(outage: Outage, cluster: Cluster, crowd: Child | None) -> Run:
    time.sleep(2 * QUIET_S)
    crowd_before = crowd.ask(what="report") if crowd else None
    struck_at = outage.strike(cluster)
    back_at = time.monotonic()
    wait_until(lambda: is_standing(cluster.lighthouse), RETURN_TIMEOUT_S, "the quorum stands again")
    standing_at = time.monotonic()
    time.sleep(QUIET_S)
    events = [event for group in cluster.groups.values() for event in group.since(struck_at)]
    steps = _steps(cluster, struck_at, time.monotonic())
    others_lost = None
    if crowd is not None and crowd_before is not None:
        crowd_after = crowd.ask(what="report")
        others_lost = crowd_after["revokes"] + (crowd_before["quorums"] != crowd_after["quorums"])
    return Run(
        away_s=back_at - struck_at,
        standing_s=standing_at - struck_at,
        median_step_s=spread(steps).median,
        longest_before_s=max(_steps(cluster, struck_at - QUIET_S, struck_at)),
        longest_step_s=max(steps),
        discards=sum(event.what == "discard" for event in events),
        quorums=len({event.quorum_id for event in events if event.what == "commit"}),
        others_lost=others_lost,
    )


def _steps(cluster: Cluster, since: float, until: float) -> list[float]:
    """Return the seconds between commits, of all ranks, for the steps that ended in that period."""
    steps: list[float] = []
    for group in cluster.groups.values():
        moments = [event.at for event in group.commits(since - MARGIN_S) if event.at <= until]
        steps += [later - earlier for earlier, later in itertools.pairwise(moments) if later >= since]
    return steps


COLUMNS: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "lighthouse": lambda row: row["name"],
    "runs": lambda row: str(len(row["runs"])),
    "away s": lambda row: spread([run.away_s for run in row["runs"]]).text(1),
    "stands again after s": lambda row: spread([run.standing_s for run in row["runs"]]).text(1),
    "median step ms": lambda row: spread([run.median_step_s for run in row["runs"]]).text(0, 1e3),
    "longest before ms": lambda row: spread([run.longest_before_s for run in row["runs"]]).text(0, 1e3),
    "longest step ms": lambda row: spread([run.longest_step_s for run in row["runs"]]).text(0, 1e3),
    "discards": lambda row: str(sum(run.discards for run in row["runs"])),
    "quorums": lambda row: str(max(run.quorums for run in row["runs"])),
    "others lost": lambda row: str(sum(lost)) if (lost := _others_lost(row["runs"])) else "-",
}


def _others_lost(runs: Sequence[Run]) -> list[int]:
    return [run.others_lost for run in runs if run.others_lost is not None]


def bars(name: str, runs: Sequence[Run], *, is_hidden: bool) -> list[Bar]:
    found = [
        Bar(f"{name}: quorums in a run", max(run.quorums for run in runs), 1),
        Bar(f"{name}: discarded steps", sum(run.discards for run in runs), 0),
    ]
    if is_hidden:
        longer_s = max(run.longest_step_s - run.median_step_s for run in runs)
        found.append(Bar(f"{name}: longest step above the median, largest of {len(runs)}", longer_s, LONGER_S, "s"))
    if lost := _others_lost(runs):
        found.append(Bar(f"{name}: of the others, lost", sum(lost), 0))
    return found


@benchmark("Seconds instead of minutes: one kill.")
@click.option(
    "--faults", default=",".join(outage.key for outage in OUTAGES), show_default=True, help="Outages to measure."
)
@click.option("--runs", type=click.IntRange(1), help="Runs of each outage. Default: 20 of kill, 3 of pause.")
def main(faults: str, runs: int | None, quick: bool) -> Measured:
    """Measure the effect of a lighthouse outage on groups that train."""
    if quick:
        faults, runs = "kill", 1
    results: list[dict[str, Any]] = [
        {"name": each.name, "is_hidden": each.is_hidden, "runs": run_outage(each, runs or each.runs, CROWD)}
        for each in OUTAGES
        if each.key in faults.split(",")
    ]
    return table_of(COLUMNS, results), [bar for row in results for bar in bars(**row)], {"results": results}


if __name__ == "__main__":
    main()
