"""Measure the other groups' steps while one group heals. With `blocking` they wait for it, with `catch_up` they do not.

Three replica groups of one rank train a model with DDP over gloo. The state is its parameters and Adam's moments. One
group is killed and restarted. The steps of the two others count from its return until it contributes and all have made
some more steps. They are compared with the median of the steps before.
"""

import itertools
import signal
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import click
from torch.distributed import TCPStore

from benchmarks.support.children import Children
from benchmarks.support.cluster import NAMES, Cluster, Event, Group, wait_until
from benchmarks.support.daemons import HERE
from benchmarks.support.figures import Bar, Measured, benchmark, table_of

GIB = 2**30
MODES = ("blocking", "catch_up")
LINKS_MB_S = (0.0, 100.0)  # 0 means no limit
STAYS, LATE = NAMES[:2], NAMES[2]
STEPS_BEFORE = 15
STEPS_AFTER = 5
TIMEOUT_S = 300.0
LIMIT = 2.0


@dataclass(frozen=True, slots=True)
class Healed:
    """Steps of the other groups during one heal."""

    mode: str
    gib: float
    link_mb_s: float
    median_s: float  # before the heal
    longest_s: float  # during the heal
    behind: int  # steps of the healing group before it contributed
    behind_s: float

    @property
    def ratio(self) -> float:
        return self.longest_s / self.median_s


def wait_commits(groups: Mapping[str, Group], count: int, size: int, *names: str) -> None:
    """Wait until each group has contributed to `count` more committed steps, in quorums of `size` groups."""
    before = {name: len(groups[name].events) for name in names}

    def is_done() -> bool:
        new = [groups[name].events[before[name] :] for name in names]
        return all(sum((e.what, e.size) == ("commit", size) for e in events) >= count for events in new)

    what = f"{count} steps of {size} groups by {names}"
    wait_until(is_done, TIMEOUT_S, what, [groups[name].rank for name in names])


def heal(mode: str, state_bytes: int, link_mb_s: float) -> Healed:
    with Children() as children:
        store = TCPStore(HERE, 0, is_master=True, wait_for_workers=False)
        cluster = Cluster(
            children, program="catch_up_rank", store=f"{HERE}:{store.port}",
            mode=mode, state_bytes=state_bytes, link_mb_s=link_mb_s,
        )  # fmt: skip
        groups = cluster.groups
        wait_commits(groups, 3, len(NAMES), *NAMES)
        wait_commits(groups, STEPS_BEFORE, len(NAMES), *NAMES)
        before = {name: groups[name].events[-STEPS_BEFORE:] for name in STAYS}
        groups[LATE].signal(signal.SIGKILL)
        groups[LATE].end()
        wait_commits(groups, 3, len(STAYS), *STAYS)
        groups[LATE] = cluster.start(LATE)
        wait_commits(groups, STEPS_AFTER, len(NAMES), LATE)
        late = list(groups[LATE].events)
        median_s = statistics.median([s for events in before.values() for s in lengths(events)])
        since = [[event for event in groups[name].events if event.step >= late[0].step - 1] for name in STAYS]
        behind = [event for event in late if event.what == "behind"]
        longest_s = max(s for events in since for s in lengths(events))
        behind_s = behind[-1].at - behind[0].at if behind else 0.0
        return Healed(mode, state_bytes / GIB, link_mb_s, median_s, longest_s, len(behind), behind_s)


def lengths(events: Sequence[Event]) -> list[float]:
    return [after.at - before.at for before, after in itertools.pairwise(events)]


COLUMNS: Mapping[str, Callable[[Healed], str]] = {
    "heal_mode": lambda healed: healed.mode,
    "state": lambda healed: f"{healed.gib:g} GiB",
    "link": lambda healed: f"{healed.link_mb_s:g} MB/s" if healed.link_mb_s else "loopback",
    "median step, s": lambda healed: f"{healed.median_s:.2f}",
    "longest step, s": lambda healed: f"{healed.longest_s:.2f}",
    "longest / median": lambda healed: f"{healed.ratio:.2f}",
    "steps behind": lambda healed: str(healed.behind),
}


def bars(results: Sequence[Healed]) -> list[Bar]:
    return [
        Bar(f"catch_up, {healed.gib:g} GiB: longest step / median", healed.ratio, LIMIT)
        for healed in results
        if healed.mode == "catch_up"
    ]


@benchmark("Seconds instead of minutes: 1/16 GiB, catch_up alone.")
@click.option("--gib", type=float, default=1.0, show_default=True, help="State to heal.")
def main(gib: float, quick: bool) -> Measured:
    """Measure the other groups' steps while one group heals."""
    links, modes = LINKS_MB_S, MODES
    if quick:
        gib, links, modes = 1 / 16, (0.0,), ("catch_up",)
    results = [heal(mode, int(gib * GIB), link) for link in links for mode in modes]
    return table_of(COLUMNS, results), bars(results), {"results": results}


if __name__ == "__main__":
    main()
