"""One rank that trains through our DistributedDataParallel and can be held in the middle of a backward pass."""

import copy
import threading
import time
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from agent_client.state.train_state import TrainState
from agent_client.training.ddp import DistributedDataParallel
from agent_client.training.optimizer import FaultTolerantOptimizer
from tests.agent_client.actors import AgentActor, build_agent, digest


class TwoBranches(torch.nn.Module):
    """`branch` 0 or 1: the other one's parameters are not used."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = torch.nn.Linear(8, 64)
        self.branches = torch.nn.ModuleList([torch.nn.Linear(64, 4), torch.nn.Linear(64, 4)])

    def forward(self, images: torch.Tensor, branch: int) -> torch.Tensor:
        return self.branches[branch](torch.relu(self.stem(images)))


class SlowData(Dataset[torch.Tensor]):
    """Whoever loads a sample of it is busy for longer than any test."""

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(3600)
        return torch.zeros(8)


class DdpActor(AgentActor):
    def build(self, manager: str, *, seed: int = 0, salvage: bool, **options: Any) -> None:
        torch.manual_seed(seed)
        self.module = TwoBranches()
        sgd = torch.optim.SGD(self.module.parameters(), lr=0.1, momentum=0.9)
        self.agent = build_agent(manager, TrainState(self.module, sgd), **options)
        self.model = DistributedDataParallel(
            self.module, self.agent, salvage=salvage, bucket_cap_mb=0.0005, find_unused_parameters=True
        )
        self.optimizer = FaultTolerantOptimizer(sgd, self.agent)
        self.computing, self.may_go_on = threading.Event(), threading.Event()
        self.may_go_on.set()
        self.module.stem.weight.register_hook(self._pause)

    def hold_backward(self) -> None:
        """The next backward pass stops before its last parameter."""
        self.computing.clear()
        self.may_go_on.clear()

    def wait_in_backward(self) -> None:
        self.computing.wait()

    def go_on(self) -> None:
        self.may_go_on.set()

    def step(
        self, branch: int = 0, *, extra: float | None = None, skips: bool = False, clips: bool = False
    ) -> dict[str, Any]:
        """`own`: the gradients of this rank's batch alone; `used`: those that the step was made with.

        `extra`: one more reduction, of that number.
        """
        self.optimizer.zero_grad()
        place, _ = self.agent.slot()
        step = self.agent.current_step
        images = torch.randn(16, 8, generator=torch.Generator().manual_seed(1000 * step + place))
        alone = copy.deepcopy(self.module)
        alone(images, branch).square().mean().backward()
        loss = self.model(images, branch).square().mean()
        if skips:
            self.agent.skip_batch("a test says so")
        else:
            loss.backward()
        if clips:
            torch.nn.utils.clip_grad_norm_(self.module.parameters(), 0.01)
        if extra is not None:
            extra = float(self.agent.all_reduce(torch.tensor([extra]), name="extra").result())
        is_committed = self.optimizer.step()
        return {
            "committed": is_committed,
            "step": step,
            "quorum_id": self.agent.quorum_id,
            "participants": list(self.agent.participants),
            "own": _gradients(alone),
            "used": _gradients(self.module),
            "extra": extra,
            "hash": digest(*self.module.parameters()),
        }

    def fork_loader_workers(self, count: int) -> None:
        self.loading = iter(DataLoader(SlowData(), num_workers=count, multiprocessing_context="fork"))

    def held_bytes(self) -> int:
        assert self.model.salvage is not None
        return sum(kept.content.nbytes for kept in self.model.salvage._buckets)

    def _pause(self, gradient: torch.Tensor) -> None:
        self.computing.set()
        self.may_go_on.wait()


def _gradients(module: torch.nn.Module) -> list[list[float] | None]:
    return [None if p.grad is None else p.grad.flatten().tolist() for p in module.parameters()]
