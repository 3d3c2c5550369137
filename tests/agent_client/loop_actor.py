"""One rank whose loop is written as people write them: zero_grad at the top, at the end, or not on the optimizer."""

import contextlib
from collections.abc import Callable
from typing import Any

import torch

from agent_client.state.train_state import TrainState
from agent_client.training.ddp import DistributedDataParallel
from agent_client.training.optimizer import FaultTolerantOptimizer, FaultTolerantScheduler
from agent_client.training.progress_push import push_progress
from tests.agent_client.actors import build_agent, digest, momenta


class OutOfMemory(torch.autograd.Function):
    """Raises in the backward pass where a test says so: "early", before a bucket is reduced, or "late"."""

    raises = ""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, at: str) -> torch.Tensor:
        ctx.at = at
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        if OutOfMemory.raises == ctx.at:
            raise MemoryError("out of memory, says a test")
        return gradient, None


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16)
        self.hidden, self.last = torch.nn.Linear(16, 16), torch.nn.Linear(16, 4)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        hidden = OutOfMemory.apply(self.norm(self.first(images)), "late")
        return self.last(OutOfMemory.apply(self.hidden(hidden), "early"))


class LoopActor:
    def build(self, manager: str, *, seed: int = 0, ddp: dict[str, Any] | None = None, **options: Any) -> None:
        """`ddp`: DistributedDataParallel's options."""
        torch.manual_seed(seed)
        self.module = Net()
        self.sgd = torch.optim.SGD(self.module.parameters(), lr=0.1, momentum=0.9)
        self.inner = torch.optim.lr_scheduler.ExponentialLR(self.sgd, 0.9)
        self.agent = build_agent(manager, TrainState(self.module, self.sgd, scheduler=self.inner), **options)
        self.model = DistributedDataParallel(self.module, self.agent, bucket_cap_mb=0.0005, **(ddp or {}))
        self.optimizer = FaultTolerantOptimizer(self.sgd, self.agent)
        self.scheduler = FaultTolerantScheduler(self.inner, self.agent)
        self.told: list[int] = []
        self.agent.on_commit(self.told.append)

    def push_to(self, url: str, steps: int) -> None:
        push_progress(self.agent, url, every_s=0.001, steps=steps)

    def train(self, order: str, until: int) -> list[dict[str, Any]]:
        """What there was after each committed step. `order` names one of the methods below."""
        once: Callable[[], bool] = getattr(self, order)
        seen: list[dict[str, Any]] = []
        while self.agent.current_step < until:
            if once():
                seen.append({"step": self.agent.current_step, "rate": self.sgd.param_groups[0]["lr"]} | self.hashes())
        return seen

    def hashes(self) -> dict[str, Any]:
        weights = digest(*self.module.parameters(), *momenta(self.sgd))
        return {"weights": weights, "buffers": digest(*self.module.buffers())}

    def zero_first(self) -> bool:
        self.optimizer.zero_grad()
        self.loss().backward()
        is_committed = self.optimizer.step()
        self.scheduler.step()
        return is_committed

    def zero_last(self) -> bool:
        """nanoGPT's, and that of accelerate's examples."""
        self.loss().backward()
        is_committed = self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.scheduler.step()
        return is_committed

    def zero_model(self) -> bool:
        """The HF Trainer's."""
        self.loss().backward()
        is_committed = self.optimizer.step()
        self.scheduler.step()
        self.model.zero_grad()
        return is_committed

    def zero_before_and_last(self) -> bool:
        """That of many who accumulate: before the loop, and after each step."""
        if not self.told and self.agent.internals.machine.ended == 0:
            self.optimizer.zero_grad()
        for is_last in (False, True):
            with contextlib.nullcontext() if is_last else self.model.no_sync():
                self.loss().backward()
        is_committed = self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        return is_committed

    def closure(self) -> bool:
        """Lightning's: forward, zero, backward, all in the step, and its result is dropped."""

        def compute() -> torch.Tensor:
            loss = self.loss()
            self.optimizer.zero_grad()
            loss.backward()
            return loss

        before = self.agent.current_step
        self.optimizer.step(compute)
        assert self.optimizer.last_loss is not None
        self.scheduler.step()
        return self.agent.current_step > before

    def give_up(self, order: str, at: str) -> str:
        """One iteration whose backward pass runs out of memory, in a script that skips the batch."""
        OutOfMemory.raises = at
        try:
            getattr(self, order)()
        except MemoryError as e:
            if order == "zero_last":
                self.optimizer.zero_grad(set_to_none=True)
            return str(e)
        finally:
            OutOfMemory.raises = ""
        return ""

    def discard(self, reason: str) -> str:
        """The buffers after a step that the script itself has found bad."""
        self.loss().backward()
        self.agent.report_error(reason)
        assert not self.optimizer.step()
        return self.hashes()["buffers"]

    def evaluate(self) -> bool:
        """With and without what a script may forget. Whether a step is under way after that."""
        self.model.eval()
        self.model(torch.zeros(4, 8))
        self.model.train()
        with torch.no_grad():
            self.model.module(torch.zeros(4, 8))
        return self.agent.internals.machine.phase.value != "idle"

    def steps_told(self) -> list[int]:
        return self.told

    def scaled(self) -> bool:
        """With a GradScaler, which skips the step where a gradient is infinite: here, the second one that is tried."""
        if not hasattr(self, "scaler"):
            self.scaler, self.tried = torch.amp.GradScaler("cpu", init_scale=4.0), 0
            self.agent.state.others["scaler"] = self.scaler
        self.tried += 1
        before = self.agent.current_step
        self.scaler.scale(self.loss() * (float("inf") if self.tried == 2 else 1.0)).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()
        self.optimizer.zero_grad()
        return self.agent.current_step > before

    def discard_scaled(self) -> None:
        """One that the script itself has found bad."""
        self.scaler.scale(self.loss()).backward()
        self.agent.report_error("says a test")
        assert not self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()

    def scaler_state(self) -> dict[str, Any]:
        return self.scaler.state_dict()

    def loss(self) -> torch.Tensor:
        if not self.agent.was_committed:
            self.agent.start_quorum()  # it may have to heal; else the forward pass begins the step
        place, _ = self.agent.internals.last_slot()
        generator = torch.Generator().manual_seed(1000 * self.agent.current_step + place)
        return self.model(torch.randn(16, 8, generator=generator)).square().mean()
