"""The example's training under real daemons: how it ends by a drain, and a rank that was given only a lighthouse.

Kills: test_matrix.py, tests/examples/test_train_scripts.py. The tests share one cluster of two groups of two ranks."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from examples.ports import LOOPBACK, free_port
from lighthouse_runtime.client.clients import LighthouseClient
from tests.agent_client.clusters import (
    RECOVERS_WITHIN_S,
    TRAIN_SCRIPT,
    Cluster,
    command_of,
    descendants,
    is_running,
    read_events,
)
from tests.agent_client.ranks import Rank, RankServer
from tests.processes import eventually

PACE_S = 0.05

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def cluster(forks: RankServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(forks, tmp_path_factory.mktemp("cluster"), groups=2, ranks=2, pace_s=PACE_S) as cluster:
        cluster.start_lighthouse()
        cluster.start_groups(*cluster.groups)
        cluster.wait_steps(*cluster.groups, more=3, participants=2)
        yield cluster


def ended(rank: Rank) -> int:
    """Its exit status."""
    eventually(lambda: rank.status is not None, f"rank {rank.pid} has ended")
    assert rank.status is not None
    return rank.status


def test_a_group_that_is_drained_ends_in_good_order(cluster: Cluster) -> None:
    """It costs the others no step: test_matrix.py."""
    stays, leaves = cluster.groups
    with LighthouseClient(cluster.lighthouse_address) as lighthouse:
        lighthouse.drain(leaves.name, "for its disk")
    leaving, leaves.ranks = leaves.ranks, []  # they are to end by themselves
    cluster.wait_steps(stays, more=3, participants=1)
    assert [ended(rank) for rank in leaving] == [0, 0]
    assert "ends in good order" in cluster.log(leaves, 0)
    assert "for its disk" in cluster.log(leaves, 0)
    eventually(lambda: not leaves.manager.is_alive, "its manager has left", RECOVERS_WITHIN_S)


# -- a rank that was given only a lighthouse


def start_alone(cluster: Cluster, folder: Path, name: str, ranks: int, *arguments: str) -> list[Rank]:
    """A group's ranks in a job of its own, whose manager rank 0 is to start, with its store."""
    port = str(free_port())
    environment = {
        "LIGHTHOUSE_ADDRESS": cluster.lighthouse_address,
        "LIGHTHOUSE_JOB": name,
        "REPLICA_GROUP_ID": name,
        "LIGHTHOUSE_MANAGER_ADDRESS": "",
        "LIGHTHOUSE_MANAGER_ADVERTISE": LOOPBACK,
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": port,
        "WORLD_SIZE": str(ranks),
    }
    return [
        cluster.forks.run(
            TRAIN_SCRIPT,
            [*arguments, "--events", str(folder / f"{rank}.jsonl")],
            environment | {"RANK": str(rank)},
            folder / f"{rank}.log",
        )
        for rank in range(ranks)
    ]


@pytest.mark.parametrize("is_killed", [False, True], ids=["ends", "is killed"])
def test_a_rank_that_has_only_a_lighthouse_starts_its_manager_which_ends_with_it(
    cluster: Cluster, tmp_path: Path, is_killed: bool
) -> None:
    steps, ranks = ("1000000", 2) if is_killed else ("3", 1)
    processes = start_alone(cluster, tmp_path, f"alone-{ranks}", ranks, "--steps", steps, "--pace", "0.2")
    log = tmp_path / "0.log"
    eventually(lambda: read_events(tmp_path / "0.jsonl"), "it trains", RECOVERS_WITHIN_S)
    below = descendants(processes[0].pid)
    commands = {pid: command_of(pid) for pid in below}
    if is_killed:
        assert any("lighthouse_manager" in command for command in commands.values()), commands
        assert any("store/program.py" in command for command in commands.values()), commands
        processes[0].kill()
    else:
        assert ended(processes[0]) == 0, log.read_text()
        assert "step 3: test accuracy" in log.read_text()
    eventually(
        lambda: not [pid for pid in below if is_running(pid) and command_of(pid) == commands[pid]],
        f"all of {commands} have ended",
    )
    for process in processes:
        process.kill()


def test_a_manager_that_cannot_start_is_an_error_with_its_reason(cluster: Cluster, tmp_path: Path) -> None:
    [process] = start_alone(cluster, tmp_path, "no good name!", 1)
    status, log = ended(process), (tmp_path / "0.log").read_text()
    assert status == 1
    assert "'no good name!' has ' '" in log, log
    assert re.search(r"AgentError: the group's manager did not start \(status \d\)", log), log
