"""NCCL: what was aborted never counts as done; on a GPU, as far as one goes."""

import threading
import time
from collections.abc import Iterator

import pytest
import torch
from torch.distributed import HashStore

from agent_client.collectives.group_spec import GroupSpec
from agent_client.collectives.nccl import DUMP, Fence, NcclGroup, may_kill_process, wait_for
from agent_client.collectives.peers import connector
from agent_client.errors import ConfigurationError
from tests.processes import LOCALHOST

ENDS_WITHIN_S = 10.0
A_SECOND_OF_CYCLES = 2_000_000_000

on_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


class Event:
    def __init__(self) -> None:
        self.is_done = False

    def query(self) -> bool:
        return self.is_done


def test_what_completed_before_an_abort_was_announced_has_passed() -> None:
    fence, event = Fence(), Event()
    assert not fence.has_passed(event)
    event.is_done = True
    assert fence.has_passed(event)


def test_what_looks_completed_after_an_abort_has_not_passed() -> None:
    fence, event = Fence(), Event()
    assert fence.announce_abort()
    event.is_done = True
    with pytest.raises(RuntimeError, match="aborted"):
        fence.has_passed(event)
    assert not fence.announce_abort(), "only the first one aborts"


def test_an_abort_is_not_announced_while_somebody_looks() -> None:
    """Or else it could end the kernel between the look at the flag and the look at the event."""
    fence, looks, may_answer = Fence(), threading.Event(), threading.Event()

    class Slow(Event):
        def query(self) -> bool:
            looks.set()
            assert may_answer.wait(ENDS_WITHIN_S)
            return self.is_done

    event = Slow()
    seen: list[bool] = []
    looking = threading.Thread(target=lambda: seen.append(fence.has_passed(event)))
    looking.start()
    assert looks.wait(ENDS_WITHIN_S)
    ending = threading.Thread(target=lambda: (fence.announce_abort(), setattr(event, "is_done", True)))
    ending.start()
    ending.join(0.1)
    assert not event.is_done, "the abort waits"
    may_answer.set()
    looking.join(ENDS_WITHIN_S)
    ending.join(ENDS_WITHIN_S)
    assert seen == [False]


class Work:
    """Is over at the look of that number: well, and then it passes the `event` at the look after, or not. It says how
    at the look at which it is over if it has failed, and later if it has not."""

    def __init__(self, event: Event, looks: int, *, fails: bool = False) -> None:
        self._event, self._looks, self._fails = event, looks, fails

    def is_completed(self) -> bool:
        self._looks -= 1
        self._event.is_done = self._looks < 0 and not self._fails
        return self._looks <= 0

    def get_future_result(self) -> "Work":
        return self

    def done(self) -> bool:
        return self._fails and self._looks <= 0

    def value(self) -> int:
        return 2 if self._fails else 0


def test_a_collective_that_is_over_without_an_error_is_waited_for() -> None:
    event = Event()
    wait_for(Work(event, 3), event, Fence(), time.monotonic() + ENDS_WITHIN_S)
    assert event.is_done


def test_an_error_of_nccl_ends_the_wait() -> None:
    """Before torch's watchdog sees it, which looks ten times a second."""
    event = Event()
    with pytest.raises(RuntimeError, match="NCCL has lost a peer"):
        wait_for(Work(event, 3, fails=True), event, Fence(), time.monotonic() + ENDS_WITHIN_S)


def test_an_abort_counts_before_what_it_leaves_in_the_work() -> None:
    event, fence = Event(), Fence()
    fence.announce_abort()
    with pytest.raises(RuntimeError, match="the NCCL group was aborted"):
        wait_for(Work(event, 0, fails=True), event, fence, time.monotonic() + ENDS_WITHIN_S)


def test_a_collective_that_is_not_over_in_time_has_failed() -> None:
    event = Event()
    with pytest.raises(RuntimeError, match="did not end in time"):
        wait_for(Work(event, 10**9), event, Fence(), time.monotonic() + 0.01)


@pytest.mark.parametrize(
    ("backends", "value", "may"),
    [
        ("cpu:gloo,cuda:nccl", None, True),
        ("cpu:gloo,cuda:nccl", "1", True),
        ("cpu:gloo,cuda:nccl", "0", False),
        ("cpu:gloo,cuda:nccl", "False", False),
        ("cpu:gloo", None, False),
        ("", None, False),
    ],
)
def test_a_default_group_whose_monitor_ends_the_process_is_told(
    backends: str, value: str | None, may: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(DUMP, raising=False)
    if value is not None:
        monkeypatch.setenv(DUMP, value)
    assert may_kill_process(backends) is may


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
@pytest.mark.parametrize("name", ["nccl", "isolated:nccl"])
def test_without_a_device_it_is_refused(name: str) -> None:
    with pytest.raises(ConfigurationError, match="nccl needs a CUDA device"):
        connector(name)


class TestOnOneGpu:
    pytestmark = on_gpu

    @pytest.fixture
    def group(self) -> Iterator[NcclGroup]:
        device = torch.device("cuda", torch.cuda.current_device())
        group = NcclGroup(HashStore(), 0, 1, device, connect_timeout_s=60.0, timeout_s=60.0)
        yield group
        group.abort()

    @pytest.mark.parametrize("device", ["cpu", "cuda"])
    def test_a_sum_of_one(self, group: NcclGroup, device: str) -> None:
        tensor = torch.arange(1000.0, device=device)
        group.all_reduce(tensor)
        assert torch.equal(tensor.cpu(), torch.arange(1000.0))

    def test_an_abort_ends_the_wait(self, group: NcclGroup) -> None:
        torch.cuda._sleep(2 * A_SECOND_OF_CYCLES)
        aborting = threading.Timer(0.2, group.abort)
        aborting.start()
        with pytest.raises(RuntimeError, match="aborted"):
            group.all_reduce(torch.ones(10, device="cuda"))
        aborting.join(ENDS_WITHIN_S)
        with pytest.raises(RuntimeError):
            group.all_reduce(torch.ones(10, device="cuda"))

    def test_a_collective_that_does_not_end_in_time_fails(self, group: NcclGroup) -> None:
        torch.cuda._sleep(2 * A_SECOND_OF_CYCLES)
        began_at = time.monotonic()
        with pytest.raises(RuntimeError, match="did not end in time"):
            group.all_reduce(torch.ones(10, device="cuda"), timeout_s=0.2)
        assert time.monotonic() - began_at < ENDS_WITHIN_S

    def test_in_a_child_process(self, store: str) -> None:
        isolated = connector("isolated:nccl")
        group = isolated.connect(GroupSpec(store, "isolated", 0, 1, LOCALHOST, connect_timeout_s=60.0, timeout_s=60.0))
        tensor = torch.arange(1000.0, device="cuda")
        group.all_reduce(tensor)
        assert torch.equal(tensor.cpu(), torch.arange(1000.0))
        isolated.close()

    def test_a_new_group_after_an_abort(self, group: NcclGroup) -> None:
        group.abort()
        again = NcclGroup(HashStore(), 0, 1, torch.device("cuda", 0), connect_timeout_s=60.0, timeout_s=60.0)
        tensor = torch.ones(10, device="cuda")
        again.all_reduce(tensor)
        assert tensor.sum().item() == 10.0
        again.abort()
