"""A rank of plain DDP over gloo. One rank raises in each run of the function but the last.

With the argument `in-process` the function runs under the decorator, else torchrun restarts the process.

Prints `raises RUN TIME` and `steps RUN TIME THREADS RESIDENT_KIB`, TIME on the clock of all processes of this host.
"""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from agent_client import CallWrapper, Wrapper

STEPS_BEFORE_A_FAULT = 3


def train(run: int, runs: int) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1)))
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(STEPS_BEFORE_A_FAULT + 1):
        optimizer.zero_grad()
        model(torch.randn(32, 256)).square().mean().backward()
        optimizer.step()
        if step == 0:
            say("steps", run, *measured())
    if run < runs and dist.get_rank() == run % dist.get_world_size():
        say("raises", run)
        raise RuntimeError("drawn")
    dist.barrier()
    dist.destroy_process_group()


def say(what: str, run: int, *more: int) -> None:
    os.write(1, f"{what} {run} {time.monotonic():.4f} {' '.join(map(str, more))}\n".encode())


def measured() -> tuple[int, int]:
    resident = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS"))
    return len(os.listdir("/proc/self/task")), int(resident.split()[1])


def main(how: str, runs: int) -> None:
    torch.set_num_threads(1)
    if how != "in-process":
        train(int(os.environ["TORCHELASTIC_RESTART_COUNT"]), runs)
        return

    @Wrapper(use_global_iteration=True, max_restarts=None, restart_delay=None)
    def wrapped(call_wrapper: CallWrapper) -> None:
        train(call_wrapper.iteration, runs)

    wrapped()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
