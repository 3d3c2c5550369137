"""Loops as people write them, each an actor of a training_jobs.TrainingJob."""

from contextlib import nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ExponentialLR

from agent_client.training.ddp import DistributedDataParallel
from agent_client.training.optimizer import FaultTolerantOptimizer, FaultTolerantScheduler
from tests.agent_client.training_kinds import (
    BATCH,
    HIDDEN,
    INPUTS,
    AdaptivelyClipped,
    Averaged,
    Ddp,
    EmaOfBuffers,
    Scaled,
)


class Branching(nn.Module):
    """Two layers are tied, each batch uses one of two branches, and one layer is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(INPUTS, HIDDEN), nn.BatchNorm1d(HIDDEN)
        self.hidden, self.last = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.last.weight = self.hidden.weight
        self.branches = nn.ModuleList([nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)])
        self.idle = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, images: Tensor) -> Tensor:
        hidden = torch.tanh(self.hidden(torch.tanh(self.norm(self.first(images)))))
        return self.last(torch.tanh(self.branches[int(images[0, 0] > 0)](hidden)))


class Everything(AdaptivelyClipped, Scaled):
    """All at once that goes together. What step() returns is dropped, and the model zeroes its gradients at the end."""

    options: ClassVar[dict[str, Any]] = {"bucket_cap_mb": 0.0001, "find_unused_parameters": True}

    def make_module(self) -> nn.Module:
        return Branching()

    def make_inner(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.module.parameters(), lr=torch.tensor(0.01), fused=True)

    def make_others(self) -> dict[str, Any]:
        self.averaged = Averaged(self.module, **EmaOfBuffers.averages)
        self.decay = ExponentialLR(self.inner, 0.99)
        return super().make_others() | {"averaged": self.averaged, "scheduler": self.decay}

    def make_optimizer(self) -> FaultTolerantOptimizer:
        self.scheduler = FaultTolerantScheduler(self.decay, self.agent)
        self.agent.on_commit(lambda step: self.averaged.update_parameters(self.module))
        return super().make_optimizer()

    def prepare(self) -> None: ...

    def iterate(self) -> bool:
        for microbatch in range(3):
            with nullcontext() if microbatch == 2 else self.model.no_sync():
                self.backward(self.loss(microbatch))
        self.has_participated = self.agent.is_participating
        self.scaler.unscale_(self.optimizer)
        self.apply()
        self.scheduler.step()
        self.model.zero_grad()
        assert self.decay.last_epoch == self.agent.current_step
        return self.agent.was_committed


class Gan(Ddp):
    """Two optimizers, each with a step of its own; whose turn it is says the step."""

    def make_module(self) -> nn.Module:
        hidden = nn.Linear(INPUTS, HIDDEN), nn.BatchNorm1d(HIDDEN), nn.Tanh()
        critic = nn.Sequential(nn.Linear(INPUTS, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 1))
        return nn.ModuleDict({"critic": critic, "generator": nn.Sequential(*hidden, nn.Linear(HIDDEN, INPUTS))})

    def make_inner(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.module["critic"].parameters(), lr=0.01)

    def make_others(self) -> dict[str, Any]:
        return {"generator_adam": torch.optim.Adam(self.module["generator"].parameters(), lr=0.01)}

    def wrap(self) -> nn.Module:
        self.critic = DistributedDataParallel(self.module["critic"], self.agent, **self.options)
        self.generator = DistributedDataParallel(self.module["generator"], self.agent, **self.options)
        return self.module

    def make_optimizer(self) -> FaultTolerantOptimizer:
        self.generator_optimizer = FaultTolerantOptimizer(self.others["generator_adam"], self.agent)
        return super().make_optimizer()

    def prepare(self) -> None: ...

    def iterate(self) -> bool:
        place, _ = self.agent.slot()  # as a StepSampler does: it begins the step of a group that may have to heal
        step = self.agent.current_step
        drawn = torch.randn(2, BATCH, INPUTS, generator=torch.Generator().manual_seed(10_000 * step + place))
        real, fake = drawn[0], self.generator(drawn[1])
        if step % 2 == 0:
            optimizer, loss = self.optimizer, self.critic(fake.detach()).mean() - self.critic(real).mean()
        else:
            optimizer, loss = self.generator_optimizer, -self.critic(fake).mean()
        optimizer.zero_grad()
        loss.backward()
        self.has_participated = self.agent.is_participating
        return optimizer.step()


OWN_LOOPS: dict[str, type[Ddp]] = {"everything": Everything, "gan": Gan}
