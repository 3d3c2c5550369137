"""train.sbatch, as shellcheck reads it and as bash runs it."""

import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from .fake_slurm import SCRIPT, FakeSlurm, signal_group
from .tools import run, tool

_OPTIONS = "run --replica-id group-{0} --run-id slurm-77 --nproc-per-node 8 --"


@pytest.fixture
def slurm(tmp_path: Path) -> FakeSlurm:
    return FakeSlurm(tmp_path)


def wait_until(holds: Callable[[], bool], within_s: float = 10) -> None:
    ends_at = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < ends_at, "it did not come true"
        time.sleep(0.01)


def test_shellcheck_has_nothing_to_say() -> None:
    result = run([tool("shellcheck"), SCRIPT])
    assert (result.returncode, result.stdout) == (0, "")


def test_shellcheck_bites() -> None:
    result = run([tool("shellcheck"), "--shell=bash", "-"], input="rm $1/*\n")
    assert "SC2086" in result.stdout


def test_each_node_is_a_replica_group(slurm: FakeSlurm) -> None:
    with slurm.job("train.py", "--name", "two words") as job:
        output, _ = job.communicate(timeout=20)
        assert (job.returncode, output) == (0, "2 of 2 replica groups finished\n")
    groups = sorted(event for event in slurm.events if event.startswith("group"))
    assert groups == [
        f"group {index} of 2 on {node}, lighthouse alpha:29510: {_OPTIONS.format(index)} train.py --name two words"
        for index, node in enumerate(["alpha", "beta"])
    ]


def test_the_lighthouse_ends_last(slurm: FakeSlurm) -> None:
    with slurm.job("train.py") as job:
        job.communicate(timeout=20)
        assert slurm.events[-1] == "lighthouse terminated"
        wait_until(lambda: not signal_group(job.pid, 0))


def test_a_group_that_fails_comes_back(slurm: FakeSlurm) -> None:
    with slurm.job("train.py", training="fails_once") as job:
        output, _ = job.communicate(timeout=20)
    assert (job.returncode, output) == (0, "2 of 2 replica groups finished\n")
    assert len([event for event in slurm.events if event.startswith("group 1")]) == 2


def test_one_group_suffices(slurm: FakeSlurm) -> None:
    with slurm.job("train.py", training="beta_fails") as job:
        output, _ = job.communicate(timeout=20)
    assert (job.returncode, output) == (0, "1 of 2 replica groups finished\n")
    assert len([event for event in slurm.events if event.startswith("group 1")]) == 3


def test_the_job_fails_with_all_its_groups(slurm: FakeSlurm) -> None:
    with slurm.job("train.py", training="fails") as job:
        output, _ = job.communicate(timeout=20)
    assert (job.returncode, output) == (1, "0 of 2 replica groups finished\n")
    assert slurm.events[-1] == "lighthouse terminated"


def test_a_run_that_was_stopped_is_not_started_again_and_is_no_success(slurm: FakeSlurm) -> None:
    with slurm.job("train.py", training="is_stopped") as job:
        output, _ = job.communicate(timeout=20)
    assert (job.returncode, output) == (130, "0 of 2 replica groups finished; the run was stopped\n")
    assert len([event for event in slurm.events if event.startswith("group")]) == 2


def test_a_lighthouse_that_fails_comes_back(slurm: FakeSlurm) -> None:
    with slurm.job("train.py", training="is_long", lighthouse="fails_once") as job:
        wait_until(lambda: len([event for event in slurm.events if event.startswith("lighthouse serve")]) == 2)
        job.terminate()
        job.communicate(timeout=20)


def test_sigterm_ends_groups_first_and_leaves_nothing(slurm: FakeSlurm) -> None:
    with slurm.job("train.py", training="is_long") as job:
        wait_until(lambda: len(slurm.events) == 3)
        job.send_signal(signal.SIGTERM)
        output, _ = job.communicate(timeout=20)
        assert (job.returncode, output) == (1, "0 of 2 replica groups finished\n")
        wait_until(lambda: not signal_group(job.pid, 0))
    assert sorted(slurm.events[3:5]) == ["group 0 terminated", "group 1 terminated"]
    assert slurm.events[5:] == ["lighthouse terminated"]
