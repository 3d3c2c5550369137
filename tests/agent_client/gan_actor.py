"""One rank that trains two networks in turns: each step is a vote of one optimizer or of the other."""

from typing import Any

import torch
from torch import nn

from agent_client.state.train_state import TrainState
from agent_client.training.ddp import DistributedDataParallel
from agent_client.training.optimizer import FaultTolerantOptimizer
from tests.agent_client.actors import build_agent, digest


class GanActor:
    def build(self, manager: str, *, seed: int = 0, **options: Any) -> None:
        torch.manual_seed(seed)
        self.both = nn.ModuleDict({"critic": nn.Linear(8, 40), "generator": nn.Linear(8, 4)})
        optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in self.both.values()]
        self.agent = build_agent(manager, TrainState(self.both, optimizers[0], generator=optimizers[1]), **options)
        self.models = [DistributedDataParallel(part, self.agent) for part in self.both.values()]
        self.optimizers = [FaultTolerantOptimizer(optimizer, self.agent) for optimizer in optimizers]

    def step(self) -> dict[str, Any]:
        """The turn is that of the quorum's step, not of a counter of the script's own."""
        self.agent.start_quorum()
        turn = (self.agent.quorum_step or 0) % 2
        self.optimizers[turn].zero_grad()
        self.models[turn](torch.ones(2, 8)).square().mean().backward()
        is_committed = self.optimizers[turn].step()
        return {
            "committed": is_committed,
            "turn": turn,
            "participants": list(self.agent.participants),
            "hash": digest(*self.both.parameters()),
        }
