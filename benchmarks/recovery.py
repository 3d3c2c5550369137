"""How long the survivors wait when one of three replica groups goes away.

Real daemons, one rank process a group with steps of 20 ms and no torch (support/training_rank.py). torchft's released
daemons beside ours, over fewer runs, since each of theirs lasts. faults.py is the same with real training.
With --tls ours takes turns with ours by TLS between managers and lighthouse.
"""

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from benchmarks.support import losses
from benchmarks.support.bars import Bar, check_option, conclude
from benchmarks.support.children import Children
from benchmarks.support.cluster import Cluster, kill_group, kill_rank, pull_cable, stop_group
from benchmarks.support.daemons import OURS, OURS_BY_TLS, TORCHFT
from benchmarks.support.figures import json_option, show_machine, write_json
from benchmarks.support.losses import VICTIM, Limit, Loss, Run, lose, result
from benchmarks.support.network import SecondHost, is_possible
from benchmarks.support.torchft_native import released_version

DEFAULT_TIMEOUT_S = 5.0
SHORT_TIMEOUT_S = 2.0
TURN_RUNS = 5

SOON = Limit("committed_s", largest_s=0.1, median_s=0.06)
NOTICED = Limit("noticed_s", largest_s=2.5)
LOSSES = (
    Loss("kill-group", "SIGKILL of a group", kill_group, DEFAULT_TIMEOUT_S, SOON),
    Loss("kill-rank", "SIGKILL of a rank", kill_rank, DEFAULT_TIMEOUT_S, SOON),
    Loss("stop", "SIGSTOP of a group", stop_group, SHORT_TIMEOUT_S, NOTICED),
    Loss("vanish", "a host vanishes", pull_cable, SHORT_TIMEOUT_S, NOTICED, is_on_second_host=True),
)


def run_loss(loss: Loss, product: str, runs: int) -> list[Run]:
    with Children() as children, contextlib.ExitStack() as stack:
        host = stack.enter_context(SecondHost()) if loss.is_on_second_host else None
        cluster = Cluster(children, product, loss.heartbeat_timeout_s, host)
        return [_strike(loss, cluster) for _ in range(runs)]


def _strike(loss: Loss, cluster: Cluster) -> Run:
    run = lose(loss, cluster)
    cluster.replace(VICTIM)
    return run


def run_in_turn(loss: Loss, products: Sequence[str], runs: int) -> dict[str, list[Run]]:
    """Of each, TURN_RUNS at a time, so that all see the same of what else the machine does."""
    done: dict[str, list[Run]] = {product: [] for product in products}
    for begun in range(0, runs, TURN_RUNS):
        for product in products:
            done[product] += run_loss(loss, product, min(TURN_RUNS, runs - begun))
    return done


def measure(keys: Sequence[str], runs: int, torchft_runs: int, *, with_tls: bool = False) -> list[dict[str, Any]]:
    products = (OURS, OURS_BY_TLS) if with_tls else (OURS,)
    results: list[dict[str, Any]] = []
    for loss in LOSSES:
        if loss.key not in keys:
            continue
        if loss.is_on_second_host and not is_possible():
            click.echo(f"{loss.name}: not measured, since it takes the right to administer the network", err=True)
            continue
        done = run_in_turn(loss, products, runs) if with_tls else {OURS: run_loss(loss, OURS, runs)}
        results += [result(loss, product, done[product]) for product in products]
        if released_version() and torchft_runs:
            results.append(result(loss, TORCHFT, run_loss(loss, TORCHFT, torchft_runs)))
    return results


def render(results: Sequence[Mapping[str, Any]]) -> str:
    return losses.render(LOSSES, results)


def bars(results: Sequence[Mapping[str, Any]]) -> list[Bar]:
    return losses.bars(LOSSES, results)


@click.command()
@click.option("--faults", default=",".join(loss.key for loss in LOSSES), show_default=True, help="Which.")
@click.option("--runs", type=click.IntRange(1), default=20, show_default=True, help="Of each fault.")
@click.option("--torchft-runs", type=click.IntRange(0), default=3, show_default=True, help="Of each fault.")
@click.option("--quick", is_flag=True, help="Seconds instead of minutes: two runs of the kills, ours alone.")
@click.option("--tls", "with_tls", is_flag=True, help="Also with TLS, in turn with ours.")
@check_option
@json_option
def main(
    faults: str, runs: int, torchft_runs: int, quick: bool, with_tls: bool, check: bool, path: Path | None
) -> None:
    """How long the survivors wait when a replica group goes away, beside torchft's."""
    if quick:
        faults, runs, torchft_runs = "kill-group,kill-rank", 2, 0
    found = show_machine(beside_torchft=True)
    results = measure(faults.split(","), runs, torchft_runs, with_tls=with_tls)
    click.echo(render(results))
    write_json(path, {"benchmark": "recovery", "machine": found, "results": results})
    conclude(bars(results), is_checked=check)


if __name__ == "__main__":
    main()
