"""An Agent without processes, for what surrounds it: its decisions and its peers' parts are known beforehand."""

from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch

from agent_client.step.rules.world_size import WorldSize


class LoneAgent:
    """`decisions` are those of the first votes; the rest commit. `mean` is what an all-reduce makes of a tensor."""

    def __init__(
        self, *decisions: bool, mean: Callable[[torch.Tensor], torch.Tensor] = torch.clone, step: int = 0
    ) -> None:
        self.decisions = list(decisions)
        self.mean = mean
        self.current_step = step
        self.world_size = WorldSize()
        self.state: Any = SimpleNamespace(standing={}, stands_still=True, has_optimizer=lambda optimizer: True)
        self.asked: list[str] = []
        self.reduced: list[torch.Tensor] = []
        self.within_group: list[bool] = []
        self.place = (0, 1)
        self.has_quorum = True
        self.last_vote: Any = None
        self.before_slot: Callable[[], object] = lambda: None
        """What its first quorum does."""

    @property
    def quorum_step(self) -> int | None:
        return self.current_step if self.has_quorum else None

    @property
    def internals(self) -> "LoneAgent":
        return self

    @property
    def machine(self) -> "LoneAgent":
        return self

    @property
    def moves(self) -> int:
        return len(self.asked) + len(self.reduced)

    @property
    def batches_committed(self) -> int:
        return self.current_step * self.place[1]

    group_world_size = 1

    def record_source(self, data: object, *, is_whole_step: bool = True) -> None:
        """No peer compares it."""

    def catch_up_for(self, optimizer: torch.optim.Optimizer) -> None:
        """It never catches up."""

    def refuse_catch_up(self, what: str) -> None:
        pass

    def request_late(self) -> None:
        self.asked.append("late")

    def applying(self) -> AbstractContextManager[None]:
        return nullcontext()

    has_computed, parts = False, ()

    def call_on_commit(self) -> None:
        """Nothing waits for it."""

    def start_quorum(self) -> None:
        self.asked.append("quorum")

    def all_reduce(
        self, tensor: torch.Tensor, *, within_group: bool = True, name: str = "", followed_by: object = ()
    ) -> "Future[torch.Tensor]":
        self.reduced.append(tensor.clone())
        self.within_group.append(within_group)
        done: Future[torch.Tensor] = Future()
        done.set_result(self.mean(tensor))
        return done

    def should_commit(self) -> bool:
        self.asked.append("vote")
        is_committed = self.decisions.pop(0) if self.decisions else True
        self.current_step += is_committed
        return is_committed

    def last_slot(self) -> tuple[int, int]:
        before, self.before_slot = self.before_slot, lambda: None
        before()
        return self.place


def model_of(seed: int = 0) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2)).double()


def back_propagate(model: torch.nn.Module, number: int) -> None:
    """Over a batch that is drawn from `number`."""
    inputs = torch.randn(4, 3, generator=torch.Generator().manual_seed(number), dtype=torch.float64)
    model(inputs).square().sum().backward()


def inner_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, number: int) -> Any:
    """Whether it was kept."""
    optimizer.zero_grad()
    back_propagate(model, number)
    return optimizer.step()


def values(tensors: "list[torch.Tensor]") -> list[list[float]]:
    return [tensor.detach().flatten().tolist() for tensor in tensors]
