"""Plain DDP and FSDP2 below the decorator, with a supervisor: whatever fails, training ends as without faults."""

import re
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.daemons.supervisors import QUICK, Supervisor
from tests.processes import Lighthouse

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.timeout(900)

STEPS = 60
ACTIVE = 4
SURVIVED = ("forward", "backward", "between", "loader", "while-others-wait")
FATAL = ("exit", "kill", "stop")


@dataclass(slots=True)
class Job:
    """What it printed. `losses`: of each rank at the end; `started`: its processes, spares too; `places`: of its
    faults; `held`: threads and descriptors of each process, after the first step of each of its generations."""

    losses: list[float] = field(default_factory=list[float])
    started: int = 0
    places: list[str] = field(default_factory=list[str])
    held: dict[int, list[tuple[int, int]]] = field(default_factory=dict[int, list[tuple[int, int]]])

    @property
    def lost(self) -> int:
        return sum(place in FATAL for place in self.places)


def follow(log: str) -> Job:
    job = Job()
    for line in log.splitlines():
        match line.split("] ")[-1].split():
            case ["process", _, _]:
                job.started += 1
            case ["fault", place]:
                job.places.append(place)
            case ["steps", pid, threads, descriptors]:
                job.held.setdefault(int(pid), []).append((int(threads), int(descriptors)))
            case ["ends", loss]:
                job.losses.append(float(loss))
            case _:
                pass
    return job


def trained(
    folder: Path,
    kind: str,
    faults: int,
    *places: str,
    ranks: int = ACTIVE,
    seed: int = 1,
    backend: str = "gloo",
) -> Job:
    """What became of four active ranks, of `ranks` in all."""
    folder.mkdir()
    script = [str(folder), kind, str(STEPS), str(seed), str(faults), ",".join(places), backend]
    command = [sys.executable, "-m", "tests.agent_client.restart.failing_training", *script]
    options = ["--nproc-per-node", str(ranks), "--active-ranks", str(ACTIVE), "--min-active-ranks", str(ACTIVE)]
    options += ["--max-restarts", "50", *QUICK]
    with (
        Lighthouse() as lighthouse,
        Supervisor(lighthouse.address, *options, command=command) as supervisor,
    ):
        status, log = supervisor.wait(600), supervisor.log()
    assert status == 0, log
    job = follow(log)
    assert len(job.places) == faults, log
    assert len(job.losses) == ACTIVE, log
    failures = len(re.findall(r"\] iteration \d+ failed$", log, re.MULTILINE))
    assert failures == faults - job.lost, f"a consequence is no failure:\n{log}"
    return job


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_it_comes_back_in_the_same_processes(kind: str, tmp_path: Path) -> None:
    without = trained(tmp_path / "without", kind, 0, *SURVIVED)
    job = trained(tmp_path / "with", kind, 10, *SURVIVED)
    assert job.losses == pytest.approx(without.losses, rel=1e-6)
    assert job.started == len(job.held) == ACTIVE, "no process was replaced"
    # gloo rarely keeps a group that still had a message to send (in-process-restart.md), and never twice in a row.
    ends = [(held[0], held[-1]) for held in job.held.values()]
    grown = [(a, b) for a, b in ends if b[0] > a[0] + 1 or b[1] > a[1] + 2]
    assert len(grown) <= 1, f"nothing is left of what was ended: {grown}"


@pytest.mark.slow
def test_a_process_that_is_lost_is_replaced_by_a_spare(tmp_path: Path) -> None:
    """More are lost than there are spares, so each has to come back; also the one that is stopped, and not dead."""
    job = trained(tmp_path / "run", "ddp", 8, "exit", "kill", "stop", "between", ranks=ACTIVE + 1, seed=8)
    assert set(job.places) == {"exit", "kill", "stop", "between"}
    assert job.started <= ACTIVE + 1 + job.lost
    assert len(set(job.losses)) == 1


MEETS = """
import os, threading, time
import torch, torch.distributed as dist
from agent_client import Wrapper

@Wrapper(use_global_iteration=True, min_active=3)
def train(call_wrapper):
    number, rank = call_wrapper.iteration, call_wrapper.rank
    print(f"generation {number}: rank {rank} of {call_wrapper.world_size}", flush=True)
    if number == 0 and rank == 1:
        time.sleep(2)
        raise RuntimeError("before init_process_group")
    if number == 1 and rank == 0:
        threading.Timer(2, os.kill, (os.getpid(), 9)).start()  # while it serves the store, and is in init_process_group
    if number == 1 and rank == 2:
        time.sleep(600)
    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    print(f"generation {number}: sum {total.item():g}", flush=True)
    dist.destroy_process_group()

train()
"""


@pytest.mark.slow
def test_ranks_meet_again_whose_init_process_group_was_interrupted(tmp_path: Path) -> None:
    """In the process that was interrupted, and in a new one that meets it. The lighthouse is given as two addresses."""
    script = tmp_path / "meets.py"
    script.write_text(MEETS)
    options = ["--nproc-per-node", "3", "--restart-scope", "rank", *QUICK]
    with Lighthouse() as lighthouse:
        both = f"{lighthouse.address},localhost:{lighthouse.port}"
        with Supervisor(both, *options, command=[sys.executable, str(script)]) as supervisor:
            status, log = supervisor.wait(120), supervisor.log()
    assert status == 0, log
    assert log.count("generation 100: sum 3") == 3, log


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_kernels_of_nccl_that_wait_for_a_peer_are_ended(kind: str, tmp_path: Path) -> None:
    """All ranks on one device; a rank that raises lives on, and those that wait for it are in a kernel."""
    without = trained(tmp_path / "without", kind, 0, *SURVIVED, backend="nccl")
    job = trained(tmp_path / "with", kind, 8, *SURVIVED, "kill", ranks=ACTIVE + 1, backend="nccl", seed=3)
    assert job.losses == pytest.approx(without.losses, rel=1e-4)
    assert job.started <= ACTIVE + 1 + job.lost, "no process was replaced that was not lost"
