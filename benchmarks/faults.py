"""How long the survivors' real training stands still when one of three replica groups goes away.

A small transformer under DDP on gloo, a rank a group (support/ddp_rank.py), and real daemons; all groups meet over one
store, which lives on. The victim is killed in the middle of a backward pass, while the others wait for its gradients:
with its manager or alone, with nothing forked or with two forked DataLoader workers that outlive it and hold its
connections. Or it is stopped.

torchft is not beside it: its DistributedDataParallel ends with the first collective that fails on gloo.
"""

import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from torch.distributed import TCPStore

from benchmarks.support import losses
from benchmarks.support.bars import Bar, check_option, conclude
from benchmarks.support.children import Children
from benchmarks.support.cluster import NAMES, START_TIMEOUT_S, Cluster, kill_group, kill_rank, stop_group, wait_until
from benchmarks.support.daemons import HERE, OURS
from benchmarks.support.figures import json_option, show_machine, write_json
from benchmarks.support.losses import SURVIVORS, VICTIM, Limit, Loss, Run, lose, result
from benchmarks.support.orphans import Orphans

WORKERS = 2
MOMENTS = ("noticed_s", "committed_s")


def hold_backward(cluster: Cluster, name: str) -> None:
    """Until the group is in the middle of a backward pass, and will not get on."""
    group, told_at = cluster.groups[name], time.monotonic()
    group.rank.send()
    wait_until(
        lambda: any(e.what == "backward" for e in group.since(told_at)), START_TIMEOUT_S, "it computes gradients"
    )
    losses.any_moment(cluster, name)


KILLED = Limit("committed_s", largest_s=0.5)
STOPPED = Limit("committed_s", largest_s=3.0)
LOSSES = (
    Loss("kill", "SIGKILL of a group", kill_group, 5.0, KILLED, prepare=hold_backward),
    Loss(
        "kill-workers",
        "SIGKILL of a group, with workers",
        kill_group,
        5.0,
        KILLED,
        prepare=hold_backward,
        workers=WORKERS,
    ),
    Loss(
        "kill-rank", "SIGKILL of a rank, with workers", kill_rank, 5.0, KILLED, prepare=hold_backward, workers=WORKERS
    ),
    Loss("stop", "SIGSTOP of a group", stop_group, 2.0, STOPPED),
)


def run_loss(loss: Loss, runs: int) -> list[Run]:
    store = TCPStore(HERE, 0, is_master=True, wait_for_workers=False)
    with Children() as children:
        cluster = Cluster(
            children,
            OURS,
            loss.heartbeat_timeout_s,
            program="benchmarks.support.ddp_rank",
            options={"workers": loss.workers},
            store=f"{HERE}:{store.port}",
        )
        try:
            return [_strike(loss, cluster) for _ in range(runs)]
        finally:
            _end_workers(cluster)


def _strike(loss: Loss, cluster: Cluster) -> Run:
    """Raises RuntimeError where the victim's workers did not hold what they were to hold."""
    pid = cluster.groups[VICTIM].rank.pid
    wait_until(lambda: len(Orphans(pid).running()) == loss.workers, START_TIMEOUT_S, "its workers run")
    with Orphans(pid) as orphans:
        peers = [cluster.groups[name].rank.pid for name in SURVIVORS]
        if len(orphans.connected_to(peers)) != loss.workers:
            raise RuntimeError("a worker does not hold its parent's connections")
        run = lose(loss, cluster)
        if len(orphans.running()) != loss.workers:
            raise RuntimeError("a worker has not outlived the first step without its parent")
    cluster.replace(VICTIM)
    return run


def _end_workers(cluster: Cluster) -> None:
    """Those of all groups; the ranks, which are ended next, may be stopped before they notice."""
    for name in NAMES:
        rank = cluster.groups[name].rank
        rank.signal(signal.SIGSTOP)
        with Orphans(rank.pid):
            pass


def measure(keys: Sequence[str], runs: int) -> list[dict[str, Any]]:
    return [result(loss, OURS, run_loss(loss, runs)) for loss in LOSSES if loss.key in keys]


def bars(results: Sequence[Mapping[str, Any]]) -> list[Bar]:
    return losses.bars(LOSSES, results)


@click.command()
@click.option("--faults", default=",".join(loss.key for loss in LOSSES), show_default=True, help="Which.")
@click.option("--runs", type=click.IntRange(1), default=20, show_default=True, help="Of each fault.")
@click.option("--quick", is_flag=True, help="One run of two of the kills.")
@check_option
@json_option
def main(faults: str, runs: int, quick: bool, check: bool, path: Path | None) -> None:
    """How long the survivors' training stands still when a replica group goes away."""
    if quick:
        faults, runs = "kill,kill-rank", 1
    found = show_machine()
    results = measure(faults.split(","), runs)
    click.echo(losses.render(LOSSES, results, MOMENTS))
    write_json(path, {"benchmark": "faults", "machine": found, "results": results})
    conclude(bars(results), is_checked=check)


if __name__ == "__main__":
    main()
