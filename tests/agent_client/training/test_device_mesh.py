"""The replicate dimension of a device mesh: sums and means go to the agent, everything else is refused by its name."""

import pytest
import torch
from torch import distributed
from torch.distributed import AllreduceOptions, HashStore, ReduceOp
from torch.distributed.device_mesh import init_device_mesh

from agent_client.training.hsdp import ManagedGroup, managed_mesh
from tests.agent_client.lone_agent import LoneAgent


def options(operation: ReduceOp.RedOpType) -> AllreduceOptions:
    made = AllreduceOptions()
    made.reduceOp = operation
    return made


@pytest.fixture
def agent() -> LoneAgent:
    """Of two groups, of which the other one's tensors are zeros."""
    return LoneAgent(mean=lambda tensor: tensor.div_(2))


@pytest.fixture
def group(agent: LoneAgent) -> ManagedGroup:
    return ManagedGroup(agent)  # type: ignore[arg-type]


@pytest.mark.parametrize("operation", [ReduceOp.SUM, ReduceOp.AVG])
def test_sums_and_means_are_the_agents_mean_over_the_groups(
    group: ManagedGroup, agent: LoneAgent, operation: ReduceOp.RedOpType
) -> None:
    tensor = torch.full((3,), 4.0)
    work = group.allreduce([tensor], options(operation))
    work.wait()
    assert tensor.tolist() == [2.0, 2.0, 2.0]
    assert agent.within_group == [False]


def test_to_torch_it_has_one_rank_whoever_is_in_the_quorum(group: ManagedGroup) -> None:
    assert (group.rank(), group.size()) == (0, 1)
    assert group.group_name != ManagedGroup().group_name


@pytest.mark.parametrize("operation", [ReduceOp.MAX, ReduceOp.PRODUCT])
def test_another_reduction_is_refused(group: ManagedGroup, operation: ReduceOp.RedOpType) -> None:
    with pytest.raises(RuntimeError, match=f"all_reduce with .*{operation.name}.* over replica groups"):
        group.allreduce([torch.ones(1)], options(operation))


@pytest.mark.parametrize("name", ["allgather", "broadcast", "reduce_scatter", "barrier", "send", "alltoall", "gather"])
def test_another_collective_is_refused_by_its_name(group: ManagedGroup, name: str) -> None:
    with pytest.raises(RuntimeError, match=f"{name} over replica groups: only sums and means"):
        getattr(group, name)([torch.ones(1)])


def test_torch_builds_a_mesh_over_it_and_its_end_takes_it_along(group: ManagedGroup) -> None:
    distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        mesh = managed_mesh(group, init_device_mesh("cpu", (1,), mesh_dim_names=("shard",)))
        assert (mesh.mesh_dim_names, mesh.shape) == (("replicate", "shard"), (1, 1))
        assert mesh.get_group("replicate") is group
        tensor = torch.full((3,), 4.0)
        distributed.all_reduce(tensor, group=group)
        assert tensor.tolist() == [2.0, 2.0, 2.0]
    finally:
        distributed.destroy_process_group()


def test_it_needs_its_agent() -> None:
    with pytest.raises(RuntimeError, match="has no agent yet: set its `agent` before the first step"):
        ManagedGroup().allreduce([torch.ones(1)])
