"""The rank of a replica group of one, which trains a small transformer under one contender after the other.

A contender is a copy of the model with a wrapper and an optimizer. All copies are in one process, so that disturbances
of the machine affect all of them. An order is {"contender", "steps"}. The reply has the seconds of each part of each
step, and the CPU time of the process.
"""

import itertools
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import TCPStore, init_process_group

from agent_client import Agent, AgentConfig, DistributedDataParallel, FaultTolerantOptimizer, TrainState
from benchmarks.support.children import answer_orders

HERE = "127.0.0.1"
TOKENS, WIDTH, LENGTH, BATCH = 1000, 128, 64, 8
TIMEOUT = timedelta(seconds=60)


@dataclass(frozen=True, slots=True)
class Copy:
    """Wrapped model and optimizer of one contender."""

    model: nn.Module
    optimizer: Any


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, nhead=4, dim_feedforward=4 * WIDTH, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, num_layers=4, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, TOKENS)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layers(self.embed(tokens)))


def fresh() -> tuple[Transformer, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Transformer()
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


def bare(_: str) -> Copy:
    """Use torch's DDP, without fault tolerance."""
    model, optimizer = fresh()
    return Copy(nn.parallel.DistributedDataParallel(model), optimizer)


def ours(manager: str) -> Copy:
    model, optimizer = fresh()
    agent = Agent(manager, state=TrainState(model, optimizer), config=AgentConfig(advertise=HERE))
    return Copy(DistributedDataParallel(model, agent), FaultTolerantOptimizer(optimizer, agent))


def torchft(lighthouse: str) -> Copy:
    """Use torchft, whose manager runs in this process."""
    import torchft

    model, optimizer = fresh()
    store = TCPStore(HERE, 0, is_master=True, wait_for_workers=False)
    manager: Any = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=TIMEOUT),
        load_state_dict=lambda state: None,
        state_dict=dict,
        min_replica_size=3,
        timeout=TIMEOUT,
        rank=0,
        world_size=1,
        store_addr=HERE,
        store_port=store.port,
        lighthouse_addr=f"http://{lighthouse}",
        replica_id=f"group_{os.environ['RANK']}_",
        hostname=HERE,
    )
    manager.own_store = store
    return Copy(torchft.DistributedDataParallel(manager, model), torchft.Optimizer(manager, optimizer))


def step(copy: Copy, tokens: Tensor) -> list[float]:
    """Train a step, and return the seconds of zero_grad, forward, backward and the optimizer's step."""
    times = [time.perf_counter()]

    def note() -> None:
        times.append(time.perf_counter())

    copy.optimizer.zero_grad()
    note()
    logits = copy.model(tokens[:, :-1])
    loss = nn.functional.cross_entropy(logits.reshape(-1, TOKENS), tokens[:, 1:].reshape(-1))
    note()
    loss.backward()
    note()
    copy.optimizer.step()
    note()
    return [after - before for before, after in itertools.pairwise(times)]


def main() -> None:
    rank, store_port, manager, lighthouse = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
    os.environ["RANK"] = str(rank)
    torch.set_num_threads(1)
    store = TCPStore(HERE, store_port, is_master=rank == 0, wait_for_workers=False, timeout=TIMEOUT)
    init_process_group("gloo", store=store, rank=rank, world_size=3, timeout=TIMEOUT)
    makers: dict[str, tuple[Callable[[str], Copy], str]] = {
        "bare": (bare, ""),
        "ours": (ours, manager),
        "torchft": (torchft, lighthouse),
    }
    copies: dict[str, Copy] = {}
    generator = torch.Generator().manual_seed(rank)

    def run(contender: str, steps: int) -> dict[str, Any]:
        if contender not in copies:
            make, address = makers[contender]
            copies[contender] = make(address)
        batches = [torch.randint(TOKENS, (BATCH, LENGTH + 1), generator=generator) for _ in range(steps)]
        began_at = time.process_time()
        parts = [step(copies[contender], tokens) for tokens in batches]
        return {"parts_s": parts, "cpu_s": time.process_time() - began_at}

    print("ready", flush=True)
    answer_orders(run)
    os._exit(0)


if __name__ == "__main__":
    main()
