"""A mean that its dtype holds does not overflow in the sum, across groups and inside one; float32 keeps its bits."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from agent_client.progress.progress import Progress
from agent_client.step.config import AgentConfig
from agent_client.step.runner import StepRunner


class Ranks:
    """An all-reduce among ranks that hold the same."""

    def __init__(self, count: int) -> None:
        self.size, self.dtypes = count, list[torch.dtype]()

    def all_reduce(self, tensor: Tensor, timeout_s: float) -> None:
        self.dtypes.append(tensor.dtype)
        tensor.copy_(sum([tensor.clone() for _ in range(1, self.size)], start=tensor.clone()))


def reduced(tensor: Tensor, *, groups: int, ranks: int, reduce_dtype: Any = "tensor") -> tuple[Tensor, Ranks, Ranks]:
    inside, peers = Ranks(ranks), Ranks(groups)
    over: Any = peers
    machine: Any = SimpleNamespace(contributes=True, failure=None, reduced=lambda: None, skips_batch=False)
    machine.share, machine.divisor = SimpleNamespace(divisor=groups, weight=1), groups
    machine.assignment = SimpleNamespace(has_healing=False, replica_ids=("a",), replica_rank=0)
    unused: Any = None
    place: Any = SimpleNamespace(group=inside if ranks > 1 else None, group_world_size=ranks, manager_process=None)
    config = AgentConfig(reduce_dtype=reduce_dtype)
    runner = StepRunner(machine, unused, over, unused, place, config, Progress(), unused)
    result = runner.reduce(tensor, True, runner.progress.numbers.over(), "")
    assert result is tensor
    return result, inside, peers


@pytest.mark.parametrize("reduce_dtype", ["tensor", "float32"])
@pytest.mark.parametrize(("groups", "ranks"), [(2, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_mean_of_large_halves(dtype: torch.dtype, groups: int, ranks: int, reduce_dtype: str) -> None:
    large = 40_000.0 if dtype is torch.float16 else 3e38
    tensor = torch.full((3,), large, dtype=dtype)
    before = tensor.clone()
    result, *_ = reduced(tensor, groups=groups, ranks=ranks, reduce_dtype=reduce_dtype)
    assert torch.equal(result, before)


def test_halves_travel_as_float32_if_asked() -> None:
    """Three equal bfloat16 numbers have no exact third, so only a wider sum gives them back."""
    result, inside, peers = reduced(torch.tensor([1.0]).bfloat16(), groups=3, ranks=3, reduce_dtype="float32")
    assert result.tolist() == [1.0]
    assert inside.dtypes == peers.dtypes == [torch.float32]


def test_float32_is_summed_and_then_divided() -> None:
    drawn = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    for reduce_dtype in ("tensor", "float32"):
        result, *_ = reduced(drawn.clone(), groups=3, ranks=5, reduce_dtype=reduce_dtype)
        inside = (drawn + drawn + drawn + drawn + drawn) / 5
        assert torch.equal(result, (inside + inside + inside) / 3)
