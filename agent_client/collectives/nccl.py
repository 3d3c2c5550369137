"""A NCCL group that can be made anew and given up while a peer is dead or stopped.

After an abort NCCL's kernels end, and their events look as if they had completed. So what has completed is looked at
under the lock under which an abort is announced: a collective counts as done only if none was announced before.
Whoever waits looks for NCCL's errors itself, and aborts the group at the first one. torch's watchdog, which looks ten
times a second, must not be first: nccl_watchdog.py says why.
"""

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Generator
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch
from torch import distributed
from torch.distributed import PrefixStore, Store, distributed_c10d

from agent_client.collectives.gloo import connect_store
from agent_client.collectives.group_spec import GroupSpec, enlist
from agent_client.errors import ConfigurationError

log = logging.getLogger(__name__)


# -- nccl watchdog ------------------------------------------------------------
#
# What torch's watchdog of NCCL does when it is the first to see that a peer is lost, and how it is kept from that.
#
# The watchdog of a group looks at its collectives ten times a second. When one has failed, it sleeps for a minute, so
# that all ranks of the job can dump what they did, and tells the monitor of the process's first NCCL group. That one
# dumps, sleeps for eight minutes, and ends the process unless its group is over; who gives a group up waits for both
# sleeps. It is meant for jobs that end with their first failure. The first sleep was seen with torch 2.11; the rest
# is what ProcessGroupNCCL.cpp says.

DUMP = "TORCH_NCCL_DUMP_ON_TIMEOUT"
QUIET = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # it ends the process; where groups are aborted, torch asks for 0
    DUMP: "0",  # the monitor does not listen
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",  # a quarter of the watchdog's sleep
}
"""torch reads these when a group is made."""

WARNING = (
    f"the default process group has NCCL and was made with {DUMP} on, torch's default: torch may end this process "
    f"eight minutes after a peer was lost. Set {DUMP}=0 where this process is started, make the Agent before "
    "init_process_group, or take process_group: isolated:nccl"
)


def may_end_the_process(default_backends: str) -> bool:
    """`default_backends`: of the default group, which was made in this environment."""
    return "nccl" in default_backends and os.environ.get(DUMP, "1").lower() not in ("0", "n", "no", "f", "false")


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
        if may_end_the_process(_default_backends()):
            log.warning("%s", WARNING)
        os.environ.setdefault(DUMP, "0")  # for the default group, if it is still to be made

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


class Result(Protocol):
    """How a collective has ended: 0 well."""

    def done(self) -> bool: ...

    def value(self) -> int: ...


class Work(Protocol):
    """As torch's of NCCL."""

    def is_completed(self) -> bool:
        """Or it has failed: this looks for NCCL's errors."""
        ...

    def get_future_result(self) -> Result:
        """Done as soon as somebody has seen an error."""
        ...


def wait_for(work: Work, done: Event, fence: Fence, ends_at: float) -> None:
    """Until `done`, an event recorded behind `work`, has passed the fence.

    Raises RuntimeError when the group was aborted, when a peer is lost, and after `ends_at`, on time.monotonic.
    """
    while not fence.has_passed(done):
        if work.is_completed() and _has_failed(work):
            raise RuntimeError("NCCL has lost a peer")
        if time.monotonic() >= ends_at:
            raise RuntimeError("the NCCL collective did not end in time: a peer is lost, stopped or slow")
        time.sleep(POLL_S)


def _has_failed(work: Work) -> bool:
    """An older torch cannot tell: then the wait ends with the quorum, or with its time."""
    if not hasattr(work, "get_future_result"):
        return False
    result = work.get_future_result()
    return result.done() and result.value() != 0


class NcclGroup:
    """all_reduce is for one thread at a time; abort for any."""

    def __init__(
        self, store: Store, rank: int, size: int, device: torch.device, *, connect_timeout_s: float, timeout_s: float
    ) -> None:
        """Meets all peers of the same `store`. Raises RuntimeError if one does not come within `connect_timeout_s`."""
        self._device = device
        self._timeout_s = timeout_s
        self._fence = Fence()
        with _environment(**QUIET, TORCH_NCCL_NONBLOCKING_TIMEOUT=str(connect_timeout_s)):
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
            work = self._backend.allreduce([there])
            work.wait()  # makes the current stream wait, not this thread
            try:
                wait_for(work, _recorded(), self._fence, time.monotonic() + limit_s)
            except RuntimeError:
                self.abort()
                raise
            if there is not tensor:
                tensor.copy_(there)

    def abort(self) -> None:
        """End every collective under way. From any thread; more than once does no harm."""
        if self._fence.let_down():
            self._backend.abort()


def _recorded() -> torch.cuda.Event:
    event = torch.cuda.Event()
    event.record()
    return event


def _options() -> Any:
    options: Any = distributed.ProcessGroupNCCL.Options()
    options.config.blocking = 0  # or else a peer that never comes is waited for without end
    options._timeout = NEVER  # each collective has a time of its own
    return options


def _default_backends() -> str:
    """Of the default group, as torch says it: "cpu:gloo,cuda:nccl"; empty if there is none."""
    return distributed_c10d.get_backend_config() if distributed.is_initialized() else ""


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


# -- cuda streams -------------------------------------------------------------
#
# Work on a CUDA tensor that another thread does: in the order of the streams, and done when it says so.

T = TypeVar("T")


def in_stream_order(tensor: torch.Tensor, act: Callable[[], T]) -> Callable[[], T]:
    """`act`, for another thread: begins when what the caller has queued on its stream is done, and returns when what
    it queues itself is done. On the CPU `act` itself."""
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
