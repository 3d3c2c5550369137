"""All bring bytes, by sums of tensors; and a rank whose peers are lost tells its group."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import PrefixStore, TCPStore

from agent_client.collectives.gloo import GlooGroup
from agent_client.errors import EvaluationInterrupted
from agent_client.progress.progress import Progress
from agent_client.step.evaluation import MAX_BYTES, RankRound, gather
from agent_client.step.rules.machine import StepMachine
from tests.processes import PATIENCE_S


class Ring:
    """Sums tensors of so many threads, as a process group does."""

    def __init__(self, size: int, *, is_lost: bool = False) -> None:
        self.size = size
        self.is_lost = is_lost
        self._barrier = threading.Barrier(size)
        self._tensors: list[torch.Tensor] = []

    def all_reduce(self, tensor: torch.Tensor, timeout_s: float) -> None:
        if self.is_lost:
            raise RuntimeError("Connection closed by peer\nand more")
        if self._barrier.wait(PATIENCE_S) == 0:
            self._tensors.clear()
        self._barrier.wait(PATIENCE_S)
        self._tensors.append(tensor.clone())
        self._barrier.wait(PATIENCE_S)
        tensor.copy_(torch.stack(self._tensors).sum(0))
        self._barrier.wait(PATIENCE_S)

    def drop(self) -> None:
        self.is_lost = True


def in_threads(act: Callable[[int], Any], count: int) -> list[Any]:
    with ThreadPoolExecutor(count) as pool:
        return [pending.result(PATIENCE_S) for pending in [pool.submit(act, place) for place in range(count)]]


def test_each_gets_what_all_have_brought() -> None:
    ring, brought = Ring(4), [b"a", b"", bytes(range(256)), b"\xff" * 10_000]
    told = in_threads(lambda at: gather(lambda tensor: ring.all_reduce(tensor, 1.0), at, 4, brought[at]), 4)
    assert told == [brought] * 4


def test_nothing_and_one_alone() -> None:
    ring = Ring(2)
    assert in_threads(lambda at: gather(lambda tensor: ring.all_reduce(tensor, 1.0), at, 2, b""), 2) == [[b"", b""]] * 2
    assert gather(lambda tensor: pytest.fail("no sum"), 0, 1, b"alone") == [b"alone"]


@pytest.mark.parametrize("lengths", [(MAX_BYTES + 1, 0), (-1, 5)])
def test_what_cannot_be_lengths_is_no_memory(lengths: tuple[int, int]) -> None:
    """As where the others sum gradients."""
    with pytest.raises(RuntimeError, match="some of them are missing"):
        gather(lambda tensor: tensor.copy_(torch.tensor(lengths)), 0, 2, b"")


def test_who_is_done_may_end_at_once() -> None:
    """Its connections with it, while others still wait for what it has sent."""
    store, size = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False), 4
    together = threading.Barrier(size)

    def act(place: int) -> list[list[bytes]]:
        own, told = TCPStore("127.0.0.1", store.port, is_master=False, wait_for_workers=False), []
        for number in range(20):
            group = GlooGroup(
                PrefixStore(str(number), own),
                place,
                size,
                "127.0.0.1",
                connect_timeout_s=PATIENCE_S,
                timeout_s=PATIENCE_S,
            )
            together.wait(PATIENCE_S)
            told.append(gather(group.all_reduce, place, size, bytes(place)))
            group.abort()
        return told

    assert in_threads(act, size) == [[[bytes(place) for place in range(size)]] * 20] * size


def round_of(replica_rank: int, group_rank: int, peers: Any, group: Any) -> RankRound:
    last = SimpleNamespace(replica_rank=replica_rank, replica_world_size=2, replica_ids=("a", "b"))
    runner = SimpleNamespace(
        last=last, comparison=SimpleNamespace(is_on=False), collective=lambda *_, within_group: nullcontext()
    )
    internals: Any = SimpleNamespace(
        runner=runner,
        machine=StepMachine(),
        place=SimpleNamespace(group=group, group_rank=group_rank),
        peers=peers,
        progress=Progress(),
        thread=SimpleNamespace(submit=lambda task: SimpleNamespace(result=task)),
    )
    return RankRound(internals, "it", 1.0)


@pytest.mark.parametrize("is_lost", [False, True])
def test_two_groups_of_two(is_lost: bool) -> None:
    """`is_lost`: the connections of the ranks 1. Then their groups' ranks 0 know it, too, and nobody goes on alone."""
    over, within = [Ring(2), Ring(2, is_lost=is_lost)], [Ring(2), Ring(2)]

    def bring(at: int) -> Any:
        replica_rank, group_rank = divmod(at, 2)
        try:
            return round_of(replica_rank, group_rank, over[group_rank], within[replica_rank]).gather(b"%d" % at, "x")
        except EvaluationInterrupted as e:
            return str(e)

    lost = "it: the connections to the other replica groups ended: Connection closed by peer"
    assert in_threads(bring, 4) == [lost if is_lost else [[b"0", b"1"], [b"2", b"3"]]] * 4
