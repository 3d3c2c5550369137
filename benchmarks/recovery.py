"""Measure how long the survivors wait after the loss of one of three replica groups.

The daemons are real. Each group has one rank process without torch, with steps of 20 ms (support/training_rank.py).
torchft's released daemons run in comparison, in fewer runs because each takes long. A loss ends when the last survivor
has committed a step under a quorum without the lost group.
"""

import contextlib
import math
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from signal import SIGKILL, SIGSTOP
from typing import Any

import click

from benchmarks.support.children import Children
from benchmarks.support.cluster import NAMES, STEP_S, Cluster, Event, Group, wait_until
from benchmarks.support.daemons import OURS, TORCHFT
from benchmarks.support.figures import Bar, Measured, benchmark, percentile, spread, table_of
from benchmarks.support.torchft_native import released_version

VICTIM = NAMES[-1]
SURVIVORS = NAMES[:-1]
GIVE_UP_S = 8.0
NAMED = {OURS: "ours", TORCHFT: "torchft 0.2"}
HUNDRED = 100
"""One run in this number may miss a bar."""


@dataclass(frozen=True, slots=True)
class Loss:
    """A fault of the victim, and its bars, by default those of a kill."""

    name: str
    strike: Callable[[Group], None]
    heartbeat_timeout_s: float = 5.0
    moment: str = "committed_s"  # field of `Run` to which the bars apply
    largest_s: float = 0.1
    median_s: float = 0.06


LOSSES = {
    "kill-group": Loss("SIGKILL of a group", lambda group: group.signal(SIGKILL)),
    "kill-rank": Loss("SIGKILL of a rank", lambda group: group.rank.signal(SIGKILL)),
    "stop": Loss("SIGSTOP of a group", lambda group: group.signal(SIGSTOP), 2.0, "noticed_s", 2.5, math.inf),
}


@dataclass(frozen=True, slots=True)
class Run:
    """Seconds from the fault until the last survivor reached each point, or infinity after GIVE_UP_S."""

    noticed_s: float
    quorum_s: float
    committed_s: float


def run_loss(key: str, product: str, runs: int) -> dict[str, Any]:
    loss = LOSSES[key]
    with Children() as children:
        cluster = Cluster(children, product, loss.heartbeat_timeout_s)
        cluster.wait_training()
        done = [lose(loss, cluster) for _ in range(runs)]
    return {"fault": key, "product": product, "heartbeat_timeout_s": loss.heartbeat_timeout_s, "runs": done}


def lose(loss: Loss, cluster: Cluster) -> Run:
    """Lose the victim at a random moment of a step, and restart it afterwards."""
    survivors = [cluster.groups[name] for name in SURVIVORS]
    time.sleep(random.uniform(0, 2 * STEP_S))
    struck_at = time.monotonic()
    loss.strike(cluster.groups[VICTIM])

    def first(what: str) -> float:
        return max(_first(group.since(struck_at), what) - struck_at for group in survivors)

    with contextlib.suppress(TimeoutError):
        wait_until(lambda: first("commit") < math.inf, GIVE_UP_S, "the survivors go on")
    run = Run(min(first("revoked"), first("quorum")), first("quorum"), first("commit"))
    cluster.replace(VICTIM)
    return run


def _first(events: Iterable[Event], what: str) -> float:
    """Return when a rank received the revoke, or first reported `what` in a quorum of the survivors."""
    found = (e.at for e in events if e.what == what and (what == "revoked" or e.size == len(SURVIVORS)))
    return next(found, math.inf)


def measure(keys: Sequence[str], runs: int, torchft_runs: int) -> list[dict[str, Any]]:
    counts = {OURS: runs, TORCHFT: torchft_runs if released_version() else 0}
    return [run_loss(key, product, n) for key in LOSSES if key in keys for product, n in counts.items() if n]


COLUMNS: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "fault (heartbeat timeout), daemons": lambda row: (
        f"{LOSSES[row['fault']].name} ({row['heartbeat_timeout_s']:g} s), {NAMED[row['product']]}"
    ),
    "runs": lambda row: str(len(row["runs"])),
    "noticed ms": lambda row: _moment(_values(row, "noticed_s")),
    "new quorum ms": lambda row: _moment(_values(row, "quorum_s")),
    "next committed step ms": lambda row: _moment(_values(row, "committed_s")),
}


def _moment(values: Sequence[float]) -> str:
    return f"> {GIVE_UP_S * 1e3:.0f}" if math.inf in values else spread(values).text(0, 1e3)


def _values(row: Mapping[str, Any], moment: str) -> list[float]:
    return [getattr(run, moment) for run in row["runs"]]


def bars(results: Sequence[Mapping[str, Any]]) -> list[Bar]:
    found: list[Bar] = []
    for row in results:
        if row["product"] != OURS:
            continue
        loss = LOSSES[row["fault"]]
        values = _values(row, loss.moment)
        what = f"{loss.name} -> {'noticed' if loss.moment == 'noticed_s' else 'next committed step'}"
        which = "largest" if len(values) < HUNDRED else "99th percentile"
        if loss.median_s < math.inf:
            found.append(Bar(f"{what}, median", spread(values).median, loss.median_s, "s"))
        found.append(Bar(f"{what}, {which} of {len(values)}", percentile(values, 0.99), loss.largest_s, "s"))
    return found


@benchmark("Seconds instead of minutes: two runs of the kills, ours alone.", beside_torchft=True)
@click.option("--faults", default=",".join(LOSSES), show_default=True, help="Faults to measure.")
@click.option("--runs", type=click.IntRange(1), default=20, show_default=True, help="Runs of each fault.")
@click.option("--torchft-runs", type=click.IntRange(0), default=3, show_default=True, help="The same, with torchft.")
def main(faults: str, runs: int, torchft_runs: int, quick: bool) -> Measured:
    """Measure how long the survivors wait after the loss of a replica group, with our daemons and torchft's."""
    if quick:
        faults, runs, torchft_runs = "kill-group,kill-rank", 2, 0
    results = measure(faults.split(","), runs, torchft_runs)
    return table_of(COLUMNS, results), bars(results), {"results": results}


if __name__ == "__main__":
    main()
