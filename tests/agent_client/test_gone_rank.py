"""A rank that is stopped inside a group of two: its mate does not wait for ever, whoever launched them."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from examples.supervised_cluster import SupervisedCluster
from tests.agent_client.jobs import Job, ask
from tests.agent_client.ranks import RankError
from tests.processes import Lighthouse, eventually

TIMES = ("--join-timeout", "2s", "--heartbeat-timeout", "3s", "--min-replicas", "1")
NEVER = {"timeout_s": 600.0, "quorum_timeout_s": 600.0}
ACTOR = "tests.agent_client.marking_actor:MarkingActor"


def ranks_of(address: str) -> list[dict[str, Any]]:
    return [rank for job in ask(address, "ranks")["jobs"] for rank in job["ranks"]]


def both_train(address: str) -> list[dict[str, Any]]:
    def seen() -> list[dict[str, Any]] | None:
        ranks = ranks_of(address)
        return ranks if len(ranks) == 2 and all(rank["step"] > 3 for rank in ranks) else None

    return eventually(seen, "both ranks train", within_s=180.0)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_its_mate_is_told_in_words_and_ends(job: Job, lighthouse: Lighthouse) -> None:
    mate, stopped = job.groups_of(2, "a", actor=ACTOR, **NEVER).values()
    training = mate.begin("train")
    stopped.begin("train")
    both_train(lighthouse.address)
    stopped.stop()
    with pytest.raises(
        RankError, match="lost this replica group: rank 1 has ended and has not reconnected; restart"
    ) as e:
        training.result(within_s=120.0)
    assert e.value.kind == "AgentError"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_supervisor_starts_the_group_again(tmp_path: Path) -> None:
    with SupervisedCluster(
        tmp_path, groups=1, ranks=2, train_arguments=("--steps", "100000", "--pace", "0.05")
    ) as cluster:
        cluster.start()
        pids = {rank["group_rank"]: rank["pid"] for rank in both_train(cluster.lighthouse_address)}
        os.kill(pids[1], signal.SIGSTOP)
        [log] = [group.log for group in cluster.groups]
        eventually(lambda: "its process is still running" in log.read_text(), "rank 1 is given up", within_s=120.0)

        def are_new() -> bool:
            return not set(pids.values()) & {rank["pid"] for rank in ranks_of(cluster.lighthouse_address)}

        eventually(are_new, "both ranks are new processes", within_s=60.0)
        both_train(cluster.lighthouse_address)
