"""A group that comes and one that drains cost the others no step."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from lighthouse_runtime.client.lighthouse import LighthouseClient
from tests.agent_client.clusters import RECOVERS_WITHIN_S, Cluster, read_events
from tests.agent_client.local_cluster import ForkServer, Group
from tests.processes import eventually

PACE_S = 0.03


@pytest.fixture
def cluster(forks: ForkServer, tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(forks, tmp_path, groups=4, ranks=2, pace_s=PACE_S) as cluster:
        cluster.start_lighthouse()
        yield cluster


def discards(cluster: Cluster, *groups: Group) -> list[object]:
    return [
        (group.name, rank, event)
        for group in groups
        for rank in range(cluster.ranks)
        for event in read_events(cluster.events(group, rank))
        if "discarded" in event
    ]


def test_who_joins_and_who_drains_costs_the_others_no_step(cluster: Cluster) -> None:
    *first, late = cluster.groups
    cluster.start_groups(*first)
    cluster.wait_steps(*first, more=20, participants=3)
    before = discards(cluster, *first)
    cluster.start_groups(late)
    cluster.wait_steps(*cluster.groups, more=20, participants=4)
    with LighthouseClient(cluster.lighthouse_address) as lighthouse:
        lighthouse.drain(late.name, "for its disk")
    pids = list(late.pids)
    late.pids.clear()  # they are to end by themselves
    cluster.wait_steps(*first, more=20, participants=3)
    assert discards(cluster, *first) == before
    cluster.wait_gone(*pids)
    assert [cluster.forks.ended[pid] for pid in pids] == [0, 0]
    assert "ends in good order" in cluster.log(late, 0)
    assert "for its disk" in cluster.log(late, 0)
    eventually(lambda: not late.manager.is_alive, "its manager has left", RECOVERS_WITHIN_S)
