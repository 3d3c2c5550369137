"""The replicate dimension of a device mesh, for models that are built over one (HSDP, torchtitan): it is the agent.

    replicas = ManagedGroup()
    mesh = managed_mesh(replicas, init_device_mesh("cpu", (4,), mesh_dim_names=("shard",)))
    fully_shard(model, mesh=mesh)
    replicas.agent = Agent.from_env(state=TrainState(model, optimizer))

A mesh has one shape for ever, and replica groups come and go: to torch this dimension has one rank. What is summed or
averaged over it becomes the mean over the participants; everything else is refused.
"""

import itertools
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._C import _distributed_c10d as c10d
from torch.distributed import AllreduceOptions, HashStore, ProcessGroup, ReduceOp, distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

from agent_client.agent.agent import Agent

_numbers = itertools.count()


class ManagedGroup(ProcessGroup):
    """`agent` may be set later, before the first step: it is made when the model is there."""

    def __init__(self, agent: Agent | None = None) -> None:
        super().__init__(0, 1)  # pyright: ignore[reportCallIssue]
        self._name = f"lighthouse/{next(_numbers)}"
        self.agent = agent

    @property
    def group_name(self) -> Any:
        """By which a mesh finds its groups."""
        return self._name

    def getBackendName(self) -> str:
        return "lighthouse"

    def allreduce(self, tensors: list[Tensor], opts: object = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The mean over the participants. Raises RuntimeError for what is not a sum or a mean, or without an agent."""
        if self.agent is None:
            raise RuntimeError("the managed process group has no agent yet: set its `agent` before the first step")
        operation = opts.reduceOp if isinstance(opts, AllreduceOptions) else opts
        if operation is not None and not any(operation == mean for mean in (ReduceOp.SUM, ReduceOp.AVG)):
            self._refuse(f"all_reduce with {getattr(operation, 'op', operation)}")
        for tensor in tensors:
            self.agent.all_reduce(tensor, within_group=False).result()
        done: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        done.set_result(tensors)
        return c10d._create_work_from_future(done)  # pyright: ignore[reportAttributeAccessIssue]

    def _refuse(self, what: str) -> NoReturn:
        raise RuntimeError(f"{what} over replica groups: only sums and means of tensors work, as groups come and go")


def managed_mesh(replicas: ManagedGroup, shards: DeviceMesh, name: str = "replicate") -> DeviceMesh:
    """The mesh `shards` with one more dimension in front, called `name`: the replica groups."""
    _register(replicas)
    return DeviceMesh.from_group(
        [replicas, *shards.get_all_groups()],
        shards.device_type,
        shards.mesh.unsqueeze(0),
        mesh_dim_names=(name, *(shards.mesh_dim_names or ("shard",))),
    )


def _register(group: ManagedGroup) -> None:
    """What torch.distributed looks up when a group is used or found by its name."""
    torchs: Any = distributed_c10d
    torchs._register_process_group(group.group_name, group)
    world = torchs._world
    world.pg_map[group] = (group.getBackendName(), HashStore())
    world.pg_names[group] = group.group_name
    world.pg_group_ranks[group] = {torchs.get_rank(): 0}


_REFUSED = (
    "_allgather_base _reduce_scatter_base allgather allgather_coalesced allgather_into_tensor_coalesced "
    "allreduce_coalesced alltoall alltoall_base barrier broadcast gather monitored_barrier recv recv_anysource reduce "
    "reduce_scatter reduce_scatter_tensor_coalesced scatter send split_group"
)


def _refusing(name: str) -> Callable[..., NoReturn]:
    def refuse(self: ManagedGroup, *args: object, **options: object) -> NoReturn:
        self._refuse(name.strip("_"))  # pyright: ignore[reportPrivateUsage]

    return refuse


for _name in _REFUSED.split():
    setattr(ManagedGroup, _name, _refusing(_name))
