"""How long the survivors wait when one of three replica groups goes away.

Real daemons, one rank process a group with steps of 20 ms and no torch (support/training_rank.py). A loss is over when
the last of the survivors has committed a step under a quorum without the lost one. torchft's released daemons beside
ours, over fewer runs, since each of theirs lasts.
"""

import contextlib
import math
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from benchmarks.support.bars import Bar, conclude
from benchmarks.support.children import Children
from benchmarks.support.cluster import (
    NAMES,
    STEP_S,
    Cluster,
    Event,
    kill_group,
    kill_rank,
    pull_cable,
    stop_group,
    wait_until,
)
from benchmarks.support.daemons import OURS, TORCHFT
from benchmarks.support.figures import machine, machine_text, spread, table, write_json
from benchmarks.support.network import SecondHost, is_possible
from benchmarks.support.torchft_native import MISSING, released_version

VICTIM = NAMES[-1]
SURVIVORS = NAMES[:-1]
DEFAULT_TIMEOUT_S = 5.0
SHORT_TIMEOUT_S = 2.0
GIVE_UP_S = 8.0


@dataclass(frozen=True, slots=True)
class Limit:
    """What a bar asks of one moment over all runs."""

    moment: str
    largest_s: float
    median_s: float = math.inf


@dataclass(frozen=True, slots=True)
class Loss:
    """A fault that takes group c away."""

    key: str
    name: str
    strike: Callable[[Cluster, str], None]
    heartbeat_timeout_s: float
    limit: Limit
    is_on_second_host: bool = False


@dataclass(frozen=True, slots=True)
class Run:
    """Seconds from the fault until the last survivor was there; infinite: not within GIVE_UP_S."""

    noticed_s: float
    quorum_s: float
    committed_s: float


SOON = Limit("committed_s", largest_s=0.1, median_s=0.06)
NOTICED = Limit("noticed_s", largest_s=2.5)
LOSSES = (
    Loss("kill-group", "SIGKILL of a group", kill_group, DEFAULT_TIMEOUT_S, SOON),
    Loss("kill-rank", "SIGKILL of a rank", kill_rank, DEFAULT_TIMEOUT_S, SOON),
    Loss("stop", "SIGSTOP of a group", stop_group, SHORT_TIMEOUT_S, NOTICED),
    Loss("vanish", "a host vanishes", pull_cable, SHORT_TIMEOUT_S, NOTICED, is_on_second_host=True),
)
MOMENTS = ("noticed_s", "quorum_s", "committed_s")


def run_loss(loss: Loss, product: str, runs: int) -> list[Run]:
    with Children() as children, contextlib.ExitStack() as stack:
        host = stack.enter_context(SecondHost()) if loss.is_on_second_host else None
        cluster = Cluster(children, product, loss.heartbeat_timeout_s, host)
        return [_strike(loss, cluster) for _ in range(runs)]


def _strike(loss: Loss, cluster: Cluster) -> Run:
    survivors = [cluster.groups[name] for name in SURVIVORS]
    time.sleep(random.uniform(0, 2 * STEP_S))  # at any moment of a step
    struck_at = time.monotonic()
    loss.strike(cluster, VICTIM)

    def first(what: str) -> float:
        found = (_first(group.since(struck_at), what) for group in survivors)
        return max((at - struck_at for at in found), default=math.inf)

    with contextlib.suppress(TimeoutError):
        wait_until(lambda: first("commit") < math.inf, GIVE_UP_S, "the survivors go on")
    run = Run(min(first("revoked"), first("quorum")), first("quorum"), first("commit"))
    cluster.replace(VICTIM)
    return run


def _first(events: Iterable[Event], what: str) -> float:
    """When a rank was told of the loss, or came so far without the lost one."""
    found = (e.at for e in events if e.what == what and (what == "revoked" or e.size == len(SURVIVORS)))
    return next(found, math.inf)


def measure(keys: Sequence[str], runs: int, torchft_runs: int) -> list[dict[str, Any]]:
    results: list[dict[str, Any]] = []
    for loss in LOSSES:
        if loss.key not in keys:
            continue
        if loss.is_on_second_host and not is_possible():
            click.echo(f"{loss.name}: not measured, since it takes the right to administer the network", err=True)
            continue
        results.append(_result(loss, OURS, runs))
        if released_version() and torchft_runs:
            results.append(_result(loss, TORCHFT, torchft_runs))
    return results


def _result(loss: Loss, product: str, runs: int) -> dict[str, Any]:
    found = run_loss(loss, product, runs)
    return {"fault": loss.key, "product": product, "heartbeat_timeout_s": loss.heartbeat_timeout_s, "runs": found}


def render(results: Sequence[Mapping[str, Any]]) -> str:
    header = ["fault (heartbeat timeout), daemons", "runs", "noticed ms", "new quorum ms", "next committed step ms"]
    return table(header, [_cells(row) for row in results])


def _cells(row: Mapping[str, Any]) -> list[str]:
    loss = next(loss for loss in LOSSES if loss.key == row["fault"])
    name = f"{loss.name} ({loss.heartbeat_timeout_s:g} s), {'ours' if row['product'] == OURS else 'torchft 0.2'}"
    return [name, str(len(row["runs"])), *(_moment(row["runs"], moment) for moment in MOMENTS)]


def _moment(runs: Sequence[Run], moment: str) -> str:
    values = [getattr(run, moment) for run in runs]
    return f"> {GIVE_UP_S * 1e3:.0f}" if math.inf in values else spread(values).text(0, 1e3)


def bars(results: Sequence[Mapping[str, Any]]) -> list[Bar]:
    found: list[Bar] = []
    for loss in LOSSES:
        for row in results:
            if row["fault"] == loss.key and row["product"] == OURS:
                found += _bars(loss, [getattr(run, loss.limit.moment) for run in row["runs"]])
    return found


def _bars(loss: Loss, values: Sequence[float]) -> list[Bar]:
    what = f"{loss.name} -> {'noticed' if loss.limit is NOTICED else 'next committed step'}"
    largest = Bar(f"{what}, largest of {len(values)}", max(values), loss.limit.largest_s, "s")
    median = Bar(f"{what}, median", spread(values).median, loss.limit.median_s, "s")
    return [largest] if math.isinf(loss.limit.median_s) else [median, largest]


@click.command()
@click.option("--faults", default=",".join(loss.key for loss in LOSSES), show_default=True, help="Which.")
@click.option("--runs", type=click.IntRange(1), default=20, show_default=True, help="Of each fault.")
@click.option("--torchft-runs", type=click.IntRange(0), default=3, show_default=True, help="Of each fault.")
@click.option("--quick", is_flag=True, help="Seconds instead of minutes: two runs of the kills, ours alone.")
@click.option("--check", is_flag=True, help="End with status 1 if a bar is missed.")
@click.option("--json", "path", type=click.Path(dir_okay=False, path_type=Path), help="Write everything there too.")
def main(faults: str, runs: int, torchft_runs: int, quick: bool, check: bool, path: Path | None) -> None:
    """How long the survivors wait when a replica group goes away, beside torchft's."""
    if quick:
        faults, runs, torchft_runs = "kill-group,kill-rank", 2, 0
    found = machine()
    click.echo(machine_text(found))
    if found["torchft"] is None:
        click.echo(MISSING, err=True)
    results = measure(faults.split(","), runs, torchft_runs)
    click.echo(render(results))
    write_json(path, {"benchmark": "recovery", "machine": found, "results": results})
    conclude(bars(results), is_checked=check)


if __name__ == "__main__":
    main()
