"""A manager that dies and is started again costs its ranks no restart, and nobody more than the step in flight."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.agent_client.clusters import Cluster, check_all
from tests.agent_client.local_cluster import ForkServer, Group
from tests.processes import eventually

PACE_S = 0.03
# Long enough that who has just seen a step end can kill before the next vote.
LONG_PACE_S = 1.0
KILLS = 3


def kill_managers(cluster: Cluster, kill: Callable[[Group], None]) -> None:
    cluster.start_lighthouse()
    cluster.start_groups(*cluster.groups)
    cluster.wait_steps(*cluster.groups, more=5, participants=3)
    for number in range(KILLS):
        group = cluster.groups[number % len(cluster.groups)]
        others = [other for other in cluster.groups if other is not group]
        kill(group)
        cluster.wait_steps(*others, more=3, participants=2)
        cluster.start_groups(group)
        cluster.wait_steps(*cluster.groups, more=5, participants=3)
    assert [group.starts for group in cluster.groups] == [1, 1, 1], "no rank was started again"


@pytest.mark.slow
def test_a_lone_rank_waits_for_it_and_goes_on(forks: ForkServer, tmp_path: Path) -> None:
    """At any moment: it needs nobody to know what a step's decision was."""
    with Cluster(forks, tmp_path, groups=3, ranks=1, pace_s=PACE_S) as cluster:
        kill_managers(cluster, cluster.kill_manager)
        compared = check_all(tmp_path)
    assert compared > 30


@pytest.mark.slow
def test_ranks_that_wait_for_no_decision_wait_for_it_and_go_on(forks: ForkServer, tmp_path: Path) -> None:
    """One that has voted and was told nothing yet cannot go on: its group would be started again."""
    with Cluster(forks, tmp_path, groups=3, ranks=2, pace_s=LONG_PACE_S) as cluster:

        def kill_between_votes(group: Group) -> None:
            steps = len(cluster.committed(group))
            eventually(lambda: all(len(cluster.committed(group, rank)) > steps for rank in (0, 1)), "a step has ended")
            cluster.kill_manager(group)

        kill_managers(cluster, kill_between_votes)
        compared = check_all(tmp_path)
    assert compared > 30
