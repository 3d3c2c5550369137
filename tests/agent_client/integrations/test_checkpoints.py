"""A library's own checkpoint: all groups die, go on from theirs, and stay equal bit by bit."""

from pathlib import Path

import pytest

from tests.agent_client.clusters import PRELOADED, Cluster, check_all, read_events
from tests.agent_client.integrations.libraries import require
from tests.agent_client.ranks import RankServer

SAVED_AT, STEPS = 4, 12


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("library", ["transformers", "lightning", "accelerate"])
def test_groups_that_have_died_go_on_from_the_library_s_checkpoint(tmp_path: Path, library: str) -> None:
    require(library)
    script = Path(__file__).with_name("resuming_script.py")
    with (
        RankServer(*PRELOADED, f"agent_client.integrations.{library}") as forks,
        Cluster(
            forks,
            tmp_path,
            groups=2,
            ranks=1,
            pace_s=0.2,
            script=script,
            arguments=[library, "--save-at", str(SAVED_AT)],
            steps=STEPS,
            min_replicas=2,
        ) as cluster,
    ):
        cluster.start_lighthouse()
        cluster.start_groups(*cluster.groups)
        cluster.wait_steps(*cluster.groups, more=SAVED_AT + 1, participants=2)
        for group in cluster.groups:
            cluster.kill(group, with_manager=True)
        cluster.start_groups(*cluster.groups)
        logs = cluster.wait_ended()
        for group in cluster.groups:
            steps = [event["step"] for event in read_events(cluster.events(group, 0))]
            assert steps == list(range(SAVED_AT + 1, STEPS + 1)), logs
        assert check_all(tmp_path) >= SAVED_AT + STEPS - SAVED_AT
