"""Kills at moments drawn at random, each made good by a start, for minutes: nobody ever trains on with other bits."""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.agent_client.clusters import Cluster, all_events, check_all, fork_server
from tests.agent_client.local_cluster import Group
from tests.processes import eventually

SEED = 20261121
KILLS = 50
GROUPS = 3
RANKS = 2
PACE_S = 0.05
MAX_WAIT_S = 2.0
"""A kill comes at most so long after training went on, a start at most so long after its kill."""
MANAGER_SHARE = 0.3
STALLS_AT_MOST_S = 90.0


@dataclass(frozen=True)
class Kill:
    with_manager: bool
    after_s: float
    back_after_s: float

    @classmethod
    def draw(cls, rng: random.Random) -> "Kill":
        return cls(rng.random() < MANAGER_SHARE, rng.uniform(0, MAX_WAIT_S), rng.uniform(0, MAX_WAIT_S) ** 2 / 2)


def newest_step(cluster: Cluster) -> int:
    """Of those that hold a state now."""
    return max((events[-1]["step"] for group in cluster.groups if (events := cluster.committed(group))), default=0)


def victim_of(cluster: Cluster, rng: random.Random) -> Group:
    """One of those without which somebody still holds the state: has committed a step since its own start."""
    order = rng.sample(cluster.groups, GROUPS)
    holds: Callable[[Group], bool] = lambda group: all(cluster.committed(group, rank) for rank in range(RANKS))  # noqa: E731
    return next(group for group in order if any(holds(other) for other in cluster.groups if other is not group))


def longest_stall_s(folder: Path) -> float:
    """Between two committed steps, whoever committed them."""
    times = sorted(event["time"] for events in all_events(folder) for event in events)
    return max(after - before for before, after in zip(times, times[1:], strict=False))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_kills_at_any_moment_leave_no_trace_in_the_weights(tmp_path: Path) -> None:
    rng = random.Random(SEED)
    began_at = time.monotonic()
    with (
        fork_server(tmp_path) as forks,
        Cluster(forks, tmp_path, groups=GROUPS, ranks=RANKS, pace_s=PACE_S) as cluster,
    ):
        cluster.start_lighthouse()
        cluster.start_groups(*cluster.groups)
        cluster.wait_steps(*cluster.groups, more=5, participants=GROUPS)
        advances: list[int] = []
        for number in range(1, KILLS + 1):
            kill = Kill.draw(rng)
            time.sleep(kill.after_s)  # the drawn moment, whatever happens in it
            victim, step = victim_of(cluster, rng), newest_step(cluster)
            cluster.kill(victim, with_manager=kill.with_manager)
            time.sleep(kill.back_after_s)
            cluster.start_groups(victim)
            killed_at = time.monotonic()

            def goes_on(step: int = step) -> bool:
                cluster.check_alive()
                return newest_step(cluster) > step + 1

            eventually(goes_on, f"training goes on after kill {number} of {victim.name} at step {step}", 120.0)
            advances.append(newest_step(cluster) - step)
            what = "ranks and manager" if kill.with_manager else "ranks"
            print(
                f"{time.monotonic() - began_at:6.1f} s: kill {number:2}, {what} of {victim.name} at step {step}; "
                f"goes on after {time.monotonic() - killed_at:.1f} s",
                flush=True,
            )
        cluster.wait_steps(*cluster.groups, more=10, participants=GROUPS)
        compared = check_all(tmp_path)
        starts = sum(group.starts for group in cluster.groups)
        stall_s = longest_stall_s(tmp_path)
        print(
            f"{KILLS} kills in {time.monotonic() - began_at:.0f} s, {newest_step(cluster)} steps, "
            f"{compared} times weights compared, longest stall {stall_s:.1f} s"
        )
    assert starts == GROUPS + KILLS
    assert min(advances) >= 1
    assert compared > 10 * KILLS
    assert stall_s < STALLS_AT_MOST_S
