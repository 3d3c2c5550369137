"""Replacement for torch's ProcessGroup in which abort() interrupts every wait.

Waits for gloo on CPU tensors use collectives/gloo.py. This includes waits in C++: DDP's reducer waits for the future of
a collective, and this module supplies that future. All other calls go to torch and the backend. NCCL has its own abort.
"""

import contextlib
import math
import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import AllreduceOptions, PrefixStore, ProcessGroup, ProcessGroupGloo, Store, Work
from torch.futures import Future

from agent_client.collectives import gloo as gloo_wait
from agent_client.collectives.gloo import Connections, group_connections, socket_inodes
from agent_client.collectives.group_spec import register_group
from agent_client.collectives.observed import first_tensor, never_compiled

_ABORTED = "the process group was aborted because the generation of its run ended"
_UNDER_WAY = 1024  # more collectives than gloo runs at the same time, because it runs them in order
_REDUCE_SCATTERS = (
    "_reduce_scatter_base",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced",
)
_MESSAGES = ("send", "recv", "recv_anysource")


class InterruptibleGroup(ProcessGroup):
    """A ProcessGroup that can be aborted. It delegates to an inner torch group."""

    def __init__(self, store: Store, rank: int, size: int) -> None:
        super().__init__(rank, size)  # pyright: ignore[reportCallIssue]
        self._ranks: Any = ProcessGroup(store, rank, size)
        self._store = store
        self._before = socket_inodes()
        self._gloo: dict[ProcessGroupGloo, Connections] = {}
        self._waiter = Waiter()
        weakref.finalize(self, self._waiter.stop)
        self._under_way: deque[Any] = deque(maxlen=_UNDER_WAY)
        weakref.finalize(self, gloo_wait.release_later, self._under_way).atexit = False
        self._is_aborted = False
        register_group(self)

    def _register_backend(self, device: torch.device, backend_type: Any, backend: Any = None) -> None:
        """Register a backend for a type of device. The same backend may be registered for several types."""
        for group in (super(), self._ranks):
            group._register_backend(device, backend_type, backend)
        if isinstance(backend, ProcessGroupGloo) and backend not in self._gloo:
            store, size = PrefixStore(f"{device.type}/", self._store), self.size()
            self._gloo[backend] = group_connections(self._before, store, size) if size > 1 else Connections()

    def abort(self) -> None:
        if self._is_aborted:
            return
        self._is_aborted = True
        for connections in list(self._gloo.values()):
            connections.shut_down()
        super().abort()
        for backend in self._gloo:
            gloo_wait.keep_until_done(list(self._under_way), backend)

    @property
    def has_lost_peer(self) -> bool:
        """True if a peer has closed its connections, unless this rank has aborted the group."""
        return not self._is_aborted and any(connections.has_shut_down() for connections in list(self._gloo.values()))

    def run(self, method: str, *args: Any, **options: Any) -> Any:
        if self._is_aborted:
            raise RuntimeError(_ABORTED)
        backend = self._gloo_for(first_tensor(args))
        if backend is not None and method in _REDUCE_SCATTERS:
            return self._reduce_scatter(*args, **options)
        work = getattr(self._ranks, method)(*args, **options)
        if work is None or backend is None:
            return work
        is_message = method in _MESSAGES
        if not is_message:
            while self._under_way and self._under_way[0].is_completed():
                self._under_way.popleft()
            self._under_way.append(work)
        return InterruptibleWork(work, backend, self._gloo[backend], self._waiter, is_sliced=not is_message)

    def _reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> "ReduceScatter":
        """Run a reduce-scatter as an all-reduce, after which each rank keeps its part.

        torch does the same for gloo, but a wait for torch's version cannot be interrupted.
        """
        outputs, inputs = ([each] if isinstance(each, torch.Tensor) else each for each in (outputs, inputs))
        options: Any = AllreduceOptions()
        if opts is not None:
            options.reduceOp, options.timeout = opts.reduceOp, opts.timeout
        sums = [each.clone() for each in inputs]
        works = [self.run("allreduce", [each], options) for each in sums]
        return ReduceScatter(works, sums, outputs, self.rank(), self.size())

    def _gloo_for(self, tensor: torch.Tensor | None) -> ProcessGroupGloo | None:
        """Return the gloo backend that handles `tensor`, or None if the backend is not gloo.

        A barrier has no tensor, and any backend of the group may run it. So if `tensor` is None, return a backend only
        if all backends are gloo.
        """
        devices = self._device_types if tensor is None else [tensor.device]
        backends: list[Any] = [self._get_backend(device) for device in devices]
        return backends[0] if all(backend in self._gloo for backend in backends) else None


