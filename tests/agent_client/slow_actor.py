"""Ranks whose microbatches take as long as a test says."""

import time
from typing import Any

from torch import Tensor, nn

from tests.agent_client import batch_training, training_kinds


def crawl(seconds: float) -> None:
    time.sleep(seconds)


class SlowActor(training_kinds.Ddp):
    microbatch_s = 0.005

    def loss(self, microbatch: int = 0) -> Tensor:
        crawl(self.microbatch_s)
        return super().loss(microbatch)

    def set_microbatch(self, seconds: float) -> None:
        self.microbatch_s = seconds


class SlowModel(nn.Module):
    """Sleeps in each forward pass."""

    microbatch_s = 0.02

    def __init__(self) -> None:
        super().__init__()
        self.layers = batch_training.make_model()

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            crawl(self.microbatch_s)
        return self.layers(inputs)


class SlowBatchActor(batch_training.BatchActor):
    """A BatchActor of which the group b takes three times as long for each microbatch."""

    def build(self, manager: str, *, events: str, **options: Any) -> None:
        super().build(manager, events=events, **options)
        if "b-rank" in events:
            self.module.microbatch_s = 3 * SlowModel.microbatch_s

    def make_module(self) -> nn.Module:
        return SlowModel()
