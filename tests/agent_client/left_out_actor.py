"""One rank of a loop that leaves something out in one of its steps, or does more in a step than others do."""

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from agent_client.errors import AgentError
from agent_client.state.train_state import TrainState
from agent_client.training.ddp import DistributedDataParallel
from agent_client.training.optimizer import FaultTolerantOptimizer
from agent_client.training.sampler import StepSampler
from tests.agent_client.actors import build_agent, digest, momenta

SAMPLES = 10_000


class LeftOutActor:
    def build(self, manager: str, *, seed: int = 0, scaler: bool = False, norm: bool = True, **options: Any) -> None:
        torch.manual_seed(seed)
        between = torch.nn.BatchNorm1d(16) if norm else torch.nn.Identity()
        layers = torch.nn.Linear(8, 16), between, torch.nn.Tanh(), torch.nn.Linear(16, 4)
        self.module = torch.nn.Sequential(*layers)
        self.sgd = torch.optim.SGD(self.module.parameters(), lr=0.1, momentum=0.9)
        self.scaler = torch.amp.GradScaler("cpu", enabled=scaler)
        others = {"scaler": self.scaler} if scaler else {}
        self.agent = build_agent(manager, TrainState(self.module, self.sgd, **others), timeout_s=20.0, **options)
        self.model = DistributedDataParallel(self.module, self.agent, bucket_cap_mb=0.0005)
        self.optimizer = FaultTolerantOptimizer(self.sgd, self.agent)
        self.sampler = StepSampler(SAMPLES, 4, self.agent)
        self.passes = 0

    def train(self, until: int, kind: str = "plain", at: tuple[int, ...] = (), **options: Any) -> list[dict[str, Any]]:
        """One entry for each vote, or for the error by which it ended. `kind` names a method below, for the iterations
        of the loop in steps `at`; empty: in all of them."""
        self.options = options
        voted: list[dict[str, Any]] = []
        for batch in self.sampler:
            agent = self.agent
            if agent.current_step >= until:
                return voted
            self.passes += 1
            step, is_meant = agent.current_step, not at or agent.current_step in at
            once: Callable[[torch.Tensor], bool | None] = getattr(self, kind if is_meant else "plain")
            try:
                is_committed = once(batch)
            except AgentError as e:
                return [*voted, {"step": step, "error": f"{type(e).__name__}: {e}"}]
            if is_committed is not None:
                voted.append(
                    {
                        "step": agent.current_step - 1 if is_committed else agent.current_step,
                        "committed": is_committed,
                        "alone": agent.num_participants == 1,
                        "batches": agent.batches_committed,
                        "weights": digest(*self.module.parameters(), *momenta(self.sgd)),
                        "buffers": digest(*self.module.buffers()),
                    }
                )
        return voted

    def loss(self, batch: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
        inputs = torch.stack([torch.randn(8, generator=torch.Generator().manual_seed(int(at))) for at in batch])
        return self.model(inputs * factor).square().mean()

    def plain(self, batch: torch.Tensor) -> bool | None:
        self.optimizer.zero_grad()
        self.loss(batch).backward()
        return self.optimizer.step()

    # -- steps that are left out, once in each of the steps that are meant

    def once(self) -> bool:
        seen = self.__dict__.setdefault("seen", set())
        is_first = self.agent.current_step not in seen
        seen.add(self.agent.current_step)
        return is_first

    def after_backward(self, batch: torch.Tensor) -> bool | None:
        self.optimizer.zero_grad()
        self.loss(batch).backward()
        return None if self.once() else self.optimizer.step()

    def after_backward_zeroed(self, batch: torch.Tensor) -> bool | None:
        """Gradients keep their memory."""
        self.optimizer.zero_grad(set_to_none=False)
        self.loss(batch).backward()
        return None if self.once() else self.optimizer.step()

    def before_backward(self, batch: torch.Tensor) -> bool | None:
        """Whenever this batch comes."""
        self.bad = getattr(self, "bad", batch)
        self.optimizer.zero_grad()
        loss = self.loss(batch)
        if torch.equal(self.bad, batch):
            return None
        loss.backward()
        return self.optimizer.step()

    def passed_over(self, batch: torch.Tensor) -> bool | None:
        self.optimizer.zero_grad()
        self.loss(batch)
        self.agent.skip_batch("a test has no use for it")
        return self.optimizer.step()

    def microbatch_passed_over(self, batch: torch.Tensor) -> bool | None:
        """The second of three. Its inputs are not finite, and would be seen in the buffers."""
        self.optimizer.zero_grad()
        for microbatch in range(3):
            with nullcontext() if microbatch == 2 else self.model.no_sync():
                loss = self.loss(batch, math.inf if microbatch == 1 else 1.0) / 3
                if microbatch == 1:
                    self.agent.skip_batch("a test has no use for it")
                else:
                    loss.backward()
        return self.optimizer.step()

    def microbatch_left_out(self, batch: torch.Tensor) -> bool | None:
        """The same without a word, and without what is not finite."""
        self.optimizer.zero_grad()
        for microbatch in (0, 2):
            with nullcontext() if microbatch == 2 else self.model.no_sync():
                (self.loss(batch) / 3).backward()
        return self.optimizer.step()

    def wrapped_again(self, batch: torch.Tensor) -> bool | None:
        """The earlier wrapper has no part in the step any more."""
        self.model = DistributedDataParallel(self.module, self.agent, bucket_cap_mb=0.0005)
        return self.passed_over(batch)

    def measured(self) -> int:
        """Number of microbatches whose compute time was measured."""
        totals = self.agent.internals.progress.compute.totals
        return 0 if totals is None else totals.microbatches

    # -- gradients that are not finite

    def infinite(self, batch: torch.Tensor) -> bool | None:
        """Once in each step that is meant, or as often as it comes."""
        self.optimizer.zero_grad()
        is_meant = self.options.get("always", False) or self.once()
        (self.loss(batch) * (float("inf") if is_meant else 1.0)).backward()
        return self.optimizer.step()

    def scaled(self, batch: torch.Tensor) -> bool | None:
        """The scaler skips the step, and votes on it in the next pass."""
        self.optimizer.zero_grad()
        loss = self.loss(batch) * (float("inf") if self.once() else 1.0)
        self.scaler.scale(loss).backward()
        is_committed = self.scaler.step(self.optimizer)
        self.scaler.update()
        return None if is_committed is None else bool(is_committed)

    def get(self, name: str) -> Any:
        return getattr(self, name)

    def scale(self) -> float:
        return self.scaler.get_scale()

    # -- more than others do

    def metric(self, batch: torch.Tensor) -> bool | None:
        """One more sum, after those of the backward pass."""
        self.optimizer.zero_grad()
        self.loss(batch).backward()
        size = self.options["size"]
        self.agent.all_reduce(torch.ones(size), name="metric").result()
        return self.optimizer.step()

    def accumulated(self, batch: torch.Tensor) -> bool | None:
        """Without no_sync: each backward pass reduces."""
        self.optimizer.zero_grad()
        for _ in range(2):
            (self.loss(batch) / 2).backward()
        return self.optimizer.step()

    def sam(self, batch: torch.Tensor) -> bool | None:
        """Sharpness-aware minimization by hand."""
        self.optimizer.zero_grad()
        self.loss(batch).backward()
        before = [parameter.detach().clone() for parameter in self.module.parameters()]
        with torch.no_grad():
            for parameter in self.module.parameters():
                parameter.add_(parameter.grad, alpha=0.05)  # type: ignore[arg-type]
        self.optimizer.zero_grad()
        self.loss(batch).backward()
        with torch.no_grad():
            for parameter, old in zip(self.module.parameters(), before, strict=True):
                parameter.copy_(old)
        return self.optimizer.step()

    def sums_of_tasks(self, batch: torch.Tensor) -> bool | None:
        """Each loss has a backward pass and zeroed gradients of its own, as in PCGrad."""
        found = list[list[torch.Tensor]]()
        for _ in range(2):
            self.optimizer.zero_grad()
            self.loss(batch).backward()
            found.append([parameter.grad.clone() for parameter in self.module.parameters()])  # type: ignore[union-attr]
        for parameter, *gradients in zip(self.module.parameters(), *found, strict=True):
            parameter.grad = torch.stack(gradients).sum(0)
        return self.optimizer.step()

    def two_views(self, batch: torch.Tensor) -> bool | None:
        self.optimizer.zero_grad()
        (self.loss(batch) + self.loss(batch.flip(0))).backward()
        return self.optimizer.step()

    def two_samplers(self, batch: torch.Tensor) -> bool | None:
        """The second is asked for its batch, of the same number, after a forward pass over that of the first."""
        others = self.__dict__.setdefault("others", iter(StepSampler(2 * SAMPLES, 4, self.agent, seed=1)))
        self.optimizer.zero_grad()
        loss = self.loss(batch)
        (loss + self.loss(next(others))).backward()
        return self.optimizer.step()

    def evaluated(self, batch: torch.Tensor) -> bool | None:
        """In eval mode, and without gradients, before and after the step."""
        with torch.no_grad():
            self.loss(batch)
        self.model.eval()
        for _ in range(5):
            self.loss(batch)
        self.model.train()
        is_committed = self.plain(batch)
        with torch.no_grad():
            self.loss(batch)
        return is_committed

    def looked_at(self, batch: torch.Tensor) -> bool | None:
        """Forward passes in training mode, with gradients, whose losses are looked at only."""
        for _ in range(5):
            self.loss(batch).item()
        return self.plain(batch)
