"""Ranks of one group that have loaded different checkpoints and that no other group can heal: they end, and say why."""

import pytest

from tests.agent_client.jobs import Job
from tests.agent_client.ranks import RankError
from tests.processes import Lighthouse, eventually

TIMES = ("--join-timeout", "1s", "--heartbeat-timeout", "3s")
REASON = r"holds step [67] of quorum 3 and rank [01] step [67] of quorum 3, and no other group can heal them"


def test_both_ranks_the_manager_and_the_lighthouse_say_why(job: Job, lighthouse: Lighthouse) -> None:
    first, other = job.groups_of(2, "a", quorum_timeout_s=20.0).values()
    pending = [rank.begin("train_from", step, 3, 100) for rank, step in ((first, 6), (other, 7))]
    for each in pending:
        with pytest.raises(RankError, match=f"rejected this rank: .*{REASON}: restart the group, or load") as raised:
            each.result(within_s=30.0)
        assert raised.value.kind == "AgentError"
    manager = job.log("a-manager")
    assert "ERROR" in manager
    assert manager.count("no other group can heal them") >= 2
    eventually(lambda: "no other group can heal them" in lighthouse.log(), "the lighthouse says why", within_s=10.0)
