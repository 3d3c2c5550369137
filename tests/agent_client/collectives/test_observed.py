"""Where a rank is while torch's modules run collectives inside its group."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.distributed import AllreduceOptions, BroadcastOptions, HashStore
from torch.nn import parallel

from agent_client.collectives.gloo import GlooGroup
from agent_client.collectives.observed import ObservedGroup
from agent_client.progress.progress import Progress
from agent_client.progress.rules import Number
from lighthouse_protocol.messages.progress import Collective
from tests.processes import LOCALHOST, PATIENCE_S, eventually


@pytest.fixture(scope="module")
def pair() -> Iterator[list[ObservedGroup]]:
    """Two ranks, in two threads of this process."""
    store = HashStore()

    def meet(rank: int) -> tuple[GlooGroup, ObservedGroup]:
        group = GlooGroup(store, rank, 2, LOCALHOST, connect_timeout_s=PATIENCE_S, timeout_s=PATIENCE_S)
        return group, ObservedGroup(group.for_torch("torch"), Progress())

    with ThreadPoolExecutor(2) as pool:
        met = list(pool.map(meet, range(2)))
    yield [observed for _, observed in met]
    for group, _ in met:
        group.abort()


@pytest.fixture(autouse=True)
def progress(pair: list[ObservedGroup]) -> list[Progress]:
    for observed in pair:
        observed.progress = Progress()
    return [observed.progress for observed in pair]


def where(progress: Progress) -> Collective:
    collective = progress.sample().collective
    assert collective is not None
    return collective


def test_it_is_inside_until_all_are(pair: list[ObservedGroup], progress: list[Progress]) -> None:
    first: Any = pair[0].broadcast([torch.ones(3, 2)], BroadcastOptions())
    assert where(progress[0]) == Collective(0, 0, "broadcast", "3x2", True, True, 1)
    assert progress[1].sample().collective is None
    received = torch.zeros(3, 2)
    second: Any = pair[1].broadcast([received], BroadcastOptions())
    for work in (first, second):
        work.wait()
    assert received.sum() == 6
    for rank in progress:
        assert eventually(lambda rank=rank: not where(rank).is_inside)
        assert where(rank).operation == "broadcast"


def test_those_of_the_agent_and_torch_s_have_one_order(pair: list[ObservedGroup], progress: list[Progress]) -> None:
    """As when rank 0 sums its metrics while the others' modules send their buffers."""
    work: Any = pair[1].broadcast([torch.ones(1)], BroadcastOptions())
    number = progress[0].numbers.number_of(progress[0].numbers.inside(), within_group=True)
    with progress[0].collective(number, "all_reduce", within_group=True):
        assert where(progress[0]).order == where(progress[1]).order
        assert where(progress[0]).operation != where(progress[1]).operation
    pair[0].broadcast([torch.ones(1)], BroadcastOptions())
    work.wait()


def test_the_unfinished_one_is_told_while_the_other_is_over(progress: list[Progress]) -> None:
    rank = progress[0]
    with rank.collective(Number(0, 2), "all_reduce"):
        rank.enter_torch_collective("broadcast", "4").runs(None)
        rank.enter_torch_collective("broadcast", "4").runs(None)
        assert where(rank).operation == "all_reduce"
    assert where(rank).order == (0, 2, 0)


def test_of_several_that_go_on_the_first_is_told(pair: list[ObservedGroup], progress: list[Progress]) -> None:
    """As DDP's buffers of two types: the others wait for the first."""
    works: list[Any] = [pair[1].broadcast([torch.ones(size)], BroadcastOptions()) for size in (1, 2)]
    assert where(progress[1]) == Collective(0, 0, "broadcast", "1", True, True, 1)
    works += [pair[0].broadcast([torch.ones(size)], BroadcastOptions()) for size in (1, 2)]
    for work in works:
        work.wait()
    assert eventually(lambda: where(progress[1]) == Collective(0, 0, "broadcast", "2", False, True, 2))
    pair[0].progress.enter_torch_collective("broadcast", "3")
    assert len(progress[0].activity.torch_collectives) == 1, "what is over is kept no longer"


def test_an_error_ends_it(pair: list[ObservedGroup], progress: list[Progress]) -> None:
    with pytest.raises(TypeError):
        pair[0].observe("broadcast", "no tensor")
    assert not where(progress[0]).is_inside


def test_modules_of_torch_s_are_seen(pair: list[ObservedGroup], progress: list[Progress]) -> None:
    """Their C++ calls the group, too: a forward pass sends the buffers."""
    may_go_on = threading.Event()

    def train(rank: int) -> torch.nn.Module:
        module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
        ddp = parallel.DistributedDataParallel(module, process_group=pair[rank])
        if rank == 0:
            may_go_on.wait(PATIENCE_S)
        ddp(torch.ones(4, 2)).sum().backward()
        return ddp

    with ThreadPoolExecutor(2) as pool:
        done = [pool.submit(train, rank) for rank in range(2)]
        try:
            eventually(lambda: progress[1].sample().is_inside and where(progress[1]).operation == "broadcast")
        finally:
            may_go_on.set()
        gradients = [[p.grad for p in pending.result(PATIENCE_S).parameters()] for pending in done]
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    work: Any = [rank.allreduce([torch.ones(1)], AllreduceOptions()) for rank in pair]
    for each in work:
        each.wait()
    assert where(progress[0]).operation == "all_reduce"
