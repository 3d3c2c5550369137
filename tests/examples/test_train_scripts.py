"""The examples as their readers run them: they learn, and a group that is killed heals and ends with the others."""

from pathlib import Path

import pytest

from examples.daemons import ROOT
from tests.agent_client.clusters import PRELOADED, Cluster, check_heals
from tests.agent_client.ranks import RankServer


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
        RankServer(*PRELOADED) as forks,
        Cluster(forks, tmp_path, groups=2, ranks=2, min_replicas=2, **options) as cluster,
    ):
        check_heals(cluster, steps, accuracy, before=2, within_s=120.0)
