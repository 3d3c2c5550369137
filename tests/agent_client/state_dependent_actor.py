"""A rank whose averaged gradients are transformed by state that heals, before the vote."""

from typing import Any

import torch

from tests.agent_client.actors import AgentActor, digest

CLIPS_AT = 0.05


class Scaler:
    """What torch's GradScaler does with its scale, which grows here at each step."""

    def __init__(self, scale: float) -> None:
        self.scale = torch.tensor(scale)

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.scale}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.scale.copy_(state_dict["scale"])


class StateDependentActor(AgentActor):
    """`transform`: scaler (unscale by a scale that heals), adaptive (clip by the norm of the weights)."""

    def build(self, manager: str, *, transform: str, seed: int = 0, **options: Any) -> None:
        super().build(manager, seed=seed, **options)
        self.transform, self.scaler = transform, Scaler(8.0)
        self.agent.state.others["scaler"] = self.scaler

    def backward(self, loss: torch.Tensor) -> None:
        (loss * self.scaler.scale if self.transform == "scaler" else loss).backward()

    def apply(self) -> bool:
        self._transform(list(self.model.parameters()))
        is_committed = super().apply()
        if is_committed:
            self.scaler.scale *= 2
        return is_committed

    def hash(self) -> str:
        return super().hash() + digest(self.scaler.scale)

    def start_quorum(self) -> None:
        """And no more of the step yet."""
        self.agent.start_quorum()

    def believe_that_it_is_current(self) -> None:
        """As a group does whose last step was committed, and whose peers have gone on without it."""
        self.agent._machine.may_heal = False

    def _transform(self, parameters: list[torch.nn.Parameter]) -> None:
        for parameter in parameters:
            assert parameter.grad is not None
            if self.transform == "scaler":
                parameter.grad /= self.scaler.scale
            else:
                limit = CLIPS_AT * parameter.detach().norm().clamp(min=1e-3)
                parameter.grad *= (limit / parameter.grad.norm().clamp(min=1e-6)).clamp(max=1.0)
