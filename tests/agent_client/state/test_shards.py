"""Sharded tensors in a state: out as this rank's shards and back, and nothing that fits nowhere comes in."""

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.distributed import HashStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module
from torch.distributed.tensor.placement_types import _StridedShard

from agent_client.state.shards import Shards
from agent_client.state.train_state import TrainState
from agent_client.state.tree import CorruptState
from tests.agent_client.state.trees import over_the_wire


@pytest.fixture(scope="module", autouse=True)
def world() -> Iterator[None]:
    """torch's default group, of this process alone."""
    distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.fixture(scope="module")
def mesh(world: None) -> DeviceMesh:
    return init_device_mesh("cpu", (1, 1), mesh_dim_names=("shard", "tensor"))


def sharded_model(mesh: DeviceMesh, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1))
    fully_shard(model[0], mesh=mesh["shard"])
    return fully_shard(model, mesh=mesh["shard"])


def train(model: nn.Module, adam: torch.optim.Optimizer, seed: int) -> None:
    adam.zero_grad()
    model(torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))).square().mean().backward()
    adam.step()


def wholes(model: nn.Module, adam: torch.optim.Optimizer) -> list[torch.Tensor]:
    tensors = [*model.state_dict().values(), *(tensor for state in adam.state.values() for tensor in state.values())]
    return [(tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone() for tensor in tensors]


def are_equal(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, first, second)) and len(first) == len(second)


@pytest.mark.parametrize(
    "placements",
    [(Shard(0), Replicate()), (Replicate(), Shard(1)), (_StridedShard(0, split_factor=1), Shard(0))],
    ids=str,
)
def test_out_over_the_wire_and_back(mesh: DeviceMesh, placements: tuple[Any, Any]) -> None:
    model = nn.Linear(4, 3)
    tensor = DTensor.from_local(torch.randn(3, 4), mesh, placements)
    model.weight = nn.Parameter(tensor)
    shards = Shards(model.parameters())
    state = {"list": [tensor, 1], "tuple": (tensor,), "ordered": OrderedDict(weight=tensor), "plain": torch.ones(2)}
    back = shards.rebuild(over_the_wire(shards.describe(state)))
    for found in (back["list"][0], back["tuple"][0], back["ordered"]["weight"]):
        assert isinstance(found, DTensor)
        assert (found.device_mesh, found.placements, found.shape) == (mesh, placements, tensor.shape)
        assert torch.equal(found.to_local(), tensor.to_local())
    assert torch.equal(back["plain"], torch.ones(2))


def test_a_shard_is_not_copied(mesh: DeviceMesh) -> None:
    model = sharded_model(mesh)
    [described, *_] = Shards(model.parameters()).describe(dict(model.state_dict())).values()
    assert described["shard"].data_ptr() == next(model.parameters()).to_local().data_ptr()


def test_without_sharded_parameters_everything_passes_through() -> None:
    model = nn.Linear(2, 2)
    shards = Shards(model.parameters())
    assert not shards
    state = model.state_dict()
    taken = shards.describe(state)
    assert taken._metadata == state._metadata
    assert all(taken[name] is tensor for name, tensor in state.items())


def test_buffers_are_sent_too_and_as_they_were_when_the_step_began(mesh: DeviceMesh) -> None:
    """torch's distribute_module makes every buffer a DTensor."""
    models = [distribute_module(nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5)), mesh["tensor"]) for _ in range(2)]
    source, target = (TrainState(model, torch.optim.SGD(model.parameters(), lr=0.1)) for model in models)
    source.begin_step()
    with torch.no_grad():
        before = [buffer.full_tensor().clone() for buffer in models[0].buffers()]
        for buffer in models[0].buffers():
            buffer.add_(1)
    source.check_sendable()
    target.load_state_dict(over_the_wire(source.in_place()))
    assert are_equal([buffer.full_tensor() for buffer in models[1].buffers()], before)


