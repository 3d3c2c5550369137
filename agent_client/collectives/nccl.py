"""A NCCL group that can be made anew and given up while a peer is dead or stopped.

After an abort NCCL's kernels end, and their events look as if they had completed. So what has completed is looked at
under the lock under which an abort is announced: a collective counts as done only if none was announced before.
A lost peer by itself ends nothing here (torch would end the process; that is switched off): the kernel goes on until
the quorum is revoked, or its time is over.
"""

import contextlib
import os
import threading
import time
from collections.abc import Generator
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import distributed
from torch.distributed import PrefixStore, Store

from agent_client.collectives.gloo import connect_store
from agent_client.collectives.group_spec import GroupSpec
from agent_client.collectives.open_groups import enlist
from agent_client.errors import ConfigurationError

POLL_S = 0.0001
NEVER = timedelta(days=365)


class NcclConnector:
    def __init__(self, device: int | None = None) -> None:
        """For the CUDA device of that number, or for the one that is current here.

        Raises ConfigurationError without a device, or where torch was built without NCCL.
        """
        if not distributed.is_nccl_available() or not torch.cuda.is_available():
            raise ConfigurationError("process_group: nccl needs a CUDA device, and a torch that was built with NCCL")
        self.device = torch.device("cuda", torch.cuda.current_device() if device is None else device)

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

    def close(self) -> None:
        """Nothing is kept between groups."""


class Fence:
    """Between what has completed and what was aborted: a collective is on one side of it, for all threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_down = False

    def let_down(self) -> bool:
        """To be called before an abort; whether it is the first."""
        with self._lock:
            was_down, self._is_down = self._is_down, True
        return not was_down

    def has_passed(self, done: "Event") -> bool:
        """Whether `done` has completed. Raises RuntimeError once an abort was announced."""
        with self._lock:
            if self._is_down:
                raise RuntimeError("the NCCL group was aborted")
            return done.query()


class Event(Protocol):
    """As CUDA's."""

    def query(self) -> bool: ...


class NcclGroup:
    """all_reduce is for one thread at a time; abort for any."""

    def __init__(
        self, store: Store, rank: int, size: int, device: torch.device, *, connect_timeout_s: float, timeout_s: float
    ) -> None:
        """Meets all peers of the same `store`. Raises RuntimeError if one does not come within `connect_timeout_s`."""
        self._device = device
        self._timeout_s = timeout_s
        self._fence = Fence()
        with _environment(TORCH_NCCL_ASYNC_ERROR_HANDLING="0", TORCH_NCCL_NONBLOCKING_TIMEOUT=str(connect_timeout_s)):
            self._backend: Any = distributed.ProcessGroupNCCL(store, rank, size, _options())
            try:
                self._backend.eager_connect_single_device(device)
                self.all_reduce(torch.zeros(1, device=device), connect_timeout_s)
            except RuntimeError:
                self.abort()
                raise
        enlist(self)

    def all_reduce(self, tensor: torch.Tensor, timeout_s: float | None = None) -> None:
        """The sum over all ranks, in place; returns when it is there. What is on the CPU goes to the device and back.

        Raises RuntimeError after an abort, or when its time is over; the group is of no use then.
        """
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        with torch.cuda.device(self._device), torch.no_grad():
            there = tensor.to(self._device)
            self._backend.allreduce([there]).wait()  # makes the current stream wait, not this thread
            self._wait(_recorded(), time.monotonic() + limit_s)
            if there is not tensor:
                tensor.copy_(there)

    def abort(self) -> None:
        """End every collective under way. From any thread; more than once does no harm."""
        if self._fence.let_down():
            self._backend.abort()

    def _wait(self, done: Event, ends_at: float) -> None:
        while not self._fence.has_passed(done):
            if time.monotonic() >= ends_at:
                self.abort()
                raise RuntimeError("the NCCL collective did not end in time: a peer is lost, stopped or slow")
            time.sleep(POLL_S)


def _recorded() -> torch.cuda.Event:
    event = torch.cuda.Event()
    event.record()
    return event


def _options() -> Any:
    options: Any = distributed.ProcessGroupNCCL.Options()
    options.config.blocking = 0  # or else a peer that never comes is waited for without end
    options._timeout = NEVER  # each collective has a time of its own
    return options


@contextlib.contextmanager
def _environment(**variables: str) -> Generator[None]:
    """torch reads these when a group is made; the script's own groups keep theirs."""
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
