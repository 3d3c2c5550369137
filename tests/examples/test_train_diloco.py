"""The DiLoCo example as its readers run it: it learns, and a group that is killed heals and ends with the others.

The survivor waits for it, so that it finds somebody to heal from however long its start takes.
"""

from pathlib import Path

import pytest

from examples.daemons import ROOT
from tests.agent_client.clusters import Cluster, check_all, fork_server, read_events
from tests.processes import eventually

STEPS = 30


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_killed_group_heals_and_all_end_with_the_same_weights(tmp_path: Path) -> None:
    script = ROOT / "examples/train_diloco.py"
    with (
        fork_server() as forks,
        Cluster(forks, tmp_path, groups=2, ranks=2, pace_s=0.01, script=script, steps=STEPS, min_replicas=2) as cluster,
    ):
        cluster.start_lighthouse()
        cluster.start_groups(*cluster.groups)
        cluster.wait_steps(*cluster.groups, more=2, participants=2)
        victim, survivor = cluster.groups
        cluster.kill(victim)
        step = cluster.committed(survivor)[-1]["step"]
        cluster.start_groups(victim)
        eventually(lambda: all(map(cluster.has_ended, cluster.groups)), "all have ended", 120.0)
        assert [cluster.statuses(group) for group in cluster.groups] == [[0, 0], [0, 0]], cluster.log(victim, 0)
        assert cluster.committed(victim)[0]["step"] > step
        ends = [read_events(cluster.events(group, rank))[-1] for group in cluster.groups for rank in (0, 1)]
    assert check_all(tmp_path) > STEPS
    assert {end["finished"] for end in ends} == {STEPS}
    assert len({end["hash"] for end in ends}) == 1
    assert all(end["accuracy"] > 0.8 for end in ends), ends
