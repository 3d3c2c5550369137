"""A rank of a replica group with an Agent. One rank raises in each of the first RUNS runs of the function.

If RUNS is 0, it trains without end. It prints the lines of failing_ddp.py, where the first step of a run is the first
one that commits together with the peers.
"""

import sys

import torch
from torch import nn

from agent_client import (
    Agent,
    CallWrapper,
    DistributedDataParallel,
    FaultTolerantOptimizer,
    TrainState,
    Wrapper,
)
from benchmarks.support.failing_ddp import STEPS_BEFORE_A_FAULT, measured, say


@Wrapper(use_global_iteration=True, restart_scope="group", max_restarts=None, restart_delay=None)
def train(call_wrapper: CallWrapper) -> None:
    run, runs = call_wrapper.iteration, int(sys.argv[1])
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1))
    adamw = torch.optim.AdamW(model.parameters())
    with Agent.from_env(state=TrainState(model, adamw)) as agent:
        replicated, optimizer = DistributedDataParallel(model, agent), FaultTolerantOptimizer(adamw, agent)
        steps = 0
        while not runs or run == runs or steps <= STEPS_BEFORE_A_FAULT:
            optimizer.zero_grad()
            replicated(torch.randn(32, 256)).square().mean().backward()
            if optimizer.step() and len(agent.participants) > 1:
                if steps == 0:
                    say("steps", run, *measured())
                steps += 1
        if call_wrapper.state.rank == run % call_wrapper.state.world_size:
            say("raises", run)
            raise RuntimeError("drawn")
        agent.sum_over_group(torch.zeros(1))


if __name__ == "__main__":
    torch.set_num_threads(1)
    train()
