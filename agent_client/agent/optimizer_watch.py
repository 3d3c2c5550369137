"""Which optimizers of this process step after a commit, and whether their steps end (rules/applying.py); and what else
of a script's objects does not go with replica groups."""

import gc
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data.distributed import DistributedSampler

from agent_client.agent.rules.applying import Applying
from agent_client.agent.script_check import refuse_step_in_backward
from agent_client.state.train_state import TrainState

log = logging.getLogger(__name__)


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


def warn_of_split_samplers(group_world_size: int, groups: int) -> None:
    """Warn if the training data are divided among the ranks of this group only. Looks at all objects: some 50 ms."""
    for thing in gc.get_objects():
        if issubclass(type(thing), DistributedSampler) and thing.shuffle and thing.num_replicas <= group_world_size:
            log.warning(
                "a DistributedSampler divides its %d samples among the %d ranks of this replica group only: each "
                "of the %d groups trains on the same samples. Use StepSampler(len(data), batch_size, agent), or "
                "StepLoader.of(loader, agent), which divide them among the ranks of all groups",
                *(len(thing.dataset), thing.num_replicas, groups),
            )
            return
