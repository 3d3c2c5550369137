"""Refuses objects in a script that would make the replica groups diverge. Each error suggests an alternative.

Most problems are found in the registered model and optimizer. Others are found only by a search of all live
objects in the process, once before the first vote. `OptimizerWatch` observes which optimizers step after a commit,
and whether their steps finish (Applying in rules/machine.py).
"""

import logging
import math
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import nn
from torch.nn import parallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.optim.swa_utils import AveragedModel
from torch.utils.data.distributed import DistributedSampler

from agent_client.errors import ConfigurationError
from agent_client.state.module_tree import ModuleTree
from agent_client.state.shards import is_sharded
from agent_client.state.train_state import TrainState, live_objects
from agent_client.state.tree import disassemble
from agent_client.step.rules.machine import Applying

log = logging.getLogger(__name__)

BY_HAND = "average each gradient with agent.all_reduce(gradient, within_group=False), without our DDP"
UNAVERAGED = "the gradients of this step were not averaged over the groups, because "
AFTER_THE_VOTE = (
    "an optimizer must step after the vote: create it for all parameters, wrap it in FaultTolerantOptimizer, and call "
    "its step() after the backward pass"
)


def refuse_optimizer(optimizer: object, *, votes_each_step: bool = False) -> None:
    """Raise ConfigurationError for an optimizer that cannot heal, such as ZeRO-1.

    With `votes_each_step`, also refuse an optimizer that needs two backward passes in a step, such as SAM.
    """
    name = type(optimizer).__name__
    if any(each.__name__ == "ZeroRedundancyOptimizer" for each in type(optimizer).__mro__):
        raise ConfigurationError(
            f"{name} (ZeRO-1) keeps a part of its state in each rank, so it cannot heal: shard with torch's "
            "fully_shard (FSDP2) and agent_client.replicate, or use a plain optimizer"
        )
    if votes_each_step and hasattr(optimizer, "first_step") and hasattr(optimizer, "second_step"):
        raise ConfigurationError(
            f"{name} (SAM) needs two backward passes in a step, and a step is voted on only once: register its base "
            "optimizer, run both passes, put the parameters back, and apply the base optimizer by hand "
            "(agent.should_commit(), then its step() inside agent.applying())"
        )


def refuse_unhealed(state: TrainState) -> None:
    """Raise ConfigurationError if an optimizer updates a parameter that a healing group would not copy."""
    copied = set(map(id, [*state.model.parameters(), *state.model.buffers()]))
    optimizers = [each for each in (state.optimizer, *state.others.values()) if isinstance(each, Optimizer)]
    groups = [(each, group) for each in optimizers for group in each.param_groups]
    missing = [(each, tensor) for each, group in groups for tensor in group["params"] if id(tensor) not in copied]
    if not missing:
        return
    entries = [each.state_dict() for each in state.others.values() if not isinstance(each, Optimizer)]
    others = {tensor.data_ptr() for tensor in disassemble(entries)[1]}
    for optimizer, tensor in missing:
        if is_sharded(tensor) or tensor.data_ptr() not in others:
            raise ConfigurationError(
                f"{type(optimizer).__name__} updates a parameter of shape {tuple(tensor.shape)} that is not in the "
                "Agent's TrainState: a returning group would continue with its own. Register each module that is "
                "trained, for example a loss with parameters: TrainState(nn.ModuleList([model, loss]), optimizer)"
            )


def refuse_model(module: nn.Module) -> None:
    """Raise ConfigurationError for a model that `agent_client.DistributedDataParallel` cannot replicate."""
    if (name := find_fsdp1(module)) is not None:
        raise ConfigurationError(
            f"{name} is a FullyShardedDataParallel (FSDP1), which is not supported: use torch's fully_shard "
            "(FSDP2) and agent_client.replicate"
        )
    for name, parameter in module.named_parameters():
        if is_sharded(parameter):
            raise ConfigurationError(
                f"{name} is a DTensor, and each rank holds a part of it: with fully_shard use agent_client.replicate; "
                f"with tensor parallelism alone {BY_HAND}"
            )
        if hasattr(parameter, "_in_backward_optimizers"):
            raise ConfigurationError(f"{name} has an optimizer in its backward pass: {AFTER_THE_VOTE}")


def find_fsdp1(module: nn.Module) -> str | None:
    for name, part in module.named_modules():
        if any(each.__name__ == "FullyShardedDataParallel" for each in type(part).__mro__):
            return name or type(part).__name__
    return None


def is_in_backward() -> bool:
    """Return whether this thread is in a backward pass. A forward pass recomputed there does not begin a step."""
    return torch._C._current_graph_task_id() != -1  # pyright: ignore[reportPrivateUsage]


