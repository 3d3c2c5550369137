"""What runs in the ranks of a training_jobs.TrainingJob: DDP in float64, in a world size mode that is given."""

import contextlib
import json
import time
from pathlib import Path
from typing import Any

import torch

from agent_client.agent.rules.world_size import WorldSizeMode
from agent_client.state.train_state import TrainState
from agent_client.training.ddp import DistributedDataParallel
from agent_client.training.optimizer import FaultTolerantOptimizer
from agent_client.training.sampler import StepSampler
from tests.agent_client.actors import build_agent, digest

SAMPLES = 96
BATCH_SIZE = 4


def model_of(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).double()


def sgd_of(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def data() -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    return inputs, inputs.sin().sum(1, keepdim=True)


def loss_of(model: torch.nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.mse_loss(model(inputs), targets)


class BatchActor:
    def build(
        self,
        manager: str,
        *,
        events: str,
        seed: int,
        mode: str,
        until: int,
        **options: Any,
    ) -> None:
        self.model = model_of(seed)
        sgd = sgd_of(self.model)
        self.agent = build_agent(manager, TrainState(self.model, sgd), world_size_mode=WorldSizeMode(mode), **options)
        self.replicated = DistributedDataParallel(self.model, self.agent)
        self.optimizer = FaultTolerantOptimizer(sgd, self.agent)
        self.sampler = StepSampler(SAMPLES, BATCH_SIZE, self.agent)
        self.until = until
        self.events = Path(events)
        self.inputs, self.targets = data()

    def train(self, pace_s: float) -> None:
        for batches in self.sampler.microbatches():
            if self.agent.current_step >= self.until:
                return
            self.optimizer.zero_grad()
            losses = self._accumulate(batches)
            report = self._report(batches, losses)
            if self.optimizer.step():
                self._write(report, len(batches))
            time.sleep(pace_s)

    def _accumulate(self, batches: list[torch.Tensor]) -> torch.Tensor:
        """The sum of the microbatches' losses; the last backward pass reduces the sum of their gradients."""
        losses = torch.zeros(1, dtype=torch.float64)
        for number, batch in enumerate(batches):
            is_last = number == len(batches) - 1
            with contextlib.nullcontext() if is_last else self.replicated.no_sync():
                loss = loss_of(self.replicated, self.inputs[batch], self.targets[batch])
                loss.backward()
            losses += loss.detach()
        return losses

    def _report(self, batches: list[torch.Tensor], losses: torch.Tensor) -> torch.Tensor:
        """Over all that counts in this step: each sample's share of it, in samples of one batch, and the mean loss."""
        counts = torch.cat(batches).bincount(minlength=SAMPLES).double()
        return self.agent.all_reduce(torch.cat([counts, losses])).result()

    def _write(self, report: torch.Tensor, microbatches: int) -> None:
        event = {
            "step": self.agent.current_step,
            "time": time.time(),
            "quorum_id": self.agent.quorum_id,
            "participants": self.agent.num_participants,
            "hash": digest(*self.model.parameters()),
            "shares": report[:-1].tolist(),
            "loss": float(report[-1]),
            "microbatches": microbatches,
        }
        with self.events.open("a") as file:
            file.write(json.dumps(event) + "\n")
