"""A training script as its users write it: plain DDP or FSDP2 below the decorator, a checkpoint after each step.

python -m tests.agent_client.restart.failing_training FOLDER ddp|fsdp2 STEPS SEED FAULTS PLACE,PLACE... gloo|nccl

With nccl all ranks of a host share its first GPU.

FAULTS times one rank fails, a drawn one, in one of the first steps after a start, at a drawn place. Prints:

process PID SLOT         it has started
steps PID THREADS FDS    the first step of all ranks is done
fault PLACE
ends LOSS
"""

import os
import random
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from agent_client import CallWrapper, Wrapper
from agent_client.collectives import gloo
from tests.agent_client.shared_gpu import share_gpu

WIDTH = 64
STEPS_BEFORE_A_FAULT = 4  # at most


class Drawn(Exception):
    """The fault that was to be."""


class Batches(Dataset[Tensor]):
    def __init__(self, rank: int, bad: int | None) -> None:
        self._rank, self._bad = rank, bad

    def __getitem__(self, step: int) -> Tensor:
        if step == self._bad:
            raise Drawn("loader")
        return torch.randn(16, 8, generator=torch.Generator().manual_seed(100 * step + self._rank))


class FailsBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        raise Drawn("backward")


class Fault:
    """The next one. Each that has struck has left a file in `folder`; none strikes before all ranks have counted."""

    def __init__(self, folder: Path, seed: int, faults: int, places: list[str], first: int) -> None:
        self._number = len(list(folder.glob("fault-*")))
        self._mark = folder / f"fault-{self._number}"
        draw = random.Random(1000 * seed + self._number)
        rank, self.place = draw.randrange(dist.get_world_size()), draw.choice(places)
        self.step = first + draw.randint(1, STEPS_BEFORE_A_FAULT)
        self.is_here = self._number < faults and rank == dist.get_rank()

    def is_at(self, step: int, place: str) -> bool:
        return self.is_here and (step, place) == (self.step, self.place)

    def note(self) -> None:
        """It strikes now."""
        self._mark.touch()
        say("fault", self.place)

    def strike(self, step: int, *places: str) -> None:
        if not any(self.is_at(step, place) for place in places):
            return
        if self.place == "while-others-wait":
            time.sleep(0.3)
        self.note()
        match self.place:
            case "exit":
                os._exit(3)
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case _:
                pass
        raise Drawn(self.place)


def say(*words: object) -> None:
    os.write(1, (" ".join(map(str, words)) + "\n").encode())  # at once, and whole


def measured() -> tuple[int, int]:
    """Threads and descriptors, once nothing is kept of groups that have ended."""
    ends_at = time.monotonic() + 2 * gloo.LET_GO_WITHIN_S
    while any(each.name == "gloo remains" for each in threading.enumerate()) and time.monotonic() < ends_at:
        time.sleep(0.02)
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def model_of(kind: str, device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    layers = (nn.Linear(8, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))
    model = nn.Sequential(*layers).to(device)
    if kind == "ddp":
        return DistributedDataParallel(model)
    fully_shard(model)
    return model


OPTIONS = StateDictOptions(full_state_dict=True, cpu_offload=True)


def load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """The step to go on with."""
    if not path.exists():
        return 0
    saved = torch.load(path, weights_only=True)
    set_state_dict(
        model, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"], options=OPTIONS
    )
    return saved["step"]


def save(path: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    states = get_state_dict(model, optimizer, options=OPTIONS)
    if dist.get_rank() == 0:
        torch.save({"step": step, "model": states[0], "optimizer": states[1]}, path.with_suffix(".new"))
        path.with_suffix(".new").rename(path)


def batches(first: int, steps: int, fault: Fault) -> Iterator[tuple[int, Tensor]]:
    """From a process of its own. Where it is to fail, it does in there."""
    bad = fault.step if fault.is_here and fault.place == "loader" else None
    loader = iter(DataLoader(Batches(dist.get_rank(), bad), None, sampler=range(first, steps), num_workers=1))
    for step in range(first, steps):
        if fault.is_at(step, "loader"):
            fault.note()
        yield step, next(loader)


@Wrapper(use_global_iteration=True, max_restarts=None)
def train(call_wrapper: CallWrapper) -> None:
    folder, kind, places, backend = Path(sys.argv[1]), sys.argv[2], sys.argv[6].split(","), sys.argv[7]
    steps, seed, faults = map(int, sys.argv[3:6])
    device = share_gpu() if backend == "nccl" else torch.device("cpu")
    dist.init_process_group(backend)
    model = model_of(kind, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
    first = load(folder / "checkpoint", model, optimizer)
    fault = Fault(folder, seed, faults, places, first)
    loss = torch.zeros(1, device=device)
    for step, batch in batches(first, steps, fault):
        fault.strike(step, "forward", "exit", "kill", "stop")
        x = batch.to(device)
        out = model(x)
        loss = ((out - x.sum(1, keepdim=True)) ** 2).mean()
        optimizer.zero_grad()
        if fault.is_at(step, "backward"):
            fault.note()
            loss = FailsBackward.apply(loss)
        loss.backward()
        fault.strike(step, "between")
        optimizer.step()
        fault.strike(step, "while-others-wait")
        save(folder / "checkpoint", step + 1, model, optimizer)
        call_wrapper.ping(step)
        if step == first:
            say("steps", os.getpid(), *measured())
    dist.all_reduce(loss)
    say("ends", f"{loss.item():.9g}")
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    say("process", os.getpid(), os.environ["LIGHTHOUSE_SLOT"])
    train()