def refuse_step_in_backward(optimizer: Optimizer, state: TrainState) -> None:
    """Raise ConfigurationError if the optimizer is about to step registered parameters inside a backward pass."""
    if torch.compiler.is_compiling() or not is_in_backward():
        return
    registered = set(map(id, state.model.parameters()))
    if any(id(parameter) in registered for group in optimizer.param_groups for parameter in group["params"]):
        raise ConfigurationError(f"{type(optimizer).__name__} steps inside the backward pass: {AFTER_THE_VOTE}")


def refuse_live_objects(state: TrainState, *, has_reduced: bool) -> None:
    """Raise ConfigurationError if an object in this process would make the groups diverge.

    The check covers DistributedDataParallel wrappers, GradScalers and schedulers. An AveragedModel that would not heal
    only causes a warning, because training may not depend on it. Call this before the first vote.
    `has_reduced` is True if the Agent has reduced gradients in this step.
    """
    live = live_objects(parallel.DistributedDataParallel, torch.amp.GradScaler, LRScheduler, AveragedModel)
    for wrapper in (each for each in live if isinstance(each, parallel.DistributedDataParallel)):
        _refuse_wrapper(wrapper, state, has_reduced=has_reduced)
    scalers: list[Any] = [each for each in live if isinstance(each, torch.amp.GradScaler)]
    for scaler in scalers:
        if scaler.is_enabled() and scaler._scale is not None and not state.has_part(scaler):
            raise ConfigurationError(
                "a GradScaler scales the loss and is not in the Agent's TrainState: a returning group would "
                "begin with another scale. Register it: TrainState(model, optimizer, scaler=scaler)"
            )
    for scheduler in state.unregistered_schedulers([each for each in live if isinstance(each, LRScheduler)]):
        raise ConfigurationError(
            f"a {type(scheduler).__name__} of the registered optimizer was created after the first step had begun, and "
            "is not in the Agent's TrainState: a returning group would begin with another learning rate. "
            "Register it: TrainState(model, optimizer, scheduler=scheduler)"
        )
    if any(isinstance(each, AveragedModel) and not state.has_part(each) for each in live):
        log.warning(
            "an AveragedModel is not in the Agent's TrainState: a returning group begins with another average, and no "
            "checkpoint contains it. Register it: TrainState(model, optimizer, average=average)"
        )


def _refuse_wrapper(wrapper: Any, state: TrainState, *, has_reduced: bool) -> None:
    is_nested = any(isinstance(part, parallel.DistributedDataParallel) for part in wrapper.module.modules())
    if is_nested:
        raise ConfigurationError(
            "torch's DistributedDataParallel is around ours, so no gradient of ours is used: wrap the model once, in "
            "agent_client.DistributedDataParallel. With accelerate, use FaultTolerantAccelerator, or do not pass the "
            "model to prepare()"
        )
    registered = set(map(id, state.model.parameters()))
    if not has_reduced and any(id(parameter) in registered for parameter in wrapper.parameters()):
        raise ConfigurationError(
            "torch's own DistributedDataParallel is around the model, and no gradient goes through the Agent: use "
            "agent_client.DistributedDataParallel in its place"
        )


def refuse_bypassed(state: TrainState, wrapped: Iterable[nn.Module], reductions: int, by_wrapped: int) -> None:
    """Raise ConfigurationError if a gradient of the first step was not averaged.

    Of the step's `reductions`, the `wrapped` modules have done `by_wrapped`. If the script has done others, it may have
    averaged the gradients of the other modules.
    """
    if reductions > by_wrapped or (reductions and state.has_shards):
        return  # FSDP may hold other parameters than the optimizer now
    averaged = {id(each) for module in wrapped for each in module.parameters()} if reductions else set[int]()
    names = {id(each): name for name, each in state.model.named_parameters()}
    for each in state.optimized():
        if each.grad is not None and id(each) not in averaged:
            raise ConfigurationError(
                f"{UNAVERAGED}that of {names.get(id(each), 'a parameter')} did not go through the Agent: wrap each "
                "module that is trained in agent_client.DistributedDataParallel, or in agent_client.replicate if it is "
                "sharded, and call the wrapper instead of the module. A loop of your own calls agent.all_reduce"
            )


