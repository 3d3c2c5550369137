"""A gloo process group that can be aborted while a peer is dead or suspended.

gloo's own abort() leaves wait() hanging until the peer's socket closes. So this module shuts down the group's connected
sockets instead, which makes wait() raise within milliseconds, at this rank and at every peer. It finds these sockets
among those that appear while the group connects. Other threads may open connections at the same time, but one end of
each gloo socket has an address at which a rank listens, and gloo publishes these addresses in the store. The module
duplicates the sockets' descriptors, because gloo closes its own and their numbers are reused. The listening socket must
not be shut down, or the process aborts.

When a connection closes, gloo fails the operations that are waiting for its peer, but not a send that is still queued
(gloo/transport/tcp/pair.cc, signalException). A queued send ends only when it times out. So after an abort, `wait`
gives up as soon as nothing can write to the tensors: all connections are closed and gloo's threads are idle. A gloo
thread has been observed to keep running after an abort. It gets SPINS_S seconds to read the rest of the socket's data
buffers.
"""

import contextlib
import math
import os
import queue
import select
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed import AllreduceOptions, PrefixStore, ProcessGroup, ProcessGroupGloo, Store, TCPStore
from torch.distributed.distributed_c10d import AllToAllOptions

from agent_client.collectives.group_spec import Connector, GroupSpec, register_group
from lighthouse_protocol.identity import parse_address

Inodes = frozenset[str]


class Connections:
    """The sockets of one process group. All methods are thread-safe and idempotent."""

    def __init__(self, sockets: Iterable[socket.socket] = ()) -> None:
        self._sockets = list(sockets)
        self._has_shut_down = False

    def __del__(self) -> None:
        for each in self._sockets:
            each.close()

    def shut_down(self) -> None:
        self._has_shut_down = True
        sockets, self._sockets = self._sockets, []
        for each in sockets:
            with contextlib.suppress(OSError):  # the peer has closed it
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def has_shut_down(self) -> bool:
        """Return whether this rank or a peer has shut down a socket. If so, shut down all others."""
        if self._has_shut_down:
            return True
        ends = select.poll()
        for each in self._sockets:
            if (descriptor := each.fileno()) >= 0:
                ends.register(descriptor, select.POLLRDHUP)
        if ends.poll(0):
            self.shut_down()
        return self._has_shut_down


def socket_inodes() -> Inodes:
    """Return the inodes of this process's sockets. Descriptor numbers are reused, so they do not identify sockets."""
    return frozenset(_descriptors())


def group_connections(before: Inodes, store: Store, size: int) -> Connections:
    """Return the connections of a newly connected group, whose ranks have published their addresses in `store`.

    `before` contains the inodes of the sockets that existed before the group connected.
    """
    published = b"".join(store.multi_get([f"0/{rank}" for rank in range(size)]))

    def is_published(family: int, host: str, port: int) -> bool:
        flow = bytes(4) if family == socket.AF_INET6 else b""  # a sockaddr: family, port, IPv6 flow label, address
        return port.to_bytes(2, "big") + flow + socket.inet_pton(family, host) in published

    return Connections(_duplicate_new_sockets(before, lambda own, peer: is_published(*own) or is_published(*peer)))


def store_connections(before: Inodes, port: int) -> Connections:
    """Return the connections to a store's server on `port`, except those whose inodes are in `before`."""
    return Connections(_duplicate_new_sockets(before, lambda _own, peer: peer[2] == port))


End = tuple[int, str, int]
"""Address of one end of a connection: family, host and port."""


def _duplicate_new_sockets(before: Inodes, is_wanted: Callable[[End, End], bool]) -> list[socket.socket]:
    """Duplicate the connected sockets that are not in `before` and whose addresses (own, peer) `is_wanted` accepts."""
    found: list[socket.socket] = []
    for inode, descriptor in _descriptors().items():
        if inode in before:
            continue
        try:
            copied = os.dup(descriptor)
        except OSError:
            continue
        try:
            duplicate = socket.socket(fileno=copied)
        except OSError:  # the number has been reused for another file
            os.close(copied)
            continue
        family = duplicate.family
        try:
            ends = [(family, *each[:2]) for each in (duplicate.getsockname(), duplicate.getpeername())]
        except OSError:  # a listening socket, or a peer that has closed
            ends = []
        if ends and family in (socket.AF_INET, socket.AF_INET6) and is_wanted(*ends):
            found.append(duplicate)
        else:
            duplicate.close()
    return found


