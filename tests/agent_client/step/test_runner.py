"""The step runner: its background thread, its means, and its log of quorums."""

import gc
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from agent_client.errors import AgentError
from agent_client.progress.progress import Progress
from agent_client.step.config import AgentConfig
from agent_client.step.rules.machine import StepMachine
from agent_client.step.rules.world_size import WorldSize, WorldSizeMode
from agent_client.step.runner import BackgroundThread, StepRunner, log_quorum
from lighthouse_protocol.messages.membership import Assignment
from manager.group.requests import assign
from tests.manager.builders import member, quorum
from tests.processes import PATIENCE_S, eventually


@pytest.fixture
def thread() -> Iterator[BackgroundThread]:
    thread = BackgroundThread("under test")
    yield thread
    thread.close(PATIENCE_S)


def ours() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name == "under test"]


def test_tasks_run_in_order_on_one_thread_of_that_name(thread: BackgroundThread) -> None:
    ran: list[tuple[int, str]] = []
    futures = [thread.submit(lambda n=n: ran.append((n, threading.current_thread().name)) or n * n) for n in range(100)]
    assert [future.result(PATIENCE_S) for future in futures] == [n * n for n in range(100)]
    assert ran == [(n, "under test") for n in range(100)]


def test_it_is_idle_as_soon_as_a_future_says_so_and_not_before(thread: BackgroundThread) -> None:
    assert thread.is_idle
    may_end = threading.Event()
    first, second = thread.submit(may_end.wait), thread.submit(lambda: "after")
    assert not thread.is_idle
    was_idle: list[bool] = []
    second.add_done_callback(lambda _: was_idle.append(thread.is_idle))
    may_end.set()
    first.result(PATIENCE_S)
    second.result(PATIENCE_S)
    eventually(lambda: was_idle == [True], "the callback has run")


@pytest.mark.parametrize("error", [ValueError("bad"), KeyboardInterrupt(), SystemExit(3), GeneratorExit()])
def test_an_error_belongs_to_its_future_and_the_next_task_runs(thread: BackgroundThread, error: BaseException) -> None:
    def fail() -> None:
        raise error

    failed, fine = thread.submit(fail), thread.submit(lambda: "fine")
    assert failed.exception(PATIENCE_S) is error
    assert fine.result(PATIENCE_S) == "fine"


def test_close_waits_no_longer_than_it_is_told() -> None:
    thread = BackgroundThread("under test")
    may_end = threading.Event()
    hanging = thread.submit(may_end.wait)
    began_at = time.monotonic()
    thread.close(0.05)
    assert 0.05 <= time.monotonic() - began_at < PATIENCE_S
    assert not hanging.done()
    assert [each.daemon for each in ours()] == [True], "it must not keep the interpreter from ending"
    may_end.set()
    assert hanging.result(PATIENCE_S)
    eventually(lambda: not ours(), "the thread has ended")


def test_a_future_cannot_be_cancelled_because_the_other_ranks_run_the_same_task(thread: BackgroundThread) -> None:
    may_end = threading.Event()
    thread.submit(may_end.wait)
    waiting = thread.submit(lambda: "reduced")
    assert not waiting.cancel()
    may_end.set()
    assert waiting.result(PATIENCE_S) == "reduced"
    assert thread.submit(lambda: "next").result(PATIENCE_S) == "next"


def test_a_task_for_a_closed_thread_fails_at_once_and_one_from_before_runs() -> None:
    thread = BackgroundThread("under test")
    may_end = threading.Event()
    before = thread.submit(may_end.wait)
    thread.close(0.0)
    with pytest.raises(AgentError, match="the Agent was closed"):
        thread.submit(lambda: "late").result(PATIENCE_S)
    may_end.set()
    assert before.result(PATIENCE_S)
    eventually(lambda: thread.is_idle, "no task is left")


def test_a_task_can_submit_another(thread: BackgroundThread) -> None:
    inner = thread.submit(lambda: thread.submit(lambda: "inner")).result(PATIENCE_S)
    assert inner.result(PATIENCE_S) == "inner"


def test_nothing_is_kept_of_a_task_that_is_done(thread: BackgroundThread) -> None:
    class Big:
        pass

    def use(big: Big) -> None:
        assert big is not None

    big = Big()
    kept = weakref.ref(big)
    thread.submit(lambda big=big: use(big)).result(PATIENCE_S)
    del big
    eventually(lambda: gc.collect() is not None and kept() is None, "the task's argument is freed", 10.0)


def test_a_callback_of_the_future_runs_before_the_next_task(thread: BackgroundThread) -> None:
    """A gradient bucket is handed back to torch there, in the order of the buckets."""
    order: list[str] = []
    may_begin = threading.Event()
    thread.submit(may_begin.wait)
    thread.submit(lambda: order.append("first")).add_done_callback(lambda _: order.append("its callback"))
    last = thread.submit(lambda: order.append("second"))
    may_begin.set()
    last.result(PATIENCE_S)
    assert order == ["first", "its callback", "second"]


