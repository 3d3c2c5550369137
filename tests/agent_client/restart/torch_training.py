"""A training script as its users write it: plain DDP or FSDP2 below the decorator, a checkpoint after each step.

python -m tests.agent_client.restart.torch_training FOLDER ddp|fsdp2 STEPS SEED PLACE,PLACE...

In each generation but the last ones (`FAULTS` of them) one rank fails in a drawn step, at a drawn place.
"""

import logging
import os
import random
import sys
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

FAULTS = int(os.environ.get("FAULTS", "0"))
WIDTH = int(os.environ.get("WIDTH", "64"))
FOR_GOOD = ("exit", "kill", "stop")


class Drawn(Exception):
    """The fault that this generation was to have."""


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
    """Where and when this rank fails in this generation, if it does."""

    def __init__(self, seed: int, generation: int, first: int, places: list[str]) -> None:
        draw = random.Random(1000 * seed + generation)
        rank, self.place, self.step = (
            draw.randrange(dist.get_world_size()),
            draw.choice(places),
            first + draw.randint(1, 4),
        )
        self.is_here = generation % 100 < FAULTS and generation < 100 + FAULTS and rank == dist.get_rank()

    def at(self, step: int, place: str) -> bool:
        found = self.is_here and (step, place) == (self.step, self.place)
        if found:
            print("fault", place, f"{time.time():.3f}", flush=True)
        return found

    def strike(self, step: int, *places: str) -> None:
        for place in places:
            if self.at(step, place):
                match place:
                    case "exit":
                        os._exit(3)
                    case "kill":
                        os.kill(os.getpid(), 9)
                    case "stop":
                        os.kill(os.getpid(), 19)
                    case "while others wait":
                        time.sleep(0.3)
                    case _:
                        pass
                raise Drawn(place)


def model_of(kind: str) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))
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
    bad = fault.step if fault.is_here and fault.place == "loader" else None
    workers = 2 if fault.place == "loader" else 0
    loader = DataLoader(Batches(dist.get_rank(), bad), None, sampler=range(first, steps), num_workers=workers)
    return zip(range(first, steps), loader, strict=True)


@Wrapper(use_global_iteration=True, active_world_size=4, max_restarts=None, restart_delay=None)
def train(call_wrapper: CallWrapper) -> None:
    folder, kind, steps, seed, places = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5]
    dist.init_process_group("gloo")
    model = model_of(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
    first = load(folder / "checkpoint", model, optimizer)
    fault = Fault(seed, call_wrapper.iteration, first, places.split(","))
    print("begins", call_wrapper.iteration, os.getpid(), first, f"{time.time():.3f}", flush=True)
    loss = torch.zeros(1)
    for step, x in batches(first, steps, fault):
        fault.at(step, "loader")
        fault.strike(step, "forward", *FOR_GOOD)
        out = model(x)
        loss = ((out - x.sum(1, keepdim=True)) ** 2).mean()
        optimizer.zero_grad()
        (FailsBackward.apply(loss) if fault.at(step, "backward") else loss).backward()
        fault.strike(step, "between")
        optimizer.step()
        fault.strike(step, "while others wait")
        save(folder / "checkpoint", step + 1, model, optimizer)
        call_wrapper.ping(step)
    dist.all_reduce(loss)
    print("ends", f"{loss.item():.6g}", len(os.listdir("/proc/self/task")), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    logging.basicConfig(level="INFO", format="%(message)s")
    torch.set_num_threads(1)
    train()
