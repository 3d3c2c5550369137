"""The examples as their readers run them: they learn, and a group that is killed heals and ends with the others.

The survivor waits for it, so that it finds somebody to heal from however long its start takes.
"""

from pathlib import Path

import pytest

from examples.daemons import ROOT
from tests.agent_client.clusters import Cluster, check_all, fork_server, read_events
from tests.processes import eventually


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("script", "steps", "pace_s", "accuracy"),
    [("train_diloco.py", 30, 0.01, 0.8), ("train_hsdp.py", 80, 0.02, 0.3)],
    ids=["diloco", "hsdp"],
)
def test_a_killed_group_heals_and_all_end_with_the_same_weights(
    tmp_path: Path, script: str, steps: int, pace_s: float, accuracy: float
) -> None:
    options = {"script": ROOT / "examples" / script, "steps": steps, "pace_s": pace_s}
    with (
        fork_server() as forks,
        Cluster(forks, tmp_path, groups=2, ranks=2, min_replicas=2, **options) as cluster,
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
        ends = [[read_events(cluster.events(group, rank))[-1] for group in cluster.groups] for rank in (0, 1)]
    for rank, of_rank in enumerate(ends):
        assert check_all(tmp_path, str(rank)) > steps / 2
        assert {end["finished"] for end in of_rank} == {steps}
        assert len({end["hash"] for end in of_rank}) == 1
        assert all(end["accuracy"] > accuracy for end in of_rank), of_rank
