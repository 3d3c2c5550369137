"""A learning-rate scheduler that moves only after committed steps."""

from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from agent_client.agent.agent import Agent


class FaultTolerantScheduler(LRScheduler):
    """Scheduler for loops that ignore the return value of `optimizer.step()`.

    It wraps a scheduler that moves once after each optimizer step. A discarded or skipped step does not move it.
    Register the wrapped scheduler in the TrainState, so that a group that returns gets its state.

    If a loop calls `step()` several times after one optimizer step, as Accelerate does once per process, the scheduler
    moves that number of times.
    """

    def __init__(self, scheduler: LRScheduler, agent: Agent) -> None:
        """Wrap the scheduler.

        Args:
            scheduler: A torch scheduler.
            agent: The Agent of this rank.
        """
        self.wrapped = scheduler
        self._agent = agent

    def step(self, *values: Any, **named: Any) -> None:
        """Move the scheduler if the last step was committed and the next one has not computed anything yet.

        Args:
            *values: Positional arguments of the wrapped scheduler's `step`.
            **named: Keyword arguments of the wrapped scheduler's `step`.
        """
        if self._agent.was_committed:
            self.wrapped.step(*values, **named)

    def get_last_lr(self) -> Any:
        return self.wrapped.get_last_lr()

    def get_lr(self) -> Any:
        return self.wrapped.get_lr()

    def state_dict(self) -> dict[str, Any]:
        return self.wrapped.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.wrapped.load_state_dict(state_dict)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the wrapped scheduler, such as `optimizer`, `last_epoch` or `base_lrs`."""
        if name == "wrapped":
            raise AttributeError(name)
        return getattr(self.wrapped, name)

    def __repr__(self) -> str:
        return f"FaultTolerantScheduler({self.wrapped!r})"
