"""Measure the throughput of four groups of which one takes three times as long, with and without `share_by_speed`.

Four replica groups of one rank train a small model with DDP over gloo and `constant_batch`. A rank sleeps in each
microbatch, so the groups do not compete for cores. The ideal is the throughput of groups that never wait for each
other: the sum of their speeds.
"""

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import click
from torch.distributed import TCPStore

from benchmarks.support.children import Children
from benchmarks.support.cluster import Cluster, wait_until
from benchmarks.support.daemons import HERE
from benchmarks.support.figures import Bar, Measured, benchmark, table

NAMES = ("a", "b", "c", "d")
SLOW, FACTOR = "b", 3
MICROBATCHES = 20
SETTLED_STEP = 8
"""The groups exchange their first measured speeds in step 4."""
TIMEOUT_S = 900.0
LIMIT = 1 / 0.95


@dataclass(frozen=True, slots=True)
class Throughput:
    shares_by_speed: bool
    step_s: float  # median
    ideal_s: float

    @property
    def ratio(self) -> float:
        return self.ideal_s / self.step_s


def measure(microbatch_s: float, steps: int, *, shares_by_speed: bool) -> Throughput:
    times_s = {name: microbatch_s * (FACTOR if name == SLOW else 1) for name in NAMES}
    with Children() as children:
        store = TCPStore(HERE, 0, is_master=True, wait_for_workers=False)
        cluster = Cluster(
            children, names=NAMES, min_replicas=len(NAMES), program="sharing_rank", store=f"{HERE}:{store.port}",
            microbatch_s=times_s, microbatches=MICROBATCHES, share_by_speed=shares_by_speed,
        )  # fmt: skip
        groups = list(cluster.groups.values())

        def is_done() -> bool:
            return all(group.events and group.events[-1].step >= SETTLED_STEP + steps for group in groups)

        wait_until(is_done, TIMEOUT_S, f"{SETTLED_STEP + steps} steps", [group.rank for group in groups])
        settled = [event.at for event in groups[0].events if event.step >= SETTLED_STEP]
    lengths = [after - before for before, after in itertools.pairwise(settled)]
    ideal_s = MICROBATCHES / sum(1 / time_s for time_s in times_s.values())
    return Throughput(shares_by_speed, statistics.median(lengths), ideal_s)


def render(results: Sequence[Throughput]) -> str:
    header = ["share_by_speed", "median step, s", "ideal step, s", "throughput / ideal"]
    rows = [
        ["yes" if one.shares_by_speed else "no", f"{one.step_s:.3f}", f"{one.ideal_s:.3f}", f"{one.ratio:.2f}"]
        for one in results
    ]
    return table(header, rows)


@benchmark("Less than a minute: shorter microbatches, fewer steps.")
@click.option("--microbatch-s", type=float, default=0.1, show_default=True, help="Time of a microbatch.")
@click.option("--steps", type=int, default=40, show_default=True, help="Measured steps.")
def main(microbatch_s: float, steps: int, quick: bool) -> Measured:
    """Measure the throughput of four groups of which one is slow."""
    microbatch_s, steps = (0.02, 10) if quick else (microbatch_s, steps)
    results = [measure(microbatch_s, steps, shares_by_speed=shares) for shares in (False, True)]
    bars = [Bar("share_by_speed: ideal throughput / measured", 1 / results[1].ratio, LIMIT)]
    return render(results), bars, {"results": results}


if __name__ == "__main__":
    main()
