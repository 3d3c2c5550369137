"""A rank that trains one number. A step lasts until the file `hold` is absent; each commit is a line."""

import sys
import time
from pathlib import Path

import torch

from agent_client import Agent, CheckpointFolder, DistributedDataParallel, FaultTolerantOptimizer, TrainState

folder, hold = Path(sys.argv[1]), Path(sys.argv[2])
torch.manual_seed(0)
model = torch.nn.Linear(1, 1)
sgd = torch.optim.SGD(model.parameters(), lr=0.001)
with Agent.from_env(state=TrainState(model, sgd)) as agent:
    replicated, optimizer = DistributedDataParallel(model, agent), FaultTolerantOptimizer(sgd, agent)
    checkpoints = CheckpointFolder(folder, agent)
    checkpoints.resume()
    print(f"starts at {agent.current_step}", flush=True)
    while True:
        optimizer.zero_grad()
        loss = replicated(torch.ones(1, 1)).sum()
        while hold.exists():
            time.sleep(0.01)
        loss.backward()
        is_committed = optimizer.step()
        notice = agent.preemption.source if agent.preemption is not None else "-"
        what = "commit" if is_committed else "discard"
        print(f"{what} {agent.current_step} of {agent.num_participants} notice {notice}", flush=True)
        time.sleep(0.02)
