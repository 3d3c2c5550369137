"""Optimizer and learning-rate scheduler for steps that may be discarded.

`FaultTolerantOptimizer.step()` votes on the step, and applies the gradients only if all replica groups commit it.
`FaultTolerantScheduler` changes the learning rate only after committed steps.
"""

import inspect
import weakref
from collections import ChainMap, OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NoReturn

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from agent_client.collectives.observed import not_itself_compiled
from agent_client.errors import ConfigurationError
from agent_client.step.agent import Agent
from agent_client.step.rules.loop_order import ZeroGradOrder
from agent_client.step.script_check import refuse_optimizer


class FaultTolerantOptimizer(Optimizer):
    """Optimizer whose `step()` commits the step in all replica groups or discards it in all of them.

    It wraps a torch optimizer and shares its parameter groups and state, so a scheduler may be created for either of
    them. A discarded step changes neither parameters nor optimizer state, and zeroes the gradients.

    Attributes:
        last_loss: The value that the closure of the last `step()` returned, or None if there was no closure.

    Example:
        ```python
        optimizer = FaultTolerantOptimizer(sgd, agent)

        optimizer.zero_grad()
        loss_fn(replicated(inputs), labels).backward()
        if optimizer.step():  # False: the step was discarded
            scheduler.step()
        ```
    """

    votes_each_step: ClassVar[bool] = True

    def __init__(self, optimizer: Optimizer | Sequence[Optimizer], agent: Agent) -> None:
        """Wrap one optimizer or several.

        Args:
            optimizer: The optimizer, or a list of optimizers that step after the same backward pass, such as Muon and
                AdamW. They share one vote and step in list order. All must be registered in the Agent's TrainState.
            agent: The Agent of this rank.

        Raises:
            ConfigurationError: An optimizer evaluates the model several times per step (LBFGS), or is not registered.
        """
        optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
        for each in optimizers:
            refuse_optimizer(each, votes_each_step=self.votes_each_step)
            if not self.votes_each_step:
                continue
            closure = inspect.signature(each.step).parameters.get("closure")
            if closure is not None and closure.default is inspect.Parameter.empty:
                raise ConfigurationError(
                    f"{type(each).__name__} evaluates the model several times in one step, and moves the parameters "
                    "in between; a step is voted on once. Use an optimizer whose step() needs no closure, or LocalSGD"
                )
            if not agent.state.has_optimizer(each):
                raise ConfigurationError(
                    f"this {type(each).__name__} is not in the Agent's TrainState: a returning group would continue "
                    "with an empty one. Register each optimizer that you wrap: TrainState(model, first, second=second)"
                )
        if self.votes_each_step:
            agent.internals.applies_gradients = True
        if len(optimizers) > 1:
            agent.internals.refuse_catch_up("several optimizers")
        [self.wrapped] = optimizers if len(optimizers) == 1 else [_Together(optimizers)]
        self.last_loss: Any = None
        self._order = ZeroGradOrder()
        self._agent = agent
        self._catch_up = agent.internals.catch_up_for(self.wrapped) if len(optimizers) == 1 else None
        # Share the hooks. Hooks registered here run when the wrapped optimizer steps, or saves or loads its state.
        vars(self).update((name, hooks) for name, hooks in vars(self.wrapped).items() if name.endswith("_hooks"))

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
        """Zero the gradients. At the top of a loop, also begin the step, so that its quorum forms early.

        At the end of a loop, the call only zeroes the gradients. The next forward pass, reduction or vote then begins
        the step.
        """
        internals = self._agent.internals
        can_forward_begin = any(part.can_begin_step for part in internals.parts)
        if self._order.should_begin_step(
            has_computed=internals.machine.has_computed, can_forward_begin=can_forward_begin
        ):
            self._agent.start_quorum()
        self.wrapped.zero_grad(set_to_none)

    @not_itself_compiled
    def step(self, closure: Callable[[], Any] | None = None) -> bool:  # type: ignore[override]
        """Vote on the step, and apply the gradients if it was committed.

        A group that is catching up (`heal_mode="catch_up"`) applies the gradients later, in the same order.

        Args:
            closure: Computes the gradients and returns the loss. Called once, before the vote, with gradients enabled.

        Returns:
            True if the step was committed, False if it was discarded.

        Raises:
            ConfigurationError: A second optimizer votes after the same backward pass.
            ScriptMismatch: The other groups run different collectives in this step.
            AgentError: Too many consecutive steps were discarded, or this rank voted yes and cannot learn the decision.
        """
        self._order.record_optimizer_step()
        self.last_loss = None
        if closure is not None:
            with torch.enable_grad():
                self.last_loss = closure()
        internals = self._agent.internals
        voter, voted_at = (internals.last_vote[0](), internals.last_vote[1]) if internals.last_vote else (None, 0)
        if voter not in (None, self) and voted_at == internals.machine.moves:
            # A group that restarts between the two votes would vote on a different optimizer than its peers.
            raise ConfigurationError(
                "two optimizers have been stepped after one backward pass, each with its own vote. A step is "
                "voted on only once: FaultTolerantOptimizer([first, second], agent) steps both after one vote"
            )
        is_committed = self._agent.should_commit()
        internals.last_vote = weakref.ref(self), internals.machine.moves
        if not is_committed:
            self.wrapped.zero_grad(set_to_none=False)  # a script may zero only after a commit, and log the gradients
            return False
        with self._agent.applying():
            if self._catch_up is not None:
                self._catch_up.apply()
            else:
                self.wrapped.step()
        internals.call_on_commit()
        return True

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        return self.wrapped.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:  # type: ignore[override]
        self.wrapped.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.wrapped.add_param_group(param_group)

    def __getattr__(self, name: str) -> Any:
        """Return a public attribute of the wrapped optimizer, such as `train` and `eval` of a schedule-free one.

        Do not return private ones, such as `_step_supports_amp_scaling`. A GradScaler that found them would treat this
        object like the wrapped optimizer.
        """
        if name == "wrapped" or name.startswith("_"):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}", name=name, obj=self)
        return getattr(self.wrapped, name)

    def __getstate__(self) -> NoReturn:
        raise TypeError(
            "a FaultTolerantOptimizer cannot be copied or pickled, because it belongs to an Agent: use its "
            "state_dict(), or copy the optimizer that it wraps"
        )

    def __repr__(self) -> str:
        return f"FaultTolerantOptimizer({self.wrapped!r})"


