"""HSDP: torch's `fully_shard` (FSDP2) shards inside a replica group, the Agent replicates across replica groups.

    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    agent = Agent.from_env(state=TrainState(model, optimizer))
    replicate(model, agent)

Each rank averages the gradients of its shards with the same rank of the other groups, as the backward pass reaches
them; where a step has several microbatches, in the last one (`model.set_requires_gradient_sync(is_last)`). As FSDP2
asks of the ranks of a group, all groups must use the same parameters in a step, or else call
`model.set_reduce_scatter_unused_params(True)`.

A model that wants a device mesh with a dimension for the replicas gets one from process_group/managed.py instead.
"""

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from agent_client.agent import Agent
from agent_client.checkpoint.shards import is_sharded


def replicate(module: nn.Module, agent: Agent) -> None:
    """Average the gradients of all that is sharded in `module` over the replica groups.

    Raises ValueError if nothing in it is sharded, or not all: what is not would drift apart.
    """
    agent.refuse_catch_up("a model that is sharded")
    sharded = [part for part in module.modules() if isinstance(part, FSDPModule)]
    if not sharded:
        raise ValueError("nothing in the module is sharded: call torch's fully_shard first, or use our DDP")
    plain = [name for name, parameter in module.named_parameters() if not is_sharded(parameter)]
    if plain:
        raise ValueError(f"not sharded, so not averaged: {', '.join(plain)}; call fully_shard on the whole module, too")

    def average(gradients: Tensor) -> None:
        agent.all_reduce(gradients, within_group=False).result()

    for part in sharded:
        part.set_all_reduce_hook(average)
