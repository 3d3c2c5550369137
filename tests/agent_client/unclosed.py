"""A training script that ends without closing its Agent, while the Agent's thread is in torch's C++ code."""

import sys
import time

import torch

from agent_client import Agent, AgentConfig, TrainState

BUSY_S = 2.0


def compute() -> None:
    ends_at, matrix = time.monotonic() + BUSY_S, torch.ones(500, 500)
    while time.monotonic() < ends_at:
        torch.mm(matrix, matrix)


def main() -> None:
    model = torch.nn.Linear(2, 2)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    agent = Agent(sys.argv[1], state=TrainState(model, sgd), config=AgentConfig(advertise="127.0.0.1"))
    agent.internals.thread.submit(compute)
    time.sleep(0.1)
    raise SystemExit(3)


if __name__ == "__main__":
    main()