def _descriptors() -> dict[str, int]:
    found: dict[str, int] = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            link = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
        if link.startswith("socket:"):
            found[link] = int(name)
    return found


SLICE_S = 0.05
SPINS_S = 5.0
FIRST_PAUSE_S = 0.02
MAX_PAUSE_S = 1.0
_GIVEN_UP = "the process group was aborted, and gloo did not complete its operations"
LET_GO_WITHIN_S = 1.0
THREADS = {"pt_gloo_runloop", "gloo_tcp_loop"}


def wait(work: Any, backend: Any, is_aborted: Callable[[], bool], limit_s: float = math.inf) -> None:
    """Wait until `work`, a gloo collective of `backend`, has completed.

    Raises:
        RuntimeError: The work failed, `is_aborted` returned True, or `limit_s` seconds have passed.
    """
    began_at, aborted_at = time.monotonic(), None
    while not _ends_within(work, SLICE_S):
        now = time.monotonic()
        if not is_aborted():
            if now - began_at > limit_s:
                raise RuntimeError(f"the collective did not end within {limit_s:g} s")
            continue
        aborted_at = now if aborted_at is None else aborted_at
        if (are_threads_idle() or now - aborted_at >= SPINS_S) and not _ends_within(work, SLICE_S):
            keep_until_done([work], backend)
            raise RuntimeError(_GIVEN_UP)


def keep_until_done(works: Sequence[Any], backend: Any) -> None:
    if not all(work.is_completed() for work in works):
        threading.Thread(target=_poll_until_done, args=(works, backend), name="gloo remains", daemon=True).start()


def release_later(works: Iterable[Any]) -> None:
    """Keep the last `works` of a destroyed group alive for LET_GO_WITHIN_S, so that gloo's threads do not free them.

    This avoids a deadlock. A gloo thread that drops the last reference needs the GIL to free the tensors, but C++
    code that destroys the group, such as DDP's reducer, holds the GIL while it is waiting for the thread.
    """
    timer = threading.Timer(LET_GO_WITHIN_S, list[Any].clear, [list(works)])
    timer.name, timer.daemon = "gloo remains", True
    timer.start()


def _poll_until_done(works: Sequence[Any], _backend: Any) -> None:
    """Poll until all works have completed.

    Do not call work.wait() instead: if it returns while the interpreter is exiting, the process aborts.
    """
    pause_s = FIRST_PAUSE_S  # most works end immediately
    while not all(work.is_completed() for work in works):
        time.sleep(pause_s)
        pause_s = min(MAX_PAUSE_S, 2 * pause_s)


def wait_in_thread(work: Any, is_aborted: Callable[[], bool], timeout: timedelta) -> None:
    """Wait for a send or receive on a separate thread. Raise RuntimeError if it fails or the group is aborted.

    Unlike a wait for a collective, this wait cannot be split into short waits, because a timeout breaks the group.
    """
    outcome: queue.SimpleQueue[RuntimeError | None] = queue.SimpleQueue()

    def report() -> None:
        try:
            work.wait(timeout)
        except RuntimeError as e:
            outcome.put(e)
        else:
            outcome.put(None)

    threading.Thread(target=report, name="gloo message", daemon=True).start()
    while True:
        was_aborted = is_aborted()
        with contextlib.suppress(queue.Empty):
            error = outcome.get(timeout=SLICE_S)
            break
        if was_aborted:
            raise RuntimeError(_GIVEN_UP)
    if error is not None:
        raise error


def _ends_within(work: Any, timeout_s: float) -> bool:
    """Wait up to `timeout_s` seconds. Return whether the work has completed, or raise RuntimeError if it failed."""
    try:
        work.wait(timedelta(seconds=timeout_s))
    except RuntimeError:
        if not work.is_completed():
            return False
        work.wait()  # the work may have succeeded just after the timeout
    return True


