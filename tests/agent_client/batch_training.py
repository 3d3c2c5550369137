"""What runs in the ranks of step/test_world_size.py: DDP in float64, with as many microbatches as are this rank's."""

import contextlib
from typing import Any

import torch
from torch import Tensor, nn

from agent_client.training.sampler import StepSampler
from tests.agent_client.training_kinds import Ddp

STEPS = 200
SAMPLES = 96
BATCH_SIZE = 4


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def sgd_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def data() -> tuple[Tensor, Tensor]:
    inputs = torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    return inputs, inputs.sin().sum(1, keepdim=True)


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.mse_loss(model(inputs), targets)


class BatchActor(Ddp):
    """Ends after STEPS. Of each step it writes what counted: each sample's share, in samples of one batch, and the mean
    loss."""

    def build(self, manager: str, **options: Any) -> None:
        super().build(manager, **options)
        self.batches = StepSampler(SAMPLES, BATCH_SIZE, self.agent).microbatches()
        self.inputs, self.targets = data()
        self.finish(STEPS)

    def make_module(self) -> nn.Module:
        return make_model()

    def make_inner(self) -> torch.optim.Optimizer:
        return sgd_of(self.module)

    def compute(self) -> None:
        """The last backward pass reduces the sum of the microbatches' gradients."""
        batches, losses = next(self.batches), torch.zeros(1, dtype=torch.float64)
        for number, batch in enumerate(batches):
            is_last = number == len(batches) - 1
            with contextlib.nullcontext() if is_last else self.model.no_sync():
                loss = loss_of(self.model, self.inputs[batch], self.targets[batch])
                loss.backward()
            losses += loss.detach()
        counts = torch.cat(batches).bincount(minlength=SAMPLES).double()
        self.report = self.agent.all_reduce(torch.cat([counts, losses])).result()

    def _describe(self) -> dict[str, Any]:
        return super()._describe() | {"shares": self.report[:-1].tolist(), "loss": float(self.report[-1])}