class InterruptibleWork(Work):
    """Wraps torch's Work handle for a gloo operation. Its waits end when the group is aborted."""

    def __init__(
        self, work: Any, backend: ProcessGroupGloo, connections: Connections, waiter: "Waiter", *, is_sliced: bool
    ) -> None:
        super().__init__()
        self._work = work
        self._backend = backend
        self._connections = connections
        self._waiter = waiter
        self._is_sliced = is_sliced  # False for a send or receive: when its wait times out, gloo breaks the group
        self._future: Any = None

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        if self._is_sliced:
            limit_s = timeout.total_seconds() or math.inf
            gloo_wait.wait(self._work, self._backend, self._connections.has_shut_down, limit_s)
        else:
            gloo_wait.wait_in_thread(self._work, self._connections.has_shut_down, timeout)
        return True

    def synchronize(self) -> None:
        self.wait()

    def get_future(self) -> Any:
        """Return a future that completes even if the group is aborted, unlike the future of torch's Work."""
        if self._future is None:
            ended: Any = Future()
            self._future = ended.then(self._value)
            self._waiter.wait_for(self, ended)
        return self._future

    def _value(self, _ended: Any) -> Any:
        self.wait()
        return self._work.get_future().value()


class ReduceScatter(Work):
    """Work handle for a reduce-scatter that runs as all-reduces. wait() copies this rank's parts to the outputs."""

    def __init__(
        self, works: Sequence[InterruptibleWork], sums: Sequence[Any], outputs: Sequence[Any], rank: int, size: int
    ) -> None:
        super().__init__()
        self._works = works
        self._parts = [(output, each.chunk(size)[rank]) for output, each in zip(outputs, sums, strict=True)]

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        for work in self._works:
            work.wait(timeout)
        for output, part in self._parts:
            output.copy_(part)
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)


class Waiter:
    """Waits for Work objects on its own thread, and completes the future of each.

    If gloo's threads completed the futures, they could deadlock: they need the GIL, which code that destroys the group
    holds while it waits for these threads.
    """

    def __init__(self) -> None:
        self._waited: queue.SimpleQueue[tuple[InterruptibleWork, Any] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def wait_for(self, work: InterruptibleWork, ended: Any) -> None:
        self._waited.put((work, ended))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="gloo futures", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        self._waited.put(None)

    def _run(self) -> None:
        while (waited := self._waited.get()) is not None:
            work, ended = waited
            with contextlib.suppress(RuntimeError):  # the future raises it again
                work.wait()
            ended.set_result(None)
            del waited, work, ended


def _interruptible(method: str) -> Callable[..., Any]:
    return never_compiled(lambda self, *args, **options: self.run(method, *args, **options))


def _forwarding(attribute: str, method: str) -> Callable[..., Any]:
    return lambda self, *args: getattr(getattr(self, attribute), method)(*args)


def _in_both(method: str) -> Callable[..., None]:
    def call(self: InterruptibleGroup, value: Any) -> None:
        getattr(ProcessGroup, method)(self, value)
        getattr(self._ranks, method)(value)  # pyright: ignore[reportPrivateUsage]

    return call


for _method in dir(ProcessGroup):
    if "-> c10d::Work" in (getattr(ProcessGroup, _method).__doc__ or ""):  # pybind's docstring
        setattr(InterruptibleGroup, _method, _interruptible(_method))
for _method in ("_set_default_backend", "_set_group_name", "_set_group_desc"):
    setattr(InterruptibleGroup, _method, _in_both(_method))
for _method in ("get_group_store", "_start_coalescing"):
    setattr(InterruptibleGroup, _method, _forwarding("_ranks", _method))
for _method in ("is_completed", "is_success", "exception", "result", "source_rank"):
    setattr(InterruptibleWork, _method, _forwarding("_work", _method))
