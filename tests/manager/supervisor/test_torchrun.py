"""torchrun's words."""

import shlex

import pytest

from manager.supervisor.rules.torchrun import Torchrun, exit_behind, read_torchrun


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
    ],
)
def test_what_is_told(command: str, read: Torchrun | None) -> None:
    assert read_torchrun(shlex.split(command)) == read


def test_the_rank_s_own_end_stands_behind_torchrun_s() -> None:
    said = ["train.py FAILED", "  exitcode  : 130 (pid: 77)", "  error_file: <N/A>"]
    assert exit_behind(1, said) == 130
    assert exit_behind(1, ["  exitcode  : -9 (pid: 77)"]) == -9
    assert exit_behind(1, ["nothing"]) == 1
    assert exit_behind(-15, said) == -15