def test_what_cannot_be_sent_is_named(mesh: DeviceMesh) -> None:
    shards = Shards(sharded_model(mesh).parameters())
    elsewhere = DTensor.from_local(torch.ones(2), init_device_mesh("cpu", (1,), mesh_dim_names=("other",)), [Shard(0)])
    with pytest.raises(TypeError, match="over which no parameter is"):
        shards.describe([elsewhere])
    partial = DTensor.from_local(torch.ones(2), mesh["shard"], [Partial()])
    with pytest.raises(TypeError, match=r"laid out as P.* cannot be sent: only shards and replicas can"):
        shards.describe([partial])


@pytest.mark.parametrize(
    "wrong",
    [
        {"mesh": 1},
        {"mesh": "0"},
        {"placements": (("partial",),)},
        {"placements": (("shard", "0"),)},
        {"placements": (("strided shard", 0),)},
        {"placements": (1,)},
        {"placements": None},
        {"shape": ("six",)},
        {"stride": 1},
        {"shard": 1},
    ],
    ids=str,
)
def test_a_description_that_fits_nothing_is_corrupt(mesh: DeviceMesh, wrong: dict[str, Any]) -> None:
    model = sharded_model(mesh)
    shards = Shards(model.parameters())
    [described, *_] = shards.describe(dict(model.state_dict())).values()
    with pytest.raises(CorruptState, match="has a shard that does not belong to this rank"):
        shards.rebuild({"model": described | wrong})


def test_a_model_its_optimizer_and_an_average_of_it_heal_and_train_on_to_the_same_bits(mesh: DeviceMesh) -> None:
    models = [sharded_model(mesh, seed) for seed in (0, 1)]
    adams = [torch.optim.AdamW(model.parameters()) for model in models]
    averages = [sharded_model(mesh, seed) for seed in (2, 3)]
    source, target = (
        TrainState(model, adam, average=average) for model, adam, average in zip(models, adams, averages, strict=True)
    )
    for seed in range(3):
        train(models[0], adams[0], seed)
        averages[0].load_state_dict(models[0].state_dict())
    source.begin_step()
    target.begin_step()
    received = over_the_wire(source.snapshot())
    target.check(received)
    target.install(received)
    for model, adam in zip(models, adams, strict=True):
        train(model, adam, 7)
    assert are_equal(wholes(models[0], adams[0]), wholes(models[1], adams[1]))
    assert are_equal(wholes(averages[0], adams[0]), wholes(averages[1], adams[1]))


@pytest.mark.parametrize("is_evaluated", [False, True])
def test_a_snapshot_between_forward_and_backward_is_of_the_steps_begin_and_disturbs_nothing(
    mesh: DeviceMesh, is_evaluated: bool
) -> None:
    """state_dict() there would take the gathered parameters away; and an evaluation leaves them gathered."""
    models = [fully_shard(nn.Linear(6, 1), mesh=mesh["shard"]) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    adams = [torch.optim.AdamW(model.parameters()) for model in models]
    state = TrainState(models[0], adams[0])
    before = wholes(models[0], adams[0])
    batch = torch.randn(4, 6, generator=torch.Generator().manual_seed(3))
    if is_evaluated:
        with torch.no_grad():
            models[0](batch)
    state.begin_step()
    for model, adam in zip(models, adams, strict=True):
        loss = model(batch).square().mean()
        if model is models[0]:
            taken = state.snapshot()
        loss.backward()
        adam.step()
    assert are_equal(wholes(models[0], adams[0]), wholes(models[1], adams[1]))
    assert are_equal([described["shard"] for described in taken["model"].values()], before)


def test_the_place_of_a_shard_in_its_whole(mesh: DeviceMesh) -> None:
    model = sharded_model(mesh)
    shards = Shards(model.parameters())
    described = shards.describe(dict(model.state_dict()))["0.weight"]
    assert shards.place(described) == ((5, 6), (0, 0))
    for wrong in ({"mesh": 3}, {"placements": ()}, {"placements": (("shard", 0), ("replicate",))}, {"shape": None}):
        with pytest.raises(CorruptState, match="a shard that does not belong to this rank"):
            shards.place(described | wrong)
