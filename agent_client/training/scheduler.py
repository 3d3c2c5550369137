"""A learning-rate scheduler that moves with committed steps, however the loop calls it."""

from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from agent_client.agent.agent import Agent


class FaultTolerantScheduler(LRScheduler):
    """Wraps `scheduler`, one whose step() follows each step of the optimizer: a discarded or a skipped step does not
    move it, although the loop drops what optimizer.step() returns.

    Register `scheduler` itself in the TrainState, so that a group that comes back takes it over. A loop that calls
    step() several times after one optimizer step (accelerate, once per process) moves it as often.
    """

    def __init__(self, scheduler: LRScheduler, agent: Agent) -> None:
        self.wrapped = scheduler
        self._agent = agent

    def step(self, *values: Any, **named: Any) -> None:
        """What `scheduler.step` takes. Does nothing unless the last step was committed and no other has begun to
        compute."""
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
        """What torch's schedulers have besides: optimizer, last_epoch, base_lrs."""
        if name == "wrapped":
            raise AttributeError(name)
        return getattr(self.wrapped, name)

    def __repr__(self) -> str:
        return f"FaultTolerantScheduler({self.wrapped!r})"
