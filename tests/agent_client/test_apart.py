"""Ranks of one group that have loaded different checkpoints and that no other group can heal: they end, and say why."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.agent_client.jobs import Job
from tests.agent_client.ranks import RankError
from tests.processes import Lighthouse, eventually

TIMES = ("--join-timeout", "1s", "--heartbeat-timeout", "3s")
REASON = r"holds step [67] of quorum 3 and rank [01] step [67] of quorum 3, and there is no other group to heal from"


def test_both_ranks_the_manager_and_the_lighthouse_say_why(job: Job, lighthouse: Lighthouse) -> None:
    job.start_managers("a", ranks=2)
    with ThreadPoolExecutor(2) as pool:
        ranks = list(pool.map(lambda rank: job.rank("a", rank=rank, ranks=2, quorum_timeout_s=20.0), (0, 1)))
    pending = [rank.begin("train_from", step, 3, 100) for rank, step in zip(ranks, (6, 7), strict=True)]
    for each in pending:
        with pytest.raises(RankError, match=f"refuses this rank: .*{REASON}: restart the group, or load") as raised:
            each.result(within_s=30.0)
        assert raised.value.kind == "AgentError"
    manager = job.log("a-manager")
    assert "ERROR" in manager
    assert manager.count("there is no other group to heal from") >= 2
    eventually(
        lambda: "there is no other group to heal from" in lighthouse.log(), "the lighthouse says why", within_s=10.0
    )