def are_threads_idle(tasks: Path = Path("/proc/self/task")) -> bool:
    """Return whether all of gloo's threads in this process are asleep.

    Older versions of torch do not name these threads. Then return whether all threads not started by Python are asleep.
    """
    found: dict[str, tuple[str, str]] = {}
    """Name and state (as in proc(5)) of each thread."""
    for task in tasks.iterdir():
        with contextlib.suppress(OSError):  # the thread has ended
            name, _, rest = (task / "stat").read_text().partition("(")[2].rpartition(")")
            found[task.name] = name, rest.split()[0]
    if {name for name, _ in found.values()} >= THREADS:
        states = {state for name, state in found.values() if name in THREADS}
    else:
        known = {str(each.native_id) for each in threading.enumerate() if not each.name.startswith("Dummy-")}
        states = {state for thread, (_, state) in found.items() if thread not in known}
    return states == {"S"}


class GlooGroup:
    def __init__(
        self, store: Store, rank: int, size: int, host: str, *, connect_timeout_s: float, timeout_s: float
    ) -> None:
        """Connect to all peers. Raise RuntimeError if a peer does not connect in time.

        The peers must use the same `store`, and be able to reach this rank at the address `host`.
        """
        self.rank = rank
        self.size = size
        self.store = store
        times = {"connect_timeout_s": connect_timeout_s, "timeout_s": timeout_s}
        self._connect_again = partial(GlooGroup, rank=rank, size=size, host=host, **times)
        self._for_torch: list[GlooGroup] = []
        before = socket_inodes()
        options: Any = ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
        options._devices = [ProcessGroupGloo.create_device(hostname=host)]
        options._timeout = timedelta(seconds=connect_timeout_s)
        self.backend: Any = ProcessGroupGloo(store, rank, size, options)
        self.backend._set_default_timeout(timedelta(seconds=timeout_s))
        self._connections = group_connections(before, store, size)
        register_group(self)

    def all_reduce(self, tensor: torch.Tensor, timeout_s: float | None = None) -> None:
        options: Any = AllreduceOptions()
        if timeout_s is not None:
            options.timeout = timedelta(seconds=timeout_s)
        wait(self.backend.allreduce([tensor], options), self.backend, self._is_over)

    def all_gather(self, row: torch.Tensor, timeout_s: float) -> torch.Tensor:
        """Return the rows of all ranks, stacked by rank. All rows must have the same shape and dtype.

        Each rank sends its row to all others at the same time. For small rows, this is faster than gloo's own
        all_gather, which takes one round for each peer.
        """
        options: Any = AllToAllOptions()
        options.timeout = timedelta(seconds=timeout_s)
        sent = row.expand(self.size, *row.shape).contiguous()
        rows = torch.empty_like(sent)
        wait(self.backend.alltoall_base(rows, sent, [], [], options), self.backend, self._is_over)
        return rows

    def for_torch(self, name: str) -> ProcessGroup:
        """Create a second process group of the same ranks, for modules such as DDP.

        These modules start collectives from their own threads. If they shared this group, the order of collectives
        could differ between ranks. abort() also aborts the second group. `name` must be the same on all ranks.
        """
        store = PrefixStore(name, self.store)
        ranks = self._connect_again(store)
        self._for_torch.append(ranks)
        kind = ProcessGroup.BackendType.GLOO
        group: Any = ProcessGroup(store, self.rank, self.size)
        group._set_default_backend(kind)
        group._register_backend(torch.device("cpu"), kind, ranks.backend)
        group._set_group_name(name)
        return group

    def abort(self) -> None:
        for group in self._for_torch:
            group.abort()
        self._connections.shut_down()

    def _is_over(self) -> bool:
        """Return whether this rank or a peer has aborted the group. gloo itself may not notice until the timeout."""
        if self._connections.has_shut_down():
            self.abort()
            return True
        return False


class GlooConnector(Connector):
    def connect(self, spec: GroupSpec) -> GlooGroup:
        return GlooGroup(
            PrefixStore(spec.prefix, connect_store(spec.store_address, spec.connect_timeout_s)),
            spec.rank,
            spec.size,
            spec.host,
            connect_timeout_s=spec.connect_timeout_s,
            timeout_s=spec.timeout_s,
        )


def connect_store(address: str, timeout_s: float) -> TCPStore:
    parsed = parse_address(address, "store_address")
    if not parsed.port:
        raise RuntimeError(f"store_address: {address!r} has no port; the group's manager advertised it (--store)")
    try:
        return TCPStore(
            parsed.host, parsed.port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s)
        )
    except (RuntimeError, ValueError) as e:
        raise RuntimeError(f"no TCPStore answers at {address}: {e}") from e