class Ranks:
    """An all-reduce among ranks that hold the same. Like gloo, it sums the memory at which the tensor begins."""

    def __init__(self, count: int) -> None:
        self.size, self.dtypes = count, list[torch.dtype]()

    def all_reduce(self, tensor: Tensor, timeout_s: float = 0.0) -> None:
        self.dtypes.append(tensor.dtype)
        memory = tensor.as_strided((tensor.numel(),), (1,))
        memory.copy_(sum([memory.clone() for _ in range(1, self.size)], start=memory.clone()))


def reduced(tensor: Tensor, *, groups: int, ranks: int, reduce_dtype: Any = "tensor") -> tuple[Tensor, Ranks, Ranks]:
    inside, peers = Ranks(ranks), Ranks(groups)
    over: Any = peers
    machine: Any = SimpleNamespace(contributes=True, failure=None, record_reduction=lambda: None, skips_batch=False)
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


def test_a_mean_leaves_no_trace_in_the_graph_of_its_tensor() -> None:
    """A loss that is averaged for a log would otherwise give each group a fraction of its gradient."""
    weight = torch.tensor([2.0, 3.0], requires_grad=True)
    loss = (weight * 5).sum()
    reduced(loss, groups=2, ranks=2)
    loss.backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [5.0, 5.0]
    reduced(weight, groups=2, ranks=2)
    assert weight.tolist() == [2.0, 3.0]
    assert not weight.is_inference()


@pytest.mark.parametrize("reduce_dtype", ["tensor", "float32"])
def test_the_result_of_an_evaluation_in_inference_mode_can_be_averaged(reduce_dtype: str) -> None:
    with torch.inference_mode():
        accuracy = torch.tensor([[0.25, 0.5], [0.75, 1.0]]).bfloat16()[:, 1]
    result, *_ = reduced(accuracy, groups=2, ranks=2, reduce_dtype=reduce_dtype)
    assert result.tolist() == [0.5, 1.0]


@pytest.mark.parametrize("part", [lambda whole: whole[:, ::2], lambda whole: whole[1:, 1:], torch.t])
def test_of_a_part_of_a_tensor_that_part_is_reduced(part: Callable[[Tensor], Tensor]) -> None:
    whole = torch.arange(16.0).reshape(4, 4)
    expected = whole.clone()
    reduced(part(whole), groups=2, ranks=2)
    assert torch.equal(whole, expected)
    unused: Any = None
    place: Any = SimpleNamespace(group=Ranks(2), manager_process=None)
    runner = StepRunner(unused, unused, unused, unused, place, AgentConfig(), Progress(), unused)
    runner.sum_over_group(part(whole), runner.progress.numbers.inside())
    part(expected).mul_(2)
    assert torch.equal(whole, expected)


def assigned(quorum_id: int, *names: str, step: int = 3) -> Assignment:
    found = assign(quorum(*(member(name, step) for name in names), quorum_id=quorum_id), "a", 0, True)
    assert found is not None
    return found


def test_shares_end_with_the_quorum_that_agreed_on_them() -> None:
    """Even if the participants of the next quorum exchange no speeds, because one of them cannot compare."""
    parts = Mock()
    parts.watch.revoked.return_value = None
    machine = StepMachine(step=3, is_alone=True, world_size=WorldSize(WorldSizeMode.CONSTANT_BATCH, 4))
    config = AgentConfig(world_size_mode="constant_batch", world_size=4, share_by_speed=True)
    runner = StepRunner(machine, parts, parts, parts, parts, config, Progress(), parts)

    def begin(assignment: Assignment) -> tuple[int, ...]:
        parts.ask.return_value = assignment
        machine.ask()
        runner.prepare_step(0)
        return machine.share.microbatches

    assert begin(assigned(1, "a", "b")) == (0, 2)
    machine.set_shares((3, 1))
    machine.vote()
    machine.record_decision(commit=False)
    assert begin(assigned(1, "a", "b")) == (0, 1, 2)
    machine.vote()
    machine.record_decision(commit=False)
    assert begin(assigned(2, "a", "c")) == (0, 2)


def test_who_was_admitted_and_who_is_gone(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO)
    quorums = [
        assigned(1, "a", "b"),
        assigned(1, "a", "b", step=4),
        assigned(2, "a", "c", "d"),
        assigned(5, "a", "c", "d"),
    ]
    for before, now in zip([None, *quorums], quorums, strict=False):
        log_quorum(before, now)
    assert caplog.messages == [
        "quorum 1: 2 groups from step 3",
        "quorum 2: 3 groups from step 3; joined: c and d; without: b",
        "quorum 5: 3 groups from step 3",
    ]


def test_of_many_the_first_are_named(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO)
    log_quorum(assigned(1, "a"), assigned(2, "a", *(f"g{number:02}" for number in range(20))))
    assert caplog.messages[0].endswith("g07 and 12 more")
