"""Each trainer's example as its readers run it, with the real library: a group is killed by SIGKILL and started again.

Whoever commits a step has the same parameters, buffers and optimizer state after it as all others, bit by bit."""

from pathlib import Path

import pytest

from examples.daemons import ROOT
from tests.agent_client.clusters import PRELOADED, Cluster, check_heals
from tests.agent_client.integrations.libraries import require
from tests.agent_client.ranks import RankServer

STEPS = 60


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("library", ["transformers", "lightning", "accelerate"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_killed_group_heals_and_all_end_with_the_same_bits(tmp_path: Path, library: str, ranks: int) -> None:
    require(library)
    script = ROOT / "examples" / f"train_{library}.py"
    with (
        RankServer(*PRELOADED, f"agent_client.integrations.{library}") as forks,
        Cluster(
            forks, tmp_path, groups=2, ranks=ranks, pace_s=0.05, script=script, steps=STEPS, min_replicas=2
        ) as cluster,
    ):
        check_heals(cluster, STEPS, 0.5, before=5, within_s=300.0)
