"""One rank of a training that a supervisor starts: all train a line; the first process of b/1 stands still in its 20th
step, in a regular expression that holds the interpreter lock for ever.

    python -m tests.agent_client.holding_script STEPS
"""

import os
import re
import sys
import time

import torch
from torch import nn

from agent_client import Agent, DistributedDataParallel, FaultTolerantOptimizer, TrainState

HELD_STEP = 20


def is_the_one() -> bool:
    return (os.environ["REPLICA_GROUP_ID"], os.environ["RANK"], os.environ["LIGHTHOUSE_ATTEMPT"]) == ("b", "1", "0")


def match_for_ever() -> None:
    print("matching", flush=True)
    re.fullmatch("(a+)+", "a" * 200 + "b")


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.01)
    agent = Agent.from_env(state=TrainState(model, sgd))
    replicated, optimizer = DistributedDataParallel(model, agent), FaultTolerantOptimizer(sgd, agent)
    while agent.current_step < int(sys.argv[1]):
        optimizer.zero_grad()
        with agent.phase("matching"):
            if agent.current_step == HELD_STEP and is_the_one():
                match_for_ever()
        replicated(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        time.sleep(0.05)
    print(f"has done {agent.current_step} steps", flush=True)
    agent.close()


if __name__ == "__main__":
    main()
