"""What a healing peer takes over: everything that the script registers."""

from typing import Any, Protocol

import torch

from agent_client.checkpoint.snapshot import install_matches, snapshot
from agent_client.checkpoint.tree import State


class Stateful(Protocol):
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any]) -> object: ...


class TrainState:
    """The model, the optimizer, and whatever else has state_dict and load_state_dict (scheduler, loader, a counter).

    What the forward pass or the loop moves (the model's buffers, everything in `others`) is copied when a step begins;
    parameters and optimizer stand still until the step's vote. All entries hold tensors and plain values only.
    """

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, **others: Stateful) -> None:
        self.model = model
        self.optimizer = optimizer
        self.others = others
        self._moving: dict[str, State] = {}

    def begin_step(self) -> None:
        """Copy what moves before the vote. Costs a copy of the buffers, under each name in state_dict()."""
        named = self.model.named_buffers(remove_duplicate=False)
        buffers = {name: buffer.detach().clone() for name, buffer in named}
        others = {name: snapshot(other.state_dict()) for name, other in self.others.items()}
        self._moving = {"buffers": buffers, "others": others}

    def snapshot(self) -> dict[str, State]:
        """A copy of the state as it was when the step began."""
        model: dict[str, Any] = dict(self.model.state_dict())
        buffers: Any = self._moving["buffers"]
        model |= {name: buffers[name] for name in model.keys() & buffers.keys()}
        return snapshot({"model": model, "optimizer": self.optimizer.state_dict(), "others": self._moving["others"]})

    def check(self, received: dict[str, State]) -> None:
        """Raises StateMismatch if `received` cannot be installed here."""
        own = {
            "model": dict(self.model.state_dict()),
            "optimizer": self.optimizer.state_dict(),
            "others": {name: other.state_dict() for name, other in self.others.items()},
        }
        install_matches(own, received)

    def install(self, received: dict[str, Any]) -> None:
        """Take over a peer's state. Check it first."""
        self.model.load_state_dict(received["model"])
        self.optimizer.load_state_dict(received["optimizer"])
        for name, other in self.others.items():
            other.load_state_dict(received["others"][name])
