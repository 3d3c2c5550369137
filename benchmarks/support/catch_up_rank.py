"""The rank of a replica group of one, which trains a model of a given size with DDP over gloo.

It prints a line for each committed step, as training_rank.py does: "commit" if its gradients count and the rank is not
catching up, else "behind".
"""

import json
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from agent_client import Agent, AgentConfig, DistributedDataParallel, FaultTolerantOptimizer, TrainState
from agent_client.state.codec import Encoding
from benchmarks.support.trainer import BATCH, HERE
from benchmarks.support.training_rank import tell

WIDTH = 2048
BYTES_A_PARAMETER = 12
"""A float32 parameter and Adam's two moments."""


def model_of(state_bytes: int) -> nn.Module:
    layers = max(1, round(state_bytes / BYTES_A_PARAMETER / (WIDTH * WIDTH)))
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))


def limit_link(bytes_per_s: float) -> None:
    """Slow down the sending of this rank's state, as if over a link of that speed."""

    def stripe(encoding: Encoding, start: int, stop: int, real: Any = Encoding.stripe) -> Iterator[memoryview]:
        began_at, sent = time.monotonic(), 0
        for chunk in real(encoding, start, stop):
            yield chunk
            sent += len(chunk)
            time.sleep(max(0.0, began_at + sent / bytes_per_s - time.monotonic()))

    setattr(Encoding, "stripe", stripe)  # noqa: B010  a type checker forbids the other way


def main() -> None:
    told = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    if told["link_mb_s"]:
        limit_link(1e6 * told["link_mb_s"])
    module = model_of(told["state_bytes"])
    adam = torch.optim.Adam(module.parameters(), lr=1e-4)
    config = AgentConfig(advertise=HERE, heal_mode=told["mode"])
    agent = Agent(told["manager"], state=TrainState(module, adam), config=config)
    model, optimizer = DistributedDataParallel(module, agent), FaultTolerantOptimizer(adam, agent)
    while True:
        optimizer.zero_grad()
        batch = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(agent.current_step))
        model(batch).square().mean().backward()
        counts = agent.is_participating
        if optimizer.step():
            what = "commit" if counts and not agent.catches_up else "behind"
            tell(what, agent.quorum_id, agent.current_step, agent.num_participants)


if __name__ == "__main__":
    main()
