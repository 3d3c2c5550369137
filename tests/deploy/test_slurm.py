"""train.sbatch, as shellcheck reads it and as Slurm runs it, with real daemons."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.processes import clean_environment

from .slurm import NODES, SCRIPT, Slurm
from .tools import run, tool
from .training import Training


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Slurm]:
    slurm = Slurm(tmp_path)
    with slurm.running():
        yield slurm


@pytest.fixture
def training(tmp_path: Path) -> Training:
    return Training(tmp_path)


def test_shellcheck_has_nothing_to_say() -> None:
    result = run([tool("shellcheck"), SCRIPT])
    assert (result.returncode, result.stdout) == (0, "")


def test_shellcheck_bites() -> None:
    result = run([tool("shellcheck"), "--shell=bash", "-"], input="rm $1/*\n")
    assert "SC2086" in result.stdout


def test_ranks_and_supervisors_come_back_until_the_run_is_stopped(cluster: Slurm, training: Training) -> None:
    job = cluster.submit(training.script)
    for group in "01":
        training.survives(group)
    training.tell("0", 130)
    assert cluster.has_ended(job) == ("FAILED", "130:0", "0", "0 of 2 replica groups finished; the run was stopped")


def test_one_group_that_finishes_suffices(cluster: Slurm, training: Training) -> None:
    job = cluster.submit(training.script, MAX_RESTARTS="0")
    training.started("0", "0")
    training.started("1", "0")
    training.tell("1", "kill")
    training.tell("0", 0)
    assert cluster.has_ended(job) == ("COMPLETED", "0:0", "0", "1 of 2 replica groups finished")


def test_a_lost_node_has_not_finished(cluster: Slurm, training: Training) -> None:
    job = cluster.submit(training.script, MAX_RESTARTS="0")
    training.started("0", "0")
    training.started("1", "0")
    cluster.ask("scontrol", "update", f"nodename={NODES[1]}", "state=down", "reason=test")
    training.tell("0", "kill")
    assert cluster.has_ended(job) == ("FAILED", "1:0", "0", "0 of 2 replica groups finished")


def test_a_usage_error_is_not_retried(cluster: Slurm, training: Training) -> None:
    job = cluster.submit(training.script, LIGHTHOUSE_MANAGER_MAX_RESTARTS="many")
    assert cluster.has_ended(job) == ("FAILED", "2:0", "0", "0 of 2 replica groups finished")
    for group in "01":
        assert cluster.output(f"{job}-group-{group}").count("Usage:") == 1


def test_the_records_of_a_failed_job_outlive_it_and_its_tokens_do_not(cluster: Slurm, training: Training) -> None:
    job = cluster.submit(training.script, MAX_RESTARTS="0")
    training.started("0", "0")
    training.tell("0", 130)
    assert cluster.has_ended(job)[1] == "130:0"
    records = cluster.folder / f"lighthouse-{job}"
    assert {"journal.sqlite", "journal.incidents", "audit.jsonl"} <= {path.name for path in records.iterdir()}
    assert not list(records.rglob("*token*"))


def test_a_requeued_job_continues_its_records(tmp_path: Path) -> None:
    """Without Slurm, which lets minutes pass before it starts a requeued job."""
    programs = {
        "lighthouse": 'while [[ $1 != --journal ]]; do shift || exit 0; done; echo "$SLURM_RESTART_COUNT" >> "$2"',
        "scontrol": "echo node",
        "srun": "sleep 0.5",
    }
    for name, script in programs.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{script}\n")
        (tmp_path / name).chmod(0o755)
    job = {"SLURM_JOB_ID": "7", "SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_JOB_NODELIST": "node"}
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "TMPDIR": str(tmp_path)}
    for restarts in ("0", "1"):
        result = run(["bash", SCRIPT, "train.py"], env=clean_environment(**job, **path, SLURM_RESTART_COUNT=restarts))
        assert result.returncode == 0, result.stderr
    assert (tmp_path / "lighthouse-7" / "journal.sqlite").read_text() == "0\n1\n"


@pytest.mark.parametrize(("options", "state"), [(["--signal=TERM"], "FAILED"), ([], "CANCELLED")])
def test_slurm_s_sigterm_ends_the_groups_first(
    cluster: Slurm, training: Training, options: list[str], state: str
) -> None:
    """The first form is also what comes before the time limit, the second what a preemption does."""
    job = cluster.submit(training.script)
    training.started("0", "0")
    training.started("1", "0")
    cluster.ask("scancel", *options, job)
    assert cluster.has_ended(job) == (state, "143:0", "0", "0 of 2 replica groups finished")
    for group in "01":
        assert "exits with 143: SIGTERM to the supervisor" in cluster.output(f"{job}-group-{group}")
