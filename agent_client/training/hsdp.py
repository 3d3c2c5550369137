"""HSDP: torch's `fully_shard` (FSDP2) shards inside a replica group, and the Agent replicates across replica groups.

Each rank averages the gradients of its shards with the same rank in the other groups, during the backward pass. If a
step has several microbatches, call `model.set_requires_gradient_sync(is_last)` before each backward pass, so that only
the last one averages. FSDP2 requires that all ranks in a group use the same parameters in a step. With replication, all
groups must use the same parameters too, unless each rank calls `model.set_reduce_scatter_unused_params(True)`. A
forward pass of the module in training mode begins the step.
"""

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from agent_client.collectives.observed import never_compiled
from agent_client.errors import AgentError
from agent_client.state.shards import is_sharded
from agent_client.step.agent import Agent
from agent_client.step.rules.loop_order import PassOrder
from agent_client.step.script_check import AveragedGradients, find_fsdp1


def replicate(module: nn.Module, agent: Agent) -> None:
    """Average the gradients of a sharded model over the replica groups.

    First shard the model inside the group with torch's `fully_shard` (FSDP2). Each rank then averages the gradients of
    its shards with the same rank in the other groups. A forward pass of the module in training mode begins a step.

    Args:
        module: The model. All its parameters must be sharded.
        agent: The Agent of this rank.

    Raises:
        ValueError: A parameter is not sharded, or the model uses FSDP1.

    Example:
        ```python
        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)
        adam = torch.optim.AdamW(model.parameters())
        agent = Agent.from_env(state=TrainState(model, adam))
        replicate(model, agent)
        optimizer = FaultTolerantOptimizer(adam, agent)
        ```
    """
    sharded = {name: part for name, part in module.named_modules() if isinstance(part, FSDPModule)}
    if not sharded and (name := find_fsdp1(module)) is not None:
        raise ValueError(
            f"{name} is a FullyShardedDataParallel (FSDP1), which is not supported: use fully_shard (FSDP2)"
        )
    if not sharded:
        raise ValueError("nothing in the module is sharded: call torch's fully_shard first, or use our DDP")
    plain = [name for name, parameter in module.named_parameters() if not is_sharded(parameter)]
    if plain:
        raise ValueError(f"not sharded, so not averaged: {', '.join(plain)}; call fully_shard on the whole module, too")

    sharding = _ShardedPart(module)
    agent.internals.add_part(sharding)

    @never_compiled
    def begin_step(part: nn.Module, _: object) -> None:
        if part.training and torch.is_grad_enabled():
            agent.internals.begin_forward(sharding)

    module.register_forward_pre_hook(begin_step, prepend=True)
    for name, part in sharded.items():
        part.set_all_reduce_hook(functools.partial(_average, agent, sharding, name or type(module).__name__))


@never_compiled
def _average(agent: Agent, sharding: "_ShardedPart", name: str, gradients: Tensor) -> None:
    agent.internals.begin_backward()
    sharding.pass_order.record_reduction()
    engine: Any = torch.autograd.Variable._execution_engine  # pyright: ignore[reportPrivateUsage]
    engine.queue_callback(agent.internals.end_backward)
    agent.all_reduce(gradients, within_group=False, name=name).result()


class _ShardedPart:
    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._averaged = AveragedGradients(module, module.parameters(), "replicate")
        self.pass_order = PassOrder(counts=False)  # it is unknown in advance which microbatches will reduce

    @property
    def can_begin_step(self) -> bool:
        return self.module.training

    has_abandoned = False

    @property
    def parameters_reduced(self) -> list[nn.Parameter]:
        return list(self.module.parameters())

    def skip_microbatch(self) -> bool:
        return False

    def contribute_zeros(self) -> bool:
        """Reduce nothing and return False.

        Zeros cannot replace this rank's gradients, because the other ranks in the group need its backward pass for
        their collectives.
        """
        return False

    def abandon_backward(self) -> None:
        raise AgentError(
            "a backward pass of a sharded model was abandoned (it raised, and the script continued): the other ranks "
            "of the group wait for its shards. Let the error end this process so that its group restarts"
        )

    def share_buffers(self) -> None:
        self._averaged.refuse_others()  # buffers are not shared

    def end_step(self, *, is_committed: bool) -> None:
        pass
