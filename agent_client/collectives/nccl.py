"""An NCCL process group that can be aborted while a peer is dead or suspended.

An abort makes NCCL's kernels return, and their CUDA events complete as if the collective had succeeded. So a collective
counts as successful only if its event has completed before an abort was announced. `Fence` orders the two with a lock.

The waiting thread checks for NCCL errors itself and aborts the group on the first error, before torch's watchdog finds
the error in one of its ten checks per second. When the watchdog finds a failure, it sleeps for a minute, so that all
ranks in the job can dump their state, and notifies the monitor of the process's first NCCL group. That monitor dumps
its state, sleeps for eight minutes and kills the process unless its group has been destroyed. Code that destroys a
group waits for both sleeps. torch does this for jobs that do not survive a failure. The variables in QUIET turn it off.
The first sleep was observed with torch 2.11. The other facts are from ProcessGroupNCCL.cpp.
"""

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Generator
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import distributed
from torch.distributed import PrefixStore, Store, distributed_c10d

from agent_client.collectives.gloo import connect_store
from agent_client.collectives.group_spec import Connector, GroupSpec, register_group
from agent_client.errors import ConfigurationError

log = logging.getLogger(__name__)

DUMP = "TORCH_NCCL_DUMP_ON_TIMEOUT"
QUIET = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # other values kill the process, and aborts require 0
    DUMP: "0",  # the monitor ignores failures
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",  # a quarter of the watchdog's sleep
}
"""Environment variables to set while a group is created, because torch reads them then."""
POLL_S = 0.0001
NEVER = timedelta(days=365)
WARNING = (
    f"the default process group has NCCL and was made with {DUMP} on, torch's default: torch may end this process "
    f"eight minutes after a peer was lost. Set {DUMP}=0 where this process is started, make the Agent before "
    "init_process_group, or take process_group: isolated:nccl"
)


def may_kill_process(default_backends: str) -> bool:
    """Return whether torch's NCCL monitor may kill this process after a peer is lost.

    `default_backends` is the backend configuration of the default group, such as "cpu:gloo,cuda:nccl".
    """
    return "nccl" in default_backends and os.environ.get(DUMP, "1").lower() not in ("0", "n", "no", "f", "false")


class NcclConnector(Connector):
    def __init__(self, device: int | None = None) -> None:
        if not distributed.is_nccl_available() or not torch.cuda.is_available():
            raise ConfigurationError("process_group: nccl needs a CUDA device, and a torch that was built with NCCL")
        self.device = torch.device("cuda", torch.cuda.current_device() if device is None else device)
        if distributed.is_initialized() and may_kill_process(distributed_c10d.get_backend_config()):
            log.warning("%s", WARNING)
        os.environ.setdefault(DUMP, "0")  # for the default group, if the script creates it later

    def connect(self, spec: GroupSpec) -> "NcclGroup":
        store = PrefixStore(spec.prefix, connect_store(spec.store_address, spec.connect_timeout_s))
        return NcclGroup(
            store,
            spec.rank,
            spec.size,
            self.device,
            connect_timeout_s=spec.connect_timeout_s,
            timeout_s=spec.timeout_s,
        )


class Fence:
    """Ensures that no collective of a group counts as complete once the abort of the group has been announced."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_down = False

    def announce_abort(self) -> bool:
        """Mark the group as aborted. Return True, or False if it had already been marked."""
        with self._lock:
            was_down, self._is_down = self._is_down, True
        return not was_down

    def has_passed(self, done: Any) -> bool:
        """Return whether the CUDA event `done` has completed.

        Raises:
            RuntimeError: announce_abort() was called, so the event no longer proves success.
        """
        with self._lock:
            if self._is_down:
                raise RuntimeError("the NCCL group was aborted")
            return done.query()


def wait_for(work: Any, done: Any, fence: Fence, ends_at: float) -> None:
    """Wait until the collective `work` has completed. The CUDA event `done` was recorded directly after it.

    Raises:
        RuntimeError: The group was aborted, a peer is lost, or time.monotonic() has reached `ends_at`.
    """
    while not fence.has_passed(done):
        if work.is_completed():  # this call checks for NCCL errors
            result = work.get_future_result()  # done as soon as any thread has found an error
            if result.done() and result.value() != 0:
                raise RuntimeError("NCCL has lost a peer")
        if time.monotonic() >= ends_at:
            raise RuntimeError("the NCCL collective did not end in time: a peer is lost, stopped or slow")
        time.sleep(POLL_S)


class NcclGroup:
    """One rank of a process group over NCCL. abort() is thread-safe. Call all_reduce() from one thread at a time."""

    def __init__(
        self, store: Store, rank: int, size: int, device: torch.device, *, connect_timeout_s: float, timeout_s: float
    ) -> None:
        self._device = device
        self._timeout_s = timeout_s
        self._fence = Fence()
        options: Any = distributed.ProcessGroupNCCL.Options()
        options.config.blocking = 0  # otherwise NCCL waits forever for a peer that never connects
        options._timeout = NEVER  # each collective has its own time limit
        with _environment(**QUIET, TORCH_NCCL_NONBLOCKING_TIMEOUT=str(connect_timeout_s)):
            self._backend: Any = distributed.ProcessGroupNCCL(store, rank, size, options)
            try:
                self._backend.eager_connect_single_device(device)
                self.all_reduce(torch.zeros(1, device=device), connect_timeout_s)
            except RuntimeError:
                self.abort()
                raise
        register_group(self)

    def all_reduce(self, tensor: torch.Tensor, timeout_s: float | None = None) -> None:
        """Sum the tensor over all ranks, in place. A CPU tensor is copied to the device and back."""
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        with torch.cuda.device(self._device), torch.no_grad():
            there = tensor.to(self._device)
            work = self._backend.allreduce([there])
            work.wait()  # makes the current stream wait, not this thread
            done = torch.cuda.Event()
            done.record()
            try:
                wait_for(work, done, self._fence, time.monotonic() + limit_s)
            except RuntimeError:
                self.abort()
                raise
            if there is not tensor:
                tensor.copy_(there)

    def abort(self) -> None:
        if self._fence.announce_abort():
            self._backend.abort()


@contextlib.contextmanager
def _environment(**variables: str) -> Generator[None]:
    """Set environment variables within the context.

    The old values are restored afterwards, so that groups which the script creates are not affected.
    """
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


T = TypeVar("T")


def in_stream_order(tensor: torch.Tensor, act: Callable[[], T]) -> Callable[[], T]:
    """Wrap `act`, which uses `tensor`, so that another thread can run it.

    The wrapped function runs `act` on the other thread's CUDA stream, after all work that the caller has queued
    on its current stream so far. It returns when the work that `act` has queued is done.
    """
    if not tensor.is_cuda:
        return act
    ready = torch.cuda.Event()
    ready.record(torch.cuda.current_stream(tensor.device))

    def act_in_order() -> T:
        with torch.cuda.device(tensor.device):
            stream = torch.cuda.current_stream()
            stream.wait_event(ready)
            done = act()
            stream.synchronize()
        return done

    return act_in_order
