"""torchrun's words."""

import shlex

import pytest

from manager.supervisor.rules.plan import Failure, Torchrun, failure_behind, read_torchrun


@pytest.mark.parametrize(
    ("command", "read"),
    [
        ("python train.py --max-restarts 3", None),
        ("torchrun train.py", Torchrun("0", 1)),
        ("/opt/bin/torchrun --nproc-per-node=4 train.py", Torchrun("0", 4)),
        ("torchrun --nproc_per_node 4 --nnodes 2 --max_restarts=3 train.py", Torchrun("3", 8)),
        ("torchrun --nproc-per-node gpu train.py", Torchrun("0", None)),
        ("torchrun --nnodes 1:4 --nproc-per-node 2 train.py", Torchrun("0", None)),
        ("python -m torch.distributed.run --max-restarts 1 train.py", Torchrun("1", 1)),
        ("torchrun --master-port 31000 train.py", Torchrun("0", 1, 31000)),
        ("torchrun --rdzv-endpoint=h:31000 train.py", Torchrun("0", 1, 31000)),
        ("torchrun --standalone train.py", Torchrun("0", 1, 0)),
        ("torchrun --rdzv-backend c10d --rdzv-endpoint h:31000 train.py", Torchrun("0", 1, 0)),
    ],
)
def test_what_is_told(command: str, read: Torchrun | None) -> None:
    assert read_torchrun(shlex.split(command), {"MASTER_PORT": "1"}) == read


def test_a_variable_stands_for_an_option() -> None:
    variables = {"PET_NPROC_PER_NODE": "4", "PET_MAX_RESTARTS": "3", "PET_MASTER_PORT": "31000"}
    assert read_torchrun(["torchrun", "--nproc-per-node", "2", "train.py"], variables) == Torchrun("3", 2, 31000)


def test_the_first_rank_that_failed_stands_behind_torchrun_s_end() -> None:
    stopped = ["[1]:", "  rank      : 0 (local_rank: 0)", "  exitcode  : -15 (pid: 76)  (SIGTERM)"]
    first = ["[0]:", "  host      : h", "  rank      : 9 (local_rank: 1)", "  exitcode  : 130 (pid: 77)"]
    said = ["train.py FAILED", *stopped, "Root Cause (first observed failure):", *first, "  error_file: <N/A>"]
    assert failure_behind(1, said) == Failure(9, 130, 77)
    assert failure_behind(1, ["nothing"]) is None
    assert failure_behind(-15, said) is None
