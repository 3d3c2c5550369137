"""A manager that dies and is started again costs its ranks no restart, and nobody more than the step in flight."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from examples.local_cluster import ForkServer
from tests.agent_client.clusters import Cluster, check_all, fork_server

PACE_S = 0.03
KILLS = 5


@pytest.fixture(scope="module")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    with fork_server(tmp_path_factory.mktemp("forks")) as server:
        yield server


def test_its_ranks_wait_for_it_and_go_on(forks: ForkServer, tmp_path: Path) -> None:
    with Cluster(forks, tmp_path, groups=3, ranks=2, pace_s=PACE_S) as cluster:
        cluster.start_lighthouse()
        cluster.start_groups(*cluster.groups)
        cluster.wait_steps(*cluster.groups, more=5, participants=3)
        for number in range(KILLS):
            group = cluster.groups[number % len(cluster.groups)]
            others = [other for other in cluster.groups if other is not group]
            cluster.kill_manager(group)
            cluster.wait_steps(*others, more=3, participants=2)
            cluster.start_groups(group)
            cluster.wait_steps(*cluster.groups, more=5, participants=3)
        compared = check_all(tmp_path)
    assert [group.starts for group in cluster.groups] == [1, 1, 1], "no rank was started again"
    assert compared > 50
