"""Plain torch, as in the document: DDP over gloo, no Agent. After an epoch the validation loader of all ranks but 0
yields nothing, as often as the first argument says."""

import os
import sys
import threading
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

EPOCHS, STEPS, BATCHES = 2, 100, 25
IS_BROKEN = int(os.environ["RANK"]) > 0 and int(os.environ["LIGHTHOUSE_ATTEMPT"]) < int(sys.argv[1])


def batches() -> Iterator[torch.Tensor]:
    if IS_BROKEN:
        threading.Event().wait()
    for _ in range(BATCHES):
        yield torch.rand(8, 16)


def validate(model: torch.nn.Module) -> float:
    total = torch.zeros(1)
    for batch in batches():
        total += model(batch).sum().detach()
    dist.all_reduce(total)
    return total.item()


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(EPOCHS):
        for _ in range(STEPS):
            optimizer.zero_grad()
            model(torch.rand(8, 16)).sum().backward()
            optimizer.step()
            time.sleep(0.03)
        validate(model.module)
    print("trained to the end", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