class OptimizerWatch:
    def __init__(self, state: TrainState, applying: Applying) -> None:
        self._state = state
        self._hooks = [
            register_optimizer_step_pre_hook(lambda optimizer, *_: refuse_step_in_backward(optimizer, state)),
            register_optimizer_step_pre_hook(self._report_to(applying.optimizer_began)),
            register_optimizer_step_post_hook(self._report_to(applying.optimizer_ended)),
            register_optimizer_step_post_hook(self._warn_of_unregistered),
        ]
        self._has_warned = False

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _report_to(self, report: Callable[..., None]) -> Callable[..., None]:
        def hook(optimizer: Any, *_: object) -> None:
            report(id(optimizer), type(optimizer).__name__, is_registered=self._state.has_optimizer(optimizer))

        return hook

    def _warn_of_unregistered(self, optimizer: Optimizer, *_: object) -> None:
        """Warn once of an optimizer that updates parameters without a vote. Local steps (LocalSGD) need none."""
        state = self._state
        if torch.compiler.is_compiling() or self._has_warned or state.standing or state.has_optimizer(optimizer):
            return
        if _updated_by(optimizer) <= _updated_by(state.optimizer, *state.others.values()):
            return  # it steps a registered one, as Lookahead does, or is in one
        self._has_warned = True
        log.warning(
            "a %s that is not in the Agent's TrainState has stepped: it also steps when the groups discard a step, and "
            "a returning group continues with its own parameters. If training depends on it, register it and the "
            "module that it trains, and step it by FaultTolerantOptimizer (docs/how-to/several-optimizers.md)",
            type(optimizer).__name__,
        )


def _updated_by(*optimizers: object) -> set[int]:
    groups: Iterable[Any] = (group for each in optimizers for group in getattr(each, "param_groups", ()))
    return {id(parameter) for group in groups for parameter in group["params"]}


class ScheduleWatch:
    """Finds schedulers that the script also steps after a discarded step."""

    def __init__(self, state: TrainState) -> None:
        self._state = state
        self._begun: dict[str, int] = {}
        self._has_warned = False

    def check_discarded(self) -> None:
        """Warn, once, of a scheduler that has stepped since the discarded step began."""
        if self._has_warned:
            return
        for name, epoch in self._epochs().items():
            if epoch != self._begun.get(name, epoch):
                self._has_warned = True
                log.warning(
                    "the script has stepped its %s after a discarded step. If it steps once per training step, the "
                    "learning rate is now ahead of the committed steps: call its step() only if optimizer.step() has "
                    "returned True, or wrap it in FaultTolerantScheduler(scheduler, agent)",
                    type(self._state.others[name]).__name__,
                )
                return

    def begin_step(self) -> None:
        self._begun = self._epochs()

    def _epochs(self) -> dict[str, int]:
        others = self._state.others.items()
        return {name: getattr(other, "last_epoch", 0) for name, other in others if isinstance(other, LRScheduler)}


class AveragedGradients:
    """Refuses gradients that are not averaged, because the script has changed the model since it was wrapped."""

    def __init__(
        self, module: nn.Module, parameters: Iterable[torch.Tensor], wrapper: str, *, ignored: Collection[str] = ()
    ) -> None:
        """Remember the parameters of `module` whose gradients are averaged.

        Args:
            module: The wrapped module.
            parameters: Its parameters whose gradients are averaged.
            wrapper: Name of the class or function that has wrapped it.
            ignored: Names of parameters whose gradients the script averages itself.
        """
        self._module = module
        self._averaged = set(parameters)
        self._wrapper = wrapper
        self._ignored = ignored
        self._tree = ModuleTree(module, "_parameters")
        self._others = self._find_others()

    def refuse_others(self) -> None:
        """Raise ConfigurationError if another parameter of the module has a gradient."""
        if self._tree.has_changed():
            self._others = self._find_others()
        for name, parameter in self._others:
            if parameter.requires_grad and parameter.grad is not None:
                raise ConfigurationError(
                    f"{name} was frozen or missing when the model was wrapped, so its gradient is not averaged over "
                    f"the groups: wrap the model with {self._wrapper}(model, agent) again after you unfreeze, add or "
                    "replace parameters"
                )

    def _find_others(self) -> list[tuple[str, nn.Parameter]]:
        named = self._module.named_parameters()
        return [(name, each) for name, each in named if each not in self._averaged and name not in self._ignored]


def may_skip() -> bool:
    """Return whether the process has an enabled GradScaler, which may skip a step on all ranks."""
    return any(scaler.is_enabled() for scaler in live_objects(torch.amp.GradScaler))


def warn_of_split_samplers(group_world_size: int, groups: int) -> None:
    """Warn if a DistributedSampler divides the training data among the ranks in this group only."""
    for sampler in live_objects(DistributedSampler):
        found = vars(sampler)  # a subclass that does not call __init__ has none of these
        replicas = found.get("num_replicas", math.inf)
        if found.get("shuffle") and replicas <= group_world_size:
            log.warning(
                "a DistributedSampler divides its %d samples among the %d ranks of this replica group only: each "
                "of the %d groups trains on the same samples. Use StepSampler(len(data), batch_size, agent), or "
                "StepLoader.of(loader, agent), which divide them among the ranks of all groups",
                *(found.get("total_size", 0), replicas, groups),
            )
            return
