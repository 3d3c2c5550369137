"""A manager that dies and is started again costs its ranks no restart, and nobody more than the step in flight."""

from pathlib import Path

import pytest

from tests.agent_client.clusters import Cluster, Group, check_all
from tests.agent_client.ranks import RankServer
from tests.processes import eventually

PACE_S = 0.03
# Long enough that who has just seen a step end can kill before the next vote.
LONG_PACE_S = 1.0


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "pace_s"), [(1, PACE_S), (2, LONG_PACE_S)])
def test_ranks_wait_for_their_manager_and_go_on(forks: RankServer, tmp_path: Path, ranks: int, pace_s: float) -> None:
    """A rank that is alone: at any moment, for it needs nobody to know what a step's decision was. One of several that
    has voted and was told nothing yet cannot go on: its group would be started again."""
    with Cluster(forks, tmp_path, groups=3, ranks=ranks, pace_s=pace_s) as cluster:

        def step_has_ended(group: Group, before: int) -> bool:
            return all(len(cluster.committed(group, rank)) > before for rank in range(ranks))

        cluster.start_lighthouse()
        cluster.start_groups(*cluster.groups)
        cluster.wait_steps(*cluster.groups, more=5, participants=3)
        for group in cluster.groups:
            others = [other for other in cluster.groups if other is not group]
            if ranks > 1:
                steps = len(cluster.committed(group))
                eventually(lambda group=group, steps=steps: step_has_ended(group, steps), "a step has ended")
            cluster.kill_manager(group)
            cluster.wait_steps(*others, more=3, participants=2)
            cluster.start_groups(group)
            cluster.wait_steps(*cluster.groups, more=5, participants=3)
        assert [group.starts for group in cluster.groups] == [1, 1, 1], "no rank was started again"
        assert check_all(tmp_path) > 30
