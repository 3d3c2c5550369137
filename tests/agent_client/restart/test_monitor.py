"""What a script becomes, and that its supervised child stays what it is."""

import pytest

from agent_client.errors import ConfigurationError
from agent_client.restart import rank_thread
from agent_client.restart.options import Launch
from agent_client.restart.rank_thread import command, fork_and_monitor

SCRIPT = ["python", "train.py", "--lr", "3"]
LIGHTHOUSE = {"LIGHTHOUSE_ADDRESS": "h:1"}


def words(**variables: str) -> list[str]:
    found = LIGHTHOUSE | variables
    return command(Launch.read(found), found, SCRIPT, ("--max-restarts", "9"))


def test_a_script_by_itself() -> None:
    told = "run --nproc-per-node 1 --group-world-size 1 --replica-id monitored --max-restarts 9 --"
    assert words() == [*told.split(), *SCRIPT]


def test_a_replica_group_keeps_its_id() -> None:
    assert "--replica-id" not in words(REPLICA_GROUP_ID="a")


def test_under_torchrun_each_rank_has_its_slot() -> None:
    told = words(RANK="3", WORLD_SIZE="8", REPLICA_GROUP_ID="a")
    assert told[told.index("--slot-offset") : told.index("--replica-id") + 2] == [
        *["--slot-offset", "3", "--run-world-size", "8", "--replica-id", "a-3"]
    ]
    assert "--bind" in told
    assert told[told.index("--master-addr") + 1] == "127.0.0.1"
    told = words(RANK="3", WORLD_SIZE="8", MASTER_ADDR="h0")
    assert told[told.index("--master-addr") + 1] == "h0"
    with pytest.raises(ConfigurationError, match="torchrun --max-restarts=2"):
        words(RANK="3", WORLD_SIZE="8", TORCHELASTIC_MAX_RESTARTS="2")
    assert "--bind" not in words(RANK="3", WORLD_SIZE="8", LIGHTHOUSE_MANAGER_BIND="[::]:7")


def test_a_torchrun_job_without_a_name_gets_one_of_its_own() -> None:
    told = words(RANK="3", WORLD_SIZE="8", TORCHELASTIC_RUN_ID="none", MASTER_ADDR="h0", MASTER_PORT="7")
    assert told[told.index("--run-id") + 1] == "torchrun-h0-7"
    assert "--run-id" not in words(TORCHELASTIC_RUN_ID="none", LIGHTHOUSE_RUN_ID="mine")
    assert "--run-id" not in words(TORCHELASTIC_RUN_ID="job-7")


def test_no_lighthouse_is_named() -> None:
    with pytest.raises(ConfigurationError, match="LIGHTHOUSE_ADDRESS"):
        command(Launch.read({}), {}, SCRIPT, ())


def test_the_supervised_child_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTHOUSE_INCARNATION", "i")
    monkeypatch.setattr(rank_thread.os, "execv", lambda *_: pytest.fail("it became a supervisor"))
    fork_and_monitor()
