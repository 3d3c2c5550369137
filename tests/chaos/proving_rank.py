"""Training of a small model with DDP, which records everything that the proof checks.

After SIGUSR1 a gradient becomes NaN. After SIGUSR2 the rank raises MemoryError.
"""

import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn

from agent_client import Agent, DistributedDataParallel, FaultTolerantOptimizer, StepSampler, TrainState

SAMPLES = 1009
BATCH_SIZE = 8
PACE_S = 0.1


def main() -> None:
    events = Path(sys.argv[1])
    asked: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, _: asked.append(number))
    signal.signal(signal.SIGUSR2, lambda number, _: asked.append(number))
    torch.manual_seed(os.getpid())  # equal weights come from the first heal alone
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 8))
    adam = torch.optim.Adam(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(0)
    inputs, targets = torch.randn(SAMPLES, 16, generator=generator), torch.randn(SAMPLES, 8, generator=generator)

    agent = Agent.from_env(state=TrainState(model, adam), check_state_every=1, timeout_s=10.0)
    replicated, optimizer = DistributedDataParallel(model, agent), FaultTolerantOptimizer(adam, agent)
    with events.open("a") as file:
        for batch in StepSampler(SAMPLES, BATCH_SIZE, agent, seed=1):
            began_at = time.monotonic()
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(replicated(inputs[batch]), targets[batch])
            if asked:
                if asked.pop() == signal.SIGUSR2:
                    raise MemoryError("as the proof has asked")
                loss = loss * float("nan")
            loss.backward()
            contributed, step = agent.is_participating, agent.current_step
            if optimizer.step():
                digest = hashlib.blake2b(digest_size=8)
                for parameter in model.parameters():
                    digest.update(parameter.detach().numpy().tobytes())
                used = batch.tolist() if contributed else []
                line = [time.time(), step, agent.quorum_id, len(agent.participants), digest.hexdigest(), used]
                file.write(json.dumps(line) + "\n")
                file.flush()
            time.sleep(max(0.0, began_at + PACE_S - time.monotonic()))


if __name__ == "__main__":
    main()
