"""torch's own groups of two ranks, here two threads: what they do, and how every kind of wait in them ends."""

import gc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch.distributed import HashStore, PrefixStore, ProcessGroup, ProcessGroupGloo

from agent_client.collectives import gloo
from agent_client.collectives.interruptible import InterruptibleGroup
from tests.processes import eventually

CPU = torch.device("cpu")
NEVER = timedelta(minutes=10)
ENDS_WITHIN_S = 30.0

Wait = Callable[[Any], object]
WAITS: dict[str, Wait] = {
    "work": lambda group: group.allreduce([torch.ones(1)]).wait(),
    "future": lambda group: group.allreduce([torch.ones(1)]).get_future().wait(),
    "barrier": lambda group: group.barrier().wait(),
    "message": lambda group: group.recv([torch.ones(1)], 1, 0).wait(),
    "reduce-scatter": lambda group: group._reduce_scatter_base(torch.ones(1), torch.ones(2)).wait(),
}


def meet(store: HashStore, rank: int) -> Any:
    """As torch's init_process_group makes a group."""
    group: Any = InterruptibleGroup(PrefixStore("group/", store), rank, 2)
    kind = ProcessGroup.BackendType.GLOO
    group._set_default_backend(kind)
    backend_store = PrefixStore(f"{CPU.type}/", PrefixStore("group/", store))
    group._register_backend(CPU, kind, ProcessGroupGloo(backend_store, rank, 2, NEVER))
    return group


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as pool:
        yield pool


@pytest.fixture
def groups(pool: ThreadPoolExecutor) -> Iterator[list[Any]]:
    store = HashStore()
    groups = list(pool.map(lambda rank: meet(store, rank), (0, 1)))
    yield groups
    for group in groups:
        group.abort()


def test_collectives_are_torchs(groups: list[Any], pool: ThreadPoolExecutor) -> None:
    def run(rank: int) -> list[list[float]]:
        group, own = groups[rank], torch.full((2,), rank + 1.0)
        total, part = own.clone(), torch.zeros(1)
        group.allreduce([total]).wait()
        group._reduce_scatter_base(part, torch.arange(2.0) * (rank + 1)).wait()
        (later,) = group.allreduce([own.clone()]).get_future().wait()
        message = torch.full((1,), 7.0 * (1 - rank))
        (group.send if rank == 0 else group.recv)([message], 1 - rank, 0).wait()
        group.barrier().wait()
        return [each.tolist() for each in (total, part, later, message)]

    assert list(pool.map(run, (0, 1))) == [[[3, 3], [0], [3, 3], [7]], [[3, 3], [3], [3, 3], [7]]]


@pytest.mark.parametrize("ended_by", [0, 1], ids=["itself", "its peer"])
@pytest.mark.parametrize("wait", WAITS)
def test_a_wait_ends_with_the_group(groups: list[Any], pool: ThreadPoolExecutor, wait: str, ended_by: int) -> None:
    waiting = pool.submit(WAITS[wait], groups[0])
    with pytest.raises(TimeoutError):
        waiting.result(0.2)
    groups[ended_by].abort()
    with pytest.raises(RuntimeError):
        waiting.result(ENDS_WITHIN_S)
    groups[0].abort()
    with pytest.raises(RuntimeError, match="the generation of its run ended"):
        groups[0].allreduce([torch.ones(1)])


def test_a_group_that_is_let_go_keeps_what_it_has_done_last(
    pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[list[Any]] = []
    monkeypatch.setattr(gloo, "release_later", lambda works: kept.append(list(works)))
    store = HashStore()
    groups = list(pool.map(lambda rank: meet(store, rank), (0, 1)))
    list(pool.map(lambda group: group.allreduce([torch.ones(1)]).wait(), groups))
    while groups:
        groups.pop().abort()
    eventually(lambda: gc.collect() >= 0 and len(kept) == 2, "both are let go")
    assert [len(works) for works in kept] == [1, 1]
