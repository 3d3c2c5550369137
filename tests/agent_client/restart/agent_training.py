"""A replica group's training script below the decorator: it comes back in its processes, and its peers go on.

python -m tests.agent_client.restart.agent_training STEPS SEED FAULTS closes|leaves

In each of the first FAULTS generations one rank of the group fails, some steps after the group has come in.
"""

import contextlib
import hashlib
import logging
import os
import random
import sys
import time

import torch
from torch import Tensor, nn

from agent_client import (
    Agent,
    CallWrapper,
    DistributedDataParallel,
    FaultTolerantOptimizer,
    TrainState,
    Wrapper,
)
from tests.agent_client.restart.failing_training import Drawn, FailsBackward

PLACES = ("forward", "backward", "between", "while others wait")
PACE_S = 0.02


class Fault:
    """Of this rank in this generation, if it has one."""

    def __init__(self, seed: int, generation: int, faults: int) -> None:
        draw = random.Random(1000 * seed + generation)
        self._rank, self._place, self._after = draw.randrange(2), draw.choice(PLACES), draw.randint(5, 20)
        self._is_here = generation < faults and self._rank == int(os.environ["RANK"])
        self._first: int | None = None

    def at(self, step: int, place: str) -> bool:
        self._first = step if self._first is None else self._first
        found = self._is_here and place == self._place and step >= self._first + self._after
        if found:
            print(f"fault {time.time():.3f} {place}", flush=True)
        return found

    def strike(self, step: int, place: str, pause_s: float = 0.0) -> None:
        if self.at(step, place):
            time.sleep(pause_s)
            raise Drawn(place)


def digest(model: nn.Module) -> str:
    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()[:16]


def data(step: int, place: int) -> Tensor:
    return torch.randn(16, 8, generator=torch.Generator().manual_seed(100 * step + place))


@Wrapper(use_global_iteration=True, restart_scope="group", max_restarts=None, restart_delay=None)
def train(call_wrapper: CallWrapper) -> None:
    steps, seed, faults = map(int, sys.argv[1:4])
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1))
    sgd = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    fault = Fault(seed, call_wrapper.iteration, faults)
    print(f"begins {call_wrapper.iteration} {os.getpid()} {os.environ['RANK']}/{os.environ['WORLD_SIZE']}", flush=True)
    agent = Agent.from_env(state=TrainState(model, sgd))
    with agent if sys.argv[4] == "closes" else contextlib.nullcontext():
        replicated, optimizer = DistributedDataParallel(model, agent), FaultTolerantOptimizer(sgd, agent)
        while agent.current_step < steps:
            began_at, step = time.monotonic(), agent.current_step
            optimizer.zero_grad()
            x = data(step, agent.slot()[0])
            fault.strike(step, "forward")
            loss = (replicated(x) - x.sum(1, keepdim=True)).square().mean()
            (FailsBackward.apply(loss) if fault.at(step, "backward") else loss).backward()
            fault.strike(step, "between")
            if optimizer.step():
                print(f"committed {time.time():.3f} {agent.current_step} {len(agent.participants)}", flush=True)
            call_wrapper.ping(agent.current_step)
            fault.strike(step, "while others wait", 0.2)
            time.sleep(max(0.0, began_at + PACE_S - time.monotonic()))
        print(f"ends {agent.current_step} {digest(model)} {len(os.listdir('/proc/self/task'))}", flush=True)


if __name__ == "__main__":
    logging.basicConfig(level="INFO", format="%(message)s")
    torch.set_num_threads(1)
    train()
