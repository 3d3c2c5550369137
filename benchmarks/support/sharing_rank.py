"""The rank of a replica group of one, which sleeps in each of its microbatches. Used by `benchmarks.stragglers`.

It prints a line for each committed step, as training_rank.py does.
"""

import contextlib
import json
import sys
import time

import torch
from torch import nn

from agent_client import Agent, AgentConfig, DistributedDataParallel, FaultTolerantOptimizer, StepSampler, TrainState
from benchmarks.support.daemons import HERE
from benchmarks.support.training_rank import tell

WIDTH, SAMPLES, BATCH = 64, 10_000, 4


def main() -> None:
    told = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    module = nn.Linear(WIDTH, WIDTH)
    sgd = torch.optim.SGD(module.parameters(), lr=1e-4)
    config = AgentConfig(
        advertise=HERE,
        world_size_mode="constant_batch",
        world_size=told["microbatches"],
        share_by_speed=told["share_by_speed"],
    )
    agent = Agent(told["manager"], state=TrainState(module, sgd), config=config)
    model, optimizer = DistributedDataParallel(module, agent), FaultTolerantOptimizer(sgd, agent)
    inputs = torch.randn(SAMPLES, WIDTH)
    for batches in StepSampler(SAMPLES, BATCH, agent).microbatches():
        optimizer.zero_grad()
        for number, batch in enumerate(batches):
            time.sleep(told["microbatch_s"][told["name"]])
            with contextlib.nullcontext() if number == len(batches) - 1 else model.no_sync():
                model(inputs[batch]).square().mean().backward()
        if optimizer.step():
            tell("commit", agent.quorum_id, agent.current_step, agent.num_participants)


if __name__ == "__main__":
    main()
