"""HSDP: torch's `fully_shard` (FSDP2) shards inside a replica group, and the Agent replicates across replica groups.

Each rank averages the gradients of its shards with the same rank of the other groups, during the backward pass. If a
step has several microbatches, this happens in the last one (`model.set_requires_gradient_sync(is_last)`). FSDP2
requires that all ranks of a group use the same parameters in a step. Here, all groups must do so, too, or call
`model.set_reduce_scatter_unused_params(True)`. A forward pass of the module in training mode begins the step.

For models that need a device mesh with a replicate dimension (HSDP, torchtitan), `managed_mesh` returns one:

    replicas = ManagedGroup()
    mesh = managed_mesh(replicas, init_device_mesh("cpu", (4,), mesh_dim_names=("shard",)))
    fully_shard(model, mesh=mesh)
    replicas.agent = Agent.from_env(state=TrainState(model, optimizer))

The shape of a mesh is fixed, but replica groups join and leave, so for torch this dimension has size 1. Sums and
averages over it compute the mean over the participants. All other operations over it are refused.
"""

import functools
import itertools
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch._C import _distributed_c10d as c10d
from torch.distributed import AllreduceOptions, HashStore, ProcessGroup, ReduceOp, distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from agent_client.collectives.observed import never_compiled
from agent_client.errors import AgentError
from agent_client.state.shards import is_sharded
from agent_client.step.agent import Agent
from agent_client.step.rules.loop_order import PassOrder
from agent_client.step.script_check import find_fsdp1


def replicate(module: nn.Module, agent: Agent) -> None:
    """Average the gradients of a sharded model over the replica groups.

    First shard the model inside the group with torch's `fully_shard` (FSDP2). Each rank then averages the gradients of
    its shards with the same rank of the other groups. A forward pass of the module in training mode begins a step.

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
    sharding.order.reduced()
    engine: Any = torch.autograd.Variable._execution_engine  # pyright: ignore[reportPrivateUsage]
    engine.queue_callback(agent.internals.end_backward)
    agent.all_reduce(gradients, within_group=False, name=name).result()


class _ShardedPart:
    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.order = PassOrder(counts=False)  # it is unknown in advance which microbatches will reduce

    @property
    def begins_steps(self) -> bool:
        return self._module.training

    has_abandoned = False

    @property
    def parameters_reduced(self) -> list[nn.Parameter]:
        return list(self._module.parameters())

    def contribute_zeros(self) -> bool:
        """Return False, because the other ranks wait in torch's own collectives for this rank's backward pass."""
        return False

    def give_up(self) -> None:
        raise AgentError(
            "a backward pass of a sharded model was abandoned (it raised, and the script continued): the other ranks "
            "of the group wait for its shards. Let the error end this process so that its group restarts"
        )

    def agree(self) -> None:
        pass

    def end_step(self, *, is_committed: bool) -> None:
        pass


_numbers = itertools.count()


class ManagedGroup(ProcessGroup):
    """Process group of the replicate dimension. `agent` must be set before the first step."""

    def __init__(self, agent: Agent | None = None) -> None:
        super().__init__(0, 1)  # pyright: ignore[reportCallIssue]
        self._name = f"lighthouse/{next(_numbers)}"
        self.agent = agent

    @property
    def group_name(self) -> Any:
        return self._name

    def getBackendName(self) -> str:
        return "lighthouse"

    def allreduce(self, tensors: list[Tensor], opts: object = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Average the tensors over the participants, in place."""
        if self.agent is None:
            raise RuntimeError("the managed process group has no agent yet: set its `agent` before the first step")
        operation = opts.reduceOp if isinstance(opts, AllreduceOptions) else opts
        if operation is not None and not any(operation == mean for mean in (ReduceOp.SUM, ReduceOp.AVG)):
            self.refuse(f"all_reduce with {getattr(operation, 'op', operation)}")
        for tensor in tensors:
            self.agent.all_reduce(tensor, within_group=False).result()
        done: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        done.set_result(tensors)
        return c10d._create_work_from_future(done)  # pyright: ignore[reportAttributeAccessIssue]

    def refuse(self, what: str, *_: object, **__: object) -> NoReturn:
        raise RuntimeError(f"{what} over replica groups: only sums and means of tensors work, as groups come and go")


def managed_mesh(replicas: ManagedGroup, shards: DeviceMesh, name: str = "replicate") -> DeviceMesh:
    """Return a mesh with the dimensions of `shards`, preceded by a dimension `name` for the replica groups.

    Args:
        replicas: Process group of the new dimension.
        shards: Mesh of the ranks of this replica group.
        name: Name of the new dimension.
    """
    torchs: Any = distributed_c10d  # torch looks up groups and their names in this module
    torchs._register_process_group(replicas.group_name, replicas)
    world = torchs._world
    world.pg_map[replicas] = (replicas.getBackendName(), HashStore())
    world.pg_names[replicas] = replicas.group_name
    world.pg_group_ranks[replicas] = {torchs.get_rank(): 0}
    return DeviceMesh.from_group(
        [replicas, *shards.get_all_groups()],
        shards.device_type,
        shards.mesh.unsqueeze(0),
        mesh_dim_names=(name, *(shards.mesh_dim_names or ("shard",))),
    )


_REFUSED = (
    "_allgather_base _reduce_scatter_base allgather allgather_coalesced allgather_into_tensor_coalesced "
    "allreduce_coalesced alltoall alltoall_base barrier broadcast gather monitored_barrier recv recv_anysource reduce "
    "reduce_scatter reduce_scatter_tensor_coalesced scatter send split_group"
)


for _name in _REFUSED.split():
    setattr(ManagedGroup, _name, functools.partialmethod(ManagedGroup.refuse, _name.strip("_")))
