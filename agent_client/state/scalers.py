"""GradScalers move with committed steps only.

torch asks for update() after each step(), also after one that was discarded. What it does then is taken back when the
next step begins: the groups do not all discard the same attempts, and gradients of two scales have no mean.
"""

from dataclasses import dataclass, field
from typing import Any

import torch

from agent_client.state.train_state import TrainState


@dataclass(slots=True)
class Scalers:
    """Those that are registered in `state`."""

    state: TrainState
    _begun: dict[str, Any] = field(default_factory=dict[str, Any])

    def begin_step(self) -> None:
        """The state has begun it, too."""
        others, begun = self.state.others, self.state.others_begun
        self._begun = {name: begun[name] for name, other in others.items() if isinstance(other, torch.amp.GradScaler)}

    @property
    def may_skip(self) -> bool:
        """Whether one of them leaves out steps whose gradients are not finite."""
        return any(isinstance(each, torch.amp.GradScaler) and each.is_enabled() for each in self.state.others.values())

    @property
    def have_moved(self) -> bool:
        """Whether one of them has other values than at the beginning of the step, as after a step that it skips."""
        return any(self.state.others[name].state_dict() != begun for name, begun in self._begun.items())

    def take_back(self) -> None:
        """The last step was discarded."""
        for name, begun in self._begun.items():
            self.state.others[name].load_state_dict(begun)

    def forget(self) -> None:
        """They have been loaded."""
        self._begun = {}
