"""A rank that scales its loss, and the averaged gradients back before the vote, by state that heals."""

from typing import Any

import torch

from tests.agent_client.actors import AgentActor, digest


class Scaler:
    """What torch's GradScaler does with its scale, which grows here at each step."""

    def __init__(self) -> None:
        self.scale = torch.tensor(8.0)

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.scale}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.scale.copy_(state_dict["scale"])


class StateDependentActor(AgentActor):
    def build(self, manager: str, **options: Any) -> None:
        super().build(manager, **options)
        self.scaler = self.agent.state.others["scaler"] = Scaler()

    def backward(self, loss: torch.Tensor) -> None:
        (loss * self.scaler.scale).backward()

    def apply(self) -> bool:
        for parameter in self.model.parameters():
            assert parameter.grad is not None
            parameter.grad /= self.scaler.scale
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
        self.agent.internals.machine.may_heal = False
