"""Which optimizers of this process step after a commit, and whether their steps end (rules/applying.py)."""

import gc
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from agent_client.agent.rules.applying import Applying
from agent_client.agent.script_check import refuse_step_in_backward
from agent_client.state.train_state import TrainState


class OptimizerWatch:
    """Tells `applying` of each step of an optimizer, until it is closed."""

    def __init__(self, state: TrainState, applying: Applying) -> None:
        self._state = state
        self._hooks = [
            register_optimizer_step_pre_hook(lambda optimizer, *_: refuse_step_in_backward(optimizer, state)),
            register_optimizer_step_pre_hook(self._telling(applying.optimizer_began)),
            register_optimizer_step_post_hook(self._telling(applying.optimizer_ended)),
        ]

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _telling(self, tell: Callable[..., None]) -> Callable[..., None]:
        def hook(optimizer: Any, *_: object) -> None:
            tell(id(optimizer), type(optimizer).__name__, is_registered=self._state.holds(optimizer))

        return hook


def may_skip() -> bool:
    """Whether a step may be left out: a GradScaler skips one whose gradients overflow, in all ranks alike."""
    return any(issubclass(type(thing), torch.amp.GradScaler) and thing.is_enabled() for thing in gc.get_objects())