class _Together(Optimizer):
    """Several optimizers that act as one.

    Pre-step hooks run before the first optimizer steps, and post-step hooks after the last one has stepped.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        if not optimizers:
            raise ConfigurationError("FaultTolerantOptimizer: the list of optimizers is empty")
        self.optimizers = list(optimizers)
        homes = {"_optimizer_step_post_hooks": optimizers[-1], "_optimizer_step_pre_hooks": optimizers[0]}
        for name in vars(optimizers[0]):
            if name.endswith("_hooks"):
                vars(self)[name] = getattr(homes[name], name) if name in homes else OrderedDict()

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return [group for each in self.optimizers for group in each.param_groups]

    @property
    def state(self) -> Any:  # type: ignore[override]
        return ChainMap(*(each.state for each in self.optimizers))

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return {}

    def zero_grad(self, set_to_none: bool = True) -> None:
        for each in self.optimizers:
            each.zero_grad(set_to_none)

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        for each in self.optimizers:
            each.step()

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        return {"optimizers": [each.state_dict() for each in self.optimizers]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:  # type: ignore[override]
        for each, held in zip(self.optimizers, state_dict["optimizers"], strict=True):
            each.load_state_dict(held)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        raise ConfigurationError("add_param_group: call add_param_group of the optimizer that should take it")

    def __repr__(self) -> str:
        return repr(self.optimizers)


class FaultTolerantScheduler(LRScheduler):
    """Learning-rate scheduler for loops that ignore the return value of `optimizer.step()`.

    The loop calls step() after each optimizer step. The call steps the wrapped scheduler if the optimizer step was
    committed, and does nothing if it was discarded or skipped. Register the wrapped scheduler in the TrainState, so
    that a healing group copies its state. If `step()` is called several times after one optimizer step, as Accelerate
    does, all calls take effect.
    """

    def __init__(self, scheduler: LRScheduler, agent: Agent) -> None:
        self.wrapped = scheduler
        self._agent = agent

    def step(self, *values: Any, **named: Any) -> None:
        """Step the wrapped scheduler if the last training step was committed and the next has not begun to compute."""
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
