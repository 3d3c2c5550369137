"""A rank that catches up, or whose peers do, and whose script changes the averaged gradients before the vote."""

import time
from typing import Any

import torch

from tests.agent_client.actors import digest
from tests.agent_client.catch_up_actor import CatchUpActor, Event

CLIPS_AT = 0.05
GROWTH = 1.01  # no power of two: gradients of another scale are others in their last bits, too


class Growing:
    """A scale that is state of the script, and grows after each step."""

    def __init__(self, scale: float) -> None:
        self.scale = torch.tensor(scale)

    def replay_step(self) -> None:
        self.scale *= GROWTH

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.scale}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.scale.copy_(state_dict["scale"])


class GrowingScaler(torch.amp.GradScaler):
    """torch's, which can be moved again."""

    def replay_step(self) -> None:
        """As update() does where no gradient was infinite."""
        scale, tracker = self._get_scale_growth_tracker()
        factors = self.get_growth_factor(), self.get_backoff_factor(), self.get_growth_interval()
        torch._amp_update_scale_(scale, tracker, torch.zeros(1), *factors)

    def _get_scale_growth_tracker(self) -> tuple[torch.Tensor, torch.Tensor]:
        if self._scale is None:
            self._lazy_init_scale_growth_tracker(torch.device("cpu"))
        assert self._scale is not None
        assert self._growth_tracker is not None
        return self._scale, self._growth_tracker


class TransformingFollower(CatchUpActor):
    """`transform`: scale (that of Growing), torch (a GradScaler's), adaptive (each gradient is clipped by the norm of
    the weight), norm (all are by their own). Scales grow after each step `from_step` on."""

    def build(self, manager: str, *, transform: str, from_step: float = 0, **options: Any) -> None:
        self.transform, self.from_step = transform, from_step
        self.errs_for_s = 0.0
        self.growing = Growing(8.0)
        self.scaler = GrowingScaler("cpu", 8.0, growth_factor=GROWTH, growth_interval=1)
        moved = {"scale": {"growing": self.growing}, "torch": {"scaler": self.scaler}}
        super().build(manager, others=moved.get(transform, {}), **options)

    def hash(self) -> str:
        tracked = self.scaler.state_dict()["_growth_tracker"]
        return super().hash() + digest(self.growing.scale, torch.tensor([self.scaler.get_scale(), tracked]))

    def backward(self, loss: torch.Tensor) -> None:
        if self.transform == "torch":
            loss = self.scaler.scale(loss)
        (loss * self.growing.scale if self.transform == "scale" else loss).backward()

    def apply(self) -> bool:
        errs_for_s, self.errs_for_s = self.errs_for_s, 0.0
        if errs_for_s:
            self.agent.report_error("a test says so")
            self.optimizer.step()
            time.sleep(errs_for_s)
            return False
        if self.transform == "torch":
            is_committed = bool(self.scaler.step(self.optimizer))
            if is_committed:
                self.scaler.update()
            return is_committed
        self._transform(list(self.module.parameters()))
        is_committed = self.optimizer.step()
        if is_committed and self.transform == "scale" and self.agent.current_step >= self.from_step:
            self.growing.replay_step()
        return is_committed

    def err_once(self, for_s: float) -> None:
        """The next step is discarded here, and the one after it begins so much later."""
        self.errs_for_s = for_s

    def grow_from(self, step: int) -> None:
        self.from_step = step

    def take_step(self) -> Event:
        return super().take_step() | {"scale": float(self.growing.scale) + self.scaler.get_scale()}

    def _transform(self, parameters: list[torch.nn.Parameter]) -> None:
        if self.transform == "norm":
            torch.nn.utils.clip_grad_norm_(parameters, CLIPS_AT)
        for parameter in parameters:
            if parameter.grad is None:
                continue
            if self.transform == "scale":
                parameter.grad /= self.growing.scale
            elif self.transform == "adaptive":
                limit = CLIPS_AT * parameter.detach().norm().clamp(min=1e-3)
                parameter.grad *= (limit / parameter.grad.norm().clamp(min=1e-6)).clamp(max=1.0)
