"""HSDP: torch's `fully_shard` (FSDP2) shards inside a replica group, the Agent replicates across replica groups.

Each rank averages the gradients of its shards with the same rank of the other groups, as the backward pass reaches
them; where a step has several microbatches, in the last one (`model.set_requires_gradient_sync(is_last)`). As FSDP2
asks of the ranks of a group, all groups must use the same parameters in a step, or else call
`model.set_reduce_scatter_unused_params(True)`.

A forward pass of the module in training mode begins the step.

A model that wants a device mesh with a dimension for the replicas gets one from training/device_mesh.py instead.
"""

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from agent_client.agent.agent import Agent
from agent_client.agent.rules.loop_order import PassOrder
from agent_client.agent.script_check import find_fsdp1
from agent_client.collectives.compiling import never_compiled
from agent_client.errors import AgentError
from agent_client.state.shards import is_sharded


def replicate(module: nn.Module, agent: Agent) -> None:
    """Average the gradients of a sharded model over the replica groups.

    Shard the model with torch's `fully_shard` (FSDP2) inside the group first. Each rank then averages the gradients of
    its shards with the same rank of the other groups. A forward pass of the module in training mode begins a step.

    Args:
        module: The model. All its parameters are sharded.
        agent: The Agent of this rank.

    Raises:
        ValueError: A parameter is not sharded, or the model uses FSDP1.
        ConfigurationError: The Agent has `heal_mode="catch_up"`.

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
    agent.internals.refuse_catch_up("a model that is sharded")
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
    agent.add_part(sharding)

    @never_compiled
    def begin_step(part: nn.Module, _: object) -> None:
        if part.training and torch.is_grad_enabled():
            agent.computes(sharding)

    module.register_forward_pre_hook(begin_step, prepend=True)
    for name, part in sharded.items():
        part.set_all_reduce_hook(functools.partial(_average, agent, sharding, name or type(module).__name__))


@never_compiled
def _average(agent: Agent, sharding: "_ShardedPart", name: str, gradients: Tensor) -> None:
    agent.backward_reduces()
    sharding.order.reduced()
    engine: Any = torch.autograd.Variable._execution_engine  # pyright: ignore[reportPrivateUsage]
    engine.queue_callback(agent.backward_ended)
    agent.all_reduce(gradients, within_group=False, name=name).result()


class _ShardedPart:
    """What `module` does in each step besides."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.order = PassOrder(counts=False)  # the module's microbatches reduce as torch says

    @property
    def begins_steps(self) -> bool:
        return self._module.training

    has_abandoned = False

    @property
    def parameters_reduced(self) -> list[nn.Parameter]:
        return list(self._module.parameters())

    def pass_over(self) -> bool:
        """The other ranks of the group wait in torch's own collectives for this one's backward pass."""
        return False

    def give_up(self) -> None:
        """Raises AgentError: the other ranks of the group wait in torch's own collectives."""
        raise AgentError(
            "a backward pass of a sharded model was abandoned (it raised, and the script continued): the other ranks "
            "of the group wait for its shards. Let the error end this process so that its group restarts"
        )

    def agree(self) -> None:
        """Nothing is shared but gradients."""

    def settle(self, *, is_committed: bool) -> None:
        pass
