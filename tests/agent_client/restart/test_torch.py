"""Plain DDP and FSDP2 below the decorator, with a supervisor: whatever fails, training ends as without faults."""

import re
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.daemons.supervisors import QUICK, Supervisor
from tests.processes import Lighthouse

pytest.importorskip("torch")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

STEPS = 40
IN_PLACE = "forward,backward,between,loader,while others wait"


class Trained:
    """What became of four active ranks, of `ranks` in all."""

    def __init__(self, folder: Path, kind: str, faults: int, places: str, ranks: int = 4, seed: int = 1) -> None:
        script = [sys.executable, "-m", "tests.agent_client.restart.torch_training"]
        options = [
            "--nproc-per-node",
            str(ranks),
            "--active-ranks",
            "4",
            "--min-active-ranks",
            "4",
            "--max-restarts",
            "50",
            *QUICK,
        ]
        command = [*script, str(folder), kind, str(STEPS), str(seed), places]
        with (
            Lighthouse("--rank-timeout", "5s") as lighthouse,
            Supervisor(lighthouse.address, *options, command=command, env={"FAULTS": str(faults)}) as supervisor,
        ):
            self.status = supervisor.wait(600)
            self.log = supervisor.log()
        self.faults = re.findall(r"^.*\] fault (.*) [\d.]+$", self.log, re.MULTILINE)
        self.pids = {int(pid) for pid in re.findall(r"\] begins \d+ (\d+) ", self.log)}
        ends: Sequence[tuple[str, str]] = re.findall(r"\] ends (\S+) (\d+)$", self.log, re.MULTILINE)
        self.losses = [float(loss) for loss, _ in ends]
        self.threads = [int(threads) for _, threads in ends]


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_it_comes_back_in_the_same_processes(kind: str, tmp_path: Path) -> None:
    (tmp_path / "without").mkdir()
    (tmp_path / "with").mkdir()
    without = Trained(tmp_path / "without", kind, 0, IN_PLACE)
    assert without.status == 0, without.log
    trained = Trained(tmp_path / "with", kind, 8, IN_PLACE)
    assert trained.status == 0, trained.log
    assert len(trained.faults) >= 6
    assert trained.losses == pytest.approx(without.losses, rel=1e-3)
    assert len(trained.pids) == 4, "no process was replaced"
    assert min(trained.threads) <= max(without.threads) + 1, "nothing is left of what was ended"


def test_a_process_that_is_lost_is_replaced_by_a_spare(tmp_path: Path) -> None:
    trained = Trained(tmp_path, "ddp", 5, "exit,kill,between", ranks=5)
    assert trained.status == 0, trained.log
    assert {"exit", "kill"} & set(trained.faults)
    assert len(set(trained.losses)) == 1
    assert len(trained.losses) == 4
