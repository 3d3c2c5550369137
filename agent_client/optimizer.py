"""An optimizer whose zero_grad() begins a step and whose step() commits it."""

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from agent_client.agent import Agent


class FaultTolerantOptimizer(Optimizer):
    """Wraps `optimizer`; schedulers take either of the two. A discarded step leaves everything as it was."""

    def __init__(self, optimizer: Optimizer, agent: Agent) -> None:
        self.wrapped = optimizer
        self._agent = agent
        self._follower = agent.follow(optimizer)
        # Hooks have one home: those registered here run when the wrapped one steps, or saves or loads its state.
        vars(self).update((name, hooks) for name, hooks in vars(optimizer).items() if name.endswith("_hooks"))

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.wrapped.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.wrapped.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self.wrapped.defaults

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Begin a step: its quorum is asked for while the forward pass runs."""
        self._agent.start_quorum()
        self.wrapped.zero_grad(set_to_none)

    def step(self, closure: Callable[[], float] | None = None) -> bool:  # type: ignore[override]
        """Vote; apply the gradients if every rank of the group agrees: at once, or where this group catches up when
        their turn comes. Whether the step was committed."""
        if closure is not None:
            raise ValueError("closure: a step that evaluates the model again cannot be voted on; call it before step()")
        if not self._agent.should_commit():
            return False
        if self._follower is not None:
            self._follower.apply()
        else:
            self.wrapped.step()
        return True

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        return self.wrapped.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:  # type: ignore[override]
        self.wrapped.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.wrapped.add_param_group(param_group)

    def __repr__(self) -> str:
        return f"FaultTolerantOptimizer({self.wrapped!r})"
