"""A rank that trains a small model with DDP, and saves checkpoints to the folder in its argument, if there is one.

NOISE_GROUP names a group that adds noise to its weights from its 40th step on.
"""

import os
import sys
import time

import torch
from torch import nn

from agent_client import (
    Agent,
    CheckpointFolder,
    DistributedDataParallel,
    FaultTolerantOptimizer,
    StepSampler,
    TrainState,
)

PACE_S = 0.03
NOISE_FROM = 40


def main() -> None:
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))
    sgd = torch.optim.SGD(model.parameters(), lr=0.01)
    agent = Agent.from_env(state=TrainState(model, sgd), check_state_every=4, timeout_s=20.0)
    replicated, optimizer = DistributedDataParallel(model, agent), FaultTolerantOptimizer(sgd, agent)
    folder = CheckpointFolder(sys.argv[1], agent) if len(sys.argv) > 1 else None
    is_noisy = os.environ.get("NOISE_GROUP") == os.environ["REPLICA_GROUP_ID"]
    inputs = torch.randn(97, 8, generator=torch.Generator().manual_seed(0))
    for batch in StepSampler(97, 4, agent, seed=1):
        optimizer.zero_grad()
        replicated(inputs[batch]).square().mean().backward()
        if optimizer.step() and folder is not None:
            folder.save()
        if is_noisy and agent.current_step > NOISE_FROM:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(torch.randn_like(parameter))
        time.sleep(PACE_S)


if __name__ == "__main__":
    main()
